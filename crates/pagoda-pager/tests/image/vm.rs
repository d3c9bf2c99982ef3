//! A VM without a VMM: its memory, its agent, and the engines that serve it one after the other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pagoda_abi::Token;
use pagoda_abi::attach::Packet;
use pagoda_core::fault::Sharing;
use pagoda_core::stats::Metric;
use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkCount, PAGE_SIZE, PageCount};
use pagoda_image::{Image, Ledger};
use pagoda_pager::engine::{Origin, Parts, spawn};
use pagoda_pager::handle::{Command, Handle, Notice, Status, channel_pair};
use pagoda_pager::mapper::NewMapper;
use pagoda_pager::share::{Group, Member, table};
use pagoda_pager::space::{Region, Shard, Space};
use pagoda_pager::tier::compressed::CompressedTier;
use pagoda_pager::tier::image::ImageTier;
use pagoda_pager::tier::source::{ArrivalFiles, Arrivals, SourceTier};
use pagoda_pager::tier::{Stack, Tier};
use pagoda_sys::guest::Guest;
use pagoda_sys::process;
use pagoda_sys::ram::{LargeFolios, RamFile, RamView};
use pagoda_sys::socket::{Connection, Received, SharedMap};
use pagoda_sys::swapfile::{Reserve, SwapFile};
use pagoda_sys::uffd::{self, Uffd};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::vcpu::{Memory, Running};

/// A deadline for what happens at once on a working system.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const CHUNKS: u32 = 4;
pub const PAGES: u64 = CHUNKS as u64 * CHUNK_SIZE / PAGE_SIZE;
const BYTES: u64 = CHUNKS as u64 * CHUNK_SIZE;
const TOKEN: Token = Token([7; 16]);

/// What a VM has beside its memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kind {
    /// Pages in DRAM at most; 0: all.
    pub limit: u64,
    /// Bytes of compressed memory; 0: no such tier.
    pub compressed: u64,
    pub shares: bool,
    /// It gets what is recorded in its image, and what it needs is recorded.
    pub prefetch: bool,
}

/// What outlives an engine.
pub struct Vm {
    pub dir: PathBuf,
    pub guest: Guest,
    pub shared: SharedMap,
    kind: Kind,
    /// The image that it was made of.
    reads: Option<Arc<Image>>,
    ram: RamFile,
    uffd: OwnedFd,
    group: Option<Arc<Group>>,
    table: Option<RamFile>,
    vmm: Child,
    served: bool,
    /// Its pages come from another VM.
    arrives: bool,
    /// Its swap file, if somebody else has it too.
    swap: Option<SwapFile>,
    /// Of one that may run before all its pages have come.
    arrivals: Option<Arc<Arrivals>>,
    /// What the next engine is told of other processes that map its memory.
    pub mappers: Vec<NewMapper>,
}

/// An engine, from the daemon's side.
pub struct Engine {
    pub handle: Arc<Handle>,
    notices: Receiver<Notice>,
}

/// Whether the agent ends direct I/O that has completed when it is asked to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    Ends,
    Keeps,
}

impl Vm {
    pub fn new(name: &str, kind: Kind) -> Vm {
        Vm::made_of(name, kind, None)
    }

    /// A VM whose pages come from another VM.
    pub fn arriving(name: &str, kind: Kind) -> Vm {
        let mut vm = Vm::new(name, kind);
        vm.arrives = true;
        vm
    }

    /// A VM that may run before its pages have come.
    pub fn lacking(name: &str, kind: Kind) -> Vm {
        let mut vm = Vm::arriving(name, kind);
        vm.arrivals = Some(Arrivals::create(vm.arrival_files(), ChunkCount(CHUNKS)).unwrap());
        vm
    }

    /// What has come to it later, and is to come.
    pub fn arrivals(&self) -> Arc<Arrivals> {
        Arc::clone(self.arrivals.as_ref().expect("it has such pages"))
    }

    /// The daemon has died, and another one is there. Nobody has what the one before knew.
    pub fn reopen_arrivals(&mut self) {
        let start = Instant::now();
        if let Some(before) = self.arrivals.take() {
            // The thread that gives space back would have died with the daemon. Here it ends by itself.
            while Arc::strong_count(&before) > 1 {
                assert!(start.elapsed() < PATIENCE, "somebody has what the daemon before knew: {before:?}");
                std::thread::yield_now();
            }
        }
        let files = self.arrival_files();
        self.arrivals = files.exist().then(|| Arrivals::open(files, ChunkCount(CHUNKS)).unwrap());
    }

    pub fn arrival_files(&self) -> ArrivalFiles {
        ArrivalFiles::beside(&swap_path(&self.dir))
    }

    /// The files of its memory, for whoever fills them.
    pub fn ram_handles(&self) -> Vec<RamFile> {
        vec![RamFile::from_fd(owned(self.ram.as_fd()), BYTES).unwrap()]
    }

    /// Its swap file, for whoever fills it.
    pub fn swap_handle(&mut self) -> SwapFile {
        let swap = SwapFile::open(&swap_path(&self.dir), BYTES, Reserve::No).unwrap();
        let handle = swap.duplicate().unwrap();
        self.swap = Some(swap);
        handle
    }

