//! How the rest of the daemon talks to an engine: commands in, a status and notices out.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{ChunkOrder, Located, Pages};
use pagoda_core::policy::SampleCount;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::stats::Stats;
use pagoda_core::units::{ChunkIdx, PageCount, PageIdx};
use pagoda_image::{ImageId, Prepared};
use pagoda_sys::process::Wake;
use pagoda_sys::socket::Connection;

use crate::image::{ImageStatus, Ticket};
use crate::latency::Histogram;
use crate::mapper::NewMapper;
use crate::tier::Report;
use crate::tier::remote::RemoteNumbers;

/// How long a caller waits for a fresh status before it takes the last one: an engine that does not answer by then is
/// waiting for its disk or for memory.
const STATUS_WAIT: Duration = Duration::from_millis(200);
/// How long the agent may take to open the gate or shut it: it may be unmapping pages of a large VM.
const GATE_WAIT: Duration = Duration::from_secs(2);
/// How long a look at what was written may take: some 20 us a chunk, and the first one arms the VM.
const LOOK_WAIT: Duration = Duration::from_secs(60);
/// How long an engine may take to begin to serve a VM that has arrived.
const ARRIVE_WAIT: Duration = Duration::from_secs(30);

/// What an engine can be told.
#[derive(Debug)]
pub enum Command {
    /// The most pages that the VM may have in DRAM from now on.
    SetLimit(PageCount),
    /// The fewest pages that page-out leaves in DRAM.
    SetMin(PageCount),
    /// The cause of a stall is gone.
    Continue,
    /// Every chunk that the VM borrows of its snapshot becomes its own, so that the template is needed no more.
    OwnAll,
    /// Never evict from now on.
    Pin(String),
    /// The shim's agent is back on a new connection.
    Agent(Connection),
    /// A connection for the VMM's own calls.
    Calls(Connection),
    /// Another process is going to map the VM's memory.
    Mapper(NewMapper),
    /// A sampling period begins with these pages, the one before ends. Those outside the VM are ignored.
    Sample(Vec<PageIdx>),
    /// Miss-ratio curve on or off. It begins anew each time it is switched on.
    WatchCurve(bool),
    /// Whether the guest's faults may fill holes with large folios while the VM is unarmed. They may to begin with.
    LargeFolios(bool),
    /// The shim's gate is to be open, so that QEMU finds the capability `x-ignore-shared`, or shut.
    Gate { open: bool, asker: Sender<GateAnswer> },
    /// Frames equal to these pages may exist now.
    LookAgain(Vec<PageIdx>),
    /// Whether a later image may refer to those that begin from now on: the VM stays armed behind them. It may not to begin
    /// with.
    FollowImages(bool),
    /// An image is to begin soon: from now on the VM is armed, and its pages are protected while it runs. Whatever was prepared
    /// before is given up.
    PrepareImage(Prepared),
    /// The VM stands still: the image that was prepared begins, or the ticket says why not. It is prepared no more then.
    BeginImage(Arc<Ticket>),
    /// No image is to begin: preparation ends. Its files are the daemon's to remove.
    CancelImage,
    /// This image is about to be removed: the VM holds nothing more for it.
    RemoveImage(ImageId),
    /// The VM moves to another host, or moves no more: from now on [`Command::LookForWrites`] and [`Command::CopyOut`] are
    /// answered, or they are no more. The VM stays armed meanwhile. No image is begun before it is over.
    Move(bool),
    /// The VM moves to where it has less DRAM than memory: which of its chunks are hot is to be known soon ([`Event::LearnHeat`]).
    ///
    /// [`Event::LearnHeat`]: pagoda_core::fault::Event::LearnHeat
    LearnHeat,
    /// Which pages may have been written since the last look? They are protected again before the answer. The first answer has all
    /// pages.
    LookForWrites(Sender<Result<Look, String>>),
    /// Copies what these pages hold now.
    CopyOut(CopyOrder),
    /// Which chunks are hot?
    AskOrder(Sender<ChunkOrder>),
    /// Which pages may hold something else than zeros? By chunk, in order; no set is empty.
    AskContent(Sender<Vec<(ChunkIdx, PageSet)>>),
    /// `true`: the VM stands still for its last pages, so copies may take all of the engine's time.
    HurryMove(bool),
    /// From now on the first write to a page since the last look waits so long, if one of these threads makes it: the guest's
    /// processors. Everybody else, and every other fault, is answered as ever. No delay and no threads: nobody waits. The end of the
    /// move and [`Command::HurryMove`] end it.
    SlowWriters { delay: Duration, threads: Vec<u32> },
    /// All pages of a VM that has come from another host are in their places, which nobody but the daemon has written: the engine
    /// serves it from now on. Pages that are missing come later, to the tier of its source; what has come of them before counts no more.
    /// See [`crate::engine::Origin::Arriving`].
    Arrived { found: Vec<Located>, asker: Sender<Result<(), String>> },
    /// Publish a fresh status.
    Refresh,
    /// The daemon ends: let go of the VM, which waits for the next daemon.
    Detach,
}

