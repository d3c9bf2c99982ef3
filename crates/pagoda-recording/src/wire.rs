//! The lines of a recording, and their way to the policy's types and back. Memory is in pages of 4 KiB.

use pagoda_core::chance::mix;
use pagoda_core::policy::changes::Changes;
use pagoda_core::policy::host::HostMemory;
use pagoda_core::policy::round::{Elastic, EngineReport, HostReport, Outcome, VmReport, VmRoundParts, VmmKind};
use pagoda_core::policy::settings::{MEMORY_MAX, Rates, Sampling, Thresholds, VMS_MAX};
use pagoda_core::policy::{
    Balloon, HostSettings, Overhead, PerMille, Plan, PolicyStatus, Run, SampleCount, ShareGroup, Shares, TaxRate, VmId,
    VmPlan, VmSettings,
};
use pagoda_core::simulate::replay::Made;
use pagoda_core::units::{Bytes, PageCount};
use serde::{Deserialize, Serialize};

/// The largest time and count: what JSON's numbers hold exactly everywhere. No sum of them leaves 64 bits.
const NUMBER_MAX: u64 = 1 << 53;

/// Why a value cannot be used.
pub(crate) type Bad = String;

/// The first line of a recording: version, seed and host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    pub pagoda_policy_recording: u32,
    /// Of the choice of sampled pages.
    pub seed: u64,
    pub host: Host,
}

/// Each line after the first: one round, with what it was given and its plan.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Round {
    pub now_ms: u64,
    pub memory: Memory,
    /// What was set since the round before.
    #[serde(default, skip_serializing_if = "Set::is_empty")]
    pub set: Set,
    pub vms: Vec<Vm>,
    pub plan: Planned,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Set {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    host: Option<Host>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vms: Vec<Settings>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    gone: Vec<u32>,
}

/// What is set for the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Host {
    pool: u64,
    tax: u16,
    /// High, soft, hard, low and the hysteresis.
    thresholds: [u16; 5],
    rate_page_out: u64,
    rate_balloon: u64,
}

/// What is set for a VM, and what it takes beside its memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    id: u32,
    memory: u64,
    cap: u64,
    min: u64,
    shares: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    share_group: Option<String>,
    sample_pages: u32,
    sample_period_s: u32,
    balloon_max: u16,
    reserve_swap: bool,
    overhead: u64,
    reserve: u64,
}

/// The host's memory, in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Memory {
    total: u64,
    available: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stalled: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    available_min: Option<u64>,
    /// What templates take of the memory, in pages unlike the fields above.
    #[serde(default, skip_serializing_if = "is_zero")]
    templates: u64,
    /// In pages: what the pool keeps for outboxes, and what they have of it.
    #[serde(default, skip_serializing_if = "is_zero")]
    outboxes: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    outboxes_held: u64,
    /// Of those whose size follows an SLO: what they are to have, at least, and what the pool keeps for them.
    #[serde(default, skip_serializing_if = "is_zero")]
    elastic_spaces: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    elastic_mins: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    elastic_charged: u64,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// What was measured of a VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Vm {
    id: u32,
    kind: Kind,
    memory: u64,
    min: u64,
    round: Remembered,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    engine: Option<Engine>,
    process: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    measured: Option<u64>,
    balloon: Inflated,
    pinned: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Qemu,
    Plain,
}

/// A balloon: its size, or why there is none.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Inflated {
    Unknown,
    Absent,
    Size(u64),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Remembered {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
    sent: u64,
    /// In bytes, while `limit` is in pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keeps: Option<u64>,
    overhead: u64,
    period: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    period_ms: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Engine {
    armed: bool,
    ram: u64,
    resident: u64,
    swapped: u64,
    shared: u64,
    shared_part: u64,
    share_burst: u64,
    watched: u32,
    touched: u32,
    sample_period: u64,
    pinned: bool,
}

/// What a round makes of its input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Planned {
    state: String,
    pool: u64,
    used: u64,
    free: u64,
    budget: u64,
    need: u64,
    shortfall: u64,
    restrained: bool,
    stuck: bool,
    pub vms: Vec<VmPlanned>,
}

