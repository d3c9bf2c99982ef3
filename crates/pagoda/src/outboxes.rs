//! `pagoda outbox`: shows outboxes, explains their sizes, and changes them.

use anyhow::Result;
use pagoda_api::{Client, OutboxExplanation, OutboxInfo, OutboxProfile};

use crate::cli::Outboxes;
use crate::output::{Format, Side, Table, lines_text, print_json, print_text};
use crate::units::format_size;

pub fn run(client: &Client, command: &Outboxes, format: Format) -> Result<()> {
    let outbox = match command {
        Outboxes::Ls => {
            let list = client.outboxes()?;
            match format {
                Format::Json => print_json(&list)?,
                Format::Text => table(&list.outboxes).print()?,
            }
            return Ok(());
        }
        Outboxes::Show { vm } => client.outbox(vm)?,
        Outboxes::Set(options) => client.set_outbox(&options.vm, &options.patch())?,
        Outboxes::Explain { vm } => return explain(&client.explain_outbox(vm)?, format),
    };
    match format {
        Format::Json => print_json(&outbox)?,
        Format::Text => print_text(&text(&outbox))?,
    }
    Ok(())
}

fn explain(explanation: &OutboxExplanation, format: Format) -> Result<()> {
    match format {
        Format::Json => print_json(explanation)?,
        Format::Text => print_text(&terms_text(explanation))?,
    }
    Ok(())
}

fn terms_text(explanation: &OutboxExplanation) -> String {
    let size = |bytes: Option<u64>| bytes.map(|bytes| format!("{}  ", format_size(bytes))).unwrap_or_default();
    let terms = explanation.terms.iter();
    let lines: Vec<_> = terms.map(|term| (term.term.as_str(), format!("{}{}", size(term.bytes), term.text))).collect();
    lines_text(&lines)
}

fn table(outboxes: &[OutboxInfo]) -> Table {
    let mut table = Table::new(&[
        ("VM", Side::Left),
        ("STATE", Side::Left),
        ("SPACE", Side::Right),
        ("CHARGED", Side::Right),
        ("USED", Side::Right),
        ("AVAIL", Side::Right),
        ("FILES", Side::Right),
        ("READERS", Side::Right),
        ("SENT", Side::Right),
        ("SLO", Side::Left),
        ("PID", Side::Right),
    ]);
    for outbox in outboxes {
        let known = |value: fn(&pagoda_api::OutboxFigures) -> String| {
            outbox.figures.as_ref().map_or_else(|| "-".to_owned(), value)
        };
        let draining = if outbox.is_draining() { ",draining" } else { "" };
        table.row(vec![
            outbox.vm.clone(),
            format!("{}{draining}", outbox.state.word()),
            format_size(outbox.space_bytes),
            format_size(outbox.charged_bytes),
            known(|figures| format_size(figures.used_bytes)),
            known(|figures| format_size(figures.available_bytes)),
            known(|figures| figures.files.to_string()),
            known(|figures| figures.readers.to_string()),
            known(|figures| format_size(figures.acknowledged_bytes)),
            slo_words(outbox),
            outbox.pid.map_or("-".into(), |pid| pid.to_string()),
        ]);
    }
    table
}

/// What its size follows, and whether that can be kept.
fn slo_words(outbox: &OutboxInfo) -> String {
    let Some(auto) = &outbox.auto else { return "-".to_owned() };
    let verdict = outbox.profile.as_ref().and_then(|profile| profile.verdict.as_deref());
    format!("{}: {}", auto.slo, verdict.unwrap_or("learning"))
}

fn seconds(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3} s"))
}

/// What its guest's jobs do.
fn profile_lines(profile: &OutboxProfile) -> Vec<(&'static str, String)> {
    let rate = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}/s", format_size(bytes)));
    let output = profile.output_mean_bytes.map_or_else(|| "-".to_owned(), format_size);
    let mut lines = vec![
        (
            "jobs",
            format!(
                "{} ended since its start, {} run or were given up; {:.3} a second in the last {} periods of {:.0} s",
                profile.jobs_ended,
                profile.jobs_begun.saturating_sub(profile.jobs_ended),
                profile.arrivals_per_s,
                profile.periods,
                profile.period_s
            ),
        ),
        ("response", format!("mean {}, p90 {}", seconds(profile.response_mean_s), seconds(profile.response_p90_s))),
        ("computing", format!("{}, writing {output}", seconds(profile.compute_mean_s))),
        (
            "goodput",
            format!(
                "{} in the last period, {} for one client; the space drains by {}",
                rate(Some(profile.goodput_bytes_per_s)),
                rate(profile.reader_goodput_bytes_per_s),
                rate(profile.drain_bytes_per_s)
            ),
        ),
        ("blocked", format!("{:.1} % of the last period", profile.blocked_share * 100.0)),
    ];
    if profile.windows > 0 {
        lines.push((
            "kept",
            format!("the SLO in {} of the last {} windows with jobs", profile.windows_kept, profile.windows),
        ));
    }
    for job in profile.recent.iter().take(3) {
        let label = |what: &str, text: &str| if text.is_empty() { String::new() } else { format!(", {what} {text}") };
        lines.push((
            "job",
            format!(
                "{}: {} in {:.3} s, of which {:.3} s waiting{}{}",
                job.number,
                format_size(job.output_bytes),
                job.took_ms as f64 / 1000.0,
                job.blocked_ms as f64 / 1000.0,
                label("id", &job.id),
                label("to", &job.destination)
            ),
        ));
    }
    lines
}

