//! The commands about snapshots: `pagoda snapshot`, and those of `pagoda vm` that take one and start from one.

mod accept;
mod export;
mod file;
mod import;
mod show;
mod take;
mod verify;

use anyhow::Result;
use pagoda_api::{Client, RestoreRequest, SnapshotName};

pub use self::show::host_words;
pub use self::take::take;
use crate::cli::{Removed, Restore, Rollback, Snapshots};
use crate::output::Format;
use crate::run;

pub fn run(client: &Client, command: &Snapshots, format: Format) -> Result<()> {
    match command {
        Snapshots::Ls => show::list(&client.snapshots()?, format),
        Snapshots::Tree => show::tree(&client.snapshots()?, format),
        Snapshots::Show { name } => accept::show(client, name, format),
        Snapshots::Export(options) => export::run(client, options, format),
        Snapshots::Import(options) => import::run(client, options, format),
        Snapshots::Accept { name } => accept::run(client, name, format),
        Snapshots::Verify { name } => verify::run(client, name, format),
        Snapshots::Rm { name: Removed::Named(name) } => Ok(client.remove_snapshot(name)?),
        Snapshots::Rm { name: Removed::Image(id) } => Ok(client.remove_image(id)?),
    }
}

/// Never returns when all goes well.
pub fn restore(client: &Client, options: &Restore) -> Result<()> {
    let from = options.from.of(&options.name);
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
    let snapshot = client.snapshot_launch(&to)?;
    let request = RestoreRequest { force: options.force, replace: true, ..request(&options.name, to) };
    run::restore(client, &request, &snapshot)
}

fn request(vm: &str, from: SnapshotName) -> RestoreRequest {
    RestoreRequest { from, as_name: Some(vm.to_owned()), dram: None, force: false, replace: false }
}
