//! The record of a VM: one small file in the state directory, by which a restarted daemon knows a VM again.
//!
//! Format 2 is a [checked text](pagoda_image::checked_text): the line `pagoda-vm 2`, the [`Record`] as JSON, and a checksum. A
//! setting that a user can give is a field of [`VmSpec`] and needs nothing here. Records of format 1
//! ([`format_1`]) are read, and written anew as format 2 when something changes.
//!
//! What is not whole, not known to this version or contradicts itself is refused: [`store`] leaves such a file alone. A
//! record has the VM's secret, the key of its pages in remote memory and the words that its user gave QEMU: no error and no
//! `Debug` shows them.

mod file_id;
mod format_1;
mod moved_disk;
mod operation;
mod read;
pub mod store;

use pagoda_abi::{REGION_ALIGN, REGIONS_MAX, Token};
use pagoda_api::types::{LAUNCH_BYTES_MAX, Launch, REMOTE_COPIES_MAX, RemoteRequest, VmKind, VmSpec, check_vm_name};
use pagoda_image::ImageId;
use pagoda_image::checked_text::{find_lost, seal};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compressed::Compressed;

pub use file_id::{FileId, Noted, Same};
pub use moved_disk::{Below, MovedDisk, TopFile};
pub use operation::{Operation, OperationKind};

/// Longest record that is written or read, in bytes. One of format 1 (4096 bytes) always fits: JSON has at most six bytes for
/// one of a text, and the names of fields are below 1 KiB. So do a launch specification and moved disks beside it.
pub const RECORD_MAX: usize = (32 << 10) + LAUNCH_BYTES_MAX + moved_disk::MOVED_BYTES_MAX;
const FIRST_LINE: &str = "pagoda-vm 2";
/// Bytes of the key of a VM's pages in remote memory.
pub const REMOTE_KEY_SIZE: usize = 32;
/// Longest name of a pool in etcd.
const CLUSTER_MAX: usize = 64;

/// A VM as the daemon remembers it: what its user set, and what the daemon knows of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Unique among the daemon's VMs.
    pub name: String,
    /// The VM's secret, which its VMM knows and shows when it attaches.
    #[serde(with = "token")]
    pub token: Token,
    pub kind: VmKind,
    /// Bytes of each region, multiples of [`REGION_ALIGN`].
    pub regions: Vec<u64>,
    /// What its user has set.
    pub spec: VmSpec,
    /// Process id and its start time (proc(5) stat, field 22); zeros before it attached.
    pub pid: (u32, u64),
    /// The driver of its balloon does not answer, and it is paged out to the balloon target instead.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paged_out: bool,
    /// The memory policy has stopped it, and has to let it run again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub blocked: bool,
    /// What starts its program again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<Launch>,
    /// What its VMM keeps for sharing. Without it shared pages would be taken for zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<SharingFiles>,
    /// Where its pages in remote memory are.
    #[serde(default, rename = "far", skip_serializing_if = "Option::is_none")]
    pub remote: Option<Remote>,
    /// Its compressed tier. Without it, pages that are there would be taken for zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed: Option<Compressed>,
    /// What is being done to it as a whole. A daemon of before refuses a record that has one, and leaves the VM alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<Operation>,
    /// Its image that is not filled: the VM holds pages for it. A daemon of before refuses the record, for it would not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// The image that it was made of: pages of the VM may be there and nowhere else. Without it they would be taken for zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<ImageId>,
    /// Its VMM may map a template of that image in the place of RAM, and have pages of its own there. A daemon of before refuses the
    /// record, for it would drop them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub borrows: bool,
    /// It has run here before all of its memory had come from another host: the files of its source tier have what only they have.
    #[serde(default, skip_serializing_if = "is_false")]
    pub has_source_tier: bool,
    /// Its disks whose newest content does not have their names. A daemon of before refuses the record, for their users would go on
    /// with what is old.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<MovedDisk>,
    /// It may lend its memory to another process, which has pages mapped then. A daemon of before refuses the record, for it would not
    /// unmap them there.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lends: bool,
    /// Its program has ended, which was noted, and all of it is gone but these disks.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ended: bool,
}

/// The files that hold a VM's shared pages, each by device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingFiles {
    /// The VM's table of shared pages.
    pub table: (u64, u64),
    /// The frames of its share group.
    pub pool: (u64, u64),
}

/// A space of a pool of servers that lend memory.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    /// The number of the space in the pool.
    #[serde(with = "space")]
    pub space: u64,
    /// Servers that have each page, as the user asked.
    pub copies: u8,
    /// What its pages are sealed with: no server has it.
    #[serde(with = "key")]
    pub key: [u8; REMOTE_KEY_SIZE],
    /// The pool in etcd that keeps where its pages are; nothing: this machine's registry file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
}

impl std::fmt::Debug for Remote {
    /// The key is a secret: it stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({:016x}, {} copies, {:?})", self.space, self.copies, self.cluster)
    }
}

/// Why a record was not accepted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("VM record is not usable: {0}")]
pub struct BadRecord(String);

fn bad(what: impl Into<String>) -> BadRecord {
    BadRecord(what.into())
}

