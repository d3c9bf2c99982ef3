//! The memory policy over toy VMMs: shares, minima, admission, growth, settings that last.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{
    AdmitRequest, CreateVm, ErrorCode, HostPatch, PolicySettings, VmKind, VmPatch, VmPolicy, VmSpec, WhatIfRequest,
};
use vm_tests::daemon::DaemonOptions;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, Lab, MIB, wait};

/// Against a hang alone.
const SETTLE_MAX: Duration = Duration::from_secs(300);
/// What a VM may have beyond its limit for a moment (`OVERDRAFT` in the fault machine).
const OVERDRAFT: u64 = 64 * MIB;

/// A daemon whose configuration file has this section `[policy]`.
fn options(lab: &Lab, policy: &str) -> Result<(DaemonOptions, PathBuf)> {
    let path = lab.dir().join("pagoda.toml");
    fs::write(&path, format!("[policy]\n{policy}\n")).context("write the configuration")?;
    let mut options = DaemonOptions::new(Folios::Small);
    options.more = vec!["--config".into(), path.to_string_lossy().into_owned()];
    Ok((options, path))
}

/// Has the daemon read its configuration again.
fn reload(daemon: &Daemon, path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).context("write the configuration")?;
    let pid = i32::try_from(daemon.pid()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.context("pid")?, rustix::process::Signal::HUP).context("SIGHUP")
}

fn toy(name: &str, memory_mib: u64, dram_mib: u64) -> ToyOptions {
    ToyOptions { name: name.into(), memory_mib, dram_mib, threads: 1 }
}

fn policy_of(daemon: &Daemon, name: &str) -> Result<VmPolicy> {
    Ok(daemon.vm(name)?.policy)
}

/// Calls `look` over and over while `work` is done.
fn meanwhile(look: impl Fn() -> Result<()> + Send, work: impl FnOnce() -> Result<()>) -> Result<()> {
    const PERIOD: Duration = Duration::from_millis(20);
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let watching = scope.spawn(move || {
            while is_done.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                look()?;
            }
            look()
        });
        let worked = work();
        drop(done);
        let watched = watching.join().unwrap_or_else(|_| bail!("the watcher panicked"));
        worked.and(watched)
    })
}

#[test]
fn shares_divide_a_short_pool_and_minima_are_kept() -> Result<()> {
    Lab::run("shares and minima", 2, |lab| {
        const ROUNDS_MAX: u32 = 30;
        let (options, _) = options(lab, "pool = \"256M\"")?;
        let daemon = lab.daemon_with(options)?;
        let rich = lab.toy(&daemon, &toy("rich", 256, 256))?;
        let poor = lab.toy(&daemon, &toy("poor", 256, 256))?;
        let set = |name: &str, patch: VmPatch| daemon.client().patch(name, &patch).map(drop);
        set("rich", VmPatch { shares: Some(2000), ..VmPatch::default() })?;
        rich.fill()?;
        poor.fill()?;
        let both_run = || -> Result<()> {
            rich.begin("--passes 1")?;
            poor.begin("--passes 1")?;
            rich.end()?;
            poor.end().map(drop)
        };
        let ratio = || -> Result<f64> {
            let of = |name| -> Result<f64> { Ok(policy_of(&daemon, name)?.limit_bytes as f64) };
            Ok(of("rich")? / of("poor")?)
        };
        let mut last = 0.0;
        for _ in 0..ROUNDS_MAX {
            both_run()?;
            last = ratio()?;
            if (1.5..2.7).contains(&last) {
                break;
            }
        }
        ensure!((1.5..2.7).contains(&last), "2000 and 1000 shares have limits of {last} to 1");
        let host = daemon.client().host()?.policy;
        ensure!(host.used_bytes <= host.pool_bytes, "{host:#?}");
        // What shares would not buy is guaranteed: with half of it, the poor one has what it was promised.
        const MIN: u64 = 128 * MIB;
        set("poor", VmPatch { min: Some(MIN), ..VmPatch::default() })?;
        // Memory that is free may raise the limit before the next plan knows of the min.
        let is_kept = |policy: &VmPolicy| policy.limit_bytes >= MIN && policy.target_bytes >= Some(MIN);
        daemon.wait_vm("poor", "its min", SETTLE_MAX, |vm| is_kept(&vm.policy))?;
        let watched: &Daemon = &daemon;
        let look = || {
            let poor = policy_of(watched, "poor")?;
            ensure!(is_kept(&poor), "below its min: {poor:#?}");
            Ok(())
        };
        meanwhile(look, || both_run().and_then(|()| both_run()))?;
        ensure!(policy_of(&daemon, "rich")?.status == "squeezed");
        let lines = daemon.client().explain("rich")?.lines;
        ensure!(lines[0].term == "target" && lines.iter().any(|line| line.term == "entitlement"), "{lines:#?}");
        let what =
            daemon.client().what_if("poor", &WhatIfRequest { shares: Some(100_000), ..WhatIfRequest::default() })?;
        ensure!(what.target_bytes[1] > what.target_bytes[0], "{what:?}");
        rich.quit()?;
        poor.quit()
    })
}

