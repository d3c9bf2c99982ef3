//! Snapshots of guests that verify their memory: the guest goes on as if nothing had been, and so does each that is made of a
//! snapshot.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_api::{Snapshot, SnapshotName, SnapshotStage};
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu, wait};

/// Long enough for snapshots in the middle; ends with a check of every word.
const WORK: &str = "pagoda.work=random:seconds=12,verify pagoda.mib=260";
/// Long enough for four of them.
const LONG_WORK: &str = "pagoda.work=random:seconds=25,verify pagoda.mib=260";
const DRAM: &str = "160M";

fn options(name: &str, qemu: Qemu) -> GuestOptions {
    GuestOptions::new(name, WORK).qemu(qemu).dram(DRAM)
}

/// A guest in the middle of its work, some of whose pages are in swap.
fn start(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<Rc<Guest>> {
    let guest = lab.guest(daemon, options)?;
    guest.wait_phase("random")?;
    daemon.wait_vm(&options.name, "it was paged", wait::HANG, |vm| vm.swapped_bytes > 32 * MIB)?;
    Ok(guest)
}

fn command_of(daemon: &Daemon, words: &[&str]) -> Result<()> {
    let done = daemon.run_cli(words)?;
    ensure!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

fn take(daemon: &Daemon, vm: &str, name: &str) -> Result<()> {
    command_of(daemon, &["vm", "snapshot", vm, "--name", name, "--no-disks"])
}

fn wait_durable(daemon: &Daemon, vm: &str, name: &str) -> Result<Snapshot> {
    let full_name = SnapshotName::new(vm, name);
    wait::until("the snapshot is durable", wait::HANG, || {
        let snapshot = daemon.client().snapshot(&full_name)?;
        ensure!(snapshot.stage != SnapshotStage::Lost, "{snapshot:?}");
        Ok((snapshot.stage == SnapshotStage::Durable).then_some(snapshot))
    })
}

/// Runs a command that becomes the QEMU of these options.
fn become_guest(lab: &Lab, daemon: &Daemon, options: &GuestOptions, words: &[&str]) -> Result<Rc<Guest>> {
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
        guest.finish().context("the guest goes on")?;
        daemon.wait_gone("web1")?;
        let into_less = ["vm", "restore", "web1", "--from", "first", "--dram", "96M"];
        let guest = become_guest(lab, &daemon, &options, &into_less)?;
        wait::until("it begins in swap", wait::HANG, || {
            Ok(daemon.client().vm("web1").ok().filter(|vm| vm.swapped_bytes > 32 * MIB))
        })?;
        guest.finish().context("restored into less memory")?;
        daemon.wait_gone("web1")?;
        let guest =
            become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", "second", "--dram", "512M"])?;
        guest.finish().context("restored without a limit")?;
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
        let options = GuestOptions::new("web1", LONG_WORK).qemu(Qemu::System).dram(DRAM);
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
        guest.finish().context("the guest goes on")?;
        daemon.wait_gone("web1")?;
        let check = |name: &str| {
            command_of(&daemon, &["snapshot", "verify", &format!("web1/{name}")])?;
            let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", name])?;
            guest.finish().with_context(|| format!("restored from {name}"))?;
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
        let options = options("web1", Qemu::System);
        let guest = start(lab, &daemon, &options)?;
        for name in ["one", "two", "three"] {
            take(&daemon, "web1", name)?;
            daemon.kill9()?;
            daemon.start_again()?;
            wait_durable(&daemon, "web1", name)?;
            command_of(&daemon, &["snapshot", "verify", &format!("web1/{name}")])?;
        }
        guest.finish()?;
        daemon.wait_gone("web1")?;
        for name in ["one", "three"] {
            let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", name])?;
            guest.finish().with_context(|| format!("restored from {name}"))?;
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
        guest.finish()?;
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
        again.finish().context("it goes on from there")?;
        daemon.wait_gone("web1")
    })
}

/// When the daemon dies, as files tell.
#[derive(Clone, Copy, Debug)]
enum Moment {
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

const MOMENTS: [Moment; 6] =
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
    fn is_whole(self) -> bool {
        matches!(self, Moment::Begun | Moment::Over)
    }
}

/// Begins to take a snapshot of `web1`, and comes back at that moment.
fn take_until(daemon: &Daemon, name: &str, moment: Moment) -> Result<Child> {
    let [record, ..] = daemon.files_of("web1");
    let images = record.parent().and_then(Path::parent).context("the state directory")?.join("images");
    let known: Vec<OsString> = fs::read_dir(&images).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    let mut command = daemon.cli()?;
    command.args(["vm", "snapshot", "web1", "--name", name, "--no-disks"]);
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
        let append = "pagoda.work=random:seconds=30,verify pagoda.mib=260".into();
        let options = GuestOptions { append, ..options("web1", Qemu::System) };
        let guest = start(lab, &daemon, &options)?;
        let mut qmp = guest.qmp()?;
        let mut last = None;
        for (round, moment) in (0..ROUNDS).flat_map(|round| MOMENTS.map(|moment| (round, moment))) {
            let name = format!("{moment:?}-{round}").to_lowercase();
            let mut taking = take_until(&daemon, &name, moment)?;
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
        guest.finish()?;
        daemon.wait_gone("web1")?;
        let last = last.context("no snapshot was whole")?;
        let guest = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", &last])?;
        guest.finish().with_context(|| format!("restored from {last}"))?;
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
            let mut taking = take_until(&daemon, &name, moment)?;
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
