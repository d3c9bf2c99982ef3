//! The policy with what it remembers between two plans.

use std::collections::BTreeMap;

use super::admission::{Admission, Balance, Beside, Change, Overhead, Promise, Reservation, SwapSpace};
use super::allocate::{Claim, allocate, pages_at, price};
use super::error::SettingsError;
use super::plan::{
    Balloon, Bound, CeilingReason, MinReason, Plan, PolicyStatus, PoolSample, StuckReason, Terms, VmId, VmPlan,
    VmSample,
};
use super::settings::{HostSettings, InvalidSettings, POOL_MAX, Sampling, TaxRate, VMS_MAX, VmSettings};
use super::state::{Levels, ReclaimState};
use super::steps::{self, BalloonWatch, Situation};
use super::working_set::{Estimate, Estimator};
use crate::chance::Chance;
use crate::fault::headroom_max;
use crate::units::{CHUNK_PAGES, PageCount, PageIdx};

/// Room to grow beyond what a VM has touched: this part of it ...
const GROWTH_OF_USE: u64 = 32;
/// ... and this part of its memory. Together about 4 %, which nobody else is promised meanwhile. It need not last until
/// the next plan: growth is held at the allowance, not here.
const GROWTH_OF_MEMORY: u64 = 128;
/// VMs are held to their targets this long after all demands fit again: releasing them disarms them, which brings
/// everything back from swap, and must not happen at every breath of the load.
const RELEASE_MS: u64 = 60_000;
/// Reclamation that has freed nothing for so long is stuck. Three times the patience with a balloon.
const STUCK_MS: u64 = 30_000;
/// Free memory has moved if it changed by this.
const MOVED_MIN: PageCount = PageCount(256);

/// What is kept of one VM.
#[derive(Clone, Debug)]
struct Vm {
    settings: VmSettings,
    overhead: Overhead,
    /// What was proposed and is neither accepted nor withdrawn.
    proposed: Option<(VmSettings, Overhead)>,
    estimator: Estimator,
    balloon: BalloonWatch,
    status: PolicyStatus,
    status_since_ms: u64,
}

impl Vm {
    fn promise(&self, id: VmId) -> Promise<'_> {
        let proposed = self.proposed.as_ref().map(|(settings, beside)| (settings, *beside));
        Promise { id: Some(id), settings: &self.settings, beside: self.overhead, proposed }
    }
}

/// The last allocation, for questions afterwards.
#[derive(Clone, Debug)]
struct Last {
    ids: Vec<VmId>,
    claims: Vec<Claim>,
    budget: PageCount,
}

/// The memory policy of one host.
#[derive(Clone, Debug)]
pub struct Policy {
    host: HostSettings,
    /// What is taken of the pool beside VMs' memory.
    beside: Beside,
    vms: BTreeMap<VmId, Vm>,
    state: ReclaimState,
    state_since_ms: u64,
    /// When demands last exceeded the budget.
    short_ms: Option<u64>,
    planned_ms: Option<u64>,
    /// Free memory when it last moved while something was to be reclaimed, and when.
    moved: Option<(PageCount, u64)>,
    last: Option<Last>,
}

impl Policy {
    /// The policy for a host without VMs.
    ///
    /// # Errors
    /// The settings cannot be used.
    pub fn new(host: HostSettings) -> Result<Policy, InvalidSettings> {
        host.check()?;
        Ok(Policy {
            host,
            beside: Beside::default(),
            vms: BTreeMap::new(),
            state: ReclaimState::High,
            state_since_ms: 0,
            short_ms: None,
            planned_ms: None,
            moved: None,
            last: None,
        })
    }

    /// What is set for the host.
    pub fn host(&self) -> &HostSettings {
        &self.host
    }

    /// The state after the last plan.
    pub fn state(&self) -> ReclaimState {
        self.state
    }

    /// Changes what is set for the host. Takes effect with the next plan.
    ///
    /// # Errors
    /// The settings cannot be used, or what was promised to VMs cannot be kept. Nothing is changed then.
    pub fn set_host(&mut self, host: HostSettings, swap: &SwapSpace) -> Result<(), SettingsError> {
        host.check()?;
        self.admission(&Change::Host(&host), swap).verdict()?;
        self.host = host;
        Ok(())
    }

    /// Changes what is set for the host without a question: it was promised already.
    ///
    /// # Errors
    /// The settings cannot be used. Nothing is changed then.
    pub fn restore_host(&mut self, host: HostSettings) -> Result<(), InvalidSettings> {
        host.check()?;
        self.host = host;
        Ok(())
    }

