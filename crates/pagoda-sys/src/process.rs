//! Processes as /proc shows them, wake-ups between threads, and the daemon's own limits.
//!
//! A process id alone may be reused: a process is known by id and start time ([`start_time`]), or by a pidfd. What is read
//! from /proc about a process that ends meanwhile is `NotFound` or "no such process", never a stale value. That /proc cannot be
//! read proves nothing: only [`life`] says that a process has ended.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::mm::MlockAllFlags;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit};

use crate::{Errno, PAGE_SIZE};

fn pid_of(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Processor time that the calling thread has used.
pub fn thread_cpu_time() -> std::time::Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The user this process acts as.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A file descriptor that becomes readable when the process has ended.
///
/// # Errors
/// ESRCH when it has ended already.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(pid_of(pid)?, PidfdFlags::empty())?)
}

/// Whether the process behind a pidfd has ended. That it could not be asked is no end.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut polled = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&at_once)) == Ok(1)
        && polled[0].revents().contains(rustix::event::PollFlags::IN)
}

/// A process that this one has started by [`fork`].
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Child {
    /// Readable when it has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Ends it at once. It may have ended already.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
    }

    /// Waits for its end: whether its exit status was 0.
    ///
    /// # Errors
    /// It was waited for before.
    pub fn wait(&self) -> io::Result<bool> {
        let ended = rustix::io::retry_on_intr(|| {
            rustix::process::waitpid(Some(self.pid), rustix::process::WaitOptions::empty())
        })?;
        Ok(ended.is_some_and(|(_, status)| status.exit_status() == Some(0)))
    }
}

/// Makes a process that goes on here with a copy of everything, and gets `None`; this one gets the child.
///
/// # Errors
/// EINVAL if this process has more than one thread; no process can be made.
pub fn fork() -> io::Result<Option<Child>> {
    // SAFETY: unshare takes flags alone. CLONE_THREAD changes nothing and fails if there is another thread (unshare(2)).
    if unsafe { libc::unshare(libc::CLONE_THREAD) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: this process has no other thread, which could hold a lock or be in the midst of a change that the child would
    // see for ever. So the child may do all that this process may.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        pid if pid > 0 => {
            let pid = Pid::from_raw(pid).ok_or_else(invalid)?;
            let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
            Ok(Some(Child { pid, pidfd }))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// For a process that was just made by [`fork`]: closes all descriptors but `kept` and the first three, does `run`, and ends with its
/// result. Nothing of before is used or dropped any more, so nobody meets a descriptor that is closed or another one.
pub fn go_on_with(kept: &[RawFd], run: impl FnOnce() -> i32) -> ! {
    let mut kept: Vec<u32> = kept.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    kept.extend(0..=2);
    kept.sort_unstable();
    kept.dedup();
    // To the last number that there is.
    let ends = kept[1..].iter().copied().map(Some).chain([None]);
    for (before, end) in kept.iter().zip(ends) {
        let (first, last) = (before + 1, end.map_or(u32::MAX, |end| end - 1));
        if first > last {
            continue;
        }
        // SAFETY: close_range(2) takes numbers alone. Owners of these descriptors are in frames that this function does not go back to,
        // or belong to `run`, whose caller names what it needs.
        if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            std::process::exit(1);
        }
    }
    std::process::exit(run())
}

/// Fields of `/proc/PID/stat` from the third on.
fn stat_fields(pid: u32) -> io::Result<Vec<String>> {
    fields_of(&std::fs::read(format!("/proc/{pid}/stat"))?)
}

/// The same of its text. The second field is the name, which may hold any bytes: blanks, parentheses, what is not UTF-8.
fn fields_of(stat: &[u8]) -> io::Result<Vec<String>> {
    let end = stat.iter().rposition(|byte| *byte == b')').ok_or_else(invalid)?;
    let rest = std::str::from_utf8(&stat[end + 1..]).map_err(|_| invalid())?;
    Ok(rest.split_ascii_whitespace().map(str::to_owned).collect())
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "unexpected format in /proc")
}

/// Number `field` (counted from 1, as in proc_pid_stat(5)).
fn stat_number(fields: &[String], field: usize) -> io::Result<u64> {
    fields.get(field - 3).and_then(|text| text.parse().ok()).ok_or_else(invalid)
}

/// The parent of a process (proc(5) stat, field 4).
///
/// # Errors
/// There is no such process.
pub fn parent(pid: u32) -> io::Result<u32> {
    Ok(stat_number(&stat_fields(pid)?, 4)? as u32)
}

