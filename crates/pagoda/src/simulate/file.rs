//! A scenario as TOML. Sizes have a unit (`256M`), times one of s, m, h and d (`90s`, `5m`), parts are `75%` or `0.75`.

use anyhow::{Context, Result, anyhow, bail};
use pagoda_core::policy::settings::{
    BALLOON_MAX_DEFAULT, RATES_DEFAULT, Rates, SAMPLING_DEFAULT, SHARES_DEFAULT, Sampling, THRESHOLDS_DEFAULT,
    Thresholds,
};
use pagoda_core::policy::{HostSettings, Overhead, PerMille, ShareGroup, Shares, TaxRate, VmSettings};
use pagoda_core::simulate::{BalloonScript, Boot, Change, ChangeKind, Hardware, Phase, Scenario, VmScript};
use pagoda_core::units::{Bytes, PageCount};
use serde::{Deserialize, Serialize};

use crate::units::{parse_seconds, parse_size};

/// Copies of one VM; as many VMs as a host may have.
const COUNT_MAX: u32 = 4096;
/// Points that a recording has if nothing is said: a plot's width.
const POINTS_DEFAULT: u64 = 800;
/// Touches a second if nothing is said: a guest that does little but use its memory.
const RATE_DEFAULT: PageCount = Bytes::from_gib(1).pages_floor();

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub title: String,
    pub duration: String,
    #[serde(default)]
    pub seed: u64,
    pub record: Option<String>,
    pub host: Host,
    #[serde(rename = "vm", default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<Vm>,
    #[serde(rename = "change", default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<ChangeEntry>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    pub pool: String,
    pub idle_tax: Option<String>,
    pub thresholds: Option<ThresholdsEntry>,
    pub balloon_rate: Option<String>,
    pub page_out_rate: Option<String>,
    pub page_in: Option<String>,
    pub page_out: Option<String>,
    pub fault_us: Option<u64>,
    pub share_scan: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThresholdsEntry {
    pub high: Option<String>,
    pub soft: Option<String>,
    pub hard: Option<String>,
    pub low: Option<String>,
    pub hysteresis: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    pub name: String,
    pub memory: String,
    pub dram: Option<String>,
    pub min: Option<String>,
    pub shares: Option<u32>,
    pub share_group: Option<String>,
    pub sample_pages: Option<u32>,
    pub sample_period: Option<String>,
    pub balloon_max: Option<String>,
    pub overhead: Option<String>,
    pub start: Option<String>,
    pub stop: Option<String>,
    pub boot: Option<BootEntry>,
    pub balloon: Option<BalloonEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<PhaseEntry>,
    /// The use of a recorded VM over time, in place of phases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Point>,
    pub repeat: Option<String>,
    #[serde(default)]
    pub reports_free: bool,
    pub count: Option<u32>,
    pub stagger: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootEntry {
    pub touches: String,
    pub rate: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonEntry {
    pub after: String,
    pub rate: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseEntry {
    pub at: String,
    pub active: String,
    pub rate: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeEntry {
    pub at: String,
    pub idle_tax: Option<String>,
    pub pool: Option<String>,
    pub vm: Option<String>,
    pub shares: Option<u32>,
    pub min: Option<String>,
    pub dram: Option<String>,
}

/// What a VM used from some second since its start on: the second, MiB in use, MiB touched.
pub type Point = [u64; 3];

/// Reads a scenario. What it says is checked when it is run.
pub fn parse(text: &str) -> Result<Scenario> {
    let file: File = toml::from_str(text)?;
    let duration_s = seconds(&file.duration)?;
    let record_s = match &file.record {
        Some(record) => seconds(record)?,
        None => duration_s.div_ceil(POINTS_DEFAULT).max(1),
    };
    let mut vms = Vec::new();
    for vm in &file.vms {
        vms.extend(scripts(vm).with_context(|| format!("VM {:?}", vm.name))?);
    }
    let change = |entry: &ChangeEntry| change(entry, &vms).with_context(|| format!("change at {}", entry.at));
    let changes = file.changes.iter().map(change).collect::<Result<Vec<Vec<Change>>>>()?.concat();
    Ok(Scenario {
        title: file.title,
        duration_s,
        seed: file.seed,
        host: host(&file.host).context("host")?,
        hardware: hardware(&file.host).context("host")?,
        vms,
        changes,
        record_s,
    })
}

fn host(entry: &Host) -> Result<HostSettings> {
    let mut host = HostSettings::new(pages(&entry.pool)?);
    if let Some(tax) = &entry.idle_tax {
        host.tax = TaxRate::new(tax.parse::<PerMille>()?)?;
    }
    if let Some(entry) = &entry.thresholds {
        let part = |text: &Option<String>, default: PerMille| text.as_deref().map_or(Ok(default), str::parse);
        let default = THRESHOLDS_DEFAULT;
        host.thresholds = Thresholds {
            high: part(&entry.high, default.high)?,
            soft: part(&entry.soft, default.soft)?,
            hard: part(&entry.hard, default.hard)?,
            low: part(&entry.low, default.low)?,
            hysteresis: part(&entry.hysteresis, default.hysteresis)?,
        };
    }
    host.rates = Rates {
        page_out: pages_or(&entry.page_out_rate, RATES_DEFAULT.page_out)?,
        balloon: pages_or(&entry.balloon_rate, RATES_DEFAULT.balloon)?,
    };
    Ok(host)
}

fn hardware(entry: &Host) -> Result<Hardware> {
    let default = Hardware::default();
    Ok(Hardware {
        page_in: pages_or(&entry.page_in, default.page_in)?,
        page_out: pages_or(&entry.page_out, default.page_out)?,
        fault_us: entry.fault_us.unwrap_or(default.fault_us),
        share_scan: pages_or(&entry.share_scan, default.share_scan)?,
    })
}

fn settings(entry: &Vm) -> Result<VmSettings> {
    let memory = pages(&entry.memory)?;
    let sampling = Sampling {
        pages: entry.sample_pages.unwrap_or(SAMPLING_DEFAULT.pages),
        period_s: match &entry.sample_period {
            Some(period) => u32::try_from(seconds(period)?).context("sample_period")?,
            None => SAMPLING_DEFAULT.period_s,
        },
    };
    Ok(VmSettings {
        memory,
        cap: pages_or(&entry.dram, memory)?,
        min: pages_or(&entry.min, PageCount::ZERO)?,
        shares: entry.shares.map_or(Ok(SHARES_DEFAULT), Shares::new)?,
        share_group: entry.share_group.as_deref().map(ShareGroup::new).transpose()?,
        sampling,
        balloon_max: entry.balloon_max.as_deref().map_or(Ok(BALLOON_MAX_DEFAULT), str::parse)?,
        // Swap is as large as is wanted.
        reserve_swap: false,
    })
}

/// A VM, or `count` of them, each `stagger` after the other.
fn scripts(entry: &Vm) -> Result<Vec<VmScript>> {
    let count = entry.count.unwrap_or(1);
    if !(1..=COUNT_MAX).contains(&count) {
        bail!("count = {count}: give 1 to {COUNT_MAX}");
    }
    let settings = settings(entry)?;
    let memory = settings.memory;
    let boot = match &entry.boot {
        Some(boot) => Boot { touches: pages_of(&boot.touches, memory)?, rate: pages(&boot.rate)? },
        None => Boot { touches: PageCount::ZERO, rate: RATE_DEFAULT },
    };
    let balloon = |entry: &BalloonEntry| -> Result<BalloonScript> {
        Ok(BalloonScript { after_s: seconds(&entry.after)?, rate: pages(&entry.rate)? })
    };
    let phase = |entry: &PhaseEntry| -> Result<Phase> {
        let rate = pages_or(&entry.rate, RATE_DEFAULT)?;
        Ok(Phase { at_s: seconds(&entry.at)?, active: pages_of(&entry.active, memory)?, rate, touched: None })
    };
    let script = VmScript {
        name: entry.name.clone(),
        overhead: Overhead { overhead: pages_or(&entry.overhead, PageCount::ZERO)?, reserve: PageCount::ZERO },
        start_s: seconds_or(&entry.start, 0)?,
        stop_s: entry.stop.as_deref().map(seconds).transpose()?,
        boot,
        balloon: entry.balloon.as_ref().map(balloon).transpose()?,
        phases: if entry.series.is_empty() {
            entry.phases.iter().map(phase).collect::<Result<_>>()?
        } else {
            recorded(entry)?
        },
        repeat_s: entry.repeat.as_deref().map(seconds).transpose()?,
        reports_free: entry.reports_free,
        settings,
    };
    if entry.count.is_none() {
        return Ok(vec![script]);
    }
    let stagger_s = seconds_or(&entry.stagger, 0)?;
    let digits = count.to_string().len();
    let copy = |nth: u32| VmScript {
        name: format!("{}-{:0digits$}", script.name, nth + 1),
        start_s: script.start_s.saturating_add(stagger_s.saturating_mul(u64::from(nth))),
        stop_s: script.stop_s.map(|stop_s| stop_s.saturating_add(stagger_s.saturating_mul(u64::from(nth)))),
        ..script.clone()
    };
    Ok((0..count).map(copy).collect())
}

/// The phases of a recorded VM. How fast it touched its working set is not known; it is touched within seconds.
fn recorded(entry: &Vm) -> Result<Vec<Phase>> {
    if !entry.phases.is_empty() || entry.repeat.is_some() {
        bail!("give phases or a series, not both; a series does not repeat");
    }
    let mib = |mib: u64| mib.checked_mul(1 << 20).map(|bytes| Bytes(bytes).pages_floor()).context("a size in a series");
    let phase = |[at_s, active, touched]: &Point| -> Result<Phase> {
        Ok(Phase { at_s: *at_s, active: mib(*active)?, rate: RATE_DEFAULT, touched: Some(mib(*touched)?) })
    };
    entry.series.iter().map(phase).collect()
}

fn change(entry: &ChangeEntry, vms: &[VmScript]) -> Result<Vec<Change>> {
    let at_s = seconds(&entry.at)?;
    let mut changes = Vec::new();
    if let Some(tax) = &entry.idle_tax {
        changes.push(ChangeKind::Tax(TaxRate::new(tax.parse::<PerMille>()?)?));
    }
    if let Some(pool) = &entry.pool {
        changes.push(ChangeKind::Pool(pages(pool)?));
    }
    let is_of_vm = entry.shares.is_some() || entry.min.is_some() || entry.dram.is_some();
    match (&entry.vm, is_of_vm) {
        (Some(name), true) => {
            let index = vms.iter().position(|vm| vm.name == *name).ok_or_else(|| anyhow!("there is no VM {name:?}"))?;
            let old = &vms[index].settings;
            let settings = VmSettings {
                shares: entry.shares.map_or(Ok(old.shares), Shares::new)?,
                min: pages_or(&entry.min, old.min)?,
                cap: pages_or(&entry.dram, old.cap)?,
                ..old.clone()
            };
            changes.push(ChangeKind::Vm(index, settings));
        }
        (None, true) => bail!("shares, min and dram are a VM's: name it with vm = \"...\""),
        (Some(name), false) => bail!("nothing is changed of {name:?}; give shares, min or dram"),
        (None, false) => {}
    }
    if changes.is_empty() {
        bail!("nothing is changed; give idle_tax, pool, or a vm with shares, min or dram");
    }
    Ok(changes.into_iter().map(|what| Change { at_s, what }).collect())
}

fn pages(text: &str) -> Result<PageCount> {
    parse_size(text).map(|bytes| Bytes(bytes).pages_floor()).map_err(|message| anyhow!(message))
}

fn pages_or(text: &Option<String>, default: PageCount) -> Result<PageCount> {
    text.as_deref().map_or(Ok(default), pages)
}

/// A size, or a part of the VM's memory, or all of it.
fn pages_of(text: &str, memory: PageCount) -> Result<PageCount> {
    match text {
        "all" => Ok(memory),
        part if part.trim_end().ends_with('%') => Ok(part.parse::<PerMille>()?.of_floor(memory)),
        size => pages(size),
    }
}

fn seconds(text: &str) -> Result<u64> {
    parse_seconds(text).map_err(|message| anyhow!(message))
}

fn seconds_or(text: &Option<String>, default: u64) -> Result<u64> {
    text.as_deref().map_or(Ok(default), seconds)
}