/// What a VM has written since the last look. See [`Command::LookForWrites`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Pages that may have changed, by chunk, in order; no set is empty.
    pub written: Vec<(ChunkIdx, PageSet)>,
    /// The value of the clock of direct I/O behind their protection.
    pub protected_at: u64,
    /// When the oldest direct I/O that is in flight now began, by the same clock: `u64::MAX` if none is, 0 if it cannot be told.
    pub oldest_io: u64,
}

/// Pages to be copied. See [`Command::CopyOut`].
#[derive(Clone, Debug)]
pub struct CopyOrder {
    /// Which. Copies come in any order, and a run may come in pieces.
    pub pages: Pages,
    /// Where each copy goes. It is never waited for.
    pub to: Sender<Copied>,
    /// A thread of the guest waits for it: it comes before those that were asked for earlier.
    pub is_urgent: bool,
    /// Where it goes if it can.
    pub way: Way,
}

/// Where copies of pages go that a move has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The copies go to whoever has asked for them.
    Send,
    /// Into the tier that is handed over, so that none has to be sent. What that does not take goes to whoever has asked.
    Place,
}

/// What some pages held at some moment after they were asked for.
#[derive(Debug)]
pub struct Copied {
    pub pages: Pages,
    pub content: Content,
}

/// The content of the pages that a [`Copied`] names, or why there is none.
#[derive(Debug)]
pub enum Content {
    /// 4096 bytes a page, which may be zeros too.
    Bytes(Vec<u8>),
    /// Nobody has written them since they became zeros.
    Zeros,
    /// It is in a tier that is handed over to whoever the VM moves to, and stays there unchanged. If the page is written, the next look
    /// says so.
    HandedOver,
    /// The tier that is handed over was given what they held, and has it. The VM's own tier has nothing of that. If a page is written, the
    /// next look says so.
    Placed,
    /// They cannot be read, and why.
    Failed(String),
}

/// What became of [`Command::Gate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateAnswer {
    /// The gate is as wanted.
    Done,
    /// The agent is not connected, and the gate shut.
    NoAgent,
    /// The agent hung up before it answered, and the gate is shut.
    Lost,
}

/// Why the shim's gate is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// The shim's agent is not connected: [`GateAnswer::NoAgent`].
    #[error("the agent in the VM's process is away")]
    NoAgent,
    /// The agent hung up instead of an answer: [`GateAnswer::Lost`].
    #[error("the shim in the VM's process is of an older version, which cannot open its gate, or it has just ended")]
    Refused,
    /// No answer came in time.
    #[error("the VM's engine or its agent did not answer within {} s", GATE_WAIT.as_secs())]
    Silent,
    /// There is no engine any more.
    #[error("the VM's engine has ended")]
    Ended,
}

/// What an engine says on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The VM has to be stopped; the text says why and what to do.
    Stalled(String),
    /// The VM is about to have all that its limit allows. Said once for each limit.
    NearLimit,
    /// The image has all pages, and needs the VM no more.
    ImageFilled(ImageId),
    /// The image is lost, and why. Its files say so too, or will as soon as their disk takes it.
    ImageLost(ImageId, String),
    /// The VMM ended. What the engine says of an image comes before this.
    Exited,
    /// The engine ended after [`Command::Detach`].
    Detached,
}

