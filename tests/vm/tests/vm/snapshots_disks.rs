//! Snapshots with the content of disks. The guest writes blocks again and again and compares each with what its memory remembers of
//! it: memory and disks of different moments are noticed at once.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::SnapshotStage;
use vm_tests::loopfs::FileSystem;
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, Qemu, wait};

use crate::snapshots::{MOMENTS, Moment, become_guest, command_of, take_until, wait_durable};

/// Two requests in flight, long enough for several snapshots. Ends with a check of every block.
const WORK: &str = "pagoda.work=blocks:seconds=900:threads=2:write=70";
const MIB_DISK: &str = "64M";

/// A qcow2 disk of a test, in a directory of its own.
pub struct Disk {
    pub dir: PathBuf,
    name: &'static str,
}

impl Disk {
    pub fn make(lab: &Lab) -> Result<Disk> {
        Disk::make_in(&lab.dir().join("disks"), "preallocation=off", MIB_DISK)
    }

    fn make_in(dir: &Path, how: &str, size: &str) -> Result<Disk> {
        Disk::make_as("disk.qcow2", dir, how, size)
    }

    fn make_as(name: &'static str, dir: &Path, how: &str, size: &str) -> Result<Disk> {
        fs::create_dir_all(dir).context("make a directory for disks")?;
        let disk = Disk { dir: dir.to_owned(), name };
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", how, &disk.path(), size])?;
        Ok(disk)
    }

    fn file(&self) -> PathBuf {
        self.dir.join(self.name)
    }

    pub fn path(&self) -> String {
        self.file().display().to_string()
    }

    pub fn drive(&self, aio: &str) -> String {
        format!(
            "-drive file={},format=qcow2,if=none,id=d0,cache=none,aio={aio} -device virtio-blk-pci,drive=d0",
            self.path().replace(',', ",,")
        )
    }

    fn ino(&self) -> Result<u64> {
        Ok(fs::metadata(self.file()).context("look at the disk")?.ino())
    }

    /// The names beside the disk that have this in them.
    pub fn beside(&self, part: &str) -> Result<Vec<String>> {
        let names = fs::read_dir(&self.dir)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        Ok(names.filter(|name| name.contains(part)).collect())
    }

    /// That an ended VM has left its disk whole, under its name.
    pub fn check_ended(&self) -> Result<()> {
        let tops = self.beside("pagoda-top")?;
        ensure!(tops.is_empty(), "overlays are left: {tops:?}");
        qemu_img(&["check", "-q", &self.path()])?;
        qemu_img(&["info", "--backing-chain", &self.path()])
    }
}

pub fn qemu_img(words: &[&str]) -> Result<()> {
    let done = Command::new("qemu-img").args(words).output().context("start qemu-img")?;
    ensure!(done.status.success(), "qemu-img {words:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

fn options(qemu: Qemu, disk: &Disk, aio: &str) -> GuestOptions {
    GuestOptions::new("web1", WORK).memory("-m 192M").qemu(qemu).dram("128M").more(&disk.drive(aio))
}

fn start(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<Rc<Guest>> {
    let guest = lab.guest(daemon, options)?;
    guest.wait_phase("blocks")?;
    Ok(guest)
}

fn take(daemon: &Daemon, name: &str) -> Result<()> {
    command_of(daemon, &["vm", "snapshot", "web1", "--name", name, "--disks"])
}

/// Waits until the guest has said again how far it is, some times.
fn works_on(guest: &Guest) -> Result<()> {
    let mut from = guest.console.lines(0).len();
    for _ in 0..2 {
        (from, ()) = guest.wait("progress", from, |line| (line.kind == "progress").then_some(()))?;
    }
    Ok(())
}

/// A command that is refused with status 6, and says this.
fn refused(daemon: &Daemon, words: &[&str], says: &str) -> Result<()> {
    let done = daemon.run_cli(words)?;
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    ensure!(done.status.code() == Some(6) && said.contains(says), "{words:?}: {}, {said}", done.status);
    Ok(())
}

fn rolled_back(name: &str, qemu: Qemu, aio: &str) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let options = options(qemu, &disk, aio);
        let first = start(lab, &daemon, &options)?;
        let before = disk.ino()?;
        for name in ["one", "two"] {
            take(&daemon, name)?;
            let snapshot = wait_durable(&daemon, "web1", name)?;
            let layer = snapshot.disks.first().and_then(|disk| disk.layer.clone()).context("it has a layer")?;
            ensure!(disk.dir.join(layer).exists() && snapshot.disks.len() == 1, "{snapshot:?}");
            works_on(&first)?;
        }
        ensure!(disk.ino()? == before, "no file that QEMU has open loses its name");
        let second = become_guest(lab, &daemon, &options, &["vm", "rollback", "web1", "--to", "one"])?;
        first.wait_exit(wait::HANG)?;
        works_on(&second).context("put back to the first")?;
        take(&daemon, "three").context("a snapshot of a VM that was put back")?;
        wait_durable(&daemon, "web1", "three")?;
        let third = become_guest(lab, &daemon, &options, &["vm", "rollback", "web1", "--to", "two"])?;
        second.wait_exit(wait::HANG)?;
        third.finish_soon().context("put back to the second")?;
        daemon.wait_gone("web1")?;
        disk.check_ended()?;
        for name in ["three", "one"] {
            let restore = ["vm", "restore", "web1", "--from", name];
            refused(&daemon, &restore, "has gone on since").with_context(|| name.to_owned())?;
            let aside = disk.beside("pagoda-before")?.len();
            let guest = become_guest(lab, &daemon, &options, &[&restore[..], &["--force"]].concat())?;
            guest.finish_soon().with_context(|| format!("restored from {name}"))?;
            daemon.wait_gone("web1")?;
            disk.check_ended()?;
            ensure!(disk.beside("pagoda-before")?.len() == aside + 1, "what was there is kept");
        }
        Ok(())
    })
}

