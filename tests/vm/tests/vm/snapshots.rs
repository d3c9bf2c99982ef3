//! Snapshots of guests that verify their memory: the guest goes on as if nothing had been, and so does each that is made of a
//! snapshot.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{Snapshot, SnapshotName, SnapshotStage};
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu, wait};

/// Until the test has had enough; ends with a check of every word.
pub const WORK: &str = "pagoda.work=random:seconds=900,verify pagoda.mib=260";
const DRAM: &str = "160M";

fn options(name: &str, qemu: Qemu) -> GuestOptions {
    GuestOptions::new(name, WORK).qemu(qemu).dram(DRAM)
}

/// A guest in the middle of its work, some of whose pages are in swap.
pub fn start(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<Rc<Guest>> {
    let guest = lab.guest(daemon, options)?;
    guest.wait_phase("random")?;
    daemon.wait_vm(&options.name, "it was paged", wait::HANG, |vm| vm.swapped_bytes > 32 * MIB)?;
    Ok(guest)
}

pub fn command_of(daemon: &Daemon, words: &[&str]) -> Result<()> {
    let done = daemon.run_cli(words)?;
    ensure!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

pub fn take(daemon: &Daemon, vm: &str, name: &str) -> Result<()> {
    command_of(daemon, &["vm", "snapshot", vm, "--name", name, "--no-disks"])
}

pub fn wait_durable(daemon: &Daemon, vm: &str, name: &str) -> Result<Snapshot> {
    let full_name = SnapshotName::new(vm, name);
    wait::until("the snapshot is durable", wait::HANG, || {
        let snapshot = daemon.client().snapshot(&full_name)?;
        ensure!(snapshot.stage != SnapshotStage::Lost, "{snapshot:?}");
        Ok((snapshot.stage == SnapshotStage::Durable).then_some(snapshot))
    })
}

/// Runs a command that becomes the QEMU of these options.
pub fn become_guest(lab: &Lab, daemon: &Daemon, options: &GuestOptions, words: &[&str]) -> Result<Rc<Guest>> {
    let mut command = daemon.cli()?;
    command.args(words);
    Ok(lab.keep_guest(Guest::spawn(command, lab.dir(), options)?))
}

fn restored(qemu: Qemu, folios: Folios) -> Result<()> {
    Lab::run("restored from a snapshot", 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let options = options("web1", qemu);
        let guest = start(lab, &daemon, &options)?;
        take(&daemon, "web1", "first")?;
        let snapshot = wait_durable(&daemon, "web1", "first")?;
        ensure!(snapshot.running && snapshot.pause_us.is_some_and(|pause| pause > 0), "{snapshot:?}");
        take(&daemon, "web1", "second").context("a second one, when the first is filled")?;
        wait_durable(&daemon, "web1", "second")?;
        for name in ["web1/first", "web1/second"] {
            command_of(&daemon, &["snapshot", "verify", name])?;
        }
        guest.finish_soon().context("the guest goes on")?;
        daemon.wait_gone("web1")?;
        let into_less = ["vm", "restore", "web1", "--from", "first", "--dram", "96M"];
        let guest = become_guest(lab, &daemon, &options, &into_less)?;
        wait::until("it begins in swap", wait::HANG, || {
            Ok(daemon.client().vm("web1").ok().filter(|vm| vm.swapped_bytes > 32 * MIB))
        })?;
        guest.finish_soon().context("restored into less memory")?;
        daemon.wait_gone("web1")?;
        let guest =
            become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "second", "--dram", "512M"])?;
        guest.finish_soon().context("restored without a limit")?;
        daemon.wait_gone("web1")?;
        command_of(&daemon, &["snapshot", "rm", "web1/first"])?;
        ensure!(daemon.client().snapshots()?.snapshots.len() == 1, "one is left");
        Ok(())
    })
}

#[test]
fn restored_into_less_memory() -> Result<()> {
    restored(Qemu::System, Folios::Large)
}

#[test]
fn restored_into_less_memory_qemu_10() -> Result<()> {
    restored(Qemu::Ten, Folios::Small)
}

