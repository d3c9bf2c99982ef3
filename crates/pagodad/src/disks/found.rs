//! The writable disks of a running QEMU, and whether a snapshot can have their content.
//!
//! A disk counts as one that a snapshot can have if all that is known of it says so. QEMU's list of block nodes has to have no other
//! file that it may write.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_api::types::Launch;
use serde_json::{Value, json};

use super::dir::{Dir, split};
use super::limits::{CHAIN_MAX, DISKS_MAX};
use super::stat::Stat;
use super::user::User;
use super::words::{self, Ways};
use crate::qmp::Monitor;
use crate::record::{FileId, Record};

/// A disk that a snapshot can have.
#[derive(Clone, Debug)]
pub struct Found {
    /// QEMU's name of the device.
    pub device: String,
    /// The node that the device writes to.
    pub node: String,
    /// The disk's name, as an absolute path.
    pub file: PathBuf,
    /// The name, in the same directory, of the file that QEMU writes.
    pub active: String,
    pub active_id: FileId,
    /// What the disk's name is that of.
    pub named_id: FileId,
    /// What the guest takes for the size of the disk.
    pub bytes: u64,
    pub is_direct: bool,
    pub is_flushed: bool,
    pub ways: Ways,
}

/// The disks. An error says which disk a snapshot cannot have, and why.
pub fn find(monitor: &Monitor, record: &Record, launch: &Launch) -> Result<Vec<Found>> {
    find_by(monitor, record, launch, find_one, |found| found)
}

/// The disks, each looked at by `look`, which the caller has made up. An error says which disk is not as it has to be, and why.
pub fn find_by<T: Send>(
    monitor: &Monitor,
    record: &Record,
    launch: &Launch,
    look: impl Fn(&Value, &Record, &Launch) -> Result<T> + Sync,
    found_of: impl Fn(&T) -> &Found,
) -> Result<Vec<T>> {
    let answer = monitor.execute("query-block")?;
    let devices = answer.as_array().context("the list of block devices")?;
    let is_written = |device: &&Value| {
        device.get("inserted").is_some_and(|inserted| inserted.get("ro").and_then(Value::as_bool) != Some(true))
    };
    let written: Vec<&Value> = devices.iter().filter(is_written).collect();
    ensure!(written.len() <= DISKS_MAX, "it has {} writable disks, and there may be {DISKS_MAX}", written.len());
    let of_words = words::refusal(launch).filter(|_| !written.is_empty());
    if let Some(why) = of_words {
        anyhow::bail!("{why}");
    }
    if !written.is_empty() {
        check_user(record.pid.0, User::of(launch))?;
    }
    let found = User::of(launch).act(|| written.iter().map(|device| look(device, record, launch)).collect());
    let found: Vec<T> = found?;
    let disks: Vec<&Found> = found.iter().map(found_of).collect();
    disks.iter().try_for_each(|disk| check_open(disk, record.pid.0))?;
    check_no_other(monitor, launch, &disks)?;
    Ok(found)
}

/// What QEMU calls a device: by its user's name, or by a path in its tree.
fn name_of(device: &Value) -> String {
    let text = |name: &str| device.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    text("device").or_else(|| text("qdev")).unwrap_or("a disk without a name").to_owned()
}

fn find_one(device: &Value, record: &Record, launch: &Launch) -> Result<Found> {
    let disk = Inserted::of(device)?;
    let (name, driver) = (&disk.name, disk.text("drv")?);
    ensure!(
        driver == "qcow2",
        "the disk {name} is {driver}, and only qcow2 can have layers: `qemu-img convert -O qcow2` makes it one when the VM has \
         ended"
    );
    ensure!(!disk.is_encrypted(), "the disk {name} is encrypted, and its overlay would not be");
    let depth = disk.depth()?;
    ensure!(
        depth + 2 <= CHAIN_MAX,
        "the disk {name} has {} files one behind the other, and with an overlay that is more than {CHAIN_MAX}: \
         `qemu-img convert -O qcow2` makes it one file when the VM has ended",
        depth + 1
    );
    disk.found(record, launch)
}

/// What is in a device, as QEMU says it.
pub struct Inserted<'a> {
    /// QEMU's name of the device, or words that stand for it.
    pub name: String,
    said: &'a Value,
}

