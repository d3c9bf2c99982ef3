//! The process that lives as long as the outbox does. It keeps what another process needs to go on with it, and starts one
//! whenever one ends.
//!
//! ```text
//! QEMU -- vhost-user --> keeper -- the same --> the process that serves (`worker`)
//!                          | ^-- memory of each new file --' |
//!                          |                             files (`link`)
//!                          '------- starts ------> the transmitter
//! ```
//!
//! It looks at no guest's memory, no request of a guest and no client's. It keeps: what QEMU has said (QEMU says it once, for
//! its device for virtiofs cannot begin again), the memory of files, of the journal and of the table of requests, and the
//! sockets. It has one thread, for it starts processes by a plain fork: in its empty root there is no program to start.
//!
//! When a worker is killed, the guest's requests wait until the next one has taken over, a few milliseconds later; the transmitter
//! ends before that begins ([`sender`]). If the keeper is killed, both go with it, and so do all files: then QEMU's connection is closed
//! for good.
//!
//! When QEMU stops a ring, the guest's memory that it was made of, and that its requests name, may be anything else from then on: see
//! [`stop`].

mod backoff;
mod kept;
pub mod line;
mod message;
mod sender;
mod session;
mod stop;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_sys::process::fork;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;

use self::backoff::Backoff;
use self::kept::{Kept, Worker};
use self::line::Line;
use self::message::{Message, kind, receive, send};
use self::sender::Sender;
use self::session::{Session, begun, ring_of};
use crate::inflight::{RINGS, TABLE_BYTES, Table};
use crate::left::Left;
use crate::link::{Ends, pair};

/// So many workers may end over the same message of QEMU.
const TRIES_MAX: u32 = 3;

/// What a worker begins with.
#[derive(Debug)]
pub struct Start {
    pub left: Left,
    pub table: Table,
    /// Where QEMU's messages come. `None`: QEMU has gone.
    pub vmm: Option<UnixListener>,
    /// For how long QEMU has been gone.
    pub vmm_gone: Duration,
}

/// What the keeper's children do, each in its own process.
pub trait Roles {
    /// Serves. Gives the exit status.
    fn work(&mut self, start: Start) -> i32;
    /// Speaks to clients, until its process ends.
    fn transmit(&mut self, ends: Ends) -> i32;
}

/// What was opened before the host was left.
#[derive(Debug)]
pub struct Host {
    /// The host's source of random bytes.
    pub random: File,
    /// Takes what nobody is to hear.
    pub quiet: File,
}

/// QEMU's connection, and what it has said on it.
#[derive(Debug)]
struct Vmm {
    socket: UnixStream,
    session: Session,
    /// What it waits to be answered, and how many workers were asked.
    asked: Option<(Message, u32)>,
}

/// How a worker's time came to an end.
enum Ended {
    /// It has done all there was to do.
    Done,
    Killed,
    /// By the keeper, over no request.
    Stopped,
}

/// Memory that outlives the process that made it.
fn memory(name: &str) -> Result<File> {
    Ok(File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).context("make memory")?))
}

/// Has workers serve, one after another, until one has nothing left to do.
///
/// # Errors
/// No worker can be started.
pub fn keep(vmm: UnixListener, host: &Host, roles: &mut impl Roles) -> Result<()> {
    let (socket, _) = vmm.accept().context("accept the VMM")?;
    drop(vmm);
    let table_file = memory("pagoda-requests")?;
    table_file.set_len(TABLE_BYTES).context("make the table of requests")?;
    let table = Some(Table::map(table_file.try_clone()?).context("map the table of requests")?);
    let journal = [memory("pagoda-journal")?, memory("pagoda-journal")?];
    let mut keeper = Keeper {
        host,
        vmm: Some(Vmm { socket, session: Session::default(), asked: None }),
        vmm_gone: None,
        kept: Kept { memory: HashMap::new(), journal, table_file, table },
        sender: Sender::default(),
    };
    let mut backoff = Backoff::default();
    loop {
        let mut worker = keeper.start(roles).context("start the process that serves")?;
        let ended = keeper.serve(&mut worker, roles)?;
        keeper.sender.end().context("end the transmitter")?;
        match ended {
            Ended::Done => return Ok(()),
            Ended::Stopped => continue,
            Ended::Killed => {}
        }
        eprintln!("pagoda-outbox: the process that serves has ended and is started again");
        std::thread::sleep(backoff.after(worker.began.elapsed()));
    }
}

#[derive(Debug)]
struct Keeper<'a> {
    host: &'a Host,
    /// `None`: QEMU has gone.
    vmm: Option<Vmm>,
    /// When QEMU went, if it has.
    vmm_gone: Option<Instant>,
    kept: Kept,
    sender: Sender,
}

