//! Who may start, and what may be set: questions to the memory policy before anything is made or changed.

use pagoda_api::in_full;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use pagoda_api::types::{
    AdmitReply, AdmitRequest, ApiError, ErrorCode, HostInfo, HostPatch, Mrc, MrcPoint, WhatIfReply, WhatIfRequest,
};
use pagoda_core::policy::mrc::Curve;
use pagoda_core::policy::round::VmmKind;
use pagoda_core::policy::{Change, Overhead, SettingsError, SwapSpace, VmId, VmSettings};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_pager::handle::Handle;

use super::templates::Wanted;
use super::{Registry, Vm, internal, no_such_vm};
use crate::outboxes::Outbox;
use crate::policy::{State, settings, vmm_kind};
use crate::record::Record;

/// `st_blocks` counts these, whatever the file system's are (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// A VM that is asked about.
struct Asked {
    record: Record,
    id: VmId,
    page_ins_per_s: f64,
    handle: Option<Arc<Handle>>,
}

impl Registry {
    /// Reserves what a new VM needs; its number.
    ///
    /// # Errors
    /// It cannot be kept: what is missing, and what to do.
    pub(super) fn admit(
        &self,
        vms: &BTreeMap<String, Vm>,
        record: &Record,
        outbox: Option<&Arc<Outbox>>,
    ) -> Result<VmId, ApiError> {
        let swap = self.swap_space(vms)?;
        let mut policy = self.governor.lock();
        let memory = settings::memory_of(record);
        let vm = settings::vm_settings(&record.spec, memory, &policy.config).map_err(|e| settings::refusal(&e))?;
        let overhead = policy.rounds.expected_overhead(vmm_kind(record.kind), &vm);
        let id = policy.new_id();
        let added = self.add(&mut policy, (id, vm.clone(), overhead), outbox, &swap);
        let refused = |error: SettingsError| {
            let refusal = self.not_admitted(&error);
            let Some(outbox) = outbox else { return refusal };
            let message = format!("{} with an outbox of {}: {}", record.name, outbox.space(), refusal.message);
            ApiError { message, ..refusal }
        };
        if !matches!(added, Err(SettingsError::NotAdmitted(_))) {
            return added.map(|()| id).map_err(refused);
        }
        drop(policy);
        // What no VM uses is nobody's reason not to start.
        self.drop_templates(Wanted::Now);
        let mut policy = self.governor.lock();
        self.add(&mut policy, (id, vm, overhead), outbox, &swap).map_err(refused)?;
        Ok(id)
    }

    /// Takes a VM and its outbox in, or neither.
    fn add(
        &self,
        policy: &mut State,
        (id, vm, overhead): (VmId, VmSettings, Overhead),
        outbox: Option<&Arc<Outbox>>,
        swap: &SwapSpace,
    ) -> Result<(), SettingsError> {
        let charged = self.count_outboxes_in(policy);
        let own = outbox.map_or(PageCount::ZERO, |outbox| outbox.charged().charged);
        policy.rounds.policy.set_outboxes(charged + own);
        let added = policy.rounds.policy.add(id, vm, overhead, swap);
        match outbox {
            Some(outbox) if added.is_ok() => self.outboxes.insert(outbox),
            _ => policy.rounds.policy.set_outboxes(charged),
        }
        added
    }

    /// That a VM could be kept in the place of another one, when that has ended.
    ///
    /// # Errors
    /// As of [`Registry::admit`]; the other one has ended.
    pub(super) fn admit_instead(&self, of: VmId, record: &Record) -> Result<(), ApiError> {
        let swap = self.swap_space(&self.lock())?;
        let policy = self.governor.lock();
        let memory = settings::memory_of(record);
        let vm = settings::vm_settings(&record.spec, memory, &policy.config).map_err(|e| settings::refusal(&e))?;
        vm.check().map_err(|e| settings::refusal(&e.into()))?;
        let overhead = policy.rounds.expected_overhead(vmm_kind(record.kind), &vm);
        let admission = policy.rounds.policy.admission(&Change::Replace(of, &vm, overhead), &swap);
        admission.verdict().map(drop).map_err(|refused| self.not_admitted(&refused.into()))
    }

