//! Equal pages of VMs in one share group: shared when they are cold, verified whatever happens meanwhile.
//!
//! Toys of the same seed hold the same pages, each of them once.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{VmInfo, VmState};
use serde_json::json;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, GuestOptions, Lab, MIB, Toy};

const MEMORY_MIB: u64 = 64;
const PAGES: u64 = MEMORY_MIB * 256;
/// Against a hang only: a few seconds are enough where nothing else runs.
const SETTLE_MAX: Duration = Duration::from_secs(300);
const READ_ALL: &str = "--workload seq --mode read --passes 1";

fn options(name: &str, memory_mib: u64) -> ToyOptions {
    ToyOptions { name: name.into(), memory_mib, dram_mib: memory_mib, threads: 1 }
}

fn toy(lab: &Lab, daemon: &Daemon, name: &str, group: &str) -> Result<Rc<Toy>> {
    toy_of(lab, daemon, &options(name, MEMORY_MIB), group)
}

fn toy_of(lab: &Lab, daemon: &Daemon, options: &ToyOptions, group: &str) -> Result<Rc<Toy>> {
    let toy = lab.toy_with(daemon, options, &["--share-group", group])?;
    toy.fill()?;
    Ok(toy)
}

fn count(info: &VmInfo, name: &str) -> u64 {
    info.counters.get(name).copied().unwrap_or(0)
}

/// Waits until nearly all of the VM is shared, and its part of the frames is that of one of `vms`.
fn wait_shared(daemon: &Daemon, name: &str, vms: u64) -> Result<VmInfo> {
    daemon.wait_vm(name, "its pages shared", SETTLE_MAX, |info| {
        let (shared, part) = (count(info, "shared_pages"), count(info, "shared_part_pages"));
        shared >= PAGES * 9 / 10 && part <= shared / vms + PAGES / 20
    })
}

fn shared_and_back(name: &str, folios: Folios) -> Result<()> {
    Lab::run(name, 2, |lab| {
        let daemon = lab.daemon(folios)?;
        let toys = [toy(lab, &daemon, "a", "tenant")?, toy(lab, &daemon, "b", "tenant")?];
        for round in 0..2 {
            for toy in &toys {
                let info = wait_shared(&daemon, &toy.name, 2)?;
                ensure!(count(&info, "share_collisions") == 0, "{info:#?}");
                // The kernel's own account: what is shared is not in the RAM file.
                ensure!(info.resident_bytes <= MEMORY_MIB * MIB / 8, "{info:#?}");
            }
            for toy in &toys {
                toy.go(READ_ALL).with_context(|| format!("{} in round {round}", toy.name))?;
            }
        }
        // One of them goes on writing: it gets its own pages, the other keeps what it had.
        toys[0].go("--workload random --mode read-write --passes 2")?;
        toys[1].go(READ_ALL)?;
        toys[0].go(READ_ALL)?;
        for toy in &toys {
            toy.quit()?;
            daemon.wait_gone(&toy.name)?;
        }
        Ok(())
    })
}

#[test]
fn two_equal_vms_share_small_folios() -> Result<()> {
    shared_and_back("share, 4 KiB", Folios::Small)
}

#[test]
fn two_equal_vms_share_large_folios() -> Result<()> {
    shared_and_back("share, large folios", Folios::Large)
}

#[test]
fn a_vm_that_ends_leaves_its_frames_to_the_others() -> Result<()> {
    Lab::run("share, a VM ends", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let (a, b) = (toy(lab, &daemon, "a", "tenant")?, toy(lab, &daemon, "b", "tenant")?);
        wait_shared(&daemon, "a", 2)?;
        wait_shared(&daemon, "b", 2)?;
        a.quit()?;
        daemon.wait_gone("a")?;
        daemon.wait_vm("b", "alone with its frames", SETTLE_MAX, |info| {
            count(info, "shared_part_pages") == count(info, "shared_pages")
        })?;
        // A newcomer finds the frames that are left.
        let c = toy(lab, &daemon, "c", "tenant")?;
        wait_shared(&daemon, "c", 2)?;
        b.go(READ_ALL)?;
        c.go(READ_ALL)?;
        b.quit()?;
        c.quit()
    })
}