/// Of a VM, in the order of the reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmPlanned {
    pub id: u32,
    /// `None`: the plan leaves it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    orders: Option<VmOrders>,
    /// A sampling period begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sample: Option<Sampled>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VmOrders {
    working_set: u64,
    target: u64,
    lent: u64,
    allowance: u64,
    status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    balloon: Option<u64>,
    page_out_cap: u64,
    limit: u64,
    runs: bool,
}

/// The pages of a sampling period: how many, and a digest of their numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampled {
    pages: u64,
    digest: String,
}

fn number(what: &str, value: u64) -> Result<u64, Bad> {
    if value <= NUMBER_MAX { Ok(value) } else { Err(format!("{what} is {value}: at most {NUMBER_MAX} is possible")) }
}

fn pages(what: &str, value: u64) -> Result<PageCount, Bad> {
    let most = MEMORY_MAX.0;
    if value <= most {
        Ok(PageCount(value))
    } else {
        Err(format!("{what} is {value} pages: at most {most} are possible"))
    }
}

fn maybe<T, U>(value: Option<T>, read: impl FnOnce(T) -> Result<U, Bad>) -> Result<Option<U>, Bad> {
    value.map(read).transpose()
}

impl Header {
    pub(crate) fn new(seed: u64, host: &HostSettings) -> Header {
        Header { pagoda_policy_recording: crate::VERSION, seed, host: Host::new(host) }
    }
}

impl Host {
    fn new(host: &HostSettings) -> Host {
        let Thresholds { high, soft, hard, low, hysteresis } = host.thresholds;
        Host {
            pool: host.pool.0,
            tax: host.tax.per_mille().0,
            thresholds: [high, soft, hard, low, hysteresis].map(|part| part.0),
            rate_page_out: host.rates.page_out.0,
            rate_balloon: host.rates.balloon.0,
        }
    }

    pub(crate) fn read(&self) -> Result<HostSettings, Bad> {
        let [high, soft, hard, low, hysteresis] = self.thresholds.map(PerMille);
        let host = HostSettings {
            pool: pages("pool", self.pool)?,
            tax: TaxRate::new(PerMille(self.tax)).map_err(|error| error.to_string())?,
            thresholds: Thresholds { high, soft, hard, low, hysteresis },
            rates: Rates {
                page_out: pages("rate_page_out", self.rate_page_out)?,
                balloon: pages("rate_balloon", self.rate_balloon)?,
            },
        };
        host.check().map_err(|error| error.to_string())?;
        Ok(host)
    }
}

impl Set {
    fn new(changes: &Changes) -> Set {
        Set {
            host: changes.host.as_ref().map(Host::new),
            vms: changes.vms.iter().map(|(id, settings, overhead)| Settings::new(*id, settings, *overhead)).collect(),
            gone: changes.gone.iter().map(|id| id.0).collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.host.is_none() && self.vms.is_empty() && self.gone.is_empty()
    }

    fn read(&self) -> Result<Changes, Bad> {
        Ok(Changes {
            host: self.host.as_ref().map(Host::read).transpose()?,
            vms: self.vms.iter().map(Settings::read).collect::<Result<_, Bad>>()?,
            gone: self.gone.iter().copied().map(VmId).collect(),
        })
    }
}

impl Settings {
    fn new(id: VmId, settings: &VmSettings, overhead: Overhead) -> Settings {
        Settings {
            id: id.0,
            memory: settings.memory.0,
            cap: settings.cap.0,
            min: settings.min.0,
            shares: settings.shares.get(),
            share_group: settings.share_group.as_ref().map(|group| group.name().to_owned()),
            sample_pages: settings.sampling.pages,
            sample_period_s: settings.sampling.period_s,
            balloon_max: settings.balloon_max.0,
            reserve_swap: settings.reserve_swap,
            overhead: overhead.overhead.0,
            reserve: overhead.reserve.0,
        }
    }