/// A view of a VM from outside.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The VM's counters and gauges.
    pub stats: Stats,
    /// Whether the VM's RAM is registered with userfaultfd.
    pub armed: bool,
    /// Bytes in the RAM files.
    pub ram_bytes: u64,
    /// Bytes of the swap file on the disk.
    pub swap_bytes: u64,
    /// Why the VM stands still, if it is stalled or halted.
    pub stalled: Option<String>,
    /// How long the VM has been stalled.
    pub stalled_for: Duration,
    /// What it waits for outside this machine.
    pub waits: Option<String>,
    /// What is known of its remote tier, if it has one.
    pub remote: Option<RemoteNumbers>,
    /// What each of its tiers reports, in their order; the last is the swap file.
    pub tiers: Vec<Report>,
    /// The shim's agent is connected.
    pub agent: bool,
    /// Why it is never evicted.
    pub pinned: Option<String>,
    /// By cause, in the order of `FAULT_CAUSES`.
    pub latency: Vec<Histogram>,
    /// Bytes of the VM's tables in the daemon, and of what its tiers keep in this machine's memory.
    pub table_bytes: u64,
    /// What became of the period's pages so far.
    pub sample: SampleCount,
    /// Sampling periods begun since this engine started: [`Status::sample`] belongs to the last of them.
    pub sample_period: u64,
    /// Misses by size, at most 10 s old; `None` while it is switched off or nothing is known.
    pub curve: Option<Arc<Curve>>,
    /// The image that the VM has to do with.
    pub image: Option<ImageStatus>,
    /// The newest image, if one that begins now may refer to it, and of how many pages the VM still holds what it has.
    pub whole_image: Option<(ImageId, PageCount)>,
    /// Numbers the statuses that this engine publishes, from 1 on.
    pub generation: u64,
}

#[derive(Debug, Default)]
struct Board {
    shown: Mutex<Shown>,
    fresh: Condvar,
}

#[derive(Debug, Default)]
struct Shown {
    status: Arc<Status>,
    /// The engine has ended: this is its last status.
    is_last: bool,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The daemon's end of an engine: it sends commands, and reads the status.
#[derive(Debug)]
pub struct Handle {
    commands: Sender<Command>,
    wake: Wake,
    board: Arc<Board>,
}

/// The engine's end: it takes commands, and publishes the status.
#[derive(Debug)]
pub struct Inbox {
    commands: Receiver<Command>,
    wake: Wake,
    board: Arc<Board>,
}

/// Makes both ends.
///
/// # Errors
/// No eventfd could be made.
pub fn channel_pair() -> std::io::Result<(Handle, Inbox)> {
    let (sender, receiver) = channel();
    let wake = Wake::new()?;
    let board = Arc::new(Board::default());
    let inbox = Inbox { commands: receiver, wake: wake.try_clone()?, board: Arc::clone(&board) };
    Ok((Handle { commands: sender, wake, board }, inbox))
}

impl Handle {
    /// Sends a command; nothing happens if the engine has ended.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake();
        }
    }

    /// Has the shim's gate opened.
    ///
    /// # Errors
    /// It is not open then, or, where there was no answer, shut as soon as the agent does anything.
    pub fn open_gate(&self) -> Result<(), GateError> {
        self.ask_gate(true).inspect_err(|_| {
            // The answer comes in its turn, after what was not answered.
            let (asker, _) = channel();
            self.send(Command::Gate { open: false, asker });
        })
    }

    /// Has the shim's gate shut.
    ///
    /// # Errors
    /// There was no answer: it is shut as soon as the agent does anything.
    pub fn shut_gate(&self) -> Result<(), GateError> {
        self.ask_gate(false)
    }

    fn ask_gate(&self, open: bool) -> Result<(), GateError> {
        let (asker, answer) = channel();
        self.send(Command::Gate { open, asker });
        match answer.recv_timeout(GATE_WAIT) {
            Ok(GateAnswer::Done) => Ok(()),
            Ok(GateAnswer::NoAgent) => Err(GateError::NoAgent),
            Ok(GateAnswer::Lost) => Err(GateError::Refused),
            Err(RecvTimeoutError::Timeout) => Err(GateError::Silent),
            Err(RecvTimeoutError::Disconnected) => Err(GateError::Ended),
        }
    }

    /// Which pages may have been written since the last look. Whoever has no answer does not know what that look has found: the move is
    /// to be given up.
    ///
    /// # Errors
    /// It cannot be told, in words; the engine has ended, or does not answer.
    pub fn look_for_writes(&self) -> Result<Look, String> {
        let (asker, answer) = channel();
        self.send(Command::LookForWrites(asker));
        answered(&answer, LOOK_WAIT)?
    }

    /// The VM's chunks by heat, each once.
    ///
    /// # Errors
    /// The engine has ended, or does not answer.
    pub fn chunk_order(&self) -> Result<ChunkOrder, String> {
        let (asker, answer) = channel();
        self.send(Command::AskOrder(asker));
        answered(&answer, LOOK_WAIT)
    }

    /// Which pages may hold something else than zeros, by chunk, in order; no set is empty. All others are zeros, as long as the VM
    /// stands still and nobody else writes to it.
    ///
    /// # Errors
    /// The engine has ended, or does not answer.
    pub fn content(&self) -> Result<Vec<(ChunkIdx, PageSet)>, String> {
        let (asker, answer) = channel();
        self.send(Command::AskContent(asker));
        answered(&answer, LOOK_WAIT)
    }

    /// Has the engine serve a VM whose pages have arrived, except for those that are missing.
    ///
    /// # Errors
    /// It does not, and why. Then nothing may run the VM.
    pub fn arrived(&self, found: Vec<Located>) -> Result<(), String> {
        let (asker, answer) = channel();
        self.send(Command::Arrived { found, asker });
        answered(&answer, ARRIVE_WAIT)?
    }

    /// The status as last published.
    pub fn status(&self) -> Arc<Status> {
        Arc::clone(&self.board.lock().status)
    }

    /// A status published after the call, or the last one if the engine has ended or is too busy to answer.
    pub fn fresh_status(&self) -> Arc<Status> {
        self.status_after(self.ask_status())
    }

    /// Asks for a fresh status; what [`Handle::status_after`] wants to know. So many engines can be asked at once.
    pub fn ask_status(&self) -> u64 {
        let before = self.status().generation;
        self.send(Command::Refresh);
        before
    }

    /// The status that was asked for, or the last one if the engine has ended or is too busy to answer.
    pub fn status_after(&self, before: u64) -> Arc<Status> {
        let comes = |shown: &mut Shown| shown.status.generation <= before && !shown.is_last;
        let waited = self.board.fresh.wait_timeout_while(self.board.lock(), STATUS_WAIT, comes);
        let (shown, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&shown.status)
    }
}

