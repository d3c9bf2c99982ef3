//! Why a VM's outbox has the size it has, in words: one term a line, as [`crate::policy::explain`] has them.

use crate::policy::explain::Line;
use crate::units::Bytes;

use super::control::{Decision, Reason};
use super::estimate::{Estimate, Help, PERIODS_COMPARED, Verdict};
use super::orchestrate::{Allotment, Cause};
use super::pressure::Yielded;
use super::settings::SpaceSettings;
use super::units::seconds;

fn words(term: &'static str, text: String) -> Line {
    Line { term, pages: None, is_loss: false, text }
}

fn size(term: &'static str, bytes: Bytes, text: String) -> Line {
    Line { term, pages: Some(bytes.pages_floor()), is_loss: false, text }
}

/// The terms of one VM's space.
pub fn explain(settings: &SpaceSettings, decision: &Decision, allotment: &Allotment, host: &Yielded) -> Vec<Line> {
    let mut lines = vec![
        size("space", allotment.space, cause(allotment.cause)),
        size("wanted", decision.space, reason(settings, decision)),
    ];
    if allotment.draining > Bytes::ZERO {
        lines.push(size(
            "draining",
            allotment.draining,
            "held beyond the space: no new bytes until it is sent".to_owned(),
        ));
    }
    if host.withheld > Bytes::ZERO {
        lines.push(size("withheld", host.withheld, withheld(host)));
    }
    match &decision.estimate {
        None => lines.push(words("prediction", "none yet: too few jobs have ended, or nothing was sent".to_owned())),
        Some(estimate) => lines.extend(of_estimate(settings, estimate)),
    }
    lines
}

fn cause(cause: Cause) -> String {
    match cause {
        Cause::Wanted => "all it wants".to_owned(),
        Cause::Shared { excess } => format!(
            "the pool is too small for all; response times up to {:.0} % above what its weight could keep",
            excess * 100.0
        ),
        Cause::Min => "its min: the pool has no more for its weight".to_owned(),
        Cause::PartOfMin => "the pool is smaller than the sum of all mins: its part of them".to_owned(),
        Cause::WaitsForDrain => "it grows when the outboxes of others have drained".to_owned(),
    }
}

fn reason(settings: &SpaceSettings, decision: &Decision) -> String {
    let slo = settings.slo;
    match decision.reason {
        Reason::NotKnown => "kept as it is until more is known".to_owned(),
        Reason::Enough => format!("what {slo} needs in nine of ten windows"),
        Reason::Grows => format!("grows: {slo} needs more in nine of ten windows"),
        Reason::Shrinks => format!("shrinks step by step: {slo} needs less"),
        Reason::Marginal => "nearly as good as all memory; no size keeps nine of ten windows".to_owned(),
        Reason::Infeasible => format!("no size keeps {slo}: what is still of use, and no more"),
        Reason::Feedback => "by feedback of the response time alone".to_owned(),
        Reason::Fixed => "set by hand".to_owned(),
    }
}

fn withheld(host: &Yielded) -> String {
    let stuck = if host.is_stuck { "; readers stand still, so what drains is not waited for" } else { "" };
    match host.left {
        Bytes::ZERO => format!("from all outboxes, because the host is short: VMs are not paged out for it{stuck}"),
        left => format!("from all outboxes, because the host is short; VMs give the {left} still lacking{stuck}"),
    }
}

fn of_estimate(settings: &SpaceSettings, estimate: &Estimate) -> Vec<Line> {
    let (now, terms, interval) = (&estimate.now, &estimate.terms, &estimate.interval);
    let statistic = settings.slo.statistic;
    let mut lines = vec![
        words(
            "prediction",
            format!(
                "mean {}, {statistic} {}, {statistic} of nine windows in ten at most {}",
                seconds(now.mean_s),
                seconds(now.statistic_s),
                seconds(now.window_s)
            ),
        ),
        words("error", error(estimate.error)),
        words("verdict", verdict(settings, estimate)),
    ];
    let ends = format!("mean {} without, {} with any amount", seconds(interval.none_s), seconds(interval.endless_s));
    lines.push(words(
        "memory helps",
        match interval.sizes {
            Some((from, to)) => format!("from {from} to {to}: {ends}"),
            None => format!("not at all: {ends}"),
        },
    ));
    lines.push(words(
        "jobs",
        format!(
            "{:.3} a second, computing {}, writing {}; computing takes {:.2} times what their samples say",
            terms.arrivals_per_s,
            seconds(terms.compute_mean_s),
            terms.output_mean,
            terms.compute_factor
        ),
    ));
    lines.push(words(
        "load",
        format!(
            "{:.0} % of the guest, {:.0} % of the network's {}",
            terms.compute_load * 100.0,
            terms.network_load * 100.0,
            terms.drain
        ),
    ));
    if terms.response_factor != 1.0 {
        lines.push(words("corrected", format!("{:.2} times what the model says, as measured", terms.response_factor)));
    }
    lines
}

fn error(error: Option<f64>) -> String {
    match error {
        None => format!("not known before {PERIODS_COMPARED} periods with predictions"),
        Some(error) => {
            format!("predicted means were off by {:.0} % in the last {PERIODS_COMPARED} periods", error * 100.0)
        }
    }
}

fn verdict(settings: &SpaceSettings, estimate: &Estimate) -> String {
    let slo = settings.slo;
    match estimate.verdict {
        Verdict::Kept => format!("feasible: {} keeps {slo}", estimate.needed),
        Verdict::Marginal { windows_above } => {
            format!(
                "marginal: {slo} over all jobs, but {:.0} % of the windows are above it at any size",
                windows_above * 100.0
            )
        }
        Verdict::Infeasible(help) => format!("infeasible: no size keeps {slo}; {}", helps(&help)),
    }
}

fn helps(help: &Help) -> String {
    let bandwidth = help.bandwidth.map(|rate| format!("a bandwidth of {rate}"));
    let speed = help.compute_speed.map(|times| format!("computing {times:.2} times as fast"));
    let what = match (bandwidth, speed) {
        (Some(bandwidth), Some(speed)) => format!("{bandwidth} would, or {speed}"),
        (Some(one), None) | (None, Some(one)) => format!("{one} would"),
        (None, None) => "fewer jobs, or more bandwidth and CPU together, would".to_owned(),
    };
    match help.is_overloaded {
        true => format!("jobs come faster than they can be done; {what}"),
        false => what,
    }
}

#[cfg(test)]
mod tests;
