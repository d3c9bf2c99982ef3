//! Notes of VMs whose program has ended without being told to: one small file for each, until the VM is started again.
//!
//! The daemon is not the parent of a VM's program, so it cannot see how that ended. A VM was *told* to end if its shim noted
//! exit status 0 ([`pagoda_abi::shared::Shared::ended_with`]): the guest was shut down, or QEMU got `quit` or a signal that asks.
//! Everything else counts as a crash, also what is not known. That decides what is shown and nothing else: a note keeps no
//! memory and no file of the VM, and nothing is started because of it.
//!
//! A note is a [checked text](pagoda_image::checked_text) beside the VM's record. It is written before the record is removed,
//! and removed when the next VM of its name has attached.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_api::in_full;
use pagoda_api::types::{Crash, CrashedVm, VmKind, check_vm_name, vm_file_name};
use pagoda_image::checked_text::{seal, unseal};

use crate::record::store::write_whole;
use crate::record::{OperationKind, Record};

const FIRST_LINE: &str = "pagoda-crashed 1";
const EXTENSION: &str = "crashed";
/// Longest note that is read, in bytes.
const NOTE_MAX: usize = 4096;

/// The directory that has the notes of crashed VMs.
#[derive(Debug)]
pub struct Crashes {
    dir: PathBuf,
}

impl Crashes {
    pub fn new(dir: PathBuf) -> Crashes {
        Crashes { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(vm_file_name(name)).with_added_extension(EXTENSION)
    }

    /// A VM's program has ended. If the disk does not take the note, there is none: nothing else depends on it.
    pub fn note(&self, record: &Record, crash: Crash) {
        if record.kind != VmKind::Qemu {
            return;
        }
        let note = CrashedVm {
            name: record.name.clone(),
            memory_bytes: record.memory(),
            pid: record.pid.0,
            seen_unix_ms: now_ms(),
            crash,
            snapshot: None,
        };
        let json = serde_json::to_string_pretty(&note).unwrap_or_default();
        if let Err(error) = write_whole(&self.path(&note.name), seal(FIRST_LINE, &json).as_bytes()) {
            tracing::warn!(vm = %note.name, "note that it has crashed: {error}");
        }
    }

    /// The VM of this name was started again, or its user does not want to know. Whether there was a note.
    ///
    /// # Errors
    /// The disk's.
    pub fn remove(&self, name: &str) -> std::io::Result<bool> {
        match std::fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        }
    }

    /// The program with this process id has not crashed: the VM has not run in it. A note of another one stays. Whether there was one.
    ///
    /// # Errors
    /// The disk's.
    pub fn remove_of(&self, name: &str, pid: u32) -> std::io::Result<bool> {
        let is_its = read(&self.path(name)).is_ok_and(|note| note.pid == pid);
        if is_its { self.remove(name) } else { Ok(false) }
    }

    /// All notes, by name. One that cannot be read is left alone.
    pub fn list(&self) -> Vec<CrashedVm> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let notes = entries.filter(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
        let mut notes: Vec<CrashedVm> = notes.filter_map(|path| self.read_or_say(&path)).collect();
        notes.sort_by(|a, b| a.name.cmp(&b.name));
        notes
    }

    fn read_or_say(&self, path: &Path) -> Option<CrashedVm> {
        let read = read(path).and_then(|note| {
            ensure!(self.path(&note.name) == path, "it is of {}, and not in its place", note.name);
            Ok(note)
        });
        read.inspect_err(|error| tracing::warn!("read {}: {}", path.display(), in_full(error.as_ref()))).ok()
    }
}

/// How a VM has ended that was attached to this daemon, if it was not told to. `status`: what its shim noted.
pub fn crash_of(record: &Record, status: Option<i32>) -> Option<Crash> {
    match (status, record.operation.map(|operation| operation.kind)) {
        (_, Some(OperationKind::Restore | OperationKind::Rollback)) => Some(Crash::CutOff),
        (Some(0), _) => None,
        (Some(status), _) => Some(Crash::Exited { status }),
        (None, _) => Some(Crash::Killed),
    }
}

fn read(path: &Path) -> Result<CrashedVm> {
    let mut text = String::new();
    let file = std::fs::File::open(path).context("open it")?;
    file.take(NOTE_MAX as u64 + 1).read_to_string(&mut text).context("read it")?;
    ensure!(text.len() <= NOTE_MAX, "it is longer than a note can be");
    let (first, json) = unseal(&text).map_err(|what| anyhow!(what))?;
    ensure!(first == FIRST_LINE, "it was written by another version");
    let note: CrashedVm = serde_json::from_str(json).context("understand it")?;
    check_vm_name(&note.name).map_err(|what| anyhow!(what))?;
    Ok(note)
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use pagoda_abi::Token;
    use pagoda_api::types::VmSpec;
    use pagoda_image::ImageId;

    use super::*;
    use crate::record::Operation;

    fn record(name: &str, kind: VmKind) -> Record {
        Record { pid: (42, 7), ..Record::new(name, Token([7; 16]), kind, &[2 << 20], VmSpec::default()) }
    }

    #[test]
    fn notes_are_kept_until_they_are_removed() {
        let dir = std::env::temp_dir().join(format!("pagodad-crashes-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let crashes = Crashes::new(dir.clone());
        assert!(crashes.list().is_empty());
        crashes.note(&record("web1", VmKind::Qemu), Crash::Killed);
        crashes.note(&record("Büro 1", VmKind::Qemu), Crash::Exited { status: 1 });
        crashes.note(&record("cache", VmKind::Plain), Crash::Killed);
        std::fs::write(dir.join("cut.crashed"), "pagoda-crashed 1\n{").unwrap();
        std::fs::copy(dir.join("web1.crashed"), dir.join("elsewhere.crashed")).unwrap();
        let next = Crashes::new(dir.clone());
        let found: Vec<_> = next.list().into_iter().map(|note| (note.name, note.pid, note.crash)).collect();
        let expected = [("Büro 1", 42, Crash::Exited { status: 1 }), ("web1", 42, Crash::Killed)];
        assert_eq!(found, expected.map(|(name, pid, crash)| (name.to_owned(), pid, crash)));
        assert!(!next.remove_of("web1", 41).unwrap() && next.remove_of("web1", 42).unwrap());
        assert!(next.remove("web1").is_ok_and(|was_there| !was_there));
        assert_eq!(next.list().len(), 1);
        assert!(dir.join("cut.crashed").exists(), "it is left alone");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn only_an_orderly_end_is_no_crash() {
        let of = |kind: Option<OperationKind>, status| {
            let operation = kind.map(|kind| Operation { kind, image: ImageId(1), resume: true });
            crash_of(&Record { operation, ..record("web1", VmKind::Qemu) }, status)
        };
        assert_eq!(of(None, Some(0)), None);
        assert_eq!(of(Some(OperationKind::Snapshot), Some(0)), None);
        assert_eq!(of(None, Some(1)), Some(Crash::Exited { status: 1 }));
        assert_eq!(of(None, None), Some(Crash::Killed));
        for kind in [OperationKind::Restore, OperationKind::Rollback] {
            assert_eq!(of(Some(kind), Some(0)), Some(Crash::CutOff));
        }
    }
}