    fn read(&self) -> Result<(VmId, VmSettings, Overhead), Bad> {
        let text = |error: pagoda_core::policy::InvalidSettings| format!("VM {}: {error}", self.id);
        let settings = VmSettings {
            memory: pages("memory", self.memory)?,
            cap: pages("cap", self.cap)?,
            min: pages("min", self.min)?,
            shares: Shares::new(self.shares).map_err(text)?,
            share_group: self.share_group.as_deref().map(ShareGroup::new).transpose().map_err(text)?,
            sampling: Sampling { pages: self.sample_pages, period_s: self.sample_period_s },
            balloon_max: PerMille(self.balloon_max),
            reserve_swap: self.reserve_swap,
        };
        settings.check().map_err(text)?;
        let overhead =
            Overhead { overhead: pages("overhead", self.overhead)?, reserve: pages("reserve", self.reserve)? };
        Ok((VmId(self.id), settings, overhead))
    }
}

/// The input of a round.
pub(crate) struct Input {
    pub changes: Changes,
    pub host: HostReport,
    pub vms: Vec<VmReport>,
}

impl Round {
    pub(crate) fn new(changes: &Changes, host: &HostReport, vms: &[VmReport], made: Made<'_>) -> Round {
        let HostMemory { total, available, stalled } = host.memory;
        Round {
            now_ms: host.now_ms,
            memory: Memory {
                total: total.0,
                available: available.0,
                stalled,
                available_min: host.available_min.map(|min| min.0),
                templates: host.templates.0,
                outboxes: host.outboxes.0,
                outboxes_held: host.outboxes_held.0,
                elastic_spaces: host.elastic.spaces.0,
                elastic_mins: host.elastic.mins.0,
                elastic_charged: host.elastic.charged.0,
            },
            set: Set::new(changes),
            vms: vms.iter().map(Vm::new).collect(),
            plan: Planned::new(vms, made),
        }
    }

    /// What the round was made from.
    pub(crate) fn input(&self) -> Result<Input, Bad> {
        if self.vms.len() > VMS_MAX || self.set.vms.len() > VMS_MAX {
            return Err(format!("there are more VMs than the {VMS_MAX} of a host"));
        }
        let Memory { total, available, stalled, available_min, templates, outboxes, outboxes_held, .. } = self.memory;
        let Memory { elastic_spaces, elastic_mins, elastic_charged, .. } = self.memory;
        let bytes = |what, value| number(what, value).map(Bytes);
        let host = HostReport {
            now_ms: number("now_ms", self.now_ms)?,
            memory: HostMemory { total: bytes("total", total)?, available: bytes("available", available)?, stalled },
            available_min: maybe(available_min, |min| bytes("available_min", min))?,
            templates: number("templates", templates).map(PageCount)?,
            outboxes: number("outboxes", outboxes).map(PageCount)?,
            outboxes_held: number("outboxes_held", outboxes_held).map(PageCount)?,
            elastic: Elastic {
                spaces: number("elastic_spaces", elastic_spaces).map(PageCount)?,
                mins: number("elastic_mins", elastic_mins).map(PageCount)?,
                charged: number("elastic_charged", elastic_charged).map(PageCount)?,
            },
        };
        let vm = |vm: &Vm| vm.read().map_err(|bad| format!("VM {}: {bad}", vm.id));
        let vms = self.vms.iter().map(vm).collect::<Result<_, Bad>>()?;
        Ok(Input { changes: self.set.read()?, host, vms })
    }
}

impl Vm {
    fn new(vm: &VmReport) -> Vm {
        let VmRoundParts { limit, sent, keeps, overhead, period, period_ms } = vm.round.into();
        Vm {
            id: vm.id.0,
            kind: match vm.kind {
                VmmKind::Qemu => Kind::Qemu,
                VmmKind::Plain => Kind::Plain,
            },
            memory: vm.memory.0,
            min: vm.min.0,
            round: Remembered {
                limit: limit.map(|limit| limit.0),
                sent: sent.0,
                keeps: keeps.map(|keeps| keeps.0),
                overhead: overhead.0,
                period,
                period_ms,
            },
            engine: vm.engine.as_ref().map(Engine::new),
            process: vm.process.0,
            measured: vm.measured.map(|measured| measured.0),
            balloon: match vm.balloon {
                None => Inflated::Unknown,
                Some(Balloon::Absent) => Inflated::Absent,
                Some(Balloon::Inflated(size)) => Inflated::Size(size.0),
            },
            pinned: vm.pinned,
        }
    }

