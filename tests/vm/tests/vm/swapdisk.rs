//! Swap directories: a disk that fills up, XFS, one that does not fit.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{CreateVm, ErrorCode, VmKind, VmSpec, VmState};
use vm_tests::loopfs::FileSystem;
use vm_tests::toy::ToyOptions;
use vm_tests::{DaemonOptions, Folios, GuestOptions, Lab, MIB, Watch};

const SETTLE_MAX: Duration = Duration::from_secs(300);
/// Left free by the ballast: less than the guest needs.
const ROOM_BYTES: u64 = 40 * MIB;

/// Takes all but `ROOM_BYTES` of a file system.
pub fn fill_up(dir: &Path) -> Result<PathBuf> {
    let stat = rustix::fs::statvfs(dir).context("look at the file system")?;
    let free = stat.f_bavail * stat.f_frsize;
    let path = dir.join("ballast");
    let file = File::create(&path).context("make the ballast")?;
    let len = free.saturating_sub(ROOM_BYTES);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len).context("fill the file system")?;
    Ok(path)
}

/// Leaves nothing of a file system but pieces of 5 KiB, 2 KiB apart.
fn fragment(dir: &Path) -> Result<()> {
    const HOLE: u64 = 5 << 10;
    const APART: u64 = 7 << 10;
    let stat = rustix::fs::statvfs(dir).context("look at the file system")?;
    ensure!(stat.f_bsize == 1 << 10, "blocks of {} bytes", stat.f_bsize);
    let file = File::create(dir.join("ballast")).context("make the ballast")?;
    let len = stat.f_bavail * stat.f_frsize - ROOM_BYTES / 8;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len).context("fill the file system")?;
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    for at in (0..len - APART).step_by(APART as usize) {
        rustix::fs::fallocate(&file, punch, at, HOLE).context("leave a piece free")?;
    }
    Ok(())
}

fn work(name: &str) -> GuestOptions {
    GuestOptions::new(name, "pagoda.work=seq,random pagoda.mib=300").memory("-m 512M").dram("128M")
}

#[test]
fn a_full_disk_stops_the_vm_until_there_is_room() -> Result<()> {
    full_disk("full swap disk", Meanwhile::Nothing)
}

#[test]
fn a_full_disk_and_then_another_daemon() -> Result<()> {
    full_disk("full swap disk, daemon killed", Meanwhile::DaemonKilled)
}

/// What happens while the VM is stalled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    DaemonKilled,
}