    /// `POST /v1/admit`.
    ///
    /// # Errors
    /// Sizes that no VM can have.
    pub fn would_admit(&self, request: &AdmitRequest) -> Result<AdmitReply, ApiError> {
        let refuse = |text| ApiError::new(ErrorCode::BadRequest, text, None);
        if let Some(dram) = request.dram {
            pagoda_api::types::check_dram(dram, request.memory_bytes).map_err(refuse)?;
        }
        pagoda_api::types::check_min(request.min, request.dram.unwrap_or(request.memory_bytes)).map_err(refuse)?;
        let swap = self.swap_space(&self.lock())?;
        let policy = self.governor.lock();
        let vm = settings::asked_settings(request, &policy.config).map_err(|e| settings::refusal(&e))?;
        let overhead = policy.rounds.expected_overhead(VmmKind::Qemu, &vm);
        let admission = policy.rounds.policy.admission(&Change::Add(&vm, overhead), &swap);
        let (needs, reserved, capacity) = (admission.needs, admission.reserved(), admission.capacity());
        let verdict = admission.verdict();
        Ok(AdmitReply {
            admitted: verdict.is_ok(),
            memory_needed_bytes: bytes(needs.memory),
            memory_free_bytes: bytes(capacity.memory.saturating_sub(reserved.memory)),
            swap_needed_bytes: bytes(needs.swap),
            swap_free_bytes: bytes(capacity.swap.saturating_sub(reserved.swap)),
            missing: verdict.err().map(|refused| refused.to_string()).unwrap_or_default(),
        })
    }

    /// The swap disk as it is now. A file that cannot be looked at is taken to have nothing: then more has to be free.
    pub(super) fn swap_space(&self, vms: &BTreeMap<String, Vm>) -> Result<SwapSpace, ApiError> {
        let made = vms.values().map(|vm| (vm.record.name.clone(), vm.governed.id));
        let held = |(name, id): (String, VmId)| {
            let file = std::fs::metadata(self.swap_path(&name)).ok()?;
            Some((id, Bytes(file.blocks() * BLOCK_BYTES).pages_floor()))
        };
        let held = made.chain(self.making.all()).filter_map(held).collect();
        // After the files: what one of them gains meanwhile is counted nowhere, rather than twice.
        let dir = &self.config.swap_dir;
        let free =
            pagoda_sys::swapfile::fs_free(dir).map_err(|e| internal(&format!("look at {}", dir.display()), e))?;
        Ok(SwapSpace { free: Bytes(free).pages_floor(), held })
    }

    /// A refusal of the policy. One for want of room says where swap is.
    pub(super) fn not_admitted(&self, error: &SettingsError) -> ApiError {
        let mut refusal = settings::refusal(error);
        if let SettingsError::NotAdmitted(_) = error {
            let dir = self.config.swap_dir.display();
            refusal.hint = Some(format!("the swap directory is {dir}; `pagoda admit` says what would be admitted"));
        }
        refusal
    }

    /// Reserves what a VM needs with another record. It keeps what it has until that is [accepted](Self::accept) or
    /// [withdrawn](Self::withdraw).
    ///
    /// # Errors
    /// It cannot be used or kept. Nothing is changed then.
    pub(super) fn propose(&self, vms: &BTreeMap<String, Vm>, id: VmId, record: &Record) -> Result<(), ApiError> {
        let swap = self.swap_space(vms)?;
        let mut policy = self.governor.lock();
        let memory = settings::memory_of(record);
        let vm = settings::vm_settings(&record.spec, memory, &policy.config).map_err(|e| settings::refusal(&e))?;
        let overhead = policy.rounds.overhead_with(id, &vm);
        policy.rounds.policy.propose(id, vm, overhead, &swap).map_err(|e| self.not_admitted(&e))
    }

    /// A VM has the record that was proposed.
    pub(super) fn accept(&self, vm: &Vm) {
        let mut policy = self.governor.lock();
        policy.rounds.policy.accept(vm.governed.id);
        // The configuration may have been read again since it was proposed.
        configure_sampling(&mut policy, vm);
    }

    /// A VM keeps the record that it has.
    pub(super) fn withdraw(&self, id: VmId) {
        self.governor.lock().rounds.policy.withdraw(id);
    }