/// Four snapshots, each of which refers to the one before it. One in the middle goes, then the first, and each that is left is
/// restored.
#[test]
fn a_chain_of_snapshots() -> Result<()> {
    Lab::run("a chain of snapshots", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", WORK).qemu(Qemu::System).dram(DRAM);
        let guest = start(lab, &daemon, &options)?;
        let mut before: Option<Snapshot> = None;
        for name in ["one", "two", "three", "four"] {
            take(&daemon, "web1", name)?;
            let snapshot = wait_durable(&daemon, "web1", name)?;
            ensure!(snapshot.parent == before.as_ref().map(|before| before.id.clone()), "{snapshot:?}");
            ensure!(before.is_none() || snapshot.shared_bytes > 0, "{snapshot:?}");
            println!("{name}: {} MiB, {} MiB shared", snapshot.own_bytes / MIB, snapshot.shared_bytes / MIB);
            before = Some(snapshot);
        }
        command_of(&daemon, &["snapshot", "rm", "web1/two"]).context("while the guest runs")?;
        let of = |name: &str| daemon.client().snapshot(&SnapshotName::new("web1", name));
        ensure!(of("three")?.parent == Some(of("one")?.id), "it refers to what the removed one did");
        guest.finish_soon().context("the guest goes on")?;
        daemon.wait_gone("web1")?;
        let check = |name: &str| {
            command_of(&daemon, &["snapshot", "verify", &format!("web1/{name}")])?;
            let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", name])?;
            guest.finish_soon().with_context(|| format!("restored from {name}"))?;
            daemon.wait_gone("web1")
        };
        ["one", "three"].into_iter().try_for_each(check)?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"])?;
        ensure!(of("three")?.parent.is_none(), "there is none before it");
        check("four")?;
        command_of(&daemon, &["snapshot", "rm", "web1/three"])?;
        command_of(&daemon, &["snapshot", "verify", "web1/four"])?;
        Ok(())
    })
}

/// The daemon dies right behind a snapshot, again and again: the next one goes on filling it, and what the guest changes
/// meanwhile is not in it.
#[test]
fn filled_by_the_next_daemon() -> Result<()> {
    Lab::run("filled by the next daemon", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", WORK).qemu(Qemu::System).dram(DRAM);
        let guest = start(lab, &daemon, &options)?;
        for name in ["one", "two", "three"] {
            take(&daemon, "web1", name)?;
            daemon.kill9()?;
            daemon.start_again()?;
            wait_durable(&daemon, "web1", name)?;
            command_of(&daemon, &["snapshot", "verify", &format!("web1/{name}")])?;
        }
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        for name in ["one", "three"] {
            let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", name])?;
            guest.finish_soon().with_context(|| format!("restored from {name}"))?;
            daemon.wait_gone("web1")?;
        }
        Ok(())
    })
}

/// QEMU is killed right behind a snapshot: the image gets what is missing from what the VM leaves.
#[test]
fn a_snapshot_outlives_its_vm() -> Result<()> {
    Lab::run("a snapshot outlives its VM", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        let guest = start(lab, &daemon, &options)?;
        take(&daemon, "web1", "last")?;
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        wait_durable(&daemon, "web1", "last")?;
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "last"])?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn rolled_back() -> Result<()> {
    Lab::run("rolled back", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        let guest = start(lab, &daemon, &options)?;
        take(&daemon, "web1", "before")?;
        wait_durable(&daemon, "web1", "before")?;
        let again = become_guest(lab, &daemon, &options, &["vm", "rollback", "web1", "--to", "before"])?;
        guest.wait_exit(wait::HANG).context("the VM of before ends")?;
        again.finish_soon().context("it goes on from there")?;
        daemon.wait_gone("web1")
    })
}

fn readers(daemon: &Daemon, name: &str) -> Result<Vec<String>> {
    let (vm, name) = name.split_once('/').context("VM/NAME")?;
    Ok(daemon.client().snapshot(&SnapshotName::new(vm, name))?.readers)
}

