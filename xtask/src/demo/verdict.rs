//! Whether the demo showed what it promises.

use pagoda_api::counter;

use super::model::{Model, Plan};
use super::view::{Row, Style, mib, pages_mib};

const MIB: u64 = 1 << 20;
/// By which the kernel's own account may exceed the cap: what page-ins and page-outs under way hold for a moment.
const KERNEL_SLACK_BYTES: u64 = 8 * MIB;

/// One thing that must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    pub holds: bool,
    pub text: String,
}

/// Everything that must hold.
pub fn checks(model: &Model) -> Vec<Check> {
    let Plan { dram_mib, work_mib, .. } = model.plan;
    let cap_bytes = dram_mib * MIB;
    let (pages_in, pages_out) = model.pages_in_out();
    // What does not fit into DRAM must have left it, and the sweeps must have brought it back.
    let moved_min_pages = (work_mib - dram_mib) * MIB / counter::PAGE_BYTES;
    let guest = match (model.verdict.as_deref(), &model.guest_error) {
        (Some("ok"), _) => format!("the guest says: result ok, {work_mib} MiB verified, {} pages wrong", model.bad),
        (Some(verdict), None) => format!("the guest says: result {verdict}"),
        (Some(verdict), Some(error)) => format!("the guest says: result {verdict}: {error}"),
        (None, _) => "the guest gave no verdict".to_owned(),
    };
    vec![
        Check { holds: model.verdict.as_deref() == Some("ok") && model.bad == 0, text: guest },
        Check {
            holds: (1..=cap_bytes).contains(&model.resident_bytes_max),
            text: format!("resident at most {} MiB, with a cap of {dram_mib} MiB", mib(model.resident_bytes_max)),
        },
        Check {
            holds: (1..=cap_bytes + KERNEL_SLACK_BYTES).contains(&model.ram_bytes_max),
            text: format!(
                "its RAM file at most {} MiB by the kernel's account (+ {} for I/O)",
                mib(model.ram_bytes_max),
                KERNEL_SLACK_BYTES / MIB
            ),
        },
        Check {
            holds: pages_out >= moved_min_pages && pages_in >= moved_min_pages,
            text: format!(
                "{} MiB swapped out, {} MiB in, at least {} each way",
                pages_mib(pages_out),
                pages_mib(pages_in),
                work_mib - dram_mib
            ),
        },
    ]
}

/// The checks as text, and the last word.
pub fn rows(model: &Model, checks: &[Check], accelerator: &str) -> Vec<Row> {
    let mut rows = vec![Row::default()];
    rows.extend(checks.iter().map(|check| {
        let (style, mark) = if check.holds { (Style::Good, " ok    ") } else { (Style::Bad, " FAILS ") };
        Row::of(style, mark).with(Style::Plain, check.text.clone())
    }));
    rows.push(Row::default());
    let Plan { memory_mib, dram_mib, .. } = model.plan;
    // What ran the guest is part of every result.
    rows.push(if checks.iter().all(|check| check.holds) {
        let text = format!("a VM of {memory_mib} MiB ran in {dram_mib} MiB of DRAM, every page right ({accelerator})");
        Row::of(Style::Good, " PASSED ").with(Style::Plain, text)
    } else {
        Row::of(Style::Bad, " FAILED ")
    });
    rows
}