/// When the process started, in clock ticks since boot: with its id it names the process for good.
///
/// # Errors
/// `NotFound` if there is none.
pub fn start_time(pid: u32) -> io::Result<u64> {
    stat_number(&stat_fields(pid)?, 22)
}

/// Whether a process still runs.
#[derive(Debug)]
pub enum Life {
    /// The process still runs.
    Alive,
    /// It does not, and never will: what it left may be removed.
    Ended,
    /// Nobody can tell now. Nothing may follow that cannot be undone.
    Unknown(io::Error),
}

/// Whether the process of this id and start time still runs. It has ended if there is no process of its id, if that is
/// another's by now, or if it is a zombie. Any other trouble with /proc (no descriptor left, no memory, not mounted, hidden)
/// leaves it open.
pub fn life(pid: u32, start: u64) -> Life {
    life_by(stat_fields(pid), start, || pidfd_open(pid).map(drop))
}

fn life_by(stat: io::Result<Vec<String>>, start: u64, witness: impl FnOnce() -> io::Result<()>) -> Life {
    let reported = stat.and_then(|fields| {
        // A zombie with threads is a process whose first thread alone has ended.
        let is_zombie = matches!(fields.first().map(String::as_str), Some("Z" | "X")) && stat_number(&fields, 20)? <= 1;
        Ok(stat_number(&fields, 22)? == start && !is_zombie)
    });
    match reported {
        Ok(true) => Life::Alive,
        Ok(false) => Life::Ended,
        // A /proc that is not mounted, or that hides other users' processes, says the same of one that runs.
        Err(error) if error.kind() == io::ErrorKind::NotFound || no_such(&error) => match witness() {
            Err(error) if no_such(&error) => Life::Ended,
            Err(error) => Life::Unknown(error),
            Ok(()) => Life::Unknown(error),
        },
        Err(error) => Life::Unknown(error),
    }
}

fn no_such(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

/// CPU time the process has used, in user and kernel mode together.
///
/// # Errors
/// As [`start_time`].
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let fields = stat_fields(pid)?;
    let ticks = stat_number(&fields, 14)? + stat_number(&fields, 15)?;
    let nanos = u128::from(ticks) * 1_000_000_000 / u128::from(rustix::param::clock_ticks_per_second());
    Ok(Duration::from_nanos(nanos as u64))
}

/// Memory the process has mapped, in bytes.
///
/// # Errors
/// As [`start_time`].
pub fn rss(pid: u32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages: u64 = text.split(' ').nth(1).and_then(|text| text.parse().ok()).ok_or_else(invalid)?;
    Ok(pages * PAGE_SIZE as u64)
}

/// Memory of the process itself, in bytes: its anonymous pages and its page tables, without files and shared memory that
/// it maps.
///
/// # Errors
/// As [`start_time`].
pub fn own_memory(pid: u32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |key: &str| -> Option<u64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
        rest.trim().trim_end_matches(" kB").parse().ok()
    };
    Ok((kib("RssAnon:").ok_or_else(invalid)? + kib("VmPTE:").ok_or_else(invalid)?) * 1024)
}

/// The process a thread belongs to.
///
/// # Errors
/// As [`start_time`].
pub fn process_of(tid: u32) -> io::Result<u32> {
    let text = std::fs::read_to_string(format!("/proc/{tid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Tgid:")).ok_or_else(invalid)?;
    line.trim().parse().map_err(|_| invalid())
}

/// The processes that map a file, by its device and inode, this one included. Processes whose mappings we may not read are
/// not found, so this wants root (or the same user as the VMs).
///
/// # Errors
/// /proc, or a process that is there and ours to look at, cannot be read, as for want of descriptors: others may map it.
pub fn mappers(dev: u64, ino: u64) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let maps = match std::fs::read(format!("/proc/{pid}/maps")) {
            Ok(maps) => maps,
            // A process that ended since, or another user's.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || no_such(&error)
                    || error.kind() == io::ErrorKind::PermissionDenied =>
            {
                continue;
            }
            Err(error) => return Err(error),
        };
        if String::from_utf8_lossy(&maps).lines().any(|line| maps_file(line) == Some((dev, ino))) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Device and inode of a line of `/proc/PID/maps`: `address perms offset major:minor inode path`.
fn maps_file(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let dev = rustix::fs::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    Some((dev, fields.next()?.parse().ok()?))
}

