//! The table of `top` as text, for `--batch` and for the live view.

use pagoda_api::HostPolicy;

use super::model::{Cause, Row};
use crate::output::{Side, Table};
use crate::units::{format_per_mille, format_size};

/// Characters between two columns.
pub const SPACING: usize = 2;

/// A column of a table whose rows are `R`.
pub struct Column<R> {
    pub name: &'static str,
    pub side: Side,
    /// A narrow terminal drops the columns with the greatest rank first; those of rank 0 stay.
    pub rank: u8,
    pub cell: fn(&R) -> String,
}

/// esxtop's words where it has one.
static COLUMNS: [Column<Row>; 23] = [
    Column { name: "NAME", side: Side::Left, rank: 0, cell: |row| row.name.clone() },
    Column { name: "STATE", side: Side::Left, rank: 2, cell: |row| row.state.clone() },
    Column { name: "MEMSZ", side: Side::Right, rank: 1, cell: |row| format_size(row.memory_bytes) },
    Column { name: "GRANT", side: Side::Right, rank: 0, cell: |row| format_size(row.resident_bytes) },
    Column { name: "TCHD", side: Side::Right, rank: 9, cell: |row| format_size(row.touched_bytes) },
    Column { name: "ACTV", side: Side::Right, rank: 4, cell: |row| size(row.active_bytes) },
    Column { name: "TGT", side: Side::Right, rank: 3, cell: |row| size(row.target_bytes) },
    Column { name: "SHRD", side: Side::Right, rank: 11, cell: |row| format_size(row.shared_bytes) },
    Column { name: "SAVED", side: Side::Right, rank: 10, cell: |row| format_size(row.saved_bytes) },
    Column { name: "MCTLSZ", side: Side::Right, rank: 8, cell: |row| size(row.ballooned_bytes) },
    Column { name: "MCTLTGT", side: Side::Right, rank: 12, cell: |row| size(row.balloon_wanted_bytes) },
    Column { name: "SWCUR", side: Side::Right, rank: 1, cell: |row| format_size(row.swapped_bytes) },
    Column { name: "SWR/s", side: Side::Right, rank: 3, cell: |row| mib_per_s(row.swap_read_bytes_per_s) },
    Column { name: "SWW/s", side: Side::Right, rank: 5, cell: |row| mib_per_s(row.swap_write_bytes_per_s) },
    Column { name: "ZERO", side: Side::Right, rank: 13, cell: |row| format_size(row.zero_bytes) },
    Column { name: "FLT/s", side: Side::Right, rank: 7, cell: |row| whole(row.faults_per_s) },
    Column { name: "P50", side: Side::Right, rank: 14, cell: |row| micros(row.p50_us) },
    Column { name: "P99", side: Side::Right, rank: 6, cell: |row| micros(row.p99_us) },
    Column { name: "OUTSZ", side: Side::Right, rank: 8, cell: |row| size(row.outbox_bytes) },
    Column { name: "OUTUSE", side: Side::Right, rank: 4, cell: |row| size(row.outbox_used_bytes) },
    Column { name: "TX/s", side: Side::Right, rank: 3, cell: |row| mib_per_s(row.outbox_sent_bytes_per_s) },
    Column { name: "BLOCK%", side: Side::Right, rank: 4, cell: |row| per_cent(row.outbox_blocked) },
    Column { name: "SLO", side: Side::Left, rank: 3, cell: |row| row.outbox_slo.clone().unwrap_or_else(|| "-".into()) },
];
/// The last of them are those of outboxes.
const OUTBOX_COLUMNS: usize = 5;

/// All columns that these rows have something for.
pub fn columns(rows: &[Row]) -> &'static [Column<Row>] {
    let has_outbox = rows.iter().any(|row| row.outbox_bytes.is_some());
    if has_outbox { &COLUMNS } else { &COLUMNS[..COLUMNS.len() - OUTBOX_COLUMNS] }
}

