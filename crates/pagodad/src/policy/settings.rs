//! Conversions between what is configured, asked for or recorded and the policy's own types. Nothing here does I/O.

use pagoda_api::types::{AdmitRequest, ApiError, ErrorCode, HostPatch, PolicySettings, VmSpec, dram_bytes_min};
use pagoda_core::policy::round::Caps;
use pagoda_core::policy::settings::SHARES_DEFAULT;
use pagoda_core::policy::settings::{Sampling, THRESHOLDS_DEFAULT, Thresholds};
use pagoda_core::policy::{HostSettings, PerMille, SettingsError, ShareGroup, Shares, TaxRate, VmSettings};
use pagoda_core::units::{Bytes, PageCount};

use crate::config::PolicyConfig;
use crate::record::Record;

/// What is left to the host where no pool is set: this part of its memory ...
const RESERVE_PART: u64 = 16;
/// ... at least what a host needs for itself ...
const RESERVE_MIN: Bytes = Bytes::from_mib(512);
/// ... and at most that.
const RESERVE_MAX: Bytes = Bytes::from_gib(8);

/// The pool of a host of which nothing was set.
pub fn pool_default(total: Bytes) -> Bytes {
    let reserve = Bytes(total.0 / RESERVE_PART).max(RESERVE_MIN).min(RESERVE_MAX);
    // A host that small keeps half.
    total.saturating_sub(reserve.min(Bytes(total.0 / 2)))
}

/// The host's settings, of a host with so much memory.
///
/// # Errors
/// The first that cannot be used.
pub fn host_settings(config: &PolicyConfig, total: Bytes) -> Result<HostSettings, SettingsError> {
    let pool = config.pool.unwrap_or_else(|| pool_default(total));
    let defaults = HostSettings::new(pool.pages_floor());
    let settings = HostSettings {
        tax: config.idle_tax.map_or(Ok(defaults.tax), TaxRate::new)?,
        thresholds: config.thresholds.map_or(THRESHOLDS_DEFAULT, thresholds),
        ..defaults
    };
    settings.check()?;
    Ok(settings)
}

fn thresholds([high, soft, hard, low]: [PerMille; 4]) -> Thresholds {
    Thresholds { high, soft, hard, low, ..THRESHOLDS_DEFAULT }
}

/// The host's settings with a request's changes.
///
/// # Errors
/// The first that cannot be used.
pub fn patched(settings: &HostSettings, patch: &HostPatch) -> Result<HostSettings, SettingsError> {
    Ok(HostSettings {
        pool: patch.pool.map_or(settings.pool, |pool| Bytes(pool).pages_floor()),
        tax: patch.idle_tax.map_or(Ok(settings.tax), |tax| TaxRate::new(PerMille(tax)))?,
        thresholds: patch.thresholds.map_or(settings.thresholds, |at| thresholds(at.map(PerMille))),
        ..settings.clone()
    })
}

/// What limits a VM beside the policy.
pub fn caps_of(record: &Record) -> Caps {
    let memory = memory_of(record);
    let own = record.paged_out_to().map_or(record.dram(), |target| record.dram().min(target));
    Caps {
        memory,
        cap: Bytes(record.dram()).pages_floor(),
        own: Bytes(own).pages_floor(),
        min: Bytes(record.spec.policy.min).pages_ceil(),
        least: Bytes(dram_bytes_min(memory.bytes().0)).pages_ceil(),
    }
}

/// The memory that the VM's guest sees, in pages.
pub fn memory_of(record: &Record) -> PageCount {
    Bytes(record.memory()).pages_floor()
}

/// What the policy needs to know of a VM.
///
/// # Errors
/// The first setting that cannot be used.
pub fn vm_settings(spec: &VmSpec, memory: PageCount, config: &PolicyConfig) -> Result<VmSettings, SettingsError> {
    let cap = Bytes(spec.dram_of(memory.bytes().0)).pages_floor();
    let settings = VmSettings {
        cap,
        min: min_of(spec.policy.min, cap),
        shares: spec.policy.shares.map_or(Ok(SHARES_DEFAULT), Shares::new)?,
        share_group: spec.share_group.as_deref().map(ShareGroup::new).transpose()?,
        sampling: sampling_of(spec, config),
        reserve_swap: spec.reserve_swap,
        ..VmSettings::new(memory)
    };
    settings.check()?;
    Ok(settings)
}

