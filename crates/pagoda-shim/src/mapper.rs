//! A mapper: a process that is not the VMM and maps a VM's RAM, such as the one of an outbox.
//!
//! What is out of RAM is a hole in its file, and a process without a userfaultfd reads holes as zeros. So a mapper has one too. It
//! says Mapper to the daemon before its program begins ([`begin`]), and gets a socket to which whichever daemon there is
//! connects: its program may have given up files and networks by the time a daemon is replaced. A thread answers on that socket.
//!
//! The program may fork, and map RAM in its children alone, one child at a time: a userfaultfd is of one address space. So each process
//! makes its own at its first mapping ([`own`]), by the device that was opened at the start.
//!
//! Owns: the userfaultfd, the table of what is mapped, the socket.
//! Order: RAM is mapped without access -> the daemon has registered it, and notes that this process has pages -> its mmap returns, with
//! access. And: RAM is unmapped -> the daemon hears of it. Both happen under [`CHANGES`], so that the daemon hears of two mappings
//! at one address in their order.
//! What the program sees: while no daemon is there, a new mapping waits, as an access to a page that is out does.
//! Limits: a mapping is made and ended as a whole; a process that maps RAM does not pass it on: that ends it.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::Duration;

use pagoda_abi::attach::{LentMap, List, MAPS_MAX, Maps, PREPARED_DEVICE, Packet};
use pagoda_abi::{PAGE_SIZE, REGIONS_MAX};

use crate::attach::reach;
use crate::attachment::receive_patiently;
use crate::config::{Config, Name, RamFile, Role, config, duplicate, set_ram};
use crate::link::{self, Broken};
use crate::say::{give_up, say};
use crate::{agent, attach, clock, foreign, ram, real};

/// Before a connection that the daemon did not welcome is followed by the next.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);

/// What the program has from its start on, its children too.
struct Lent {
    /// Daemons connect to it.
    listener: c_int,
    /// The device by which each process makes its userfaultfd.
    device: c_int,
}

/// What a process that maps RAM has, for whichever daemon there is.
struct Own {
    pid: u32,
    uffd: c_int,
    /// The descriptor by which the daemon sees the process's end.
    pidfd: c_int,
    /// The connection to the daemon is always at this number.
    link: c_int,
}

/// A mapping, from when the daemon is asked until it is unmapped.
#[derive(Clone, Copy)]
struct Entry {
    map: LentMap,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The daemon was asked by this number.
    Asked(u64),
    Granted,
    /// The daemon has refused the mapping, with this errno.
    Refused(c_int),
}

struct Table {
    entries: [Option<Entry>; MAPS_MAX],
    seq: u64,
}

static LENT: OnceLock<Lent> = OnceLock::new();
static OWN: OnceLock<Own> = OnceLock::new();
static TABLE: Mutex<Table> = Mutex::new(Table { entries: [None; MAPS_MAX], seq: 0 });
/// The daemon has answered.
static ANSWERED: Condvar = Condvar::new();
/// Held while a mapping of RAM is made or ended.
static CHANGES: Mutex<()> = Mutex::new(());

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called once, by the constructor: there is one thread, and the program has given up nothing yet.
pub fn begin(name: &'static Name) {
    let reached = reach(&name.address, |link| {
        link::send(link, &Packet::Mapper { token: name.token }, &[])?;
        match link::receive(link)? {
            (Packet::Lent { flags, slot, files }, fds) => Ok((flags, slot, files, fds)),
            (Packet::Refused { text }, _) => {
                give_up(format_args!("the daemon lends this process no RAM: {}", text.as_str()))
            }
            _ => Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
        }
    });
    let (flags, slot, files, fds) = reached.value;
    link::close(reached.link);
    let (listener, shared, device) = match (flags & PREPARED_DEVICE != 0, fds.as_slice()) {
        (true, [listener, shared, device]) => (*listener, *shared, Some(*device)),
        (false, [listener, shared]) => (*listener, *shared, None),
        _ => give_up(format_args!("the daemon did not give what a mapper needs; install matching pagoda packages")),
    };
    let no_descriptor = || give_up(format_args!("no free file descriptor for a mapper; raise the limit (ulimit -n)"));
    let keep = |fd: c_int| {
        let kept = duplicate(fd).unwrap_or_else(no_descriptor);
        link::close(fd);
        kept
    };
    // The process that maps may have given up what it needs for another way.
    let device = device.map(keep).or_else(attach::open_device).unwrap_or_else(|| attach::no_permission());
    // That it may is to be known now, and not when a guest waits.
    link::close(attach::make_uffd(Some(device)).unwrap_or_else(|| attach::no_permission()));
    let lent = Lent { listener: keep(listener), device };
    attach::map_shared(keep(shared));
    clock::set_mapper(slot as usize);
    let mut known: List<RamFile, REGIONS_MAX> = List::default();
    for file in files.as_slice() {
        known.push(RamFile::of_others(file.dev, file.ino, file.len));
    }
    let _ = LENT.set(lent);
    ram::allow_many();
    set_ram(name, known, Role::Mapper);
}

