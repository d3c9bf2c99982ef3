//! The pin rule: a disk read into guest memory that is being evicted never loses data, whatever QEMU uses for I/O.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu, Watch, disk};

const LOW_MIB: u64 = 96;
const HIGH_MIB: u64 = 128;
/// What a VM may have beyond its cap while reads of its own keep page-out waiting (`OVERDRAFT` in the fault machine).
const OVERDRAFT_MIB: u64 = 64;

/// A block of 1 MiB then takes an eighth of a second, in which chunks are zapped, found cold and evicted many times. On
/// a fast disk the reads would be over before: without the pin rule no page was wrong in such a run, and some are now.
const SLOW_BYTES_PER_S: u64 = 8 * MIB;

fn drive(aio: &str) -> Result<String> {
    let image = disk::pattern_disk()?;
    Ok(format!(
        "-drive file={},format=raw,if=none,id=d0,cache=none,aio={aio},readonly=on -device virtio-blk-pci,drive=d0",
        image.display()
    ))
}

fn options(aio: &str, work: &str) -> Result<GuestOptions> {
    let work = format!("pagoda.work={work} pagoda.mib=200 pagoda.disk_mib=64 pagoda.disk_rest_ms=1500");
    Ok(GuestOptions::new("web1", &work).memory("-m 512M").dram(&format!("{HIGH_MIB}M")).more(&drive(aio)?))
}

/// Evicts as hard as possible while `goes_on`: the cap moves down and up as fast as the VM follows.
fn squeeze(daemon: &Daemon, mut goes_on: impl FnMut() -> Result<bool>) -> Result<u32> {
    const SETTLE_MAX: Duration = Duration::from_secs(300);
    let mut rounds = 0;
    while goes_on()? {
        daemon.set_dram_mib("web1", LOW_MIB)?;
        daemon.wait_vm("web1", "below the low cap", SETTLE_MAX, |info| info.resident_bytes <= LOW_MIB << 20)?;
        daemon.set_dram_mib("web1", HIGH_MIB)?;
        rounds += 1;
    }
    Ok(rounds)
}

fn phase_is_done(guest: &Guest, phase: &str) -> bool {
    let done = |text: &String| {
        pagoda_guest::lines::Line::parse(text)
            .is_some_and(|line| line.result().is_some() || (line.kind == "done" && line.get("phase") == Some(phase)))
    };
    guest.console.lines(0).iter().any(done)
}

fn reads_while_evicting(name: &str, qemu: Qemu, aio: &str, folios: Folios) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let image = disk::pattern_disk()?;
        let daemon = lab.daemon(folios)?;
        let throttle = lab.throttle()?;
        let guest = lab.guest(&daemon, &options(aio, "disk+random:seconds=8")?.qemu(qemu))?;
        guest.wait_phase("random")?;
        throttle.add(guest.pid())?;
        throttle.slow_reads(&image, SLOW_BYTES_PER_S)?;
        let watch = Watch::start(&daemon, "web1");
        let rounds = squeeze(&daemon, || Ok(!phase_is_done(&guest, "random")))?;
        guest.finish()?;
        let seen = watch.stop()?;
        let info = seen.last.as_ref().context("the VM was seen")?;
        ensure!(info.pinned.is_none(), "never evicted: {:?}", info.pinned);
        ensure!(rounds > 0 && seen.counter("evicted_chunks") > 200, "{rounds} rounds, {:#?}", seen.counters);
        seen.ensure_paged(10_000)?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn native_system_qemu() -> Result<()> {
    reads_while_evicting("pin rule, aio=native", Qemu::System, "native", Folios::Large)
}

#[test]
fn threads_system_qemu() -> Result<()> {
    reads_while_evicting("pin rule, aio=threads", Qemu::System, "threads", Folios::Large)
}

#[test]
fn io_uring_system_qemu() -> Result<()> {
    reads_while_evicting("pin rule, aio=io_uring", Qemu::System, "io_uring", Folios::Large)
}

#[test]
fn native_qemu_10() -> Result<()> {
    reads_while_evicting("pin rule, aio=native, QEMU 10", Qemu::Ten, "native", Folios::Small)
}

#[test]
fn threads_qemu_10() -> Result<()> {
    reads_while_evicting("pin rule, aio=threads, QEMU 10", Qemu::Ten, "threads", Folios::Small)
}

#[test]
fn io_uring_qemu_10() -> Result<()> {
    reads_while_evicting("pin rule, aio=io_uring, QEMU 10", Qemu::Ten, "io_uring", Folios::Small)
}

/// Reads that hang for half a minute keep their pages pinned all the time. What is evicted meanwhile must not be among
/// them, and the guest gets the right data when the disk is back.
fn reads_stall(name: &str, aio: &str) -> Result<()> {
    /// As the issue has it: longer than any grace period that could be thought of.
    const STALL: Duration = Duration::from_secs(30);
    Lab::run(name, 1, |lab| {
        let image = disk::pattern_disk()?;
        let daemon = lab.daemon(Folios::Large)?;
        let throttle = lab.throttle()?;
        let guest = lab.guest(&daemon, &options(aio, "disk+random:seconds=40")?)?;
        guest.wait_phase("random")?;
        throttle.add(guest.pid())?;
        let watch = Watch::start(&daemon, "web1");
        throttle.stall_reads(&image)?;
        let start = Instant::now();
        let mut low = false;
        // The cap is set again and again, but not waited for: it is out of reach while reads hang.
        vm_tests::wait::until("the disk is back", STALL + vm_tests::wait::HANG, || {
            low = !low;
            daemon.set_dram_mib("web1", if low { LOW_MIB } else { HIGH_MIB })?;
            Ok((start.elapsed() >= STALL).then_some(()))
        })?;
        throttle.release(&image)?;
        guest.finish()?;
        let seen = watch.stop()?;
        let most = seen.resident_bytes_max;
        ensure!(most <= (HIGH_MIB + OVERDRAFT_MIB) * MIB, "{most} bytes resident");
        ensure!(seen.counter("pin_waits") > 0, "page-out never waited for a read: {:#?}", seen.counters);
        daemon.wait_gone("web1")
    })
}

/// It takes 45 s, of which the disk hangs 30.
#[test]
fn disk_stalls_native() -> Result<()> {
    reads_stall("disk stalls, aio=native", "native")
}

/// It takes 45 s, of which the disk hangs 30.
#[test]
fn disk_stalls_io_uring() -> Result<()> {
    reads_stall("disk stalls, aio=io_uring", "io_uring")
}
