//! Images of disks that this host makes for a VM that comes, and removes again if it does not come.
//!
//! | step | what a daemon that starts finds |
//! |---|---|
//! | 1. a note names the disks and a random number; it is durable | files with that number in their names, or none |
//! | 2. each image is made under such a name, which is new | the same |
//! | 3. the note says which files they are; it is durable | the same files |
//! | 4. each gets the disk's name, if nothing has it, and loses the other one | the same files, by one name or the other |
//! | 5. when the VM runs here, the note goes | files of a VM of this host |
//!
//! So what is removed is what this host made: the file that the note names, or one with its number. And only as long as the VM's own note
//! says that it has not run here: *incoming* or *refused*, of the same attempt. What cannot be told stays, and the log says so. The
//! directories are the user's, and everything in them is done with the rights of the user whose QEMU it is.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_api::in_full;
use pagoda_api::types::{Launch, check_vm_name, vm_file_name};
use pagoda_move::note::{Note, Owned};
use pagoda_move::units::AttemptId;
use serde::{Deserialize, Serialize};

use super::notes::Notes;
use super::start;
use crate::boot::{self, Life};
use crate::config::MovesConfig;
use crate::disks::{Dir, NewImage, User};
use crate::random;
use crate::record::{FileId, Same};

/// A note of disks is no longer than that, bytes: sixteen disks with long paths.
const NOTE_MAX: u64 = 256 << 10;
const EXTENSION: &str = "json";
const NEW: &str = "new";

/// What is made for an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Made {
    attempt: u64,
    /// The random number that is in the names that images are made under.
    number: u64,
    uid: u32,
    gid: u32,
    /// The life of the host in which files were noted.
    boot_id: Option<String>,
    images: Vec<MadeImage>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MadeImage {
    file: String,
    /// The file, once it is known.
    id: Option<FileId>,
}

impl Made {
    /// What the image of a disk is called until it has its name.
    fn first_name(&self, name: &str) -> String {
        format!(".{name}.pagoda-{:016x}", self.number)
    }

    const fn user(&self) -> User {
        User { uid: self.uid, gid: self.gid }
    }
}

/// The notes of all VMs.
#[derive(Debug)]
pub struct Copies {
    dir: PathBuf,
    /// For each VM, one at a time makes files or removes them. Never one for all: a directory whose file system does not answer holds up
    /// the VM alone whose disks are there.
    busy: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
}

impl Copies {
    /// The notes of a daemon with this state directory.
    pub fn below(state_dir: &Path) -> Copies {
        Copies { dir: state_dir.join("copies"), busy: Mutex::default() }
    }

