//! What Pagoda costs a VM that does nothing: CPU time of the daemon and the shim, and memory for
//! its tables. The VM is armed and sampled, and has touched all of its memory, of which a sixteenth is in swap.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testkit::daemon::{Daemon, cpu_s_of};
use testkit::results::report::{Bar, Report};

use super::Setup;

const MEMORY_MIB: u64 = 16 * 1024;
const DRAM_MIB: u64 = 15 * 1024;
/// Until all is touched and what is beyond the cap is out.
const SETTLE_MAX: Duration = Duration::from_secs(120);
const SECONDS: f64 = 20.0;
/// One round takes `SECONDS`, so no more than these are made.
const ROUNDS_MAX: usize = 3;
const CPU_PERCENT_MAX: f64 = 1.0;
const TABLES_PERCENT_MAX: f64 = 0.4;
const VM: &str = "bench-idle";

/// Adds the figures of an idle VM.
///
/// # Errors
/// The VM cannot be started, or is not sampled.
pub fn measure(setup: &Setup, daemon: &Daemon, report: &mut Report) -> Result<()> {
    let mut toy = daemon.start_toy(VM, MEMORY_MIB, DRAM_MIB, &[])?;
    toy.map()?;
    toy.touch(&format!("--mib {MEMORY_MIB} --in-order"))?;
    daemon.wait_for_vm(VM, SETTLE_MAX, |info| info.resident_bytes + info.swapped_bytes >= MEMORY_MIB << 20)?;
    let cpu_s = |pid: u32| -> Result<f64> { Ok(daemon.cpu_s()? + cpu_s_of(pid)?) };
    let (mut idle, mut zapped) = (Vec::new(), Vec::new());
    for round in 0..setup.rounds.min(ROUNDS_MAX) {
        eprintln!("idle: round {}", round + 1);
        let (start, cpu, zaps) = (Instant::now(), cpu_s(toy.pid())?, count(daemon, "zapped_chunks")?);
        std::thread::sleep(Duration::from_secs_f64(setup.seconds(SECONDS)));
        let seconds = start.elapsed().as_secs_f64();
        idle.push((cpu_s(toy.pid())? - cpu) / seconds * 100.0);
        zapped.push((count(daemon, "zapped_chunks")? - zaps) as f64 / seconds);
    }
    let info = daemon.vm(VM)?;
    ensure!(info.armed, "the idle VM was not armed: {info:?}");
    let tables = count(daemon, "table_bytes")? as f64 / (MEMORY_MIB << 20) as f64 * 100.0;
    toy.quit()?;
    report.single(
        "CPU of an idle VM of 16 GiB, all touched, daemon and shim",
        "% core",
        &idle,
        Bar::AtMost(CPU_PERCENT_MAX),
    );
    report.single("chunks sampled meanwhile", "1/s", &zapped, Bar::None);
    report.single("memory for the tables of a VM of 16 GiB", "% RAM", &[tables], Bar::AtMost(TABLES_PERCENT_MAX));
    Ok(())
}

fn count(daemon: &Daemon, name: &str) -> Result<u64> {
    let info = daemon.vm(VM)?;
    info.counters.get(name).copied().with_context(|| format!("the daemon has no counter {name}"))
}
