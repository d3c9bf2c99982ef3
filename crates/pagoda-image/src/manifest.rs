//! The manifest of an image: what it is of, what starts the VM again, and how far the image is.
//!
//! A [checked text](crate::checked_text) of at most [`MANIFEST_MAX`] bytes. What is not whole, not known to this version or
//! contradicts itself is refused. It may have secrets of the VM's command line: no error and no `Debug` shows them.

use pagoda_abi::{PAGE_SIZE, REGION_ALIGN, REGIONS_MAX};
use pagoda_api::types::{Launch, VmSpec, check_vm_name};
use pagoda_core::units::{Bytes, PageCount};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checked_text::{find_lost, seal, unseal};
use crate::cpu::Cpu;
use crate::damage::{Damage, ImageFile};
use crate::id::ImageId;
use crate::limits::{IMAGE_PAGES_MAX, MANIFEST_MAX, STATE_BYTES_MAX, WHY_MAX};

const FIRST_LINE: &str = "pagoda-image 1";

/// How far an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Pages are missing: the VM has them, unchanged.
    Begun,
    /// It has all pages, and outlives the VM and the daemon.
    Filled,
    /// It outlives the host too.
    Durable,
    /// It lacks pages that nobody has any more.
    Lost,
}

impl Stage {
    /// Its name in the manifest.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Begun => "begun",
            Stage::Filled => "filled",
            Stage::Durable => "durable",
            Stage::Lost => "lost",
        }
    }

    /// Whether an image of this stage may come to `next`. What is lost stays lost, and what is durable cannot be lost by a VM.
    pub const fn leads_to(self, next: Stage) -> bool {
        matches!(
            (self, next),
            (Stage::Begun, Stage::Filled | Stage::Lost) | (Stage::Filled, Stage::Durable | Stage::Lost)
        )
    }
}

/// What an image is of, what starts its VM again, and how far the image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub id: ImageId,
    /// The name of the VM that the image is of.
    pub vm: String,
    /// The snapshot's name, unique for its VM.
    pub name: String,
    /// When the VM stood still, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// The life of the host in which it was made (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    pub stage: Stage,
    /// Why it is lost.
    pub why: Option<String>,
    /// Bytes of each region of the VM.
    pub regions: Vec<u64>,
    /// What the VM's user had set.
    pub spec: VmSpec,
    pub launch: Launch,
    pub qemu: Qemu,
    pub state: State,
    /// How long the VM stood still, in microseconds; not known before it runs again.
    pub pause_us: Option<u64>,
    /// Whether it ran when it was told to stop.
    pub running: bool,
    /// The files of its writable disks.
    pub disks: Vec<DiskFile>,
    /// The image before it, of the same VM, which has the pages that did not change from that one to this.
    pub parent: Option<ImageId>,
    /// So many pages it has there, those that are zero counted. Known once it is filled, if it has a parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inherited_pages: Option<u64>,
    /// The daemon took it by a timetable, and may remove it by that.
    #[serde(default, skip_serializing_if = "is_false")]
    pub automatic: bool,
    /// It comes from a file, and whether root of this host has accepted what it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<Import>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Of an image that was made of a file: what it starts is another host's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Import {
    /// Nobody has said yet that this host may start it.
    Waiting,
    /// Root of this host has accepted what it starts.
    Accepted,
}

/// What loads the state again: this version of QEMU or a newer one, with this machine, and with at least these CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Qemu {
    /// As `query-version` says: `10.0.2`.
    pub version: String,
    /// Its type with the version: `pc-q35-10.0`.
    pub machine: String,
    /// Absent if QEMU does not say, or was not asked, as by earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
}

/// What is to be in the file `state`: the device state of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    pub bytes: u64,
    /// XXH3-64 of all of it.
    #[serde(with = "hex")]
    pub xxh3: u64,
}