/// Pages that a VM has in the image it was made of.
fn in_image(daemon: &Daemon, vm: &str) -> Result<u64> {
    let vm = daemon.vm(vm)?;
    Ok(vm.tiers.iter().find(|tier| tier.name == "image").map_or(0, |tier| tier.pages))
}

/// A snapshot that VMs read is not removed, and it is said which they are.
fn ensure_kept(daemon: &Daemon, name: &str, vms: &[&str]) -> Result<()> {
    ensure!(readers(daemon, name)? == vms, "{name} is read by {:?}, not by {vms:?}", readers(daemon, name)?);
    let done = daemon.run_cli(&["snapshot", "rm", name])?;
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    ensure!(done.status.code() == Some(6), "{name} is removed: {} {said}", done.status);
    ensure!(vms.iter().all(|vm| said.contains(vm)), "{said}");
    let listed = daemon.run_cli(&["snapshot", "ls"])?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    ensure!(listed.contains(&vms.join(", ")), "{listed}");
    Ok(())
}

/// A snapshot of a guest in the middle of its work; the guest has ended.
fn snapshot_of_ended(lab: &Lab, daemon: &Daemon, options: &GuestOptions, name: &str) -> Result<()> {
    let guest = start(lab, daemon, options)?;
    take(daemon, &options.name, name)?;
    wait_durable(daemon, &options.name, name)?;
    guest.kill9()?;
    daemon.wait_gone(&options.name)
}

/// The daemon dies again and again while a guest reads its image: the guest goes on, and each next daemon knows who reads it.
fn killed_while_read(folios: Folios) -> Result<()> {
    const ROUNDS: u32 = 3;
    Lab::run("daemon killed while an image is read", 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let options = GuestOptions::new("web1", WORK).qemu(Qemu::System).dram(DRAM);
        snapshot_of_ended(lab, &daemon, &options, "one")?;
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one", "--dram", "96M"])?;
        Seen::Over.wait(&daemon)?;
        ensure!(in_image(&daemon, "web1")? > 0, "it reads the image");
        for round in 0..ROUNDS {
            ensure_kept(&daemon, "web1/one", &["web1"]).with_context(|| format!("round {round}"))?;
            daemon.kill9()?;
            daemon.start_again()?;
            ensure_kept(&daemon, "web1/one", &["web1"]).with_context(|| format!("round {round}, the next daemon"))?;
            daemon.wait_vm("web1", "it is served", wait::HANG, |vm| vm.tiers.iter().any(|tier| tier.pages > 0))?;
            daemon.wait_paged("web1", 500)?;
        }
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        ensure!(readers(&daemon, "web1/one")?.is_empty(), "it has ended");
        command_of(&daemon, &["snapshot", "verify", "web1/one"])?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"])
    })
}

#[test]
fn the_daemon_is_killed_while_an_image_is_read() -> Result<()> {
    killed_while_read(Folios::Small)
}

#[test]
fn the_daemon_is_killed_while_an_image_is_read_large_folios() -> Result<()> {
    killed_while_read(Folios::Large)
}