    /// All VMs in the order of their numbers, with what is set for them and what they take beside their memory.
    pub fn vms(&self) -> impl Iterator<Item = (VmId, &VmSettings, Overhead)> {
        self.vms.iter().map(|(id, vm)| (*id, &vm.settings, vm.overhead))
    }

    /// Whether all that is promised could be kept after a change, with this swap disk. The one place that decides it.
    pub fn admission(&self, change: &Change<'_>, swap: &SwapSpace) -> Admission {
        let host = match *change {
            Change::Host(host) => host,
            _ => &self.host,
        };
        let now = self.vms.iter().map(|(id, vm)| match *change {
            // How it stands is how it is, whatever may come.
            Change::Nothing => Promise { proposed: None, ..vm.promise(*id) },
            _ => vm.promise(*id),
        });
        let before = Balance::of(&self.host, self.beside, now.clone(), swap);
        let (leaving, freed) = match *change {
            Change::Replace(id, ..) => (Some(id), Some(swap.without(id))),
            _ => (None, None),
        };
        let stay = now.filter(|vm| leaving.is_none() || vm.id != leaving);
        let then = stay.map(|vm| match *change {
            Change::Set(of, settings, overhead) if Some(of) == vm.id => {
                Promise { settings, beside: overhead.bounded(), proposed: None, ..vm }
            }
            _ => vm,
        });
        let coming = match *change {
            Change::Add(settings, overhead) | Change::Replace(_, settings, overhead) => {
                Some(Promise { id: None, settings, beside: overhead.bounded(), proposed: None })
            }
            _ => None,
        };
        let beside = match *change {
            Change::Outboxes(outboxes) => Beside { outboxes, ..self.beside }.bounded(),
            _ => self.beside,
        };
        let after = Balance::of(host, beside, then.chain(coming), freed.as_ref().unwrap_or(swap));
        Admission::new(change, before.missing(), after, host)
    }

    /// What all VMs together have reserved.
    pub fn reserved(&self) -> Reservation {
        self.balance_beside(self.beside).promised()
    }

    /// What the templates of snapshots take of the pool now: no VM is promised that.
    pub fn set_templates(&mut self, pages: PageCount) {
        self.beside = Beside { templates: pages, ..self.beside }.bounded();
    }

    /// As of the last call of [`Policy::set_templates`].
    pub fn templates(&self) -> PageCount {
        self.beside.templates
    }

    /// What the pool keeps for outboxes now: no VM is promised that.
    pub fn set_outboxes(&mut self, pages: PageCount) {
        self.beside = Beside { outboxes: pages, ..self.beside }.bounded();
    }

    /// As of the last call of [`Policy::set_outboxes`].
    pub fn outboxes(&self) -> PageCount {
        self.beside.outboxes
    }

    /// The most that all outboxes may have beside the mins of VMs.
    pub fn outboxes_max(&self) -> PageCount {
        // With all of the pool taken, VMs are promised their mins and no more.
        let promised = self.balance_beside(Beside { outboxes: self.host.pool, ..self.beside }).promised().memory;
        self.host.pool.saturating_sub(self.host.free_goal() + self.beside.templates + promised)
    }

    /// What free memory lacks to its goal once VMs have to give, if so much of the pool is in use.
    pub fn missing(&self, pool: PageCount, used: PageCount) -> PageCount {
        let pool = pool.min(self.host.pool);
        let free = pool.saturating_sub(used);
        let state = self.state.next(free, &Levels::of(pool, &self.host.thresholds));
        if state == ReclaimState::High {
            return PageCount::ZERO;
        }
        let goal = self.host.thresholds.free_goal().of_ceil(pool);
        goal.saturating_sub(free) + used.saturating_sub(pool)
    }

    /// Whether all VMs could have what they were promised if templates took so much more.
    pub(super) fn keeps_promises_beside(&self, more: PageCount) -> bool {
        self.balance_beside(Beside { templates: self.beside.templates + more.min(POOL_MAX), ..self.beside })
            .missing()
            .memory
            == PageCount::ZERO
    }

    fn balance_beside(&self, beside: Beside) -> Balance {
        let now = self.vms.iter().map(|(id, vm)| Promise { proposed: None, ..vm.promise(*id) });
        Balance::of(&self.host, beside, now, &SwapSpace::default())
    }