fn text(outbox: &OutboxInfo) -> String {
    let mut lines = vec![("vm", outbox.vm.clone()), ("state", outbox.state.word().to_owned())];
    if let Some(problem) = &outbox.problem {
        lines.push(("problem", problem.clone()));
    }
    lines.push(("space", format_size(outbox.space_bytes)));
    if outbox.is_draining() {
        lines.push(("", "less than it holds: no new bytes until drained".into()));
    }
    if let Some(auto) = &outbox.auto {
        let max = auto.max_bytes.map_or_else(|| "what the pool has".to_owned(), format_size);
        let limits = format!("min {}, max {max}, weight {}", format_size(auto.min_bytes), auto.weight);
        lines.push(("slo", format!("{} ({limits})", slo_words(outbox))));
    }
    lines.push(("charged", format!("{} of the pool", format_size(outbox.charged_bytes))));
    lines.push(("pid", outbox.pid.map_or("-".into(), |pid| pid.to_string())));
    let Some(figures) = &outbox.figures else {
        lines.push(("figures", "unknown".into()));
        return lines_text(&lines);
    };
    let delivered = format_size(figures.delivered_bytes_kept);
    lines.extend([
        ("used", format!("{}, of which {delivered} goes when there is need", format_size(figures.used_bytes))),
        ("available", format_size(figures.available_bytes)),
        ("files", figures.files.to_string()),
        ("readers", figures.readers.to_string()),
        ("written", format_size(figures.written_bytes)),
        ("acknowledged", format_size(figures.acknowledged_bytes)),
        (
            "waiting",
            format!("{} writes now, {:.1} s so far", figures.waiting_writes, figures.blocked_ms as f64 / 1000.0),
        ),
        ("refused", format!("{} changes of what was sent", figures.refused_changes)),
    ]);
    lines.extend(outbox.profile.iter().flat_map(|profile| profile_lines(profile)));
    lines_text(&lines)
}

#[cfg(test)]
pub mod tests {
    use pagoda_api::{OutboxFigures, OutboxState};

    use super::*;

    pub fn sample(vm: &str) -> OutboxInfo {
        let figures = OutboxFigures {
            space_bytes: 64 << 20,
            used_bytes: 48 << 20,
            delivered_bytes_kept: 16 << 20,
            available_bytes: 32 << 20,
            files: 3,
            readers: 1,
            written_bytes: 2 << 30,
            acknowledged_bytes: 1 << 30,
            blocked_ms: 1250,
            ..OutboxFigures::default()
        };
        OutboxInfo {
            vm: vm.to_owned(),
            state: OutboxState::Serving,
            problem: None,
            space_bytes: 64 << 20,
            charged_bytes: 64 << 20,
            pid: Some(43),
            figures: Some(figures),
            auto: None,
            profile: None,
        }
    }

    #[test]
    fn the_list() {
        let auto = pagoda_api::OutboxAuto { slo: "p90 4.6s".into(), min_bytes: 4 << 20, max_bytes: None, weight: 100 };
        let recent = vec![pagoda_api::OutboxJob {
            number: 7,
            took_ms: 1500,
            blocked_ms: 250,
            id: "a".into(),
            ..Default::default()
        }];
        let profile = OutboxProfile { verdict: Some("feasible".into()), recent, jobs_ended: 7, ..Default::default() };
        let draining = OutboxInfo {
            space_bytes: 32 << 20,
            charged_bytes: 48 << 20,
            auto: Some(auto),
            profile: Some(Box::new(profile)),
            ..sample("web1")
        };
        let problem = Some("no answer within 1 s".to_owned());
        let silent = OutboxInfo { state: OutboxState::Silent, figures: None, problem, ..sample("db") };
        let expected = "\
VM    STATE             SPACE  CHARGED  USED  AVAIL  FILES  READERS  SENT  SLO                 PID
web1  serving,draining    32M      48M   48M    32M      3        1    1G  p90 4.6s: feasible   43
db    silent              64M      64M     -      -      -        -     -  -                    43
";
        assert_eq!(table(&[draining.clone(), silent.clone()]).render(), expected);
        let said = text(&draining);
        assert!(
            said.contains("no new bytes until drained\n") && said.contains("0 writes now, 1.2 s so far\n"),
            "{said}"
        );
        for part in
            ["p90 4.6s: feasible (min 4M, max what the pool has, weight 100)", "7 ended", "0.250 s waiting, id a\n"]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
        let said = text(&silent);
        assert!(said.contains("figures        unknown\n") && said.contains("no answer within 1 s\n"), "{said}");
        assert!(!text(&sample("a")).contains("until drained"));
    }

    #[test]
    fn an_explanation() {
        let term =
            |term: &str, bytes, text: &str| pagoda_api::OutboxTerm { term: term.into(), bytes, text: text.into() };
        let terms = vec![term("space", Some(64 << 20), "all it wants"), term("verdict", None, "infeasible: no")];
        let said = terms_text(&OutboxExplanation { vm: "web1".into(), terms });
        assert!(said.contains("64M  all it wants\n") && said.contains("infeasible: no\n"), "{said}");
    }
}