fn full_disk(name: &str, meanwhile: Meanwhile) -> Result<()> {
    Lab::run(name, 2, |lab| {
        let small = lab.loop_fs(FileSystem::Ext4, 480)?;
        let daemon = lab.daemon_with(DaemonOptions::new(Folios::Large).swap_dir(&small.path().join("swap")))?;
        let other_daemon = lab.daemon(Folios::Large)?;
        let guest = lab.guest(&daemon, &work("web1"))?;
        // The room was checked when the VM was made; it is taken after that.
        daemon.wait_made("web1")?;
        let ballast = fill_up(small.path())?;
        let other = lab.guest(&other_daemon, &work("web2"))?;

        let stalled = |info: &pagoda_api::VmInfo| matches!(info.state, VmState::Stalled { .. });
        let info = daemon.wait_vm("web1", "stalled", SETTLE_MAX, stalled)?;
        let VmState::Stalled { reason, .. } = &info.state else { unreachable!("waited for it") };
        ensure!(reason.contains("full") && reason.contains("pagoda vm cont"), "{reason}");
        let health = daemon.client().health()?;
        ensure!(!health.ok && health.problems.iter().any(|text| text.contains("web1")), "{health:?}");
        let shown = daemon.run_cli(&["vm", "show", "web1"])?;
        ensure!(String::from_utf8_lossy(&shown.stdout).contains("vm cont"), "{shown:?}");
        let mut qmp = guest.qmp()?;
        vm_tests::wait::until("QEMU is paused", SETTLE_MAX, || Ok((qmp.status()? == "paused").then_some(())))?;

        // Too early: it stalls again, and nothing is lost.
        daemon.client().cont("web1").context("continue on a disk that is still full")?;
        daemon.wait_vm("web1", "stalled again", SETTLE_MAX, stalled)?;

        if meanwhile == Meanwhile::DaemonKilled {
            daemon.kill9()?;
            daemon.start_again()?;
            daemon.wait_vm("web1", "known again", SETTLE_MAX, |info| info.state != VmState::Waiting)?;
        }
        other.finish().context("the VM on the other disk")?;
        std::fs::remove_file(ballast).context("make room")?;
        let output = daemon.run_cli(&["vm", "cont", "web1"])?;
        ensure!(output.status.success(), "{output:?}");
        daemon.wait_vm("web1", "running", SETTLE_MAX, |info| info.state == VmState::Running)?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn reserved_swap_does_not_mind_a_full_disk() -> Result<()> {
    Lab::run("reserved swap", 1, |lab| {
        let small = lab.loop_fs(FileSystem::Ext4, 640)?;
        let daemon = lab.daemon_with(DaemonOptions::new(Folios::Large).swap_dir(&small.path().join("swap")))?;
        let mut options = work("web1");
        options.run_options.push("--reserve-swap".into());
        let guest = lab.guest(&daemon, &options)?;
        guest.wait_ready()?;
        fill_up(small.path())?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

/// The pieces of most pages are apart on the disk: its list of extents names such a page more than once.
#[test]
fn blocks_smaller_than_a_page() -> Result<()> {
    Lab::run("swap in blocks of 1 KiB", 1, |lab| {
        let disk = lab.loop_fs(FileSystem::Ext4, 480)?;
        fragment(disk.path())?;
        let daemon = lab.daemon_with(DaemonOptions::new(Folios::Large).swap_dir(&disk.path().join("swap")))?;
        let options = ToyOptions { name: "toy".into(), memory_mib: 256, dram_mib: 64, threads: 2 };
        let toy = lab.toy(&daemon, &options)?;
        toy.fill()?;
        for _ in 0..2 {
            daemon.kill9()?;
            daemon.start_again()?;
            daemon.wait_vm("toy", "known again", SETTLE_MAX, |info| info.state == VmState::Running)?;
            toy.go("--workload seq --mode read --passes 1").context("every page after a kill")?;
            toy.go("--workload random --mode read-write --passes 1")?;
        }
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

#[test]
fn xfs() -> Result<()> {
    Lab::run("XFS", 1, |lab| {
        let disk = lab.loop_fs(FileSystem::Xfs, 600)?;
        let daemon = lab.daemon_with(DaemonOptions::new(Folios::Large).swap_dir(&disk.path().join("swap")))?;
        let guest = lab.guest(&daemon, &work("web1"))?;
        guest.wait_ready()?;
        let watch = Watch::start(&daemon, "web1");
        guest.finish()?;
        let seen = watch.stop()?;
        seen.ensure_capped()?;
        seen.ensure_paged(30_000)?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn unfit_or_too_small() -> Result<()> {
    Lab::run("unfit swap directories", 0, |lab| {
        // 5: there is no room for the VM.
        for (kind, mib, expected, code) in [(FileSystem::Tmpfs, 600, "in memory", 1), (FileSystem::Ext4, 64, "free", 5)]
        {
            let disk = lab.loop_fs(kind, mib)?;
            let options = DaemonOptions::new(Folios::Small).swap_dir(&disk.path().join("swap"));
            let daemon = lab.daemon_with(options)?;
            let guest = lab.guest(&daemon, &work("web1"))?;
            let status = guest.wait_exit(SETTLE_MAX)?;
            let said = guest.console.tail();
            ensure!(status.code() == Some(code), "{status}: {said}");
            ensure!(said.contains(expected) && said.contains(&*disk.path().to_string_lossy()), "{said}");
            let vms = daemon.client().vms()?.vms;
            ensure!(vms.is_empty(), "half done: {vms:?}");
            for path in daemon.files_of("web1") {
                ensure!(!path.exists(), "{} is left", path.display());
            }
        }
        Ok(())
    })
}

/// To make a swap file can take long. Meanwhile the policy goes on, other VMs are served, and the name is taken.
#[test]
fn a_vm_that_takes_long_to_make_holds_nobody_up() -> Result<()> {
    Lab::run("a disk that stands still while a VM is made", 0, |lab| {
        let disk = lab.loop_fs(FileSystem::Ext4, 600)?;
        let daemon = lab.daemon_with(DaemonOptions::new(Folios::Small).swap_dir(&disk.path().join("swap")))?;
        let client = daemon.client();
        let request = CreateVm {
            name: "web1".into(),
            memory: vec![256 * MIB],
            kind: VmKind::Plain,
            spec: VmSpec { reserve_swap: true, ..VmSpec::default() },
            launch: None,
            outbox: None,
        };
        let reserved = || Ok::<_, anyhow::Error>(client.host()?.policy.reserved_bytes);
        std::thread::scope(|scope| {
            let frozen = disk.freeze()?;
            let making = scope.spawn(|| client.create(&request));
            vm_tests::wait::until("room is reserved for it", SETTLE_MAX, || Ok((reserved()? > 0).then_some(())))?;
            ensure!(client.vms()?.vms.is_empty(), "it is there before it is made");
            let error = client.create(&request).err().context("two VMs of one name")?;
            ensure!(error.code() == Some(ErrorCode::NameTaken) && error.to_string().contains("being made"), "{error}");
            ensure!(!making.is_finished(), "it was made on a disk that stands still");
            drop(frozen);
            making.join().map_err(|_| anyhow::anyhow!("the request panicked"))?.context("make it")?;
            Ok(())
        })?;
        ensure!(client.vms()?.vms.len() == 1, "it was not made");
        client.delete("web1")?;
        ensure!(reserved()? == 0, "what was reserved for it is not free");
        Ok(())
    })
}
