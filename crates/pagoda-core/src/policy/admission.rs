//! Admission control (ESX section 6.2): a VM starts only if it can be kept.
//!
//! Memory must hold `min + overhead + reserve` of every VM and what is kept free; swap must hold `max - min`, or a VM that is
//! squeezed could not be preserved. While the pool holds every VM at its cap, none is squeezed, and `max - cap` is enough.
//! `overhead` is what was measured of the VMM and of our tables, `reserve` what copies on write of shared pages may take.
//! What outboxes and the templates of snapshots take ([`Beside`]) is no VM's memory, and promised to none.
//! Reservations are not allocations: an unused min is used by others until it is wanted.
//!
//! [`Policy::admission`](super::Policy::admission) answers for every [`Change`], and nothing else decides: whatever changes
//! a term of one VM can change what all others need, because it decides whether the pool still holds all caps. A change is
//! refused if a term does not fit afterwards and lacks more than before. So what was lost already (a disk that others filled,
//! a pool that is smaller since the last start) keeps nobody from changing what does not make it worse.

use std::collections::BTreeMap;

use super::plan::VmId;
use super::settings::{HostSettings, MEMORY_MAX, POOL_MAX, VmSettings};
use crate::units::{Bytes, PageCount};

/// What a VM takes beside its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overhead {
    /// The VMM's own memory and our tables.
    pub overhead: PageCount,
    /// Copies on write of shared pages may take so much.
    pub reserve: PageCount,
}

impl Overhead {
    /// No part beyond the largest memory, so that no sum of all VMs' overflows.
    pub(super) fn bounded(self) -> Overhead {
        Overhead { overhead: self.overhead.min(MEMORY_MAX), reserve: self.reserve.min(MEMORY_MAX) }
    }
}

/// What is taken of the pool beside the memory of VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// Templates of snapshots, which clones read and no VM has to itself.
    pub templates: PageCount,
    /// Outboxes: what the pool keeps for them, whether it is used or not.
    pub outboxes: PageCount,
}

impl Beside {
    /// Adds up all that is taken.
    pub fn total(self) -> PageCount {
        self.templates + self.outboxes
    }

    /// No part beyond the largest pool, so that no sum overflows.
    pub(super) fn bounded(self) -> Beside {
        Beside { templates: self.templates.min(POOL_MAX), outboxes: self.outboxes.min(POOL_MAX) }
    }
}

impl std::ops::Add for Reservation {
    type Output = Reservation;

    fn add(self, other: Reservation) -> Reservation {
        Reservation { memory: self.memory + other.memory, swap: self.swap + other.swap }
    }
}

/// What is reserved for a VM, or for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// So much is reserved in the pool.
    pub memory: PageCount,
    /// So much is reserved on the swap disk.
    pub swap: PageCount,
}

impl Reservation {
    /// For one VM that may be squeezed down to its min.
    pub fn of(settings: &VmSettings, overhead: Overhead) -> Reservation {
        Reservation {
            memory: settings.min + overhead.overhead + overhead.reserve,
            swap: Reservation::swap_of(settings, settings.min),
        }
    }

    /// A file that is allocated up front takes its whole length, whatever may leave.
    fn swap_of(settings: &VmSettings, in_dram: PageCount) -> PageCount {
        if settings.reserve_swap { settings.memory } else { settings.memory.saturating_sub(in_dram) }
    }

    /// For one VM that has all its cap allows.
    pub fn at_cap(settings: &VmSettings, overhead: Overhead) -> Reservation {
        Reservation { swap: Reservation::swap_of(settings, settings.cap), ..Reservation::of(settings, overhead) }
    }
}

/// No disk has more, and with it no sum overflows.
const FREE_MAX: PageCount = PageCount(1 << 60);

/// The swap directory's disk as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwapSpace {
    /// The disk has so much free space.
    pub free: PageCount,
    /// What each VM's file has on it. A VM that is missing here is taken to have nothing.
    pub held: BTreeMap<VmId, PageCount>,
}

