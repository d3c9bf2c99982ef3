//! The rings: requests are taken out of them, carried out by a fixed number of threads, and answered.
//!
//! Each request is noted in a [table](crate::inflight) that outlives this process. If it takes over from another one, what that
//! one has left is answered first. What has the same effect when it is done twice is done again, once; what cannot harm is done
//! [always]; all else gets EIO. A guest that puts requests into its ring faster than they are carried out has no more of them taken than a
//! ring has heads.
//!
//! A ring that was stopped (it is not *ready* any more) has nothing taken out of it, and its memory is written only by requests that have a
//! mark in the table. The keeper waits for these, or ends this process, before QEMU hears that the ring has stopped.

mod always;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use vhost_user_backend::{VhostUserBackend, VringMutex, VringT};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::fuse::{InHeader, Opcode, OutHeader};
use virtiofsd::server::Server;
use vm_memory::{GuestAddressSpace, GuestMemory, GuestMemoryAtomic, GuestMemoryLoadGuard};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

use crate::chain::{Memory, OwnRing, parts};
use crate::filesystem::{GuestFiles, Now, as_request, session};
use crate::inflight::{HEADS_MAX, InFlight, RINGS, Request, Table};
use crate::outbox::{Again, Outbox, Progress, WAITING_MAX};
use crate::transfer;

/// Requests that are carried out at the same time. Those that wait for room are fewer, so metadata always goes through.
const THREADS: usize = WAITING_MAX + 8;
/// Numbers of feature bits (virtio 1.2, 2.7 and 6).
const INDIRECT_DESCRIPTORS: u64 = 1 << 28;
const EVENT_INDEX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

type Atomic = GuestMemoryAtomic<Memory>;
type Loaded = GuestMemoryLoadGuard<Memory>;
type Vring = VringMutex<Atomic>;

/// What a thread is to carry out.
enum Job {
    Popped(DescriptorChain<Loaded>),
    /// Another process has left it.
    Left(InFlight, Undecided),
}

/// Something that another process has left and that may still change what readers are to get.
struct Undecided(Arc<Requests>);

impl Undecided {
    fn new(requests: &Arc<Requests>) -> Undecided {
        requests.left.fetch_add(1, Ordering::SeqCst);
        Undecided(Arc::clone(requests))
    }
}

impl Drop for Undecided {
    fn drop(&mut self) {
        self.0.one_decided();
    }
}

/// A request that is carried out.
struct Carried {
    head: u16,
    request: Request,
    again: Again,
    undecided: Option<Undecided>,
}

struct Task {
    job: Job,
    head: u16,
    request: Request,
    vring: Vring,
}

/// What the threads need.
struct Requests {
    files: Server<GuestFiles>,
    outbox: Arc<Outbox>,
    table: Table,
    memory: RwLock<Option<Atomic>>,
    event_index: AtomicBool,
    /// Rings of which it was not looked what another process has left, and [`Undecided`] requests of it. At 0 readers get all that
    /// there is (`Space::hold`).
    left: AtomicUsize,
}

/// Takes requests out of the rings and has threads carry them out, as the head of this module says.
pub struct Backend {
    requests: Arc<Requests>,
    tasks: Sender<Task>,
    /// Whether what another process has left in a ring was looked at.
    is_recovered: [AtomicBool; RINGS],
    /// Rings in which there was something at the start.
    had_left: [bool; RINGS],
}

impl Backend {
    /// # Errors
    /// Threads cannot be started.
    pub fn start(outbox: &Arc<Outbox>, table: Table) -> io::Result<Backend> {
        let had_left: [bool; RINGS] = std::array::from_fn(|ring| table.is_busy(ring));
        let left = had_left.iter().filter(|had| **had).count();
        let requests = Arc::new(Requests {
            files: Server::new(GuestFiles(Arc::clone(outbox))),
            outbox: Arc::clone(outbox),
            table,
            memory: RwLock::default(),
            event_index: AtomicBool::new(false),
            left: AtomicUsize::new(left),
        });
        requests.resume_session()?;
        let (tasks, waiting) = channel();
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..THREADS {
            let (requests, waiting) = (Arc::clone(&requests), Arc::clone(&waiting));
            thread::Builder::new().name("requests".into()).spawn(move || carry_out(&requests, &waiting))?;
        }
        Ok(Backend { requests, tasks, is_recovered: Default::default(), had_left })
    }

    /// Answers what another process has left.
    fn recover(&self, ring: usize, vring: &Vring) {
        let left = self.requests.table.recover(ring, vring.get_ref().get_queue().next_used());
        for left in left {
            let job = Job::Left(left, Undecided::new(&self.requests));
            self.hand_out(Task { head: left.head, request: left.request, job, vring: vring.clone() });
        }
        if self.had_left[ring] {
            self.requests.one_decided();
        }
        // An answer may be in the ring that the guest was not told of.
        let _ = vring.signal_used_queue();
    }