/// Wakes a thread that waits in a ring or in poll(2): an eventfd, nonblocking.
#[derive(Debug)]
pub struct Wake {
    fd: OwnedFd,
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Wake {
    /// A new one, not signalled.
    ///
    /// # Errors
    /// EMFILE.
    pub fn new() -> io::Result<Wake> {
        Ok(Wake { fd: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// Another handle of the same.
    ///
    /// # Errors
    /// EMFILE.
    pub fn try_clone(&self) -> io::Result<Wake> {
        Ok(Wake { fd: self.fd.try_clone()? })
    }

    /// Makes it readable. Never blocks: a counter at its maximum is readable already.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable again; `true` if it was signalled.
    pub fn clear(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0u8; 8]).is_ok()
    }
}

/// Keeps the daemon's own code and tables in memory once they are touched, so that no fault of a guest waits for the host's
/// swap. Views of RAM exempt themselves ([`crate::ram::RamView`]).
///
/// # Errors
/// EPERM or ENOMEM without the right to lock memory: the daemon works all the same, only slower when the host swaps.
pub fn lock_memory() -> Result<(), Errno> {
    // On fault only: else every thread's whole stack would become resident.
    rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
}

/// Whether this process may lock memory whatever its limit is (CAP_IPC_LOCK).
#[must_use]
pub fn may_lock_memory() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::IPC_LOCK))
}

/// The limits the daemon needs raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Open files: about [`pagoda_abi::attach::FDS_MAX`] and a few more for each VM.
    OpenFiles,
    /// I/O buffers are locked memory.
    LockedMemory,
    /// The length of files: swap files are as long as a VM's memory.
    FileSize,
    /// Memory that may be mapped: each VM's is, once or twice.
    AddressSpace,
    /// Private memory that may be mapped.
    Data,
}

impl Limit {
    /// Its name in getrlimit(2), and in a unit of systemd.
    #[must_use]
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Limit::OpenFiles => ("RLIMIT_NOFILE", "LimitNOFILE"),
            Limit::LockedMemory => ("RLIMIT_MEMLOCK", "LimitMEMLOCK"),
            Limit::FileSize => ("RLIMIT_FSIZE", "LimitFSIZE"),
            Limit::AddressSpace => ("RLIMIT_AS", "LimitAS"),
            Limit::Data => ("RLIMIT_DATA", "LimitDATA"),
        }
    }
}

