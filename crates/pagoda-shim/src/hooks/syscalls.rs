//! syscall(2): a system call by its number goes the way of the function of its name.
//!
//! A number that is neither handled nor on the list of what cannot hold guest RAM is reported, and the VM's memory stays.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use libc::{iovec, mmsghdr, mode_t, msghdr, off_t, size_t};

use super::{files, hook, ioctls, memory, queues, sockets, splices};
use crate::clock::sync::{timed, timed_unless_copied};
use crate::config::{config, name};
use crate::say::say;
use crate::{foreign, ram, real};
use pagoda_abi::attach::ForeignReason;

/// `BPF_MAP_CREATE` and `BPF_MAP_TYPE_TASK_STORAGE` of `linux/bpf.h`.
const BPF_MAP_CREATE: c_long = 0;
const BPF_MAP_TYPE_TASK_STORAGE: u32 = 29;

thread_local! {
    static IN_TRACKED: Cell<bool> = const { Cell::new(false) };
}

/// Runs the real function of a hook that has done its part: system calls that its library makes by number are that function's.
pub fn tracked<R>(call: impl FnOnce() -> R) -> R {
    let outer = IN_TRACKED.replace(true);
    let result = call();
    IN_TRACKED.set(outer);
    result
}

/// Numbers that cannot hold guest RAM: they name no memory, or the kernel copies what it reads or writes there through the
/// page tables (copy_from_user, copy_to_user), and has done so when they return. By their manual pages and the kernel's
/// source, up to Linux 6.18 on x86-64; anything newer is unknown.
fn is_harmless(number: c_long) -> bool {
    // Numbers by name, in the order of asm/unistd_64.h.
    matches!(
        number,
        // open, close, stat, fstat, lstat, poll, lseek
        2..=8
        // mprotect, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn
        | 10 | 12..=15
        // access, pipe, select, sched_yield
        | 21..=24
        // msync, mincore
        | 26 | 27
        // shmget, shmat, shmctl, dup, dup2, pause, nanosleep, getitimer, alarm, setitimer, getpid
        | 29..=39
        // socket, connect, accept
        | 41..=43
        // shutdown, bind, listen, getsockname, getpeername, socketpair
        | 48..=53
        // getsockopt: a copy, but for a receive window that is a mapping of the socket's own
        | 55
        // clone, fork, vfork, execve, exit, wait4, kill, uname, semget to shmdt
        | 56..=67
        // msgget, msgsnd, msgrcv, msgctl, fcntl, flock, fsync, fdatasync
        | 68..=75
        // truncate: RAM files are sealed
        | 76
        // getdents, getcwd, chdir, fchdir, rename to lchown, umask
        | 78..=95
        // gettimeofday to setrlimit and the rest of the classic identity, signal, scheduling and time calls, ptrace aside
        | 96..=100 | 102..=160
        // sync, acct, settimeofday, mount, umount2, swapon, swapoff, reboot, sethostname, setdomainname, iopl, ioperm
        | 161..=173
        // init_module, delete_module, quotactl: copies
        | 175 | 176 | 179
        // gettid, readahead
        | 186 | 187
        // setxattr to fremovexattr
        | 188..=199
        // tkill, time, futex, sched_setaffinity, sched_getaffinity, set_thread_area
        | 200..=205
        // io_setup, io_getevents, io_cancel: they start no transfer
        | 206 | 208 | 210
        // get_thread_area, epoll_create
        | 211 | 213
        // getdents64, set_tid_address, semtimedop
        | 217 | 218 | 220
        // fadvise64, timer_create to exit_group, epoll_wait, epoll_ctl, tgkill, utimes
        | 221..=235
        // mbind, set_mempolicy, get_mempolicy: folios move, content stays
        | 237..=239
        // mq_open to mq_getsetattr
        | 240..=245
        // waitid, add_key, request_key, keyctl, ioprio_set to inotify_rm_watch, migrate_pages
        | 247..=256
        // openat to ppoll, unshare, set_robust_list, get_robust_list
        | 257..=274
        // sync_file_range
        | 277
        // move_pages, utimensat, epoll_pwait, signalfd, timerfd_create, eventfd
        | 279..=284
        // timerfd_settime, timerfd_gettime, accept4, signalfd4, eventfd2, epoll_create1, dup3, pipe2, inotify_init1
        | 286..=294
        // rt_tgsigqueueinfo, perf_event_open
        | 297 | 298
        // fanotify_init, fanotify_mark, prlimit64 to syncfs, setns, getcpu
        | 300..=306 | 308 | 309
        // kcmp, finit_module, sched_setattr, sched_getattr, renameat2, seccomp, getrandom, memfd_create
        | 312..=319
        // execveat, userfaultfd, membarrier, mlock2
        | 322..=325
        // pkey_mprotect, pkey_alloc, pkey_free, statx, io_pgetevents, rseq
        | 329..=334
        // pidfd_send_signal, open_tree to close_range, openat2, pidfd_getfd, faccessat2
        | 424 | 428..=439
        // process_madvise: of the advice it takes none changes content; epoll_pwait2, mount_setattr, quotactl_fd, landlock_*, memfd_secret, process_mrelease, futex_waitv
        | 440..=449
        // set_mempolicy_home_node, cachestat, fchmodat2, map_shadow_stack, futex_wake to futex_requeue, statmount, listmount, lsm_*
        | 450..=461
        // mseal, setxattrat to removexattrat, open_tree_attr, file_getattr, file_setattr
        | 462..=469
    )
}