#[test]
fn groups_share_nothing_with_one_another() -> Result<()> {
    Lab::run("share, groups", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let red = toy(lab, &daemon, "red", "red")?;
        let blue = toy(lab, &daemon, "blue", "blue")?;
        for toy in [&red, &blue] {
            let all = |info: &VmInfo| count(info, "share_scanned_pages") >= PAGES;
            let info = daemon.wait_vm(&toy.name, "all looked at", SETTLE_MAX, all)?;
            ensure!(count(&info, "shared_pages") == 0, "{info:#?}");
        }
        // What a VMM keeps: its own group's pool, by a descriptor that opens nothing.
        for (toy, own, other) in [(&red, "red", "blue"), (&blue, "blue", "red")] {
            let (mut pools, mut kept) = (0, 0);
            for entry in std::fs::read_dir(format!("/proc/{}/fd", toy.pid()))? {
                let path = entry?.path();
                let Ok(target) = std::fs::read_link(&path) else { continue };
                let target = target.to_string_lossy().into_owned();
                ensure!(!target.contains(&format!("memfd:{other}.pool")), "{} has {target}", toy.name);
                let is_pool = target.contains(&format!("memfd:{own}.pool"));
                if is_pool || target.contains(&format!("memfd:{own}.shared")) {
                    let info = std::fs::read_to_string(path.to_string_lossy().replace("/fd/", "/fdinfo/"))?;
                    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).context("flags")?;
                    let flags = u32::from_str_radix(flags.trim(), 8)?;
                    // O_PATH of asm-generic/fcntl.h: neither read, nor written, nor mapped.
                    ensure!(flags & 0o10_000_000 != 0, "{target} of {} is open: {flags:o}", toy.name);
                    (pools, kept) = (pools + u32::from(is_pool), kept + 1);
                }
            }
            ensure!((pools, kept) == (1, 2), "{} keeps {kept} files, {pools} of them pools", toy.name);
        }
        red.go(READ_ALL)?;
        blue.go(READ_ALL)?;
        red.quit()?;
        blue.quit()
    })
}

fn daemon_killed(name: &str, folios: Folios) -> Result<()> {
    const KILLS: u64 = 8;
    Lab::run(name, 2, |lab| {
        let daemon = lab.daemon(folios)?;
        let toys = [toy(lab, &daemon, "a", "tenant")?, toy(lab, &daemon, "b", "tenant")?];
        for kill in 0..KILLS {
            // Sharing and copying back are under way, each time a little further.
            let shared = PAGES / 5 * (1 + kill % 3);
            for toy in &toys {
                let some = |info: &VmInfo| count(info, "shared_pages") > shared;
                daemon.wait_vm(&toy.name, "sharing", SETTLE_MAX, some)?;
            }
            if kill % 2 == 0 {
                // Reads leave the two equal, so that there is something to share after each kill.
                toys[1].begin("--workload random --mode read --ops 4000")?;
                daemon.wait_vm("b", "copying back", SETTLE_MAX, |info| count(info, "share_copied_back_pages") > 200)?;
            } else {
                toys[1].begin("--workload zipf --mode read-write --ops 4000")?;
            }
            daemon.kill9()?;
            daemon.start_again().with_context(|| format!("after kill {kill}"))?;
            for toy in &toys {
                daemon.wait_vm(&toy.name, "running", SETTLE_MAX, |info| info.state == VmState::Running)?;
            }
            toys[1].end().with_context(|| format!("after kill {kill}"))?;
            toys[0].go("--workload random --mode read --ops 2000").with_context(|| format!("after kill {kill}"))?;
        }
        for toy in &toys {
            toy.go(READ_ALL)?;
        }
        for toy in &toys {
            toy.quit()?;
            daemon.wait_gone(&toy.name)?;
        }
        Ok(())
    })
}