/// Nothing says no to a program that touches all it has at once, but the pool is kept.
#[test]
fn nobody_outgrows_the_pool() -> Result<()> {
    Lab::run("growth in a short pool", 2, |lab| {
        const POOL: u64 = 192 * MIB;
        let (options, _) = options(lab, "pool = \"192M\"")?;
        let daemon = lab.daemon_with(options)?;
        let toys = [lab.toy(&daemon, &toy("one", 256, 256))?, lab.toy(&daemon, &toy("two", 256, 256))?];
        let watched: &Daemon = &daemon;
        let look = || {
            let vms = watched.client().vms()?.vms;
            let resident: u64 = vms.iter().map(|vm| vm.resident_bytes).sum();
            ensure!(resident <= POOL + OVERDRAFT, "{resident} bytes in DRAM: {vms:#?}");
            Ok(())
        };
        meanwhile(look, || {
            toys[0].fill()?;
            toys[1].fill()?;
            toys[0].begin("--passes 1")?;
            toys[1].go("--passes 1")?;
            toys[0].end().map(drop)
        })?;
        // With room for all, both get all, and nothing of Pagoda's is in their way.
        daemon.client().patch_host(&HostPatch { pool: Some(2048 * MIB), ..HostPatch::default() })?;
        for toy in &toys {
            let free = |vm: &pagoda_api::VmInfo| !vm.armed && vm.swapped_bytes == 0;
            daemon.wait_vm(&toy.name, "unarmed", SETTLE_MAX, free)?;
            toy.go("--passes 1")?;
            toy.quit()?;
        }
        Ok(())
    })
}

#[test]
fn without_pressure_nothing_is_done() -> Result<()> {
    Lab::run("no pressure, no cost", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let toy = lab.toy(&daemon, &toy("toy", 256, 256))?;
        toy.fill()?;
        daemon.wait_vm("toy", "planned for", SETTLE_MAX, |vm| vm.policy.target_bytes.is_some())?;
        toy.go("--passes 2")?;
        let info = daemon.vm("toy")?;
        ensure!(!info.armed && info.swapped_bytes == 0 && info.policy.limit_bytes == info.memory_bytes, "{info:#?}");
        ensure!(info.policy.status == "at_ease" && info.policy.overhead_bytes > 0, "{info:#?}");
        let counted = || {
            let host = daemon.client().host()?;
            Ok((host.policy.used_bytes >= 256 * MIB).then_some(host))
        };
        let host = wait::until("a plan after the fill", SETTLE_MAX, counted)?;
        let policy = &host.policy;
        ensure!(policy.state == "high" && policy.pool_bytes < host.memory_total_bytes, "{host:#?}");
        ensure!(daemon.client().metrics()?.contains("pagoda_vm_status{vm=\"toy\",status=\"at_ease\"} 1\n"));
        toy.quit()
    })
}

fn refused<T: std::fmt::Debug>(result: Result<T, pagoda_api::ClientError>, code: ErrorCode, text: &str) -> Result<()> {
    let error = result.err().with_context(|| format!("{text}: it was not refused"))?;
    ensure!(error.code() == Some(code) && error.to_string().contains(text), "{error:?}");
    Ok(())
}

