//! The arbiter of moves: registers in the pool's etcd, asked on a thread of their own (`docs/protocol/move.md`, "Arbiter").
//!
//! No move waits for it: a question is handed in, and its answer comes later, to whoever has asked. If etcd is away the answer is
//! none, within a second or two, and is none for all that wait then: whoever still wants to know asks again. Which registers these are
//! is learned before any question, and a question about others has no answer. What the guest sees: nothing of all this.

pub mod shown;
pub mod worker;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pagoda_move::owner::{Claim, Registered};
use pagoda_move::units::{AttemptId, RegisterId};

type Answer = Box<dyn FnOnce(Option<Registered>) + Send>;

/// What has come of the questions of a move: none was answered yet, the last one was not, or what the register has.
pub type Said = Option<Option<Registered>>;

enum Job {
    Ask { vm: String, claim: Claim, answer: Answer },
    Remove(RegisterId, AttemptId),
}

/// How it is, as of the last answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub is_configured: bool,
    /// Which registers are asked, as long as they answer.
    pub register: Option<RegisterId>,
    /// Why the registers do not answer.
    pub trouble: Option<String>,
}

/// How the arbiter stands, and the queue to its thread.
#[derive(Debug, Default)]
pub struct Arbiter {
    standing: Mutex<Standing>,
    jobs: OnceLock<Sender<Job>>,
}

impl Arbiter {
    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn standing(&self) -> Standing {
        self.lock().clone()
    }

    /// Which registers this host asks, if it reaches any.
    pub fn register(&self) -> Option<RegisterId> {
        self.lock().register
    }

    /// Hands a question in. `answer` is called soon, by another thread or this one, and must not wait for anything.
    pub fn ask(&self, vm: &str, claim: Claim, answer: impl FnOnce(Option<Registered>) + Send + 'static) {
        let job = Job::Ask { vm: vm.to_owned(), claim, answer: Box::new(answer) };
        match self.jobs.get() {
            Some(jobs) => drop(jobs.send(job).map_err(|unsent| unanswered(unsent.0))),
            // None is configured here any more.
            None => unanswered(job),
        }
    }

    /// Nobody asks about this attempt any more. Its register is removed soon, or stays.
    pub fn remove(&self, register: RegisterId, attempt: AttemptId) {
        if let Some(jobs) = self.jobs.get() {
            let _ = jobs.send(Job::Remove(register, attempt));
        }
    }
}

fn unanswered(job: Job) {
    if let Job::Ask { answer, .. } = job {
        answer(None);
    }
}

/// Answers that wait for whoever has asked. There is one at a time.
#[derive(Debug)]
pub struct Answers {
    pub sender: Sender<Option<Registered>>,
    pub received: Receiver<Option<Registered>>,
    pub said: Said,
}

impl Default for Answers {
    fn default() -> Answers {
        let (sender, received) = channel();
        Answers { sender, received, said: None }
    }
}