/// The next daemon does not find the image: the VM waits and says why, and goes on when the image is there.
#[test]
fn an_image_that_is_away_is_waited_for() -> Result<()> {
    Lab::run("an image that is away", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        snapshot_of_ended(lab, &daemon, &options, "one")?;
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one", "--dram", "96M"])?;
        Seen::Over.wait(&daemon)?;
        let id = daemon.client().snapshot(&SnapshotName::new("web1", "one"))?.id;
        daemon.kill9()?;
        let (image, away) = (daemon.state_dir().join("images").join(&id), daemon.state_dir().join("away"));
        fs::rename(&image, &away).context("move the image away")?;
        daemon.start_again()?;
        let says = |vm: &pagoda_api::VmInfo| vm.waits.as_ref().is_some_and(|why| why.contains(&id));
        daemon.wait_vm("web1", "it says that it waits for its image", wait::HANG, says)?;
        fs::rename(&away, &image).context("bring it back")?;
        daemon.wait_vm("web1", "it is served", wait::HANG, |vm| vm.waits.is_none() && !vm.tiers.is_empty())?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

/// Two VMs of one snapshot, each with memory of its own from there on.
#[test]
fn two_vms_of_one_snapshot() -> Result<()> {
    Lab::run("two VMs of one snapshot", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let first = options("web1", Qemu::System);
        snapshot_of_ended(lab, &daemon, &first, "one")?;
        let second = options("web2", Qemu::System);
        let restore = |options: &GuestOptions, dram: &str| {
            become_guest(lab, &daemon, options, &["vm", "restore", &options.name, "--from", "web1/one", "--dram", dram])
        };
        let (web1, web2) = (restore(&first, "96M")?, restore(&second, "128M")?);
        for vm in ["web1", "web2"] {
            daemon.wait_made(vm)?;
            wait::until("it reads the image", wait::HANG, || Ok((in_image(&daemon, vm)? > 0).then_some(())))?;
        }
        ensure_kept(&daemon, "web1/one", &["web1", "web2"])?;
        web1.finish_soon().context("web1")?;
        daemon.wait_gone("web1")?;
        if readers(&daemon, "web1/one")? == ["web2"] {
            ensure_kept(&daemon, "web1/one", &["web2"])?;
        }
        web2.finish_soon().context("web2")?;
        daemon.wait_gone("web2")?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"])
    })
}

/// What can be done with a VM that reads an image can be done with one that has been made so.
#[test]
fn a_vm_that_reads_an_image_is_a_vm() -> Result<()> {
    Lab::run("a VM that reads an image", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        snapshot_of_ended(lab, &daemon, &options, "one")?;
        let reads = |words: &[&str], before: Option<&Guest>| -> Result<Rc<Guest>> {
            let guest = become_guest(lab, &daemon, &options, words)?;
            before.map_or(Ok(()), |before| before.wait_exit(wait::HANG).map(drop)).context("the VM of before ends")?;
            let of_guest = || Ok(daemon.client().vm("web1").ok().filter(|vm| vm.pid == Some(guest.pid())).map(drop));
            wait::until("it is attached", wait::HANG, of_guest)?;
            ensure!(in_image(&daemon, "web1")? > 0, "it reads the image");
            wait::until("its guest runs", wait::HANG, || Ok(daemon.set_dram_mib("web1", 96).ok()))?;
            Ok(guest)
        };
        let first = reads(&["vm", "restore", "web1", "--from", "one", "--dram", "96M"], None)?;
        take(&daemon, "web1", "two").context("a snapshot of it")?;
        wait_durable(&daemon, "web1", "two")?;
        command_of(&daemon, &["snapshot", "verify", "web1/two"])?;
        let second = reads(&["vm", "rollback", "web1", "--to", "one"], Some(&first)).context("to what it reads")?;
        let third = reads(&["vm", "rollback", "web1", "--to", "two"], Some(&second)).context("to another one")?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"]).context("nobody reads it any more")?;
        ensure_kept(&daemon, "web1/two", &["web1"])?;
        command_of(&daemon, &["vm", "set", "web1", "--dram", "all"])?;
        wait::until("it has all its memory", wait::HANG, || {
            Ok(readers(&daemon, "web1/two")?.is_empty().then_some(()))
        })?;
        command_of(&daemon, &["snapshot", "rm", "web1/two"]).context("while it runs")?;
        daemon.kill9()?;
        daemon.start_again()?;
        daemon.wait_vm("web1", "it is served", wait::HANG, |vm| !vm.tiers.is_empty())?;
        wait::until("it is attached", wait::HANG, || Ok(daemon.set_dram_mib("web1", 128).ok()))?;
        third.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

/// What is to be seen in the record of `web1` when the daemon dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It is put back to a snapshot: its QEMU is about to be stopped and ended.
    Rollback,
    /// It has been ended.
    Nothing,
    /// It was made of a snapshot, and no QEMU is attached.
    Restore,
    /// QEMU is attached, and has not all of its state.
    Loading,
    /// QEMU is attached and the operation has ended: the guest runs.
    Over,
}

impl Seen {
    fn in_record(self, text: Option<&str>) -> bool {
        let has = |what: &str| text.is_some_and(|text| text.contains(what));
        let is_attached = text.is_some_and(|text| Seen::pid(text) != 0);
        match self {
            Seen::Rollback => has("\"rollback\""),
            Seen::Nothing => text.is_none(),
            Seen::Restore => has("\"restore\""),
            Seen::Loading => has("\"restore\"") && is_attached,
            Seen::Over => is_attached && !has("\"operation\""),
        }
    }

    /// The process that a record names.
    fn pid(text: &str) -> u32 {
        let pid = text.split("\"pid\": [").nth(1).and_then(|rest| rest.split(',').next());
        pid.and_then(|pid| pid.trim().parse().ok()).unwrap_or(0)
    }

    /// Comes back at that moment, with the record as it is then; or when it was missed, which lasts for microseconds on a busy host:
    /// when the guest of another process than `before` runs.
    fn wait_or_over(self, daemon: &Daemon, before: u32) -> Result<String> {
        let [record, ..] = daemon.files_of("web1");
        let deadline = Instant::now() + wait::HANG;
        // Nothing is waited for in between, so that it is seen.
        while Instant::now() < deadline {
            let text = fs::read_to_string(&record).ok();
            let is_over = text.as_deref().is_some_and(|text| Seen::pid(text) != before);
            let is_over = is_over && Seen::Over.in_record(text.as_deref());
            if is_over || self.in_record(text.as_deref()) {
                return Ok(text.unwrap_or_default());
            }
        }
        anyhow::bail!("not seen: {self:?}")
    }

    /// The same of a VM that is made.
    pub fn wait(self, daemon: &Daemon) -> Result<String> {
        self.wait_or_over(daemon, 0)
    }
}

/// The daemon dies at moments of a restore: there is a VM whose guest runs and verifies its memory, or there is none and the
/// snapshot is what it was.
#[test]
fn killed_while_one_is_restored() -> Result<()> {
    Lab::run("killed while a VM is restored", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        snapshot_of_ended(lab, &daemon, &options, "one")?;
        let words = ["vm", "restore", "web1", "--from", "one", "--dram", "96M"];
        for seen in [Seen::Restore, Seen::Loading, Seen::Over, Seen::Loading] {
            let guest = become_guest(lab, &daemon, &options, &words)?;
            seen.wait(&daemon)?;
            daemon.kill9()?;
            daemon.start_again()?;
            let is_there = daemon.client().vm("web1").is_ok();
            let ended = guest.wait_exit_soon().with_context(|| format!("{seen:?}"))?;
            let said = guest.console.tail();
            ensure!(!said.contains("PAGODA bad"), "{seen:?}: {said}");
            ensure!(seen != Seen::Over || said.contains("PAGODA result ok"), "{seen:?}: {said}");
            daemon.wait_gone("web1").with_context(|| format!("{seen:?}"))?;
            ensure!(readers(&daemon, "web1/one")?.is_empty(), "{seen:?}: the VM is gone");
            eprintln!("{seen:?}: the next daemon found it: {is_there}, {ended}");
        }
        let guest = become_guest(lab, &daemon, &options, &words)?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"])
    })
}

/// The disk did not take that the guest of a restored VM was let run, and its user has paused it since: it stays paused.
#[test]
fn a_pause_after_a_restore_is_its_users() -> Result<()> {
    Lab::run("a pause after a restore", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        snapshot_of_ended(lab, &daemon, &options, "one")?;
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one", "--dram", "96M"])?;
        let loading = Seen::Loading.wait(&daemon)?;
        ensure!(loading.contains("\"restore\""), "the moment was missed: {loading}");
        let is_over = || Ok(daemon.set_dram_mib("web1", 100).ok());
        wait::until("its guest runs", wait::HANG, is_over)?;
        let mut qmp = guest.qmp()?;
        ensure!(qmp.status()? == "running", "{}", qmp.status()?);
        qmp.execute("stop", serde_json::json!({}))?;
        daemon.kill9()?;
        let [record, ..] = daemon.files_of("web1");
        fs::write(&record, loading).context("the record as it was")?;
        daemon.start_again()?;
        wait::until("the restore is over", wait::HANG, is_over)?;
        ensure!(qmp.status()? == "paused", "{}", qmp.status()?);
        qmp.execute("cont", serde_json::json!({}))?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

/// The daemon dies while it puts a VM back: the VM runs where it was, or has ended and can be restored.
#[test]
fn killed_while_one_is_rolled_back() -> Result<()> {
    Lab::run("killed while a VM is rolled back", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        let mut guest = start(lab, &daemon, &options)?;
        take(&daemon, "web1", "one")?;
        wait_durable(&daemon, "web1", "one")?;
        for seen in [Seen::Rollback, Seen::Nothing, Seen::Rollback, Seen::Restore] {
            let mut command = daemon.cli()?;
            command.args(["vm", "rollback", "web1", "--to", "one"]).stdout(Stdio::null()).stderr(Stdio::null());
            let mut rolling = command.spawn().context("roll back")?;
            seen.wait_or_over(&daemon, guest.pid())?;
            daemon.kill9()?;
            // It has lost its daemon, or is the new QEMU.
            rolling.kill().and_then(|()| rolling.wait()).context("wait for the command")?;
            daemon.start_again()?;
            let runs = wait::until("it runs or has ended", wait::HANG, || match daemon.client().vm("web1") {
                Err(_) => Ok(Some(false)),
                Ok(_) => Ok(daemon.set_dram_mib("web1", 160).ok().map(|()| true)),
            });
            let runs = runs.with_context(|| format!("{seen:?}"))?;
            eprintln!("{seen:?}: it runs: {runs}");
            // It has ended, or was told to. What was seen lasts for microseconds, so the new VM may be there: its QEMU was killed.
            if !runs || seen != Seen::Rollback || guest.wait_exit(Duration::from_secs(1)).is_ok() {
                daemon.wait_gone("web1").with_context(|| format!("{seen:?}"))?;
                guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "one"])?;
                Seen::Over.wait(&daemon)?;
            }
            let status = guest.qmp()?.status()?;
            ensure!(status == "running", "{seen:?}: it is {status}");
        }
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"])
    })
}