#[test]
fn memory_and_disks_are_put_back() -> Result<()> {
    rolled_back("disks put back", Qemu::System, "native")
}

#[test]
fn memory_and_disks_are_put_back_qemu_10() -> Result<()> {
    rolled_back("disks put back, QEMU 10", Qemu::Ten, "io_uring")
}

/// The inode of the newest content, as the VM's record has it.
fn newest_ino(daemon: &Daemon) -> Result<u64> {
    let [record, ..] = daemon.files_of("web1");
    let text = fs::read_to_string(&record).context("read the record")?;
    // Behind the last overlay's node comes its id, and then what it is on.
    let top = text.rsplit("\"node\": ").next().and_then(|rest| rest.split("\"ino\": ").nth(1));
    let ino = top.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    ino.and_then(|ino| ino.parse().ok()).with_context(|| text.clone())
}

/// QEMU is killed, and so is the daemon: what the VM wrote last has the disk's name when the next daemon is there.
#[test]
fn the_newest_content_gets_the_name() -> Result<()> {
    Lab::run("newest content", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        // Marks of QEMU's options in a name hide no disk.
        let disk = Disk::make_as("di=sk,1.qcow2", &lab.dir().join("disks"), "preallocation=off", MIB_DISK)?;
        let options = options(Qemu::System, &disk, "threads");
        let guest = start(lab, &daemon, &options)?;
        take(&daemon, "one")?;
        wait_durable(&daemon, "web1", "one")?;
        let newest = newest_ino(&daemon)?;
        ensure!(disk.ino()? != newest, "QEMU lives");
        let mut other = daemon.cli()?;
        other.args(["run", "--name", "web2", "--"]).arg(options.qemu.require()?).args(options.qemu_words(lab.dir())?);
        let other = other.output()?;
        let said = String::from_utf8_lossy(&other.stderr).into_owned();
        ensure!(other.status.code() == Some(6) && said.contains("is that of web1"), "{}: {said}", other.status);
        daemon.kill9()?;
        guest.kill9()?;
        ensure!(disk.ino()? != newest, "no daemon is there");
        daemon.start_again()?;
        // A thread of the daemon's does it, for VMs that run do not wait for it.
        let [record, ..] = daemon.files_of("web1");
        wait::until("its disk is settled", wait::HANG, || Ok((!record.exists()).then_some(())))?;
        daemon.wait_gone("web1")?;
        ensure!(disk.ino()? == newest, "it is what QEMU wrote last");
        disk.check_ended()?;
        let guest =
            lab.guest_alone(&GuestOptions { append: "pagoda.work=idle pagoda.idle=1".into(), ..options.clone() })?;
        guest.finish_soon().context("without Pagoda")?;
        let restored = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one", "--force"])?;
        restored.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

/// A file of the disk was replaced while QEMU had it open: nothing is renamed, it is said, and done when it was put right.
#[test]
fn what_is_not_known_is_left_alone() -> Result<()> {
    Lab::run("disk replaced", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let options = options(Qemu::System, &disk, "native");
        let guest = start(lab, &daemon, &options)?;
        take(&daemon, "one")?;
        wait_durable(&daemon, "web1", "one")?;
        let newest = newest_ino(&daemon)?;
        let away = disk.dir.join("away");
        fs::rename(disk.file(), &away)?;
        fs::write(disk.file(), "somebody's")?;
        guest.kill9()?;
        let is_gone = || Ok(daemon.client().vm("web1").is_err().then_some(()));
        wait::until("the VM is gone", wait::HANG, is_gone)?;
        ensure!(fs::read(disk.file())? == b"somebody's", "it is left alone");
        refused(&daemon, &["vm", "restore", "web1", "--from", "one", "--force"], "is not the file that the VM had")?;
        fs::rename(&away, disk.file())?;
        let restored = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one", "--force"])?;
        restored.finish_soon()?;
        daemon.wait_gone("web1")?;
        let kept = disk.beside("pagoda-before")?;
        let kept = kept.first().context("what QEMU wrote last is kept aside")?;
        ensure!(fs::metadata(disk.dir.join(kept))?.ino() == newest, "{kept}");
        disk.check_ended()
    })
}

/// What a snapshot cannot have is named, and nothing is changed.
#[test]
fn what_cannot_be_had_is_refused() -> Result<()> {
    Lab::run("disks refused", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let raw = disk.dir.join("raw.img");
        fs::File::create(&raw)?.set_len(1 << 20)?;
        let raw = format!("-drive file={},format=raw,if=none,id=d1 -device virtio-blk-pci,drive=d1", raw.display());
        let temporary = disk.drive("threads").replace("if=none", "snapshot=on,if=none");
        let check = |drive: &str, says: &str| -> Result<()> {
            let options = GuestOptions::new("web1", "pagoda.work=idle pagoda.idle=600").memory("-m 192M").more(drive);
            let guest = lab.guest(&daemon, &options)?;
            guest.wait_ready()?;
            daemon.wait_vm("web1", "it is attached", wait::HANG, |vm| vm.pid.is_some())?;
            let files = disk.beside("")?;
            let take = ["vm", "snapshot", "web1", "--name", "none", "--disks"];
            wait::until("it can be asked", wait::HANG, || {
                let said = daemon.run_cli(&take)?;
                Ok((!String::from_utf8_lossy(&said.stderr).contains("try again in a moment")).then_some(()))
            })?;
            refused(&daemon, &take, says)?;
            refused(&daemon, &take, "--no-disks")?;
            if says.contains("raw") {
                refused(&daemon, &take[..5], "it has writable disks").context("it has to be said")?;
            }
            ensure!(disk.beside("")? == files, "{:?}", disk.beside("")?);
            guest.kill9()?;
            daemon.wait_gone("web1")
        };
        check(&format!("{} {raw}", disk.drive("threads")), "the disk d1 is raw")?;
        check(&temporary, "-snapshot")?;
        check(&disk.drive("threads").replace("if=none", "backing.driver=null-co,if=none"), "which files are behind")
            .context("a backing file of the command line")?;
        Ok(())
    })
}