impl Keeper<'_> {
    fn start(&mut self, roles: &mut impl Roles) -> Result<Worker> {
        let (theirs, line) = Line::pair()?;
        let (listener, vhost) = match &self.vmm {
            Some(_) => {
                let (listener, vhost) = connection(&self.host.random)?;
                (Some(listener), Some(vhost))
            }
            None => (None, None),
        };
        if let Some(child) = fork().context("fork")? {
            let (woken, is_stopped) = (VecDeque::new(), false);
            return Ok(Worker { child, line, vhost, began: Instant::now(), woken, is_stopped });
        }
        // What is not needed is closed, or nobody would see its other end go.
        drop((line, vhost, self.vmm.take()));
        let vmm_gone = self.vmm_gone.map_or(Duration::ZERO, |since| since.elapsed());
        let status =
            self.kept.leave(theirs).map(|(left, table)| roles.work(Start { left, table, vmm: listener, vmm_gone }));
        std::process::exit(status.unwrap_or(1))
    }

    /// Starts a transmitter for this worker.
    fn start_transmitter(&mut self, worker: &Worker, roles: &mut impl Roles) {
        let forked = pair().and_then(|(theirs, ours)| Ok((fork()?, theirs, ours)));
        match forked {
            Ok((None, theirs, _)) => {
                // It closes all that it was not given; a mapping would stay.
                self.kept.table = None;
                std::process::exit(roles.transmit(theirs))
            }
            Ok((Some(child), _, ours)) => {
                self.sender.note_started(child);
                if worker.line.hand_over(&ours).is_err() {
                    // It has ended, or does not do what it should.
                    worker.child.kill();
                }
            }
            Err(error) => {
                eprintln!("pagoda-outbox: start the transmitter: {error}");
                self.sender.put_off();
            }
        }
    }

    /// Passes on what is said, until the worker has ended.
    fn serve(&mut self, worker: &mut Worker, roles: &mut impl Roles) -> Result<Ended> {
        self.sender.want();
        match self.tell(worker) {
            Ok(true) => {}
            Ok(false) => worker.child.kill(),
            Err(error) => {
                eprintln!("pagoda-outbox: {error:#}");
                // QEMU is there, and may give the guest's memory another use.
                worker.end_now()?;
                self.part(worker);
            }
        }
        loop {
            if self.sender.is_due() {
                self.start_transmitter(worker, roles);
            }
            let ready = self.wait(worker)?;
            if ready.ended {
                return self.end(worker);
            }
            if ready.sender {
                eprintln!("pagoda-outbox: the transmitter has ended and is started again");
                self.sender.note_ended().context("hear how the transmitter has ended")?;
            }
            if ready.line && !self.kept.hear(worker)? {
                // It is about to end, or has to: its files' memory would not be kept.
                worker.child.kill();
            }
            if ready.worker && !self.pass_answer(worker)? {
                worker.vhost = None;
            }
            if ready.vmm && !self.pass_message(worker)? {
                self.part(worker);
            }
        }
    }

    fn wait(&self, worker: &Worker) -> Result<Ready> {
        let ends = worker.child.pidfd();
        let mut polled = vec![PollFd::new(&ends, PollFlags::IN), PollFd::new(&worker.line, PollFlags::IN)];
        polled.extend(worker.vhost.as_ref().map(|vhost| PollFd::new(vhost, PollFlags::IN)));
        polled.extend(self.vmm.as_ref().map(|vmm| PollFd::new(&vmm.socket, PollFlags::IN)));
        let sender = self.sender.pidfd();
        polled.extend(sender.as_ref().map(|ends| PollFd::new(ends, PollFlags::IN)));
        let patience = self.sender.patience();
        rustix::io::retry_on_intr(|| poll(&mut polled, patience.as_ref())).context("wait")?;
        // In the order in which they were put there.
        let mut ready = polled.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        Ok(Ready {
            ended: next(),
            line: next(),
            worker: worker.vhost.is_some() && next(),
            vmm: self.vmm.is_some() && next(),
            sender: sender.is_some() && next(),
        })
    }

    /// Tells a new worker what QEMU has said, and has it look at the rings. Whether it is there still.
    ///
    /// # Errors
    /// Several workers have ended over what QEMU says now.
    fn tell(&mut self, worker: &Worker) -> Result<bool> {
        let (Some(vhost), Some(vmm)) = (&worker.vhost, &mut self.vmm) else { return Ok(true) };
        let told = vmm.session.told(|ring| self.kept.table().next_index(ring)).context("keep QEMU's descriptors")?;
        for message in told {
            let has_answer = message.has_answer();
            if send(vhost, &message).is_err() || has_answer && !self.kept.wait_answer(worker, vhost)? {
                return Ok(false);
            }
        }
        // It hears how to tell the guest of answers before it hears that it may look at a ring.
        (0..RINGS).for_each(|ring| vmm.session.wake(ring));
        match &mut vmm.asked {
            Some((_, tries)) if *tries >= TRIES_MAX => bail!("the VMM says what nobody can answer"),
            Some((message, tries)) => {
                *tries += 1;
                Ok(send(vhost, message).is_ok())
            }
            None => Ok(true),
        }
    }

    /// QEMU has gone, or nobody can serve it.
    fn part(&mut self, worker: &mut Worker) {
        (self.vmm, worker.vhost) = (None, None);
        self.vmm_gone.get_or_insert_with(Instant::now);
        // Whoever reads what QEMU says waits for the end of it, and that is now.
        let _ = rustix::stdio::dup2_stderr(&self.host.quiet);
    }

    /// From the worker to QEMU. Whether the worker is there.
    fn pass_answer(&mut self, worker: &mut Worker) -> Result<bool> {
        let (Some(vhost), Some(vmm)) = (&worker.vhost, &mut self.vmm) else { return Ok(false) };
        let Ok(Some(answer)) = receive(vhost) else { return Ok(false) };
        if let Some(ring) = worker.woken.pop_front() {
            vmm.session.wake(ring);
            return Ok(true);
        }
        if let Some((message, _)) = vmm.asked.take() {
            // Not zero: it was refused.
            let is_refused = message.flags & message::NEED_REPLY != 0 && answer.word(0) != 0;
            let (stopped, begun) = (stop::stopped(&message), begun(&message));
            if stopped.is_some() || !is_refused {
                vmm.session.note(message);
            }
            if let Some(ring) = stopped {
                self.kept.settle(worker, ring)?;
            }
            if let Some(ring) = begun {
                vmm.session.wake(ring);
            }
        }
        // If QEMU is gone, that is seen on its own socket.
        let _ = send(&vmm.socket, &answer);
        Ok(true)
    }

    /// From QEMU to the worker. Whether QEMU is there.
    fn pass_message(&mut self, worker: &mut Worker) -> Result<bool> {
        let Some(vmm) = &mut self.vmm else { return Ok(false) };
        let message = match receive(&vmm.socket) {
            Ok(Some(message)) if !stop::is_unknown(&message) => message,
            Ok(None) => return Ok(false),
            said => {
                let said = said.map(|said| said.map(|said| said.kind));
                eprintln!("pagoda-outbox: the VMM says what is not known: {said:?}");
                worker.end_now()?;
                return Ok(false);
            }
        };
        if stop::changes_a_running_ring(&message, &vmm.session) {
            worker.end_now()?;
        }
        if message.kind == kind::SET_VRING_BASE
            && let Some(ring) = ring_of(&message)
        {
            self.kept.table().begin(ring, message.word(4) as u16);
        }
        // If the worker is gone, the next one hears it.
        let _ = worker.vhost.as_ref().map(|vhost| send(vhost, &message));
        if message.has_answer() {
            vmm.asked = Some((message, 1));
            return Ok(true);
        }
        let begun = begun(&message);
        vmm.session.note(message);
        // What it does about a ring before it has heard this, it may tell nobody of. If QEMU does not wait for what it has asked, it gets
        // its answers in their order all the same.
        if let (Some(ring), Some(vhost), None) = (begun, &worker.vhost, &vmm.asked)
            && send(vhost, &Message::ask(kind::GET_FEATURES)).is_ok()
        {
            worker.woken.push_back(ring);
        }
        Ok(true)
    }

    /// What it has said before its end is heard.
    fn end(&mut self, worker: &Worker) -> Result<Ended> {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        while poll(&mut [PollFd::new(&worker.line.as_fd(), PollFlags::IN)], Some(&at_once)).is_ok_and(|ready| ready > 0)
            && self.kept.hear(worker)?
        {}
        let is_done = worker.child.wait().context("hear how the process that serves has ended")?;
        if worker.is_stopped {
            self.kept.table().forgive();
            return Ok(Ended::Stopped);
        }
        Ok(if is_done && self.vmm.is_none() { Ended::Done } else { Ended::Killed })
    }
}

/// Which of what is waited for is there.
struct Ready {
    ended: bool,
    line: bool,
    worker: bool,
    vmm: bool,
    sender: bool,
}

/// A connection that nobody else can have: its name is random, and it is used up at once.
fn connection(mut random_bytes: &File) -> Result<(UnixListener, UnixStream)> {
    let mut random = [0; 24];
    random_bytes.read_exact(&mut random).context("get random bytes")?;
    let address = SocketAddr::from_abstract_name(random).context("name a socket")?;
    let listener = UnixListener::bind_addr(&address).context("make a socket")?;
    let stream = UnixStream::connect_addr(&address).context("connect to the process that serves")?;
    Ok((listener, stream))
}
