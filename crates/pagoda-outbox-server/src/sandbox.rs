//! What this process gives up before it looks at a guest's memory or a client's request.
//!
//! Order: descriptors are raised and sockets bound before; then namespaces, an empty root, another user, no privilege, and
//! last the lists of system calls: one for the keeper, which its children inherit, and a shorter one that each of them adds. A step
//! that fails ends the process, for a guest must not find it half done.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid, chdir, pivot_root, setgroups, setresgid, setresuid};
use pagoda_outbox::limits::NODES_MAX;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

/// Descriptors beside those of files: connections, eventfds, guest memory.
const DESCRIPTORS_BESIDE_FILES: u64 = 2048;
/// Descriptors of a transmitter: two of each connection, one of each reader, and some.
const DESCRIPTORS_OF_TRANSMITTER: u64 = 1024;
/// Private memory: threads' stacks, requests, names. Files' memory and the guest's is shared and not part of it.
const PRIVATE_BYTES_MAX: u64 = 1 << 30;
/// `nobody` and `nogroup` of Debian, the user of network file systems that stands for none.
const NOBODY: u32 = 65534;

/// Room for a descriptor for each file.
pub fn raise_descriptors() -> Result<()> {
    let wanted = NODES_MAX as u64 + DESCRIPTORS_BESIDE_FILES;
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|maximum| maximum < wanted) {
        bail!(
            "only {} descriptors may be open, and {wanted} are needed: raise the hard limit (ulimit -Hn)",
            limit.maximum.unwrap_or(0)
        );
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: Some(wanted) }).context("limit descriptors")
}

/// What of the host a process stays in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Namespaces {
    /// None: it has mounts, networks and users of its own.
    Own,
    /// All, where a user may not have own ones.
    Hosts,
}

/// Leaves every directory and network of the host, and the user root. Needs a process of one thread.
pub fn leave_host(namespaces: Namespaces) -> Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).context("forbid core dumps")?;
    setrlimit(Resource::Data, Rlimit { current: Some(PRIVATE_BYTES_MAX), maximum: Some(PRIVATE_BYTES_MAX) })
        .context("limit private memory")?;
    let is_root = Uid::effective().is_root();
    if namespaces == Namespaces::Own {
        enter_namespaces(is_root)?;
        empty_root()?;
    }
    if is_root {
        let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        setgroups(&[]).context("give up groups")?;
        setresgid(gid, gid, gid).context("give up the group root")?;
        setresuid(uid, uid, uid).context("give up the user root")?;
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .context("give up capabilities")?;
    set_no_new_privs(true).context("give up privileges of programs")
}

fn enter_namespaces(is_root: bool) -> Result<()> {
    let apart =
        CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    if is_root {
        return unshare(apart).context("enter mount and network namespaces");
    }
    let (uid, gid) = (Uid::effective(), Gid::effective());
    unshare(apart | CloneFlags::CLONE_NEWUSER).context(
        "enter a user namespace: this host does not let users have their own (see kernel.unprivileged_userns_clone, \
         user.max_user_namespaces and AppArmor; or pagoda run --outbox-no-namespaces)",
    )?;
    std::fs::write("/proc/self/setgroups", "deny").context("give up groups")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).context("map the user")?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).context("map the group")
}

/// Makes an empty, read-only directory the root, and lets go of the host's.
fn empty_root() -> Result<()> {
    let (nothing, quiet) = (None::<&str>, MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC);
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).context("keep mounts to ourselves")?;
    // Any directory that is there on every host.
    mount(Some("none"), "/proc", Some("tmpfs"), quiet, Some("size=4k,nr_inodes=2,mode=555"))
        .context("make an empty root")?;
    chdir("/proc").context("enter the empty root")?;
    pivot_root(".", ".").context("make it the root")?;
    umount2(".", MntFlags::MNT_DETACH).context("let go of the host's root")?;
    chdir("/").context("enter the root")?;
    mount(nothing, "/", nothing, quiet | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, nothing).context("make it read-only")
}

/// System calls that a worker may use whatever their arguments: what the file server and its threads use. None opens a file, makes a
/// connection or starts a program. It accepts the daemon and QEMU; it has no socket of a network.
const ALLOWED: [libc::c_long; 76] = [
    libc::SYS_accept4,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_poll,
    libc::SYS_pidfd_open,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_prlimit64,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_time,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_uname,
    libc::SYS_wait4,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_getuid,
    libc::SYS_geteuid,
];

/// System calls that a transmitter may use whatever their arguments. It gets descriptors of files' memory by which it could write; so none
/// of these writes anywhere but to where a descriptor's position is, which is behind the end of what such a file may have
/// ([`crate::outbox::file_memory`]), and none moves that position, changes a descriptor's flags, or gives memory back. It makes no
/// threads.
const ALLOWED_TO_TRANSMIT: [libc::c_long; 49] = [
    libc::SYS_accept4,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sendfile,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_time,
    libc::SYS_write,
    libc::SYS_writev,
];