/// How a VM's working set is sampled.
pub fn sampling_of(spec: &VmSpec, config: &PolicyConfig) -> Sampling {
    spec.policy.sampling.map_or(config.sampling, |of| Sampling { pages: of.pages, period_s: of.period_s })
}

/// Of a VM that somebody thinks of starting.
///
/// # Errors
/// The first setting that cannot be used.
pub fn asked_settings(request: &AdmitRequest, config: &PolicyConfig) -> Result<VmSettings, SettingsError> {
    let policy = PolicySettings { min: request.min, ..PolicySettings::default() };
    let spec = VmSpec { dram: request.dram, policy, ..VmSpec::default() };
    vm_settings(&spec, Bytes(request.memory_bytes).pages_floor(), config)
}

/// Pages of a guarantee; one of a whole cap that ends within a page is kept by the cap's pages.
pub fn min_of(bytes: u64, cap: PageCount) -> PageCount {
    let pages = Bytes(bytes).pages_ceil();
    if pages == cap + PageCount(1) { cap } else { pages }
}

/// The error that is told to whoever asked for such settings.
pub fn refusal(error: &SettingsError) -> ApiError {
    let code = match error {
        SettingsError::NotAdmitted(_) | SettingsError::TooManyVms => ErrorCode::NoRoom,
        SettingsError::NoSuchVm { .. } => ErrorCode::WrongState,
        _ => ErrorCode::BadRequest,
    };
    ApiError::new(code, error.to_string(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: PageCount = PageCount(1 << 19);

    fn spec() -> VmSpec {
        VmSpec { dram: Some((1 << 30) + 100), ..VmSpec::default() }
    }

    #[test]
    fn pools_of_hosts_of_all_sizes() {
        let check = |total_mib: u64, pool_mib: u64| {
            assert_eq!(pool_default(Bytes::from_mib(total_mib)), Bytes::from_mib(pool_mib), "{total_mib}");
        };
        check(512, 256);
        check(2048, 1536);
        check(32 << 10, 30 << 10);
        check(1 << 20, (1 << 20) - (8 << 10));
    }

    #[test]
    fn what_is_set_is_what_the_policy_knows() {
        let config = PolicyConfig::default();
        let settings = |spec: &VmSpec| vm_settings(spec, MEMORY, &config);
        assert_eq!(settings(&VmSpec::default()), Ok(VmSettings::new(MEMORY)));
        assert_eq!(settings(&spec()), Ok(VmSettings { cap: PageCount(1 << 18), ..VmSettings::new(MEMORY) }));
        let sampling = Some(pagoda_api::Sampling { pages: 5, period_s: 6 });
        let policy = PolicySettings { min: (1 << 30) + 100, shares: Some(7), sampling };
        let all = VmSpec { policy, share_group: Some("g".into()), ..spec() };
        let known = settings(&all).unwrap();
        assert_eq!((known.min, known.shares.get()), (PageCount(1 << 18), 7));
        assert_eq!(known.sampling, Sampling { pages: 5, period_s: 6 });
        assert_eq!(known.share_group.unwrap().name(), "g");
        let with = |policy: PolicySettings| settings(&VmSpec { policy, ..spec() });
        assert!(with(PolicySettings { min: 2 << 30, ..PolicySettings::default() }).is_err());
        assert!(with(PolicySettings { shares: Some(0), ..PolicySettings::default() }).is_err());
    }

    #[test]
    fn a_patch_changes_what_it_names() {
        let before = HostSettings::new(PageCount(1000));
        assert_eq!(patched(&before, &HostPatch::default()).unwrap(), before);
        let thresholds = Some([80, 60, 40, 20]);
        let patch = HostPatch { pool: Some(4096 * 500), idle_tax: Some(0), thresholds, draining: None };
        let after = patched(&before, &patch).unwrap();
        assert_eq!((after.pool, after.tax, after.thresholds.low), (PageCount(500), TaxRate::NONE, PerMille(20)));
        let error = patched(&before, &HostPatch { idle_tax: Some(1000), ..HostPatch::default() }).unwrap_err();
        assert_eq!(refusal(&error).code, ErrorCode::BadRequest);
    }
}