    fn hand_out(&self, task: Task) {
        self.tasks.send(task).expect("the threads run as long as the process does");
    }

    /// Takes out of a ring what there is. Gives how many there were.
    fn take(&self, ring: usize, vring: &Vring, memory: &Atomic) -> usize {
        let mut taken = 0;
        loop {
            let mut state = vring.get_mut();
            let popped = state.get_queue_mut().iter(memory.memory()).ok().and_then(|mut there| there.next());
            let Some(chain) = popped else { return taken };
            taken += 1;
            let head = chain.head_index();
            match self.requests.table.take(ring, head) {
                Some(request) => {
                    drop(state);
                    self.hand_out(Task { job: Job::Popped(chain), head, request, vring: vring.clone() });
                }
                // No driver does that, so nobody waits for an answer.
                None => self.requests.table.skip(ring),
            }
        }
    }
}

/// Whether there is more in a ring; if not, the guest is to notify of the next. Nothing is written into a ring that was stopped.
fn has_more(vring: &Vring) -> bool {
    // Under one lock: whoever stops the ring waits for it.
    let mut state = vring.get_mut();
    state.get_queue().ready() && state.enable_notification().unwrap_or(false)
}

fn carry_out(requests: &Requests, waiting: &Mutex<Receiver<Task>>) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(task) = next else { return };
        let Some(memory) = requests.memory() else { continue };
        let (head, request) = (task.head, task.request);
        let bytes = match task.job {
            Job::Popped(chain) => {
                let carried = Carried { head, request, again: Again::No, undecided: None };
                requests.answer(&memory.memory(), chain, carried)
            }
            Job::Left(left, undecided) => requests.answer_left(&memory.memory(), left, &task.vring, undecided),
        };
        // What is no request gets an empty answer.
        requests.complete(&task.vring, head, request, bytes.unwrap_or(0));
    }
}

/// Whether a request may be carried out again, without it being known how far it has come.
fn may_be_done_again(opcode: Opcode) -> bool {
    use Opcode::{
        Access, Getattr, Getxattr, Init, Listxattr, Lookup, Lseek, Open, Opendir, Read, Readdir, Readdirplus, Setattr,
        Statfs, Write,
    };
    match opcode {
        Lookup | Getattr | Read | Statfs | Getxattr | Listxattr | Opendir | Readdir | Readdirplus | Access | Lseek => {
            true
        }
        Init => true,
        // The same bytes at the same place; the same size and mode.
        Write | Setattr => true,
        // What it has opened was closed before.
        Open => true,
        _ => false,
    }
}