#[test]
fn who_cannot_be_kept_is_refused_by_name() -> Result<()> {
    Lab::run("admission", 1, |lab| {
        let (options, _) = options(lab, "pool = \"512M\"")?;
        let daemon = lab.daemon_with(options)?;
        let client = daemon.client();
        let create = |name: &str, min: u64| {
            let policy = PolicySettings { min, ..PolicySettings::default() };
            client.create(&CreateVm {
                name: name.into(),
                memory: vec![512 * MIB],
                kind: VmKind::Plain,
                spec: VmSpec { policy, ..VmSpec::default() },
                launch: None,
                outbox: None,
            })
        };
        let admit = |min| client.admit(&AdmitRequest { memory_bytes: 512 * MIB, dram: None, min });
        refused(create("big", 500 * MIB), ErrorCode::NoRoom, "of memory are missing")?;
        ensure!(client.vms()?.vms.is_empty(), "nothing is left of it");
        let reply = admit(500 * MIB)?;
        ensure!(!reply.admitted && reply.missing.contains("missing"), "{reply:?}");
        ensure!(admit(64 * MIB)?.admitted);
        let toy = lab.toy(&daemon, &toy("toy", 256, 256))?;
        let patch = |patch: VmPatch| client.patch("toy", &patch);
        patch(VmPatch { min: Some(200 * MIB), ..VmPatch::default() })?;
        let before = daemon.vm("toy")?.policy;
        refused(create("late", 300 * MIB), ErrorCode::NoRoom, "reserved")?;
        let host = |patch: HostPatch| client.patch_host(&patch);
        refused(
            host(HostPatch { pool: Some(128 * MIB), ..HostPatch::default() }),
            ErrorCode::NoRoom,
            "cannot keep the guarantees",
        )?;
        refused(host(HostPatch { idle_tax: Some(1000), ..HostPatch::default() }), ErrorCode::BadRequest, "idle tax")?;
        let thresholds = HostPatch { thresholds: Some([10, 20, 30, 40]), ..HostPatch::default() };
        refused(host(thresholds), ErrorCode::BadRequest, "out of order")?;
        let low_cap = VmPatch { dram: Some(128 * MIB), ..VmPatch::default() };
        refused(patch(low_cap), ErrorCode::BadRequest, "lower --min or raise --dram")?;
        refused(patch(VmPatch { shares: Some(0), ..VmPatch::default() }), ErrorCode::BadRequest, "0 shares")?;
        let after = daemon.vm("toy")?;
        ensure!((after.policy.min_bytes, after.policy.shares) == (before.min_bytes, before.shares), "{after:#?}");
        ensure!(after.dram_limit_bytes == after.memory_bytes, "{after:#?}");
        toy.fill()?;
        toy.quit()
    })
}

#[test]
fn settings_outlive_the_daemon_and_its_configuration_is_read_again() -> Result<()> {
    Lab::run("settings and SIGHUP", 1, |lab| {
        let (options, path) = options(lab, "pool = \"1G\"\nidle_tax = \"50%\"")?;
        let daemon = lab.daemon_with(options)?;
        let toy = lab.toy(&daemon, &toy("toy", 256, 256))?;
        toy.fill()?;
        let sampling = pagoda_api::Sampling { pages: 50, period_s: 5 };
        let patch = VmPatch { min: Some(64 * MIB), shares: Some(3000), sampling: Some(sampling), ..VmPatch::default() };
        daemon.client().patch("toy", &patch)?;
        daemon.kill9()?;
        daemon.start_again()?;
        let info = daemon.wait_vm("toy", "planned for again", SETTLE_MAX, |vm| vm.policy.target_bytes.is_some())?;
        let policy = &info.policy;
        ensure!((policy.min_bytes, policy.shares, policy.sampling) == (64 * MIB, 3000, sampling), "{policy:#?}");
        let host = || -> Result<pagoda_api::HostPolicy> { Ok(daemon.client().host()?.policy) };
        ensure!((host()?.pool_bytes, host()?.idle_tax) == (1024 * MIB, 500), "{:#?}", host()?);
        let reload = |text: &str| reload(&daemon, &path, text);
        reload("[policy]\npool = \"768M\"\n")?;
        wait::until("the new pool", SETTLE_MAX, || Ok((host()?.pool_bytes == 768 * MIB).then_some(())))?;
        ensure!(host()?.idle_tax == 750, "what the file no longer says is the default again");
        // A pool that cannot keep what was promised, and a file that cannot be read: the old settings stay.
        for (text, said) in [
            ("[policy]\npool = \"60M\"\nidle_tax = \"1%\"\n", "cannot keep the guarantees"),
            ("[policy]\npool = \"lots\"\n", "lots"),
        ] {
            reload(text)?;
            wait::until(said, SETTLE_MAX, || Ok(daemon.log_tail().contains(said).then_some(())))?;
            ensure!((host()?.pool_bytes, host()?.idle_tax) == (768 * MIB, 750), "{:#?}", host()?);
        }
        toy.go("--passes 1")?;
        toy.quit()
    })
}

