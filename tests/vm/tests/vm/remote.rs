//! A remote tier: swap blocks in other machines' memory. Every page is right, or the VM stands still and says why.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{RemotePool, VmInfo, VmState, counter};
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, GuestOptions, Lab, MIB, Qemu, Toy};

pub const MEMORY_MIB: u64 = 256;
pub const DRAM_MIB: u64 = 64;
const HIGH_MIB: u64 = 128;
/// Slabs of 64 MiB for all of it.
pub const SLABS: u64 = 4;
pub const SETTLE_MAX: Duration = Duration::from_secs(300);

pub fn start(lab: &Lab, daemon: &Daemon, remote: &str) -> Result<Rc<Toy>> {
    let options = ToyOptions { name: "toy".into(), memory_mib: MEMORY_MIB, dram_mib: DRAM_MIB, threads: 4 };
    let toy = lab.toy_with(daemon, &options, &["--far", remote])?;
    toy.fill()?;
    Ok(toy)
}

pub fn count(info: &VmInfo, name: &str) -> u64 {
    info.counters.get(name).copied().unwrap_or(0)
}

/// Every page once, in several orders.
pub fn exercise(toy: &Toy) -> Result<()> {
    for workload in ["seq", "random", "zipf"] {
        toy.go(&format!("--workload {workload} --mode read-write --passes 1")).context(workload)?;
    }
    toy.go("--workload seq --mode read --passes 1").context("every page once more").map(drop)
}

/// What the daemon says of a VM whose only server has all that it should, and answers.
fn check_numbers(info: &VmInfo) -> Result<()> {
    let pool = info.remote.as_ref().and_then(|remote| remote.pool.as_ref()).context("nothing is known of the pool")?;
    ensure!(pool.held_bytes == MEMORY_MIB * MIB && pool.short_bytes == 0 && pool.lost_slabs == 0, "{pool:#?}");
    ensure!(pool.servers.len() == 1 && pool.servers[0].up && pool.servers[0].round_trip_us > 0, "{pool:#?}");
    let timed = |op: &str, class: &str| pool.latency.iter().any(|row| row.op == op && row.class == class);
    ensure!(timed("read", "demand") && timed("read", "prefetch") && timed("write", "eviction"), "{pool:#?}");
    ensure!(pool.requests >= count(info, "remote_in_pages") + count(info, "remote_out_pages"), "{pool:#?}");
    Ok(())
}

fn all_in_the_pool(name: &str, folios: Folios) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let pool = lab.pool(&[SLABS])?;
        let daemon = lab.daemon_with(pool.daemon_options(folios))?;
        let toy = start(lab, &daemon, "pool:")?;
        exercise(&toy)?;
        let info = daemon.vm("toy")?;
        let there = (MEMORY_MIB - DRAM_MIB) * 256;
        ensure!(count(&info, "remote_in_pages") >= there && count(&info, "remote_pages") + 4096 >= there, "{info:#?}");
        // A busy machine may make the pool late now and then; that is what the swap file is for.
        ensure!(count(&info, "remote_declined_pages") * 20 < count(&info, "remote_out_pages"), "{info:#?}");
        ensure!(info.swap_used_bytes < 32 * MIB, "{info:#?}");
        ensure!(pool.free_slabs()? == 0, "slabs are free");
        check_numbers(&info)?;
        toy.quit()?;
        daemon.wait_gone("toy")?;
        pool.wait_free_slabs(SLABS)
    })
}

#[test]
fn all_in_the_pool_large_folios() -> Result<()> {
    all_in_the_pool("remote, large folios", Folios::Large)
}

#[test]
fn all_in_the_pool_small_folios() -> Result<()> {
    all_in_the_pool("remote, 4 KiB", Folios::Small)
}

