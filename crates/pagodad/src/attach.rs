//! The attach socket: `pagoda run` fetches the monitor here, the shim takes RAM, hands the VM over, and comes back to a new
//! daemon.
//!
//! Each connection gets a thread until it has said what it is; then its engine owns it. A peer proves by the token which
//! VM it is, and by the kernel's word (`SO_PEERCRED`) that it is the user and, later, the process that it was.

mod gate;
mod handshakes;
mod lend;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_abi::Token;
use pagoda_abi::attach::{
    FLAG_HUGE, List, PREPARED_DEVICE, PREPARED_LENDING, PREPARED_SHARING, PREPARED_TEMPLATE, Packet,
    Region as WireRegion, Shard as WireShard, Text,
};
use pagoda_api::types::VmKind;
use pagoda_api::{in_full, with_advice};
use pagoda_core::policy::VmId;
use pagoda_core::units::ChunkCount;
use pagoda_image::ImageId;
use pagoda_pager::engine::{self, Origin, Parts};
use pagoda_pager::handle::{Command, Handle, Inbox, channel_pair};
use pagoda_pager::loan::Loan;
use pagoda_pager::space::{Region, Shard, Space};
use pagoda_pager::tier::image::ImageTier;
use pagoda_pager::tier::source::{ArrivalFiles, Arrivals, SourceTier};
use pagoda_pager::tier::{Stack, Tier};
use pagoda_sys::host::FolioSize;
use pagoda_sys::peek::Memory;
use pagoda_sys::process;
use pagoda_sys::ram::{LargeFolios, RamFile};
use pagoda_sys::socket::{Connection, Listener, Peer, Received, SharedMap};
use pagoda_sys::swapfile::{Reserve, SwapFile};
use pagoda_sys::template::Template;
use pagoda_sys::uffd::{self, Uffd};

use self::handshakes::Handshakes;
use crate::mappers;
use crate::policy::settings;
use crate::qmp::Held;
use crate::record::{OperationKind, Record, SharingFiles};
use crate::registry::{Registry, Starter, Taken, Vm};
use crate::remote::{self, Dirs};
use crate::snapshots;

