//! Snapshots of VMs that stand still, or whose swap disk does: they are refused by name with nothing changed, taken, or given up. The
//! guest goes on in any case, and can be put back.

use std::fs;
use std::process::Stdio;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmState;
use vm_tests::loopfs::{FileSystem, LoopFs};
use vm_tests::{Daemon, DaemonOptions, Folios, GuestOptions, Lab, MIB, wait};

use super::led::Led;
use crate::moves::processes::wait_for_disk;
use crate::snapshots::command_of;
use crate::squeeze::{relieve, set_pool, squeeze};
use crate::swapdisk::fill_up;

/// For the swap files of a VM and of the one that it is put back to, and no more.
const SWAP_DISK_MIB: u64 = 480;
const GIVEN_UP: i32 = 7;

/// A daemon whose swap is on a disk of its own. The rest of its files, and snapshots, are elsewhere.
fn with_swap_disk(lab: &Lab) -> Result<(Rc<LoopFs>, Rc<Daemon>)> {
    let disk = lab.loop_fs(FileSystem::Ext4, SWAP_DISK_MIB)?;
    let daemon = lab.daemon_with(DaemonOptions::new(Folios::Small).swap_dir(&disk.path().join("swap")))?;
    Ok((disk, daemon))
}

fn options() -> GuestOptions {
    GuestOptions::new("web1", "").control().memory("-m 256M")
}

/// It is put back, ends, and is made by a new QEMU.
fn put_back(led: &mut Led<'_>, name: &str) -> Result<()> {
    led.roll_back(name)?;
    led.control.run("verify")?;
    led.control.run("run random passes=1 write=50")?;
    led.control.run("verify")?;
    led.power_off()?;
    led.restore(name, &[])?;
    led.control.run("verify")?;
    led.power_off()
}

#[test]
fn stalled() -> Result<()> {
    Lab::run("a snapshot of a stalled VM", 1, |lab| {
        let (disk, daemon) = with_swap_disk(lab)?;
        let mut led = Led::start(lab, &daemon, &options().dram("96M"))?;
        led.control.run("fill 60")?;
        led.take("before")?;
        led.wait_durable("before")?;
        let ballast = fill_up(disk.path())?;
        led.control.send("fill 160")?;
        let is_stalled = |led: &Led<'_>| Ok::<_, anyhow::Error>(matches!(led.info()?.state, VmState::Stalled { .. }));
        led.wait_vm("it is stalled", |vm| matches!(vm.state, VmState::Stalled { .. }))?;
        led.is_left_alone("before", "web1 is stalled")?;
        ensure!(is_stalled(&led)? && !led.control.has_said("reply"), "it goes on: {:?}", led.info()?.state);
        fs::remove_file(ballast).context("make room")?;
        command_of(&daemon, &["vm", "cont", "web1"])?;
        led.control.reply().context("the VM that went on")?;
        led.control.run("verify")?;
        led.take("after").context("once it runs")?;
        led.wait_durable("after")?;
        put_back(&mut led, "before")?;
        led.restore("after", &[])?;
        led.control.run("verify")?;
        led.power_off()
    })
}

/// The memory policy has stopped the VM, and cannot let it run again: what would have to leave for swap does not.
#[test]
fn blocked() -> Result<()> {
    Lab::run("a snapshot of a VM that the policy has stopped", 1, |lab| {
        let (disk, daemon) = with_swap_disk(lab)?;
        let mut led = Led::start(lab, &daemon, &options())?;
        led.control.run("fill 120")?;
        led.take("before")?;
        led.wait_durable("before")?;
        let frozen = disk.freeze()?;
        squeeze(&daemon, 30)?;
        set_pool(&daemon, daemon.client().host()?.policy.used_bytes.saturating_sub(60 * MIB))?;
        let says = |what: &str| wait::until(what, wait::HANG, || Ok(daemon.log_tail().contains(what).then_some(())));
        says("blocked: stopped until memory is found")?;
        led.is_left_alone("before", "web1 is blocked by the memory policy")?;
        drop(frozen);
        relieve(&daemon)?;
        says("released: it runs again")?;
        led.control.run("verify").context("the VM that went on")?;
        put_back(&mut led, "before")
    })
}

/// Page-outs do not end, and the guest waits for room. The snapshot is taken or given up once the disk answers again.
#[test]
fn swap_hangs() -> Result<()> {
    Lab::run("a snapshot of a VM whose swap disk hangs", 1, |lab| {
        let (disk, daemon) = with_swap_disk(lab)?;
        let mut led = Led::start(lab, &daemon, &options().dram("96M"))?;
        led.control.run("fill 60")?;
        led.take("before")?;
        led.wait_durable("before")?;
        let frozen = disk.freeze()?;
        led.control.send("fill 150")?;
        wait_for_disk(daemon.pid(), "").context("page-outs hang")?;
        let mut taking = daemon.cli()?;
        taking.args(["vm", "snapshot", "web1", "--name", "hung", "--no-disks"]);
        let mut taking = taking.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().context("take a snapshot")?;
        let [record, ..] = daemon.files_of("web1");
        let is_under_way = || fs::read_to_string(&record).is_ok_and(|text| text.contains("\"operation\""));
        wait::until("it is under way, or over", wait::HANG, || {
            Ok((is_under_way() || taking.try_wait()?.is_some()).then_some(()))
        })?;
        drop(frozen);
        let done = taking.wait_with_output()?;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        println!("taken while swap hangs: {}: {}", done.status, said.trim());
        let is_taken = done.status.success();
        ensure!(is_taken || done.status.code() == Some(GIVEN_UP), "{}: {said}", done.status);
        led.control.reply().context("the VM that went on")?;
        led.control.run("verify")?;
        let names: Vec<String> = daemon.client().snapshots()?.snapshots.into_iter().map(|of| of.name).collect();
        ensure!(names.contains(&"hung".to_owned()) == is_taken, "{names:?}: {said}");
        if is_taken {
            led.wait_durable("hung")?;
            led.roll_back("hung")?;
            // It was in the middle of that.
            led.control.reply()?;
            led.control.run("verify")?;
        }
        put_back(&mut led, "before")
    })
}
