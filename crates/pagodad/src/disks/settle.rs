//! What becomes of the overlays of a VM that has ended: the newest gets the disk's name.
//!
//! May be done again at any time, by whichever daemon there is. What is not as the record says is left alone, and the record with
//! it, until somebody has put it right.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_api::in_full;
use pagoda_api::types::Launch;

use super::dir::{Dir, id_of, mtime_ns, split};
use super::qemu_img::QemuImg;
use super::user::User;
use super::words;
use crate::record::{FileId, MovedDisk, Record};

/// The first pause between two attempts, and the longest: each may wait for a file system, and leave a process that does.
const PAUSE: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// VMs that have ended, and whose disks do not have their names. Nobody waits for a disk while this is locked.
#[derive(Debug, Default)]
pub struct Unsettled(Mutex<BTreeMap<String, Ended>>);

/// One of them.
#[derive(Clone, Debug)]
pub struct Ended {
    pub record: Record,
    /// It ended while no daemon ran: its swap file and others are there still.
    pub has_files: bool,
    /// Why its disks could not be settled, if that was tried.
    why: Option<String>,
    is_tried: bool,
    due: Instant,
    pause: Duration,
}

impl Unsettled {
    /// Notes a VM, or what is left of one. `why`: it was tried, and failed.
    pub fn insert(&self, record: Record, has_files: bool, why: Option<String>) {
        let due = Instant::now() + if why.is_some() { PAUSE } else { Duration::ZERO };
        let ended = Ended { record, has_files, why, is_tried: false, due, pause: PAUSE };
        self.lock().insert(ended.record.name.clone(), ended);
    }

    /// All of them.
    pub fn all(&self) -> Vec<Record> {
        self.lock().values().map(|ended| ended.record.clone()).collect()
    }

    /// The names of those that are to be tried now.
    pub fn due(&self) -> Vec<String> {
        let now = Instant::now();
        self.lock().iter().filter(|(_, ended)| ended.due <= now).map(|(name, _)| name.clone()).collect()
    }

    /// Somebody tries one. `None`: there is none of this name.
    ///
    /// # Errors
    /// Somebody else does.
    pub fn begin(&self, name: &str) -> Result<Option<Ended>, String> {
        let mut all = self.lock();
        let Some(ended) = all.get_mut(name) else { return Ok(None) };
        if std::mem::replace(&mut ended.is_tried, true) {
            return Err("they are being put in order".to_owned());
        }
        Ok(Some(ended.clone()))
    }