/// When the daemon dies, as files tell.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    /// The record says that a snapshot is being taken.
    Noted,
    /// Its directory is there, empty.
    Prepared,
    /// The guest stands still: its state is being written.
    State,
    Manifest,
    /// The image has its name.
    Begun,
    /// The record says no more that a snapshot is being taken.
    Over,
}

pub const MOMENTS: [Moment; 6] =
    [Moment::Noted, Moment::Prepared, Moment::State, Moment::Manifest, Moment::Begun, Moment::Over];

impl Moment {
    /// Whether it has come, and no snapshot is that of `known`.
    fn has_come(self, record: &Path, images: &Path, known: &[OsString]) -> bool {
        let is_noted = || fs::read_to_string(record).is_ok_and(|text| text.contains("\"operation\""));
        let names = || fs::read_dir(images).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let part = || names().find(|name| name.to_string_lossy().ends_with(".part"));
        let has = |file: &str| part().is_some_and(|part| images.join(part).join(file).exists());
        let has_begun = || names().any(|name| !name.to_string_lossy().contains('.') && !known.contains(&name));
        match self {
            Moment::Noted => is_noted(),
            Moment::Prepared => part().is_some(),
            // They last for microseconds, and may be over by now.
            Moment::State => has("state") || has_begun(),
            Moment::Manifest => has("manifest") || has_begun(),
            Moment::Begun => has_begun(),
            Moment::Over => has_begun() && !is_noted(),
        }
    }