/// A part of a RAM file is to be mapped. `real` maps it with the protection that it is given. The address, or an errno.
pub fn map(
    config: &Config,
    region: usize,
    (len, offset): (usize, i64),
    protection: c_int,
    real: impl FnOnce(c_int) -> *mut c_void,
) -> Result<*mut c_void, c_int> {
    let page = PAGE_SIZE;
    let whole = len.next_multiple_of(page);
    let is_inside = u64::try_from(offset).is_ok_and(|offset| {
        offset.is_multiple_of(page as u64)
            && offset.checked_add(whole as u64).is_some_and(|end| end <= config.ram()[region].len)
    });
    if len == 0 || !is_inside {
        return Err(libc::EINVAL);
    }
    let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let index = table().entries.iter().position(Option::is_none).ok_or(libc::ENOMEM)?;
    let own = own()?;
    if own.pid != std::process::id() {
        // A child of a process that maps RAM: its parent's userfaultfd is none of its own.
        return Err(libc::EPERM);
    }
    start_thread();
    let addr = real(libc::PROT_NONE);
    if addr == libc::MAP_FAILED {
        return Err(link::errno());
    }
    // A child after fork(2) would have RAM without a userfaultfd.
    ram::advise(addr as usize, whole, libc::MADV_DONTFORK);
    ram::set_mapped(index, addr as usize, whole);
    let map = LentMap { region: region as u32, offset: offset as u64, len: whole as u64, addr: addr as u64 };
    let refused = match ask(index, map) {
        // SAFETY: the mapping was made above and is this program's; it asked for this protection.
        Ok(()) if unsafe { libc::mprotect(addr, whole, protection) } == 0 => return Ok(addr),
        Ok(()) => link::errno(),
        Err(errno) => errno,
    };
    end(index, || {
        // SAFETY: the mapping was made above, and nobody was given its address.
        (unsafe { real::munmap(addr, whole) }) == 0
    });
    Err(refused)
}

/// Asks the daemon for leave, and waits for its answer.
fn ask(index: usize, map: LentMap) -> Result<(), c_int> {
    let mut table = table();
    table.seq += 1;
    let seq = table.seq;
    table.entries[index] = Some(Entry { map, state: State::Asked(seq) });
    // If no daemon is there, the next one finds it in Maps.
    foreign::say(&Packet::Map { seq, map });
    loop {
        match table.entries[index].map(|entry| entry.state) {
            Some(State::Granted) => return Ok(()),
            Some(State::Refused(errno)) => return Err(errno),
            Some(State::Asked(_)) => table = ANSWERED.wait(table).unwrap_or_else(PoisonError::into_inner),
            None => return Err(libc::EINVAL),
        }
    }
}

/// A range with RAM in it is to be unmapped, or mapped over, by `real`. `Err`: only a part of a mapping is in it.
pub fn unmap<R>(
    addr: usize,
    len: usize,
    real: impl FnOnce() -> R,
    is_done: impl FnOnce(&R) -> bool,
) -> Result<R, c_int> {
    let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let end = addr.saturating_add(len.next_multiple_of(PAGE_SIZE));
    let mut gone = [false; MAPS_MAX];
    for (index, entry) in table().entries.iter().enumerate() {
        let Some(Entry { map, .. }) = entry else { continue };
        let (from, to) = (map.addr as usize, (map.addr + map.len) as usize);
        if from < end && to > addr {
            if from < addr || to > end {
                return Err(libc::EINVAL);
            }
            gone[index] = true;
        }
    }
    let result = ram::forget(addr, end - addr, real);
    if !is_done(&result) {
        give_up(format_args!("RAM could not be unmapped, and is not known any more"));
    }
    (0..MAPS_MAX).filter(|index| gone[*index]).for_each(tell_unmapped);
    Ok(result)
}

