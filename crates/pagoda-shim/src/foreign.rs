//! Telling the daemon that somebody else can reach guest RAM, so that none of it may be evicted.
//!
//! Reports are for ever: there is no way to learn that such access has ended. They are kept in one word, sent at once
//! on the agent's connection (whole packets, so no lock), and again after each reconnect. The packet is sent before
//! the call that gives the access away is made. Where others will read the RAM file itself, that call also waits until all
//! of RAM is in it ([`report_and_wait`]): they have no userfaultfd, and would read what is out as zeros.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use pagoda_abi::attach::{ForeignReason, Packet};

use crate::config::Role;
use crate::say::give_up;
use crate::{clock, lent, link};

const REASONS: [ForeignReason; 4] =
    [ForeignReason::RamFdSent, ForeignReason::DmaMapped, ForeignReason::FixedBuffers, ForeignReason::UntrackedIo];

/// The reasons that were ever reported, one bit for each.
static REPORTED: AtomicU32 = AtomicU32::new(0);
/// The agent's connection, once there is one. The number never changes: a new connection takes it over by dup3(2), so
/// a report cannot go to a stranger.
static LINK: AtomicI32 = AtomicI32::new(-1);

/// The daemon may be asked for leave to lend RAM.
static LENDING: AtomicBool = AtomicBool::new(false);

const fn bit(reason: ForeignReason) -> u32 {
    1 << reason.to_u32()
}

/// Reports a reason, once in the life of the process: true the first time.
pub fn report(reason: ForeignReason) -> bool {
    if REPORTED.load(Ordering::Relaxed) & bit(reason) != 0 {
        return false;
    }
    if reason == ForeignReason::UntrackedIo && lent::is_given() {
        // For ever, and for every daemon: nothing that is borrowed may be moved, because it has no other copy. What is in the RAM
        // file stays there without this. Before the bit: whoever sees that goes on with its transfer. Twice is as good as once.
        stop_moves();
    }
    let first = REPORTED.fetch_or(bit(reason), Ordering::SeqCst) & bit(reason) == 0;
    // If the daemon is away, `connected` sends it to the next one: the bit was set before the link is looked at.
    say(&Packet::Foreign { reason });
    first
}

/// The clock says from now on that nobody can tell how old transfers are.
fn stop_moves() {
    if let Some(shared) = clock::shared() {
        shared.untracked.fetch_add(1, Ordering::SeqCst);
    }
}

/// A template is there now: what was reported before counts for it, too.
pub fn template_given() {
    if REPORTED.load(Ordering::SeqCst) & bit(ForeignReason::UntrackedIo) != 0 {
        stop_moves();
    }
}

/// RAM goes to a process that is known as a mapper if the daemon says so; else as to any other.
pub fn lend() {
    let Some(config) = crate::config::config() else { return };
    if !LENDING.load(Ordering::Relaxed) || !crate::calls::ask_to_lend(config) {
        report_and_wait(ForeignReason::RamFdSent);
    }
}

/// The daemon knows mappers, so RAM may be lent to them.
pub fn allow_lending() {
    LENDING.store(true, Ordering::Relaxed);
}

/// Reports a reason and waits until the daemon has brought all of RAM back for good. A daemon that is away is waited for,
/// as by a thread that faults; a VM that was never handed over has nothing to wait for.
pub fn report_and_wait(reason: ForeignReason) {
    if crate::config::config().is_some_and(|config| config.role == Role::Mapper) {
        // It may pass RAM on to a child that maps it while it does not: that has the same shim.
        if crate::ram::is_mapped() {
            give_up(format_args!("this process was about to pass a VM's RAM on, which one that maps it may not"));
        }
        return;
    }
    // Another thread may have reported it, and wait still.
    if REPORTED.load(Ordering::Relaxed) & bit(reason) != 0 && !lent::is_any_lent() {
        return;
    }
    report(reason);
    if let (Some(config), Some(_)) = (crate::config::config(), crate::attachment::attachment()) {
        crate::calls::wait_until_resident(config, reason);
    }
}

/// Reports that RAM is to be pinned for long. What is borrowed cannot be moved from then on, so that is waited for.
pub fn report_pins(reason: ForeignReason) {
    if lent::is_any_lent() {
        report_and_wait(reason);
    } else {
        report(reason);
    }
}

/// Says something to the daemon, if it is there.
pub fn say(packet: &Packet) {
    let link = LINK.load(Ordering::SeqCst);
    if link >= 0 {
        let _ = link::send(link, packet, &[]);
    }
}

/// The agent has a new connection at this fd: the daemon behind it learns all that was ever reported.
pub fn connected(agent: c_int) {
    LINK.store(agent, Ordering::SeqCst);
    let reported = REPORTED.load(Ordering::SeqCst);
    for reason in REASONS.into_iter().filter(|reason| reported & bit(*reason) != 0) {
        let _ = link::send(agent, &Packet::Foreign { reason }, &[]);
    }
}
