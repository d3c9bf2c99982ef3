//! The memory policy against real guests: balloons that it drives, VMs that it blocks, daemons that die over it.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{HostPatch, VmInfo};
use serde_json::json;
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, wait};

/// Against a hang alone.
const SETTLE_MAX: Duration = Duration::from_secs(300);
/// A pool in which nothing is short.
const RELIEVED: u64 = 8192 * MIB;
const DEVICE: &str = "-device virtio-balloon-pci,id=b0,free-page-reporting=off";

fn guest(device: &str) -> GuestOptions {
    GuestOptions::new("web1", "").control().more(device).deadline(Duration::from_secs(900))
}

pub fn set_pool(daemon: &Daemon, bytes: u64) -> Result<()> {
    daemon.client().patch_host(&HostPatch { pool: Some(bytes), ..HostPatch::default() })?;
    Ok(())
}

/// Makes the pool so small that `free` per mille of it are free, once a round has counted what the guest has now.
pub fn squeeze(daemon: &Daemon, free: u64) -> Result<()> {
    /// A guest at rest still touches a page now and then.
    const SLACK: u64 = 4 * MIB;
    let counted = || {
        let vm = daemon.vm("web1")?;
        let used = daemon.client().host()?.policy.used_bytes;
        let beside = vm.policy.overhead_bytes;
        Ok((beside > 0 && used + SLACK >= vm.resident_bytes + beside).then_some(used))
    };
    let used = wait::until("all is counted", SETTLE_MAX, counted)?;
    set_pool(daemon, used / (1000 - free) * 1000)
}

pub fn relieve(daemon: &Daemon) -> Result<()> {
    set_pool(daemon, RELIEVED)
}

fn ballooned(vm: &VmInfo) -> u64 {
    vm.balloon.as_ref().map_or(0, |balloon| balloon.ballooned_bytes)
}

fn status(guest: &Guest) -> Result<String> {
    let answer = guest.qmp()?.execute("query-status", json!({}))?;
    answer["status"].as_str().map(str::to_owned).context("a status")
}