/// A disk's file as it was when the VM stood still. Of a disk that the snapshot has, the numbers are those of its layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFile {
    /// QEMU's name of the block node.
    pub node: String,
    /// The path of the file on the host.
    pub file: String,
    /// The device's number in that life of the host: the next one may give it another.
    pub dev: u64,
    pub ino: u64,
    /// When the file was made, in nanoseconds since 1970, if its file system keeps that. With the inode it tells the file from all
    /// others of the file system, also in another life of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born_ns: Option<i64>,
    pub size: u64,
    /// The time of its last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The file with the disk's content, by its name in the directory of `file`. Nothing: the snapshot does not have the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<String>,
}

impl Manifest {
    /// Pages of the VM.
    pub fn pages(&self) -> PageCount {
        PageCount(self.regions.iter().fold(0, |sum: u64, len| sum.saturating_add(*len)) / PAGE_SIZE as u64)
    }

    /// Whether a VM can be made of it, in this life of the host.
    ///
    /// # Errors
    /// Why not, for its user.
    pub fn check_usable(&self, boot_id: &str) -> Result<(), String> {
        match self.stage {
            Stage::Durable => Ok(()),
            Stage::Lost => Err(format!("the image is lost: {}", self.why.as_deref().unwrap_or("no reason is known"))),
            Stage::Begun | Stage::Filled if self.boot_id != boot_id => {
                Err("the image is lost: the host was restarted before it was durable".to_owned())
            }
            Stage::Begun => Err("the image is not filled yet".to_owned()),
            Stage::Filled => Ok(()),
        }
    }

    /// Whether its program may be started here. Of what came from a file somebody has to say so first.
    ///
    /// # Errors
    /// Nobody has; for its user.
    pub fn check_startable(&self) -> Result<(), String> {
        match self.imported {
            None | Some(Import::Accepted) => Ok(()),
            Some(Import::Waiting) => {
                Err("it was imported from a file, and nobody has accepted yet the program that it starts".to_owned())
            }
        }
    }

    /// As a file has it that stands alone.
    pub(crate) fn for_export(self) -> Manifest {
        let spec = VmSpec { autosnapshot: None, ..self.spec };
        Manifest {
            stage: Stage::Durable,
            spec,
            parent: None,
            inherited_pages: None,
            automatic: false,
            imported: None,
            ..self
        }
    }

    /// That it is as [`Manifest::for_export`] leaves it, and has no text that would do something to a terminal.
    pub(crate) fn check_exported(&self) -> Result<(), String> {
        if self.stage != Stage::Durable {
            return Err(format!("the stage is {}, and a file has durable snapshots", self.stage.name()));
        }
        if self.parent.is_some() || self.imported.is_some() {
            return Err("it refers to what is not in the file".to_owned());
        }
        // It would have snapshots removed here: itself, or those of a VM of its name.
        if self.automatic || self.spec.autosnapshot.is_some() {
            return Err("it belongs to a timetable of another host".to_owned());
        }
        let disks = self.disks.iter().flat_map(|disk| [("disks", &disk.node), ("disks", &disk.file)]);
        let texts = [
            ("qemu", &self.qemu.version),
            ("qemu", &self.qemu.machine),
            ("launch.program", &self.launch.program),
            ("launch.cwd", &self.launch.cwd),
        ];
        match texts.into_iter().chain(disks).find(|(_, text)| text.contains(char::is_control)) {
            Some((field, _)) => Err(format!("{field} has a control character")),
            None => Ok(()),
        }
    }

    /// The manifest as its file has it: first line, JSON and checksum.
    ///
    /// # Errors
    /// It could not be read back; in words.
    pub fn to_text(&self) -> Result<String, String> {
        let json = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
        let text = seal(FIRST_LINE, &json);
        match Manifest::read(text.as_bytes()) {
            Ok(again) if again == *self => Ok(text),
            Ok(_) => Err("it would be read back as something else".to_owned()),
            Err(damage) => Err(format!("it could not be read back: {}", damage.what)),
        }
    }