impl Inserted<'_> {
    /// # Errors
    /// There is nothing in it.
    pub fn of(device: &Value) -> Result<Inserted<'_>> {
        Ok(Inserted { name: name_of(device), said: device.get("inserted").context("what is in a device")? })
    }

    /// # Errors
    /// QEMU does not say it.
    pub fn text(&self, field: &str) -> Result<&str> {
        self.said.get(field).and_then(Value::as_str).with_context(|| format!("{field} of {}", self.name))
    }

    pub fn is_encrypted(&self) -> bool {
        self.said.get("encrypted").and_then(Value::as_bool) == Some(true)
    }

    /// Somebody has QEMU note in bitmaps what is written. Jobs of QEMU's own have some without a name.
    pub fn has_bitmaps(&self) -> bool {
        let bitmaps = self.said.get("dirty-bitmaps").and_then(Value::as_array);
        let is_named = |one: &Value| one.get("name").and_then(Value::as_str).is_some_and(|name| !name.is_empty());
        bitmaps.is_some_and(|all| all.iter().any(is_named))
    }

    /// Files behind the one that is written.
    ///
    /// # Errors
    /// QEMU does not say it.
    pub fn depth(&self) -> Result<u64> {
        let depth = self.said.get("backing_file_depth").and_then(Value::as_u64);
        depth.with_context(|| format!("the chain of {}", self.name))
    }

    /// What its driver says of the image.
    ///
    /// # Errors
    /// QEMU does not say it.
    pub fn image(&self) -> Result<&Value> {
        self.said.get("image").with_context(|| format!("the image of {}", self.name))
    }

    /// Where it is.
    ///
    /// # Errors
    /// It is no file that is known.
    pub fn found(&self, record: &Record, launch: &Launch) -> Result<Found> {
        let Inserted { name, said } = self;
        let node = self.text("node-name")?.to_owned();
        let cache = |field: &str| said.get("cache")?.get(field)?.as_bool();
        let bytes = said.get("image").and_then(|image| image.get("virtual-size")).and_then(Value::as_u64);
        let place = place_of(name, &node, said, record, launch)?;
        let ways = words::ways(launch, place.named_id);
        Ok(Found {
            bytes: bytes.with_context(|| format!("the size of {name}"))?,
            is_direct: cache("direct") == Some(true),
            is_flushed: cache("no-flush") != Some(true),
            device: name.clone(),
            node,
            file: place.file,
            active: place.active,
            active_id: place.active_id,
            named_id: place.named_id,
            ways,
        })
    }
}

struct Place {
    file: PathBuf,
    active: String,
    active_id: FileId,
    named_id: FileId,
}

/// Where the disk is: below an overlay that the record names, or at the name that QEMU says.
fn place_of(device: &str, node: &str, inserted: &Value, record: &Record, launch: &Launch) -> Result<Place> {
    let top = |disk: &crate::record::MovedDisk| disk.tops.iter().find(|top| top.node == node).cloned();
    if let Some((disk, top)) = record.disks.iter().find_map(|disk| Some((disk, top(disk)?))) {
        let file = PathBuf::from(&disk.file);
        let dir = Dir::open(split(&file)?.0)?;
        let named = dir.id(split(&file)?.1)?.filter(|id| disk.noted(disk.was).is(*id));
        let active = dir.id(&top.name)?.filter(|id| disk.noted(top.id).is(*id));
        let (named_id, active_id) = named.zip(active).with_context(|| {
            let (file, top) = (file.display(), dir.join(&top.name));
            format!("files of the disk {device} were moved or replaced: {file} or {}", top.display())
        })?;
        return Ok(Place { file, active: top.name, active_id, named_id });
    }
    let said = inserted.get("file").and_then(Value::as_str).context("the file of a disk")?;
    ensure!(
        !said.starts_with("json:"),
        "the disk {device} is an overlay that Pagoda did not make, as QEMU's -snapshot makes one: what is written to that is lost with \
         QEMU"
    );
    ensure!(!said.contains("://"), "the disk {device} is no file of this host ({said})");
    let file = Path::new(&launch.cwd).join(said.strip_prefix("file:").unwrap_or(said));
    let (parent, name) = split(&file).with_context(|| format!("the disk {device} has no file of its own ({said})"))?;
    ensure!(
        !name.contains(':'),
        "the disk {device}: QEMU takes {name} for an address: rename it to something without `:`"
    );
    let stat = Dir::open(parent).and_then(|dir| dir.stat(name)).with_context(|| format!("the disk {device}"))?;
    let stat = stat.with_context(|| format!("the disk {device}: its file {said} has lost its name"))?;
    let (id, name) = (stat.id, name.to_owned());
    Ok(Place { active: name, active_id: id, named_id: id, file })
}

