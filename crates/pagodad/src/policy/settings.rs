//! Between what is configured, asked for or recorded and the policy's own types. Pure.

use pagoda_abi::record::Record;
use pagoda_api::types::{AdmitRequest, ApiError, ErrorCode, HostPatch};
use pagoda_core::policy::settings::{SHARES_DEFAULT, SettingsError};
use pagoda_core::policy::settings::{Sampling, THRESHOLDS_DEFAULT, Thresholds};
use pagoda_core::policy::{HostSettings, PerMille, ShareGroup, Shares, TaxRate, VmSettings};
use pagoda_core::units::{Bytes, PageCount};

use crate::config::PolicyConfig;

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

/// What the guest sees.
pub fn memory_of(record: &Record) -> PageCount {
    Bytes(record.regions.iter().sum()).pages_floor()
}

/// What the policy needs to know of a VM.
///
/// # Errors
/// The first setting that cannot be used.
pub fn vm_settings(record: &Record, config: &PolicyConfig) -> Result<VmSettings, SettingsError> {
    let memory = memory_of(record);
    let cap = Bytes(record.dram).pages_floor();
    let settings = VmSettings {
        cap,
        min: min_of(record.min, cap),
        shares: record.shares.map_or(Ok(SHARES_DEFAULT), Shares::new)?,
        share_group: record.group.as_deref().map(ShareGroup::new).transpose()?,
        sampling: sampling_of(record, config),
        reserve_swap: record.reserve,
        ..VmSettings::new(memory)
    };
    settings.check()?;
    Ok(settings)
}

/// How a VM's working set is sampled.
pub fn sampling_of(record: &Record, config: &PolicyConfig) -> Sampling {
    record.sampling.map_or(config.sampling, |(pages, period_s)| Sampling { pages, period_s })
}

/// Of a VM that somebody thinks of starting.
///
/// # Errors
/// The first setting that cannot be used.
pub fn asked_settings(request: &AdmitRequest) -> Result<VmSettings, SettingsError> {
    let memory = Bytes(request.memory_bytes).pages_floor();
    let cap = request.dram.map_or(memory, |dram| Bytes(dram).pages_floor());
    let settings = VmSettings { cap, min: min_of(request.min, cap), ..VmSettings::new(memory) };
    settings.check()?;
    Ok(settings)
}

/// Pages of a guarantee; one of a whole cap that ends within a page is kept by the cap's pages.
pub fn min_of(bytes: u64, cap: PageCount) -> PageCount {
    let pages = Bytes(bytes).pages_ceil();
    if pages == cap + PageCount(1) { cap } else { pages }
}

/// Told to whoever asked.
pub fn refusal(error: &SettingsError) -> ApiError {
    let code = match error {
        SettingsError::NotAdmitted(_) | SettingsError::TooManyVms => ErrorCode::NoRoom,
        SettingsError::NoSuchVm { .. } => ErrorCode::WrongState,
        _ => ErrorCode::BadRequest,
    };
    ApiError { code, message: error.to_string(), hint: None }
}

#[cfg(test)]
mod tests {
    use pagoda_abi::Token;
    use pagoda_abi::record::Kind;

    use super::*;

    fn record() -> Record {
        Record {
            name: "web1".into(),
            token: Token([0; 16]),
            kind: Kind::Qemu,
            regions: vec![1 << 30, 1 << 30],
            dram: (1 << 30) + 100,
            reserve: false,
            pid: (0, 0),
            balloon: None,
            min: 0,
            shares: None,
            sampling: None,
            blocked: false,
            group: None,
            sharing: None,
            far: None,
            compressed: None,
            pinned: None,
        }
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
    fn a_record_is_what_the_policy_knows() {
        let config = PolicyConfig::default();
        let settings = vm_settings(&record(), &config).unwrap();
        assert_eq!(settings, VmSettings { cap: PageCount(1 << 18), ..VmSettings::new(PageCount(1 << 19)) });
        let all = Record {
            min: (1 << 30) + 100,
            shares: Some(7),
            sampling: Some((5, 6)),
            group: Some("g".into()),
            ..record()
        };
        let settings = vm_settings(&all, &config).unwrap();
        assert_eq!((settings.min, settings.shares.get()), (PageCount(1 << 18), 7));
        assert_eq!(settings.sampling, Sampling { pages: 5, period_s: 6 });
        assert_eq!(settings.share_group.unwrap().name(), "g");
        assert!(vm_settings(&Record { min: 2 << 30, ..record() }, &config).is_err());
        assert!(vm_settings(&Record { shares: Some(0), ..record() }, &config).is_err());
    }

    #[test]
    fn a_patch_changes_what_it_names() {
        let before = HostSettings::new(PageCount(1000));
        assert_eq!(patched(&before, &HostPatch::default()).unwrap(), before);
        let patch = HostPatch { pool: Some(4096 * 500), idle_tax: Some(0), thresholds: Some([80, 60, 40, 20]) };
        let after = patched(&before, &patch).unwrap();
        assert_eq!((after.pool, after.tax, after.thresholds.low), (PageCount(500), TaxRate::NONE, PerMille(20)));
        let error = patched(&before, &HostPatch { idle_tax: Some(1000), ..HostPatch::default() }).unwrap_err();
        assert_eq!(refusal(&error).code, ErrorCode::BadRequest);
    }
}
