//! A VM that stands still for its move, from the moment of its device state.
//!
//! A thread has QEMU save the state, which stops the VM, and keeps the monitor from then on. It lets the VM run when it is told to
//! and never otherwise: a [`Pause`](state::Pause) that is dropped leaves the VM as it is. If the state cannot be saved, [`state::save`]
//! has let the VM run again by itself. That is before any grant: only a state that was saved leads to one.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use pagoda_api::in_full;
use pagoda_core::units::Bytes;

use crate::qmp::state::{self, Gate, Saved};
use crate::qmp::{Monitor, QemuTime};

/// What became of the stop.
#[derive(Debug)]
pub enum Outcome {
    /// The VM stands still.
    Saved { state: Vec<u8>, was_running: bool, since: Option<QemuTime> },
    /// It is as it was, unless something of the attempt is left that has to be undone.
    Failed { why: String, is_left: bool },
}

enum Ask {
    Check(Sender<Result<()>>),
    Resume(Sender<Result<()>>),
}

/// What is done while the VM stands still, before its state is saved, and until when.
pub type BeforeState = Box<dyn FnOnce(Instant) -> Result<()> + Send>;

/// The thread. When this is dropped, the VM stays as it is.
#[derive(Debug)]
pub struct Standing {
    asks: Sender<Ask>,
}

impl Standing {
    /// Has the VM stopped. `report` hears what became of it.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn begin(
        qmp: Arc<Monitor>,
        gate: impl Gate + Send + 'static,
        max: Bytes,
        deadline: Instant,
        before: Option<BeforeState>,
        report: impl FnOnce(Outcome) + Send + 'static,
    ) -> std::io::Result<Standing> {
        let (asks, asked) = channel();
        let keep = move || keep(&qmp, &gate, (max, deadline, before), report, &asked);
        thread::Builder::new().name("move-stop".into()).spawn(keep)?;
        Ok(Standing { asks })
    }

    /// That the VM has stood still since its state was saved.
    ///
    /// # Errors
    /// It has not, or nobody can tell.
    pub fn check(&self) -> Result<()> {
        self.ask(Ask::Check)
    }

    /// Lets the VM run, which has stood still until now.
    ///
    /// # Errors
    /// It has not, or does not run: that is to be undone.
    pub fn resume(self) -> Result<()> {
        self.ask(Ask::Resume)
    }

    fn ask(&self, ask: impl FnOnce(Sender<Result<()>>) -> Ask) -> Result<()> {
        let (asker, answer) = channel();
        let gone = || anyhow!("nobody keeps the VM");
        self.asks.send(ask(asker)).map_err(|_| gone())?;
        answer.recv().ok().with_context(|| gone().to_string())?
    }
}

fn keep(
    qmp: &Monitor,
    gate: &dyn Gate,
    (max, deadline, mut before): (Bytes, Instant, Option<BeforeState>),
    report: impl FnOnce(Outcome),
    asked: &Receiver<Ask>,
) {
    let is_something = before.is_some();
    let mut once = || before.take().map_or(Ok(()), |before| before(deadline));
    let before: Option<state::Before<'_>> = if is_something { Some(&mut once) } else { None };
    let Saved { state, pause } = match state::save_after(qmp, gate, max, deadline, before) {
        Ok(saved) => saved,
        Err(error) => {
            let is_left = error.left.is_some();
            return report(Outcome::Failed { why: in_full(&error), is_left });
        }
    };
    report(Outcome::Saved { state, was_running: pause.was_running(), since: qmp.events().last_stop });
    // An answer that nobody takes is no news.
    while let Ok(ask) = asked.recv() {
        match ask {
            Ask::Check(asker) => drop(asker.send(pause.check())),
            Ask::Resume(asker) => return drop(asker.send(state::resume(pause).map(drop))),
        }
    }
}