/// userfaultfds asked for: past a few vCPUs one no longer scales, and two cost nothing.
pub const UFFDS_PER_VM: u32 = 2;
/// How long a peer may be silent in a handshake. A shim asks at once, and connects again if it was held up.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// A connection that cannot be accepted, as for want of descriptors, is tried again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Accepts connections for as long as the daemon runs.
pub fn serve(listener: &Listener, registry: &Arc<Registry>) {
    let handshakes = Arc::new(Handshakes::default());
    loop {
        let connection = match listener.accept() {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!("attach socket: {}", with_advice(error.to_string()));
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let peer = match connection.peer() {
            Ok(peer) => peer,
            Err(error) => {
                tracing::warn!("attach: ask who connects: {}", with_advice(error.to_string()));
                continue;
            }
        };
        let connection = Arc::new(connection);
        let is_limited = peer.uid != 0 && peer.uid != rustix::process::geteuid().as_raw();
        handshakes.came(&connection, peer.uid, is_limited);
        let (registry, handshakes, handled) = (Arc::clone(registry), Arc::clone(&handshakes), Arc::clone(&connection));
        let forgotten = Arc::clone(&handshakes);
        let handle = move || {
            let first =
                connection.set_patience(Some(SILENCE_MAX)).map_err(Into::into).and_then(|()| receive(&connection));
            handshakes.spoke(&connection);
            shake_hands(&connection, &registry, peer, first);
        };
        if let Err(error) = std::thread::Builder::new().name("attach".into()).spawn(handle) {
            forgotten.spoke(&handled);
            tracing::warn!("attach: {}", with_advice(error.to_string()));
        }
    }
}

fn shake_hands(
    connection: &Arc<Connection>,
    registry: &Arc<Registry>,
    peer: Peer,
    first: Result<(Packet, Vec<OwnedFd>)>,
) {
    if let Err(error) = first.and_then(|first| greet(connection, registry, peer, first)) {
        let why = in_full(error.as_ref());
        tracing::warn!("attach refused: {why}");
        let _ = connection.send(&Packet::Refused { text: Text::new(&why) }, &[]);
    }
}

fn greet(
    connection: &Arc<Connection>,
    registry: &Arc<Registry>,
    peer: Peer,
    (packet, fds): (Packet, Vec<OwnedFd>),
) -> Result<()> {
    match packet {
        Packet::Fetch { token } => fetch(connection, registry, token, peer),
        Packet::Ram { token } => give_ram(connection, registry, token, peer),
        Packet::Prepare { token } => {
            let prepared = prepare(connection, registry, token, peer)?;
            match receive(connection)? {
                (Packet::Hello { token: again, regions, shards, .. }, fds) if again == token => {
                    let hello = Hello { token, regions, shards, fds, peer };
                    attach(connection, registry, hello, Some(prepared))
                }
                _ => bail!("expected Hello after Prepare"),
            }
        }
        Packet::Hello { token, regions, shards, .. } => {
            let attached = attach(connection, registry, Hello { token, regions, shards, fds, peer }, None);
            attached.inspect_err(|error| note_refusal(registry, token, peer, &in_full(error.as_ref())))
        }
        Packet::Outbox { token } => give_outbox(connection, registry, token, peer),
        Packet::Mapper { token } => lend::lend(connection, registry, token, peer),
        Packet::Calls { token } => {
            let name = authorised(registry, token, peer)?;
            let handle = registry.lock().get(&name).and_then(|vm| vm.handle.clone());
            let handle = handle.with_context(|| format!("{name} is not attached"))?;
            connection.send(&Packet::Welcome { flags: 0 }, &[])?;
            handle.send(Command::Calls(owned(connection)?));
            Ok(())
        }
        other => bail!("a connection does not begin with {other:?}"),
    }
}

/// A VM that runs and is refused waits: it is said with the VM why, not only in the log. Only of those who may speak for it.
fn note_refusal(registry: &Registry, token: Token, peer: Peer, why: &str) {
    let Ok(name) = authorised(registry, token, peer) else { return };
    if let Some(vm) = registry.lock().get_mut(&name).filter(|vm| vm.handle.is_none()) {
        vm.refused = Some(why.to_owned());
    }
}

/// The engine's own end of the connection; ours closes when the handshake's thread ends.
fn owned(connection: &Arc<Connection>) -> Result<Connection> {
    connection.set_patience(None)?;
    Ok(connection.try_clone()?)
}

fn receive(connection: &Connection) -> Result<(Packet, Vec<OwnedFd>)> {
    match connection.recv()? {
        Received::Message { packet, fds } => Ok((packet, fds)),
        Received::Nothing => bail!("the peer said nothing for {} s", SILENCE_MAX.as_secs()),
        Received::Closed => bail!("the peer went away in the middle of the handshake"),
    }
}

/// The VM of this token, if this peer may speak for it.
fn authorised(registry: &Registry, token: Token, peer: Peer) -> Result<String> {
    let vms = registry.lock();
    let vm = vms.values().find(|vm| vm.record.token == token).context("no VM has this token")?;
    let own = rustix::process::geteuid().as_raw();
    let started_by = vm.started_by.map(|by| by.uid);
    // With --group the socket's mode has let only members in, and the token says which VM is theirs.
    let by_group = registry.config.group.is_some();
    ensure!(
        peer.uid == 0 || peer.uid == own || Some(peer.uid) == started_by || (by_group && started_by.is_none()),
        "user {} may not attach as {}",
        peer.uid,
        vm.record.name
    );
    let (pid, start) = vm.record.pid;
    if pid != 0 {
        let same = peer.pid == pid && process::start_time(pid).is_ok_and(|now| now == start);
        ensure!(same, "{} is attached by process {pid}, not by {}", vm.record.name, peer.pid);
    }
    Ok(vm.record.name.clone())
}

/// Gives `pagoda run` the monitor, and remembers it as the process that becomes the program.
fn fetch(connection: &Connection, registry: &Registry, token: Token, peer: Peer) -> Result<()> {
    let name = authorised(registry, token, peer)?;
    let mut vms = registry.lock();
    let vm = vms.get_mut(&name).context("the VM is gone")?;
    ensure!(vm.started_by.is_none() && !vm.ram.is_empty(), "{name} was started before");
    let monitor = vm.monitor.take();
    let fds: Vec<BorrowedFd<'_>> = monitor.iter().map(AsFd::as_fd).collect();
    // Before the answer: until then it waits, and /proc says when it started. Afterwards it may end at once.
    vm.started_by = Some(Starter::of(peer));
    connection.send(&Packet::Fetched { monitor: monitor.is_some(), lens: List::default() }, &fds)?;
    Ok(())
}

/// Gives the process of an outbox what its control connections come to, and remembers it as that process.
fn give_outbox(connection: &Connection, registry: &Arc<Registry>, token: Token, peer: Peer) -> Result<()> {
    let may = |vm: &Vm| lend::may_serve(vm, peer);
    let start = process::start_time(peer.pid).context("look at the process")?;
    let listener = registry.give_outbox(token, may, (peer.pid, start))?;
    connection.send(&Packet::Welcome { flags: 0 }, &[listener.as_fd()])?;
    Ok(())
}

/// Gives the shim the VM's RAM, once. Two processes with it would each think that it is theirs, and the one that does not
/// attach would read what is out as zeros.
fn give_ram(connection: &Connection, registry: &Registry, token: Token, peer: Peer) -> Result<()> {
    let name = authorised(registry, token, peer)?;
    let mut vms = registry.lock();
    let vm = vms.get_mut(&name).context("the VM is gone")?;
    ensure!(vm.taken.is_none() && !vm.ram.is_empty(), "another process has the RAM of {name}");
    let mut lens = List::default();
    for ram in &vm.ram {
        lens.push(ram.len());
    }
    let fds: Vec<BorrowedFd<'_>> = vm.ram.iter().map(AsFd::as_fd).collect();
    // Before it is sent: a process that has it must be known, also when the answer was lost.
    vm.taken = Some(Taken { by: Starter::of(peer), at: Instant::now() });
    connection.send(&Packet::Fetched { monitor: false, lens }, &fds)?;
    Ok(())
}

/// What a VM was given before it said what it has.
struct Prepared {
    shared: SharedMap,
    template: Option<Arc<Template>>,
}

fn prepare(connection: &Connection, registry: &Registry, token: Token, peer: Peer) -> Result<Prepared> {
    let name = authorised(registry, token, peer)?;
    let shared = {
        let mut vms = registry.lock();
        lend::shared_of(vms.get_mut(&name).context("the VM is gone")?)?
    };
    let kept = registry.prepare_sharing(&name)?;
    let device = uffd::open_device().ok();
    // What it has of its own there has to be read when it is moved.
    let template = registry.template_of(&name).filter(|_| Memory::open(peer.pid).is_ok());
    let lent = if template.is_some() { PREPARED_TEMPLATE } else { 0 };
    let sharing = if kept.is_empty() { 0 } else { PREPARED_SHARING };
    let flags = PREPARED_LENDING | huge_flag() | sharing | lent | if device.is_some() { PREPARED_DEVICE } else { 0 };
    let mut fds = vec![shared.as_fd()];
    fds.extend(device.as_ref().map(AsFd::as_fd));
    fds.extend(template.as_ref().map(|template| template.as_fd()));
    fds.extend(kept.iter().map(AsFd::as_fd));
    connection.send(&Packet::Prepared { uffds: UFFDS_PER_VM, flags }, &fds)?;
    Ok(Prepared { shared, template })
}

fn huge_flag() -> u32 {
    if FolioSize::Huge.on_advice() || FolioSize::Chunk.on_advice() { FLAG_HUGE } else { 0 }
}

struct Hello {
    token: Token,
    regions: List<WireRegion, { pagoda_abi::REGIONS_MAX }>,
    shards: List<WireShard, { pagoda_abi::UFFDS_MAX }>,
    fds: Vec<OwnedFd>,
    peer: Peer,
}

/// `prepared`: the VM is new, and this is what it was given. Otherwise its agent is back.
fn attach(
    connection: &Arc<Connection>,
    registry: &Arc<Registry>,
    hello: Hello,
    prepared: Option<Prepared>,
) -> Result<()> {
    let token = hello.token;
    let name = authorised(registry, token, hello.peer)?;
    let engine = registry.lock().get(&name).and_then(|vm| vm.handle.clone());
    if let Some(engine) = engine {
        ensure!(prepared.is_none(), "{name} is attached already");
        connection.send(&Packet::Welcome { flags: huge_flag() }, &[])?;
        engine.send(Command::Agent(owned(connection)?));
        return Ok(());
    }
    let pid = hello.peer.pid;
    let pidfd = process::pidfd_open(pid).context("watch the VMM")?;
    let start = process::start_time(pid).context("look at the VMM")?;
    let (id, record, swap, image_tier, limit) = {
        let mut vms = registry.lock();
        let vm = vms.get_mut(&name).context("the VM is gone")?;
        // Before its engine begins: a VM never grows beyond what is free, from its first page on.
        let first = registry.first_limit(vm);
        vm.governed.round.set_first_limit(first);
        (vm.governed.id, vm.record.clone(), vm.swap.take(), vm.image_tier.take(), vm.limit())
    };
    let swap = swap.map_or_else(|| open_swap(registry, &name, &record), Ok)?;
    let (space, shared, mut kept) = unpack(registry, &record, hello, prepared.as_ref().map(|of| of.shared.as_fd()))?;
    let view = SharedMap::from_fd(shared.as_fd().try_clone_to_owned().context("share the VM's shared memory")?)?;
    let (taken_over, template) = (prepared.is_none(), prepared.and_then(|of| of.template));
    let loan = borrowed(registry, &record, &mut kept, template, space.chunks(), pid)?;
    let borrows = loan.is_some();
    let inodes: Vec<_> = space.regions().map(|(_, region)| region.ram.inode()).collect();
    let (handle, inbox) = channel_pair()?;
    let handle = Arc::new(handle);
    let joined = registry.join_group(&record, &kept, !taken_over, &handle)?;
    let (member, sharing) = joined.unzip();
    // Before the record names the process: the next daemon then looks for the remote map of a VM that was served.
    let mut above_swap = tiers_above_swap(registry, &record, image_tier, space.chunks(), taken_over)?;
    let origin = origin(&record, taken_over);
    if let Some(arrivals) = arrivals_of(registry, id, &record, space.chunks(), origin)? {
        above_swap.push(Box::new(SourceTier::new(arrivals)));
    }
    let looking = registry.sharing_of(&record, member.as_ref());
    // The image is looked for before the engine starts, for then pages change.
    let image = if taken_over { snapshots::unfilled(registry, &record, &shared) } else { None };
    let holds_image = image.is_some();
    let mappers = mappers::known(&shared, &registry.config.state_dir, &inodes)?;
    let parts = Parts {
        name: name.clone(),
        space,
        tiers: Stack::new(member, above_swap, swap),
        shared,
        agent: owned(connection)?,
        welcome: Packet::Welcome { flags: huge_flag() },
        pid,
        pidfd,
        limit,
        min: settings::caps_of(&record).min,
        direct: registry.direct,
        protect: registry.protect,
        page_in: registry.config.page_in.policy(),
        replacement: registry.config.replacement.policy(),
        busy_poll: registry.config.busy_poll,
        pinned: record.spec.pinned.clone(),
        origin,
        image,
        sharing: looking,
        loan,
        mappers,
    };
    let made = Made { id, parts, handle, inbox, inodes, pid: (pid, start), sharing, borrows, holds_image, view };
    start_engine(registry, made)?;
    tracing::info!(vm = %name, pid, taken_over, "attached");
    if let Err(error) = registry.crashes.remove(&name) {
        tracing::warn!(vm = %name, "remove the note that one of its name has crashed: {error}");
    }
    ask_qemu(registry, &name, token, !taken_over);
    Ok(())
}

/// Asks QEMU what has to be known of it, by one connection: each new one takes it a millisecond.
fn ask_qemu(registry: &Arc<Registry>, name: &str, token: Token, is_new: bool) {
    let qmp = registry.lock().get(name).map(|vm| Arc::clone(&vm.qmp));
    let held = qmp.map(Held::new);
    learn_accelerator(registry, name);
    registry.resume_balloon(name);
    registry.governor.doorbell.ring();
    if let Err(error) = gate::check(registry, name, token, is_new, held) {
        tracing::warn!(vm = %name, "QEMU is not asked whether it could leave guest RAM out of a migration: {error}");
    }
}

/// Where the pages of a VM are that attaches.
fn origin(record: &Record, taken_over: bool) -> Origin {
    let is_restored = record.operation.is_some_and(|operation| operation.kind == OperationKind::Restore);
    // One that no daemon has served has nothing in DRAM, also if its agent says that it comes back: a daemon died when it had
    // just attached.
    let was_served = taken_over && record.pid.0 != 0;
    let arrives = record.operation.is_some_and(|operation| operation.kind == OperationKind::Arrival);
    match (was_served, is_restored) {
        (false, true) => Origin::InTiers,
        (false, false) if arrives => Origin::Arriving,
        _ if taken_over => Origin::TakenOver,
        _ => Origin::New,
    }
}

/// What an engine needs, and what the daemon keeps of it.
struct Made {
    id: VmId,
    parts: Parts,
    handle: Arc<Handle>,
    inbox: Inbox,
    inodes: Vec<(u64, u64)>,
    /// The VMM, and when it started.
    pid: (u32, u64),
    sharing: Option<SharingFiles>,
    /// It may map the template of its image.
    borrows: bool,
    /// The VM goes on holding pages for the image that its record names.
    holds_image: bool,
    /// Another view of what the VMM keeps.
    view: SharedMap,
}

/// Starts the engine, and enters it in the registry, in one step that nobody sees a part of.
fn start_engine(registry: &Registry, made: Made) -> Result<()> {
    let Made { id, parts, handle, inbox, inodes, pid, sharing, borrows, holds_image, view } = made;
    let met: Vec<usize> = parts.mappers.iter().map(|mapper| mapper.slot).collect();
    let (name, limit) = (parts.name.clone(), parts.limit);
    let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| {
        ensure!(vm.handle.is_none(), "{name} is being attached by another connection");
        // From what the record is by now: its settings may have changed while its swap file or its pool was waited for. And
        // before any page is shared: a later daemon has to know that there may be some. And before any page changes: a later
        // daemon must not take it for one that an image still owns.
        let image = vm.record.image.filter(|_| holds_image);
        Ok(Record { pid, sharing, borrows, image, ..vm.record.clone() })
    };
    let begin = |vm: &mut Vm, written: Result<()>| {
        written.context("write the VM's record")?;
        let token = vm.record.token;
        // Those that have come since. From here on the engine hears of each.
        for new in mappers::known(&view, &registry.config.state_dir, &inodes)? {
            if !met.contains(&new.slot) {
                handle.send(Command::Mapper(new));
            }
        }
        vm.inodes = inodes;
        (vm.shared, vm.to_be_shared) = (Some(view), None);
        (vm.stalled, vm.refused) = (None, None);
        vm.ram.clear();
        let notices = registry.notices();
        engine::spawn(parts, inbox, Box::new(move |notice| drop(notices.send((token, notice)))))?;
        vm.governed.attached(limit);
        if registry.governor.lock().config.curves {
            handle.send(Command::WatchCurve(true));
        }
        vm.handle = Some(handle);
        // What was changed while the engine was made.
        registry.send_min(vm);
        registry.send_limit(vm);
        Ok(())
    };
    registry.change(id, plan, begin).context("the VM is gone")?
}

/// What a VM borrows of its image. The template that this daemon has given it is the one that counts; after a restart it is the one
/// that the shim has kept, which says what the VM maps and no more.
fn borrowed(
    registry: &Registry,
    record: &Record,
    kept: &mut Vec<OwnedFd>,
    given: Option<Arc<Template>>,
    chunks: ChunkCount,
    pid: u32,
) -> Result<Option<Loan>> {
    let fd = if kept.len() % 2 == 1 { kept.pop() } else { None };
    let Some(fd) = fd else {
        ensure!(!record.borrows, "it does not have the template any more that it maps");
        return Ok(None);
    };
    let theirs = Template::from_fd(fd, chunks.0).context("the template")?;
    let template = match given {
        Some(ours) => {
            ensure!(ours.inode() == theirs.inode(), "the template is not the one that was given");
            ours
        }
        None => registry.images.templates().adopt(theirs),
    };
    Ok(Some(Loan::open(template, pid).context("look at what it maps of its template")?))
}

fn open_swap(registry: &Registry, name: &str, record: &Record) -> Result<SwapFile> {
    let reserve = if record.spec.reserve_swap { Reserve::Yes } else { Reserve::No };
    Ok(SwapFile::open(&registry.swap_path(name), record.memory(), reserve)?)
}

/// The tiers above the swap file, from the top. `image`: that of a VM that this daemon has made.
fn tiers_above_swap(
    registry: &Registry,
    record: &Record,
    image: Option<ImageTier>,
    chunks: ChunkCount,
    taken_over: bool,
) -> Result<Vec<Box<dyn Tier>>> {
    let mut tiers: Vec<Box<dyn Tier>> = Vec::new();
    if let Some(compressed) = &record.compressed {
        tiers.push(compressed.open(&record.name, chunks, taken_over)?);
    }
    let (dirs, map) = (Dirs::of(&registry.config), registry.remote_path(&record.name));
    if let Some(remote) = remote::for_engine(&dirs, &map, record, chunks, taken_over)? {
        tiers.push(Box::new(remote));
    }
    if let Some(reads) = record.reads {
        let image = image.map_or_else(|| open_image(registry, &record.name, reads), Ok)?;
        tiers.push(Box::new(image));
    }
    Ok(tiers)
}

/// What a VM gets from the host that it has moved from. One that comes has that from the start; later it has it as long as there is
/// something of it. Whoever brings pages finds it before the engine needs one.
fn arrivals_of(
    registry: &Registry,
    id: VmId,
    record: &Record,
    chunks: ChunkCount,
    origin: Origin,
) -> Result<Option<Arc<Arrivals>>> {
    // It is where the image is in the stack of a VM that reads one, which does not come from another host.
    if record.reads.is_some() {
        return Ok(None);
    }
    if let Some(known) = registry.find_by_id(id, |vm| vm.arrivals.clone()).flatten() {
        return Ok(Some(known));
    }
    let files = ArrivalFiles::beside(&registry.swap_path(&record.name));
    let arrivals = match origin {
        Origin::Arriving => Arrivals::create(files, chunks).context("make files for pages that come later")?,
        // Without its files nobody knows what it lacks.
        Origin::TakenOver if record.has_source_tier => {
            Arrivals::open(files, chunks).context("open what has come from another host")?
        }
        Origin::TakenOver | Origin::New | Origin::InTiers => return Ok(None),
    };
    registry.find_by_id(id, |vm| vm.arrivals = Some(Arc::clone(&arrivals)));
    Ok(Some(arrivals))
}

/// The image that an earlier daemon made the VM of. Its map has been there since the VM was made.
fn open_image(registry: &Registry, vm: &str, reads: ImageId) -> Result<ImageTier> {
    let opened = registry.images.of_reader(reads);
    let opened = opened.and_then(|image| Ok(ImageTier::open(image, &registry.image_map_path(vm))?));
    opened.with_context(|| format!("open the image {reads}, which {vm} was made of and reads its memory from"))
}

/// Asks QEMU what runs the guest, when its monitor answers.
fn learn_accelerator(registry: &Registry, name: &str) {
    let qmp = registry.lock().get(name).filter(|vm| vm.record.kind == VmKind::Qemu).map(|vm| Arc::clone(&vm.qmp));
    let Some(qmp) = qmp else { return };
    let accelerator = qmp.accelerator();
    if let Some(vm) = registry.lock().get_mut(name) {
        vm.accelerator = accelerator;
    }
}

/// Checks what the shim sent against what the VM was created with.
fn unpack(
    registry: &Registry,
    record: &Record,
    hello: Hello,
    prepared: Option<BorrowedFd<'_>>,
) -> Result<(Space, SharedMap, Vec<OwnedFd>)> {
    let (regions, shards) = (hello.regions.as_slice(), hello.shards.as_slice());
    ensure!(regions.len() == record.regions.len(), "{} regions instead of {}", regions.len(), record.regions.len());
    ensure!(!shards.is_empty() && hello.fds.len() > regions.len() + shards.len(), "too few descriptors");
    // Table and pool of shared pages come together, the template alone.
    let borrows = (hello.fds.len() - regions.len() - shards.len() - 1) % 2 == 1;
    let mut fds = hello.fds.into_iter();
    let large = if registry.direct { LargeFolios::Advise } else { LargeFolios::Never };
    let mut mapped = Vec::new();
    for (wire, len) in regions.iter().zip(&record.regions) {
        ensure!(wire.len == *len, "a region of {} bytes instead of {len}", wire.len);
        let ram = RamFile::from_fd(fds.next().context("RAM")?, *len)?;
        let view = ram.map(large)?;
        let small = ram.map(LargeFolios::Never)?;
        mapped.push(Region { addr: wire.addr, ram, view, small });
    }
    let mut watched = Vec::new();
    for shard in shards {
        let region = regions.get(shard.region as usize).context("a userfaultfd of no region")?;
        let inside = shard.offset.checked_add(shard.len).is_some_and(|end| end <= region.len);
        ensure!(inside && shard.len > 0, "a userfaultfd outside its region");
        let uffd = Uffd::from_fd(fds.next().context("userfaultfd")?)?;
        if borrows {
            uffd.enable_with_moves()?
        } else {
            uffd.enable()?
        }
        watched.push(Shard { addr: region.addr + shard.offset, len: shard.len, uffd });
    }
    let shared = fds.next().context("shared memory")?;
    if let Some(ours) = prepared {
        let (a, b) = (rustix::fs::fstat(ours)?, rustix::fs::fstat(&shared)?);
        ensure!((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino), "the shared memory is not the one that was given");
    }
    Ok((Space::new(mapped, watched)?, SharedMap::from_fd(shared)?, fds.collect()))
}
