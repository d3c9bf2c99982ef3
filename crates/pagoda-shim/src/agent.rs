//! The agent: a thread in the VMM that does what only the VMM's own process can.
//!
//! It owns the agent connection: it alone reads it, and it alone replaces it when the daemon went away. Meanwhile the
//! VM runs on; whoever touches a page that is out waits until the next daemon has taken the userfaultfds from
//! a new Hello. It waits for no lock that a thread of the VMM might hold while it waits for the daemon.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::time::Duration;

use pagoda_abi::attach::{Packet, Range};

use crate::config::{Config, config};
use crate::link::{self, Broken};
use crate::orders::Order;
use crate::say::{give_up, say};
use crate::{attachment, clock, folios, foreign, gate, orders, ram, real};

/// First pause between two attempts to reach a daemon: a restart under load costs faults at most so much.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest pause: 50 connect(2)s a second cost nothing that could be measured.
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(20);
/// Pause after a refusal: somebody has to change something first.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// Packets live on the stack (4 KiB encoded, as much decoded); the VMM's thread-local data comes out of it too.
const STACK: usize = 256 << 10;
/// `MADV_COLLAPSE` of `linux/mman.h` (Linux 6.1).
const MADV_COLLAPSE: c_int = 25;

/// Starts the agent on a connection that has been welcomed.
pub fn start(agent: c_int) {
    foreign::connected(agent);
    start_thread(main, agent as usize as *mut c_void);
}

/// Starts a thread of the shim's, or ends the process.
pub fn start_thread(main: extern "C" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) {
    // SAFETY: plain C structures, initialised by the calls below before they are used.
    let (mut all, mut before, mut attributes): (libc::sigset_t, libc::sigset_t, libc::pthread_attr_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed()) };
    let mut thread: libc::pthread_t = 0;
    // SAFETY: every pointer is to a live local; the attributes are initialised before use; `main` is a thread function
    // whose argument is a value, not a pointer to anything. The new thread inherits the full signal mask, so no handler of the VMM
    // ever runs on its small stack; the caller's mask is put back.
    let started = unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, STACK);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let started = libc::pthread_create(&mut thread, &attributes, main, argument);
        libc::pthread_attr_destroy(&mut attributes);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut());
        started
    };
    if started != 0 {
        give_up(format_args!("attach: a thread of the shim cannot be started (error {started})"));
    }
}

extern "C" fn main(agent: *mut c_void) -> *mut c_void {
    let agent = agent as usize as c_int;
    // SAFETY: PR_SET_NAME reads a NUL-terminated name of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pagoda-agent".as_ptr()) };
    let Some(config) = config() else { return null_mut() };
    loop {
        let Err(broken) = serve(agent);
        // Whoever had it opened is gone.
        gate::shut();
        if let Broken::Nonsense(error) = broken {
            say(format_args!("agent: {error}; connecting again"));
        }
        reconnect(agent, config);
    }
}

/// Answers the daemon until the connection breaks.
fn serve(agent: c_int) -> Result<std::convert::Infallible, Broken> {
    loop {
        let answer = match link::receive_plain(agent)? {
            Packet::Zap { seq, ranges } => {
                let (epoch, errno) = zap(ranges.as_slice());
                Packet::Zapped { seq, epoch, errno }
            }
            Packet::Collapse { seq, ranges } => {
                let (done, errno) = collapse(ranges.as_slice());
                Packet::Collapsed { seq, errno, done }
            }
            Packet::Clock { seq } => {
                clock::rings::refresh();
                Packet::Clocked { seq }
            }
            Packet::Gate { seq, open } => {
                if open {
                    gate::open();
                } else {
                    gate::shut();
                }
                Packet::Gated { seq, open }
            }
            Packet::Folios { large } => {
                folios::advise(large);
                continue;
            }
            Packet::Own { order, region, offset, len } => {
                orders::order(Order { number: order, region, offset, len });
                continue;
            }
            Packet::Split { ranges, .. } => {
                split(ranges.as_slice());
                continue;
            }
            Packet::Join { ranges, .. } => {
                join(ranges.as_slice());
                continue;
            }
            _ => return Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
        };
        link::send(agent, &answer, &[])?;
    }
}