    /// Takes a VM in.
    ///
    /// # Errors
    /// Its settings cannot be used, or what is promised could not be kept. Nothing is changed then.
    pub fn add(
        &mut self,
        id: VmId,
        settings: VmSettings,
        overhead: Overhead,
        swap: &SwapSpace,
    ) -> Result<(), SettingsError> {
        settings.check()?;
        self.check_new(id)?;
        self.admission(&Change::Add(&settings, overhead), swap).verdict()?;
        self.readmit(id, settings, overhead)
    }

    /// Takes a VM in that runs already, whatever it costs: [`Plan::shortfall`] says what is missing then.
    ///
    /// # Errors
    /// Its settings cannot be used.
    pub fn readmit(&mut self, id: VmId, settings: VmSettings, overhead: Overhead) -> Result<(), SettingsError> {
        settings.check()?;
        self.check_new(id)?;
        let overhead = overhead.bounded();
        let estimator = Estimator::new(settings.memory, settings.sampling);
        let (balloon, status) = (BalloonWatch::default(), PolicyStatus::AtEase);
        let proposed = None;
        self.vms.insert(id, Vm { settings, overhead, proposed, estimator, balloon, status, status_since_ms: 0 });
        Ok(())
    }

    fn check_new(&self, id: VmId) -> Result<(), SettingsError> {
        if self.vms.contains_key(&id) {
            return Err(SettingsError::VmExists { id: id.0 });
        }
        if self.vms.len() >= VMS_MAX {
            return Err(SettingsError::TooManyVms);
        }
        Ok(())
    }

    /// Gives a VM settings and an overhead without a question: they were admitted already, by this policy or by the one that
    /// was recorded. Its memory and how its swap file was made stay as they are.
    ///
    /// # Errors
    /// No such VM, or settings that cannot be used. Nothing is changed then.
    pub fn restore(&mut self, id: VmId, settings: VmSettings, overhead: Overhead) -> Result<(), SettingsError> {
        let vm = self.vms.get_mut(&id).ok_or(SettingsError::NoSuchVm { id: id.0 })?;
        let VmSettings { memory, reserve_swap, .. } = vm.settings;
        let settings = VmSettings { memory, reserve_swap, ..settings };
        settings.check()?;
        vm.estimator.set_sampling(settings.sampling);
        (vm.settings, vm.overhead) = (settings, overhead.bounded());
        Ok(())
    }

    /// Changes a VM's settings, but for its memory and how its swap file was made. `overhead` is what it takes beside its
    /// memory with them. Takes effect with the next plan.
    ///
    /// # Errors
    /// They cannot be used, or what is promised could not be kept. Nothing is changed then.
    pub fn set(
        &mut self,
        id: VmId,
        settings: VmSettings,
        overhead: Overhead,
        swap: &SwapSpace,
    ) -> Result<(), SettingsError> {
        self.propose(id, settings, overhead, swap)?;
        self.accept(id);
        Ok(())
    }