/// That QEMU runs as the user who is said to have started it: with the rights of that one the daemon is going to act.
fn check_user(pid: u32, user: User) -> Result<()> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("look at whose QEMU is")?;
    ensure!(
        ids(&status, "Uid:") == Some([user.uid; 4]) && ids(&status, "Gid:") == Some([user.gid; 4]),
        "QEMU does not run as user {} and group {}, which started it",
        user.uid,
        user.gid
    );
    Ok(())
}

/// Real, effective, saved and file system's id of a process.
fn ids(status: &str, which: &str) -> Option<[u32; 4]> {
    let line = status.lines().find_map(|line| line.strip_prefix(which))?;
    let ids: Vec<u32> = line.split_ascii_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    ids.try_into().ok()
}

/// The files that a QEMU has open, by its own descriptors.
fn open_files(pid: u32) -> Result<Vec<FileId>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).context("look at the files that QEMU has open")?;
    // A descriptor may be closed meanwhile.
    Ok(entries.flatten().filter_map(|entry| Stat::of_path(&entry.path()).ok()).map(|stat| stat.id).collect())
}

/// That it has each of these open.
///
/// # Errors
/// It has not, or nobody can tell.
pub fn check_all_open(pid: u32, files: &[FileId]) -> Result<()> {
    let open = open_files(pid)?;
    let is_right = files.iter().all(|file| open.contains(file));
    ensure!(is_right, "its QEMU has opened another file than was made for a disk: it was moved or replaced meanwhile");
    Ok(())
}

/// Checks that QEMU has open what the name says.
fn check_open(disk: &Found, pid: u32) -> Result<()> {
    ensure!(
        open_files(pid)?.contains(&disk.active_id),
        "QEMU has another file open than {}: it was moved or replaced",
        disk.file.with_file_name(&disk.active).display()
    );
    Ok(())
}

/// Checks that QEMU may write no file but these.
fn check_no_other(monitor: &Monitor, launch: &Launch, disks: &[&Found]) -> Result<()> {
    let answer = monitor.execute_with("query-named-block-nodes", json!({ "flat": true }))?;
    let nodes = answer.as_array().context("the list of block nodes")?;
    for node in nodes {
        let Some(leaf) = crate::snapshots::written_file(node)? else { continue };
        let path = Path::new(&launch.cwd).join(&leaf);
        let is_known = |disk: &&Found| path == disk.file || path == disk.file.with_file_name(&disk.active);
        let is_old = |disk: &&Found| {
            split(&path).is_ok_and(|(dir, name)| disk.file.parent() == Some(dir) && name.contains(super::overlay::TOP))
        };
        ensure!(
            disks.iter().any(|disk| is_known(disk) || is_old(disk)),
            "QEMU may write {leaf} too, which is no disk of the VM"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of the same name is another file.
    #[test]
    fn a_file_that_was_replaced_is_not_the_one_that_is_open() {
        let path = std::env::temp_dir().join(format!("pagodad-open-{}", std::process::id()));
        std::fs::write(&path, "made").unwrap();
        let made = Stat::of_path(&path).unwrap().id;
        let own = std::process::id();
        assert!(check_all_open(own, &[made]).is_err(), "nobody has opened it");
        let file = std::fs::File::open(&path).unwrap();
        check_all_open(own, &[made]).unwrap();
        std::fs::rename(&path, path.with_extension("away")).unwrap();
        std::fs::write(&path, "somebody's").unwrap();
        let other = Stat::of_path(&path).unwrap().id;
        assert!(check_all_open(own, &[made, other]).is_err(), "it is open by no name of its own");
        drop(file);
        std::fs::remove_file(path.with_extension("away")).unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn another_user_than_is_said_is_noticed() {
        let status = "Name:\tqemu\nUid:\t1000\t1000\t1000\t1000\nGid:\t100\t100\t0\t100\n";
        assert_eq!((ids(status, "Uid:"), ids(status, "Gid:")), (Some([1000; 4]), Some([100, 100, 0, 100])));
        assert_eq!((ids("Uid:\t1\t1\t1\n", "Uid:"), ids("", "Uid:")), (None, None));
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        check_user(std::process::id(), User { uid, gid }).unwrap();
        check_user(std::process::id(), User { uid: uid + 1, gid }).unwrap_err();
        check_user(std::process::id(), User { uid, gid: gid + 1 }).unwrap_err();
    }
}
