//! The toy VMM: the same promises at native speed, where races are thousands of times more frequent than under TCG.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{VmState, counter};
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, Lab, MIB, Toy, Watch};

const MEMORY_MIB: u64 = 512;
const THREADS: u32 = 4;

fn start(lab: &Lab, daemon: &Daemon, memory_mib: u64, dram_mib: u64) -> Result<Rc<Toy>> {
    let options = ToyOptions { name: "toy".into(), memory_mib, dram_mib, threads: THREADS };
    let toy = lab.toy(daemon, &options)?;
    toy.fill()?;
    Ok(toy)
}

fn pressure(name: &str, dram_mib: u64, folios: Folios) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let toy = start(lab, &daemon, MEMORY_MIB, dram_mib)?;
        let watch = Watch::start(&daemon, "toy");
        for workload in ["seq", "random", "zipf"] {
            for mode in ["read", "read-write"] {
                toy.go(&format!("--workload {workload} --mode {mode} --passes 1"))
                    .with_context(|| format!("{workload} {mode}"))?;
            }
        }
        toy.go("--workload seq --mode read --passes 1").context("every page once more")?;
        let seen = watch.stop()?;
        seen.ensure_capped()?;
        seen.ensure_paged((MEMORY_MIB - dram_mib) * 256)?;
        let most = seen.ram_bytes_max;
        ensure!(most <= (dram_mib + 8) * MIB, "{most} bytes in the RAM file");
        // Every fault is counted under one cause.
        let info = daemon.vm("toy")?;
        let sum: u64 =
            info.counters.iter().filter(|(name, _)| name.starts_with(counter::FAULTS_PREFIX)).map(|(_, n)| n).sum();
        ensure!(sum > 0, "no fault was counted: {:#?}", info.counters);
        if let Some(messages) = info.counters.get("messages") {
            ensure!(*messages == sum, "{messages} messages, but {sum} faults by cause: {:#?}", info.counters);
        }
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

#[test]
fn twice_the_dram_large_folios() -> Result<()> {
    pressure("toy, 2x, large folios", MEMORY_MIB / 2, Folios::Large)
}

#[test]
fn twice_the_dram_small_folios() -> Result<()> {
    pressure("toy, 2x, 4 KiB", MEMORY_MIB / 2, Folios::Small)
}

#[test]
fn four_times_the_dram_large_folios() -> Result<()> {
    pressure("toy, 4x, large folios", MEMORY_MIB / 4, Folios::Large)
}

#[test]
fn four_times_the_dram_small_folios() -> Result<()> {
    pressure("toy, 4x, 4 KiB", MEMORY_MIB / 4, Folios::Small)
}

fn daemon_killed(name: &str, folios: Folios) -> Result<()> {
    const KILLS: u32 = 20;
    /// A daemon serves so many faults before the next kill: kills meet it in the middle of paging.
    const PAGES_IN_BETWEEN: u64 = 500;
    const SERVICE_MAX: Duration = Duration::from_secs(300);
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let toy = start(lab, &daemon, MEMORY_MIB / 2, MEMORY_MIB / 8)?;
        for kill in 0..KILLS {
            let workload = ["random", "seq", "zipf"][kill as usize % 3];
            toy.begin(&format!("--workload {workload} --mode read-write --passes 1"))?;
            daemon.wait_vm("toy", "paging", SERVICE_MAX, |info| {
                info.counters.get(counter::PAGES_IN).is_some_and(|pages| *pages > PAGES_IN_BETWEEN)
            })?;
            daemon.kill9()?;
            daemon.start_again().with_context(|| format!("after kill {kill}"))?;
            daemon.wait_vm("toy", "running", SERVICE_MAX, |info| info.state == VmState::Running)?;
            toy.end().with_context(|| format!("after kill {kill}, {workload}"))?;
        }
        toy.go("--workload seq --mode read --passes 1").context("every page once more")?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

#[test]
fn daemon_killed_large_folios() -> Result<()> {
    daemon_killed("toy, daemon killed, large folios", Folios::Large)
}

#[test]
fn daemon_killed_small_folios() -> Result<()> {
    daemon_killed("toy, daemon killed, 4 KiB", Folios::Small)
}

#[test]
fn without_pressure_it_is_unarmed() -> Result<()> {
    const SETTLE_MAX: Duration = Duration::from_secs(300);
    Lab::run("toy, no pressure", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let toy = start(lab, &daemon, MEMORY_MIB, MEMORY_MIB)?;
        toy.go("--workload random --mode read-write --passes 1")?;
        let info = daemon.vm("toy")?;
        ensure!(!info.armed && info.swapped_bytes == 0, "{info:#?}");
        // Armed by a cap, disarmed again when it is lifted and all is back.
        daemon.set_dram_mib("toy", MEMORY_MIB / 4)?;
        daemon.wait_vm("toy", "armed and within its cap", SETTLE_MAX, |info| {
            info.armed && info.swapped_bytes > 0 && info.resident_bytes <= MEMORY_MIB / 4 * MIB
        })?;
        toy.go("--workload random --mode read-write --passes 1")?;
        daemon.set_dram_mib("toy", MEMORY_MIB)?;
        toy.go("--workload seq --mode read --passes 1")?;
        daemon.wait_vm("toy", "disarmed", SETTLE_MAX, |info| !info.armed && info.swapped_bytes == 0)?;
        toy.go("--workload random --mode read-write --passes 1")?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}
