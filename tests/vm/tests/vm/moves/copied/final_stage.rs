//! The guest stands still for the rest of its disks, and a process of either host is killed. The VM is where it was, with its disks, or it
//! has ended there; nothing of it is at the destination.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Child;

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{MoveOutcome, MovePhase, VmState};
use vm_tests::loopfs::FileSystem;
use vm_tests::qmp::Qmp;
use vm_tests::{Guest, Lab, MIB, Qemu, wait};

use super::super::faults::UNDECIDED;
use super::super::hosts::Hosts;
use super::super::moving::{begin, end, settled, wait_phase};
use super::super::processes::{Stopped, kill};
use super::super::{DOWNTIME, GIVEN_UP, ensure_moved, power_off};
use super::{begin_slowly, disk, ensure_no_disks, ensure_nothing_left_in_qemu, make_disks, with_content, with_disks};
use crate::snapshots_disks::qemu_img;

/// So slow that its rounds are found.
const HOW: [&str; 5] = ["--copy-disks", "--downtime", "2s", "--bandwidth", "640M"];
/// Whether it could move.
const READY: [&str; 2] = ["--copy-disks", "--dry-run"];
/// Until the test has had enough. The guest begins with a disk that is all zeros, so it does this once.
const WRITE_BLOCKS: &str = "run blocks seconds=900 write=20 threads=2";
/// What `pagoda vm move` ends with if the VM has ended.
const FAILED: i32 = 1;

/// The QEMU at the destination does not answer, so that the rest of the disks does not arrive. It is named, and stands still until the
/// last of what is returned is dropped.
fn stand_still(hosts: &Hosts, guest: &Guest) -> Result<(Child, u32, Stopped)> {
    let moving = begin(&hosts.one, &hosts.other, &HOW)?;
    wait_phase(&hosts.one, MovePhase::Copying)?;
    let mut waiting = hosts.qemus();
    waiting.retain(|pid| *pid != guest.pid());
    let [waiting] = waiting[..] else { bail!("{waiting:?} wait at the destination") };
    let stopped = Stopped::new(waiting)?;
    // QEMU does not answer from now on, until all of its disks is there or nobody waits for that any more.
    wait_phase(&hosts.one, MovePhase::Stopped)?;
    Ok((moving, waiting, stopped))
}

/// It runs where it was, and nothing of the move is left.
fn ensure_stays(hosts: &Hosts, guest: &Guest) -> Result<()> {
    ensure!(settled(hosts)?.index == hosts.one.index, "it runs at the other host");
    wait::until("one QEMU is left", wait::HANG, || Ok((hosts.qemus() == [guest.pid()]).then_some(())))?;
    ensure!(hosts.one.daemon.vm("web1")?.state == VmState::Running, "{:#?}", hosts.one.daemon.vm("web1")?);
    let runs = || Ok((Qmp::connect(&hosts.one.files.join("web1.user"))?.status()? == "running").then_some(()));
    wait::until("its guest runs", wait::HANG, runs)?;
    ensure_nothing_left_in_qemu(&hosts.one)?;
    ensure_no_disks(&hosts.other)?;
    hosts.wait_connected()?;
    // A VM that a daemon has just taken over does not move yet.
    let is_ready = || Ok(hosts.try_move(&hosts.one, &hosts.other, &READY)?.status.success().then_some(()));
    wait::until("it can move", wait::HANG, is_ready)
}