/// The host itself has too little: the pool shrinks whatever was set, down to what VMs were promised, and no daemon that
/// dies over it forgets that.
#[test]
fn a_host_that_runs_short_takes_from_the_pool() -> Result<()> {
    Lab::run("a host that runs short", 1, |lab| {
        const MIN: u64 = 128 * MIB;
        const MEMORY_MIB: u64 = 512;
        /// Page-out works in the room above a min (`limit_for_min`).
        const NEAR_MIN: u64 = MIN + OVERDRAFT;
        let (options, path) = options(lab, "pool = \"2G\"")?;
        let daemon = lab.daemon_with(options)?;
        let toy = lab.toy(&daemon, &toy("toy", MEMORY_MIB, MEMORY_MIB))?;
        daemon.client().patch("toy", &VmPatch { min: Some(MIN), ..VmPatch::default() })?;
        toy.fill()?;
        let host = || -> Result<pagoda_api::HostPolicy> { Ok(daemon.client().host()?.policy) };
        let pool_is = |what: &str, wanted: &dyn Fn(u64) -> bool| {
            wait::until(what, SETTLE_MAX, || Ok(wanted(host()?.pool_now_bytes).then_some(())))
        };
        pool_is("the pool that was set", &|pool| pool == 2048 * MIB)?;
        // More than any host has available.
        reload(&daemon, &path, "[policy]\npool = \"2G\"\nhost_available_min = \"1T\"\n")?;
        pool_is("a smaller pool", &|pool| pool < MIN)?;
        let near_min = |vm: &pagoda_api::VmInfo| vm.resident_bytes <= NEAR_MIN && vm.swapped_bytes > 0;
        daemon.wait_vm("toy", "near its min", SETTLE_MAX, near_min)?;
        let watched: &Daemon = &daemon;
        let kept = || {
            let vm = watched.vm("toy")?;
            ensure!(vm.policy.limit_bytes >= MIN && vm.resident_bytes <= NEAR_MIN + OVERDRAFT, "{vm:#?}");
            Ok(())
        };
        meanwhile(kept, || toy.go("--passes 1").map(drop))?;
        daemon.kill9()?;
        daemon.start_again()?;
        pool_is("a smaller pool again", &|pool| pool < MIN)?;
        daemon.wait_vm("toy", "planned for", SETTLE_MAX, |vm| vm.policy.target_bytes.is_some() && near_min(vm))?;
        meanwhile(kept, || toy.go("--passes 1").map(drop))?;
        reload(&daemon, &path, "[policy]\npool = \"2G\"\n")?;
        pool_is("the pool that was set, again", &|pool| pool == 2048 * MIB)?;
        daemon.wait_vm("toy", "all its memory back", SETTLE_MAX, |vm| !vm.armed && vm.swapped_bytes == 0)?;
        toy.go("--passes 1")?;
        toy.quit()
    })
}

/// Figure 7 of the ESX paper: who does not use its memory is charged more for it, and loses it to who does.
#[test]
fn idle_memory_is_taxed() -> Result<()> {
    Lab::run("idle memory tax", 2, |lab| {
        const ROUNDS_MAX: u32 = 60;
        let policy = "pool = \"240M\"\nidle_tax = \"0%\"\nsample_pages = 400\nsample_period_s = 2";
        let (options, _) = options(lab, policy)?;
        let daemon = lab.daemon_with(options)?;
        let idle = lab.toy(&daemon, &toy("idle", 192, 192))?;
        let active = lab.toy(&daemon, &toy("active", 192, 192))?;
        idle.fill()?;
        active.fill()?;
        let target =
            |name: &str| -> Result<f64> { Ok(policy_of(&daemon, name)?.target_bytes.context("a target")? as f64) };
        // The active one runs while the estimates settle.
        let wait_ratio = |what: &str, wanted: std::ops::Range<f64>| {
            let mut last = 0.0;
            for _ in 0..ROUNDS_MAX {
                active.go("--workload random --mode read-write --seconds 2")?;
                last = target("active")? / target("idle")?;
                if wanted.contains(&last) {
                    return Ok(());
                }
            }
            bail!("{what}: the active VM's target is {last} times the idle one's")
        };
        wait_ratio("without a tax", 0.98..1.02)?;
        daemon.client().patch_host(&HostPatch { idle_tax: Some(750), ..HostPatch::default() })?;
        wait_ratio("with a tax of 75 %", 1.5..10.0)?;
        let status = |name: &str| -> Result<String> { Ok(policy_of(&daemon, name)?.status) };
        ensure!(status("idle")? == "squeezed", "{}", status("idle")?);
        daemon.client().patch_host(&HostPatch { idle_tax: Some(0), ..HostPatch::default() })?;
        wait_ratio("without a tax again", 0.98..1.02)?;
        idle.go("--passes 1")?;
        idle.quit()?;
        active.quit()
    })
}