fn answered<T>(answer: &Receiver<T>, wait: Duration) -> Result<T, String> {
    answer.recv_timeout(wait).map_err(|error| match error {
        RecvTimeoutError::Timeout => format!("the VM's engine did not answer within {} s", wait.as_secs()),
        RecvTimeoutError::Disconnected => "the VM's engine has ended".to_owned(),
    })
}

impl Inbox {
    /// The next command, if any.
    pub fn next(&self) -> Option<Command> {
        self.commands.try_recv().ok()
    }

    /// Becomes readable when there is a command.
    pub fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Publishes a status, and wakes those who wait for a fresh one.
    pub fn publish(&self, mut status: Status) {
        let mut shown = self.board.lock();
        status.generation = shown.status.generation + 1;
        shown.status = Arc::new(status);
        self.board.fresh.notify_all();
    }
}

impl Drop for Inbox {
    /// Who waits for a status has waited long enough: an engine that has ended publishes none.
    fn drop(&mut self) {
        self.board.lock().is_last = true;
        self.board.fresh.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_waited_for_as_long_as_there_is_an_engine() {
        let (handle, inbox) = channel_pair().unwrap();
        let before = handle.ask_status();
        inbox.publish(Status { ram_bytes: 7, ..Status::default() });
        assert_eq!(handle.status_after(before).ram_bytes, 7);
        let (handle, asked) = (Arc::new(handle), std::time::Instant::now());
        let waits: Vec<_> = (0..4)
            .map(|_| {
                let handle = Arc::clone(&handle);
                std::thread::spawn(move || (0..1000).for_each(|_| assert_eq!(handle.fresh_status().ram_bytes, 7)))
            })
            .collect();
        drop(inbox);
        waits.into_iter().for_each(|wait| wait.join().unwrap());
        // Each of a thousand waits would have taken its time-out.
        assert!(asked.elapsed() < STATUS_WAIT * 100);
    }
}
