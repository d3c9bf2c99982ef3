//! Snapshots: what a VM's memory and devices held at one moment, and how a VM is started from it again.
//!
//! A snapshot is named by its VM and a name of its own. Its files have guest memory in them, so that all requests here are for
//! root and the daemon's own user alone. A VM's command line may hold secrets: only [`SnapshotLaunch`] has it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::launch::Launch;
use super::name::{check_name, check_vm_name};
use super::spec::VmSpec;
use super::transfer::SnapshotImport;

/// Longest silence of a verification that a client asks for, in seconds: the daemon gives one up that nobody asks for any more.
pub const VERIFY_SILENCE_S_MAX: u64 = 10;

/// Checks a snapshot's name, which has the form of a VM's.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_snapshot_name(name: &str) -> Result<(), String> {
    check_name("a snapshot", name)
}

/// Which snapshot: as text, `VM/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SnapshotName {
    pub vm: String,
    pub name: String,
}

impl SnapshotName {
    pub fn new(vm: impl Into<String>, name: impl Into<String>) -> SnapshotName {
        SnapshotName { vm: vm.into(), name: name.into() }
    }

    /// # Errors
    /// One of its names cannot be one.
    pub fn check(&self) -> Result<(), String> {
        check_vm_name(&self.vm)?;
        check_snapshot_name(&self.name)
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vm, self.name)
    }
}

impl FromStr for SnapshotName {
    type Err = String;

    fn from_str(text: &str) -> Result<SnapshotName, String> {
        let Some((vm, name)) = text.split_once('/') else {
            return Err(format!("{text:?} names no snapshot: write VM/NAME, as `pagoda snapshot ls` shows them"));
        };
        let name = SnapshotName::new(vm, name);
        name.check().map(|()| name)
    }
}

/// How far a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotStage {
    /// The VM still holds memory for it.
    Begun,
    /// It has all memory, and outlives the VM and the daemon.
    Filled,
    /// It outlives the host too.
    Durable,
    /// It lacks memory that nobody has any more.
    Lost,
    /// One of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl SnapshotStage {
    /// What it means for who relies on the snapshot.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Begun | Self::Filled => "volatile",
            Self::Durable => "durable",
            Self::Lost => "lost",
            Self::Unknown => "unknown",
        }
    }
}

/// What loads a snapshot again: this version of QEMU or a newer one, with this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotQemu {
    pub version: String,
    /// The machine type with its version, such as `pc-q35-10.0`.
    pub machine: String,
}

/// A writable disk of the VM as it was when the snapshot was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDisk {
    /// QEMU's name of the block node.
    pub node: String,
    pub file: String,
    /// Of the file, or of the layer if there is one.
    pub size_bytes: u64,
    /// The file beside it that has the disk's content of that moment. Nothing: the snapshot does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<String>,
    /// What that file takes on its disk. Absent if it is gone, is not known to be the one that it was, or its file system does not
    /// answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_bytes: Option<u64>,
}

/// The answer to `DELETE /v1/snapshots/VM/NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedSnapshot {
    /// What became of the layers of its disks.
    pub layers: Vec<RemovedLayer>,
}

/// A layer of a snapshot that was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedLayer {
    pub file: String,
    /// Why it is still there, and what its user can do.
    pub kept: String,
}

/// `GET /v1/snapshots/VM/NAME`, and one element of `GET /v1/snapshots`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The image: the name of its directory.
    pub id: String,
    pub vm: String,
    pub name: String,
    /// When the VM stood still, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    pub stage: SnapshotStage,
    /// The text says why the snapshot is lost, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What is wrong with its files, as far as that is seen without reading its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// Memory of the VM.
    pub memory_bytes: u64,
    /// Memory that the VM still holds for it, while that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_bytes: Option<u64>,
    /// What its files take on the disk.
    pub own_bytes: u64,
    /// Memory of which its parent, or that one's parent, has the content. Known once it is filled.
    #[serde(default)]
    pub shared_bytes: u64,
    /// The image that it refers to for this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Memory that a VM needed right after it was made of the snapshot: the next one gets it before it asks. Absent if that was
    /// not recorded. Only told of a single snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch_bytes: Option<u64>,
    /// DRAM that its template takes, which its clones read.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub template_bytes: u64,
    /// QEMU's state of the devices.
    pub state_bytes: u64,
    /// How long the VM stood still; not known before it ran again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// Whether the VM ran, and was not paused by its user.
    pub running: bool,
    pub qemu: SnapshotQemu,
    /// The user and group whose QEMU it was: they alone start it again.
    pub uid: u32,
    pub gid: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<SnapshotDisk>,
    /// The daemon took it by the VM's timetable, and removes it by that.
    #[serde(default)]
    pub automatic: bool,
    /// VMs that were made of it and read pages from its files, by name. It cannot be removed while there are any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<String>,
    /// It was made of a file, and whether it may be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<SnapshotImport>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl SnapshotQemu {
    /// That a QEMU of this version, as `10.0.2`, loads the state.
    ///
    /// # Errors
    /// It is older, or one of the versions cannot be read: in words for the user.
    pub fn check_loaded_by(&self, found: &str) -> Result<(), String> {
        let needed = &self.version;
        let unknown = |what: &str, version: &str| format!("the version of {what}, {version:?}, cannot be compared");
        let known = version_numbers(found).ok_or_else(|| unknown("this QEMU", found))?;
        if known < version_numbers(needed).ok_or_else(|| unknown("its QEMU", needed))? {
            return Err(format!("this QEMU is {found}, and its state needs {needed} or a newer one"));
        }
        Ok(())
    }
}