impl Requests {
    fn memory(&self) -> Option<Atomic> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One ring was looked through for requests of another process, or one of those has changed all that it changes.
    fn one_decided(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.outbox.let_go();
        }
    }

    /// Gives the bytes of the answer.
    fn answer<M>(&self, memory: &Memory, chain: DescriptorChain<M>, carried: Carried) -> io::Result<usize>
    where
        M: std::ops::Deref + Clone,
        M::Target: GuestMemory + Sized,
    {
        let Carried { head, request, again, mut undecided } = carried;
        let mut reader = Reader::new(memory, chain.clone()).map_err(io::Error::other)?;
        let whole = reader.clone();
        let writer = Writer::new(memory, chain).map_err(io::Error::other)?;
        // Whatever it says, and it may say something else a moment later: only FORGET wants no answer, and it has no effect. The
        // library panics over some of these.
        if writer.available_bytes() < size_of::<OutHeader>() {
            return Ok(0);
        }
        let header: InHeader = reader.read_obj()?;
        match Opcode::try_from(header.opcode) {
            Ok(Opcode::Write) => {
                let note = |progress| match progress {
                    Progress::Done(bytes) => self.table.note_done(head, request, bytes),
                    Progress::Waits => drop(undecided.take()),
                };
                transfer::write(&self.outbox, &header, reader, writer, again, note)
            }
            Ok(Opcode::Read) => transfer::read(&self.outbox, &header, reader, writer),
            _ => {
                let now = Now { number: request.number(), is_again: again != Again::No };
                as_request(now, || self.ask_library(whole, writer))
            }
        }
    }

    fn ask_library(&self, reader: Reader<'_>, writer: Writer<'_>) -> io::Result<usize> {
        self.files.handle_message(reader, writer, None::<&mut ()>).map_err(io::Error::other)
    }

    fn answer_left(&self, memory: &Memory, left: InFlight, vring: &Vring, undecided: Undecided) -> io::Result<usize> {
        let (table, size) = {
            let state = vring.get_ref();
            (state.get_queue().desc_table(), state.get_queue().size())
        };
        let opcode_of = |ring: &mut OwnRing| -> io::Result<Opcode> {
            let mut reader: Reader<'_> = Reader::new(memory, ring.request()?).map_err(io::Error::other)?;
            let header: InHeader = reader.read_obj()?;
            Opcode::try_from(header.opcode).map_err(|_| ErrorKind::InvalidData.into())
        };
        let mut ring = parts(memory, table, size, left.head).and_then(|parts| OwnRing::new(&parts));
        let opcode = ring.as_mut().ok().and_then(|ring| opcode_of(ring).ok());
        let repeats = !left.is_again && opcode.is_some_and(may_be_done_again);
        // The guest was given nothing of what it has opened.
        self.outbox.forget_request(left.request.number(), repeats);
        let mut ring = ring?;
        let chain = ring.request()?;
        let mut reader: Reader<'_> = Reader::new(memory, chain.clone()).map_err(io::Error::other)?;
        let header: InHeader = reader.read_obj()?;
        let opcode = Opcode::try_from(header.opcode).map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
        if let Some(done) = always::carry_out(&self.outbox, opcode, &header, &mut reader) {
            return always::answer(Writer::new(memory, chain).map_err(io::Error::other)?, &header, done);
        }
        if repeats {
            self.table.note_again(left.head, left.request);
            let again = Again::Yes { done: left.done };
            let carried = Carried { head: left.head, request: left.request, again, undecided: Some(undecided) };
            return self.answer(memory, chain, carried);
        }
        let unknown = Err(io::Error::from_raw_os_error(libc::EIO));
        always::answer(Writer::new(memory, chain).map_err(io::Error::other)?, &header, unknown)
    }

    fn complete(&self, vring: &Vring, head: u16, request: Request, bytes: usize) {
        let mut state = vring.get_mut();
        let used = state.get_queue().next_used();
        let answered = self.table.complete(head, request, used, || {
            // A ring that is not there any more has nobody who waits.
            let _ = state.add_used(head, bytes as u32);
        });
        let is_wanted = !self.event_index.load(Ordering::Relaxed) || state.needs_notification().unwrap_or(true);
        if answered && is_wanted {
            let _ = state.signal_used_queue();
        }
    }

    /// Tells the library what was agreed at the mount, if another process has heard it.
    fn resume_session(&self) -> io::Result<()> {
        let agreed = self.outbox.space().session();
        if agreed == 0 {
            return Ok(());
        }
        let mut ring = session::request(agreed)?;
        let memory = ring.memory.clone();
        let chain = ring.request()?;
        let reader = Reader::new(&memory, chain.clone()).map_err(io::Error::other)?;
        let writer = Writer::new(&memory, chain).map_err(io::Error::other)?;
        as_request(Now::RESUME, || self.ask_library(reader, writer)).map(drop)
    }
}

impl VhostUserBackend for Backend {
    type Bitmap = BitmapMmapRegion;
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        RINGS
    }

    fn max_queue_size(&self) -> usize {
        usize::from(HEADS_MAX)
    }

    // No state of this device can be moved, so nothing that moves need is offered.
    fn features(&self) -> u64 {
        VERSION_1 | INDIRECT_DESCRIPTORS | EVENT_INDEX | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn set_event_idx(&self, enabled: bool) {
        self.requests.event_index.store(enabled, Ordering::Relaxed);
    }

    fn update_memory(&self, memory: Atomic) -> io::Result<()> {
        *self.requests.memory.write().unwrap_or_else(PoisonError::into_inner) = Some(memory);
        Ok(())
    }

    // By which the library ends the thread that serves the rings, and it waits for that.
    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()
    }

    // An error here would end the thread that serves the rings, so there is none.
    fn handle_event(&self, ring: u16, _: EventSet, vrings: &[Vring], _: usize) -> io::Result<()> {
        let ring = usize::from(ring);
        let (Some(vring), Some(memory)) = (vrings.get(ring), self.requests.memory()) else { return Ok(()) };
        if !self.is_recovered[ring].swap(true, Ordering::Relaxed) {
            self.recover(ring, vring);
        }
        if !self.requests.event_index.load(Ordering::Relaxed) {
            self.take(ring, vring, &memory);
            return Ok(());
        }
        // The queue looks at the index once, so what comes meanwhile is looked for until there is nothing. A ring that says that
        // there is more and gives nothing was stopped, or has an index that no driver gives it: it is looked at when it is kicked.
        let mut is_first = true;
        while self.take(ring, vring, &memory) > 0 || is_first {
            if !has_more(vring) {
                break;
            }
            is_first = false;
        }
        Ok(())
    }
}