    /// `PATCH /v1/host`: takes effect at once, and lasts until the daemon ends or reads its configuration again.
    ///
    /// # Errors
    /// Settings that cannot be used, or with which what VMs were promised cannot be kept. Nothing is changed then.
    pub fn patch_host(self: &Arc<Self>, patch: &HostPatch) -> Result<HostInfo, ApiError> {
        let of_policy = HostPatch { draining: None, ..patch.clone() };
        if of_policy != HostPatch::default() {
            let vms = self.lock();
            let swap = self.swap_space(&vms)?;
            let mut policy = self.governor.lock();
            let host = settings::patched(policy.rounds.policy.host(), patch).map_err(|e| settings::refusal(&e))?;
            policy.rounds.policy.set_host(host, &swap).map_err(|e| self.not_admitted(&e))?;
        }
        if let Some(on) = patch.draining {
            self.draining.switch(on);
        }
        self.governor.doorbell.ring();
        Ok(self.host())
    }

    /// Reads the configuration of the policy again. What is wrong is said in the log, and the old settings stay.
    pub fn reload(&self) {
        match self.try_reload() {
            Ok(()) => tracing::info!("the memory policy was configured anew"),
            Err(error) => tracing::error!(
                "the configuration was not read again, the old one stays: {error}",
                error = in_full(error.as_ref())
            ),
        }
        self.governor.doorbell.ring();
    }

    fn try_reload(&self) -> anyhow::Result<()> {
        let config = self.config.reload_policy()?;
        let total = crate::policy::host::read_memory()?.total;
        let host = settings::host_settings(&config, total)?;
        let vms = self.lock();
        let swap = self.swap_space(&vms).map_err(|error| anyhow::anyhow!("{}", error.message))?;
        let mut policy = self.governor.lock();
        policy.rounds.policy.set_host(host, &swap)?;
        policy.config = config;
        // What is sampled is all that changes of a VM, and was looked at when it was read.
        vms.values().for_each(|vm| configure_sampling(&mut policy, vm));
        Ok(())
    }

    /// The limit with which a VM's engine begins, if free memory bounds it.
    pub fn first_limit(&self, vm: &Vm) -> Option<PageCount> {
        let policy = self.governor.lock();
        let resident = match vm.record.pid.0 {
            0 => 0,
            pid => pagoda_sys::process::rss(pid).unwrap_or(0),
        };
        policy.rounds.first_limit(vm.governed.id, Bytes(resident).pages_ceil())
    }

    /// After a start: whether what runs can be kept. It is kept in any case.
    pub(super) fn say_what_is_short(&self) {
        if let Some(problem) = self.promises_problem() {
            tracing::error!("the VMs that run stay, but {problem}");
        }
    }

    /// What was promised and is not there, if so: VMs were taken up by a daemon with a smaller pool, their VMMs grew, or
    /// others filled the swap disk.
    pub(super) fn promises_problem(&self) -> Option<String> {
        let vms = self.lock();
        if vms.is_empty() {
            return None;
        }
        let dir = self.config.swap_dir.display();
        match self.swap_space(&vms) {
            Err(error) => Some(format!("whether swap can be kept is not known: {}", error.message)),
            Ok(swap) => {
                let stands = self.governor.lock().rounds.policy.admission(&Change::Nothing, &swap);
                stands.verdict().err().map(|refused| format!("{refused} (the swap directory is {dir})"))
            }
        }
    }

    /// `POST /v1/vms/NAME/whatif`.
    ///
    /// # Errors
    /// No such VM, settings that it cannot have, or no plan was made with it yet.
    pub fn what_if(&self, name: &str, request: &WhatIfRequest) -> Result<WhatIfReply, ApiError> {
        let Asked { record, id, page_ins_per_s, handle } = self.look(name)?;
        let memory = record.memory();
        let asked = request.patch().applied_to(&record.spec, memory);
        let asked = asked.map_err(|text| ApiError::new(ErrorCode::BadRequest, text, None))?;
        let curve = handle.and_then(|handle| handle.status().curve.clone());
        let policy = self.governor.lock();
        let asked = settings::vm_settings(&asked, settings::memory_of(&record), &policy.config)
            .map_err(|e| settings::refusal(&e))?;
        let now = policy.rounds.last().and_then(|last| last.plan.vm(id)).map(|vm| vm.terms.target);
        let (Some(now), Some(then)) = (now, policy.rounds.policy.what_if(id, &asked)) else {
            let hint = "ask again in some seconds";
            return Err(ApiError::new(ErrorCode::WrongState, format!("no plan was made for {name} yet"), Some(hint)));
        };
        Ok(WhatIfReply {
            target_bytes: [bytes(now), bytes(then)],
            page_ins_per_s,
            page_ins_per_s_then: curve.as_ref().and_then(|curve| page_ins_then(curve, page_ins_per_s, now, then)),
            miss_ratio: curve.map(|curve| [curve.miss_ratio(now), curve.miss_ratio(then)]),
        })
    }

