//! What is said of clones.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use pagoda_api::{AdmitReply, SnapshotLaunch, SnapshotName};
use pagoda_cli::output::Format;
use serde::Serialize;

use super::fleet::{Member, Ran};
use crate::exit::NotAdmitted;
use crate::output::{Side, Table, lines_text, print_json, print_text};
use crate::units::format_size;

#[derive(Debug, Serialize)]
struct Clones {
    from: String,
    clones: Vec<Started>,
}

#[derive(Debug, Serialize)]
struct Started {
    name: String,
    pid: u32,
    /// From the command to the guest's first instruction, in milliseconds; absent of one that is paused.
    started_ms: Option<u64>,
    log: String,
}

/// The clones that run.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(from: &SnapshotName, members: &[Member], ran: &[Ran], began: SystemTime, format: Format) -> Result<()> {
    let began = began.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_micros();
    let started = |(member, ran): (&Member, &Ran)| Started {
        name: member.name().to_owned(),
        pid: ran.pid,
        started_ms: ran.resumed_unix_us.map(|at| (u128::from(at).saturating_sub(began) / 1000) as u64),
        log: member.log().path().display().to_string(),
    };
    let clones: Vec<Started> = members.iter().zip(ran).map(started).collect();
    if format == Format::Json {
        return Ok(print_json(&Clones { from: from.to_string(), clones })?);
    }
    let mut table = Table::new(&[("NAME", Side::Left), ("PID", Side::Right), ("RUNS AFTER", Side::Right)]);
    for clone in clones {
        let after = clone.started_ms.map_or("paused".to_owned(), |ms| format!("{ms} ms"));
        table.row(vec![clone.name, clone.pid.to_string(), after]);
    }
    Ok(table.print()?)
}

/// What would be made.
#[derive(Debug, Serialize)]
pub struct DryRun {
    from: String,
    names: Vec<String>,
    /// The memory of each clone in bytes, and how much of it may be in DRAM.
    memory_bytes: u64,
    dram_bytes: u64,
    /// What all clones need together, in bytes, and what is free: this is made sure of.
    memory_needed_bytes: u64,
    memory_free_bytes: u64,
    swap_needed_bytes: u64,
    swap_free_bytes: u64,
    fits: bool,
    warnings: Vec<String>,
}

impl DryRun {
    pub fn new(
        from: String,
        names: &[String],
        of: &SnapshotLaunch,
        dram: Option<u64>,
        one: &AdmitReply,
        warnings: &[String],
    ) -> DryRun {
        let memory_bytes = of.memory.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let of_all = |bytes: u64| bytes.saturating_mul(names.len() as u64);
        let (memory, swap) = (of_all(one.memory_needed_bytes), of_all(one.swap_needed_bytes));
        DryRun {
            from,
            names: names.to_vec(),
            memory_bytes,
            dram_bytes: dram.or(of.spec.dram).unwrap_or(memory_bytes),
            memory_needed_bytes: memory,
            memory_free_bytes: one.memory_free_bytes,
            swap_needed_bytes: swap,
            swap_free_bytes: one.swap_free_bytes,
            fits: memory <= one.memory_free_bytes && swap <= one.swap_free_bytes,
            warnings: warnings.to_vec(),
        }
    }

    /// # Errors
    /// They do not fit; standard output cannot be written.
    pub fn print(&self, format: Format) -> Result<()> {
        match format {
            Format::Json => print_json(self)?,
            Format::Text => print_text(&self.text())?,
        }
        if self.fits {
            return Ok(());
        }
        Err(NotAdmitted(format!("there is no room for {} clones", self.names.len())).into())
    }

    fn text(&self) -> String {
        let of = |needed, free| format!("{} needed, {} free", format_size(needed), format_size(free));
        let mut lines = vec![
            ("from", self.from.clone()),
            ("clones", format!("{}: {}", self.names.len(), self.names.join(" "))),
            ("memory of each", format_size(self.memory_bytes)),
            ("dram of each", format!("at most {}", format_size(self.dram_bytes))),
            ("guaranteed", of(self.memory_needed_bytes, self.memory_free_bytes)),
            ("swap", of(self.swap_needed_bytes, self.swap_free_bytes)),
            ("fits", if self.fits { "yes" } else { "no" }.to_owned()),
        ];
        lines.extend(self.warnings.iter().map(|warning| ("warning", warning.clone())));
        lines_text(&lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_have_to_fit_together() {
        let of: SnapshotLaunch = serde_json::from_str(
            r#"{"launch":{"program":"q","words":[],"cwd":"/","uid":0,"gid":0},"memory":[1073741824],
                "spec":{"dram":536870912},"qemu":{"version":"","machine":""}}"#,
        )
        .unwrap();
        let one = AdmitReply {
            admitted: true,
            memory_needed_bytes: 100 << 20,
            memory_free_bytes: 1 << 30,
            swap_needed_bytes: 1 << 30,
            swap_free_bytes: 3 << 30,
            missing: String::new(),
        };
        let names = |count: usize| (1..=count).map(|number| format!("job-{number}")).collect::<Vec<_>>();
        let three = DryRun::new("web1/one".into(), &names(3), &of, None, &one, &["no id".into()]);
        assert!(three.fits);
        let expected = "\
from           web1/one
clones         3: job-1 job-2 job-3
memory of each 1G
dram of each   at most 512M
guaranteed     300M needed, 1G free
swap           3G needed, 3G free
fits           yes
warning        no id
";
        assert_eq!(three.text(), expected);
        let four = DryRun::new("web1/one".into(), &names(4), &of, Some(1 << 28), &one, &[]);
        assert!(!four.fits && four.dram_bytes == 1 << 28);
    }
}
