//! Ballooning (ESX section 3.2): takes memory from a guest by having its own driver give it up.
//!
//! [`Balloon`] decides how far a guest is asked to inflate, from a target and from what the device and the guest say at
//! each [`Balloon::tick`]. It owns no connection and no clock: the daemon brings a [`Sample`] and carries out the
//! [`Action`]s.
//!
//! * Inflating is limited in rate, and by what the guest itself says is available: it always keeps a reserve
//!   ([`reserve`]). Deflating is not limited, for a guest that waits for memory can do nothing else.
//! * A guest that fights back (it runs short, it pages by itself, it takes pages back) is left alone at once, gets a
//!   little back, and is tried again later, less and less often.
//! * A guest that has swap of its own is different: being short and paging is what it is to do, because it knows best what
//!   to keep, and what the host would page out instead is read back to be swapped out ("double paging", ESX sections 3.1
//!   and 3.3). It fights back when it is short and no longer writes to its swap: that is full.
//! * A guest whose driver does not answer (there is none, it still boots, it ignores the request) is *paged out* to its
//!   target instead, until a driver shows up. It is asked for one [`PROBE`] meanwhile, so that a driver which comes up
//!   is noticed, and does not meet the whole target while its guest boots.
//! * After a reset of the guest all its memory is in use again, whatever the device says ("pops" the balloon).
//!
//! What the guest sees when the daemon dies: the balloon stays as it is. The next daemon reads its size from the device
//! and goes on from there.

mod control;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::units::{Bytes, PAGE_SIZE};

pub use control::Balloon;

/// What a driver is asked for to see whether there is one: small enough for a guest that boots.
pub const PROBE: Bytes = Bytes::from_mib(1);
/// How long a driver may take for its first sign of life: it is asked for statistics every second, and a guest under
/// emulation answers late.
pub const PROBE_WAIT_MS: u64 = 5_000;
/// First step of inflation, and the only one where a guest has no statistics. ESX's drivers limit their rate too; Proxmox
/// moves 100 MiB in 10 s.
pub const STEP_MIN: Bytes = Bytes::from_mib(16);
/// Most that a guest is asked for beyond what it gave, so that a change of mind takes effect soon: Linux gives as much in
/// about a second (256 MiB in 1.6 s, plain QEMU under TCG, 2 vCPU host, 2026-11-22).
pub const STEP_MAX: Bytes = Bytes::from_mib(128);
/// A step that takes longer was too large.
pub const STEP_SLOW_MS: u64 = 1_000;
/// A driver that gives nothing for so long does not try: Linux tries every 200 ms (`virtio_balloon.c`, "Out of puff").
pub const IGNORE_WAIT_MS: u64 = 10_000;
/// Statistics older than this are those of a driver that is gone: they are asked for every second.
pub const STATS_STALE_MS: u64 = 15_000;
/// First and longest pause before a guest that fought back or ignored the request is tried again; doubled each time.
pub const RETRY_MIN_MS: u64 = 10_000;
/// See [`RETRY_MIN_MS`]: five minutes is when a workload has become another one.
pub const RETRY_MAX_MS: u64 = 300_000;
/// Major faults and pages swapped in per second, above those before, that mean that the guest pages because of us: all
/// that a rotating disk can do.
pub const FAULTS_PER_S_MAX: u64 = 100;
/// Updates of the statistics in a row above [`FAULTS_PER_S_MAX`]: one may be a program that starts.
pub const FAULTY_UPDATES: u32 = 2;
/// Updates in a row in which a guest with swap is short and swaps nothing out: it cannot.
pub const FULL_UPDATES: u32 = 3;
/// Between two ticks while memory moves, and at rest.
pub const TICK_MOVING_MS: u64 = 100;
/// See [`TICK_MOVING_MS`]; the guest's statistics come once a second.
pub const TICK_REST_MS: u64 = 1_000;

/// What a guest is left as available whatever the target: 5 %, the part at which oVirt's MOM calls a state critical, and
/// at least what a Linux kernel wants above its watermarks.
pub fn reserve(memory: Bytes) -> Bytes {
    const PARTS: u64 = 20;
    const RESERVE_MIN: Bytes = Bytes::from_mib(32);
    Bytes(memory.0 / PARTS / PAGE_SIZE * PAGE_SIZE).max(RESERVE_MIN)
}