/// The disk of disks is full: the VM runs on, and nothing is left behind.
#[test]
fn a_full_disk_is_refused() -> Result<()> {
    Lab::run("disk full", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let fs_of_disks = lab.loop_fs(FileSystem::Ext4, 64)?;
        let disk = Disk::make_in(&fs_of_disks.path().join("disks"), "preallocation=full", "20M")?;
        let options = options(Qemu::System, &disk, "native");
        let guest = start(lab, &daemon, &options)?;
        works_on(&guest)?;
        let filler = fs_of_disks.path().join("filler");
        let mut file = fs::File::create(&filler)?;
        while std::io::Write::write_all(&mut file, &[7; 4096]).is_ok() {}
        drop(file);
        let done = daemon.run_cli(&["vm", "snapshot", "web1", "--name", "none", "--disks"])?;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        ensure!(done.status.code() == Some(6) && said.contains("No space left"), "{}: {said}", done.status);
        ensure!(disk.beside("pagoda")?.is_empty(), "{:?}", disk.beside("pagoda")?);
        fs::remove_file(&filler)?;
        take(&daemon, "one")?;
        wait_durable(&daemon, "web1", "one")?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        disk.check_ended()
    })
}

/// The daemon dies at each step of taking a snapshot: there is a whole one or none, and the guest and its disk go on.
#[test]
fn killed_while_one_is_taken_with_disks() -> Result<()> {
    Lab::run("killed while disks are taken", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let options = options(Qemu::System, &disk, "native");
        let guest = start(lab, &daemon, &options)?;
        let mut qmp = guest.qmp()?;
        let mut last = None;
        for moment in MOMENTS {
            let name = format!("{moment:?}").to_lowercase();
            let mut taking = take_until(&daemon, &name, moment, &["--disks"])?;
            daemon.kill9()?;
            taking.wait().context("wait for the command")?;
            daemon.start_again()?;
            let running = || Ok((qmp.status()? == "running").then_some(()));
            wait::until("the guest runs", wait::HANG, running).with_context(|| name.clone())?;
            let is_there = daemon.client().snapshots()?.snapshots.iter().any(|of| of.name == name);
            ensure!(is_there || !moment.is_whole(), "{name}: there is no snapshot");
            if is_there {
                wait_durable(&daemon, "web1", &name)?;
                last = Some(name);
            }
            wait::until("nothing is under way", wait::HANG, || Ok(daemon.set_dram_mib("web1", 128).ok()))?;
        }
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        disk.check_ended()?;
        let last = last.context("no snapshot was whole")?;
        let restore = ["vm", "restore", "web1", "--from", &last, "--force"];
        let guest = become_guest(lab, &daemon, &options, &restore)?;
        guest.finish_soon().with_context(|| format!("restored from {last}"))?;
        daemon.wait_gone("web1")?;
        disk.check_ended()
    })
}