/// Ends a mapping that was not granted.
fn end(index: usize, real: impl FnOnce() -> bool) {
    let Some((addr, len)) = ram::mapping(index) else { return };
    if !ram::forget(addr, len, real) {
        give_up(format_args!("RAM could not be unmapped"));
    }
    tell_unmapped(index);
}

fn tell_unmapped(index: usize) {
    let mut table = table();
    table.seq += 1;
    let seq = table.seq;
    if let Some(Entry { map, .. }) = table.entries[index].take() {
        // If it does not arrive, the next connection's Maps does not have it.
        foreign::say(&Packet::Unmap { seq, map });
    }
}

/// What this process has of its own, made at its first mapping.
fn own() -> Result<&'static Own, c_int> {
    if let Some(own) = OWN.get() {
        return Ok(own);
    }
    let lent = LENT.get().ok_or(libc::EPERM)?;
    let keep = |fd: c_int| {
        let kept = duplicate(fd).ok_or(libc::EMFILE);
        link::close(fd);
        kept
    };
    let pid = std::process::id();
    let uffd = keep(attach::make_uffd(Some(lent.device)).ok_or(libc::EPERM)?)?;
    // SAFETY: pidfd_open(2) takes its arguments by value.
    let pidfd = unsafe { real::syscall(libc::SYS_pidfd_open, pid.into(), 0, 0, 0, 0, 0) } as c_int;
    if pidfd < 0 {
        return Err(link::errno());
    }
    let pidfd = keep(pidfd)?;
    // Any descriptor of ours keeps the number until there is a connection.
    let link = duplicate(lent.listener).ok_or(libc::EMFILE)?;
    Ok(OWN.get_or_init(|| Own { pid, uffd, pidfd, link }))
}

/// The thread begins when there is something to answer for: its program may need to be alone until it has given up privileges.
fn start_thread() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| agent::start_thread(main, null_mut()));
}

extern "C" fn main(_: *mut c_void) -> *mut c_void {
    // SAFETY: PR_SET_NAME reads a NUL-terminated name of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pagoda-mapper".as_ptr()) };
    let (Some(own), Some(lent)) = (OWN.get(), LENT.get()) else { return null_mut() };
    loop {
        // SAFETY: accept4(2) with no address to be filled in.
        let came = unsafe { libc::accept4(lent.listener, null_mut(), null_mut(), libc::SOCK_CLOEXEC) };
        if came < 0 {
            agent::sleep(REFUSED_PAUSE);
            continue;
        }
        let Err(broken) = serve(own, came);
        if let Broken::Nonsense(error) = broken {
            say(format_args!("mapper: {error}; waiting for another connection"));
            agent::sleep(REFUSED_PAUSE);
        }
    }
}

/// Answers the daemon until the connection breaks.
fn serve(own: &Own, came: c_int) -> Result<std::convert::Infallible, Broken> {
    let greeted = greet(own, came).and_then(|said| {
        // SAFETY: both are fds of ours; dup3(2) replaces the connection before in one step, so a thread that says something on it
        // never meets a closed or a strange fd.
        let replaced = unsafe { libc::dup3(came, own.link, libc::O_CLOEXEC) };
        if replaced < 0 { Err(Broken::Gone) } else { Ok(said) }
    });
    link::close(came);
    let said = greeted?;
    foreign::connected(own.link);
    catch_up(&said);
    loop {
        let answer = match link::receive_plain(own.link)? {
            Packet::Zap { seq, ranges } => {
                let (epoch, errno) = agent::zap(ranges.as_slice());
                Packet::Zapped { seq, epoch, errno }
            }
            Packet::Clock { seq } => {
                clock::rings::refresh();
                Packet::Clocked { seq }
            }
            Packet::Mapped { seq, errno } => {
                answered(|state| (state == State::Asked(seq)).then_some(errno));
                continue;
            }
            _ => return Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
        };
        link::send(own.link, &answer, &[])?;
    }
}

