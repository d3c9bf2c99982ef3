//! Keeps QEMU from leaving guest RAM out of what it saves or sends.
//!
//! QEMU is told that RAM is a shared file. With the capability `x-ignore-shared`, and in the modes `cpr-transfer` and
//! `cpr-exec`, it leaves such RAM out of a migration, because the target would map the same file. The target of a Pagoda VM
//! cannot: the source would say `completed` and the guest would be lost. A stream does not always show that RAM is
//! missing (old machine types, TLS, encrypted disks), so the gate is where all ways in meet: QEMU finds a capability or mode by
//! comparing the name with strcmp(3), whether it comes by QMP, HMP, `-global` or in an incoming stream. The hook lets these
//! names equal nothing, and QEMU answers that it does not know the name, before anything moves.
//!
//! The daemon tries it on each new VM and ends a QEMU in which it does not work.
//!
//! Pagoda's own snapshots need `x-ignore-shared`: at the daemon's word ([`open`]) the gate is open, until the daemon has it shut
//! or the agent's connection breaks. Modes of CPR stay hidden. [`crate::agent`] alone opens and shuts it.

use std::sync::atomic::{AtomicBool, Ordering};

/// What QEMU finds while the gate is open, and at no other time.
const GATED: &[u8] = b"x-ignore-shared";
/// What QEMU must never find.
const HIDDEN: [&[u8]; 2] = [b"cpr-transfer", b"cpr-exec"];

static IS_OPEN: AtomicBool = AtomicBool::new(false);

/// QEMU finds the capability from now on.
pub fn open() {
    IS_OPEN.store(true, Ordering::SeqCst);
}

/// QEMU does not find the capability any more.
pub fn shut() {
    IS_OPEN.store(false, Ordering::SeqCst);
}

/// Whether this name equals nothing in a VM's process now.
pub fn hides(name: &[u8]) -> bool {
    HIDDEN.contains(&name) || (name == GATED && !IS_OPEN.load(Ordering::SeqCst))
}

/// Whether a name that begins so may be hidden: asked of every string, so cheap.
pub fn may_hide(first: u8) -> bool {
    matches!(first, b'x' | b'c')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_names_are_hidden_and_no_others() {
        for name in [GATED, HIDDEN[0], HIDDEN[1]] {
            assert!(hides(name) && may_hide(name[0]));
        }
        for name in ["", "x", "c", "x-ignore-share", "x-ignore-shared2", "X-IGNORE-SHARED", "cpr-reboot", "normal"] {
            assert!(!hides(name.as_bytes()), "{name}");
        }
        open();
        assert!(!hides(GATED));
        assert!(HIDDEN.iter().all(|name| hides(name)), "the gate is not for them");
        shut();
        assert!(hides(GATED));
    }
}