    /// The snapshot exists at that moment.
    pub fn is_whole(self) -> bool {
        matches!(self, Moment::Begun | Moment::Over)
    }
}

/// Begins to take a snapshot of `web1` with `more` options, and comes back at that moment.
pub fn take_until(daemon: &Daemon, name: &str, moment: Moment, more: &[&str]) -> Result<Child> {
    let [record, ..] = daemon.files_of("web1");
    let images = record.parent().and_then(Path::parent).context("the state directory")?.join("images");
    let known: Vec<OsString> = fs::read_dir(&images).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    let mut command = daemon.cli()?;
    command.args(["vm", "snapshot", "web1", "--name", name]).args(more);
    let mut taking = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("take a snapshot")?;
    let deadline = Instant::now() + wait::HANG;
    // Nothing is waited for in between, so that it is seen.
    while !moment.has_come(&record, &images, &known) {
        ensure!(Instant::now() < deadline, "{name}: the moment does not come");
        ensure!(taking.try_wait()?.is_none_or(|status| status.success()), "{name}: it was not taken");
    }
    Ok(taking)
}

/// The daemon dies at each step of taking a snapshot: there is a whole one or none, and the guest runs.
#[test]
fn killed_while_one_is_taken() -> Result<()> {
    const ROUNDS: u32 = 2;
    Lab::run("killed while a snapshot is taken", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = options("web1", Qemu::System);
        let guest = start(lab, &daemon, &options)?;
        let mut qmp = guest.qmp()?;
        let mut last = None;
        for (round, moment) in (0..ROUNDS).flat_map(|round| MOMENTS.map(|moment| (round, moment))) {
            let name = format!("{moment:?}-{round}").to_lowercase();
            let mut taking = take_until(&daemon, &name, moment, &["--no-disks"])?;
            daemon.kill9()?;
            taking.wait().context("wait for the command")?;
            daemon.start_again()?;
            let running = || Ok((qmp.status()? == "running").then_some(()));
            wait::until("the guest runs", wait::HANG, running).with_context(|| name.clone())?;
            let is_there = daemon.client().snapshots()?.snapshots.iter().any(|of| of.name == name);
            ensure!(is_there || !moment.is_whole(), "{name}: there is no snapshot");
            if is_there {
                wait_durable(&daemon, "web1", &name)?;
                command_of(&daemon, &["snapshot", "verify", &format!("web1/{name}")])?;
                last = Some(name);
            }
            wait::until("nothing is under way", wait::HANG, || Ok(daemon.set_dram_mib("web1", 160).ok()))?;
        }
        let unreadable = daemon.client().snapshots()?.unreadable;
        ensure!(unreadable.is_empty(), "{unreadable:?}");
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        let last = last.context("no snapshot was whole")?;
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", &last])?;
        guest.finish_soon().with_context(|| format!("restored from {last}"))?;
        daemon.wait_gone("web1")
    })
}