#[test]
fn daemon_killed_while_sharing_small_folios() -> Result<()> {
    daemon_killed("share, daemon killed, 4 KiB", Folios::Small)
}

#[test]
fn daemon_killed_while_sharing_large_folios() -> Result<()> {
    daemon_killed("share, daemon killed, large folios", Folios::Large)
}

/// Sharing, page-out and page-in of the same VMs.
#[test]
fn sharing_under_a_cap() -> Result<()> {
    Lab::run("share, under a cap", 2, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        const CAPPED_MIB: u64 = 160;
        let start = |name: &str| toy_of(lab, &daemon, &options(name, CAPPED_MIB), "tenant");
        let toys = [start("a")?, start("b")?];
        for toy in &toys {
            daemon.set_dram_mib(&toy.name, CAPPED_MIB / 2)?;
            // What is in swap is not looked at: of the half that is left, the two have a quarter in common.
            let some = |info: &VmInfo| count(info, "shared_pages") > CAPPED_MIB * 256 / 10;
            daemon.wait_vm(&toy.name, "sharing", SETTLE_MAX, some)?;
        }
        for workload in ["random", "zipf", "seq"] {
            toys[0].begin(&format!("--workload {workload} --mode read-write --ops 20000"))?;
            toys[1].go(&format!("--workload {workload} --mode read --ops 20000"))?;
            toys[0].end()?;
        }
        for toy in &toys {
            let info = daemon.vm(&toy.name)?;
            for moved in ["share_copied_back_pages", "pages_in", "pages_out"] {
                ensure!(count(&info, moved) > 0, "{moved}: {info:#?}");
            }
            daemon.set_dram_mib(&toy.name, CAPPED_MIB)?;
            toy.go(READ_ALL)?;
        }
        for toy in &toys {
            toy.quit()?;
        }
        Ok(())
    })
}

/// Writes to all that it shares as fast as it can: the other keeps its frames, and is not even woken.
#[test]
fn a_hostile_writer_costs_only_itself() -> Result<()> {
    Lab::run("share, a hostile writer", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let (victim, writer) = (toy(lab, &daemon, "victim", "tenant")?, toy(lab, &daemon, "writer", "tenant")?);
        let before = wait_shared(&daemon, "victim", 2)?;
        wait_shared(&daemon, "writer", 2)?;
        let (started, cpu) = (Instant::now(), share_cpu(&daemon)?);
        writer.go("--workload random --mode read-write --seconds 10")?;
        let (elapsed, cpu) = (started.elapsed(), share_cpu(&daemon)? - cpu);
        let info = daemon.vm("writer")?;
        ensure!(count(&info, "share_copied_back_pages") > PAGES / 2, "it wrote to little of it: {info:#?}");
        // Looking for equal pages has 3 % of a core, whatever guests do; twice that leaves room for what is under way.
        ensure!(cpu <= elapsed * 6 / 100, "{cpu:?} of {elapsed:?} went into looking for equal pages");
        let after = daemon.vm("victim")?;
        for name in ["share_copied_back_pages", "faults_shared"] {
            ensure!(count(&before, name) == count(&after, name), "{name}: {before:#?} {after:#?}");
        }
        ensure!(count(&after, "shared_pages") >= count(&before, "shared_pages"), "{before:#?} {after:#?}");
        victim.go(READ_ALL)?;
        writer.go(READ_ALL)?;
        victim.quit()?;
        writer.quit()
    })
}

/// CPU time that sharing has taken for all VMs of the daemon.
fn share_cpu(daemon: &Daemon) -> Result<Duration> {
    let vms = daemon.client().vms()?;
    Ok(Duration::from_micros(vms.vms.iter().map(|vm| count(vm, "share_cpu_us")).sum()))
}