/// What the keeper uses beside those: a socket to each worker, processes without another program, and the children's own lists.
const ALLOWED_TO_KEEP: [libc::c_long; 14] = [
    libc::SYS_bind,
    libc::SYS_clone,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_getppid,
    libc::SYS_listen,
    libc::SYS_pidfd_send_signal,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_tgkill,
    libc::SYS_unshare,
    libc::SYS_waitid,
];

/// `FIONBIO`; `UFFDIO_WAKE` and `USERFAULTFD_IOC_NEW` for the shim.
const IOCTLS: [u64; 3] = [0x5421, 0x8010_aa02, 0xaa00];
/// How much of what was written to a socket has not been acknowledged.
const SIOCOUTQ: u64 = 0x5411;

fn is(argument: u8, value: u64) -> Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)?)
}

/// These bits of an argument are `value`.
fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value)?)
}

fn only(argument: u8, value: u64) -> Result<SeccompRule> {
    Ok(SeccompRule::new(vec![is(argument, value)?])?)
}

/// Room for no more descriptors than a transmitter needs.
pub fn limit_transmitter() -> Result<()> {
    let most = Some(DESCRIPTORS_OF_TRANSMITTER);
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).context("limit descriptors")
}

/// A worker without its keeper would have memory that nobody counts.
///
/// # Errors
/// The keeper has ended already.
pub fn end_with_keeper(keeper: u32) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("end with the keeper")?;
    // It may have ended before. Then another process is the parent.
    ensure!(std::os::unix::process::parent_id() == keeper, "the keeper has ended");
    Ok(())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn whatever_their_arguments(calls: &[libc::c_long]) -> Rules {
    calls.iter().map(|call| (*call, Vec::new())).collect()
}

fn listed() -> Result<Rules> {
    let mut rules = whatever_their_arguments(&ALLOWED);
    let ioctls: Result<Vec<SeccompRule>> = IOCTLS.iter().map(|request| only(1, *request)).collect();
    rules.insert(libc::SYS_ioctl, ioctls?);
    Ok(rules)
}

/// The keeper's list. It holds for its children as well.
pub fn allow_keeping() -> Result<()> {
    let mut rules = listed()?;
    rules.extend(whatever_their_arguments(&ALLOWED_TO_TRANSMIT));
    rules.extend(whatever_their_arguments(&ALLOWED_TO_KEEP));
    rules.entry(libc::SYS_ioctl).or_default().push(only(1, SIOCOUTQ)?);
    apply(rules)
}

/// From now on only the calls of the worker's list work, for threads that are begun later as well; others fail with EPERM.
pub fn allow_few_calls() -> Result<()> {
    let mut rules = listed()?;
    // To end itself. Other outboxes' processes are of the same user.
    rules.insert(libc::SYS_tgkill, vec![only(0, u64::from(std::process::id()))?]);
    // Threads, and no processes. `clone3` has its flags in memory, where no filter sees them; it is refused below.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![masked(0, thread, thread)?])?]);
    // Threads give themselves a name.
    rules.insert(libc::SYS_prctl, vec![only(0, libc::PR_SET_NAME as u64)?]);
    apply(rules)
}

/// The same of the transmitter's list.
pub fn allow_transmitting() -> Result<()> {
    let mut rules = whatever_their_arguments(&ALLOWED_TO_TRANSMIT);
    rules.insert(libc::SYS_ioctl, vec![only(1, SIOCOUTQ)?]);
    rules.insert(libc::SYS_tgkill, vec![only(0, u64::from(std::process::id()))?]);
    let commands = [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_GETFL];
    // Not to set flags: with O_APPEND a descriptor writes elsewhere than where its position is.
    rules.insert(libc::SYS_fcntl, commands.map(|command| only(1, command as u64)).into_iter().collect::<Result<_>>()?);
    // Memory of its own, not to be executed; of files, to be read alone. Without mprotect(2) that stays so.
    let (anonymous, executed) = (libc::MAP_ANONYMOUS as u64, libc::PROT_EXEC as u64);
    let own = SeccompRule::new(vec![masked(3, anonymous, anonymous)?, masked(2, executed, 0)?])?;
    rules.insert(libc::SYS_mmap, vec![own, only(2, libc::PROT_READ as u64)?]);
    // In tests it is a thread among others, for which the C library grows the heap by mprotect(2).
    #[cfg(test)]
    rules.insert(libc::SYS_mprotect, Vec::new());
    apply(rules)
}

/// Others than these fail with EPERM.
fn apply(mut rules: Rules) -> Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).context("find the processor's system calls")?;
    // ENOSYS makes the C library use `clone`. A filter has one answer for what it does not list, hence two filters.
    let no_clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let (allow, enosys) = (SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32));
    let no_clone3: BpfProgram = SeccompFilter::new(no_clone3, allow.clone(), enosys, arch)?.try_into()?;
    rules.insert(libc::SYS_clone3, Vec::new());
    let filter = SeccompFilter::new(rules, SeccompAction::Errno(libc::EPERM as u32), allow, arch)?;
    let filter: BpfProgram = filter.try_into()?;
    // In this order: the other one does not let another filter be added.
    seccompiler::apply_filter(&no_clone3).context("limit system calls")?;
    seccompiler::apply_filter(&filter).context("limit system calls")
}