/// QEMU dies at a step of taking a snapshot: the VM is gone, and what there is of the snapshot is whole or said to be lost.
#[test]
fn qemu_killed_while_one_is_taken() -> Result<()> {
    Lab::run("QEMU killed while a snapshot is taken", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for moment in [Moment::Prepared, Moment::State, Moment::Begun] {
            let guest = start(lab, &daemon, &options("web1", Qemu::System))?;
            let name = format!("{moment:?}").to_lowercase();
            let mut taking = take_until(&daemon, &name, moment, &["--no-disks"])?;
            guest.kill9()?;
            taking.wait().context("wait for the command")?;
            daemon.wait_gone("web1").with_context(|| name.clone())?;
            let stage = wait::until("it is known what the snapshot is", wait::HANG, || {
                let list = daemon.client().snapshots()?.snapshots;
                let stage = list.iter().find(|of| of.name == name).map(|of| of.stage);
                let is_open = matches!(stage, Some(SnapshotStage::Begun | SnapshotStage::Filled));
                Ok((!is_open).then_some(stage))
            })?;
            if stage == Some(SnapshotStage::Durable) {
                command_of(&daemon, &["snapshot", "verify", &format!("web1/{name}")])?;
            }
            eprintln!("{name}: {stage:?}");
        }
        Ok(())
    })
}