/// Between 2 and 4 % free the guest is asked, and what it has no use for is what leaves.
#[test]
fn a_short_pool_is_helped_by_balloons_first() -> Result<()> {
    Lab::run("balloon by policy", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = lab.guest(&daemon, &guest(DEVICE))?;
        let mut control = guest.control()?;
        control.run("fill 350")?;
        control.run("fill 80")?;
        squeeze(&daemon, 30)?;
        let info = daemon.wait_vm("web1", "ballooned", SETTLE_MAX, |vm| ballooned(vm) >= 8 * MIB)?;
        ensure!(!info.balloon.as_ref().is_some_and(|balloon| balloon.paged_out), "{info:#?}");
        let high = || Ok((daemon.client().host()?.policy.state == "high").then_some(()));
        wait::until("state high", SETTLE_MAX, high)?;
        control.run("verify")?;
        // A daemon that dies over it knows what it asked for: nothing is short any more, so the guest gets it back.
        daemon.kill9()?;
        daemon.start_again()?;
        daemon.wait_vm("web1", "its memory back", SETTLE_MAX, |vm| {
            vm.policy.target_bytes.is_some() && vm.balloon.is_some() && ballooned(vm) == 0
        })?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_guest_that_reboots_ballooned_by_the_policy() -> Result<()> {
    Lab::run("reboot behind the policy's balloon", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = lab.guest(&daemon, &guest(DEVICE).may_reboot())?;
        let mut control = guest.control()?;
        control.run("fill 350")?;
        control.run("fill 80")?;
        squeeze(&daemon, 30)?;
        daemon.wait_vm("web1", "ballooned", SETTLE_MAX, |vm| ballooned(vm) >= 8 * MIB)?;
        guest.qmp()?.execute("system_reset", json!({}))?;
        control.wait_ready()?;
        control.run("fill 80")?;
        control.run("verify")?;
        relieve(&daemon)?;
        daemon.wait_vm("web1", "its memory back", SETTLE_MAX, |vm| ballooned(vm) == 0 && vm.swapped_bytes == 0)?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

/// Who cannot be asked is paged out; who is far above what there is stands still until it is.
#[test]
fn without_a_driver_it_is_paged_out_and_blocked_meanwhile() -> Result<()> {
    Lab::run("squeezed and blocked", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let mut options = guest(DEVICE);
        options.append += " module_blacklist=virtio_balloon";
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        control.run("fill 350")?;
        squeeze(&daemon, 30)?;
        let paged = |vm: &VmInfo| vm.swapped_bytes >= 4 * MIB;
        daemon.wait_vm("web1", "paged out", SETTLE_MAX, paged)?;
        let high = || Ok((daemon.client().host()?.policy.state == "high").then_some(()));
        wait::until("state high", SETTLE_MAX, high)?;
        control.run("verify")?;
        // Nothing is free: it is stopped, and runs again as soon as that is over.
        let policy = daemon.client().host()?.policy;
        set_pool(&daemon, policy.used_bytes - 100 * MIB)?;
        for said in ["blocked: stopped until memory is found", "released: it runs again"] {
            wait::until(said, SETTLE_MAX, || Ok(daemon.log_tail().contains(said).then_some(())))?;
        }
        relieve(&daemon)?;
        wait::until("the guest runs", SETTLE_MAX, || Ok((status(&guest)? == "running").then_some(())))?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

/// What it needs it keeps, as far as its driver is concerned; the host takes the coldest of it then.
#[test]
fn a_guest_that_fights_back_is_paged_out() -> Result<()> {
    Lab::run("squeezed against its will", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = lab.guest(&daemon, &guest(DEVICE))?;
        let mut control = guest.control()?;
        control.run("fill 410")?;
        squeeze(&daemon, 21)?;
        let resisted = |vm: &VmInfo| vm.balloon.as_ref().is_some_and(|balloon| balloon.resisted > 0);
        daemon.wait_vm("web1", "resisted", SETTLE_MAX, resisted)?;
        daemon.wait_vm("web1", "paged out", SETTLE_MAX, |vm| vm.swapped_bytes >= 4 * MIB)?;
        let high = || Ok((daemon.client().host()?.policy.state == "high").then_some(()));
        wait::until("state high", SETTLE_MAX, high)?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

/// A VM's record with another word on whether the memory policy has stopped it, and with the sum that then is right.
fn with_blocked(text: &str, blocked: bool) -> Result<String> {
    let json = text.strip_prefix("pagoda-vm 2\n").and_then(|text| text.split_once("\nsum ")).context("a record")?.0;
    let mut record: serde_json::Value = serde_json::from_str(json).context("read the record")?;
    record["blocked"] = blocked.into();
    let text = format!("pagoda-vm 2\n{record}\n");
    // The sum of a record is 64-bit FNV-1a.
    let add = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let sum = text.bytes().fold(0xcbf2_9ce4_8422_2325, add);
    Ok(format!("{text}sum {sum:016x}\n"))
}

/// As after a daemon that died over a blocked VM, and after one whose VM its user had paused.
#[test]
fn a_blocked_vm_is_released_and_a_paused_one_is_not() -> Result<()> {
    Lab::run("blocked by a daemon that is gone", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = lab.guest(&daemon, &guest(""))?;
        let mut control = guest.control()?;
        control.run("fill 64")?;
        for blocked in [false, true] {
            daemon.kill9()?;
            let [path, ..] = daemon.files_of("web1");
            let text = fs::read_to_string(&path).context("read the record")?;
            fs::write(&path, with_blocked(&text, blocked)?).context("write the record")?;
            guest.qmp()?.execute("stop", json!({}))?;
            daemon.start_again()?;
            daemon.wait_vm("web1", "planned for", SETTLE_MAX, |vm| vm.policy.target_bytes.is_some())?;
            if blocked {
                wait::until("it is released", SETTLE_MAX, || Ok((status(&guest)? == "running").then_some(())))?;
            } else {
                // A plan was made with it, and another after this.
                relieve(&daemon)?;
                let planned = || Ok((daemon.client().host()?.policy.pool_now_bytes == RELIEVED).then_some(()));
                wait::until("a plan", SETTLE_MAX, planned)?;
                ensure!(status(&guest)? == "paused", "its user's pause was ended");
            }
        }
        let text = || fs::read_to_string(&daemon.files_of("web1")[0]).context("read the record");
        wait::until("the record says so", SETTLE_MAX, || Ok((!text()?.contains("blocked")).then_some(())))?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}
