//! syscall(2): a system call by its number goes the way of the function of its name.
//!
//! A number that is neither handled nor on the list of what cannot hold guest RAM is reported, and the VM's memory stays.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use libc::{iovec, mmsghdr, mode_t, msghdr, off_t, size_t};

use super::harmless::is_harmless;
use super::tracked::is_in_tracked;
use super::{files, hook, ioctls, memory, queues, sockets, splices};
use crate::clock::sync::{timed, timed_unless_copied};
use crate::config::{config, name};
use crate::say::say;
use crate::{foreign, ram, real};
use pagoda_abi::attach::ForeignReason;

/// `BPF_MAP_CREATE` and `BPF_MAP_TYPE_TASK_STORAGE` of `linux/bpf.h`.
const BPF_MAP_CREATE: c_long = 0;
const BPF_MAP_TYPE_TASK_STORAGE: u32 = 29;

/// How a system call that may hold RAM is made.
enum Way {
    /// It is passed on as it is.
    Plain,
    /// On the clock if this is RAM.
    Timed(bool),
    /// The same, unless its file is known to copy.
    TimedUnlessCopied(c_int, bool),
}

fn buffer(addr: c_long, len: c_long) -> bool {
    ram::overlaps(addr as usize, len as usize)
}

fn vector(iov: c_long, count: c_long) -> bool {
    // SAFETY: an array of `count` elements, as the system call demands of its caller.
    unsafe { ram::any_overlaps(iov as *const iovec, count as usize) }
}

/// What has to happen before a system call of these arguments, and how it is made then.
fn way(number: c_long, arguments: [c_long; 6]) -> Way {
    let [a, b, c, d, e, _] = arguments;
    let fd = a as c_int;
    match number {
        libc::SYS_read | libc::SYS_write => Way::TimedUnlessCopied(fd, buffer(b, c)),
        libc::SYS_pread64 | libc::SYS_pwrite64 => Way::Timed(buffer(b, c)),
        libc::SYS_readv | libc::SYS_writev => Way::TimedUnlessCopied(fd, vector(b, c)),
        libc::SYS_preadv | libc::SYS_pwritev => Way::Timed(vector(b, c)),
        libc::SYS_preadv2 | libc::SYS_pwritev2 => Way::TimedUnlessCopied(fd, vector(b, c)),
        libc::SYS_recvfrom => Way::TimedUnlessCopied(fd, buffer(b, c)),
        libc::SYS_sendto => {
            let touches_ram = buffer(b, c);
            sockets::before_send(touches_ram, d as c_int);
            Way::TimedUnlessCopied(fd, touches_ram)
        }
        libc::SYS_sendmsg => {
            // SAFETY: a message, as the system call demands of its caller.
            Way::TimedUnlessCopied(fd, unsafe { sockets::inspect_sent(a as c_int, b as *const msghdr, c as c_int) })
        }
        // SAFETY: an array of messages, as the system call demands of its caller.
        libc::SYS_sendmmsg => Way::TimedUnlessCopied(fd, unsafe {
            sockets::inspect_all_sent(a as c_int, b as *const mmsghdr, c as c_uint, d as c_int)
        }),
        // SAFETY: a message, as the system call demands of its caller.
        libc::SYS_recvmsg => Way::TimedUnlessCopied(fd, unsafe { sockets::touches_ram(b as *const msghdr) }),
        libc::SYS_recvmmsg => {
            // SAFETY: an array of messages, as the system call demands of its caller.
            Way::TimedUnlessCopied(fd, unsafe { sockets::any_touches_ram(b as *const mmsghdr, c as c_uint) })
        }
        libc::SYS_ioctl => Way::Timed(ioctls::before(b as libc::c_ulong, c as *mut c_void)),
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev => Way::Timed(vector(b, c) || vector(d, e)),
        libc::SYS_vmsplice => {
            sockets::report_if(vector(b, c));
            Way::Plain
        }
        libc::SYS_sendfile | libc::SYS_tee => {
            splices::before([a as c_int, b as c_int]);
            Way::Plain
        }
        libc::SYS_splice | libc::SYS_copy_file_range => {
            splices::before([a as c_int, c as c_int]);
            Way::Plain
        }
        libc::SYS_bpf => {
            // SAFETY: a BPF_MAP_CREATE begins with the map's type, 32 bits (linux/bpf.h).
            let makes = |kind| a == BPF_MAP_CREATE && b != 0 && unsafe { (b as *const u32).read_unaligned() } == kind;
            // Values of other maps are copied; in task storage a pointer may pin the page it points at.
            sockets::report_if(makes(BPF_MAP_TYPE_TASK_STORAGE));
            Way::Plain
        }
        _ => {
            if !is_harmless(number) && foreign::report(ForeignReason::UntrackedIo) {
                say(format_args!(
                    "system call {number} is not known to leave guest memory alone, so this VM's memory is no longer \
                     paged out; please report the number and the program"
                ));
            }
            Way::Plain
        }
    }
}

