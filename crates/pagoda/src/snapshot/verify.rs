//! `pagoda snapshot verify`: has the daemon compare all pages with their checksums.

use std::fmt::Write;

use anyhow::{Result, ensure};
use pagoda_api::{Client, SnapshotName, VerifyReport};

use crate::output::{Format, Progress, print_json, print_text};
use crate::units::format_size;

/// Succeeds if all of it is as it was written. The daemon answers once a second how far it is, and stops by itself when nobody
/// asks any more.
pub fn run(client: &Client, name: &SnapshotName, format: Format) -> Result<()> {
    let mut progress = Progress::default();
    let report = loop {
        let report = client.verify_snapshot(name)?;
        if report.is_done {
            break report;
        }
        let (checked, memory) = (format_size(report.checked_bytes), format_size(report.memory_bytes));
        progress.say(&format!("{name}: {checked} of {memory} verified"));
    };
    drop(progress);
    match format {
        Format::Json => print_json(&report)?,
        Format::Text => print_text(&report_text(name, &report))?,
    }
    ensure!(report.damaged == 0, "{name} is damaged in {} places", report.damaged);
    Ok(())
}

fn report_text(name: &SnapshotName, report: &VerifyReport) -> String {
    let VerifyReport { good_pages, zero_pages, damaged, .. } = report;
    let memory = format_size(report.memory_bytes);
    let mut text =
        format!("{name}: {memory} verified, {good_pages} pages and {zero_pages} zero pages are as they were written\n");
    for damage in &report.damages {
        let page = damage.page.map_or(String::new(), |page| format!(", page {page}"));
        // Writing into a String cannot fail.
        let _ = writeln!(text, "damaged: {}{page}, offset {}: {}", damage.file, damage.offset_bytes, damage.what);
    }
    let more = damaged.saturating_sub(report.damages.len() as u64);
    if more > 0 {
        let _ = writeln!(text, "damaged: {more} places more");
    }
    text
}

#[cfg(test)]
mod tests {
    use pagoda_api::SnapshotDamage;

    use super::*;

    #[test]
    fn what_is_damaged_is_named() {
        let name = SnapshotName::new("web1", "one");
        let clean = VerifyReport {
            is_done: true,
            checked_bytes: 4 << 30,
            memory_bytes: 4 << 30,
            good_pages: 7,
            zero_pages: 9,
            ..VerifyReport::default()
        };
        let expected = "web1/one: 4G verified, 7 pages and 9 zero pages are as they were written\n";
        assert_eq!(report_text(&name, &clean), expected);
        let damage = |page| SnapshotDamage { file: "pages".into(), page, offset_bytes: 8192, what: "x".into() };
        let damaged = VerifyReport { damaged: 5, damages: vec![damage(Some(3)), damage(None)], ..clean };
        let expected = format!(
            "{expected}damaged: pages, page 3, offset 8192: x\ndamaged: pages, offset 8192: x\ndamaged: 3 places more\n"
        );
        assert_eq!(report_text(&name, &damaged), expected);
    }
}
