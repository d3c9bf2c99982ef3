//! Who owns a VM, on the disk: one file of 64 bytes for each VM that has begun to move ([`pagoda_move::note`]).
//!
//! A VM without a note is this host's, at generation 1. A file that cannot be read, or that no version writes, is never taken for
//! none: its VM is neither let run nor moved. A note is replaced by a rename, with the file and the directory synced. What is read is
//! synced first, since an earlier daemon may have written it and died.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_api::types::{check_vm_name, vm_file_name};
use pagoda_move::note::{NOTE_SIZE, Note};
use pagoda_move::units::Generation;

/// The extension of a note's file name.
const EXTENSION: &str = "note";
/// The extension of a note that is being written.
const NEW: &str = "new";
/// Who owns a VM that has never moved, owns it at this generation.
pub const FIRST: Generation = Generation(1);

/// The directory of notes. Who writes the note of a VM is the one that moves it, or takes it in.
#[derive(Clone, Debug)]
pub struct Notes {
    dir: PathBuf,
}

impl Notes {
    /// The notes of a daemon with this state directory.
    pub fn below(state_dir: &Path) -> Notes {
        Notes { dir: state_dir.join("moves") }
    }

    /// Where they are, which nobody but the daemon's user reaches.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The VM's note, which is durable.
    ///
    /// # Errors
    /// Nobody can tell whether there is one, or what it says; in words that name the file.
    pub fn read(&self, name: &str) -> Result<Option<Note>> {
        let path = self.path(name)?;
        read(&path, &self.dir).with_context(|| {
            format!("{} says who owns {name}, and cannot be used: it is neither let run nor moved", path.display())
        })
    }

    /// Replaces the VM's note, or removes it. It is durable when this returns.
    ///
    /// # Errors
    /// The disk's. The note may be the old one or the new one then.
    pub fn write(&self, name: &str, note: Option<Note>) -> Result<()> {
        let path = self.path(name)?;
        let written = match note {
            Some(note) => self.replace(&path, note),
            None => self.remove(&path),
        };
        written.with_context(|| format!("write {}", path.display()))
    }

    /// The names of VMs that have a note. What has another name than a note can have is none. For a daemon that starts, and writes none
    /// yet: what an earlier one has not written to its end is removed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn all(&self) -> Result<Vec<String>> {
        let context = || format!("list {}", self.dir.display());
        let entries = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(context)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let path = entry.with_context(context)?.path();
            match name_of(&path) {
                Some(name) => names.push(name),
                // It does not count, and nobody writes it to its end any more.
                None if path.extension().is_some_and(|extension| extension == NEW) => drop(std::fs::remove_file(&path)),
                None => tracing::warn!("{} is not named as a note of a VM, and is left alone", path.display()),
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        check_vm_name(name).map_err(|why| anyhow!("{name:?} is no name of a VM: {why}"))?;
        Ok(self.dir.join(vm_file_name(name)).with_added_extension(EXTENSION))
    }

    fn replace(&self, path: &Path, note: Note) -> Result<()> {
        self.make_dir()?;
        let new = path.with_added_extension(NEW);
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&note.encode())?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        self.sync_dir()
    }

    fn remove(&self, path: &Path) -> Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        // One that an earlier call has removed may not be durable.
        match self.dir.is_dir() {
            true => self.sync_dir(),
            false => Ok(()),
        }
    }

    fn make_dir(&self) -> Result<()> {
        if self.dir.is_dir() {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let above = self.dir.parent().context("it has no directory")?;
        Ok(File::open(above)?.sync_all()?)
    }

    fn sync_dir(&self) -> Result<()> {
        Ok(File::open(&self.dir)?.sync_all()?)
    }
}

fn read(path: &Path, dir: &Path) -> Result<Option<Note>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // Its removal may not be durable.
            match File::open(dir) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                dir => dir?.sync_all()?,
            }
            return Ok(None);
        }
        file => file?,
    };
    let mut bytes = Vec::with_capacity(NOTE_SIZE);
    (&mut file).take(NOTE_SIZE as u64 + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() == NOTE_SIZE, "it has another length than {NOTE_SIZE} bytes");
    let note = Note::decode(bytes.try_into().expect("looked at"))?;
    file.sync_all()?;
    File::open(dir)?.sync_all()?;
    Ok(Some(note))
}