/// What the guest's driver reports, as of one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestStats {
    /// The host's clock at the update, in seconds; never 0.
    pub updated_s: u64,
    /// Memory the guest's kernel calls free.
    pub free: Bytes,
    /// Memory it could give without paging; the free part where the guest does not say.
    pub available: Bytes,
    /// Major faults since the guest booted.
    pub major_faults: u64,
    /// Read from the guest's own swap since it booted.
    pub swap_in: Bytes,
    /// Written to it. More than nothing says that the guest has swap; how much is left, no guest says.
    pub swap_out: Bytes,
}

/// What the VMM says of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// It does not answer now.
    Silent,
    /// The VM has no balloon.
    Absent,
    /// `actual`: memory outside of the balloon.
    Present { actual: Bytes },
}

/// What was seen at a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub device: Device,
    /// The newest, if the guest ever reported any.
    pub stats: Option<GuestStats>,
    /// How often the guest was reset since the first sample.
    pub resets: u64,
    /// The guest stands still, and cannot be expected to do anything.
    pub paused: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the guest to keep this much memory and give up the rest.
    Ask(Bytes),
    /// Page the VM out to this much DRAM, for its guest does not do it.
    PageOut(Bytes),
    /// Stop paging the VM out in place of its balloon.
    EndPageOut,
}

/// Why a guest is left alone above its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resistance {
    /// It would have less than its reserve available.
    LowMemory,
    /// It pages by itself.
    Faults,
    /// It took pages back from the balloon.
    TookBack,
}

/// Why a guest cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The VM has no balloon device.
    Device,
    /// Nobody answers in the guest.
    Driver,
    /// The driver is there and gives nothing.
    Effect,
}

/// Where ballooning of a VM stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing is wanted of the guest.
    Off,
    /// A sign of life is waited for.
    Probing,
    Inflating,
    Deflating,
    /// The guest has no more than its target.
    Reached,
    /// The guest fights back.
    Resisted(Resistance),
    /// The guest cannot be asked, so the VM is paged out instead.
    Unavailable(Missing),
}

impl Phase {
    /// One word for tables.
    pub const fn word(self) -> &'static str {
        match self {
            Phase::Off => "off",
            Phase::Probing => "probing",
            Phase::Inflating => "inflating",
            Phase::Deflating => "deflating",
            Phase::Reached => "reached",
            Phase::Resisted(_) => "resisted",
            Phase::Unavailable(_) => "unavailable",
        }
    }

    /// Whether the next tick should come soon.
    pub const fn is_moving(self) -> bool {
        matches!(self, Phase::Probing | Phase::Inflating | Phase::Deflating)
    }
}

/// The reason, as a clause.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Off => "no balloon target",
            Phase::Probing => "waits for a sign of life of the guest's balloon driver",
            Phase::Inflating => "the guest is giving memory up",
            Phase::Deflating => "the guest is taking memory back",
            Phase::Reached => "the guest keeps what its target says",
            Phase::Resisted(Resistance::LowMemory) => {
                "the guest would run short: its available memory is at the reserve it is left"
            }
            Phase::Resisted(Resistance::Faults) => "the guest pages by itself",
            Phase::Resisted(Resistance::TookBack) => "the guest took memory back from its balloon",
            Phase::Unavailable(Missing::Device) => "the VM has no balloon device: add -device virtio-balloon-pci",
            Phase::Unavailable(Missing::Driver) => "no balloon driver answers: the guest has none, or still boots",
            Phase::Unavailable(Missing::Effect) => "the guest's balloon driver is there, but gives nothing up",
        })
    }
}

/// The view says how ballooning of a VM stands, for those outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    pub phase: Phase,
    /// The phase began at this time, by the clock of the ticks.
    pub since_ms: u64,
    /// Memory outside of the balloon; all of it as long as nothing else is known.
    pub actual: Bytes,
    /// What the guest was asked to keep.
    pub asked: Option<Bytes>,
    /// The VM is paged out to its target.
    pub is_paging: bool,
    /// When the guest is tried again.
    pub retry_at_ms: Option<u64>,
    pub stats: Option<GuestStats>,
    /// Times the guest fought back.
    pub resisted: u64,
    /// Times paging out had to take the balloon's place.
    pub fallbacks: u64,
}
