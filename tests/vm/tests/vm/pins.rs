//! What pins guest memory: every way into it is on the clock, or pins the VM, unless it is known to copy.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vm_tests::{Daemon, Folios, GuestOptions, Lab, LateDisk, Qemu, Watch, disk, late};

/// Ways that the shim follows: the VM is not pinned. Each runs alone, because what is in flight holds back page-out for all.
const FOLLOWED: [&str; 16] = [
    "read",
    "readv",
    "pread",
    "pread-direct",
    "preadv",
    "preadv2",
    "fread",
    "syscall-read",
    "syscall-pread",
    "syscall-pread-direct",
    "syscall-preadv",
    "libaio",
    "libaio-direct",
    "uring-read",
    "uring-readv",
    "uring-direct",
];
/// Ways that it cannot follow: the VM is pinned.
const PINNING: [&str; 4] = ["posix-aio", "raw-uring", "stream-buffer", "vmsplice"];
/// Longer than a pass over all of RAM takes, so that everything else would have been evicted.
const LATE: Duration = Duration::from_millis(1200);

/// Runs a way; whether the program was pinned in the end. `meanwhile` runs before its last look at its memory.
fn fall(daemon: &Daemon, file: &LateDisk, way: &str, meanwhile: impl FnOnce() -> Result<()>) -> Result<bool> {
    let mut command = daemon.cli()?;
    command.args(["run", "--plain", "--name", "victim", "--memory", "192M", "--dram", "64M", "--"]);
    command.arg(late::c_programs()?.join("victim")).arg(file.file()).arg(way);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    pagoda_sys::toy::process::die_with_parent(&mut command);
    let mut victim = command.spawn().context("start the victim")?;
    let mut lines = BufReader::new(victim.stdout.take().context("what the victim says")?).lines();
    let line = lines.next().with_context(|| format!("the victim ended before {way}"))??;
    let found: Value = serde_json::from_str(&line).with_context(|| format!("understand {line}"))?;
    ensure!(found["way"] == way && found["bytes_read"] == 512 << 10, "{line}");
    ensure!(found["wrong_at_once"] == 0 && found["wrong_later"] == 0, "wrong pages: {line}");
    let info = daemon.vm("victim")?;
    let pinned = info.pinned.is_some();
    ensure!(
        pinned || info.counters.get("evicted_chunks").is_some_and(|n| *n > 100),
        "hardly paged: {:#?}",
        info.counters
    );
    meanwhile()?;
    drop(victim.stdin.take());
    let status = vm_tests::wait::until("the end of the victim", vm_tests::wait::HANG, || Ok(victim.try_wait()?));
    // Without a daemon that knows it, it would wait for its pages for ever.
    let _ = victim.kill();
    let status = status?;
    ensure!(status.success(), "the victim ended with {status}");
    daemon.wait_gone("victim")?;
    Ok(pinned)
}

#[test]
fn every_way_into_ram_is_followed_or_pins() -> Result<()> {
    Lab::run("ways into RAM", 1, |lab| {
        let file = LateDisk::mount(&lab.dir().join("late"), &late::c_programs()?.join("victim.img"), LATE)?;
        let daemon = lab.daemon(Folios::Large)?;
        for way in FOLLOWED {
            ensure!(!fall(&daemon, &file, way, || Ok(()))?, "{way} is followed, so it needs no pin");
        }
        for way in PINNING {
            ensure!(fall(&daemon, &file, way, || Ok(()))?, "{way} cannot be followed, so it has to pin");
        }
        Ok(())
    })
}

/// A program whose name in /proc is no text, and reads like a zombie's, is found again by the next daemon, with all it has
/// in swap.
#[test]
fn a_name_that_is_no_text_survives_its_daemon() -> Result<()> {
    Lab::run("a name that is no text", 1, |lab| {
        let file = LateDisk::mount(&lab.dir().join("late"), &late::c_programs()?.join("victim.img"), Duration::ZERO)?;
        let daemon = lab.daemon(Folios::Large)?;
        let replaced = || {
            for _ in 0..5 {
                daemon.kill9()?;
                daemon.start_again()?;
                let running = |info: &pagoda_api::VmInfo| info.state == pagoda_api::VmState::Running;
                daemon.wait_vm("victim", "running", vm_tests::wait::HANG, running)?;
            }
            Ok(())
        };
        fall(&daemon, &file, "pread", replaced).map(drop)
    })
}

/// A guest that reads and verifies a disk on such a file while its memory is evicted.
fn guest_on_a_late_disk(qemu: Qemu, cache: &str, folios: Folios) -> Result<()> {
    const DELAY: Duration = Duration::from_millis(60);
    Lab::run(&format!("late disk, cache={cache}"), 1, |lab| {
        let file = LateDisk::mount(&lab.dir().join("late"), &disk::pattern_disk()?, DELAY)?;
        let daemon = lab.daemon(folios)?;
        let drive = format!(
            "-drive file={},format=raw,if=none,id=d0,cache={cache},aio=threads,readonly=on -device virtio-blk-pci,drive=d0",
            file.file().display()
        );
        let work = "pagoda.work=disk+random:seconds=8 pagoda.mib=200 pagoda.disk_mib=64 pagoda.disk_rest_ms=1500";
        let options = GuestOptions::new("web1", work).memory("-m 512M").dram("96M").more(&drive).qemu(qemu);
        let guest = lab.guest(&daemon, &options)?;
        guest.wait_phase("random")?;
        let watch = Watch::start(&daemon, "web1");
        guest.finish()?;
        let seen = watch.stop()?;
        let info = seen.last.as_ref().context("the VM was seen")?;
        ensure!(info.pinned.is_none(), "a disk's reads are followed, and need no pin: {:?}", info.pinned);
        seen.ensure_paged(10_000)?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn late_disk_writeback() -> Result<()> {
    guest_on_a_late_disk(Qemu::System, "writeback", Folios::Small)
}

#[test]
fn late_disk_writethrough_qemu_10() -> Result<()> {
    guest_on_a_late_disk(Qemu::Ten, "writethrough", Folios::Small)
}

#[test]
fn late_disk_none_qemu_10() -> Result<()> {
    guest_on_a_late_disk(Qemu::Ten, "none", Folios::Large)
}
