//! The table of `top` as text, for `--batch` and for the live view.

use super::model::{Cause, Row};
use crate::output::{Side, Table};
use crate::units::format_size;

pub const COLUMNS: [(&str, Side); 13] = [
    ("NAME", Side::Left),
    ("STATE", Side::Left),
    ("MEMSZ", Side::Right),
    ("GRANT", Side::Right),
    ("SWCUR", Side::Right),
    ("ZERO", Side::Right),
    ("MCTLSZ", Side::Right),
    ("MCTLTGT", Side::Right),
    ("SWR/s", Side::Right),
    ("SWW/s", Side::Right),
    ("FLT/s", Side::Right),
    ("P50", Side::Right),
    ("P99", Side::Right),
];

pub const CAUSE_COLUMNS: [(&str, Side); 5] = [
    ("CAUSE", Side::Left),
    ("FLT/s", Side::Right),
    ("FAULTS", Side::Right),
    ("P50", Side::Right),
    ("P99", Side::Right),
];

pub fn cells(row: &Row) -> Vec<String> {
    vec![
        row.name.clone(),
        row.state.clone(),
        format_size(row.memory_bytes),
        format_size(row.resident_bytes),
        format_size(row.swapped_bytes),
        format_size(row.zero_bytes),
        size(row.ballooned_bytes),
        size(row.balloon_wanted_bytes),
        mib_per_s(row.swap_read_bytes_per_s),
        mib_per_s(row.swap_write_bytes_per_s),
        whole(row.faults_per_s),
        micros(row.p50_us),
        micros(row.p99_us),
    ]
}

pub fn cause_cells(cause: &Cause) -> Vec<String> {
    vec![
        cause.cause.clone(),
        whole(cause.faults_per_s),
        cause.faults.to_string(),
        micros(cause.latency.map(|latency| latency.p50_us)),
        micros(cause.latency.map(|latency| latency.p99_us)),
    ]
}

/// One sample; below each VM that has faults, their rates by cause.
pub fn render(rows: &[Row]) -> String {
    let mut table = Table::new(&COLUMNS);
    for row in rows {
        table.row(cells(row));
    }
    let mut text = table.render();
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

fn mib_per_s(bytes: Option<f64>) -> String {
    bytes.map_or("-".into(), |bytes| format!("{:.1}", bytes / f64::from(1 << 20)))
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or("-".into(), format_size)
}

fn whole(rate: Option<f64>) -> String {
    rate.map_or("-".into(), |rate| format!("{rate:.0}"))
}

fn micros(us: Option<f64>) -> String {
    us.map_or("-".into(), |us| if us < 99.95 { format!("{us:.1}") } else { format!("{us:.0}") })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::show::tests::{ballooned, sample as vm};
    use crate::top::model::{Sample, rows};

    #[test]
    fn a_sample_as_text() {
        let old = Sample { at: Duration::ZERO, vms: vec![ballooned("web1")] };
        let mut new = Sample { at: Duration::from_secs(2), vms: vec![ballooned("web1"), vm("new")] };
        new.vms[0].counters.insert("faults_minor".into(), 207);
        new.vms[0].counters.insert("pages_in".into(), 9 + 384);
        let expected = "\
NAME  STATE    MEMSZ  GRANT  SWCUR  ZERO  MCTLSZ  MCTLTGT  SWR/s  SWW/s  FLT/s  P50   P99
web1  running     4G     1G   1.5G  1.5G      1G       2G    0.8    0.0    100  3.0  12.5
new   running     4G     1G   1.5G  1.5G       -        -      -      -      -  3.0  12.5
web1 FLT/s by cause: minor 100
";
        assert_eq!(render(&rows(Some(&old), &new)), expected);
    }
}
