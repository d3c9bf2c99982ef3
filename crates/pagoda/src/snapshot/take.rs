//! `pagoda vm snapshot`: takes a snapshot, and waits until it is durable if that is wanted.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use pagoda_api::{Client, CreateSnapshot, Snapshot, SnapshotStage};

use super::show;
use crate::cli::TakeSnapshot;
use crate::output::{Format, Progress};

/// How often it is looked how far a snapshot is.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub fn take(client: &Client, options: &TakeSnapshot, format: Format) -> Result<()> {
    let request =
        CreateSnapshot { name: options.name.clone(), disks: options.wants_disks(), wait_durable: options.wait_durable };
    let mut snapshot = client.take_snapshot(&options.vm, &request)?;
    if options.wait_durable {
        snapshot = wait_durable(client, snapshot)?;
    }
    show::one(&snapshot, format)
}

/// Until it outlives the host. The daemon does that by itself; here it is only waited for.
fn wait_durable(client: &Client, begun: Snapshot) -> Result<Snapshot> {
    let name = begun.full_name();
    let mut progress = Progress::default();
    let mut now = begun.clone();
    loop {
        ensure!(now.id == begun.id, "{name} was removed meanwhile, and another one has its name");
        match now.stage {
            SnapshotStage::Durable => return Ok(now),
            SnapshotStage::Lost => bail!("{name} is lost: {}", now.why.as_deref().unwrap_or("nobody knows why")),
            SnapshotStage::Begun => match now.filled_percent() {
                Some(percent) => progress.say(&format!("{name} is filled: {percent} %")),
                None => progress.say(&format!("{name} is being filled")),
            },
            SnapshotStage::Filled | SnapshotStage::Unknown => {
                progress.say(&format!("{name} is being written to the disk"))
            }
        }
        std::thread::sleep(LOOK_EVERY);
        now = client.snapshot(&name)?;
    }
}