/// The VM whose note has this path.
fn name_of(path: &Path) -> Option<String> {
    let escaped = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let mut name = Vec::new();
    let mut rest = escaped.as_bytes();
    while let Some((byte, behind)) = rest.split_first() {
        rest = behind;
        if *byte == b'%' {
            let (digits, behind) = rest.split_at_checked(2)?;
            name.push(u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?);
            rest = behind;
        } else {
            name.push(*byte);
        }
    }
    let name = String::from_utf8(name).ok()?;
    (check_vm_name(&name).is_ok() && vm_file_name(&name) == escaped).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_move::note::{Decision, Offered, Owned};
    use pagoda_move::units::{AttemptId, HostKey};
    use std::os::unix::fs::PermissionsExt;

    fn in_dir(name: &str, body: impl FnOnce(&Path, &Notes)) {
        let dir = std::env::temp_dir().join(format!("pagodad-notes-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        body(&dir, &Notes::below(&dir));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    fn given() -> Note {
        let offered =
            Offered { attempt: AttemptId(9), peer: HostKey([7; 32]), generation: Generation(4), register: None };
        Note::Given(offered, Decision::Grant)
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        in_dir("round", |dir, notes| {
            assert_eq!((notes.read("web1").unwrap(), notes.all().unwrap().len()), (None, 0));
            notes.write("web1", None).unwrap();
            for note in [Note::Owned(Owned::Alone(FIRST)), given(), Note::Owned(Owned::Alone(Generation(5)))] {
                notes.write("web1", Some(note)).unwrap();
                assert_eq!(notes.read("web1").unwrap(), Some(note));
            }
            let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(dir.join("moves")), mode(dir.join("moves/web1.note"))), (0o700, 0o600));
            notes.write("b.2", Some(given())).unwrap();
            // What a daemon leaves that dies while it writes.
            std::fs::write(dir.join("moves/c.note.new"), b"PM").unwrap();
            assert_eq!(notes.all().unwrap(), ["b.2", "web1"]);
            assert_eq!(notes.read("c").unwrap(), None);
            notes.write("web1", None).unwrap();
            assert_eq!((notes.read("web1").unwrap(), notes.all().unwrap()), (None, vec!["b.2".to_owned()]));
        });
    }

    #[test]
    fn a_damaged_note_is_never_none() {
        in_dir("damaged", |dir, notes| {
            notes.write("web1", Some(given())).unwrap();
            let path = dir.join("moves/web1.note");
            let good = std::fs::read(&path).unwrap();
            let mut bad = good.clone();
            bad[5] = 9;
            for content in [&bad[..], &good[..63], &[&good[..], b"x"].concat(), b""] {
                std::fs::write(&path, content).unwrap();
                let error = format!("{:#}", notes.read("web1").unwrap_err());
                assert!(error.contains("web1.note") && error.contains("neither let run nor moved"), "{error}");
            }
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
            assert!(notes.read("web1").is_err() && notes.write("web1", Some(given())).is_err());
            assert_eq!(notes.all().unwrap(), ["web1"]);
        });
    }

    #[test]
    fn a_name_that_no_vm_has_is_refused() {
        in_dir("names", |dir, notes| {
            for name in ["", "../web1", "a/b", "a\0b", "a\nb"] {
                assert!(notes.read(name).is_err() && notes.write(name, Some(given())).is_err(), "{name:?}");
            }
            notes.write("web1", Some(given())).unwrap();
            for file in ["%zz.note", "%41.note", "web1", ".note", "%2F.note"] {
                std::fs::write(dir.join("moves").join(file), b"").unwrap();
            }
            assert_eq!(notes.all().unwrap(), ["web1"]);
        });
    }
}