impl Record {
    /// The record of a VM that no program is attached to.
    pub fn new(name: &str, token: Token, kind: VmKind, regions: &[u64], spec: VmSpec) -> Record {
        Record {
            name: name.to_owned(),
            token,
            kind,
            regions: regions.to_vec(),
            spec,
            pid: (0, 0),
            paged_out: false,
            blocked: false,
            launch: None,
            sharing: None,
            remote: None,
            compressed: None,
            operation: None,
            image: None,
            reads: None,
            borrows: false,
            has_source_tier: false,
            lends: false,
            disks: Vec::new(),
            ended: false,
        }
    }

    /// Bytes of all regions.
    pub fn memory(&self) -> u64 {
        self.regions.iter().fold(0, |sum, len| sum.saturating_add(*len))
    }

    /// Its user's cap on DRAM, bytes.
    pub fn dram(&self) -> u64 {
        self.spec.dram_of(self.memory())
    }

    /// What stands in for its balloon: bytes that it is paged out to.
    pub fn paged_out_to(&self) -> Option<u64> {
        self.spec.balloon_target.filter(|_| self.paged_out)
    }

    /// The content of the record's file, in the newest format.
    pub fn to_text(&self) -> String {
        // It has no map with keys of another type than text, which is all that JSON cannot have.
        let json = serde_json::to_string_pretty(self).unwrap_or_default();
        seal(FIRST_LINE, &json)
    }

    fn from_json(json: &str) -> Result<Record, BadRecord> {
        // Not in serde's words: they quote the value, which may be a secret.
        let located = |error: serde_json::Error| bad(format!("JSON, line {}, column {}", error.line(), error.column()));
        let record: Record = serde_json::from_str(json).map_err(located)?;
        let said: Value = serde_json::from_str(json).map_err(located)?;
        let understood = serde_json::to_value(&record).map_err(located)?;
        match find_lost(&said, &understood) {
            None => Ok(record),
            Some(field) => Err(bad(format!("it has {field}, which this version does not know"))),
        }
    }

    fn check(&self) -> Result<(), BadRecord> {
        check_vm_name(&self.name).map_err(bad)?;
        let is_region = |len: &u64| *len != 0 && len.is_multiple_of(REGION_ALIGN);
        if !(1..=REGIONS_MAX).contains(&self.regions.len()) || !self.regions.iter().all(is_region) {
            return Err(bad("regions"));
        }
        if self.paged_out && self.spec.balloon_target.is_none() {
            return Err(bad("paged out to no balloon target"));
        }
        if self.spec.remote != self.remote.as_ref().map(|remote| RemoteRequest { copies: remote.copies }) {
            return Err(bad("remote memory was asked for otherwise than it is there"));
        }
        if self.launch.as_ref().is_some_and(|launch| !launch.fits()) {
            return Err(bad("launch"));
        }
        if self.kind == VmKind::Plain && (self.operation.is_some() || self.image.is_some() || self.reads.is_some()) {
            return Err(bad("an image of a program that is no QEMU"));
        }
        if !moved_disk::are_right(&self.disks) || !self.disks.is_empty() && self.launch.is_none() {
            return Err(bad("disks"));
        }
        if let Some(remote) = &self.remote {
            remote.is_right().then_some(()).ok_or_else(|| bad("far"))?;
        }
        Ok(())
    }
}

impl Remote {
    /// Whether a tier can be so.
    pub fn is_right(&self) -> bool {
        (1..=REMOTE_COPIES_MAX).contains(&self.copies) && self.cluster.as_deref().is_none_or(is_pool)
    }
}

/// Whether a pool in etcd can have this name.
fn is_pool(name: &str) -> bool {
    let allowed = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    (1..=CLUSTER_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

fn is_false(value: &bool) -> bool {
    !value
}

/// So many lower-case hexadecimal digits, as bytes.
fn from_hex<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let is_hex = text.len() == 2 * BYTES && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let mut bytes = [0; BYTES];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(is_hex.then(|| text.get(at..at + 2))??, 16).ok()?;
    }
    Some(bytes)
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Secrets and numbers of spaces as hexadecimal text.
macro_rules! as_hex {
    ($module:ident, $type:ty, $what:literal, $to:expr, $from:expr) => {
        mod $module {
            use super::*;
            use serde::{Deserializer, Serializer, de::Error};

            pub fn serialize<S: Serializer>(value: &$type, serializer: S) -> Result<S::Ok, S::Error> {
                let to: fn(&$type) -> String = $to;
                serializer.serialize_str(&to(value))
            }

            pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                let from: fn(&str) -> Option<$type> = $from;
                from(&String::deserialize(deserializer)?).ok_or_else(|| D::Error::custom($what))
            }
        }
    };
}
as_hex!(token, Token, "no token", |token| to_hex(&token.0), |text| from_hex(text).map(Token));
as_hex!(key, [u8; REMOTE_KEY_SIZE], "no key", |key| to_hex(key), from_hex);
as_hex!(space, u64, "no number of a space", |space| format!("{space:016x}"), |text| from_hex(text)
    .map(u64::from_be_bytes));

#[cfg(test)]
mod tests;