    fn busy_with(&self, vm: &str) -> Arc<Mutex<()>> {
        let mut all = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, one| Arc::strong_count(one) > 1);
        Arc::clone(all.entry(vm.to_owned()).or_default())
    }

    /// Makes the images of a VM that comes by this attempt, whose note says *incoming*. They are these files, in their order.
    ///
    /// # Errors
    /// Something is at a disk's path; it cannot be made. What was made is there still, and is removed by [`Copies::remove`].
    pub fn make(&self, vm: &str, attempt: AttemptId, launch: &Launch, images: &[NewImage]) -> Result<Vec<FileId>> {
        let busy = self.busy_with(vm);
        let _busy = busy.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = self.read(vm)? {
            say_kept(vm, &before, "of an earlier move of which nobody knows any more how it has ended");
        }
        let number = u128::from_le_bytes(random::bytes().context("make a number")?) as u64;
        let User { uid, gid } = User::of(launch);
        let none = |image: &NewImage| MadeImage { file: image.file.clone(), id: None };
        let boot_id = boot::id().ok().map(str::to_owned);
        let images_made = images.iter().map(none).collect();
        let mut made = Made { attempt: attempt.0, number, uid, gid, boot_id, images: images_made };
        self.write(vm, Some(&made))?;
        for (at, image) in images.iter().enumerate() {
            let (parent, name) = image.place()?;
            let first = made.first_name(name);
            let make = || image.make(&Dir::open(parent)?, &first, launch);
            made.images[at].id = Some(made.user().act(make).with_context(|| format!("make the disk {}", image.file))?);
        }
        self.write(vm, Some(&made))?;
        for image in &made.images {
            let name = || give_name(&made, image);
            made.user().act(name).with_context(|| format!("make the disk {}", image.file))?;
        }
        made.images.iter().map(|image| image.id.context("it was not made")).collect()
    }

    /// Removes what was made for an attempt of this VM, which has not run here. No QEMU has it open any more.
    pub fn remove(&self, notes: &Notes, vm: &str, attempt: AttemptId) {
        // Most VMs have no such disks, and wait for nobody. Whoever makes some has written the note first.
        if matches!(self.read(vm), Ok(None)) {
            return;
        }
        let busy = self.busy_with(vm);
        let _busy = busy.lock().unwrap_or_else(PoisonError::into_inner);
        let removed = self.read(vm).and_then(|made| match made {
            Some(made) if made.attempt == attempt.0 => self.remove_made(notes, vm, &made),
            // There are none, or they are another attempt's.
            _ => Ok(()),
        });
        if let Err(error) = removed {
            tracing::error!(vm, "copies of its disks, which did not come: {}", in_full(error.as_ref()));
        }
    }

    fn remove_made(&self, notes: &Notes, vm: &str, made: &Made) -> Result<()> {
        let attempt = AttemptId(made.attempt);
        let may_remove =
            matches!(notes.read(vm)?, Some(Note::Incoming(of) | Note::Refused(of)) if of.attempt == attempt);
        ensure!(may_remove, "its note does not say that it has not run here: they stay");
        let remove_all = || Ok(made.images.iter().map(|image| remove_image(made, image)).collect::<Vec<_>>());
        for kept in made.user().act(remove_all)?.into_iter().filter_map(Result::err) {
            tracing::error!(vm, "a copy of its disk, which did not come, stays: {}", in_full(kept.as_ref()));
        }
        self.write(vm, None)
    }

    /// The VM is this host's, and so are its disks: nothing of them is removed any more.
    ///
    /// # Errors
    /// The note cannot be removed. That leads to no harm: the VM's own note says the same.
    pub fn keep(&self, vm: &str) -> Result<()> {
        match self.read(vm)? {
            Some(_) => self.write(vm, None),
            None => Ok(()),
        }
    }

    /// When a daemon starts: says what is left of VMs that have no move any more, and forgets it.
    pub fn settle(&self, notes: &Notes) {
        for vm in self.all() {
            let made = self.read(&vm);
            match (notes.read(&vm), made) {
                // What becomes of them, the attempt's end says.
                (Ok(Some(Note::Incoming(of) | Note::Refused(of) | Note::Accepted(of, _))), Ok(Some(made)))
                    if of.attempt.0 == made.attempt => {}
                (Ok(note), Ok(Some(made))) => {
                    let has_come = matches!(note, Some(Note::Owned(Owned::Came(of))) if of.attempt.0 == made.attempt);
                    if !has_come {
                        say_kept(&vm, &made, "of a move to this host that is over");
                    }
                    if let Err(error) = self.write(&vm, None) {
                        tracing::warn!(%vm, "{}", in_full(error.as_ref()));
                    }
                }
                (Err(error), _) | (_, Err(error)) => {
                    tracing::error!(%vm, "copies of its disks, which are left alone: {}", in_full(error.as_ref()));
                }
                (Ok(_), Ok(None)) => {}
            }
        }
    }

    fn all(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return Vec::new() };
        let read = |path: PathBuf| -> Option<String> {
            let text = read_bounded(&path).ok()?;
            let named: Named = serde_json::from_slice(&text).ok()?;
            (self.path(&named.vm).ok()? == path).then_some(named.vm)
        };
        entries.flatten().filter_map(|entry| read(entry.path())).collect()
    }

    fn path(&self, vm: &str) -> Result<PathBuf> {
        check_vm_name(vm).map_err(|why| anyhow!("{vm:?} is no name of a VM: {why}"))?;
        Ok(self.dir.join(vm_file_name(vm)).with_added_extension(EXTENSION))
    }

    fn read(&self, vm: &str) -> Result<Option<Made>> {
        let path = self.path(vm)?;
        let read = || match read_bounded(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            text => {
                let named: Named = serde_json::from_slice(&text?)?;
                ensure!(named.vm == vm, "it is of another VM");
                Ok(Some(named.made))
            }
        };
        read().with_context(|| format!("read {}", path.display()))
    }

    /// Writes the note, or removes it: the change is on the disk then.
    fn write(&self, vm: &str, made: Option<&Made>) -> Result<()> {
        let path = self.path(vm)?;
        let write = || -> Result<()> {
            if !self.dir.is_dir() {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
                File::open(self.dir.parent().context("it has no directory")?)?.sync_all()?;
            }
            match made {
                Some(made) => {
                    let new = path.with_added_extension(NEW);
                    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
                    file.write_all(&serde_json::to_vec(&Named { vm: vm.to_owned(), made: made.clone() })?)?;
                    file.sync_all()?;
                    std::fs::rename(&new, &path)?;
                }
                None => match std::fs::remove_file(&path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => bail!(error),
                    _ => {}
                },
            }
            Ok(File::open(&self.dir)?.sync_all()?)
        };
        write().with_context(|| format!("write {}", path.display()))
    }
}

/// A note as it is in its file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    vm: String,
    made: Made,
}

