//! VMs with a remote tier move between two hosts of one pool. A tier that etcd keeps is handed over, and one in a host's own registry file
//! is copied.

mod split;

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::{MoveOutcome, MovePhase, MovePlan, RemoteFate, VmInfo, VmState};
use rustix::process::Signal;
use vm_tests::control::Control;
use vm_tests::pool::Pool;
use vm_tests::{Guest, GuestOptions, Lab, MIB, Qemu, wait};

use super::etcd::{Etcd, POOL, alone, connect};
use super::hosts::{Host, Hosts, text};
use super::{DOWNTIME, WRITE, ensure_moved, options, power_off};

const SLABS: u64 = 8;
const DRAM_MIB: u64 = 96;

/// Both hosts borrow of one pool.
struct Bench {
    hosts: Hosts,
    pool: Pool,
    etcd: Option<Etcd>,
    options: GuestOptions,
}

impl Bench {
    fn start(lab: &Lab, in_etcd: bool) -> Result<Bench> {
        Bench::start_with(lab, in_etcd, DRAM_MIB, SLABS)
    }

    fn start_with(lab: &Lab, in_etcd: bool, dram_mib: u64, slabs: u64) -> Result<Bench> {
        let tier = ["--remote", "pool:"].map(str::to_owned);
        let options = GuestOptions { dram: Some(format!("{dram_mib}M")), ..options(Qemu::System) };
        let options = GuestOptions { run_options: tier.to_vec(), ..options };
        let hosts = Hosts::start(lab, &options)?;
        connect(&hosts)?;
        let etcd = if in_etcd { Some(Etcd::start(lab.dir())?) } else { None };
        let address = etcd.as_ref().map(Etcd::address);
        let dir = lab.dir().join("pool");
        let pool = Pool::start_at(&dir, &[slabs], address.as_deref(), POOL)?;
        let bench = Bench { hosts, pool, etcd, options };
        for host in [&bench.hosts.one, &bench.hosts.other] {
            let own = bench.pool_dir(&dir, host, address.as_deref(), lab)?;
            host.daemon.stop()?;
            let moves = host.accepts(&bench.options)?;
            host.configure_with(&format!("pool_dir = {own:?}\n"), &moves)?;
            host.daemon.start_again()?;
        }
        bench.hosts.wait_connected()?;
        Ok(bench)
    }

    /// As a machine of the pool has it. Both have the same key, which the servers know.
    fn pool_dir(&self, pool: &Path, host: &Host, cluster: Option<&str>, lab: &Lab) -> Result<PathBuf> {
        let own = lab.dir().join(format!("pool-{}", host.name));
        fs::create_dir(&own).context("make a directory")?;
        for file in ["node.key", "pool.key", "servers"] {
            if pool.join(file).exists() {
                fs::copy(pool.join(file), own.join(file)).context("copy a key")?;
            }
        }
        let cluster = cluster.map(|cluster| format!("cluster = {cluster:?}\n")).unwrap_or_default();
        fs::write(own.join("pool.toml"), format!("{cluster}host = {:?}\n", host.name)).context("write pool.toml")?;
        Ok(own)
    }

    /// A guest with pages in the pool.
    fn guest(&self, lab: &Lab) -> Result<(Rc<Guest>, Control)> {
        let (guest, control) = self.filled(lab)?;
        let one = &self.hosts.one;
        one.daemon.wait_vm("web1", "pages in the pool", wait::HANG, |info| in_pool(info) > 32 * MIB)?;
        Ok((guest, control))
    }

    /// A guest with content.
    fn filled(&self, lab: &Lab) -> Result<(Rc<Guest>, Control)> {
        let guest = self.hosts.guest(lab, &self.options)?;
        let mut control = guest.control()?;
        control.run("fill 160")?;
        Ok((guest, control))
    }

    fn plan(&self) -> Result<MovePlan> {
        self.plan_with(&[])
    }

    fn plan_with(&self, more: &[&str]) -> Result<MovePlan> {
        let words = [&["--dry-run", "--json"], more].concat();
        let said = self.hosts.try_move(&self.hosts.one, &self.hosts.other, &words)?;
        ensure!(said.status.success(), "{}", text(&said.stderr));
        let plan: MovePlan = serde_json::from_slice(&said.stdout)?;
        println!("{plan:?}");
        Ok(plan)
    }
}

/// The spaces that etcd knows.
fn spaces(etcd: &Etcd) -> Result<Vec<String>> {
    etcd.keys("names/")
}

fn in_pool(info: &VmInfo) -> u64 {
    info.remote.as_ref().map_or(0, |remote| remote.pool_bytes)
}

