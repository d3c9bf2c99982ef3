//! Balloon targets: guests that give memory up, that cannot, that will not, and daemons that die over it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{BalloonInfo, VmInfo, VmState};
use serde_json::json;
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu};

const MEMORY_MIB: u64 = 512;
const SETTLE_MAX: Duration = Duration::from_secs(300);
const DEVICE: &str = "-device virtio-balloon-pci,id=b0";

fn guest(device: &str) -> GuestOptions {
    GuestOptions::new("web1", "").control().more(device)
}

fn balloon(info: &VmInfo) -> Result<&BalloonInfo> {
    info.balloon.as_ref().context("the VM has had a balloon target")
}

fn set_target(daemon: &Daemon, target: &str) -> Result<()> {
    let output = daemon.run_cli(&["vm", "set", "web1", "--balloon-target", target])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn wait(daemon: &Daemon, what: &str, wanted: impl Fn(&BalloonInfo) -> bool) -> Result<VmInfo> {
    daemon.wait_vm("web1", what, SETTLE_MAX, |info| info.balloon.as_ref().is_some_and(&wanted))
}

fn wait_state(daemon: &Daemon, state: &str) -> Result<VmInfo> {
    wait(daemon, state, |balloon| balloon.state == state)
}

/// The guest keeps `target_mib`, and nothing is paged out in the balloon's place.
fn wait_reached(daemon: &Daemon, target_mib: u64) -> Result<VmInfo> {
    let given = (MEMORY_MIB - target_mib) * MIB;
    let reached = |balloon: &BalloonInfo| balloon.state == "reached" && balloon.ballooned_bytes == given;
    let info = wait(daemon, &format!("a balloon of {} MiB", given / MIB), reached)?;
    ensure!(!balloon(&info)?.paged_out && info.dram_limit_bytes == info.memory_bytes.min(info.dram_limit_bytes));
    Ok(info)
}

fn ensure_within(guest: &Guest, info: &VmInfo, mib: u64) -> Result<()> {
    let used = info.resident_bytes + info.swapped_bytes;
    ensure!(used <= mib * MIB, "{used} bytes in DRAM and swap, the guest keeps {mib} MiB");
    let ram = guest.ram_bytes()?;
    ensure!(ram <= mib * MIB, "{ram} bytes in the RAM file, the guest keeps {mib} MiB");
    Ok(())
}

fn explained(daemon: &Daemon, term: &str) -> Result<String> {
    let explain = daemon.client().explain("web1")?;
    let line = explain.lines.iter().find(|line| line.term == term).with_context(|| format!("no {term}: {explain:#?}"));
    line.map(|line| format!("{} {}", line.value, line.reason))
}

fn there_and_back(name: &str, qemu: Qemu, folios: Folios, dram: Option<&str>) -> Result<()> {
    const TARGET_MIB: u64 = 256;
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let mut options = guest(DEVICE).qemu(qemu);
        options.dram = dram.map(str::to_owned);
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        // Some of it stays in use, the rest is free in the guest.
        control.run("fill 350")?;
        control.run("fill 120")?;
        set_target(&daemon, &format!("{TARGET_MIB}M"))?;
        let info = wait_reached(&daemon, TARGET_MIB)?;
        ensure_within(&guest, &info, TARGET_MIB)?;
        ensure!(info.counters["pages_discarded"] > 0, "{:#?}", info.counters);
        ensure!(explained(&daemon, "balloon")?.contains("keeps what its target says"));
        let list = daemon.run_cli(&["ls"])?;
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        ensure!(list.contains("MCTLSZ") && list.contains("256M     256M"), "{list}");
        control.run("run random passes=1")?;
        control.run("verify")?;
        // The target rises, so the guest gets some memory back, and then all of it.
        set_target(&daemon, "384M")?;
        wait_reached(&daemon, 384)?;
        set_target(&daemon, "off")?;
        let info = wait_state(&daemon, "off")?;
        ensure!(balloon(&info)?.ballooned_bytes == 0, "{info:#?}");
        control.run("verify")?;
        // More than it had with the balloon, and less than all: while the guest's kernel tells of free pages, it keeps up to 64 MiB of
        // them aside (mm/page_reporting.c: 32 blocks of 2 MiB), and an allocation that needs these too ends in an OOM.
        control.run("fill 300")?;
        control.run("run random passes=1")?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn there_and_back_large_folios() -> Result<()> {
    there_and_back("balloon, large folios", Qemu::System, Folios::Large, None)
}

#[test]
fn there_and_back_small_folios() -> Result<()> {
    there_and_back("balloon, 4 KiB", Qemu::System, Folios::Small, Some("192M"))
}

#[test]
fn there_and_back_large_folios_qemu_10() -> Result<()> {
    there_and_back("balloon, large folios, QEMU 10", Qemu::Ten, Folios::Large, Some("192M"))
}

#[test]
fn there_and_back_small_folios_qemu_10() -> Result<()> {
    there_and_back("balloon, 4 KiB, QEMU 10", Qemu::Ten, Folios::Small, None)
}

/// What the guest has freed and nobody was told of is in swap until the balloon takes it.
#[test]
fn pages_in_swap_leave_it() -> Result<()> {
    Lab::run("balloon of what is swapped out", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let options = guest("-device virtio-balloon-pci,id=b0,free-page-reporting=off").dram("128M");
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        control.run("fill 320")?;
        control.run("drop")?;
        let before = daemon.vm("web1")?;
        ensure!(before.swapped_bytes >= 150 * MIB, "{} bytes swapped", before.swapped_bytes);
        set_target(&daemon, "192M")?;
        let info = wait_reached(&daemon, 192)?;
        ensure_within(&guest, &info, 192)?;
        ensure!(info.swap_used_bytes < before.swap_used_bytes, "{} {}", before.swap_used_bytes, info.swap_used_bytes);
        set_target(&daemon, "off")?;
        wait_state(&daemon, "off")?;
        control.run("fill 300")?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_guest_without_a_driver_is_paged_out() -> Result<()> {
    Lab::run("no balloon driver", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let mut options = guest(DEVICE);
        options.append += " module_blacklist=virtio_balloon";
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        control.run("fill 350")?;
        paged_out_and_back(&daemon, "no balloon driver answers")?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_vm_without_a_device_is_paged_out() -> Result<()> {
    Lab::run("no balloon device", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = lab.guest(&daemon, &guest(""))?;
        let mut control = guest.control()?;
        control.run("fill 350")?;
        paged_out_and_back(&daemon, "-device virtio-balloon-pci")?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

fn paged_out_and_back(daemon: &Daemon, reason: &str) -> Result<()> {
    set_target(daemon, "256M")?;
    let info = wait_state(daemon, "unavailable")?;
    ensure!(balloon(&info)?.reason.contains(reason), "{info:#?}");
    daemon.wait_vm("web1", "paged out to its target", SETTLE_MAX, |info| info.resident_bytes <= 256 * MIB)?;
    ensure!(explained(daemon, "paged out instead")?.starts_with("yes"));
    set_target(daemon, "off")?;
    let info = wait_state(daemon, "off")?;
    ensure!(!balloon(&info)?.paged_out, "{info:#?}");
    daemon.wait_vm("web1", "all of it may be in DRAM", SETTLE_MAX, |info| info.swapped_bytes == 0)?;
    Ok(())
}

#[test]
fn a_guest_that_needs_its_memory_keeps_it() -> Result<()> {
    Lab::run("balloon against a guest that eats", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let guest = lab.guest(&daemon, &guest(DEVICE))?;
        let mut control = guest.control()?;
        control.run("fill 340")?;
        set_target(&daemon, "128M")?;
        let info = wait_state(&daemon, "resisted")?;
        let refused = balloon(&info)?;
        ensure!(
            refused.reason.contains("run short") && !refused.paged_out && refused.retry_in_s.is_some(),
            "{info:#?}"
        );
        let available = refused.guest.context("the guest reports")?.available_bytes;
        ensure!(available >= 16 * MIB, "{available} bytes are left to the guest");
        ensure!(refused.ballooned_bytes >= 32 * MIB, "{info:#?}");
        control.run("run random passes=1")?;
        control.run("verify")?;
        // It gives up what it no longer needs when it is tried again.
        control.run("drop")?;
        wait_reached(&daemon, 128)?;
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_driver_that_goes_away_and_comes_back() -> Result<()> {
    Lab::run("balloon driver unbound", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = lab.guest(&daemon, &guest(DEVICE))?;
        let mut control = guest.control()?;
        control.run("fill 100")?;
        set_target(&daemon, "256M")?;
        wait_reached(&daemon, 256)?;
        control.run("unbind virtio_balloon")?;
        let info = wait(&daemon, "paged out instead", |balloon| balloon.paged_out && balloon.ballooned_bytes == 0)?;
        ensure!(info.state == VmState::Running, "{info:#?}");
        control.run("fill 300")?;
        control.run("verify")?;
        control.run("fill 100")?;
        control.run("bind virtio_balloon")?;
        wait_reached(&daemon, 256)?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_guest_that_reboots_ballooned() -> Result<()> {
    Lab::run("reboot behind a balloon", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let guest = lab.guest(&daemon, &guest(DEVICE).may_reboot())?;
        let mut control = guest.control()?;
        control.run("fill 100")?;
        set_target(&daemon, "256M")?;
        wait_reached(&daemon, 256)?;
        guest.qmp()?.execute("system_reset", json!({}))?;
        // All memory is the new kernel's; until its driver is up, the VM is kept to its target by paging.
        let info = wait(&daemon, "popped", |balloon| balloon.paged_out)?;
        ensure!(balloon(&info)?.ballooned_bytes <= MIB, "{info:#?}");
        control.wait_ready()?;
        let info = wait_reached(&daemon, 256)?;
        ensure_within(&guest, &info, 256)?;
        control.run("fill 100")?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_target_for_a_guest_that_still_boots() -> Result<()> {
    Lab::run("balloon of a booting guest", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        // The firmware waits for a key, as long as it can: on a busy host, any shorter wait may be over before the target is set.
        let options = guest(DEVICE).more("-boot menu=on,splash-time=65535");
        let guest = lab.guest(&daemon, &options)?;
        daemon.wait_made("web1")?;
        daemon.wait_vm("web1", "attached", SETTLE_MAX, |info| info.state == VmState::Running)?;
        set_target(&daemon, "256M")?;
        let info = wait_state(&daemon, "unavailable")?;
        ensure!(balloon(&info)?.paged_out && balloon(&info)?.reason.contains("still boots"), "{info:#?}");
        guest.qmp()?.execute("send-key", json!({ "keys": [{ "type": "qcode", "data": "a" }] }))?;
        let mut control = guest.control()?;
        wait_reached(&daemon, 256)?;
        control.run("fill 100")?;
        control.run("verify")?;
        control.run("poweroff")?;
        guest.finish()
    })
}

/// Killed at any moment of moving, it goes on from what the device says.
#[test]
fn a_daemon_killed_while_ballooning() -> Result<()> {
    Lab::run("daemon killed while ballooning", 1, |lab| {
        const ROUNDS: u64 = 4;
        let daemon = lab.daemon(Folios::Large)?;
        let guest = lab.guest(&daemon, &guest(DEVICE).dram("160M"))?;
        let mut control = guest.control()?;
        control.run("fill 100")?;
        for round in 0..ROUNDS {
            let (target_mib, before) = if round % 2 == 0 { (256, 0) } else { (448, 256) };
            set_target(&daemon, &format!("{target_mib}M"))?;
            wait(&daemon, "moving", |balloon| balloon.ballooned_bytes != before * MIB)?;
            daemon.kill9()?;
            daemon.start_again()?;
            wait_reached(&daemon, target_mib).with_context(|| format!("round {round}"))?;
            control.run("verify")?;
            if round % 2 == 1 {
                set_target(&daemon, "off")?;
                wait_state(&daemon, "off")?;
            }
        }
        control.run("poweroff")?;
        guest.finish()
    })
}

#[test]
fn targets_that_make_no_sense() -> Result<()> {
    Lab::run("wrong balloon targets", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let toy = vm_tests::toy::ToyOptions { name: "toy".into(), memory_mib: 128, dram_mib: 64, threads: 1 };
        let toy = lab.toy(&daemon, &toy)?;
        for (target, status, expected) in [
            ("1G", 2, "more than the VM's memory"),
            ("32M", 2, "the least is 64 MiB"),
            ("much", 2, "not a size"),
            ("96M", 1, "no QEMU and has no balloon"),
        ] {
            let output = daemon.run_cli(&["vm", "set", "toy", "--dram", "128M", "--balloon-target", target])?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(status) && said.contains(expected), "{target}: {said}");
            let info = daemon.vm("toy")?;
            ensure!(info.dram_limit_bytes == 64 * MIB && info.balloon.is_none(), "half done: {info:#?}");
        }
        toy.fill()?;
        toy.quit()
    })
}

/// Who makes the holes changes hands while the guest gives pages back and takes them again: its VMM alone while the VM is
/// unarmed, the daemon while it has a cap.
#[test]
fn armed_and_disarmed_while_the_guest_gives_memory_back() -> Result<()> {
    Lab::run("balloon, armed and disarmed", 1, |lab| {
        const TURNS: u32 = 4;
        let daemon = lab.daemon(Folios::Large)?;
        let guest = lab.guest(&daemon, &guest(DEVICE))?;
        let mut control = guest.control()?;
        control.run("fill 100")?;
        for turn in 0..TURNS {
            // Caps come and go at other moments of each inflation.
            let given = |mib: u64| move |balloon: &BalloonInfo| balloon.ballooned_bytes >= mib * MIB;
            let first = 8 + 64 * u64::from(turn);
            set_target(&daemon, "224M")?;
            wait(&daemon, "the beginning", given(first))?;
            daemon.set_dram_mib("web1", 192)?;
            daemon.wait_vm("web1", "armed", SETTLE_MAX, |info| info.armed)?;
            wait(&daemon, "some more", given(first + 32))?;
            daemon.set_dram_mib("web1", MEMORY_MIB)?;
            let info = wait_reached(&daemon, 224)?;
            ensure_within(&guest, &info, 224)?;
            control.run("verify")?;
            set_target(&daemon, "off")?;
            wait_state(&daemon, "off")?;
            daemon.wait_vm("web1", "unarmed", SETTLE_MAX, |info| !info.armed && info.swapped_bytes == 0)?;
            // What was given back is zero when it is used again, or the guest's kernel would say so.
            control.run(&format!("fill {}", 300 + turn))?;
            control.run("verify")?;
            control.run(&format!("fill {}", 100 + turn))?;
        }
        control.run("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}