/// The columns that fit, in their order: of too many, the least important go.
pub fn columns_within<'a, R>(columns: &'a [Column<R>], width: usize, rows: &[R]) -> Vec<&'a Column<R>> {
    let mut kept: Vec<(&Column<R>, usize)> = columns
        .iter()
        .map(|column| {
            let cells = rows.iter().map(|row| (column.cell)(row).chars().count());
            (column, cells.chain([column.name.len()]).max().unwrap_or(0))
        })
        .collect();
    while kept.iter().map(|(_, width)| width + SPACING).sum::<usize>() > width + SPACING {
        let Some(last) = kept.iter().map(|(column, _)| column.rank).max().filter(|rank| *rank > 0) else { break };
        kept.retain(|(column, _)| column.rank != last);
    }
    kept.into_iter().map(|(column, _)| column).collect()
}

/// All columns of all rows.
pub fn render_table<R>(columns: &[Column<R>], rows: &[R]) -> String {
    let heads: Vec<(&str, Side)> = columns.iter().map(|column| (column.name, column.side)).collect();
    let mut table = Table::new(&heads);
    for row in rows {
        table.row(columns.iter().map(|column| (column.cell)(row)).collect());
    }
    table.render()
}

/// The host's state, and what of it VMs use.
pub fn host_line(host: &HostPolicy) -> String {
    let size = format_size;
    let pool = match host.pool_now_bytes < host.pool_bytes {
        true => format!("{} now of {}", size(host.pool_now_bytes), size(host.pool_bytes)),
        false => size(host.pool_bytes),
    };
    format!(
        "state {} for {} s  pool {pool}  used {}  free {}  tax {}{}{}",
        host.state,
        host.state_since_s,
        size(host.used_bytes),
        size(host.free_bytes),
        format_per_mille(host.idle_tax),
        if host.template_bytes > 0 { format!("  templates {}", size(host.template_bytes)) } else { String::new() },
        host.stuck.as_deref().map_or(String::new(), |stuck| format!("  stuck: {stuck}")),
    )
}

/// Sums over all VMs.
pub fn totals_line(rows: &[Row]) -> String {
    let sum = |value: fn(&Row) -> u64| format_size(rows.iter().map(value).sum());
    format!(
        "{} VMs  MEMSZ {}  GRANT {}  ACTV {}  SHRD {}  SAVED {}  MCTLSZ {}  SWCUR {}  ZERO {}",
        rows.len(),
        sum(|row| row.memory_bytes),
        sum(|row| row.resident_bytes),
        sum(|row| row.active_bytes.unwrap_or(0)),
        sum(|row| row.shared_bytes),
        sum(|row| row.saved_bytes),
        sum(|row| row.ballooned_bytes.unwrap_or(0)),
        sum(|row| row.swapped_bytes),
        sum(|row| row.zero_bytes),
    )
}

pub const CAUSE_COLUMNS: [(&str, Side); 5] = [
    ("CAUSE", Side::Left),
    ("FLT/s", Side::Right),
    ("FAULTS", Side::Right),
    ("P50", Side::Right),
    ("P99", Side::Right),
];

pub fn cause_cells(cause: &Cause) -> Vec<String> {
    vec![
        cause.cause.clone(),
        whole(cause.faults_per_s),
        cause.faults.to_string(),
        micros(cause.latency.map(|latency| latency.p50_us)),
        micros(cause.latency.map(|latency| latency.p99_us)),
    ]
}

/// One sample, as wide as it comes; below it for each VM that has faults, their rates by cause.
pub fn render(host: &HostPolicy, rows: &[Row]) -> String {
    let mut text = format!("{}\n{}\n{}", host_line(host), totals_line(rows), render_table(columns(rows), rows));
    for row in rows {
        let causes: Vec<String> = row
            .causes
            .iter()
            .filter(|cause| cause.faults_per_s.is_some_and(|rate| rate > 0.0))
            .map(|cause| format!("{} {}", cause.cause, whole(cause.faults_per_s)))
            .collect();
        if !causes.is_empty() {
            text += &format!("{} FLT/s by cause: {}\n", row.name, causes.join(", "));
        }
    }
    text
}

pub fn mib_per_s(bytes: Option<f64>) -> String {
    bytes.map_or("-".into(), |bytes| format!("{:.1}", bytes / f64::from(1 << 20)))
}

pub fn size(bytes: Option<u64>) -> String {
    bytes.map_or("-".into(), format_size)
}

fn whole(rate: Option<f64>) -> String {
    rate.map_or("-".into(), |rate| format!("{rate:.0}"))
}

