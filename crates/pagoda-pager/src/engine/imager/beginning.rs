//! From the daemon's ticket to the moment in which the image begins: the VM stands still, and waits for this.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::fault::Refusal;

use crate::engine::paging::Paging;
use crate::image::{Answer, Ticket};

/// How long the end of direct I/O is waited for. The VMM has waited for its requests before.
const DIRECT_IO_MAX: Duration = Duration::from_millis(200);
/// Between two questions to the agent which of them have ended: a look takes it some 10 us.
pub const CLOCK_PAUSE: Duration = Duration::from_millis(1);

/// A ticket that is answered whatever happens. Only the first answer counts.
#[derive(Debug)]
pub struct Open(Arc<Ticket>);

impl Open {
    pub fn new(ticket: Arc<Ticket>) -> Open {
        Open(ticket)
    }

    /// Tells the daemon that the image exists.
    pub fn say_begun(&self) {
        self.0.answer(Answer::Begun);
    }

    /// Tells the daemon that there is no image, and why.
    pub fn refuse(&self, why: &str) {
        self.0.answer(Answer::Refused(why.to_owned()));
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.refuse("the VM's engine has ended");
    }
}

/// What is to be done about a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Wait,
    /// Ask the agent which direct I/O has ended, and wait.
    AskClock,
    /// No image begins: it was refused, or the daemon has given up.
    Over,
    /// The daemon waits for the answer from now on, however long that takes.
    Claimed,
}

/// The end of direct I/O is waited for.
#[derive(Debug)]
pub struct Waiting {
    pub ticket: Open,
    until: Instant,
    /// When the agent was asked last.
    asked: Option<Instant>,
}

impl Waiting {
    pub fn new(ticket: Open) -> Waiting {
        Waiting { ticket, until: Instant::now() + DIRECT_IO_MAX, asked: None }
    }

    /// Looks whether the image can begin.
    pub fn look(&mut self, paging: &Paging) -> Verdict {
        let now = Instant::now();
        let is_quiet = !paging.has_direct_io() && !paging.is_punching();
        if self.ticket.0.is_cancelled() {
            return Verdict::Over;
        }
        if paging.is_halted() {
            self.ticket.refuse("the VM is halted");
            return Verdict::Over;
        }
        if !is_quiet && now < self.until {
            // A request that has ended counts until the agent has looked.
            if self.asked.is_some_and(|asked| now - asked < CLOCK_PAUSE) {
                return Verdict::Wait;
            }
            self.asked = Some(now);
            return Verdict::AskClock;
        }
        if paging.is_punching() {
            // Of a page that becomes a hole unseen the image would get zeros.
            self.ticket.refuse("its VMM does not finish to give memory back");
            return Verdict::Over;
        }
        if self.ticket.0.claim() { Verdict::Claimed } else { Verdict::Over }
    }
}

/// Why the machine begins no image, for the user.
pub fn refusal_text(why: Refusal) -> &'static str {
    match why {
        Refusal::Unarmed => {
            "what the VM writes is not seen yet: its memory has another's userfaultfd, or had it just now"
        }
        Refusal::Pinned => "others may write the VM's memory unseen, for which it is pinned",
        Refusal::DirectIo => "direct I/O of its VMM did not end",
        Refusal::Borrowed => "it shares memory with other clones of its snapshot still",
    }
}