#[test]
fn what_the_pool_has_no_room_for_is_swapped() -> Result<()> {
    Lab::run("remote, full pool", 1, |lab| {
        let pool = lab.pool(&[1])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:")?;
        exercise(&toy)?;
        let info = daemon.vm("toy")?;
        ensure!(count(&info, "remote_in_pages") > 0 && count(&info, "remote_declined_pages") > 0, "{info:#?}");
        ensure!(info.swap_used_bytes > 64 * MIB, "{info:#?}");
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// The daemon is killed in the middle of paging: what was in the pool is found again, by the map and by the servers.
fn daemon_killed(name: &str, folios: Folios, slabs: &[u64], remote: &str) -> Result<()> {
    const KILLS: u32 = 5;
    const PAGES_IN_BETWEEN: u64 = 500;
    Lab::run(name, 1, |lab| {
        let pool = lab.pool(slabs)?;
        let daemon = lab.daemon_with(pool.daemon_options(folios))?;
        let toy = start(lab, &daemon, remote)?;
        for kill in 0..KILLS {
            let workload = ["random", "seq", "zipf"][kill as usize % 3];
            toy.begin(&format!("--workload {workload} --mode read-write --passes 1"))?;
            daemon.wait_vm("toy", "paging", SETTLE_MAX, |info| count(info, counter::PAGES_IN) > PAGES_IN_BETWEEN)?;
            daemon.kill9()?;
            daemon.start_again().with_context(|| format!("after kill {kill}"))?;
            daemon.wait_vm("toy", "running", SETTLE_MAX, |info| info.state == VmState::Running)?;
            toy.end().with_context(|| format!("after kill {kill}, {workload}"))?;
        }
        toy.go("--workload seq --mode read --passes 1").context("every page once more")?;
        toy.quit()?;
        daemon.wait_gone("toy")?;
        pool.wait_free_slabs(slabs.iter().sum())
    })
}

#[test]
fn daemon_killed_large_folios() -> Result<()> {
    daemon_killed("remote, daemon killed, large folios", Folios::Large, &[SLABS], "pool:")
}

/// Half of the pages in the pool, half in the swap file, and in two copies.
#[test]
fn daemon_killed_small_folios() -> Result<()> {
    daemon_killed("remote, daemon killed, 4 KiB", Folios::Small, &[SLABS / 2; 2], "pool:copies=2")
}

/// Seconds that the first server has been silent, as a VM that waits for it says.
fn silent_s(info: &VmInfo) -> Option<u64> {
    info.waits.as_ref()?.split_once("server 1 is silent for ")?.1.split_once(' ')?.0.parse().ok()
}

/// While the only server does not answer, pages leave for the swap file, and what it has is waited for: longer than a block
/// device would wait, and that is said.
#[test]
fn a_server_that_stands_still_is_waited_for() -> Result<()> {
    Lab::run("remote, server stands still", 1, |lab| {
        let pool = lab.pool(&[SLABS])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:")?;
        toy.begin("--workload random --mode read-write --passes 6")?;
        for silence_s in [1, 31] {
            daemon.set_dram_mib("toy", HIGH_MIB)?;
            daemon
                .wait_vm("toy", "above the low cap", SETTLE_MAX, |info| info.resident_bytes > (DRAM_MIB + 32) * MIB)?;
            let before = daemon.vm("toy")?.swap_used_bytes;
            pool.pause(0, true)?;
            // Nothing leaves while all wait for pages: a lower cap makes some.
            daemon.set_dram_mib("toy", DRAM_MIB)?;
            let settled = daemon.wait_vm("toy", "pages in the swap file", SETTLE_MAX, |info| {
                info.resident_bytes <= DRAM_MIB * MIB && info.swap_used_bytes > before
            });
            let said = daemon.wait_vm("toy", "what it waits for", SETTLE_MAX, |info| {
                let knows = |pool: &RemotePool| !pool.servers[0].up && pool.servers_given_up > 0;
                let is_known = info.remote.as_ref().and_then(|remote| remote.pool.as_ref()).is_some_and(knows);
                silent_s(info) >= Some(silence_s) && count(info, "remote_waiting_pages") > 0 && is_known
            });
            pool.pause(0, false)?;
            settled?;
            ensure!(said?.state == VmState::Running, "a server that is silent is no stall");
        }
        toy.end()?;
        exercise(&toy)?;
        let info = daemon.vm("toy")?;
        ensure!(info.state == VmState::Running && count(&info, "remote_declined_pages") > 0, "{info:#?}");
        ensure!(info.waits.is_none(), "{info:#?}");
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// A VM that has all of its memory in DRAM again has nothing in the pool, and its slabs go back while it runs; they come anew.
#[test]
fn what_is_not_needed_goes_back() -> Result<()> {
    Lab::run("remote, slabs given back", 1, |lab| {
        let pool = lab.pool(&[SLABS])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:")?;
        for _ in 0..2 {
            ensure!(pool.free_slabs()? == 0, "slabs are free");
            daemon.set_dram_mib("toy", MEMORY_MIB)?;
            daemon.wait_vm("toy", "all in DRAM", SETTLE_MAX, |info| !info.armed && count(info, "remote_pages") == 0)?;
            pool.wait_free_slabs(SLABS)?;
            daemon.set_dram_mib("toy", DRAM_MIB)?;
            exercise(&toy)?;
        }
        let info = daemon.vm("toy")?;
        ensure!(count(&info, "remote_pages") > 0 && info.state == VmState::Running, "{info:#?}");
        toy.quit()?;
        daemon.wait_gone("toy")?;
        pool.wait_free_slabs(SLABS)
    })
}

/// A daemon that cannot use the pool any more says so with the VM, which waits and goes on when that is put right.
#[test]
fn a_pool_that_cannot_be_used_is_said_with_the_vm() -> Result<()> {
    Lab::run("remote, pool without a key", 1, |lab| {
        let pool = lab.pool(&[SLABS])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:")?;
        daemon.kill9()?;
        pool.hide_key(true)?;
        daemon.start_again()?;
        daemon.wait_vm("toy", "why it waits", SETTLE_MAX, |info| {
            let said =
                info.waits.as_ref().is_some_and(|why| why.contains("remote tier of toy") && why.contains("node.key"));
            info.state == VmState::Waiting && said
        })?;
        let shown = daemon.run_cli(&["vm", "show", "toy"])?.stdout;
        let shown = String::from_utf8_lossy(&shown);
        ensure!(shown.contains("waits for") && shown.contains("node.key"), "{shown}");
        pool.hide_key(false)?;
        daemon.wait_vm("toy", "running", SETTLE_MAX, |info| info.state == VmState::Running && info.waits.is_none())?;
        exercise(&toy)?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// A page that is lost is not zero: the VM stands still, and its owner is told.
#[test]
fn a_lost_page_stops_the_vm() -> Result<()> {
    Lab::run("remote, server killed", 1, |lab| {
        let pool = lab.pool(&[SLABS])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:")?;
        toy.begin("--workload random --mode read --passes 3")?;
        pool.kill9(0)?;
        // As long as it is away it may have everything; it comes back with nothing.
        pool.restart(0)?;
        let is_lost = |info: &VmInfo| matches!(&info.state, VmState::Stalled { reason, .. } if reason.contains("lost") && reason.contains("copies=2"));
        daemon.wait_vm("toy", "stalled by a lost page", SETTLE_MAX, is_lost)?;
        // No page was wrong until then, and none is after the next try.
        daemon.run_cli(&["vm", "cont", "toy"])?;
        daemon.wait_vm("toy", "stalled again", SETTLE_MAX, is_lost)?;
        ensure!(!toy.output_tail().contains("bad_pages\":"), "it ended: {}", toy.output_tail());
        Ok(())
    })
}

#[test]
fn of_two_copies_one_may_go() -> Result<()> {
    Lab::run("remote, one of two servers killed", 1, |lab| {
        let pool = lab.pool(&[SLABS; 2])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:copies=2")?;
        toy.begin("--workload random --mode read-write --passes 2")?;
        daemon.wait_paged("toy", 500)?;
        pool.kill9(1)?;
        toy.end()?;
        exercise(&toy)?;
        ensure!(daemon.vm("toy")?.state == VmState::Running, "it does not run");
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// An unmodified guest, the daemon killed under it.
#[test]
fn a_guest() -> Result<()> {
    Lab::run("remote, guest", 1, |lab| {
        let pool = lab.pool(&[8])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let options = GuestOptions::new("web1", "pagoda.work=random:seconds=900 pagoda.mib=260");
        let mut options = options.memory("-m 512M").dram("128M").qemu(Qemu::Ten);
        options.run_options.extend(["--far".into(), "pool:".into()]);
        let guest = lab.guest(&daemon, &options)?;
        guest.wait_phase("random")?;
        for _ in 0..3 {
            daemon.wait_paged("web1", 200)?;
            daemon.kill9()?;
            daemon.start_again()?;
            daemon.wait_vm("web1", "running", SETTLE_MAX, |info| info.state == VmState::Running)?;
        }
        guest.finish_soon()?;
        daemon.wait_gone("web1")?;
        pool.wait_free_slabs(8)
    })
}