fn per_cent(part: Option<f64>) -> String {
    part.map_or("-".into(), |part| format!("{:.1}", part * 100.0))
}

fn micros(us: Option<f64>) -> String {
    us.map_or("-".into(), |us| if us < 99.95 { format!("{us:.1}") } else { format!("{us:.0}") })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::show::tests::{sample as vm, squeezed};
    use crate::top::model::{Sample, rows};

    fn host() -> HostPolicy {
        let gib = |gib: u64| gib << 30;
        HostPolicy {
            pool_bytes: gib(48),
            pool_now_bytes: gib(48),
            used_bytes: gib(40),
            free_bytes: gib(8),
            idle_tax: 750,
            state: "high".into(),
            state_since_s: 7,
            ..HostPolicy::default()
        }
    }

    #[test]
    fn a_sample_as_text() {
        let old = Sample { vms: vec![squeezed("web1")], ..Sample::default() };
        let vms = vec![squeezed("web1"), vm("new")];
        let mut new = Sample { at: Duration::from_secs(2), vms, ..Sample::default() };
        new.vms[0].counters.insert("faults_minor".into(), 207);
        new.vms[0].counters.insert("pages_in".into(), 9 + 384);
        let text = render(&host(), &rows(Some(&old), &new));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "state high for 7 s  pool 48G  used 40G  free 8G  tax 75 %");
        assert_eq!(lines[1], "2 VMs  MEMSZ 8G  GRANT 2G  ACTV 2G  SHRD 256M  SAVED 128M  MCTLSZ 1G  SWCUR 3G  ZERO 3G");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(lines[2]),
            "NAME STATE MEMSZ GRANT TCHD ACTV TGT SHRD SAVED MCTLSZ MCTLTGT SWCUR SWR/s SWW/s ZERO FLT/s P50 P99"
        );
        assert_eq!(
            words(lines[3]),
            "web1 running,squeezed 4G 1G 2.5G 2G 1G 256M 128M 1G 2G 1.5G 0.8 0.0 1.5G 100 3.0 12.5"
        );
        assert_eq!(words(lines[4]), "new running 4G 1G 0 - - 0 0 - - 1.5G - - 1.5G - 3.0 12.5");
        assert_eq!(lines[5], "web1 FLT/s by cause: minor 100");
        new.vms[1].outbox = Some(crate::outboxes::tests::sample("new"));
        let text = render(&host(), &rows(Some(&old), &new));
        let lines: Vec<String> = text.lines().map(words).collect();
        assert!(lines[2].ends_with(" P99 OUTSZ OUTUSE TX/s BLOCK% SLO"), "{text}");
        assert!(lines[3].ends_with(" 12.5 - - - - -") && lines[4].ends_with(" 12.5 64M 48M - - -"), "{text}");
        let profile = pagoda_api::OutboxProfile {
            blocked_share: 0.125,
            verdict: Some("infeasible".into()),
            ..pagoda_api::OutboxProfile::default()
        };
        new.vms[1].outbox.as_mut().unwrap().profile = Some(Box::new(profile));
        let text = render(&host(), &rows(Some(&old), &new));
        assert!(text.lines().any(|line| words(line).ends_with(" 64M 48M - 12.5 infeasible")), "{text}");
    }

    #[test]
    fn a_narrow_terminal_keeps_what_matters() {
        let rows = rows(None, &Sample { vms: vec![squeezed("web1")], ..Sample::default() });
        let check = |width: usize, expected: &str| {
            let columns = columns_within(columns(&rows), width, &rows);
            let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
            assert_eq!(names.join(" "), expected, "{width}");
        };
        let all: Vec<&str> = columns(&rows).iter().map(|column| column.name).collect();
        check(200, &all.join(" "));
        check(80, "NAME STATE MEMSZ GRANT ACTV TGT SWCUR SWR/s SWW/s P99");
        check(40, "NAME MEMSZ GRANT SWCUR");
        check(20, "NAME GRANT");
        check(5, "NAME GRANT");
    }

    #[test]
    fn a_host_that_is_short_says_so() {
        let host = HostPolicy { pool_now_bytes: 40 << 30, stuck: Some("why".into()), ..host() };
        let line = host_line(&host);
        assert!(line.contains("pool 40G now of 48G") && line.ends_with("stuck: why"), "{line}");
    }
}