/// A write past the limit of a file's length is an error from now on, and not the end of the process (SIGXFSZ).
pub fn ignore_file_size_signal() {
    // SAFETY: SIG_IGN is a valid disposition and no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Raises a limit to `wanted`, or as far as is allowed, and returns what it is now. Never lowers it.
///
/// # Errors
/// The error of setrlimit(2).
pub fn raise_limit(limit: Limit, wanted: u64) -> Result<u64, Errno> {
    let resource = match limit {
        Limit::OpenFiles => Resource::Nofile,
        Limit::LockedMemory => Resource::Memlock,
        Limit::FileSize => Resource::Fsize,
        Limit::AddressSpace => Resource::As,
        Limit::Data => Resource::Data,
    };
    let now = rustix::process::getrlimit(resource);
    let current = now.current.unwrap_or(u64::MAX);
    if current >= wanted {
        return Ok(current);
    }
    // The hard limit too, where we are privileged.
    if now.maximum.is_some_and(|maximum| maximum < wanted)
        && rustix::process::setrlimit(resource, Rlimit { current: Some(wanted), maximum: Some(wanted) }).is_ok()
    {
        return Ok(wanted);
    }
    let reachable = wanted.min(now.maximum.unwrap_or(u64::MAX));
    rustix::process::setrlimit(resource, Rlimit { current: Some(reachable), maximum: now.maximum })?;
    Ok(reachable)
}

/// Looks up, again and again, on which CPU a thread runs.
#[derive(Debug)]
pub struct CpuOf {
    stat: std::fs::File,
}

impl CpuOf {
    /// The thread `tid` of process `pid`.
    ///
    /// # Errors
    /// There is no such thread.
    pub fn open(pid: u32, tid: u32) -> io::Result<CpuOf> {
        Ok(CpuOf { stat: std::fs::File::open(format!("/proc/{pid}/task/{tid}/stat"))? })
    }

    /// The CPU it runs on or ran on last (proc(5) stat field 39).
    ///
    /// # Errors
    /// The thread has ended.
    pub fn cpu(&self) -> io::Result<usize> {
        use std::os::unix::fs::FileExt;
        let mut text = [0; 1024];
        let len = self.stat.read_at(&mut text, 0)?;
        let text = String::from_utf8_lossy(&text[..len]);
        // The second field is the name in parentheses and may hold anything: fields are counted from behind it.
        let after = text.rsplit_once(')').map_or("", |(_, after)| after);
        let field = after.split_ascii_whitespace().nth(39 - 3);
        field.and_then(|cpu| cpu.parse().ok()).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// Where the calling thread may run.
#[derive(Clone, Debug)]
pub struct Affinity(rustix::thread::CpuSet);

impl Affinity {
    /// As it is now.
    ///
    /// # Errors
    /// The error of sched_getaffinity(2).
    pub fn of_this_thread() -> Result<Affinity, Errno> {
        Ok(Affinity(rustix::thread::sched_getaffinity(None)?))
    }

    /// Another thread's, as it is now.
    ///
    /// # Errors
    /// The error of sched_getaffinity(2): ESRCH when there is no such thread (any more).
    pub fn of_thread(tid: u32) -> Result<Affinity, Errno> {
        let tid = i32::try_from(tid).ok().and_then(rustix::thread::Pid::from_raw).ok_or(Errno::SRCH)?;
        Ok(Affinity(rustix::thread::sched_getaffinity(Some(tid))?))
    }

    /// The CPU with the highest number that it allows.
    pub fn last(&self) -> Option<usize> {
        (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|cpu| self.0.is_set(*cpu))
    }

    /// Allows a single CPU.
    pub fn is_pinned(&self) -> bool {
        self.0.count() == 1
    }

    /// One CPU, if this affinity allows it.
    pub fn only(&self, cpu: usize) -> Option<Affinity> {
        let mut set = rustix::thread::CpuSet::new();
        (cpu < rustix::thread::CpuSet::MAX_CPU && self.0.is_set(cpu)).then(|| {
            set.set(cpu);
            Affinity(set)
        })
    }

    /// Moves the calling thread there.
    ///
    /// # Errors
    /// The error of sched_setaffinity(2).
    pub fn apply(&self) -> Result<(), Errno> {
        rustix::thread::sched_setaffinity(None, &self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::{LargeFolios, RamFile};

    #[test]
    fn this_process_is_described() {
        let pid = std::process::id();
        assert_eq!(process_of(pid).unwrap(), pid);
        assert!(rss(pid).unwrap() > PAGE_SIZE as u64);
        assert!(start_time(pid).unwrap() >= start_time(1).unwrap());
        let before = cpu_time(pid).unwrap();
        let mut sum = 0u64;
        while cpu_time(pid).unwrap() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(cpu_time(pid).unwrap() > before);
    }

    /// What /proc says of a process that began at 77, in state `state` and with so many threads.
    fn stat(name: &[u8], state: &str, threads: u32) -> Vec<u8> {
        let zeros = "0 ".repeat(16);
        [b"9 (", name, format!(") {state} {zeros}{threads} 0 77 0\n").as_bytes()].concat()
    }

    #[test]
    fn a_process_is_found_whatever_its_name() {
        for name in [&b"qemu"[..], b"\xff\xfebad", b"a) Z 1 (b", b""] {
            let fields = fields_of(&stat(name, "S", 5));
            assert!(matches!(life_by(fields, 77, || panic!("not asked")), Life::Alive), "{name:?}");
        }
        assert!(fields_of(b"9 qemu S").is_err());
        let cut = fields_of(b"9 (qemu) S 1 2");
        assert!(matches!(life_by(cut, 77, || panic!("not asked")), Life::Unknown(_)), "half a line proves nothing");
    }

    #[test]
    fn only_a_fact_ends_a_process() {
        let read = |state, threads| fields_of(&stat(b"qemu", state, threads));
        assert!(matches!(life_by(read("S", 3), 78, || Ok(())), Life::Ended), "its id is another's");
        assert!(matches!(life_by(read("Z", 1), 77, || Ok(())), Life::Ended), "a zombie");
        assert!(matches!(life_by(read("Z", 4), 77, || Ok(())), Life::Alive), "its first thread alone has ended");
        let error = |errno: rustix::io::Errno| io::Error::from(errno);
        use rustix::io::Errno;
        for gone in [Errno::NOENT, Errno::SRCH] {
            assert!(matches!(life_by(Err(error(gone)), 77, || Err(error(Errno::SRCH))), Life::Ended), "{gone}");
            assert!(matches!(life_by(Err(error(gone)), 77, || Ok(())), Life::Unknown(_)), "{gone}: /proc hides it");
            let no_descriptor = life_by(Err(error(gone)), 77, || Err(error(Errno::MFILE)));
            assert!(matches!(no_descriptor, Life::Unknown(_)), "{gone}, and no descriptor to ask again");
        }
        for doubt in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::PERM, Errno::IO, Errno::INTR] {
            let life = life_by(Err(error(doubt)), 77, || panic!("not asked"));
            assert!(matches!(life, Life::Unknown(_)), "{doubt}");
        }
    }

    #[test]
    fn a_childs_life_and_end() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, start) = (child.id(), start_time(child.id()).unwrap());
        assert!(matches!(life(pid, start), Life::Alive));
        assert!(matches!(life(pid, start + 1), Life::Ended));
        let pidfd = pidfd_open(pid).unwrap();
        assert!(!has_ended(pidfd.as_fd()));
        child.kill().unwrap();
        let mut polled = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut polled, None).unwrap();
        assert!(has_ended(pidfd.as_fd()));
        assert!(matches!(life(pid, start), Life::Ended), "not waited for: a zombie");
        child.wait().unwrap();
        assert!(matches!(life(pid, start), Life::Ended));
    }

    #[test]
    fn a_thread_is_known_by_its_process() {
        let tid = std::thread::spawn(|| {
            let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            (tid, process_of(tid).unwrap())
        });
        let (tid, process) = tid.join().unwrap();
        assert_ne!(tid, process);
        assert_eq!(process, std::process::id());
    }

    #[test]
    fn a_process_that_ended_is_seen_by_its_pidfd() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pidfd = pidfd_open(child.id()).unwrap();
        let readable = |pidfd: &OwnedFd, wait: i64| {
            let mut polled = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
            let timeout = rustix::event::Timespec { tv_sec: wait, tv_nsec: 0 };
            rustix::event::poll(&mut polled, Some(&timeout)).unwrap() == 1
        };
        assert!(!readable(&pidfd, 0));
        child.kill().unwrap();
        assert!(readable(&pidfd, 10));
        child.wait().unwrap();
        assert_eq!(start_time(child.id()).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(pidfd_open(child.id()).is_err());
    }

    #[test]
    fn mappers_of_a_ram_file_are_found_by_inode() {
        let file = RamFile::create("mappers", 1 << 20, rustix::process::getuid().as_raw()).unwrap();
        let (dev, ino) = file.inode();
        assert_eq!(mappers(dev, ino).unwrap(), Vec::<u32>::new());
        let _view = file.map(LargeFolios::Never).unwrap();
        // A process that another test is just spawning shares our memory for a moment.
        assert!(mappers(dev, ino).unwrap().contains(&std::process::id()));
    }

    #[test]
    fn a_daemon_that_locks_its_memory_leaves_the_vms_sparse() {
        const INSIDE: &str = "PAGODA_SYS_TEST_LOCKED";
        if std::env::var_os(INSIDE).is_none() {
            // In a process of its own: locked mappings would break the other tests.
            let name = "process::tests::a_daemon_that_locks_its_memory_leaves_the_vms_sparse";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let output = child.args(["--exact", name]).env(INSIDE, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        match lock_memory() {
            Ok(()) | Err(Errno::PERM | Errno::NOMEM) => {}
            Err(errno) => panic!("{errno}"),
        }
        let file = RamFile::create("locked", 64 << 20, rustix::process::getuid().as_raw()).unwrap();
        let view = file.map(LargeFolios::Never).unwrap();
        view.write_page(5, &[1; PAGE_SIZE]);
        assert_eq!(file.allocated().unwrap(), PAGE_SIZE as u64);
        view.zap(0..10).unwrap();
        file.punch(0, 64 << 20).unwrap();
        assert_eq!(file.allocated().unwrap(), 0);
    }

    #[test]
    fn lines_of_maps() {
        let check = |line, expected| assert_eq!(maps_file(line), expected, "{line}");
        let shm = rustix::fs::makedev(0, 1);
        check("7f00-7f10 rw-s 00000000 00:01 1035 /memfd:ram (deleted)", Some((shm, 1035)));
        check("7f00-7f10 rw-p 00000000 00:00 0 ", Some((0, 0)));
        check("7f00-7f10 rw-p 00000000 fe:0a 7 /bin/a b", Some((rustix::fs::makedev(0xfe, 0x0a), 7)));
        check("garbage", None);
    }

    #[test]
    fn a_wake_up_is_seen_once() {
        let wake = Wake::new().unwrap();
        let other = wake.try_clone().unwrap();
        assert!(!wake.clear());
        other.wake();
        other.wake();
        assert!(wake.clear());
        assert!(!wake.clear());
    }

    #[test]
    fn no_copy_of_a_process_with_threads() {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || wait.recv());
        assert_eq!(fork().unwrap_err().raw_os_error(), Some(libc::EINVAL));
        drop(end);
        let _ = other.join();
    }

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        let before = raise_limit(Limit::OpenFiles, 0).unwrap();
        assert_eq!(raise_limit(Limit::OpenFiles, 1).unwrap(), before);
        assert!(raise_limit(Limit::OpenFiles, before + 1).unwrap() >= before);
    }
}