/// Says what is mapped. All of that is granted when the daemon welcomes it. What was said.
fn greet(own: &Own, link: c_int) -> Result<Maps, Broken> {
    let mut maps = Maps::default();
    let newest = {
        let table = table();
        for entry in table.entries.iter().flatten() {
            if !matches!(entry.state, State::Refused(_)) {
                maps.push(entry.map);
            }
        }
        table.seq
    };
    link::send(link, &Packet::Maps { pid: own.pid, maps }, &[own.uffd, own.pidfd])?;
    match receive_patiently(link)?.0 {
        Packet::Welcome { .. } => {
            answered(|state| matches!(state, State::Asked(seq) if seq <= newest).then_some(0));
            Ok(maps)
        }
        _ => Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
    }
}

/// Says again what was said on a connection that is gone: questions, and that mappings have ended which this daemon was told of.
fn catch_up(said: &Maps) {
    let mut table = table();
    for map in said.as_slice() {
        // What is mapped at that address since takes its place with the daemon by itself.
        if !table.entries.iter().flatten().any(|entry| entry.map.addr == map.addr) {
            table.seq += 1;
            let seq = table.seq;
            foreign::say(&Packet::Unmap { seq, map: *map });
        }
    }
    for entry in table.entries.iter().flatten() {
        if let State::Asked(seq) = entry.state {
            foreign::say(&Packet::Map { seq, map: entry.map });
        }
    }
}

/// The daemon has answered those questions for which `errno_of` has its answer.
fn answered(errno_of: impl Fn(State) -> Option<u32>) {
    for entry in table().entries.iter_mut().flatten() {
        match errno_of(entry.state) {
            Some(0) => entry.state = State::Granted,
            Some(errno) => entry.state = State::Refused(errno as c_int),
            None => {}
        }
    }
    ANSWERED.notify_all();
}

/// Lets go of all RAM, for a program that has no more use for what is there: from now on its mappings are memory of its own, which is
/// zero. Threads that wait for pages of a VM that has ended, and that nobody answers any more, go on by that.
fn release() {
    let Some(own) = OWN.get() else { return };
    let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    for index in 0..MAPS_MAX {
        let Some((addr, len)) = ram::mapping(index) else { continue };
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            // Shared: private memory may be limited to less than a VM has.
            libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
        );
        // SAFETY: a mapping of RAM, known to be one until `forget`; its program keeps the addresses, and finds memory there.
        let replace = || unsafe { real::mmap(addr as *mut c_void, len, protection, flags, -1, 0) };
        if ram::forget(addr, len, replace) == libc::MAP_FAILED {
            give_up(format_args!("RAM could not be let go of"));
        }
        tell_unmapped(index);
        let mut range = [addr as u64, len as u64];
        // SAFETY: UFFDIO_WAKE reads a `struct uffdio_range`, two words that live through the call. Who waits in the range began before
        // the mapping was replaced, so its wake-up is not missed.
        unsafe { real::ioctl(own.uffd, UFFDIO_WAKE, range.as_mut_ptr().cast()) };
    }
}

/// `UFFDIO_WAKE` of `linux/userfaultfd.h`: `_IOR(0xAA, 2, struct uffdio_range)`.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;

/// What a program that is a mapper may call (`pagoda_sys::mapper`).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn pagoda_mapper_release() {
    release();
}

/// A child that maps no RAM, and reads what others than the guest say, has no part in the memory that the VMM and the daemon share: it gets
/// memory of its own in that place, for hooks look there. What else it has inherited is descriptors, which it closes.
fn leave() {
    if OWN.get().is_none() && !clock::replace_shared() {
        give_up(format_args!("the memory that is shared with the daemon could not be let go of"));
    }
}

/// What a program that is a mapper may call in a child (`pagoda_sys::mapper`).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn pagoda_mapper_leave() {
    leave();
}

/// Whether this process is a mapper.
pub fn is_one() -> bool {
    config().is_some_and(|config| config.role == Role::Mapper)
}
