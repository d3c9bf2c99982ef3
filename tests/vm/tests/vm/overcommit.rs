//! A guest of 768 MiB in 192 MiB of DRAM: every page right, never more DRAM than promised.

use anyhow::{Context, Result, ensure};
use vm_tests::{Folios, GuestOptions, Lab, MIB, Qemu, Watch};

const MEMORY_MIB: u64 = 768;
const DRAM_MIB: u64 = 192;
/// The guest touches this and its kernel: two and a half times its DRAM.
const TOUCHED_MIB: u64 = 450;
/// What must have left and come back at the least: what does not fit, once.
const PAGED_PAGES_MIN: u64 = (TOUCHED_MIB - DRAM_MIB) * 256;

fn overcommit(name: &str, qemu: Qemu, folios: Folios) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let work = format!("pagoda.work=seq,random,hot pagoda.mib={TOUCHED_MIB}");
        let options = GuestOptions::new("web1", &work)
            .memory(&format!("-m {MEMORY_MIB}M"))
            .dram(&format!("{DRAM_MIB}M"))
            .qemu(qemu);
        let guest = lab.guest(&daemon, &options)?;
        guest.wait_ready()?;
        let watch = Watch::start(&daemon, "web1");
        guest.finish()?;
        let seen = watch.stop()?;
        seen.ensure_capped()?;
        seen.ensure_paged(PAGED_PAGES_MIN)?;
        // The kernel's own account: the cap, and what a page-out batch may hold twice for a moment.
        const SLACK_BYTES: u64 = 8 * MIB;
        let most = seen.ram_bytes_max;
        ensure!(most <= DRAM_MIB * MIB + SLACK_BYTES, "{most} bytes in the RAM files");
        ensure!(seen.swapped_bytes_max >= (TOUCHED_MIB - DRAM_MIB) * MIB, "{} bytes swapped", seen.swapped_bytes_max);
        let last = seen.last.context("the VM was seen")?;
        ensure!(last.armed && last.pinned.is_none() && last.memory_bytes == MEMORY_MIB * MIB, "{last:#?}");
        daemon.wait_gone("web1")
    })
}

#[test]
fn system_qemu_large_folios() -> Result<()> {
    overcommit("overcommit, QEMU of the system, large folios", Qemu::System, Folios::Large)
}

#[test]
fn system_qemu_small_folios() -> Result<()> {
    overcommit("overcommit, QEMU of the system, 4 KiB", Qemu::System, Folios::Small)
}

#[test]
fn qemu_10_large_folios() -> Result<()> {
    overcommit("overcommit, QEMU 10, large folios", Qemu::Ten, Folios::Large)
}

#[test]
fn qemu_10_small_folios() -> Result<()> {
    overcommit("overcommit, QEMU 10, 4 KiB", Qemu::Ten, Folios::Small)
}
