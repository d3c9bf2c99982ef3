//! VMs whose cold part goes into their remote tier while they move, and over no link between the hosts.

use super::super::ensure_stayed;
use super::*;

/// DRAM at the source: all of the guest is there, and nothing in the pool.
const ALL_MIB: u64 = 256;
const HOT_MIB: u64 = 64;
const SPLIT: [&str; 4] = ["--dram", "64M", "--split", "pool:"];

fn words(more: &[&'static str]) -> Vec<&'static str> {
    [&SPLIT[..], more].concat()
}

/// Nothing is changed, and what is said names the reason.
pub fn ensure_refused(hosts: &Hosts, words: &[&str], status: i32, part: &str) -> Result<()> {
    let said = hosts.try_move(&hosts.one, &hosts.other, words)?;
    let error = text(&said.stderr);
    println!("{words:?}: {} {error}", said.status);
    ensure!(said.status.code() == Some(status) && error.contains(part), "{words:?}: {} {error}", said.status);
    let vm = hosts.one.daemon.vm("web1")?;
    ensure!(vm.state == VmState::Running, "{vm:#?}");
    Ok(())
}

#[test]
fn what_does_not_fit_into_dram_goes_into_the_pool() -> Result<()> {
    let _alone = alone();
    Lab::run("what does not fit into DRAM goes into the pool", 2, |lab| {
        let bench = Bench::start_with(lab, true, ALL_MIB, SLABS)?;
        let Bench { hosts, etcd, .. } = &bench;
        let etcd = etcd.as_ref().context("etcd")?;
        let (guest, _) = bench.filled(lab)?;
        ensure_refused(hosts, &["--split", "host3,pool:"], 2, "host3")?;
        ensure_refused(hosts, &["--dram", "64M", "--split", "pool:2"], 6, "2 are asked for")?;
        ensure_refused(hosts, &words(&["--mode", "postcopy"]), 6, "--mode precopy")?;
        let plan = bench.plan_with(&SPLIT)?;
        ensure!(plan.sends_bytes <= HOT_MIB * MIB && plan.pool_bytes >= 96 * MIB, "{plan:?}");

        hosts.moves(&hosts.one, &hosts.other, &[&SPLIT[..], &DOWNTIME].concat())?;
        guest.wait_exit(wait::HANG)?;
        ensure_moved(hosts, &hosts.one, &hosts.other)?;
        let status = hosts.one.daemon.client().move_of("web1")?;
        println!("{} bytes went into the pool, {} were sent", status.pool_bytes, status.sent_bytes);
        ensure!(status.pool_bytes >= 96 * MIB, "{status:?}");
        // The DRAM that it has there, and what was written again meanwhile.
        let most = HOT_MIB * MIB + HOT_MIB * MIB / 8;
        ensure!(status.sent_bytes + status.saved_bytes <= most, "{status:?}");
        let there = hosts.other.daemon.vm("web1")?;
        ensure!(in_pool(&there) >= 96 * MIB - 8 * MIB && there.dram_limit_bytes == HOT_MIB * MIB, "{there:#?}");

        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("its memory is right there")?;
        control.run("run random passes=2 write=100")?;
        control.run("verify").context("it goes on there")?;
        hosts.moves(&hosts.other, &hosts.one, &DOWNTIME)?;
        ensure_moved(hosts, &hosts.other, &hosts.one)?;
        let mut control = hosts.one.control(&guest)?;
        control.run("verify").context("its memory is right when it is back")?;
        power_off(&hosts.one, control)?;
        wait::until("etcd has no space", wait::HANG, || Ok(super::spaces(etcd)?.is_empty().then_some(())))?;
        bench.pool.wait_free_slabs(SLABS)
    })
}

/// A guest that writes all the time, also to what is in the pool already.
#[test]
fn a_guest_that_writes_is_split() -> Result<()> {
    let _alone = alone();
    Lab::run("a guest that writes is split", 2, |lab| {
        let bench = Bench::start_with(lab, true, ALL_MIB - 64, SLABS)?;
        let hosts = &bench.hosts;
        let (guest, mut control) = bench.filled(lab)?;
        control.send(WRITE)?;
        control.wait_progress()?;
        hosts.moves(&hosts.one, &hosts.other, &words(&["--downtime", "5s"]))?;
        ensure_moved(hosts, &hosts.one, &hosts.other)?;
        let status = hosts.one.daemon.client().move_of("web1")?;
        ensure!(status.pool_bytes >= 32 * MIB, "{status:?}");
        let mut control = hosts.other.control(&guest)?;
        control.wait_progress().context("it goes on with what it did")?;
        for host in [&hosts.one, &hosts.other] {
            host.daemon.kill9()?;
            host.daemon.start_again()?;
        }
        control.enough()?;
        control.reply().context("each page had what was written last")?;
        control.run("verify")?;
        power_off(&hosts.other, control)?;
        bench.pool.wait_free_slabs(SLABS)
    })
}

/// Given up when a part of it is in the pool. It stays with all of its memory, and uses its tier as before; then it moves after all.
#[test]
fn a_split_move_is_given_up_in_the_middle() -> Result<()> {
    let _alone = alone();
    Lab::run("a split move is given up in the middle", 2, |lab| {
        let bench = Bench::start_with(lab, true, ALL_MIB, SLABS)?;
        let hosts = &bench.hosts;
        let (guest, mut control) = bench.filled(lab)?;
        hosts.network.slow("10mbit")?;
        let began = hosts.try_move(&hosts.one, &hosts.other, &words(&["--detach"]))?;
        ensure!(began.status.success(), "{}", text(&began.stderr));
        let placed = || Ok((hosts.one.daemon.client().move_of("web1")?.pool_bytes > 16 * MIB).then_some(()));
        wait::until("a part is in the pool", wait::HANG, placed)?;
        control.run("run random passes=1 write=100").context("it writes meanwhile")?;
        let status = hosts.one.daemon.client().cancel_move("web1")?;
        println!("{status:?}");
        let is_over = || Ok(hosts.one.daemon.client().move_of("web1")?.is_over().then_some(()));
        wait::until("it is over", wait::HANG, is_over)?;
        let status = hosts.one.daemon.client().move_of("web1")?;
        ensure!(status.outcome == MoveOutcome::GivenUp, "{status:?}");
        let vm = hosts.one.daemon.vm("web1")?;
        ensure!(in_pool(&vm) < MIB, "what was placed is none of its own: {vm:#?}");
        control.run("verify").context("nothing of it is lost")?;
        ensure_stayed(hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;

        // Pages leave DRAM for the pool, where others of the same numbers were.
        let done = hosts.one.daemon.run_cli(&["vm", "set", "web1", "--dram", "96M"])?;
        ensure!(done.status.success(), "{}", text(&done.stderr));
        hosts.one.daemon.wait_vm("web1", "pages in the pool", wait::HANG, |info| in_pool(info) > 32 * MIB)?;
        control.run("verify").context("what is in the pool is what it has put there")?;
        hosts.network.slow("1gbit")?;
        let more = ["--dram", "96M", "--split", "pool:"];
        hosts.moves(&hosts.one, &hosts.other, &[&more[..], &DOWNTIME].concat())?;
        ensure_moved(hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("its memory is right there")?;
        power_off(&hosts.other, control)?;
        bench.pool.wait_free_slabs(SLABS)
    })
}

#[test]
fn a_tier_that_is_too_small_is_refused() -> Result<()> {
    let _alone = alone();
    Lab::run("a tier that is too small is refused", 2, |lab| {
        let bench = Bench::start_with(lab, true, ALL_MIB, 1)?;
        let hosts = &bench.hosts;
        let (_, mut control) = bench.filled(lab)?;
        ensure_refused(hosts, &SPLIT, 6, "have room for")?;
        control.run("verify")?;
        power_off(&hosts.one, control)?;
        bench.pool.wait_free_slabs(1)
    })
}