    /// Reads what [`Manifest::to_text`] has made, and believes nothing of it unchecked.
    ///
    /// # Errors
    /// It is damaged, of another version, or has what this version does not know.
    pub fn read(bytes: &[u8]) -> Result<Manifest, Damage> {
        let damaged = |what: String| Damage::of_file(ImageFile::Manifest, Bytes::ZERO, what);
        if bytes.len() > MANIFEST_MAX {
            let what = format!("longer than {MANIFEST_MAX} bytes");
            return Err(Damage::of_file(ImageFile::Manifest, Bytes(MANIFEST_MAX as u64), what));
        }
        let text = std::str::from_utf8(bytes).map_err(|error| {
            Damage::of_file(ImageFile::Manifest, Bytes(error.valid_up_to() as u64), "no text in UTF-8")
        })?;
        let (first, json) = unseal(text).map_err(|what| damaged(what.to_owned()))?;
        if first != FIRST_LINE {
            return Err(damaged("written by another version".to_owned()));
        }
        let manifest = Manifest::from_json(json)?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    fn from_json(json: &str) -> Result<Manifest, Damage> {
        let damaged = |what: String| Damage::of_file(ImageFile::Manifest, Bytes::ZERO, what);
        // Not in serde's words: they quote the value, which may be a secret.
        let located =
            |error: serde_json::Error| damaged(format!("JSON, line {}, column {}", error.line(), error.column()));
        let manifest: Manifest = serde_json::from_str(json).map_err(located)?;
        let said: Value = serde_json::from_str(json).map_err(located)?;
        let understood = serde_json::to_value(&manifest).map_err(located)?;
        match find_lost(&said, &understood) {
            None => Ok(manifest),
            Some(field) => Err(damaged(format!("it has {field}, which this version does not know"))),
        }
    }

    fn check(&self) -> Result<(), String> {
        for name in [&self.vm, &self.name] {
            check_vm_name(name)?;
        }
        let is_region = |len: &u64| *len != 0 && len.is_multiple_of(REGION_ALIGN);
        if !(1..=REGIONS_MAX).contains(&self.regions.len()) || !self.regions.iter().all(is_region) {
            return Err("regions".to_owned());
        }
        if self.pages() > IMAGE_PAGES_MAX {
            return Err(format!("a VM of {} pages: an image has at most {IMAGE_PAGES_MAX}", self.pages()));
        }
        if !(1..=STATE_BYTES_MAX.0).contains(&self.state.bytes) {
            return Err(format!("a state of {} bytes: it has at most {}", self.state.bytes, STATE_BYTES_MAX.0));
        }
        let is_uuid_char = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b'-');
        if self.boot_id.len() != 36 || !self.boot_id.bytes().all(is_uuid_char) {
            return Err("boot_id".to_owned());
        }
        if !self.qemu.cpu.as_ref().is_none_or(Cpu::is_sane) {
            return Err("qemu.cpu".to_owned());
        }
        if (self.stage == Stage::Lost) != self.why.is_some() {
            return Err("a reason for a loss, and no loss, or the other way round".to_owned());
        }
        if self.why.as_ref().is_some_and(|why| why.len() > WHY_MAX) {
            return Err(format!("a reason of more than {WHY_MAX} bytes"));
        }
        if self.parent == Some(self.id) {
            return Err("it is its own parent".to_owned());
        }
        if self.disks.iter().filter_map(|disk| disk.layer.as_deref()).any(|layer| !is_file_name(layer)) {
            return Err("a layer that is no name of a file".to_owned());
        }
        if self.inherited_pages.is_some_and(|pages| self.parent.is_none() || pages > self.pages().0) {
            return Err("inherited_pages".to_owned());
        }
        Ok(())
    }
}

/// Whether this is a name in a directory, and not a way out of it.
pub fn is_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

/// A reason that fits into a manifest.
pub(crate) fn shortened(why: &str) -> String {
    let end = (0..=why.len().min(WHY_MAX)).rev().find(|end| why.is_char_boundary(*end)).unwrap_or(0);
    why[..end].to_owned()
}

/// A checksum as 16 hexadecimal digits.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_hex = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let value = is_hex.then(|| u64::from_str_radix(&text, 16).ok()).flatten();
        value.ok_or_else(|| D::Error::custom("no checksum"))
    }
}

#[cfg(test)]
mod tests;
