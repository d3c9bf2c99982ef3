//! A guest on KVM: what faults is KVM in the kernel, not a thread in user space, and what is zapped are its own tables.
//!
//! The guest is a few instructions that write and verify all memory, see `toy-vmm kvm`. Where this machine's KVM does
//! not run it, each test says so and why.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmState;
use vm_tests::kvm::{KvmToy, runs_here};
use vm_tests::{Folios, Lab, MIB, Watch};

const MEMORY_MIB: u64 = 256;
const PAGES_PER_MIB: u64 = 256;
/// The end of a hang: a pass over the memory takes seconds.
const SERVICE_MAX: Duration = Duration::from_secs(300);
const NAME: &str = "kvm";

fn pressure(name: &str, dram_mib: u64, folios: Folios, vcpus: u32) -> Result<()> {
    if !runs_here()? {
        return Ok(());
    }
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let toy = KvmToy::start(&daemon, NAME, MEMORY_MIB, dram_mib, vcpus)?;
        let watch = Watch::start(&daemon, NAME);
        // What does not fit, several times over: sequential, random and reading passes all come by.
        const TIMES: u64 = 6;
        daemon.wait_paged(NAME, TIMES * (MEMORY_MIB - dram_mib) * PAGES_PER_MIB)?;
        let seen = watch.stop()?;
        let report = toy.finish()?;
        let passes = report["passes"].as_u64().context("number of passes")?;
        ensure!(passes >= 3, "{passes} passes, so none was random: {report}");
        seen.ensure_capped()?;
        daemon.wait_gone(NAME)
    })
}

#[test]
fn half_in_dram_large_folios() -> Result<()> {
    pressure("KVM, half in DRAM, large folios", MEMORY_MIB / 2, Folios::Large, 1)
}

#[test]
fn half_in_dram_small_folios() -> Result<()> {
    pressure("KVM, half in DRAM, 4 KiB", MEMORY_MIB / 2, Folios::Small, 2)
}

#[test]
fn quarter_in_dram_large_folios() -> Result<()> {
    pressure("KVM, a quarter in DRAM, large folios", MEMORY_MIB / 4, Folios::Large, 2)
}

#[test]
fn quarter_in_dram_small_folios() -> Result<()> {
    pressure("KVM, a quarter in DRAM, 4 KiB", MEMORY_MIB / 4, Folios::Small, 1)
}

#[test]
fn squeezed_and_released() -> Result<()> {
    if !runs_here()? {
        return Ok(());
    }
    Lab::run("KVM, squeezed and released", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let toy = KvmToy::start(&daemon, NAME, MEMORY_MIB, MEMORY_MIB, 2)?;
        daemon.wait_vm(NAME, "all in DRAM", SERVICE_MAX, |info| {
            !info.armed && info.resident_bytes >= (MEMORY_MIB - 1) * MIB
        })?;
        for quarters in [2, 1, 3, 1] {
            let dram_mib = MEMORY_MIB / 4 * quarters;
            daemon.set_dram_mib(NAME, dram_mib)?;
            daemon.wait_vm(NAME, "armed and within its cap", SERVICE_MAX, |info| {
                info.armed && info.swapped_bytes > 0 && info.resident_bytes <= dram_mib * MIB
            })?;
            daemon
                .wait_paged(NAME, (MEMORY_MIB - dram_mib) * PAGES_PER_MIB)
                .with_context(|| format!("{quarters} quarters"))?;
        }
        daemon.set_dram_mib(NAME, MEMORY_MIB)?;
        daemon.wait_vm(NAME, "disarmed", SERVICE_MAX, |info| !info.armed && info.swapped_bytes == 0)?;
        toy.finish()?;
        daemon.wait_gone(NAME)
    })
}

fn daemon_killed(name: &str, folios: Folios, vcpus: u32) -> Result<()> {
    const KILLS: u32 = 10;
    /// Ten times a fifth of the memory: kills meet sequential and random, reading and writing passes.
    const PAGES_BETWEEN: u64 = 15_000;
    if !runs_here()? {
        return Ok(());
    }
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let toy = KvmToy::start(&daemon, NAME, MEMORY_MIB, MEMORY_MIB / 4, vcpus)?;
        for kill in 0..KILLS {
            daemon.wait_paged(NAME, PAGES_BETWEEN).with_context(|| format!("before kill {kill}"))?;
            daemon.kill9()?;
            daemon.start_again().with_context(|| format!("after kill {kill}"))?;
            daemon.wait_vm(NAME, "running", SERVICE_MAX, |info| info.state == VmState::Running)?;
        }
        daemon.wait_paged(NAME, PAGES_BETWEEN).context("after the last kill")?;
        toy.finish()?;
        daemon.wait_gone(NAME)
    })
}

#[test]
fn daemon_killed_large_folios() -> Result<()> {
    daemon_killed("KVM, daemon killed, large folios", Folios::Large, 2)
}

#[test]
fn daemon_killed_small_folios() -> Result<()> {
    daemon_killed("KVM, daemon killed, 4 KiB", Folios::Small, 1)
}