/// The three numbers of a version of QEMU.
fn version_numbers(version: &str) -> Option<[u32; 3]> {
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    let three = [numbers.next()??, numbers.next()??, numbers.next()??];
    numbers.next().is_none().then_some(three)
}

impl Snapshot {
    #[must_use]
    pub fn full_name(&self) -> SnapshotName {
        SnapshotName::new(&*self.vm, &*self.name)
    }

    /// How much of the VM's memory it has, in percent, while it is being filled.
    #[must_use]
    pub fn filled_percent(&self) -> Option<u64> {
        let missing = self.missing_bytes.filter(|_| self.stage == SnapshotStage::Begun)?;
        let filled = u128::from(self.memory_bytes.saturating_sub(missing));
        let percent = filled * 100 / u128::from(self.memory_bytes.max(1));
        // It is not full before that is said.
        Some(percent.min(99) as u64)
    }
}

/// An image of which nobody can say whose it is. It takes room until it is removed by its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableImage {
    pub id: String,
    pub own_bytes: u64,
    /// The text says why it cannot be read, and where the damage is.
    pub damage: String,
}

/// `GET /v1/snapshots` lists all images of this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotList {
    /// By VM, the oldest first.
    pub snapshots: Vec<Snapshot>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableImage>,
}

/// `POST /v1/vms/NAME/snapshots`; the reply is a [`Snapshot`] that exists.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateSnapshot {
    /// Without one it is named by its time ([`crate::time::compact`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// With what is on the VM's disks at that moment, or without. If it is not said, a VM with writable disks is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<bool>,
    /// Somebody waits until it is durable, so that this goes first. The reply does not wait for it.
    #[serde(default)]
    pub wait_durable: bool,
}

impl CreateSnapshot {
    /// # Errors
    /// The name cannot be one.
    pub fn check(&self) -> Result<(), String> {
        self.name.as_deref().map_or(Ok(()), check_snapshot_name)
    }
}

/// `GET /v1/snapshots/VM/NAME/launch`: what starts its QEMU again. Its words may hold secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotLaunch {
    pub launch: Launch,
    /// Bytes of each region in order.
    pub memory: Vec<u64>,
    /// What the VM's user had set.
    pub spec: VmSpec,
    pub qemu: SnapshotQemu,
    /// The shim that a VM made of it gets, as in `CreatedVm`. A daemon from before it was told here leaves it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shim: Option<PathBuf>,
    /// The version of its program as it is now, if the daemon knows it without asking.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_version: Option<String>,
}

/// `POST /v1/restores`: makes a VM that begins with what a snapshot has; the reply is a `CreatedVm`. Its QEMU is started by
/// who asked, with the snapshot's own words, `-S` and `-incoming defer`; the daemon loads the state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreRequest {
    pub from: SnapshotName,
    /// Name of the new VM; without one, that of the snapshot's VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_name: Option<String>,
    /// The most DRAM it may have; without one, what the snapshot's VM might.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram: Option<u64>,
    /// Also if its disks have changed since.
    #[serde(default)]
    pub force: bool,
    /// A VM that has the name is ended first: a rollback.
    #[serde(default)]
    pub replace: bool,
}

impl RestoreRequest {
    /// Name of the new VM.
    #[must_use]
    pub fn vm_name(&self) -> &str {
        self.as_name.as_deref().unwrap_or(&self.from.vm)
    }

    /// # Errors
    /// A name cannot be one.
    pub fn check(&self) -> Result<(), String> {
        self.from.check()?;
        check_vm_name(self.vm_name())
    }
}

/// A place in a snapshot's files that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDamage {
    /// `manifest`, `state`, `map` or `pages`.
    pub file: String,
    /// The page of the VM that nobody can read because of it, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    pub offset_bytes: u64,
    pub what: String,
}

/// `POST /v1/snapshots/VM/NAME/verify`: begins a verification, or asks how far it is. Whoever wants its end repeats the request
/// until `is_done`, at least every [`VERIFY_SILENCE_S_MAX`] seconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyReport {
    pub is_done: bool,
    /// Memory of the VM that was looked at so far, of `memory_bytes`.
    pub checked_bytes: u64,
    pub memory_bytes: u64,
    /// Pages that are as they were written.
    pub good_pages: u64,
    /// Pages that are all zero.
    pub zero_pages: u64,
    /// So many places are damaged in all.
    pub damaged: u64,
    /// These are the first damaged places.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damages: Vec<SnapshotDamage>,
}

/// `GET /v1/snapshots/VM/NAME/diff/OTHER`: how much of the memory differs between two snapshots of a VM. Equal checksums are taken
/// for equal content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDiff {
    pub memory_bytes: u64,
    /// Pages that differ: the sum of those below.
    pub pages: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// Pages with other content than before, zero in neither.
    pub changed_pages: u64,
    /// Zero in the first alone.
    pub filled_pages: u64,
    /// Zero in the second alone.
    pub cleared_pages: u64,
}

/// All snapshots of a host together. Each image is counted once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSnapshots {
    pub dir: std::path::PathBuf,
    pub begun: u32,
    pub filled: u32,
    pub durable: u32,
    pub lost: u32,
    /// So many are damaged, whatever their stage was.
    pub damaged: u32,
    /// What they take on the disk.
    pub own_bytes: u64,
}

#[cfg(test)]
mod tests;
