//! System calls that leave guest RAM alone.

use std::ffi::c_long;

/// Numbers that cannot hold guest RAM: they name no memory, or the kernel copies what it reads or writes there through the
/// page tables (copy_from_user, copy_to_user), and has done so when they return. By their manual pages and the kernel's
/// source, up to Linux 6.18 on x86-64; anything newer is unknown.
pub fn is_harmless(number: c_long) -> bool {
    is_harmless_below_257(number) || is_harmless_from_257(number)
}

/// Up to migrate_pages, in the order of asm/unistd_64.h, by name.
fn is_harmless_below_257(number: c_long) -> bool {
    matches!(
        number,
        // open, close, stat, fstat, lstat, poll, lseek
        2..=8
        // mprotect, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn
        | 10 | 12..=15
        // access, pipe, select, sched_yield
        | 21..=24
        // msync, mincore: neither keeps a page
        | 26 | 27
        // shmget, shmat, shmctl, dup, dup2, pause, nanosleep, getitimer, alarm, setitimer, getpid
        | 29..=39
        // socket, connect, accept: addresses are copied
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
        // chroot, sync, acct, settimeofday, mount, umount2, swapon, swapoff, reboot, sethostname, setdomainname, iopl, ioperm
        | 161..=173
        // init_module, delete_module, quotactl: copies
        | 175 | 176 | 179
        // gettid, readahead: neither names memory
        | 186 | 187
        // setxattr to fremovexattr: names and values are copied
        | 188..=199
        // tkill, time, futex, sched_setaffinity, sched_getaffinity, set_thread_area
        | 200..=205
        // io_setup, io_getevents, io_cancel: they start no transfer
        | 206 | 208 | 210
        // get_thread_area, epoll_create: a structure is copied, or no memory is named
        | 211 | 213
        // getdents64, set_tid_address, semtimedop: what they read and write is copied
        | 217 | 218 | 220
        // fadvise64, timer_create to exit_group, epoll_wait, epoll_ctl, tgkill, utimes
        | 221..=235
        // mbind, set_mempolicy, get_mempolicy: folios move, content stays
        | 237..=239
        // mq_open to mq_getsetattr: messages are copied
        | 240..=245
        // waitid, add_key, request_key, keyctl, ioprio_set to inotify_rm_watch, migrate_pages
        | 247..=256
    )
}

/// The numbers from openat on, by name.
fn is_harmless_from_257(number: c_long) -> bool {
    matches!(
        number,
        // openat to ppoll, unshare, set_robust_list, get_robust_list
        257..=274
        // sync_file_range: it names no memory
        | 277
        // move_pages, utimensat, epoll_pwait, signalfd, timerfd_create, eventfd
        | 279..=284
        // timerfd_settime, timerfd_gettime, accept4, signalfd4, eventfd2, epoll_create1, dup3, pipe2, inotify_init1
        | 286..=294
        // rt_tgsigqueueinfo, perf_event_open: structures are copied
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
