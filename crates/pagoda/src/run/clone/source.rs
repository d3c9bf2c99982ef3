//! What clones begin with: a snapshot, or a VM of which one is taken.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use pagoda_api::{Client, CreateSnapshot, SnapshotLaunch, SnapshotName, SnapshotStage, in_full, time};

use crate::cli::CloneSource;
use crate::exit::GivenUp;
use crate::run::on_crash::signals::Signals;

/// What the names of snapshots begin with that are taken for clones.
const PREFIX: &str = "clone-";
/// The pause between two looks how far a snapshot is.
const LOOK: Duration = Duration::from_millis(20);

/// What the clones begin with, and whether it was made for them.
#[derive(Debug)]
pub struct Source {
    of: CloneSource,
    launch: SnapshotLaunch,
    /// A snapshot that was taken for this.
    taken: Option<SnapshotName>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.of {
            CloneSource::Vm(name) => f.write_str(name),
            CloneSource::Snapshot(name) => name.fmt(f),
        }
    }
}

impl Source {
    /// # Errors
    /// There is none; it cannot be started again.
    pub fn find(client: &Client, of: &CloneSource) -> Result<Source> {
        let launch = match of {
            CloneSource::Vm(name) => client.vm_launch(name)?,
            CloneSource::Snapshot(name) => client.snapshot_launch(name)?,
        };
        Ok(Source { of: of.clone(), launch, taken: None })
    }

    /// What starts its QEMU again. The version of that is known of a snapshot.
    pub fn launch(&self) -> &SnapshotLaunch {
        &self.launch
    }

    /// Whether the snapshot has what is on disks. `wanted`: one that is taken is to have it.
    ///
    /// # Errors
    /// There is no such snapshot.
    pub fn has_disks(&self, client: &Client, wanted: bool) -> Result<bool> {
        match &self.of {
            CloneSource::Vm(_) => Ok(wanted),
            CloneSource::Snapshot(name) => Ok(client.snapshot(name)?.disks.iter().any(|disk| disk.layer.is_some())),
        }
    }

    /// The snapshot, which has all memory by now. Of a VM it is taken.
    ///
    /// # Errors
    /// The VM cannot have one; this process was asked to end. Nothing is left then.
    pub fn snapshot(&mut self, client: &Client, disks: bool, signals: &mut Signals) -> Result<SnapshotName> {
        let vm = match &self.of {
            CloneSource::Snapshot(name) => return Ok(name.clone()),
            CloneSource::Vm(name) => name,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).context("tell the time")?;
        let name = format!("{PREFIX}{}", time::compact(now.as_millis() as u64));
        let request = CreateSnapshot { name: Some(name), disks: disks.then_some(true), wait_durable: false };
        let name = client.take_snapshot(vm, &request)?.full_name();
        eprintln!("pagoda: the clones begin with the snapshot {name}, which stays");
        self.taken = Some(name.clone());
        let launch = wait_filled(client, &name, signals).and_then(|()| Ok(client.snapshot_launch(&name)?));
        self.launch = launch.inspect_err(|_| self.remove_taken(client))?;
        Ok(name)
    }

    /// Removes the snapshot that was taken for clones that are not there.
    pub fn remove_taken(&self, client: &Client) {
        if let Some(name) = &self.taken
            && let Err(error) = client.remove_snapshot(name)
        {
            eprintln!("pagoda: remove {name}: {}", in_full(&error));
        }
    }
}

fn wait_filled(client: &Client, name: &SnapshotName, signals: &mut Signals) -> Result<()> {
    loop {
        let snapshot = client.snapshot(name)?;
        match snapshot.stage {
            SnapshotStage::Filled | SnapshotStage::Durable => return Ok(()),
            SnapshotStage::Lost => {
                let why = snapshot.why.unwrap_or_default();
                return Err(GivenUp(format!("the snapshot {name} is lost: {why}")).into());
            }
            SnapshotStage::Begun | SnapshotStage::Unknown => {}
        }
        signals.look();
        if signals.was_asked() {
            return Err(GivenUp("interrupted; no clone was made".to_owned()).into());
        }
        std::thread::sleep(LOOK);
    }
}
