//! Remote tiers that etcd keeps: the daemon dies, etcd is away, a server dies, and every page is right.

/// Other tests need more of it.
#[allow(dead_code)]
#[path = "../../../../crates/rmap-etcd/tests/etcd/rig.rs"]
mod rig;

use anyhow::{Result, ensure};
use pagoda_api::{VmInfo, VmState};
use rig::EtcdProcess;
use rustix::process::Signal;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, Lab, MIB, wait};

use crate::remote::{DRAM_MIB, MEMORY_MIB, SETTLE_MAX, SLABS, count, exercise, start};

fn address(etcd: &EtcdProcess) -> String {
    format!("etcd://{}/lab", etcd.endpoint())
}

/// Names of spaces that etcd knows.
fn names(etcd: &EtcdProcess) -> Vec<String> {
    let keys = etcd.etcdctl(&["get", "--prefix", "--keys-only", "/rmap/1/lab/names/"]);
    keys.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn wait_no_space(etcd: &EtcdProcess) -> Result<()> {
    wait::until("etcd has no space any more", wait::HANG, || Ok(names(etcd).is_empty().then_some(())))
}

fn runs(info: &VmInfo) -> bool {
    info.state == VmState::Running
}

fn said(info: &VmInfo, words: &str) -> bool {
    info.waits.as_ref().is_some_and(|why| why.contains(words))
}

/// A daemon that begins while etcd is away waits for it, and says so.
fn begin_without_etcd(daemon: &Daemon, etcd: &EtcdProcess) -> Result<()> {
    daemon.kill9()?;
    daemon.start_again()?;
    daemon.wait_vm("toy", "why it waits", SETTLE_MAX, |info| {
        info.state == VmState::Waiting && said(info, "remote tier of toy") && said(info, "does not answer")
    })?;
    let shown = daemon.run_cli(&["vm", "show", "toy"])?.stdout;
    let shown = String::from_utf8_lossy(&shown);
    ensure!(shown.contains("waits for") && shown.contains("does not answer"), "{shown}");
    etcd.signal(Signal::CONT);
    daemon.wait_vm("toy", "running", SETTLE_MAX, |info| runs(info) && info.waits.is_none()).map(drop)
}

#[test]
fn daemon_etcd_and_a_server_fail_in_turn() -> Result<()> {
    Lab::run("remote, kept by etcd", 1, |lab| {
        let etcd = EtcdProcess::start();
        let pool = lab.pool_in(&[SLABS; 2], Some(&address(&etcd)))?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let toy = start(lab, &daemon, "pool:copies=2")?;
        let spaces = names(&etcd);
        ensure!(spaces.len() == 1 && spaces[0].contains("/.far-"), "{spaces:?}");

        toy.begin("--workload random --mode read-write --passes 2")?;
        daemon.wait_paged("toy", 500)?;
        daemon.kill9()?;
        daemon.start_again()?;
        daemon.wait_vm("toy", "running", SETTLE_MAX, runs)?;
        daemon.wait_paged("toy", 500)?;
        etcd.signal(Signal::STOP);
        toy.end()?;
        exercise(&toy)?;
        toy.begin("--workload random --mode read-write --passes 2")?;
        daemon.wait_paged("toy", 500)?;
        begin_without_etcd(&daemon, &etcd)?;
        toy.end()?;

        toy.begin("--workload random --mode read-write --passes 2")?;
        daemon.wait_paged("toy", 500)?;
        pool.kill9(1)?;
        toy.end()?;
        exercise(&toy)?;
        pool.restart(1)?;
        exercise(&toy)?;
        ensure!(runs(&daemon.vm("toy")?), "it does not run");

        // Slabs go back while it runs, and come anew.
        daemon.set_dram_mib("toy", MEMORY_MIB)?;
        daemon.wait_vm("toy", "all in DRAM", SETTLE_MAX, |info| !info.armed && count(info, "remote_pages") == 0)?;
        pool.wait_free_slabs(2 * SLABS)?;
        daemon.set_dram_mib("toy", DRAM_MIB)?;
        exercise(&toy)?;
        ensure!(count(&daemon.vm("toy")?, "remote_pages") > 0, "nothing is in the pool");

        toy.quit()?;
        daemon.wait_gone("toy")?;
        wait_no_space(&etcd)?;
        pool.wait_free_slabs(2 * SLABS)
    })
}

/// What would need a new slab goes to the swap file while etcd is away, and that is said; nobody gets a new remote
/// tier; a VM that ends then is gone at once, and what it had goes back when etcd is there again, by the next daemon,
/// too.
#[test]
fn a_vm_lives_and_ends_without_etcd() -> Result<()> {
    Lab::run("remote, without etcd", 1, |lab| {
        let etcd = EtcdProcess::start();
        let pool = lab.pool_in(&[SLABS], Some(&address(&etcd)))?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Large))?;
        let options = ToyOptions { name: "toy".into(), memory_mib: MEMORY_MIB, dram_mib: MEMORY_MIB, threads: 4 };
        let toy = lab.toy_with(&daemon, &options, &["--far", "pool:"])?;
        toy.fill()?;
        etcd.signal(Signal::STOP);
        daemon.set_dram_mib("toy", DRAM_MIB)?;
        let info = daemon.wait_vm("toy", "what it waits for", SETTLE_MAX, |info| {
            said(info, "the pool's map") && info.swap_used_bytes > 64 * MIB
        })?;
        ensure!(
            runs(&info) && count(&info, "remote_pages") == 0 && count(&info, "remote_declined_pages") > 0,
            "{info:#?}"
        );
        exercise(&toy)?;
        let other = ["run", "--plain", "--name", "other", "--memory", "256M", "--far", "pool:", "--", "true"];
        let refused = daemon.run_cli(&other)?;
        let refused = String::from_utf8_lossy(&refused.stderr);
        ensure!(refused.contains("no remote memory") && refused.contains("does not answer"), "{refused}");
        etcd.signal(Signal::CONT);
        daemon.wait_vm("toy", "nothing is waited for", SETTLE_MAX, |info| runs(info) && info.waits.is_none())?;
        exercise(&toy)?;
        ensure!(count(&daemon.vm("toy")?, "remote_pages") > 0, "the pool is not used again");

        etcd.signal(Signal::STOP);
        toy.quit()?;
        daemon.wait_gone("toy")?;
        daemon.kill9()?;
        daemon.start_again()?;
        etcd.signal(Signal::CONT);
        wait_no_space(&etcd)?;
        pool.wait_free_slabs(SLABS)
    })
}