/// How a system call that may hold RAM is made.
enum Way {
    /// Passed on.
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
            Way::TimedUnlessCopied(fd, unsafe { sockets::inspect_sent(b as *const msghdr, c as c_int) })
        }
        // SAFETY: an array of messages, as the system call demands of its caller.
        libc::SYS_sendmmsg => Way::TimedUnlessCopied(fd, unsafe {
            sockets::inspect_all_sent(b as *const mmsghdr, c as c_uint, d as c_int)
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
        if config().is_none() || IN_TRACKED.get() {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that could hold RAM, or that nobody knows yet.
    #[test]
    fn what_may_hold_ram_is_not_on_the_list_of_the_harmless() {
        let may = [
            libc::SYS_read,
            libc::SYS_mmap,
            libc::SYS_munmap,
            libc::SYS_ioctl,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_mremap,
            libc::SYS_madvise,
            libc::SYS_sendfile,
            libc::SYS_sendto,
            libc::SYS_recvfrom,
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_setsockopt,
            libc::SYS_ftruncate,
            libc::SYS_ptrace,
            libc::SYS_io_destroy,
            libc::SYS_io_submit,
            libc::SYS_remap_file_pages,
            libc::SYS_kexec_load,
            libc::SYS_splice,
            libc::SYS_tee,
            libc::SYS_vmsplice,
            libc::SYS_fallocate,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_recvmmsg,
            libc::SYS_sendmmsg,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_bpf,
            libc::SYS_copy_file_range,
            libc::SYS_preadv2,
            libc::SYS_pwritev2,
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_enter,
            libc::SYS_io_uring_register,
            500,
            -1,
        ];
        for number in may {
            assert!(!is_harmless(number), "{number}");
        }
    }

    #[test]
    fn what_vmms_call_by_number_is_harmless() {
        let calls = [
            libc::SYS_futex,
            libc::SYS_gettid,
            libc::SYS_getrandom,
            libc::SYS_memfd_create,
            libc::SYS_membarrier,
            libc::SYS_pidfd_open,
            libc::SYS_capset,
            libc::SYS_setresuid,
            libc::SYS_setresgid,
            libc::SYS_setgroups,
            libc::SYS_sched_setattr,
            libc::SYS_close_range,
            libc::SYS_statx,
            libc::SYS_seccomp,
            libc::SYS_mbind,
            libc::SYS_tgkill,
            libc::SYS_io_setup,
            libc::SYS_io_getevents,
            libc::SYS_io_cancel,
            libc::SYS_keyctl,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_process_madvise,
        ];
        for number in calls {
            assert!(is_harmless(number), "{number}");
        }
    }
}