    /// A VM whose pages are in this image.
    pub fn made_of(name: &str, kind: Kind, reads: Option<Arc<Image>>) -> Vm {
        // On a disk, for the swap file's direct I/O.
        let dir = PathBuf::from(format!("/var/tmp/pagoda-pager-test-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let ram = RamFile::create(name, BYTES, process::own_uid()).unwrap();
        let guest = Guest::map(&ram);
        let uffd = uffd::create().unwrap();
        drop(SwapFile::create(&swap_path(&dir), BYTES, Reserve::No).unwrap());
        let vmm = Process::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let group = kind.shares.then(|| Arc::new(Group::create(name, 1 << 16).unwrap()));
        let table = kind.shares.then(|| table::create(name, BYTES).unwrap());
        let shared = SharedMap::create().unwrap();
        let (served, arrives, swap, arrivals) = (false, false, None, None);
        let mappers = Vec::new();
        Vm { dir, guest, shared, kind, reads, ram, uffd, group, table, vmm, served, arrives, swap, arrivals, mappers }
    }

    /// An engine takes the VM, or takes it over from the one before.
    pub fn serve(&mut self, image: Option<Arc<Ledger>>) -> Engine {
        self.serve_with(image, Clock::Ends)
    }

    pub fn serve_with(&mut self, image: Option<Arc<Ledger>>, clock: Clock) -> Engine {
        let taken_over = std::mem::replace(&mut self.served, true);
        let ram = RamFile::from_fd(owned(self.ram.as_fd()), BYTES).unwrap();
        let uffd = Uffd::from_fd(self.uffd.try_clone().unwrap()).unwrap();
        uffd.enable().unwrap();
        let (view, small) = (ram.map(LargeFolios::Advise).unwrap(), ram.map(LargeFolios::Never).unwrap());
        let region = Region { addr: self.guest.at(0), ram, view, small };
        let shard = Shard { addr: self.guest.at(0), len: BYTES, uffd };
        let member = self.group.as_ref().zip(self.table.as_ref()).map(|(group, table)| {
            let table = RamFile::from_fd(owned(table.as_fd()), table.len()).unwrap();
            let number = group.join(Weak::new());
            Member::new(Arc::clone(group), table, TOKEN, number, !taken_over).unwrap()
        });
        let mut above: Vec<Box<dyn Tier>> = Vec::new();
        if self.kind.compressed > 0 {
            let files = CompressedTier::files(&self.dir, "vm");
            let tier = CompressedTier::open(&files, ChunkCount(CHUNKS), Bytes(self.kind.compressed), taken_over);
            above.push(Box::new(tier.unwrap()));
        }
        if let Some(image) = &self.reads {
            let path = self.dir.join("vm.image");
            let tier = if taken_over {
                ImageTier::open(image.clone(), &path)
            } else {
                ImageTier::create(image.clone(), &path)
            };
            let tier = tier.unwrap();
            above.push(Box::new(match self.kind.prefetch && !taken_over {
                true => tier.with_prefetch(image.clone(), "vm"),
                false => tier,
            }));
        }
        if let Some(arrivals) = &self.arrivals {
            above.push(Box::new(SourceTier::new(Arc::clone(arrivals))));
        }
        let swap = self.swap.take();
        let swap = swap.unwrap_or_else(|| SwapFile::open(&swap_path(&self.dir), BYTES, Reserve::No).unwrap());
        let (ours, theirs) = Connection::pair().unwrap();
        let (guest, shared) = (self.guest, SharedMap::from_fd(owned(self.shared.as_fd())).unwrap());
        let (welcomed, welcome) = channel();
        std::thread::spawn(move || be_agent(&theirs, guest, &shared, clock, &welcomed));
        let parts = Parts {
            name: "vm".to_owned(),
            space: Space::new(vec![region], vec![shard]).unwrap(),
            tiers: Stack::new(member, above, swap),
            shared: SharedMap::from_fd(owned(self.shared.as_fd())).unwrap(),
            agent: ours,
            welcome: Packet::Welcome { flags: 0 },
            pid: std::process::id(),
            pidfd: process::pidfd_open(self.vmm.id()).unwrap(),
            limit: PageCount(if self.kind.limit == 0 { PAGES } else { self.kind.limit }),
            min: PageCount(0),
            direct: false,
            protect: true,
            page_in: Default::default(),
            replacement: Default::default(),
            busy_poll: Duration::ZERO,
            pinned: None,
            origin: match (taken_over, &self.reads) {
                (true, _) => Origin::TakenOver,
                (false, Some(_)) => Origin::InTiers,
                (false, None) if self.arrives => Origin::Arriving,
                (false, None) => Origin::New,
            },
            image,
            sharing: if self.kind.shares { Sharing::PageOut } else { Sharing::Off },
            loan: None,
            mappers: std::mem::take(&mut self.mappers),
        };
        let (handle, inbox) = channel_pair().unwrap();
        let (sender, notices) = channel();
        spawn(parts, inbox, Box::new(move |notice| drop(sender.send(notice)))).unwrap();
        // A new VM waits for it, and must: without the engine, its pages are zeros.
        if !taken_over {
            welcome.recv_timeout(PATIENCE).unwrap();
        }
        Engine { handle: Arc::new(handle), notices }
    }

    /// Another mapping of its memory, with which no VMM should meddle.
    pub fn meddle(&self) -> RamView {
        self.ram.map(LargeFolios::Never).unwrap()
    }

    /// The file of its memory.
    pub fn ram_file(&self) -> OwnedFd {
        self.ram.as_fd().try_clone_to_owned().unwrap()
    }

    /// vCPUs run from now on.
    pub fn run(&self, memory: &Memory, seed: u64, steps: usize) -> Running {
        Running::start(self.guest, memory, seed, steps)
    }

    /// What ends the VMM, from any thread.
    pub fn killer(&mut self) -> impl FnMut() + Send + 'static {
        // A process that reads ends when nobody writes any more.
        let mut stdin = self.vmm.stdin.take();
        let pidfd = process::pidfd_open(self.vmm.id()).unwrap();
        move || {
            drop(stdin.take());
            wait_readable(pidfd.as_fd());
        }
    }

    /// What has a vCPU read a page, and waits until that is a fault which the engine has not read.
    pub fn faulter(&self, page: u64) -> impl Fn() + Send + 'static {
        let (uffd, guest) = (self.uffd.try_clone().unwrap(), self.guest);
        move || {
            drop(guest.read_aside(page));
            wait_readable(uffd.as_fd());
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Engine {
    pub fn send(&self, command: Command) {
        self.handle.send(command);
    }

    /// Waits until the VM is as it should be.
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&Status) -> bool) -> Arc<Status> {
        let start = Instant::now();
        loop {
            let status = self.handle.fresh_status();
            if is_so(&status) {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {status:?}");
        }
    }

    /// What the engine says next, but that the VM is near its limit; nothing once it has ended.
    pub fn next_notice(&self) -> Option<Notice> {
        self.notice_within(PATIENCE).expect("the engine says nothing")
    }

    /// The same, if it says something or ends in this time.
    pub fn notice_within(&self, max: Duration) -> Option<Option<Notice>> {
        loop {
            match self.notices.recv_timeout(max) {
                Ok(Notice::NearLimit) => {}
                Ok(notice) => return Some(Some(notice)),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Some(None),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => return None,
            }
        }
    }

    /// The engine lets go of the VM; what it said until then.
    pub fn detach(self) -> Vec<Notice> {
        self.send(Command::Detach);
        let said: Vec<Notice> = std::iter::from_fn(|| self.next_notice()).collect();
        assert_eq!(said.last(), Some(&Notice::Detached));
        said[..said.len() - 1].to_vec()
    }

    /// Gives pages back, as the guest does.
    pub fn discard(&self, first: u64, count: u64) {
        let (ours, theirs) = Connection::pair().unwrap();
        self.send(Command::Calls(ours));
        let packet = Packet::Discard { seq: 1, region: 0, offset: first * PAGE_SIZE, len: count * PAGE_SIZE };
        theirs.send(&packet, &[]).unwrap();
        theirs.set_patience(Some(PATIENCE)).unwrap();
        match theirs.recv().unwrap() {
            Received::Message { packet: Packet::Discarded { seq: 1 }, .. } => {}
            other => panic!("{other:?}"),
        }
    }

    /// Pages that this tier has.
    pub fn pages_in(&self, tier: &str) -> u64 {
        let status = self.handle.fresh_status();
        status.tiers.iter().find(|report| report.name == tier).expect("a tier of that name").counts.pages
    }

    /// Waits until so many pages are out of DRAM.
    pub fn wait_swapped(&self, pages: u64) {
        self.wait_for("pages are swapped", |status| status.stats.get(Metric::Swapped) >= pages);
    }
}

fn owned(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().unwrap()
}

fn wait_readable(fd: BorrowedFd<'_>) {
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(1));
}

fn swap_path(dir: &Path) -> PathBuf {
    dir.join("vm.swap")
}

/// Does for the engine what the shim's thread does.
fn be_agent(connection: &Connection, guest: Guest, shared: &SharedMap, clock: Clock, welcomed: &Sender<()>) {
    while let Ok(Received::Message { packet, .. }) = connection.recv() {
        let answer = match packet {
            Packet::Zap { seq, ranges } => {
                ranges.as_slice().iter().for_each(|range| guest.zap(range.addr, range.len).unwrap());
                Packet::Zapped { seq, epoch: shared.advance(), errno: 0 }
            }
            Packet::Clock { seq } => {
                if clock == Clock::Ends {
                    // All that is under way has completed, and was only not seen to have.
                    shared.finish_io(Some(0));
                }
                Packet::Clocked { seq }
            }
            Packet::Welcome { .. } => {
                let _ = welcomed.send(());
                continue;
            }
            Packet::Collapse { seq, .. } => Packet::Collapsed { seq, errno: 0, done: 0 },
            _ => continue,
        };
        if connection.send(&answer, &[]).is_err() {
            return;
        }
    }
}
