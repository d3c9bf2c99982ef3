//! What the policy is told each time, and what it wants done: plain data.

use super::allocate::Price;
use super::settings::{Shares, TaxRate};
use super::state::ReclaimState;
use super::working_set::{Estimate, SampleCount};
use crate::units::PageCount;

/// Names a VM as long as it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u32);

/// The host at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSample {
    /// Milliseconds of any steady clock.
    pub now_ms: u64,
    /// The pool as it is now: the setting, or less while the host itself runs short.
    pub pool: PageCount,
    /// All that counts against the pool: VMs' pages in DRAM, shared frames, overhead.
    pub used: PageCount,
}

/// This says whether a VM's balloon works, and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balloon {
    /// No device, no driver, or the guest is still booting.
    Absent,
    /// The balloon holds so many pages now.
    Inflated(PageCount),
}

/// One VM at the same moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmSample {
    /// The sample is of this VM.
    pub id: VmId,
    /// Its own pages in DRAM.
    pub resident: PageCount,
    /// Pages whose content is only in swap.
    pub swapped: PageCount,
    /// Pages that are mapped to frames shared with others.
    pub shared: PageCount,
    /// It has nearly all that its limit lets it have, so it may want more.
    pub is_at_limit: bool,
    /// The balloon was seen like this.
    pub balloon: Balloon,
    /// What became of the pages sampled in this period.
    pub sample: SampleCount,
    /// It may not be paged out, because others reach its RAM.
    pub pinned: bool,
}

/// What a VM's min is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MinReason {
    /// The min is what the user guaranteed the VM.
    Min,
    /// What is in DRAM cannot leave.
    Pinned,
}

/// What a VM's ceiling is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CeilingReason {
    /// The ceiling is all the memory that the guest sees.
    Memory,
    /// The ceiling is the user's cap of its DRAM, `--dram`.
    Cap,
    /// What it has touched, and room to grow.
    Demand,
}

/// Why the target is not larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// It has all it may have or asks for.
    Ceiling,
    /// Its guarantee is all that is left to it: its shares would buy less.
    Min,
    /// Other VMs pay more for the next page.
    Price,
}

/// Where a target comes from, number by number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// What the guest sees.
    pub memory: PageCount,
    /// Its shares are its weight against the other VMs.
    pub shares: Shares,
    /// The weight of all VMs.
    pub shares_total: u64,
    /// The idle memory tax.
    pub tax: TaxRate,
    /// What its shares alone would give it, with every VM using all it may have (ESX section 5.1).
    pub entitlement: PageCount,
    /// The working set and the averages it was taken from (section 5.3).
    pub estimate: Estimate,
    /// Pages it has ever touched and still has: in DRAM, in swap or shared.
    pub in_use: PageCount,
    /// It gets no less.
    pub min: PageCount,
    /// It says what the min stands for.
    pub min_reason: MinReason,
    /// It gets no more, its min excepted.
    pub ceiling: PageCount,
    /// It says which of the bounds is the ceiling.
    pub ceiling_reason: CeilingReason,
    /// The ceiling if it used all it may have: its cap, or its memory.
    pub limit: PageCount,
    /// What it pays for its target: adjusted shares per page (section 5.2).
    pub price: Price,
    /// What it shall have. At least its min.
    pub target: PageCount,
    /// The part of the min that it does not use, and that others have until it does ("unused reservations are not
    /// wasted", section 6.2). All targets less what is lent fit the budget.
    pub lent: PageCount,
    /// What it may grow to at today's price before anybody asks again: the target, or more where only its demand bounds it.
    pub allowance: PageCount,
    /// It says why the target is not larger.
    pub bound: Bound,
    /// The host is in this state.
    pub state: ReclaimState,
}

/// Whether the VM may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// The policy lets it run.
    Run,
    /// Stopped until memory is found (QMP `stop`).
    Block,
}

/// What to do with a VM until the next plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmActions {
    /// Ask the balloon for this size. Nothing for a VM without one.
    pub balloon: Option<PageCount>,
    /// The engine pages out above this. The VM's memory: unlimited, and an unarmed VM stays so.
    pub page_out_cap: PageCount,
    /// Whether it may run.
    pub run: Run,
}

/// How a VM stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyStatus {
    /// Nothing is kept from it.
    AtEase,
    /// It has, or shall have, less than it would use.
    Squeezed,
    /// It does not run for want of memory.
    Blocked,
    /// It cannot be paged out.
    Pinned,
}

/// The plan for one VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmPlan {
    /// The plan is for this VM.
    pub id: VmId,
    /// The target and where it comes from.
    pub terms: Terms,
    /// The daemon does this with the VM until the next plan.
    pub actions: VmActions,
    /// It says whether the VM lacks memory.
    pub status: PolicyStatus,
    /// Since when, on the clock of [`PoolSample::now_ms`].
    pub status_since_ms: u64,
    /// Its balloon was asked to grow and has not for a while; it is paged out instead.
    pub balloon_ignored: bool,
}

/// Why nothing moves although it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StuckReason {
    /// Every VM is at its min or pinned: guarantees and pins take all of the pool.
    NothingToTake,
    /// Balloons were asked, and page-out is not allowed yet or takes no effect.
    BalloonsDoNotMove,
    /// Page-out was asked for and takes no effect.
    PageOutDoesNotMove,
}

/// The plan until the next one.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The host is in this state.
    pub state: ReclaimState,
    /// The state began at this time, on the clock of [`PoolSample::now_ms`].
    pub state_since_ms: u64,
    /// Free memory of the pool.
    pub free: PageCount,
    /// What all targets together may take: the pool without what is kept free and what is not the VMs' own pages.
    pub budget: PageCount,
    /// Whether VMs are held to their targets: they would use more than the budget, or did a moment ago.
    pub restrained: bool,
    /// What is to be reclaimed now.
    pub need: PageCount,
    /// By how much the guarantees exceed the budget; above 0 only while the host has less than the pool that was set.
    pub shortfall: PageCount,
    /// Nothing moves although it should: since when and why.
    pub stuck: Option<(u64, StuckReason)>,
    /// In the order of their numbers.
    pub vms: Vec<VmPlan>,
}

impl Plan {
    /// The plan for one VM.
    pub fn vm(&self, id: VmId) -> Option<&VmPlan> {
        self.vms.binary_search_by_key(&id, |vm| vm.id).ok().map(|index| &self.vms[index])
    }
}