    /// The attempt has ended, and the VM is forgotten if it `is_over`. Why it is not.
    ///
    /// # Errors
    /// The reason of this or an earlier attempt.
    pub fn end(&self, name: &str, is_over: bool, why: Option<String>) -> Result<(), String> {
        let mut all = self.lock();
        if is_over {
            all.remove(name);
            return Ok(());
        }
        let Some(ended) = all.get_mut(name) else { return Ok(()) };
        (ended.is_tried, ended.due) = (false, Instant::now() + ended.pause);
        ended.pause = (ended.pause * 2).min(PAUSE_MAX);
        ended.why = why.or(ended.why.take());
        Err(ended.why.clone().unwrap_or_else(|| "its record cannot be removed".to_owned()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Ended>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives the disks of a VM their newest content. No QEMU has them open any more, or none has opened them yet.
///
/// # Errors
/// A file is not what the record says, or cannot be reached. The other disks are done.
pub fn settle(launch: Option<&Launch>, disks: &[MovedDisk]) -> Result<()> {
    if disks.is_empty() {
        return Ok(());
    }
    let launch = launch.context("nobody knows whose disks these are")?;
    let img = QemuImg::new(&launch.program, User::of(launch))?;
    let check_unused = |path: &Path| img.check_unused(path);
    let settle_all = || Ok(disks.iter().map(|disk| settle_one(disk, &check_unused)).collect::<Vec<_>>());
    let wrong: Vec<String> = User::of(launch)
        .act(settle_all)?
        .into_iter()
        .filter_map(Result::err)
        .map(|error| in_full(error.as_ref()))
        .collect();
    if wrong.is_empty() { Ok(()) } else { bail!("{}", wrong.join("; ")) }
}

/// The caller acts as the user. `check_unused` says whether anybody may be writing to a file: a QEMU that somebody started meanwhile,
/// without Pagoda or under another name.
fn settle_one(disk: &MovedDisk, check_unused: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    let (parent, name) = split(Path::new(&disk.file))?;
    let dir = Dir::open(parent)?;
    let newest = disk.newest().context("no overlay")?;
    let (named, found) = (dir.id(name)?, dir.id(&newest.name)?);
    check_below(&dir, name, disk)?;
    let had = Some(disk.was).filter(|was| *was != FileId::NONE);
    let path = dir.join(&newest.name);
    match (named, found) {
        (named, None) if named == Some(newest.id) => {}
        (named, Some(found)) if found == newest.id && named == had => {
            let files = named.map(|_| dir.join(name)).into_iter().chain([path.clone()]);
            for file in files {
                check_unused(&file).with_context(|| format!("somebody may be writing to {}", file.display()))?;
            }
            dir.rename(&newest.name, name).with_context(|| format!("rename {} to {}", path.display(), disk.file))?;
        }
        (Some(named), None) if named != disk.was => {
            tracing::warn!("{} is a file of its user's, and the newest content that the VM wrote is gone", disk.file);
        }
        (_, Some(found)) if found == newest.id => bail!(
            "{} is not the file that the VM had, so that what the VM wrote last stays in {}: rename that to where you want it",
            disk.file,
            path.display()
        ),
        _ => bail!(
            "{} should have what the VM wrote last to the disk {}, and is not there or another file: bring it back, or remove what has \
             its name",
            path.display(),
            disk.file
        ),
    }
    dir.sync()?;
    remove_older(&dir, disk);
    Ok(())
}

/// That nobody has written to what overlays are on, and that has one of the disk's names still.
fn check_below(dir: &Dir, name: &str, disk: &MovedDisk) -> Result<()> {
    for below in disk.tops.iter().filter_map(|top| top.below) {
        let older = disk.tops.iter().find(|top| top.id == below.id).map_or(name, |top| &top.name);
        let stat = dir.stat(older)?.filter(|stat| id_of(stat) == below.id);
        if stat.is_some_and(|stat| mtime_ns(&stat) != below.mtime_ns) {
            bail!(
                "{} was written after its snapshot, as by block-commit, so that nobody knows whether it or {} has what the VM wrote last: \
                 put the right one in its place, and remove the other",
                dir.join(older).display(),
                disk.newest().map_or(String::new(), |top| dir.join(&top.name).display().to_string())
            );
        }
    }
    Ok(())
}

/// Overlays that are layers by now have a second name. One that has none was never written.
fn remove_older(dir: &Dir, disk: &MovedDisk) {
    for top in disk.tops.iter().rev().skip(1) {
        if dir.stat(&top.name).is_ok_and(|stat| stat.is_some_and(|stat| stat.st_nlink > 1)) {
            dir.unlink(&top.name, top.id);
        }
    }
}

/// The disk of this VM that a command line names, if there is one: nobody else may have it until it has its name.
pub fn in_use<'a>(record: &'a Record, launch: &Launch) -> Option<&'a MovedDisk> {
    record.disks.iter().find(|disk| {
        let names_it = || Ok(words::name_any(launch, &|id| disk.has(id)));
        User::of(launch).act(names_it).unwrap_or(true)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::PathBuf;

    use super::*;
    use crate::record::{Below, TopFile};

    /// A directory with a disk and its overlays, as a VM leaves them.
    struct Bench {
        dir: PathBuf,
        disk: MovedDisk,
    }

    fn id(path: &Path) -> FileId {
        let stat = std::fs::metadata(path).unwrap();
        FileId { dev: stat.dev(), ino: stat.ino() }
    }

    impl Bench {
        fn new(name: &str) -> Bench {
            let dir = std::env::temp_dir().join(format!("pagodad-settle-{}-{name}", std::process::id()));
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir).unwrap();
            let write = |name: &str| std::fs::write(dir.join(name), name).unwrap();
            ["disk", "disk.top-1", "disk.top-2", "disk.top-3"].iter().for_each(|name| write(name));
            // The second is a layer by now; the third was never written.
            std::fs::hard_link(dir.join("disk"), dir.join("layer-1")).unwrap();
            std::fs::hard_link(dir.join("disk.top-1"), dir.join("layer-2")).unwrap();
            let top =
                |name: &str| TopFile { name: name.into(), node: name.into(), id: id(&dir.join(name)), below: None };
            let tops = ["disk.top-1", "disk.top-2", "disk.top-3"].map(top).to_vec();
            let file = dir.join("disk");
            let disk = MovedDisk { was: id(&file), file: file.display().to_string(), tops };
            Bench { dir, disk }
        }

        fn settle(&self) -> Result<()> {
            settle_one(&self.disk, &|_| Ok(()))
        }

        fn content(&self, name: &str) -> Option<String> {
            std::fs::read_to_string(self.dir.join(name)).ok()
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn the_newest_gets_the_name_once() {
        let bench = Bench::new("newest");
        for _ in 0..2 {
            bench.settle().unwrap();
            assert_eq!(bench.content("disk").unwrap(), "disk.top-3");
            assert_eq!(bench.content("layer-1").unwrap(), "disk");
            assert_eq!(bench.content("layer-2").unwrap(), "disk.top-1");
            assert_eq!((bench.content("disk.top-1"), bench.content("disk.top-3")), (None, None));
            assert!(bench.content("disk.top-2").is_some(), "it has no other name");
        }
    }

    #[test]
    fn what_is_another_file_is_left_alone() {
        let bench = Bench::new("other");
        let disk = bench.dir.join("disk");
        let away = bench.dir.join("away");
        std::fs::rename(&disk, &away).unwrap();
        assert!(
            bench.settle().unwrap_err().to_string().contains("is not the file that the VM had"),
            "nothing has the name"
        );
        std::fs::write(&disk, "somebody's").unwrap();
        assert!(bench.settle().unwrap_err().to_string().contains("rename that to where you want it"));
        assert_eq!(bench.content("disk").unwrap(), "somebody's");
        std::fs::remove_file(&disk).unwrap();
        std::os::unix::fs::symlink(&away, &disk).unwrap();
        assert!(bench.settle().unwrap_err().to_string().contains("no regular file"), "a link to the right file");
        std::fs::rename(&away, &disk).unwrap();
        bench.settle().unwrap();
        assert_eq!(bench.content("disk").unwrap(), "disk.top-3");
    }

    #[test]
    fn what_is_missing_is_waited_for() {
        let bench = Bench::new("missing");
        let (newest, away) = (bench.dir.join("disk.top-3"), bench.dir.join("away"));
        std::fs::rename(&newest, &away).unwrap();
        assert!(bench.settle().unwrap_err().to_string().contains("bring it back"));
        std::fs::write(&newest, "another").unwrap();
        assert!(bench.settle().unwrap_err().to_string().contains("bring it back"));
        assert_eq!(bench.content("disk").unwrap(), "disk");
        std::fs::remove_file(&newest).unwrap();
        // Its user has put a file of his own there, and removed what the VM wrote.
        std::fs::remove_file(bench.dir.join("disk")).unwrap();
        std::fs::write(bench.dir.join("disk"), "somebody's").unwrap();
        bench.settle().unwrap();
        assert_eq!(bench.content("disk").unwrap(), "somebody's");
    }

    #[test]
    fn a_layer_that_was_written_is_not_taken_for_old() {
        for (index, below) in [(0, "disk"), (2, "disk.top-2")] {
            let mut bench = Bench::new(&format!("written-{index}"));
            let file = bench.dir.join(below);
            let stat = rustix::fs::stat(&file).unwrap();
            bench.disk.tops[index].below = Some(Below { id: id(&file), mtime_ns: mtime_ns(&stat) });
            let as_it_was = std::fs::metadata(&file).unwrap().modified().unwrap();
            let set = |to| std::fs::File::options().append(true).open(&file).unwrap().set_modified(to).unwrap();
            set(as_it_was + std::time::Duration::from_nanos(1));
            assert!(bench.settle().unwrap_err().to_string().contains("nobody knows"), "{below}");
            assert_eq!(bench.content("disk").unwrap(), "disk");
            set(as_it_was);
            bench.settle().unwrap();
            bench.settle().unwrap();
            assert_eq!(bench.content("disk").unwrap(), "disk.top-3");
        }
    }

    #[test]
    fn a_disk_that_had_no_file_gets_one() {
        let mut bench = Bench::new("none");
        std::fs::remove_file(bench.dir.join("disk")).unwrap();
        bench.disk.was = FileId::NONE;
        bench.settle().unwrap();
        assert_eq!(bench.content("disk").unwrap(), "disk.top-3");
    }
}