    /// As [`Policy::set`], but the VM keeps its settings until they are [accepted](Policy::accept). Until then nobody else is
    /// promised what either of the two needs, so both can be kept: the old ones if the proposal is
    /// [withdrawn](Policy::withdraw).
    ///
    /// # Errors
    /// As [`Policy::set`].
    pub fn propose(
        &mut self,
        id: VmId,
        settings: VmSettings,
        overhead: Overhead,
        swap: &SwapSpace,
    ) -> Result<(), SettingsError> {
        let vm = self.vms.get(&id).ok_or(SettingsError::NoSuchVm { id: id.0 })?;
        let VmSettings { memory, reserve_swap, .. } = vm.settings;
        let settings = VmSettings { memory, reserve_swap, ..settings };
        settings.check()?;
        let overhead = overhead.bounded();
        self.admission(&Change::Set(id, &settings, overhead), swap).verdict()?;
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.proposed = Some((settings, overhead));
        }
        Ok(())
    }

    /// Gives a VM the settings that were proposed for it, if there are any.
    pub fn accept(&mut self, id: VmId) {
        if let Some(vm) = self.vms.get_mut(&id)
            && let Some((settings, overhead)) = vm.proposed.take()
        {
            vm.estimator.set_sampling(settings.sampling);
            (vm.settings, vm.overhead) = (settings, overhead);
        }
    }

    /// A VM keeps the settings it has.
    pub fn withdraw(&mut self, id: VmId) {
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.proposed = None;
        }
    }

    /// What a VM takes beside its memory.
    pub fn overhead(&self, id: VmId) -> Option<Overhead> {
        self.vms.get(&id).map(|vm| vm.overhead)
    }

    /// How a VM's working set is sampled from its next period on.
    ///
    /// # Errors
    /// No such VM, or no sampling rate.
    pub fn set_sampling(&mut self, id: VmId, sampling: Sampling) -> Result<(), SettingsError> {
        let vm = self.vms.get_mut(&id).ok_or(SettingsError::NoSuchVm { id: id.0 })?;
        let settings = VmSettings { sampling, ..vm.settings.clone() };
        settings.check()?;
        vm.estimator.set_sampling(sampling);
        vm.settings = settings;
        Ok(())
    }

    /// What was measured of a VM beside its memory. Never refused: it is there already.
    pub fn set_overhead(&mut self, id: VmId, overhead: Overhead) {
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.overhead = overhead.bounded();
        }
    }

    /// Forgets a VM that has ended.
    pub fn remove(&mut self, id: VmId) {
        self.vms.remove(&id);
        self.last = None;
    }

    /// What is set for a VM.
    pub fn settings(&self, id: VmId) -> Option<&VmSettings> {
        self.vms.get(&id).map(|vm| &vm.settings)
    }

    /// Ends the sampling period of a VM and begins the next: the pages to unmap. Once every `sampling.period_s`.
    pub fn start_period(&mut self, id: VmId, chance: &mut Chance) -> Vec<PageIdx> {
        self.vms.get_mut(&id).map_or_else(Vec::new, |vm| vm.estimator.start_period(chance))
    }

    /// A VM's working set as of the last plan.
    pub fn estimate(&self, id: VmId) -> Option<Estimate> {
        self.vms.get(&id).map(|vm| vm.estimator.estimate())
    }

    /// The target a VM would have had in the last plan with these shares and this cap and min; nothing before a plan.
    pub fn what_if(&self, id: VmId, settings: &VmSettings) -> Option<PageCount> {
        let Last { ids, claims, budget } = self.last.as_ref()?;
        let index = ids.binary_search(&id).ok()?;
        let mut claims = claims.clone();
        let claim = &mut claims[index];
        let old = &self.vms.get(&id)?.settings;
        claim.shares = settings.shares;
        // A ceiling set by demand stays; one set by the cap moves with it.
        let capped = if claim.ceiling >= old.cap { settings.cap } else { claim.ceiling.min(settings.cap) };
        claim.ceiling = capped;
        claim.min = settings.min.min(capped);
        Some(allocate(&claims, self.host.tax, *budget).pages[index].max(settings.min))
    }

    /// A plan from what is. VMs without a sample are left alone; samples of unknown VMs are dropped.
    pub fn tick(&mut self, host: &PoolSample, samples: &[VmSample]) -> Plan {
        let now_ms = host.now_ms;
        let elapsed_ms = self.planned_ms.map_or(0, |before| now_ms.saturating_sub(before));
        self.planned_ms = Some(now_ms);
        let mut samples: Vec<VmSample> = samples.iter().filter_map(|sample| self.bounded(sample)).collect();
        samples.sort_by_key(|sample| sample.id);
        samples.dedup_by_key(|sample| sample.id);

        let pool = host.pool.min(self.host.pool);
        let free = pool.saturating_sub(host.used);
        let goal = self.host.thresholds.free_goal().of_ceil(pool);
        let residents: PageCount = samples.iter().map(|sample| sample.resident).sum();
        let budget = pool.saturating_sub(host.used.saturating_sub(residents)).saturating_sub(goal);

        self.set_state(free, &Levels::of(pool, &self.host.thresholds), now_ms);

        let mut terms = self.terms(&samples, budget);
        let shortfall = self.set_targets(&mut terms, budget);
        let ceilings: PageCount = terms.iter().map(|terms| terms.ceiling).sum();
        if ceilings > budget {
            self.short_ms = Some(now_ms);
        }
        let restrained = self.short_ms.is_some_and(|short| now_ms.saturating_sub(short) < RELEASE_MS);

        // More than the pool may be in use: it shrinks when the host runs short.
        let beyond = host.used.saturating_sub(pool).min(residents);
        // Limits hold VMs before they make free memory short: who is held below its target gets what it lacks all the same.
        let lacking = lacking(&samples, &terms);
        let taking = self.state > ReclaimState::High || lacking > PageCount::ZERO;
        let need = if taking { (goal + lacking).saturating_sub(free) + beyond } else { PageCount::ZERO };
        let kept = plan_revocation(&samples, &terms, self.host.tax, residents.saturating_sub(need));
        let situation = Situation { state: self.state, restrained, rates: self.host.rates, now_ms, elapsed_ms };
        let mut vms = Vec::with_capacity(samples.len());
        for ((sample, terms), kept) in samples.iter().zip(terms).zip(kept) {
            let vm = self.vms.get_mut(&sample.id).expect("samples of unknown VMs were dropped");
            let (actions, status) = steps::plan_vm(&situation, &vm.settings, sample, &terms, kept, &mut vm.balloon);
            if vm.status != status {
                (vm.status, vm.status_since_ms) = (status, now_ms);
            }
            vms.push(VmPlan {
                id: sample.id,
                terms,
                actions,
                status,
                status_since_ms: vm.status_since_ms,
                balloon_ignored: vm.balloon.is_ignored(now_ms),
            });
        }
        let stuck = self.watch(free, need, &samples, &vms, now_ms);
        Plan {
            state: self.state,
            state_since_ms: self.state_since_ms,
            free,
            budget,
            restrained,
            need,
            shortfall,
            stuck,
            vms,
        }
    }

    /// The sample of a known VM, with no count beyond its memory: whatever was counted wrong, no sum overflows.
    fn bounded(&self, sample: &VmSample) -> Option<VmSample> {
        let memory = self.vms.get(&sample.id)?.settings.memory;
        let VmSample { resident, swapped, shared, balloon, .. } = *sample;
        let balloon = match balloon {
            Balloon::Absent => Balloon::Absent,
            Balloon::Inflated(size) => Balloon::Inflated(size.min(memory)),
        };
        Some(VmSample {
            balloon,
            resident: resident.min(memory),
            swapped: swapped.min(memory),
            shared: shared.min(memory),
            ..*sample
        })
    }

    fn set_state(&mut self, free: PageCount, levels: &Levels, now_ms: u64) {
        let next = self.state.next(free, levels);
        if next != self.state {
            (self.state, self.state_since_ms) = (next, now_ms);
        }
    }

    /// All terms but the price and what follows from it.
    fn terms(&mut self, samples: &[VmSample], budget: PageCount) -> Vec<Terms> {
        let shares_total = self.vms.values().map(|vm| u64::from(vm.settings.shares.get())).sum();
        let mut entitled = Vec::with_capacity(samples.len());
        let mut all = Vec::with_capacity(samples.len());
        for sample in samples {
            let vm = self.vms.get_mut(&sample.id).expect("samples of unknown VMs were dropped");
            vm.estimator.observe(sample.sample);
            let settings = &vm.settings;
            let claim = Claim {
                shares: settings.shares,
                min: settings.min,
                ceiling: settings.cap,
                working_set: settings.memory,
            };
            entitled.push(claim);
            let in_use = (sample.resident + sample.swapped + sample.shared).min(settings.memory);
            let Bounds { min, min_reason, ceiling, ceiling_reason, limit } = bounds(settings, sample.pinned, in_use);
            let estimate = vm.estimator.estimate();
            all.push(Terms {
                memory: settings.memory,
                shares: settings.shares,
                shares_total,
                tax: self.host.tax,
                entitlement: PageCount::ZERO,
                estimate,
                in_use,
                min,
                min_reason,
                ceiling,
                ceiling_reason,
                limit,
                price: price(&claim, self.host.tax, PageCount::ZERO),
                target: PageCount::ZERO,
                lent: PageCount::ZERO,
                allowance: PageCount::ZERO,
                bound: Bound::Ceiling,
                state: self.state,
            });
        }
        let entitlements = allocate(&entitled, TaxRate::NONE, budget).pages;
        for (terms, entitlement) in all.iter_mut().zip(entitlements) {
            terms.entitlement = entitlement;
        }
        all
    }

    /// Fills in targets; what the mins lack.
    fn set_targets(&mut self, terms: &mut [Terms], budget: PageCount) -> PageCount {
        let claims: Vec<Claim> = terms.iter().map(claim_of).collect();
        let allocation = allocate(&claims, self.host.tax, budget);
        for ((terms, claim), &given) in terms.iter_mut().zip(&claims).zip(&allocation.pages) {
            terms.target = given.max(terms.min);
            terms.lent = terms.target - given;
            terms.price = price(claim, self.host.tax, given);
            terms.bound = match given {
                given if given == claim.ceiling => Bound::Ceiling,
                given if given == claim.min => Bound::Min,
                _ => Bound::Price,
            };
            let limit = Claim { ceiling: terms.limit.max(claim.min), ..*claim };
            terms.allowance = match terms.bound {
                Bound::Ceiling => pages_at(&limit, self.host.tax, allocation.clearing).max(terms.target),
                Bound::Min | Bound::Price => terms.target,
            };
        }
        let ids = self.vms.keys().copied().collect::<Vec<_>>();
        self.last = (ids.len() == claims.len()).then_some(Last { ids, claims, budget });
        allocation.shortfall
    }

    /// Notices that nothing moves.
    fn watch(
        &mut self,
        free: PageCount,
        need: PageCount,
        samples: &[VmSample],
        vms: &[VmPlan],
        now_ms: u64,
    ) -> Option<(u64, StuckReason)> {
        if need == PageCount::ZERO {
            self.moved = None;
            return None;
        }
        let (before, since_ms) = *self.moved.get_or_insert((free, now_ms));
        if before.0.abs_diff(free.0) >= MOVED_MIN.0 {
            self.moved = Some((free, now_ms));
            return None;
        }
        if now_ms.saturating_sub(since_ms) < STUCK_MS {
            return None;
        }
        let both = || samples.iter().zip(vms);
        let reason = if both().any(|(sample, vm)| vm.actions.page_out_cap < sample.resident) {
            StuckReason::PageOutDoesNotMove
        } else if both().any(|(sample, vm)| sample.resident > vm.terms.target) {
            StuckReason::BalloonsDoNotMove
        } else {
            StuckReason::NothingToTake
        };
        Some((since_ms, reason))
    }
}

