//! Who gets how much memory: the policy of one host (Waldspurger, "Memory Resource Management in VMware ESX Server",
//! OSDI 2002; "ESX" in what follows).
//!
//! Pure: no clock, no I/O, no thread. The daemon and the simulator ([`crate::simulate`]) make the same rounds ([`round`]).
//! Nothing here is stored; after a restart working sets are unknown for one sampling period, in which nobody is taxed.
//!
//! # How it is driven
//!
//! 1. [`Policy::new`] with [`HostSettings`]; [`Policy::admission`] says whether a VM can be kept, [`Policy::add`] takes it
//!    in, [`Policy::set`] and [`Policy::set_host`] change settings, [`Policy::remove`] forgets it. Whatever cannot be kept is
//!    refused before anything changes.
//! 2. Once per sampling period of a VM, [`Policy::start_period`] gives the pages to unmap. The daemon counts how many of
//!    them are touched.
//! 3. [`round::Rounds::make`] turns what was measured into a [`PoolSample`] and a [`VmSample`] per VM, and calls
//!    [`Policy::tick`]: once a second while memory is short, every few seconds else, and at once when settings change, a VM
//!    comes or goes, or one is near its limit. (The paper also plans when free memory crosses a threshold: section 6.3.) The
//!    [`Plan`] says, until the next one:
//!    * the [`ReclaimState`], and whether reclamation is [stuck](Plan::stuck) and why;
//!    * per VM the target with all its [`Terms`];
//!    * per VM the [`VmActions`]: the balloon's size, the cap above which the engine pages out, run or block. They are
//!      states, not orders: to execute the same plan twice does no harm.
//!
//!    [`growth`] makes limits of the caps, so that nobody outgrows what is free before the next plan.
//! 4. [`explain::explain`] turns the terms into lines; [`Policy::what_if`] asks for a target under other settings.
//!
//! # The formulae
//!
//! | what | formula | source | where |
//! |---|---|---|---|
//! | price of a VM's pages | rho = S / (P (f + k (1 - f))), k = 1 / (1 - tax) | ESX 5.2 | [`allocate`] |
//! | active fraction of P pages | f = min(P, W) / P | ours: W does not change when P does | [`allocate`] |
//! | targets | revoke where rho is least until the sum is the budget; min <= target <= max | ESX 5.1, 5.2 | [`allocate`] |
//! | budget | pool - overhead - shared frames - free goal | ESX 6.3 "drive the aggregate amount of free space above the high threshold" | [`controller`] |
//! | working set W | max(slow, fast, current) of t / n, of all its memory | ESX 5.3 | [`working_set`] |
//! | states | 6, 4, 2, 1 % free, with hysteresis; what a VM at its limit lacks is taken in any state | ESX 6.3; ours | [`state`], [`controller`] |
//! | admission | min + overhead + reserve in memory, max - min in swap | ESX 6.2 | [`admission`] |
//!
//! A ceiling is the smallest of the VM's memory, its DRAM cap, and its *demand*: what it has touched and room to grow. ESX
//! leaves memory that is allotted but not touched to whoever takes it; a demand says the same in advance, so that targets
//! need not be exceeded to use all memory. A min that is not used is lent likewise ([`Terms::lent`]).
//!
//! # Limits
//!
//! Targets bound a VM's *own* pages in DRAM. Shared frames count once, against the pool. A pinned VM keeps what it has,
//! whatever its target would be. If the host has less than the pool that was set, guarantees may not fit: every VM has its
//! min then, and [`Plan::shortfall`] says what is missing.

pub mod admission;
pub mod allocate;
pub mod changes;
pub mod controller;
pub mod error;
pub mod explain;
pub mod follow_up;
pub mod growth;
pub mod host;
pub mod mrc;
pub mod plan;
pub mod round;
pub mod settings;
pub mod state;
mod steps;
#[cfg(test)]
mod tests;
pub mod working_set;

pub use admission::{Admission, Beside, Change, Overhead, Refused, Reservation, SwapSpace};
pub use controller::Policy;
pub use error::SettingsError;
pub use plan::{Balloon, Bound, Plan, PolicyStatus, PoolSample, Run, Terms, VmActions, VmId, VmPlan, VmSample};
pub use settings::{HostSettings, InvalidSettings, PerMille, ShareGroup, Shares, TaxRate, VmSettings};
pub use state::ReclaimState;
pub use working_set::{Estimate, SampleCount};
