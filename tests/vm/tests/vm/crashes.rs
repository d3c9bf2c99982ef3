//! VMs whose QEMU is killed: they are restored by themselves, or listed until their user restores them. And the snapshots by a
//! timetable that they are restored from.

use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::{Crash, Snapshot, VmInfo};
use rustix::process::{Pid, Signal, kill_process};
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, Qemu, wait};

use super::snapshots::{WORK, become_guest, command_of, start, take, wait_durable};

fn options(on_crash: &str, qemu: Qemu) -> GuestOptions {
    let run_options = vec!["--on-crash".to_owned(), on_crash.to_owned()];
    GuestOptions { run_options, ..GuestOptions::new("web1", WORK).qemu(qemu).dram("160M") }
}

/// A guest whose QEMU is watched, with a snapshot that it can be restored from.
fn watched(lab: &Lab, daemon: &Daemon, on_crash: &str, qemu: Qemu) -> Result<Rc<Guest>> {
    let guest = start(lab, daemon, &options(on_crash, qemu))?;
    ensure!(qemu_of(daemon)? != guest.pid(), "QEMU is a child");
    take(daemon, "web1", "first")?;
    wait_durable(daemon, "web1", "first")?;
    Ok(guest)
}

fn qemu_of(daemon: &Daemon) -> Result<u32> {
    daemon.vm("web1")?.pid.context("no process is attached")
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("a process")?;
    kill_process(pid, signal).context("send a signal")
}

/// Waits until another QEMU than this one runs the VM's guest.
fn wait_restored(daemon: &Daemon, before: u32) -> Result<VmInfo> {
    wait::until("it is restored", wait::HANG, || {
        let vm = daemon.client().vm("web1").ok();
        let vm = vm.filter(|vm| vm.pid.is_some_and(|pid| pid != before));
        // Its settings are refused as long as it is being restored.
        Ok(vm.filter(|_| daemon.set_dram_mib("web1", 160).is_ok()))
    })
}

fn ensure_none_crashed(daemon: &Daemon) -> Result<()> {
    let crashed = daemon.client().vms()?.crashed;
    ensure!(crashed.is_empty(), "{crashed:?}");
    Ok(())
}

/// QEMU is killed twice, and the guest goes on from its snapshot each time. The second time the daemon dies as well.
fn restored_by_itself(qemu: Qemu) -> Result<()> {
    Lab::run("restored by itself", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = watched(lab, &daemon, "restore", qemu)?;
        let first = qemu_of(&daemon)?;
        signal(first, Signal::KILL)?;
        let second = wait_restored(&daemon, first)?.pid.context("its process")?;
        ensure_none_crashed(&daemon)?;
        signal(second, Signal::SEGV)?;
        daemon.kill9()?;
        daemon.start_again()?;
        wait_restored(&daemon, second).context("behind the daemon's death")?;
        guest.finish_soon().context("it goes on, and verifies its memory")?;
        let said = guest.console.tail();
        ensure!(said.contains("ended by SIGSEGV; web1 is restored from web1/first (2 of 3"), "{said}");
        daemon.wait_gone("web1")?;
        ensure_none_crashed(&daemon).context("its guest has shut down")
    })
}

#[test]
fn a_killed_qemu_is_restored() -> Result<()> {
    restored_by_itself(Qemu::System)
}

#[test]
fn a_killed_qemu_is_restored_qemu_10() -> Result<()> {
    restored_by_itself(Qemu::Ten)
}

/// Whoever is told to end is over: by a signal to this command or to QEMU, or by the end of this command.
#[test]
fn what_is_told_to_end_is_not_restored() -> Result<()> {
    Lab::run("told to end", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for (who, sent) in [("its parent", Signal::TERM), ("QEMU", Signal::TERM), ("its parent", Signal::KILL)] {
            let guest = watched(lab, &daemon, "restore", Qemu::System)?;
            let pid = if who == "QEMU" { qemu_of(&daemon)? } else { guest.pid() };
            signal(pid, sent)?;
            let status = guest.wait_exit(wait::HANG)?;
            ensure!(status.code() == (sent == Signal::TERM).then_some(0), "{sent:?} to {who}: {status}");
            daemon.wait_gone("web1").with_context(|| format!("{sent:?} to {who}"))?;
            ensure_none_crashed(&daemon).with_context(|| format!("{sent:?} to {who}"))?;
            command_of(&daemon, &["snapshot", "rm", "web1/first"])?;
        }
        Ok(())
    })
}