/// What VMs at their limits lack to their targets, as far as the budget has that for them. Limits are dealt in chunks, so a
/// chunk less than the target is the target. A VM with nothing in swap does not page: page-out's headroom is no lack to it.
fn lacking(samples: &[VmSample], terms: &[Terms]) -> PageCount {
    let lack = |(sample, terms): (&VmSample, &Terms)| {
        let lack = (terms.target - terms.lent).saturating_sub(sample.resident);
        let least = match sample.swapped {
            PageCount::ZERO => headroom_max(terms.target),
            _ => PageCount(CHUNK_PAGES),
        };
        if sample.is_at_limit && lack > least { lack } else { PageCount::ZERO }
    };
    samples.iter().zip(terms).map(lack).sum()
}

fn claim_of(terms: &Terms) -> Claim {
    let Terms { shares, min, ceiling, estimate, .. } = *terms;
    Claim { shares, min: min.min(ceiling), ceiling, working_set: estimate.working_set }
}

/// Between what a VM's target lies.
struct Bounds {
    min: PageCount,
    min_reason: MinReason,
    ceiling: PageCount,
    ceiling_reason: CeilingReason,
    /// The ceiling whatever it has touched.
    limit: PageCount,
}

fn bounds(settings: &VmSettings, pinned: bool, in_use: PageCount) -> Bounds {
    let demand = in_use + PageCount(in_use.0 / GROWTH_OF_USE + settings.memory.0.div_ceil(GROWTH_OF_MEMORY));
    let (limit, limit_reason) = match settings.cap {
        // A pinned VM cannot be held to a cap.
        cap if pinned || cap == settings.memory => (settings.memory, CeilingReason::Memory),
        cap => (cap, CeilingReason::Cap),
    };
    let (min, min_reason) = match settings.min {
        min if pinned && in_use > min => (in_use, MinReason::Pinned),
        min => (min, MinReason::Min),
    };
    let (ceiling, ceiling_reason) = match demand {
        demand if demand >= limit => (limit, limit_reason),
        demand => (demand, CeilingReason::Demand),
    };
    Bounds { min, min_reason, ceiling, ceiling_reason, limit }
}

/// Min-funding revocation from what is resident down to `pages` in all: what each VM keeps. Nobody loses anything of its
/// min, and nobody below its target loses while somebody is above.
fn plan_revocation(samples: &[VmSample], terms: &[Terms], tax: TaxRate, pages: PageCount) -> Vec<PageCount> {
    let both = samples.iter().zip(terms);
    let claims: Vec<Claim> = both
        .map(|(sample, terms)| {
            let ceiling = sample.resident.min(terms.memory);
            let min = terms.min.min(ceiling);
            Claim { shares: terms.shares, min, ceiling, working_set: terms.estimate.working_set }
        })
        .collect();
    allocate(&claims, tax, pages.min(POOL_MAX)).pages
}
