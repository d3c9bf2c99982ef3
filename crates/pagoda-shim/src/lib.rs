//! The preloaded library that hands a VM's memory to the daemon.
//!
//! It runs inside other people's VMMs, so it is small, depends on libc alone, and takes no part in paging: the kernel
//! and the daemon do that between them. What it does is what only the VMM's own process can:
//!
//! * it takes RAM from the daemon when the VMM opens it ([`take`]), sees it being mapped ([`ram`]) and hands it over
//!   before the VMM can touch it ([`attach`], [`attachment`]);
//! * it keeps fds that must outlive the daemon, and a thread that takes up with the next one ([`agent`]);
//! * it keeps the clock of direct I/O ([`clock`]), without which a disk would write into pages that are gone;
//! * it turns "these pages are free" into a message ([`calls`]), and tells when somebody else gets at RAM
//!   ([`foreign`]);
//! * it maps what a clone borrows, and moves RAM there when it is the clone's own ([`borrow`]);
//! * it keeps QEMU from leaving RAM out of a migration ([`gate`]);
//! * it notes that the VMM ends by itself, and was not killed ([`end`]);
//! * in a process that maps the RAM of another's VM, it sees to it that the daemon knows of each mapping ([`mapper`]).
//!
//! Owns: the userfaultfds, the RAM fds, the shared memory and the two connections. Nobody else may close them: closing
//! a userfaultfd turns pages that are out into zeros.
//!
//! Order: constructor (reads the environment) -> the VMM opens its RAM -> it maps all of it -> handshake -> the last mmap returns ->
//! everything else. A direct I/O is registered before its system call and released after its completion; a zap is
//! done before the epoch moves; a foreign access is reported before it is granted.
//!
//! What the guest sees when something fails:
//!
//! | what | the guest |
//! |---|---|
//! | no daemon when the VM starts, or it refuses | never starts: the VMM ends with a message |
//! | the daemon dies | runs on; an access to a page that is out waits for the next daemon |
//! | the daemon dies while pages are given back | the pages keep their content and stay allocated |
//! | the shim loses track of direct I/O | runs on; its memory is no longer evicted |
//! | the VMM dies | dies with it; the daemon sees the connections close and frees everything |
//! | the shim panics | the process aborts (hooks are `extern "C"`): a bug must not run on in a VMM |
//!
//! Limits: hooks neither allocate nor take a lock that an allocator might hold; without the variables
//! of `pagoda run` in the environment each costs one load and a call. System calls that do not go through a dynamic
//! symbol of libc, libaio or liburing are not seen.

// Unit tests do not export the hooks, so most of the rest has no caller there.
#![cfg_attr(test, allow(dead_code))]

mod agent;
mod attach;
mod attachment;
mod borrow;
mod calls;
mod clock;
mod config;
mod end;
mod folios;
mod foreign;
mod gate;
mod hooks;
mod lent;
mod link;
mod mapper;
mod orders;
mod ram;
mod real;
mod say;
mod take;

/// Runs when the library is loaded, before `main`.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    use config::Role;
    extern "C" fn constructor() {
        config::load();
        match (config::name(), config::role()) {
            (Some(_), Role::Vmm) => end::register(),
            (Some(name), Role::Mapper) => mapper::begin(name),
            (None, _) => {}
        }
    }
    constructor
};