/// A crash loop ends. What is left is listed until the VM is restored by hand, or forgotten.
#[test]
fn a_crash_loop_ends_and_is_listed() -> Result<()> {
    Lab::run("a crash loop", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = watched(lab, &daemon, "restore=1", Qemu::System)?;
        let first = qemu_of(&daemon)?;
        signal(first, Signal::KILL)?;
        let second = wait_restored(&daemon, first)?.pid.context("its process")?;
        signal(second, Signal::KILL)?;
        let status = guest.wait_exit(wait::HANG)?;
        ensure!(status.code() == Some(128 + 9), "{status}");
        let said = guest.console.tail();
        ensure!(said.contains("it was restored 1 times within 10 min"), "{said}");
        daemon.wait_gone("web1")?;
        for round in ["the daemon that saw it", "the next one"] {
            let crashed = daemon.client().crashed("web1").context(round)?;
            ensure!((crashed.pid, crashed.crash) == (second, Crash::Killed), "{round}: {crashed:?}");
            ensure!(crashed.snapshot.as_ref().is_some_and(|of| of.name == "first"), "{round}: {crashed:?}");
            let listed = String::from_utf8(daemon.run_cli(&["ls"])?.stdout)?;
            ensure!(listed.contains("web1  crashed") && listed.contains("pagoda vm restore web1"), "{listed}");
            let shown = String::from_utf8(daemon.run_cli(&["vm", "show", "web1"])?.stdout)?;
            ensure!(shown.contains("its newest snapshot is first"), "{shown}");
            daemon.kill9()?;
            daemon.start_again()?;
        }
        let again = become_guest(lab, &daemon, &options("", Qemu::System), &["vm", "restore", "web1"])?;
        wait_restored(&daemon, second)?;
        ensure_none_crashed(&daemon).context("it was restored")?;
        let said = again.console.tail();
        ensure!(said.contains("web1 is restored from web1/first, taken "), "{said}");
        again.kill9()?;
        daemon.wait_gone("web1")?;
        ensure!(daemon.client().crashed("web1")?.crash == Crash::Killed, "it is listed again");
        command_of(&daemon, &["vm", "forget", "web1"])?;
        ensure_none_crashed(&daemon)?;
        let done = daemon.run_cli(&["vm", "forget", "web1"])?;
        ensure!(done.status.code() == Some(4), "{}", done.status);
        let done = daemon.run_cli(&["vm", "restore", "web9"])?;
        ensure!(done.status.code() == Some(4), "{}", done.status);
        Ok(())
    })
}

fn automatic(daemon: &Daemon) -> Result<Vec<Snapshot>> {
    let mut all = daemon.client().snapshots()?.snapshots;
    all.retain(|snapshot| snapshot.automatic);
    Ok(all)
}

/// So many more snapshots were taken by the timetable, and no more are left than are to be kept.
fn wait_taken(daemon: &Daemon, keep: usize, times: u32) -> Result<()> {
    for _ in 0..times {
        let before = automatic(daemon)?.last().map(|of| of.id.clone());
        wait::until("a snapshot by the timetable", wait::HANG, || {
            let now = automatic(daemon)?;
            let is_new = now.last().is_some_and(|of| Some(&of.id) != before.as_ref());
            Ok((is_new && now.len() <= keep).then_some(()))
        })?;
    }
    Ok(())
}

/// Snapshots are taken and removed by a timetable, which outlives the daemon and the VM's crash.
#[test]
fn snapshots_by_a_timetable() -> Result<()> {
    Lab::run("snapshots by a timetable", 1, |lab| {
        const KEEP: usize = 2;
        let daemon = lab.daemon(Folios::Small)?;
        // A snapshot cannot have its content.
        let raw = lab.dir().join("raw.img");
        std::fs::File::create(&raw)?.set_len(1 << 20)?;
        let raw = format!("-drive file={},format=raw,if=none,id=d1 -device virtio-blk-pci,drive=d1", raw.display());
        let run = GuestOptions::new("web1", WORK).qemu(Qemu::System).dram("160M").more(&raw);
        let guest = start(lab, &daemon, &run)?;
        take(&daemon, "web1", "mine")?;
        wait_durable(&daemon, "web1", "mine")?;
        let every = ["vm", "autosnapshot", "web1", "--every", "1s", "--keep", "2"];
        command_of(&daemon, &[&every[..], &["--disks"]].concat())?;
        daemon.wait_vm("web1", "a refusal is said", wait::HANG, |vm| {
            vm.autosnapshot
                .as_ref()
                .is_some_and(|of| of.problem.as_ref().is_some_and(|why| why.contains("the disk d1 is raw")))
        })?;
        command_of(&daemon, &[&every[..], &["--no-disks"]].concat())?;
        wait_taken(&daemon, KEEP, 4)?;
        daemon.kill9()?;
        daemon.start_again()?;
        wait_taken(&daemon, KEEP, 2).context("by the next daemon")?;
        daemon.wait_vm("web1", "it is said how it goes", wait::HANG, |vm| {
            vm.autosnapshot.as_ref().is_some_and(|of| of.taken > 0 && of.problem.is_none())
        })?;
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        let left = automatic(&daemon)?;
        ensure!(left.iter().all(|of| of.name.starts_with("auto-")), "{left:?}");
        ensure!(daemon.client().snapshots()?.snapshots.iter().any(|of| of.name == "mine"), "it is its user's");
        let newest = left.last().context("none is left")?;
        wait_durable(&daemon, "web1", &newest.name)?;
        let diff = daemon.client().snapshot_diff(&left[0].full_name(), &newest.name)?;
        ensure!(diff.pages > 0 && diff.bytes < diff.memory_bytes, "{diff:?}");
        let shown = daemon.run_cli(&["snapshot", "diff", "web1/mine", &newest.name, "--json"])?;
        ensure!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
        let again = become_guest(lab, &daemon, &run, &["vm", "restore", "web1"])?;
        wait_restored(&daemon, guest.pid())?;
        wait_taken(&daemon, KEEP + 1, 1).context("of the restored VM, beside the one that it reads")?;
        ensure!(daemon.client().snapshots()?.snapshots.iter().any(|of| of.id == newest.id), "the VM reads it");
        command_of(&daemon, &["vm", "autosnapshot", "web1", "--off"])?;
        ensure!(daemon.vm("web1")?.autosnapshot.is_none(), "it is off");
        again.finish_soon().context("it verifies its memory")?;
        daemon.wait_gone("web1")
    })
}