hook! {
    /// A system call by number.
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long {
        // SAFETY: the caller's call, passed on unchanged. Arguments that were not given are not used by it.
        let call = || unsafe { real::syscall(number, a, b, c, d, e, f) };
        // SAFETY: the caller's call, by its function, which has the same conditions.
        unsafe {
            match number {
                libc::SYS_open => return files::open(a as *const c_char, b as c_int, c as mode_t).into(),
                libc::SYS_openat => {
                    return files::openat(a as c_int, b as *const c_char, c as c_int, d as mode_t).into();
                }
                libc::SYS_userfaultfd if name().is_some() => return files::refuse_userfaultfd().into(),
                _ => {}
            }
        }
        if config().is_none() || is_in_tracked() {
            return call();
        }
        // SAFETY: the caller's call, by its function, which has the same conditions.
        unsafe {
            match number {
                libc::SYS_mmap => {
                    return memory::mmap(a as *mut c_void, b as size_t, c as c_int, d as c_int, e as c_int, f) as c_long;
                }
                libc::SYS_munmap => return memory::munmap(a as *mut c_void, b as size_t).into(),
                libc::SYS_mremap => {
                    return memory::mremap(a as *mut c_void, b as size_t, c as size_t, d as c_int, e as *mut c_void)
                        as c_long;
                }
                libc::SYS_madvise => return memory::madvise(a as *mut c_void, b as size_t, c as c_int).into(),
                libc::SYS_fallocate => return memory::fallocate(a as c_int, b as c_int, c, d as off_t).into(),
                libc::SYS_ftruncate => return memory::ftruncate(a as c_int, b).into(),
                libc::SYS_remap_file_pages => {
                    return memory::remap_file_pages(a as *mut c_void, b as size_t, c as c_int, d as size_t, e as c_int)
                        .into();
                }
                libc::SYS_setsockopt => {
                    let value = d as *const c_void;
                    return sockets::setsockopt(a as c_int, b as c_int, c as c_int, value, e as libc::socklen_t).into();
                }
                libc::SYS_io_destroy => queues::context_is_destroyed(a as *mut c_void),
                libc::SYS_io_uring_enter if c_uint::try_from(b) != Ok(0) => sockets::report_if(true),
                libc::SYS_io_uring_enter => return call(),
                libc::SYS_io_uring_register => queues::before_register(b as c_uint, c as *const c_void, d as c_uint),
                libc::SYS_io_uring_setup | libc::SYS_io_submit => sockets::report_if(true),
                _ => {
                    return match way(number, [a, b, c, d, e, f]) {
                        Way::Plain => call(),
                        Way::Timed(on_clock) => timed(on_clock, call),
                        Way::TimedUnlessCopied(fd, touches_ram) => timed_unless_copied(fd, touches_ram, call),
                    };
                }
            }
        }
        call()
    }
}