fn read_bounded(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(NOTE_MAX).read_to_end(&mut text)?;
    Ok(text)
}

fn say_kept(vm: &str, made: &Made, what: &str) {
    let files: Vec<&str> = made.images.iter().map(|image| image.file.as_str()).collect();
    tracing::error!(
        vm,
        "copies of disks {what} may be here, and nothing removes them: {}, or beside them with -{:016x} in their names",
        files.join(", "),
        made.number
    );
}

/// The caller acts as the user.
fn give_name(made: &Made, image: &MadeImage) -> Result<()> {
    let (dir, name) = place(image)?;
    let (dir, id) = (Dir::open(dir)?, image.id.context("it was not made")?);
    let first = made.first_name(name);
    // In this order: it never replaces a file.
    dir.link(&first, name).with_context(|| format!("{} is there already, or cannot be made", image.file))?;
    dir.unlink(&first, id);
    ensure!(dir.id(name)? == Some(id), "{} is another file by now", image.file);
    dir.sync()
}

/// Removes the file, by whichever of its names. The caller acts as the user.
fn remove_image(made: &Made, image: &MadeImage) -> Result<()> {
    let (parent, name) = place(image)?;
    let dir = match Dir::open(parent) {
        Err(error) if error.downcast_ref::<rustix::io::Errno>() == Some(&rustix::io::Errno::NOENT) => return Ok(()),
        dir => dir?,
    };
    let first = made.first_name(name);
    let Some(id) = image.id else {
        // Nobody else makes a file with this number in its name. What has the disk's own name is not this host's.
        if let Some(found) = dir.id(&first)? {
            dir.unlink(&first, found);
        }
        return dir.sync();
    };
    let noted = id.noted(Life::of(made.boot_id.as_deref()));
    for name in [first.as_str(), name] {
        match dir.id(name)?.map(|found| noted.compare(found)) {
            Some(Same::Yes) => {
                dir.unlink(name, noted);
                ensure!(
                    dir.id(name)?.is_none_or(|found| !noted.may_be(found)),
                    "{} is not removed",
                    dir.join(name).display()
                );
            }
            Some(Same::Unknown) => bail!("nobody can tell whether {} is what was made", dir.join(name).display()),
            Some(Same::No) | None => {}
        }
    }
    dir.sync()
}

fn place(image: &MadeImage) -> Result<(&Path, &str)> {
    let path = Path::new(&image.file);
    let name = path.file_name().and_then(|name| name.to_str());
    path.parent().zip(name).with_context(|| format!("{} names no file", image.file))
}

/// Whether this host would make these disks, for a VM that is allowed to come.
///
/// # Errors
/// All reasons why not, in words for the user of the other host.
pub fn check(config: &MovesConfig, launch: &Launch, images: &[NewImage]) -> Result<(), Vec<String>> {
    if images.is_empty() {
        return Ok(());
    }
    NewImage::check_all(images).map_err(|why| vec![why])?;
    let mut reasons: Vec<String> = images.iter().filter_map(|image| check_dir(config, image).err()).collect();
    if reasons.is_empty() {
        let look = || Ok((images.iter().filter_map(|image| check_free(image).err()).collect(), check_room(images)?));
        let looked: Result<(Vec<String>, Option<String>)> = User::of(launch).act(look);
        match looked {
            Ok((taken, room)) => reasons.extend(taken.into_iter().chain(room)),
            Err(error) => reasons.push(in_full(error.as_ref())),
        }
    }
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

fn check_dir(config: &MovesConfig, image: &NewImage) -> Result<(), String> {
    let (dir, _) = image.place().map_err(|error| in_full(error.as_ref()))?;
    start::check_dir(config, dir, "the directory of a disk")
}

/// Nothing is at its path. The caller acts as the user.
fn check_free(image: &NewImage) -> Result<(), String> {
    match Path::new(&image.file).symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("look at {}: {error}", image.file)),
        Ok(_) => Err(format!("{} is there already, and no disk is replaced: remove it, or move it away", image.file)),
    }
}

/// What is not there for all of them, by file systems.
fn check_room(images: &[NewImage]) -> Result<Option<String>> {
    let mut systems: Vec<(u64, u64, u64, &str)> = Vec::new();
    for image in images {
        let (free, device) = Dir::open(image.place()?.0)?.room()?;
        match systems.iter_mut().find(|(of, ..)| *of == device) {
            Some((_, _, needed, _)) => *needed = needed.saturating_add(image.room),
            None => systems.push((device, free, image.room, &image.file)),
        }
    }
    let lacks = systems.into_iter().find(|(_, free, needed, _)| needed > free);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Ok(lacks.map(|(_, free, needed, file)| {
        format!("its disks take {} MiB, and where {file} is to be {} MiB are free", mib(needed), mib(free))
    }))
}

#[cfg(test)]
mod tests;
