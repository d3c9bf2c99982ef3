//! The commands about snapshots: `pagoda snapshot`, and those of `pagoda vm` that take one and start from one.

mod accept;
mod diff;
mod export;
mod file;
mod import;
mod show;
mod take;
mod timetable;
mod verify;

use anyhow::Result;
use pagoda_api::{Client, RestoreRequest, SnapshotName, time};

pub use self::show::host_words;
pub use self::take::take;
pub use self::timetable::timetable_lines;
use crate::cli::{Removed, Restore, Rollback, Snapshots};
use crate::exit::{Refused, UsageError};
use crate::output::Format;
use crate::run;
use crate::run::on_crash::{self, First, Origin};

pub fn run(client: &Client, command: &Snapshots, format: Format) -> Result<()> {
    match command {
        Snapshots::Ls => show::list(&client.snapshots()?, format),
        Snapshots::Tree => show::tree(&client.snapshots()?, format),
        Snapshots::Show { name } => accept::show(client, name, format),
        Snapshots::Export(options) => export::run(client, options, format),
        Snapshots::Import(options) => import::run(client, options, format),
        Snapshots::Accept { name } => accept::run(client, name, format),
        Snapshots::Verify { name } => verify::run(client, name, format),
        Snapshots::Diff { first, second } => {
            let second = second.of(&first.vm);
            if second.vm != first.vm {
                return Err(UsageError(format!("{first} and {second} are not of one VM")).into());
            }
            diff::print(&client.snapshot_diff(first, &second.name)?, format)
        }
        Snapshots::Rm { name: Removed::Named(name) } => show::removed(&client.remove_snapshot(name)?),
        Snapshots::Rm { name: Removed::Image(id) } => show::removed(&client.remove_image(id)?),
    }
}

/// Never returns when all goes well.
pub fn restore(client: &Client, options: &Restore) -> Result<()> {
    let from = match &options.from {
        Some(from) => from.of(&options.name),
        None => newest(client, &options.name, options.force)?,
    };
    if let Some(on_crash) = on_crash::duty(options.crash.on_crash)? {
        let dram = options.dram.map(|dram| dram.word());
        let origin = Origin { snapshot: from.clone(), force: options.force, dram };
        return on_crash::watch(client, on_crash, &options.name, Some(origin), First::Restore);
    }
    let snapshot = client.snapshot_launch(&from)?;
    let memory: u64 = snapshot.memory.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes));
    let request = RestoreRequest {
        dram: options.dram.map(|dram| dram.of(memory)),
        force: options.force,
        ..request(&options.name, from)
    };
    run::restore(client, &request, &snapshot)
}

/// Never returns when all goes well.
pub fn roll_back(client: &Client, options: &Rollback) -> Result<()> {
    let to = options.to.of(&options.name);
    if let Some(on_crash) = on_crash::duty(options.crash.on_crash)? {
        let origin = Origin { snapshot: to, force: options.force, dram: None };
        return on_crash::watch(client, on_crash, &options.name, Some(origin), First::Own);
    }
    let snapshot = client.snapshot_launch(&to)?;
    let request = RestoreRequest { force: options.force, replace: true, ..request(&options.name, to) };
    run::restore(client, &request, &snapshot)
}

/// The newest snapshot of a VM that can be restored; it is said which.
fn newest(client: &Client, vm: &str, force: bool) -> Result<SnapshotName> {
    let restorable = client.restorable(vm)?;
    let (newest, passed_over) = restorable.newest(force);
    passed_over.iter().for_each(|(_, why)| eprintln!("pagoda: passed over: {why}"));
    let newest =
        newest.ok_or_else(|| Refused(format!("no snapshot of {vm} can be restored: see `pagoda snapshot ls`")))?;
    let name = SnapshotName::new(vm, &*newest.name);
    eprintln!("pagoda: {vm} is restored from {name}, taken {}", time::rfc3339(newest.taken_unix_ms));
    Ok(name)
}

fn request(vm: &str, from: SnapshotName) -> RestoreRequest {
    RestoreRequest { from, as_name: Some(vm.to_owned()), dram: None, force: false, replace: false }
}