/// Shared pages that a guest gives back to its host, and those of a guest that starts anew.
#[test]
fn a_guest_that_gives_shared_pages_back_and_one_that_reboots() -> Result<()> {
    Lab::run("share, balloon and reboot", 2, |lab| {
        const FILL: &str = "fill 64";
        const FILLED: u64 = 64 * 256;
        let daemon = lab.daemon(Folios::Large)?;
        let start = |name: &str| {
            let device = "-device virtio-balloon-pci,id=b0";
            let mut options = GuestOptions::new(name, "").control().memory("-m 256M").more(device).may_reboot();
            options.run_options = ["--share-group", "tenant"].map(String::from).to_vec();
            let guest = lab.guest(&daemon, &options)?;
            // At once: what a guest says while nobody listens is lost.
            let control = guest.control()?;
            anyhow::Ok((guest, control))
        };
        let balloon = |target: &str| -> Result<()> {
            let output = daemon.run_cli(&["vm", "set", "web1", "--balloon-target", target])?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            daemon.wait_vm("web1", "its balloon as asked", SETTLE_MAX, |info| {
                let state = info.balloon.as_ref().map_or("", |balloon| balloon.state.as_str());
                state == if target == "off" { "off" } else { "reached" }
            })?;
            Ok(())
        };
        let shared = |name: &str| {
            let most = |info: &VmInfo| count(info, "shared_pages") >= FILLED * 9 / 10;
            daemon.wait_vm(name, "what was filled is shared", SETTLE_MAX, most)
        };
        let ((guest1, control1), (guest2, control2)) = (start("web1")?, start("web2")?);
        let (guests, mut controls) = ([guest1, guest2], [control1, control2]);
        controls.iter_mut().try_for_each(|control| control.run(FILL).map(drop))?;
        let before = shared("web1")?;
        shared("web2")?;
        ensure!(count(&before, "pages_zero_out") > 0, "no zero page in a whole guest: {before:#?}");

        // Most of it is free in the guest now, and goes into the balloon without being read.
        controls[0].run("fill 8")?;
        balloon("160M")?;
        let after = daemon.vm("web1")?;
        ensure!(count(&after, "shared_pages") < count(&before, "shared_pages"), "{before:#?} {after:#?}");
        controls[1].run("verify")?;
        balloon("off")?;
        controls[0].run(FILL)?;
        controls[0].run("run random passes=1")?;
        controls[0].run("verify")?;

        shared("web2")?;
        guests[1].qmp()?.execute("system_reset", json!({}))?;
        controls[1].wait_ready()?;
        controls[1].run(FILL)?;
        shared("web2")?;
        controls[1].run("run random passes=1 write=50")?;
        for (guest, control) in guests.iter().zip(&mut controls) {
            control.run("verify")?;
            control.run("poweroff")?;
            guest.finish()?;
        }
        Ok(())
    })
}

/// Two real guests with the same kernel and the same pages of their own.
#[test]
fn two_identical_guests() -> Result<()> {
    Lab::run("share, two guests", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let start = |name: &str| {
            let mut options = GuestOptions::new(name, "").control().memory("-m 256M");
            options.run_options = ["--share-group", "tenant"].map(String::from).to_vec();
            let guest = lab.guest(&daemon, &options)?;
            // At once: what a guest says while nobody listens is lost.
            let control = guest.control()?;
            anyhow::Ok((guest, control))
        };
        let mut guests = [start("web1")?, start("web2")?];
        guests.iter_mut().try_for_each(|(_, control)| control.run("fill 48").map(drop))?;
        daemon.wait_vm("web1", "pages shared", SETTLE_MAX, |info| count(info, "share_merged_pages") > 1000)?;
        daemon.kill9()?;
        daemon.start_again()?;
        for (guest, mut control) in guests {
            control.run("run random passes=1 write=50")?;
            control.run("verify")?;
            control.run("poweroff")?;
            guest.finish()?;
        }
        Ok(())
    })
}