impl SwapSpace {
    /// A disk without swap files.
    pub fn empty(free: PageCount) -> SwapSpace {
        SwapSpace { free, held: BTreeMap::new() }
    }

    /// The disk without the file of a VM that ends.
    pub(super) fn without(&self, id: VmId) -> SwapSpace {
        let mut space = self.clone();
        space.free += space.held.remove(&id).unwrap_or(PageCount::ZERO);
        space
    }

    /// What a VM can have of its promise in its own file. What the file has beyond is nobody else's.
    fn held_for(&self, id: VmId, promised: PageCount) -> PageCount {
        self.held.get(&id).map_or(PageCount::ZERO, |held| (*held).min(promised))
    }
}

/// What is to be changed. Each of them changes a term of admission.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Nothing is changed: the question is how it stands.
    Nothing,
    /// The host gets these settings.
    Host(&'a HostSettings),
    /// A VM comes, with these settings.
    Add(&'a VmSettings, Overhead),
    /// A VM ends, and another one comes as soon as all that it had is free.
    Replace(VmId, &'a VmSettings, Overhead),
    /// All outboxes together have so much.
    Outboxes(PageCount),
    /// A VM has other settings, and what follows from them beside its memory.
    Set(VmId, &'a VmSettings, Overhead),
}

/// What one VM was promised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promise<'a> {
    /// One that comes has no number yet.
    pub id: Option<VmId>,
    pub settings: &'a VmSettings,
    pub beside: Overhead,
    /// What it was promised as well, while nobody knows which of the two it will be.
    pub proposed: Option<(&'a VmSettings, Overhead)>,
}

impl<'a> Promise<'a> {
    fn both(self) -> impl Iterator<Item = (&'a VmSettings, Overhead)> {
        std::iter::once((self.settings, self.beside)).chain(self.proposed)
    }

    /// Gives the larger part of both settings.
    fn most<T: Ord>(self, part: impl Fn(&VmSettings, Overhead) -> T) -> T {
        let now = part(self.settings, self.beside);
        self.both().map(|(vm, beside)| part(vm, beside)).fold(now, T::max)
    }
}

/// All that was promised, and what there is for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Balance {
    promised: Reservation,
    capacity: Reservation,
    /// So much of `promised.memory` is for mins.
    mins: PageCount,
    beside: Beside,
    /// The pool holds all VMs at their caps.
    holds_caps: bool,
    /// All caps with what is beside them.
    most: PageCount,
}

impl Balance {
    /// Of these VMs, while so much of the pool is taken beside them.
    pub(super) fn of<'a>(
        host: &HostSettings,
        beside: Beside,
        vms: impl Iterator<Item = Promise<'a>> + Clone,
        swap: &SwapSpace,
    ) -> Balance {
        // No sum of these overflows: each VM's is at most MEMORY_MAX, there are at most VMS_MAX, 2^36 times 2^12.
        let at_cap = |vm: &VmSettings, beside: Overhead| vm.cap + beside.overhead + beside.reserve;
        let most: PageCount = vms.clone().map(|vm| vm.most(at_cap)).sum();
        let taken = host.free_goal() + beside.total();
        let holds_caps = most + taken <= host.pool;
        let capacity = Reservation { memory: host.pool.saturating_sub(taken), swap: swap.free.min(FREE_MAX) };
        let start = Balance { capacity, beside, holds_caps, most, ..Balance::default() };
        vms.fold(start, |sum, vm| {
            let needs = Reservation {
                memory: vm.most(|vm, beside| sum.reservation(vm, beside).memory),
                swap: vm.most(|vm, beside| sum.reservation(vm, beside).swap),
            };
            let held = vm.id.map_or(PageCount::ZERO, |id| swap.held_for(id, needs.swap));
            Balance {
                promised: sum.promised + needs,
                capacity: sum.capacity + Reservation { swap: held, ..Reservation::default() },
                mins: sum.mins + vm.most(|vm, _| vm.min),
                ..sum
            }
        })
    }

    /// What one VM reserves: as at its cap while the pool holds all of those.
    pub(super) fn reservation(&self, vm: &VmSettings, beside: Overhead) -> Reservation {
        if self.holds_caps { Reservation::at_cap(vm, beside) } else { Reservation::of(vm, beside) }
    }

    pub(super) fn promised(&self) -> Reservation {
        self.promised
    }

    /// Gives by how much the promises exceed the capacity.
    pub fn missing(&self) -> Reservation {
        Reservation {
            memory: self.promised.memory.saturating_sub(self.capacity.memory),
            swap: self.promised.swap.saturating_sub(self.capacity.swap),
        }
    }
}

/// Whether a change would be admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// What the VM that the change is about needs; nothing if it is about the host.
    pub needs: Reservation,
    /// The balance would be this with the change.
    after: Balance,
    /// What was missing before it.
    before: Reservation,
    host: HostSettings,
    what: What,
}

