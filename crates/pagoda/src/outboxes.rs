//! `pagoda outbox`: what there is, and another size.

use anyhow::Result;
use pagoda_api::{Client, OutboxInfo};

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
        Outboxes::Set(options) => client.set_outbox(&options.vm, options.space)?,
    };
    match format {
        Format::Json => print_json(&outbox)?,
        Format::Text => print_text(&text(&outbox))?,
    }
    Ok(())
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
            outbox.pid.map_or("-".into(), |pid| pid.to_string()),
        ]);
    }
    table
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
        }
    }

    #[test]
    fn the_list() {
        let draining = OutboxInfo { space_bytes: 32 << 20, charged_bytes: 48 << 20, ..sample("web1") };
        let problem = Some("no answer within 1 s".to_owned());
        let silent = OutboxInfo { state: OutboxState::Silent, figures: None, problem, ..sample("db") };
        let expected = "\
VM    STATE             SPACE  CHARGED  USED  AVAIL  FILES  READERS  SENT  PID
web1  serving,draining    32M      48M   48M    32M      3        1    1G   43
db    silent              64M      64M     -      -      -        -     -   43
";
        assert_eq!(table(&[draining.clone(), silent.clone()]).render(), expected);
        let said = text(&draining);
        assert!(
            said.contains("no new bytes until drained\n") && said.contains("0 writes now, 1.2 s so far\n"),
            "{said}"
        );
        let said = text(&silent);
        assert!(said.contains("figures        unknown\n") && said.contains("no answer within 1 s\n"), "{said}");
        assert!(!text(&sample("a")).contains("until drained"));
    }
}