fn killed(qemu: Qemu, first: usize) -> Result<()> {
    Lab::run("killed while a guest stands still for its disks", 1, |lab| {
        let options = with_disks(lab, qemu, first).memory("-m 144M");
        let hosts = Hosts::start(lab, &options)?;
        make_disks(&hosts.one)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 30")?;
        control.send(WRITE_BLOCKS)?;
        control.wait_progress()?;

        let (moving, waiting, stopped) = stand_still(&hosts, &guest)?;
        kill(waiting)?;
        drop(stopped);
        println!("the destination's QEMU: {}", end(moving, &[GIVEN_UP])?);
        ensure_stays(&hosts, &guest).context("the destination's QEMU was killed")?;

        let (moving, _, stopped) = stand_still(&hosts, &guest)?;
        hosts.other.daemon.kill9()?;
        drop(stopped);
        hosts.other.daemon.start_again()?;
        println!("the destination's daemon: {}", end(moving, &[GIVEN_UP])?);
        ensure_stays(&hosts, &guest).context("the destination's daemon was killed")?;

        let (moving, _, stopped) = stand_still(&hosts, &guest)?;
        hosts.one.daemon.kill9()?;
        drop(stopped);
        hosts.one.daemon.start_again()?;
        println!("the source's daemon: {}", end(moving, &[GIVEN_UP, UNDECIDED])?);
        ensure_stays(&hosts, &guest).context("the source's daemon was killed")?;

        control.enough()?;
        control.reply().context("each block had what was written last")?;
        control.run("verify")?;

        let (moving, _, stopped) = stand_still(&hosts, &guest)?;
        kill(guest.pid())?;
        drop(stopped);
        // It may have been given up by then.
        println!("the source's QEMU: {}", end(moving, &[FAILED, GIVEN_UP])?);
        hosts.one.daemon.wait_gone("web1")?;
        ensure_no_disks(&hosts.other)?;
        ensure!(hosts.qemus().is_empty(), "{:?}", hosts.qemus());
        let ended = hosts.one.daemon.client().move_of("web1")?;
        ensure!(matches!(ended.outcome, MoveOutcome::Crashed | MoveOutcome::GivenUp), "{ended:?}");
        // A QEMU that is killed may leave clusters that nothing refers to, and nothing worse.
        qemu_img(&["check", "-q", "-r", "leaks", &disk(&hosts.one, 0).display().to_string()])?;
        ensure!(disk(&hosts.one, 1).metadata()?.len() == super::DISK_MIB * MIB, "the raw disk has another size");
        Ok(())
    })
}

/// The guest writes to the qcow2 disk.
#[test]
fn killed_while_it_stands_still() -> Result<()> {
    killed(Qemu::System, 0)
}

/// The guest writes to the raw disk.
#[test]
fn killed_while_it_stands_still_qemu_10() -> Result<()> {
    killed(Qemu::Ten, 1)
}

/// From its next start on the destination has its VMs' files on this disk.
fn with_files_on(hosts: &Hosts, dir: &Path) -> Result<()> {
    hosts.other.daemon.stop()?;
    fs::remove_dir(&hosts.other.files).context("remove the directory of VMs' files")?;
    symlink(dir, &hosts.other.files).context("link the directory of VMs' files")?;
    hosts.other.daemon.start_again()?;
    hosts.wait_connected()
}

/// Room is looked for before anything is copied. It is taken after that.
#[test]
fn the_destinations_disk_is_full() -> Result<()> {
    Lab::run("the destination's disk is full while disks are copied", 1, |lab| {
        let (options, hosts) = with_content(lab, Qemu::System)?;
        let small = lab.loop_fs(FileSystem::Ext4, 4 * super::DISK_MIB)?;
        with_files_on(&hosts, small.path())?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 30")?;
        control.send(WRITE_BLOCKS)?;
        control.wait_progress()?;

        let moving = begin_slowly(&hosts)?;
        let ballast = small.path().join("ballast");
        let mut file = fs::File::create(&ballast).context("make the ballast")?;
        while std::io::Write::write_all(&mut file, &[7; 1 << 16]).is_ok() {}
        drop(file);
        let said = end(moving, &[GIVEN_UP])?;
        println!("full: {said}");
        ensure!(said.contains("No space left"), "{said}");
        ensure_no_disks(&hosts.other)?;
        fs::remove_file(&ballast)?;
        ensure_stays(&hosts, &guest)?;

        hosts.moves(&hosts.one, &hosts.other, &[&DOWNTIME[..], &["--copy-disks"]].concat()).context("with room")?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.wait_progress().context("it goes on with its disk")?;
        control.enough()?;
        control.reply().context("each block had what was written last")?;
        control.run("verify")?;
        power_off(&hosts.other, control)?;
        qemu_img(&["check", "-q", &disk(&hosts.other, 0).display().to_string()])
    })
}