    /// `GET /v1/vms/NAME/mrc`.
    ///
    /// # Errors
    /// No such VM.
    pub fn mrc(&self, name: &str) -> Result<Mrc, ApiError> {
        let Asked { record, id, handle, .. } = self.look(name)?;
        let curve = handle.and_then(|handle| handle.fresh_status().curve.clone());
        let policy = self.governor.lock();
        let target =
            policy.rounds.last().and_then(|last| last.plan.vm(id)).map_or(PageCount::ZERO, |vm| vm.terms.target);
        let point = |(size, miss_ratio): (PageCount, f64)| MrcPoint { dram_bytes: bytes(size), miss_ratio };
        Ok(Mrc {
            accesses: curve.as_ref().map_or(0.0, |curve| curve.accesses()),
            memory_bytes: record.memory(),
            target_bytes: bytes(target),
            points: curve.map(|curve| curve.points().map(point).collect()).unwrap_or_default(),
        })
    }

    fn look(&self, name: &str) -> Result<Asked, ApiError> {
        let vms = self.lock();
        let vm = vms.get(name).ok_or_else(|| no_such_vm(name))?;
        Ok(Asked {
            record: vm.record.clone(),
            id: vm.governed.id,
            page_ins_per_s: vm.governed.page_ins_per_s,
            handle: vm.handle.clone(),
        })
    }
}

/// Has a VM sampled as its record says, or else as it is configured now.
pub(super) fn configure_sampling(policy: &mut State, vm: &Vm) {
    let sampling = settings::sampling_of(&vm.record.spec, &policy.config);
    if let Err(error) = policy.rounds.policy.set_sampling(vm.governed.id, sampling) {
        tracing::error!(vm = %vm.record.name, "it is sampled as before: {error}");
    }
}

/// Pages a second from swap with another amount of DRAM. In proportion to those of now, for the curve stands on a sample of
/// the same uses; where nothing is read now, as in a VM that has all its memory, by the time in which it was observed.
fn page_ins_then(curve: &Curve, page_ins_per_s: f64, now: PageCount, then: PageCount) -> Option<f64> {
    let [now, then] = [now, then].map(|size| curve.misses(size));
    if now > 0.0 && page_ins_per_s > 0.0 {
        return Some(page_ins_per_s * then / now);
    }
    (curve.seconds() > 0.0).then(|| page_ins_per_s + (then - now).max(0.0) / curve.seconds())
}

/// Pages that may be too many to count their bytes.
fn bytes(pages: PageCount) -> u64 {
    pages.0.saturating_mul(pagoda_core::units::PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::policy::mrc::Mrc;
    use pagoda_core::units::PageIdx;

    #[test]
    fn page_ins_are_scaled_or_by_the_clock() {
        // Ten rounds over 100 pages in 20 s: 45 pages a second are missed with fewer, and none with all.
        let mut mrc = Mrc::new(PageCount(200), usize::MAX, 0);
        (0..1000).for_each(|turn| mrc.access(PageIdx(turn % 100)));
        let curve = mrc.curve();
        let [all, half, little] = [200, 50, 0].map(PageCount);
        assert_eq!(page_ins_then(&curve, 7.0, half, little), Some(7.0), "scaled: the curve is flat there");
        assert_eq!(page_ins_then(&curve, 7.0, half, all), Some(0.0));
        assert_eq!(page_ins_then(&curve, 0.0, all, half), None, "nobody knows in what time");
        let curve = curve.over(20.0);
        assert_eq!(page_ins_then(&curve, 0.0, all, half), Some(45.0));
        assert_eq!(page_ins_then(&curve, 2.0, all, half), Some(47.0), "what is read now has other reasons");
        assert_eq!(page_ins_then(&curve, 0.0, all, all), Some(0.0));
    }
}