/// QEMU dies at a step of taking a snapshot: the disk is whole, and so is a snapshot that there is.
#[test]
fn qemu_killed_while_one_is_taken_with_disks() -> Result<()> {
    Lab::run("QEMU killed while disks are taken", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for moment in [Moment::Prepared, Moment::State, Moment::Manifest, Moment::Begun] {
            let disk = Disk::make_in(&lab.dir().join(format!("{moment:?}")), "preallocation=off", MIB_DISK)?;
            let options = options(Qemu::System, &disk, "native");
            let guest = start(lab, &daemon, &options)?;
            let name = format!("{moment:?}").to_lowercase();
            let mut taking = take_until(&daemon, &name, moment, &["--disks"])?;
            guest.kill9()?;
            taking.wait().context("wait for the command")?;
            daemon.wait_gone("web1").with_context(|| name.clone())?;
            disk.check_ended().with_context(|| name.clone())?;
            let stage = wait::until("it is known what the snapshot is", wait::HANG, || {
                let list = daemon.client().snapshots()?.snapshots;
                let stage = list.iter().find(|of| of.name == name).map(|of| of.stage);
                let is_open = matches!(stage, Some(SnapshotStage::Begun | SnapshotStage::Filled));
                Ok((!is_open).then_some(stage))
            })?;
            eprintln!("{name}: {stage:?}");
            if stage == Some(SnapshotStage::Durable) {
                let restore = ["vm", "restore", "web1", "--from", &name, "--force"];
                let guest = become_guest(lab, &daemon, &options, &restore)?;
                guest.finish_soon().with_context(|| format!("restored from {name}"))?;
                daemon.wait_gone("web1")?;
                disk.check_ended()?;
            }
        }
        Ok(())
    })
}

