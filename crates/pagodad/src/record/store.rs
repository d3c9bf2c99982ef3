//! The directory of records, and the only code that lists, reads, writes and removes them.
//!
//! A record is written into a file beside it, synced and renamed, so it is there whole or not at all, and readable by its
//! owner alone. Who may write or remove a VM's record, and when, is decided by the registry ([`crate::registry`]): whoever
//! has the VM's writing lock. A file that cannot be read or is not named after its VM is left alone for good.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_api::types::vm_file_name;

use super::{RECORD_MAX, Record};

/// The extension of a record's file name.
const EXTENSION: &str = "vm";
/// The extension of a record that is being written.
const PART: &str = "part";

/// Writes a file whole or not at all.
type WriteFile = Box<dyn Fn(&Path, &[u8]) -> std::io::Result<()> + Send + Sync>;

/// The directory that has the records of all VMs.
pub struct RecordStore {
    dir: PathBuf,
    write_file: WriteFile,
}

impl std::fmt::Debug for RecordStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecordStore").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl RecordStore {
    pub fn new(dir: PathBuf) -> RecordStore {
        RecordStore { dir, write_file: Box::new(write_whole) }
    }

    /// One whose disk is as the test wants it.
    #[cfg(test)]
    pub fn with_disk(dir: PathBuf, write_file: WriteFile) -> RecordStore {
        RecordStore { dir, write_file }
    }

    /// Where the record of this VM is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(vm_file_name(name)).with_added_extension(EXTENSION)
    }

    /// Every record, or why it cannot be used. For a daemon that starts, and writes none yet: what an earlier one has not written to its
    /// end is removed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> std::io::Result<Vec<(PathBuf, Result<Record>)>> {
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                records.push((path.clone(), self.read(&path)));
            } else if path.extension().is_some_and(|extension| extension == PART)
                && let Err(error) = std::fs::remove_file(&path)
            {
                tracing::warn!("remove {}, which was not written to its end: {error}", path.display());
            }
        }
        Ok(records)
    }

    fn read(&self, path: &Path) -> Result<Record> {
        let record = read(path)?;
        ensure!(self.path(&record.name) == path, "it is the record of {}, and not in its place", record.name);
        Ok(record)
    }

    /// Writes a VM's record. If it fails, what was there before is there.
    ///
    /// # Errors
    /// The disk's; a record that could not be read back.
    pub fn write(&self, record: &Record) -> Result<()> {
        write_by(&self.write_file, &self.path(&record.name), record)
    }

    /// Removes a VM's record, which may be gone already.
    ///
    /// # Errors
    /// The disk's.
    pub fn remove(&self, name: &str) -> std::io::Result<()> {
        match std::fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

/// Reads a record of any format that is known.
///
/// # Errors
/// It is not there, or none that this version knows.
pub fn read(path: &Path) -> Result<Record> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(RECORD_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(Record::from_text(&text)?)
}

/// Writes a record that is kept elsewhere than in the store.
///
/// # Errors
/// The disk's; a record that could not be read back.
pub fn write(path: &Path, record: &Record) -> Result<()> {
    write_by(&write_whole, path, record)
}

fn write_by(write_file: &dyn Fn(&Path, &[u8]) -> std::io::Result<()>, path: &Path, record: &Record) -> Result<()> {
    let text = record.to_text();
    // A VM whose record the next daemon refuses would wait for ever.
    let again = Record::from_text(&text).context("it could not be read back")?;
    ensure!(again == *record, "it would be read back as something else");
    write_file(path, text.as_bytes()).with_context(|| path.display().to_string())
}

/// Writes a file by rename, readable by its owner alone.
pub fn write_whole(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let part = path.with_extension(PART);
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&part, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use pagoda_abi::Token;
    use pagoda_api::types::{RemoteRequest, VmKind, VmSpec};

    use super::*;

    fn store(name: &str) -> RecordStore {
        let dir = std::env::temp_dir().join(format!("pagodad-records-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        RecordStore::new(dir)
    }

    fn record(name: &str) -> Record {
        Record::new(name, Token([7; 16]), VmKind::Plain, &[2 << 20], VmSpec::default())
    }

    #[test]
    fn records_are_found_as_they_were_written() {
        let store = store("found");
        for name in ["web1", "Büro 1"] {
            store.write(&record(name)).unwrap();
            let mode = std::fs::metadata(store.path(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "it has secrets");
        }
        std::fs::write(store.dir.join("web1.far"), "").unwrap();
        let mut found: Vec<Record> = store.list().unwrap().into_iter().map(|(_, record)| record.unwrap()).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(found, [record("Büro 1"), record("web1")]);
        store.remove("web1").unwrap();
        store.remove("web1").unwrap();
        assert_eq!(store.list().unwrap().len(), 1);
        std::fs::remove_dir_all(&store.dir).unwrap();
    }

    #[test]
    fn a_record_that_cannot_be_used_is_said_and_left_alone() {
        let store = store("unusable");
        let text = record("web1").to_text();
        std::fs::write(store.path("elsewhere"), &text).unwrap();
        std::fs::write(store.path("cut"), &text[..text.len() / 2]).unwrap();
        std::fs::write(store.path("bytes"), [0xff; 100]).unwrap();
        std::fs::write(store.path("long"), "x".repeat(RECORD_MAX + 1)).unwrap();
        let found = store.list().unwrap();
        assert_eq!(found.len(), 4);
        for (path, record) in found {
            assert!(record.is_err() && path.exists(), "{}", path.display());
        }
        std::fs::remove_dir_all(&store.dir).unwrap();
    }

    #[test]
    fn what_could_not_be_read_back_is_not_written() {
        let store = store("long");
        store.write(&record("web1")).unwrap();
        let spec = VmSpec { pinned: Some("x".repeat(RECORD_MAX)), ..VmSpec::default() };
        let error = store.write(&Record { spec, ..record("web1") }).unwrap_err();
        assert!(format!("{error:#}").contains("longer than a record can be"), "{error:#}");
        let spec = VmSpec { remote: Some(RemoteRequest { copies: 2 }), ..VmSpec::default() };
        assert!(store.write(&Record { spec, ..record("web1") }).is_err(), "it contradicts itself");
        assert_eq!(read(&store.path("web1")).unwrap(), record("web1"));
        std::fs::remove_dir_all(&store.dir).unwrap();
    }
}