/// The kind of change decides what is refused, and how the message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Nothing,
    Host,
    Add,
    Set,
    Outboxes,
}

impl Admission {
    pub(super) fn new(change: &Change<'_>, before: Reservation, after: Balance, host: &HostSettings) -> Admission {
        let (what, needs) = match change {
            Change::Nothing => (What::Nothing, Reservation::default()),
            Change::Host(_) => (What::Host, Reservation::default()),
            Change::Outboxes(_) => (What::Outboxes, Reservation::default()),
            Change::Add(vm, beside) | Change::Replace(_, vm, beside) => {
                (What::Add, after.reservation(vm, beside.bounded()))
            }
            Change::Set(_, vm, beside) => (What::Set, after.reservation(vm, beside.bounded())),
        };
        Admission { needs, after, before, host: host.clone(), what }
    }

    /// What the others have reserved.
    pub fn reserved(&self) -> Reservation {
        let Reservation { memory, swap } = self.after.promised;
        Reservation { memory: memory.saturating_sub(self.needs.memory), swap: swap.saturating_sub(self.needs.swap) }
    }

    /// What there is: the pool less what is kept free, and the swap disk's free space with what the files have of what they
    /// were promised.
    pub fn capacity(&self) -> Reservation {
        self.after.capacity
    }

    /// What is missing; a part that lacks no more than before is not.
    pub fn missing(&self) -> Reservation {
        let missing = self.after.missing();
        let worse = |now: PageCount, before: PageCount| {
            let is_refused = now > before || matches!(self.what, What::Nothing | What::Add);
            if is_refused { now } else { PageCount::ZERO }
        };
        Reservation { memory: worse(missing.memory, self.before.memory), swap: worse(missing.swap, self.before.swap) }
    }

    /// Whether nothing is missing.
    pub fn is_admitted(&self) -> bool {
        self.missing() == Reservation::default()
    }

    /// The verdict.
    ///
    /// # Errors
    /// Something is missing.
    pub fn verdict(self) -> Result<Reservation, Refused> {
        if self.is_admitted() { Ok(self.needs) } else { Err(Refused { admission: Box::new(self) }) }
    }
}

/// A change is not admitted. The message says which term fails, by how much, and what would help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", refusal(.admission))]
pub struct Refused {
    /// The figures say what is missing, and of what.
    pub admission: Box<Admission>,
}

fn refusal(admission: &Admission) -> String {
    let missing = admission.missing();
    let head = match admission.what {
        What::Add => "not admitted".to_owned(),
        What::Nothing => "the guarantees are not kept".to_owned(),
        What::Host | What::Set | What::Outboxes => {
            format!("the pool of {} cannot keep the guarantees", size(admission.host.pool))
        }
    };
    let memory = (missing.memory > PageCount::ZERO).then(|| memory_is_missing(admission, missing.memory));
    let swap = (missing.swap > PageCount::ZERO).then(|| swap_is_missing(admission, missing.swap));
    format!("{head}: {}", [memory, swap].into_iter().flatten().collect::<Vec<_>>().join("; "))
}

