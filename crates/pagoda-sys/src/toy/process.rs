//! Processes, signals, CPU time and swap devices, for the benches.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// CPU time of this process and all its threads, user and system together.
#[must_use]
pub fn cpu_time() -> Duration {
    // SAFETY: an all-zero `rusage` is a valid value of that plain C structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and of the right type; RUSAGE_SELF always exists.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let of = |time: libc::timeval| {
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_usec).unwrap_or(0) * 1000)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Keeps `words` in memory, so that bookkeeping does not take part in the paging it measures.
///
/// # Errors
/// `mlock`'s error (the limit on locked memory).
pub fn lock_in_memory(words: &[u32]) -> io::Result<()> {
    // SAFETY: the range is a live slice; locking changes no contents.
    let rc = unsafe { libc::mlock(words.as_ptr().cast(), std::mem::size_of_val(words)) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads another process's memory. Unlike /proc/PID/mem it waits for pages that a pager has to bring.
///
/// # Errors
/// `process_vm_readv`'s error; EIO when it could not read all of it.
pub fn read_memory(pid: u32, addr: u64, out: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(addr as usize), iov_len: out.len() };
    // SAFETY: `local` is all of a live and exclusive slice, and only it is written to; the kernel checks `remote` against
    // the other process's memory.
    let read = unsafe { libc::process_vm_readv(pid.cast_signed(), &local, 1, &remote, 1, 0) };
    match usize::try_from(read) {
        Ok(read) if read == out.len() => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EIO)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Makes the kernel kill the command's process when the thread that spawns it ends.
pub fn die_with_parent(command: &mut Command) {
    let set = || {
        // SAFETY: prctl(PR_SET_PDEATHSIG) takes a signal number and touches no memory.
        let rc = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the closure runs between fork and exec and does one async-signal-safe system call;
    // it neither allocates nor takes locks (`last_os_error` only reads errno).
    unsafe { command.pre_exec(set) };
}

/// Makes `fd` reach the program that `command` starts, under the same number.
pub fn inherit_fd(command: &mut Command, fd: &OwnedFd) {
    let raw = fd.as_raw_fd();
    let keep = move || {
        // SAFETY: F_SETFD on a number; a bad one gives EBADF.
        let rc = unsafe { libc::fcntl(raw, libc::F_SETFD, 0) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: as in `die_with_parent`: one async-signal-safe call, no allocation, no locks.
    unsafe { command.pre_exec(keep) };
}

/// Takes over an fd that the parent left open for us under a number it told us.
///
/// # Errors
/// `EBADF` when no such fd is open.
pub fn adopt_fd(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC on a number; a bad one gives EBADF.
    let duplicate = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if duplicate < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `duplicate` was just made for us; nobody else owns it.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(duplicate) })
}

/// Write end of the pipe that wakes the termination thread.
static TERMINATION_PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn note_signal(signal: libc::c_int) {
    let byte = [u8::try_from(signal).unwrap_or(0)];
    // SAFETY: write(2) is async-signal-safe; the buffer lives on this stack frame, and a closed
    // pipe only gives an error.
    unsafe { libc::write(TERMINATION_PIPE.load(Ordering::Relaxed), byte.as_ptr().cast(), 1) };
}

/// Runs `cleanup` on a thread of its own when SIGINT, SIGTERM or SIGHUP arrives, then exits with
/// 128 + the signal. Call once.
///
/// # Errors
/// No pipe, no thread, or called twice.
pub fn on_termination(cleanup: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let writer_fd = std::os::fd::IntoRawFd::into_raw_fd(writer);
    let first = TERMINATION_PIPE.compare_exchange(-1, writer_fd, Ordering::SeqCst, Ordering::SeqCst);
    if first.is_err() {
        return Err(io::Error::other("a termination handler is already installed"));
    }
    std::thread::Builder::new().name("termination".into()).spawn(move || {
        let mut byte = [0_u8];
        loop {
            match rustix::io::read(&reader, &mut byte) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(1) => break,
                _ => return,
            }
        }
        cleanup();
        std::process::exit(128 + i32::from(byte[0]));
    })?;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero `sigaction` is a valid value (default handler, empty mask).
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = note_signal as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler is async-signal-safe and lives for the whole program.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Turns swapping to `path` on, with a priority above that of swap already there.
///
/// # Errors
/// The system call's error (not root, no swap signature, holes in the file).
pub fn swap_on(path: &Path) -> io::Result<()> {
    // swapon(2): SWAP_FLAG_PREFER with the priority in the low bits; 32767 is the highest.
    const PREFER_HIGHEST: libc::c_int = 0x8000 | 0x7fff;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is NUL-terminated and outlives the call.
    let rc = unsafe { libc::swapon(path.as_ptr(), PREFER_HIGHEST) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Turns swapping to `path` off; blocks until every page is back.
///
/// # Errors
/// The system call's error (`EINVAL`: not in use).
pub fn swap_off(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is NUL-terminated and outlives the call.
    let rc = unsafe { libc::swapoff(path.as_ptr()) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Binds the calling thread to one CPU.
///
/// # Errors
/// `EINVAL` when that CPU is not ours.
pub fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}

/// Sends SIGKILL to a process.
///
/// # Errors
/// `ESRCH` when it is gone.
pub fn kill(pid: u32) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    Ok(())
}