    fn read(&self) -> Result<VmReport, Bad> {
        let round = &self.round;
        let parts = VmRoundParts {
            limit: maybe(round.limit, |limit| pages("limit", limit))?,
            sent: pages("sent", round.sent)?,
            keeps: maybe(round.keeps, |keeps| number("keeps", keeps))?.map(Bytes),
            overhead: pages("overhead", round.overhead)?,
            period: number("period", round.period)?,
            period_ms: maybe(round.period_ms, |ms| number("period_ms", ms))?,
        };
        Ok(VmReport {
            id: VmId(self.id),
            kind: match self.kind {
                Kind::Qemu => VmmKind::Qemu,
                Kind::Plain => VmmKind::Plain,
            },
            memory: pages("memory", self.memory)?,
            min: pages("min", self.min)?,
            round: parts.into(),
            engine: self.engine.as_ref().map(Engine::read).transpose()?,
            process: pages("process", self.process)?,
            measured: maybe(self.measured, |measured| pages("measured", measured))?,
            balloon: match self.balloon {
                Inflated::Unknown => None,
                Inflated::Absent => Some(Balloon::Absent),
                Inflated::Size(size) => Some(Balloon::Inflated(pages("balloon", size)?)),
            },
            pinned: self.pinned,
        })
    }
}

impl Engine {
    fn new(engine: &EngineReport) -> Engine {
        Engine {
            armed: engine.armed,
            ram: engine.ram.0,
            resident: engine.resident.0,
            swapped: engine.swapped.0,
            shared: engine.shared.0,
            shared_part: engine.shared_part.0,
            share_burst: engine.share_burst.0,
            watched: engine.sample.watched,
            touched: engine.sample.touched,
            sample_period: engine.sample_period,
            pinned: engine.pinned,
        }
    }

    fn read(&self) -> Result<EngineReport, Bad> {
        Ok(EngineReport {
            armed: self.armed,
            ram: pages("ram", self.ram)?,
            resident: pages("resident", self.resident)?,
            swapped: pages("swapped", self.swapped)?,
            shared: pages("shared", self.shared)?,
            shared_part: pages("shared_part", self.shared_part)?,
            share_burst: pages("share_burst", self.share_burst)?,
            sample: SampleCount { watched: self.watched, touched: self.touched },
            sample_period: number("sample_period", self.sample_period)?,
            pinned: self.pinned,
        })
    }
}

impl Planned {
    /// What it says of the host.
    pub(crate) fn without_vms(&self) -> Planned {
        Planned { vms: Vec::new(), ..self.clone() }
    }

    pub(crate) fn new(vms: &[VmReport], made: Made<'_>) -> Planned {
        let Made { outcomes, last } = made;
        let plan = &last.plan;
        Planned {
            state: plan.state.name().to_owned(),
            pool: last.pool.now.0,
            used: last.host.used.0,
            free: plan.free.0,
            budget: plan.budget.0,
            need: plan.need.0,
            shortfall: plan.shortfall.0,
            restrained: plan.restrained,
            stuck: plan.stuck.is_some(),
            vms: vms.iter().zip(outcomes).map(|(vm, outcome)| VmPlanned::new(vm.id, plan, outcome)).collect(),
        }
    }
}

impl VmPlanned {
    fn new(id: VmId, plan: &Plan, outcome: &Outcome) -> VmPlanned {
        let orders = outcome.orders.zip(plan.vm(id));
        VmPlanned {
            id: id.0,
            orders: orders.map(|(orders, planned)| VmOrders::new(orders.limit, planned)),
            sample: outcome.sample.as_ref().map(|pages| Sampled {
                pages: pages.len() as u64,
                digest: format!("{:016x}", pages.iter().fold(0, |digest, page| mix(digest ^ page.0))),
            }),
        }
    }
}

impl VmOrders {
    fn new(limit: PageCount, planned: &VmPlan) -> VmOrders {
        let VmPlan { terms, actions, status, .. } = planned;
        VmOrders {
            working_set: terms.estimate.working_set.0,
            target: terms.target.0,
            lent: terms.lent.0,
            allowance: terms.allowance.0,
            status: match status {
                PolicyStatus::AtEase => "at_ease",
                PolicyStatus::Squeezed => "squeezed",
                PolicyStatus::Blocked => "blocked",
                PolicyStatus::Pinned => "pinned",
            }
            .to_owned(),
            balloon: actions.balloon.map(|size| size.0),
            page_out_cap: actions.page_out_cap.0,
            limit: limit.0,
            runs: actions.run == Run::Run,
        }
    }
}