fn memory_is_missing(admission: &Admission, missing: PageCount) -> String {
    let Admission { needs, after, host, .. } = admission;
    let beside = after.promised.memory.saturating_sub(after.mins);
    let least = least_pool(after.promised.memory + after.beside.total(), host);
    let part = |name: &str, pages: PageCount| match pages {
        PageCount::ZERO => String::new(),
        pages => format!(", {name} {}", size(pages)),
    };
    let beside_vms = part("outboxes", after.beside.outboxes) + &part("templates of snapshots", after.beside.templates);
    let whose = match admission.what {
        What::Add => format!(
            " (needs {}, reserved {} of {})",
            size(needs.memory),
            size(admission.reserved().memory),
            size(after.capacity.memory)
        ),
        _ => String::new(),
    };
    let advice = match admission.what {
        What::Add => "lower its min or another VM's by",
        What::Host | What::Set | What::Nothing => "lower a min by",
        What::Outboxes => "let the outbox have less (`pagoda outbox set`), or lower a min by",
    };
    format!(
        "{} of memory are missing{whose}: min of all VMs {}, overhead {}{beside_vms}, kept free {}, in a pool of {}; {advice} {} MiB \
         (`pagoda vm set NAME --min SIZE`), stop a VM, or enlarge the pool (`pagoda host set --pool {}M`)",
        size(missing),
        size(after.mins),
        size(beside),
        size(host.free_goal()),
        size(host.pool),
        mib(missing),
        mib(least),
    )
}

fn swap_is_missing(admission: &Admission, missing: PageCount) -> String {
    let Admission { needs, after, host, .. } = admission;
    let whose = match admission.what {
        What::Add | What::Set => format!(
            " (needs {}, reserved {} of {})",
            size(needs.swap),
            size(admission.reserved().swap),
            size(after.capacity.swap)
        ),
        What::Host | What::Nothing | What::Outboxes => {
            format!(" (reserved {} of {})", size(after.promised.swap), size(after.capacity.swap))
        }
    };
    let (why, advice) = if after.holds_caps {
        ("every VM may have to keep its memory less its cap there", "raise a DRAM cap (--dram)".to_owned())
    } else {
        let pool = mib(least_pool(after.most + after.beside.total(), host));
        (
            "the pool does not hold all VMs at their caps, so each may have to keep its memory less its min there",
            format!(
                "raise its min or another VM's (--min), or give the pool {pool} MiB (`pagoda host set --pool {pool}M`)"
            ),
        )
    };
    format!(
        "{} of swap are missing{whose}: {why}; {advice}, or free {} MiB in the swap directory",
        size(missing),
        mib(missing),
    )
}

/// The smallest pool that leaves so much beside what is kept free.
fn least_pool(used: PageCount, host: &HostSettings) -> PageCount {
    let free = u128::from(host.thresholds.free_goal().0);
    let mut pool = PageCount((u128::from(used.0) * 1000).div_ceil(1000 - free.min(999)) as u64);
    // What is kept free is rounded up, which may take one page more.
    while pool.saturating_sub(host.thresholds.free_goal().of_ceil(pool)) < used {
        pool += PageCount(1);
    }
    pool
}

/// Rounded up, so that it is enough.
fn mib(pages: PageCount) -> u64 {
    const PAGES: u64 = Bytes::from_mib(1).0 / crate::units::PAGE_SIZE;
    pages.0.div_ceil(PAGES)
}

/// An amount that is refused may be too many pages to count their bytes.
fn size(pages: PageCount) -> Bytes {
    Bytes(pages.0.saturating_mul(crate::units::PAGE_SIZE))
}

#[cfg(test)]
mod tests;
