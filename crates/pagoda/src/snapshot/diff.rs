//! `pagoda snapshot diff`: prints how many pages of two snapshots differ.

use anyhow::Result;
use pagoda_api::SnapshotDiff;

use crate::output::{Format, lines_text, print_json, print_text};
use crate::units::format_size;

const PAGE_BYTES: u64 = pagoda_api::counter::PAGE_BYTES;

pub fn print(diff: &SnapshotDiff, format: Format) -> Result<()> {
    match format {
        Format::Json => print_json(diff)?,
        Format::Text => print_text(&text(diff))?,
    }
    Ok(())
}

fn text(diff: &SnapshotDiff) -> String {
    let row = |pages: u64| format!("{pages} pages, {}", format_size(pages * PAGE_BYTES));
    lines_text(&[
        ("differ", format!("{} of {}", row(diff.pages), format_size(diff.memory_bytes))),
        ("changed", row(diff.changed_pages)),
        ("filled", format!("{}: zero in the first alone", row(diff.filled_pages))),
        ("cleared", format!("{}: zero in the second alone", row(diff.cleared_pages))),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs() {
        let diff = SnapshotDiff {
            memory_bytes: 1 << 30,
            pages: 259,
            bytes: 259 << 12,
            changed_pages: 256,
            filled_pages: 2,
            cleared_pages: 1,
        };
        let expected = "\
differ         259 pages, 1M of 1G
changed        256 pages, 1M
filled         2 pages, 8K: zero in the first alone
cleared        1 pages, 4K: zero in the second alone
";
        assert_eq!(text(&diff), expected);
    }
}