/// Removes page-table entries; the pages stay in the RAM file, and the next access faults. Answers the zap's epoch.
pub fn zap(ranges: &[Range]) -> (u64, u32) {
    clock::rings::refresh();
    let errno = ram::pinned(ranges, || {
        let failed = ranges.iter().map(|range| madvise(range, libc::MADV_DONTNEED)).find(|errno| *errno != 0);
        failed.unwrap_or(0)
    });
    let epoch = clock::shared().map_or(0, pagoda_abi::shared::Shared::advance);
    (epoch, errno.unwrap_or(libc::EINVAL as u32))
}

/// Gives huge mappings back; answers how many ranges succeeded, and the last error.
fn collapse(ranges: &[Range]) -> (u32, u32) {
    if folios::must_be_small() {
        return (0, libc::EINVAL as u32);
    }
    let outcome = ram::pinned(ranges, || {
        ranges.iter().fold((0, 0), |(done, errno), range| match madvise(range, MADV_COLLAPSE) {
            0 => (done + 1, errno),
            failed => (done, failed),
        })
    });
    outcome.unwrap_or((0, libc::EINVAL as u32))
}

/// Has huge pages mapped page by page: a use of one is none of the others then. All of them at once, because the first fault
/// in an empty page table maps many.
fn split(ranges: &[Range]) {
    let Some(shared) = clock::shared() else { return };
    let one_by_one = |range: &Range| {
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTNEED, libc::MADV_POPULATE_READ] {
            madvise(range, advice);
        }
    };
    ram::pinned(ranges, || shared.while_unarmed(|| ranges.iter().for_each(one_by_one)));
}

/// Has them mapped huge again, from their next use on.
fn join(ranges: &[Range]) {
    ram::pinned(ranges, || {
        for range in ranges {
            folios::advise_range(range.addr as usize, range.len as usize);
            madvise(range, libc::MADV_DONTNEED);
        }
    });
}

/// Advice on one range of RAM; the error, or 0.
fn madvise(range: &Range, advice: c_int) -> u32 {
    // SAFETY: the range consists of whole pages of a RAM mapping that stays while `ram::pinned` runs this. It is shared
    // file memory: all that is advised here changes page tables, never contents.
    if unsafe { real::madvise(range.addr as *mut c_void, range.len as usize, advice) } == 0 {
        return 0;
    }
    // SAFETY: errno's location is valid for the calling thread.
    unsafe { *libc::__errno_location() as u32 }
}

/// Tries until a daemon has welcomed us again, and puts the new connection in the old one's place.
fn reconnect(agent: c_int, config: &Config) {
    let mut pause = RETRY_PAUSE_MIN;
    let mut refused_once = false;
    loop {
        let Ok(link) = link::connect(&config.name.address) else {
            sleep(pause);
            pause = (pause * 5 / 4).min(RETRY_PAUSE_MAX);
            continue;
        };
        let answer =
            attachment::attachment().map_or(Err(Broken::Gone), |attachment| attachment::hello(link, attachment));
        match answer {
            Ok(Ok(_)) => {
                // SAFETY: both are fds of ours; dup3(2) replaces the broken connection in one step, so that a thread
                // that reports on it never meets a closed or a strange fd.
                unsafe { libc::dup3(link, agent, libc::O_CLOEXEC) };
                link::close(link);
                foreign::connected(agent);
                return;
            }
            Ok(Err(text)) => {
                if !refused_once {
                    say(format_args!("the daemon refuses this VM, which waits: {text}"));
                }
                refused_once = true;
                pause = REFUSED_PAUSE;
            }
            Err(_) => pause = (pause * 5 / 4).min(RETRY_PAUSE_MAX),
        }
        link::close(link);
        sleep(pause);
    }
}

/// Waits, with all signals blocked as they are in the shim's threads.
pub fn sleep(pause: Duration) {
    let time = libc::timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) };
    // SAFETY: nanosleep(2) reads one timespec; the rest is not asked for. All signals are blocked here, and an early end
    // would do no harm.
    unsafe { libc::nanosleep(&time, null_mut()) };
}