#[test]
fn a_remote_tier_is_handed_over() -> Result<()> {
    let _alone = alone();
    Lab::run("a remote tier is handed over", 2, |lab| {
        let bench = Bench::start(lab, true)?;
        let Bench { hosts, etcd, .. } = &bench;
        let etcd = etcd.as_ref().context("etcd")?;
        let (guest, _) = bench.guest(lab)?;
        let before = in_pool(&hosts.one.daemon.vm("web1")?);
        let plan = bench.plan()?;
        ensure!(plan.remote.is_some_and(|remote| remote.fate == RemoteFate::HandedOver), "{plan:?}");

        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME)?;
        guest.wait_exit(wait::HANG)?;
        ensure_moved(hosts, &hosts.one, &hosts.other)?;
        let sent = hosts.one.daemon.client().move_of("web1")?.sent_bytes;
        println!("{before} bytes were in the pool, {sent} were sent");
        // Its DRAM and its maps, and no byte of the pool's.
        let own = DRAM_MIB * MIB;
        ensure!(sent <= own + own / 20, "{sent} bytes were sent, and {before} were in the pool");
        let there = hosts.other.daemon.vm("web1")?;
        ensure!(in_pool(&there) >= before / 2, "{there:#?}");
        ensure!(spaces(etcd)?.len() == 1, "{:?}", spaces(etcd)?);

        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("its memory is right there")?;
        control.run("run random passes=2 write=100")?;
        control.run("verify").context("it goes on there")?;
        // It goes back, too.
        hosts.moves(&hosts.other, &hosts.one, &DOWNTIME)?;
        ensure_moved(hosts, &hosts.other, &hosts.one)?;
        let mut control = hosts.one.control(&guest)?;
        control.run("verify").context("its memory is right when it is back")?;
        control.run("run random passes=1 write=100")?;
        control.run("verify")?;
        power_off(&hosts.one, control)?;
        wait::until("etcd has no space", wait::HANG, || Ok(spaces(etcd)?.is_empty().then_some(())))?;
        bench.pool.wait_free_slabs(SLABS)
    })
}

/// A guest that writes all the time, both daemons killed after the move.
#[test]
fn a_guest_that_writes_takes_its_remote_tier_along() -> Result<()> {
    let _alone = alone();
    Lab::run("a guest that writes takes its remote tier along", 2, |lab| {
        let bench = Bench::start(lab, true)?;
        let hosts = &bench.hosts;
        let (guest, mut control) = bench.guest(lab)?;
        control.send(WRITE)?;
        control.wait_progress()?;
        hosts.moves(&hosts.one, &hosts.other, &["--downtime", "5s"])?;
        ensure_moved(hosts, &hosts.one, &hosts.other)?;
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

/// etcd goes away while it is copied. If QEMU needs a page of the tier to load its state, the move is given up; if not, the VM runs at its
/// destination. Wherever it is, it runs, and threads that need a page of the tier wait until etcd is back.
#[test]
fn etcd_is_away_when_a_remote_tier_is_handed_over() -> Result<()> {
    let _alone = alone();
    Lab::run("etcd is away when a remote tier is handed over", 2, |lab| {
        let bench = Bench::start(lab, true)?;
        let Bench { hosts, etcd, .. } = &bench;
        let etcd = etcd.as_ref().context("etcd")?;
        let (guest, mut here) = bench.guest(lab)?;
        hosts.network.slow("100mbit")?;
        hosts.try_move(&hosts.one, &hosts.other, &["--detach", "--downtime", "2s"])?;
        let copies = || Ok((hosts.one.daemon.client().move_of("web1")?.sent_bytes > MIB).then_some(()));
        wait::until("it is copied", wait::HANG, copies)?;
        etcd.signal(Signal::STOP)?;
        let is_over = || {
            let status = hosts.one.daemon.client().move_of("web1")?;
            Ok((status.phase == MovePhase::Over).then_some(status))
        };
        let status = wait::until("it is over", wait::HANG, is_over)?;
        println!("{status:?}");
        let has_moved = status.outcome == MoveOutcome::Moved;
        let host = if has_moved { &hosts.other } else { &hosts.one };
        let vm = host.daemon.vm("web1")?;
        ensure!(vm.state == VmState::Running, "{vm:#?}");
        // The other one ends when its daemon has heard that the move is over.
        wait::until("one QEMU is left", wait::HANG, || Ok((hosts.qemus().len() == 1).then_some(())))?;
        etcd.signal(Signal::CONT)?;
        let mut there = if has_moved { Some(hosts.other.control(&guest)?) } else { None };
        let control = there.as_mut().unwrap_or(&mut here);
        control.run("verify").context("its memory is right")?;
        control.run("run random passes=1 write=100")?;
        control.run("verify")?;
        power_off(host, there.unwrap_or(here))?;
        bench.pool.wait_free_slabs(SLABS)
    })
}

#[test]
fn a_remote_tier_of_a_registry_file_is_copied() -> Result<()> {
    let _alone = alone();
    Lab::run("a remote tier of a registry file is copied", 2, |lab| {
        let bench = Bench::start(lab, false)?;
        let hosts = &bench.hosts;
        let (guest, _) = bench.guest(lab)?;
        let plan = bench.plan()?;
        ensure!(plan.remote.is_some_and(|remote| remote.fate == RemoteFate::Copied), "{plan:?}");
        split::ensure_refused(hosts, &["--dram", "64M", "--split", "pool:"], 6, "a file of this host")?;
        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME)?;
        ensure_moved(hosts, &hosts.one, &hosts.other)?;
        ensure!(hosts.other.daemon.vm("web1")?.remote.is_none(), "it has a remote tier there");
        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("its memory is right there")?;
        power_off(&hosts.other, control)?;
        bench.pool.wait_free_slabs(SLABS)
    })
}