/// The daemon dies while it puts a VM back: the VM runs where it was, or has ended and can be restored with its disks.
#[test]
fn killed_while_disks_are_put_back() -> Result<()> {
    Lab::run("killed while disks are put back", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let options = options(Qemu::System, &disk, "native");
        let guest = start(lab, &daemon, &options)?;
        take(&daemon, "one")?;
        wait_durable(&daemon, "web1", "one")?;
        works_on(&guest)?;
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        let [record, ..] = daemon.files_of("web1");
        let tops = || disk.beside("pagoda-top").map_or(0, |tops| tops.len());
        for index in 0..3 {
            // An overlay that no record names yet is left behind.
            let left = tops();
            let has_come = || match index {
                0 => tops() > left,
                1 => record.exists(),
                _ => record.exists() && tops() == left,
            };
            let mut command = daemon.cli()?;
            command.args(["vm", "restore", "web1", "--from", "one", "--force"]);
            let mut restoring = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("restore")?;
            // Nothing is waited for in between, so that it is seen.
            while !has_come() {
                ensure!(restoring.try_wait()?.is_none(), "{index}: the moment does not come");
            }
            daemon.kill9()?;
            restoring.kill().and_then(|()| restoring.wait()).context("end the command")?;
            daemon.start_again()?;
            daemon.client().delete("web1").or_else(|_| Ok::<_, anyhow::Error>(()))?;
            daemon.wait_gone("web1").with_context(|| format!("moment {index}"))?;
            qemu_img(&["check", "-q", &disk.path()])?;
        }
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one", "--force"])?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

/// `snapshot rm`, and what it says of the layers.
fn remove(daemon: &Daemon, name: &str) -> Result<String> {
    let done = daemon.run_cli(&["snapshot", "rm", name])?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Nobody can tell for certain that nothing is on top of a layer.
#[test]
fn layers_stay_and_their_size_is_said() -> Result<()> {
    Lab::run("layers stay", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let guest = start(lab, &daemon, &options(Qemu::System, &disk, "native"))?;
        let mut layers = Vec::new();
        for name in ["one", "two"] {
            works_on(&guest)?;
            take(&daemon, name)?;
            let snapshot = wait_durable(&daemon, "web1", name)?;
            let of = snapshot.disks.first().context("it has a disk")?;
            ensure!(of.layer_bytes.is_some_and(|bytes| bytes > 0), "{snapshot:?}");
            layers.push(disk.dir.join(of.layer.as_ref().context("it has a layer")?));
        }
        let listed = daemon.client().snapshots()?.snapshots;
        ensure!(listed.iter().all(|of| of.disks.iter().all(|disk| disk.layer_bytes.is_some())), "{listed:?}");
        for (name, layer) in ["web1/two", "web1/one"].into_iter().zip(layers.iter().rev()) {
            let said = remove(&daemon, name)?;
            ensure!(said.contains(&format!("kept {}", layer.display())) && layer.exists(), "{said}");
        }
        works_on(&guest)?;
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        disk.check_ended()
    })
}

/// The file system of a disk stands still when its VM ends: that VM goes, others end as always, and the disk is put in order later.
#[test]
fn a_disk_that_hangs_holds_up_no_other_vm() -> Result<()> {
    Lab::run("disk hangs", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let fs_of_disks = lab.loop_fs(FileSystem::Ext4, 128)?;
        let disk = Disk::make_in(&fs_of_disks.path().join("disks"), "preallocation=off", "20M")?;
        // Without writes of its own, which would hang too.
        let append = "pagoda.work=idle pagoda.idle=600".into();
        let of_disk = GuestOptions { append, ..options(Qemu::System, &disk, "threads") };
        let guest = lab.guest(&daemon, &of_disk)?;
        guest.wait_ready()?;
        let other = GuestOptions::new("web2", "pagoda.work=idle pagoda.idle=600").memory("-m 192M");
        let other = lab.guest(&daemon, &other)?;
        other.wait_ready()?;
        daemon.wait_vm("web1", "it is attached", wait::HANG, |vm| vm.pid.is_some())?;
        wait::until("it is taken", wait::HANG, || Ok(take(&daemon, "one").ok()))?;
        wait_durable(&daemon, "web1", "one")?;
        let frozen = fs_of_disks.freeze()?;
        guest.kill9()?;
        other.kill9()?;
        daemon.wait_gone("web2")?;
        let is_gone = || Ok(daemon.client().vm("web1").is_err().then_some(()));
        wait::until("it is gone without its disk", wait::HANG, is_gone)?;
        let [record, ..] = daemon.files_of("web1");
        ensure!(record.exists(), "its disk is not forgotten");
        refused(&daemon, &["vm", "restore", "web1", "--from", "one"], "has not answered")?;
        drop(frozen);
        wait::until("its disk is settled", wait::HANG, || Ok((!record.exists()).then_some(())))?;
        disk.check_ended()
    })
}
