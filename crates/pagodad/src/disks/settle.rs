//! What becomes of the overlays of a VM that has ended: the newest gets the disk's name.
//!
//! May be done again at any time, by whichever daemon there is. What is not as the record says is left alone, and the record with
//! it, until somebody has put it right.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::in_full;
use pagoda_api::types::Launch;

use super::dir::{Dir, split};
use super::qemu_img::QemuImg;
use super::user::User;
use super::words;
use crate::record::{FileId, MovedDisk, Noted, Record, Same, TopFile};

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
    let path = dir.join(&newest.name);
    let (is_newest, was) = (|id| disk.noted(newest.id).is(id), disk.noted(disk.was));
    let is_as_it_was = named.map_or(disk.was == FileId::NONE, |named| was.is(named));
    check_known(disk, newest, named, found)?;
    match (named, found) {
        (Some(named), None) if is_newest(named) => {}
        (named, Some(found)) if is_newest(found) && is_as_it_was => {
            let files = named.map(|_| dir.join(name)).into_iter().chain([path.clone()]);
            for file in files {
                check_unused(&file).with_context(|| format!("somebody may be writing to {}", file.display()))?;
            }
            dir.rename(&newest.name, name).with_context(|| format!("rename {} to {}", path.display(), disk.file))?;
        }
        (Some(named), None) if !was.may_be(named) => {
            tracing::warn!("{} is a file of its user's, and the newest content that the VM wrote is gone", disk.file);
        }
        (_, Some(found)) if is_newest(found) => bail!(
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

/// That each of the two names stands for a file that is known to be the one that it was, or to be another one.
fn check_known(disk: &MovedDisk, newest: &TopFile, named: Option<FileId>, found: Option<FileId>) -> Result<()> {
    let is_open =
        |noted, found: Option<FileId>| found.is_some_and(|found| disk.noted(noted).compare(found) == Same::Unknown);
    let path = Path::new(&disk.file).with_file_name(&newest.name);
    ensure!(
        !is_open(disk.was, named) && !is_open(newest.id, found),
        "nobody can tell whether {} and {} are the files that the VM had: their file system has another device number since the host \
         was restarted, and does not keep when a file was made. If they are, rename the second one to the first yourself: it has what \
         the VM wrote last",
        disk.file,
        path.display()
    );
    Ok(())
}

/// That nobody has written to what overlays are on, and that has one of the disk's names still.
fn check_below(dir: &Dir, name: &str, disk: &MovedDisk) -> Result<()> {
    for below in disk.tops.iter().filter_map(|top| top.below) {
        let older = disk.tops.iter().find(|top| Noted::from(top.id).is(below.id)).map_or(name, |top| &top.name);
        let stat = dir.stat(older)?.filter(|stat| disk.noted(below.id).is(stat.id));
        if stat.is_some_and(|stat| stat.mtime_ns != below.mtime_ns) {
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
        if dir.stat(&top.name).is_ok_and(|stat| stat.is_some_and(|stat| stat.links > 1)) {
            dir.unlink(&top.name, disk.noted(top.id));
        }
    }
}

/// The disk of this VM that a command line names, if there is one: nobody else may have it until it has its name.
pub fn in_use<'a>(record: &'a Record, launch: &Launch) -> Option<&'a MovedDisk> {
    record.disks.iter().find(|disk| {
        let names_it = || Ok(words::name_any(launch, &|id| disk.may_have(id)));
        User::of(launch).act(names_it).unwrap_or(true)
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::disks::Stat;
    use crate::record::Below;

    /// A directory with a disk and its overlays, as a VM leaves them.
    struct Bench {
        dir: PathBuf,
        disk: MovedDisk,
    }

    fn id(path: &Path) -> FileId {
        Stat::of_path(path).unwrap().id
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
            let disk = MovedDisk::new(file.display().to_string(), id(&file), tops);
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
            let Stat { id, mtime_ns, .. } = Stat::of_path(&file).unwrap();
            bench.disk.tops[index].below = Some(Below { id, mtime_ns });
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

    /// As a record looks that was written before a restart of the host, after which the device has another number.
    fn restarted(bench: &mut Bench, births: bool) {
        let change = |id: &mut FileId| {
            id.dev += 1;
            id.born_ns = id.born_ns.filter(|_| births);
        };
        change(&mut bench.disk.was);
        bench.disk.tops.iter_mut().for_each(|top| change(&mut top.id));
        bench.disk.boot_id = Some("another".into());
    }

    #[test]
    fn files_are_known_again_when_the_device_has_another_number() {
        let mut bench = Bench::new("restarted");
        restarted(&mut bench, true);
        for _ in 0..2 {
            bench.settle().unwrap();
            assert_eq!(bench.content("disk").unwrap(), "disk.top-3");
            assert_eq!((bench.content("disk.top-1"), bench.content("disk.top-3")), (None, None));
        }
        let mut bench = Bench::new("restarted-this-life");
        restarted(&mut bench, true);
        bench.disk.boot_id = Some(crate::boot::id().unwrap().to_owned());
        bench.settle().unwrap_err();
        assert_eq!(bench.content("disk").unwrap(), "disk", "it is another device");
    }

    #[test]
    fn what_cannot_be_told_is_left_alone_until_its_user_has_renamed_it() {
        let mut bench = Bench::new("untold");
        restarted(&mut bench, false);
        let why = bench.settle().unwrap_err().to_string();
        assert!(why.contains("nobody can tell") && why.contains("disk.top-3"), "{why}");
        assert_eq!(bench.content("disk").unwrap(), "disk");
        assert!(bench.disk.may_have(id(&bench.dir.join("disk.top-2"))), "nobody else may have it");
        // The newest is not there, and the disk may be the old one: that is no disk of its user's.
        let (newest, away) = (bench.dir.join("disk.top-3"), bench.dir.join("away"));
        std::fs::rename(&newest, &away).unwrap();
        assert!(bench.settle().unwrap_err().to_string().contains("nobody can tell"));
        std::fs::rename(&away, &newest).unwrap();
        std::fs::rename(&newest, bench.dir.join("disk")).unwrap();
        bench.settle().unwrap();
        assert_eq!(bench.content("disk").unwrap(), "disk.top-3");
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
