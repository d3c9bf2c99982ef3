//! Equal pages of VMs in one share group: shared when they are cold, verified whatever happens meanwhile.
//!
//! Toys of the same seed hold the same pages, each of them once.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{VmInfo, VmState};
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, DaemonOptions, Folios, GuestOptions, Lab, MIB, Toy};

const MEMORY_MIB: u64 = 64;
const PAGES: u64 = MEMORY_MIB * 256;
/// Against a hang only: a few seconds are enough where nothing else runs.
const SETTLE_MAX: Duration = Duration::from_secs(300);
const READ_ALL: &str = "--workload seq --mode read --passes 1";

fn options(name: &str) -> ToyOptions {
    ToyOptions { name: name.into(), memory_mib: MEMORY_MIB, dram_mib: MEMORY_MIB, threads: 1 }
}

fn sharing_daemon(lab: &Lab, folios: Folios) -> Result<Rc<Daemon>> {
    lab.daemon_with(DaemonOptions { more: vec!["--page-sharing".into()], ..DaemonOptions::new(folios) })
}

fn toy(lab: &Lab, daemon: &Daemon, name: &str, group: &str) -> Result<Rc<Toy>> {
    let toy = lab.toy_with(daemon, &options(name), &["--share-group", group])?;
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
        let daemon = sharing_daemon(lab, folios)?;
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
        let daemon = sharing_daemon(lab, Folios::Small)?;
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
        let daemon = sharing_daemon(lab, Folios::Small)?;
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
        let daemon = sharing_daemon(lab, folios)?;
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
        let daemon = sharing_daemon(lab, Folios::Large)?;
        let toys = [toy(lab, &daemon, "a", "tenant")?, toy(lab, &daemon, "b", "tenant")?];
        for toy in &toys {
            daemon.set_dram_mib(&toy.name, MEMORY_MIB / 2)?;
        }
        for workload in ["random", "zipf", "seq"] {
            toys[0].begin(&format!("--workload {workload} --mode read-write --ops 20000"))?;
            toys[1].go(&format!("--workload {workload} --mode read --ops 20000"))?;
            toys[0].end()?;
        }
        for toy in &toys {
            daemon.set_dram_mib(&toy.name, MEMORY_MIB)?;
            toy.go(READ_ALL)?;
        }
        for toy in &toys {
            toy.quit()?;
        }
        Ok(())
    })
}

/// Two real guests with the same kernel and the same pages of their own.
#[test]
fn two_identical_guests() -> Result<()> {
    Lab::run("share, two guests", 2, |lab| {
        const TOUCHED_MIB: u64 = 48;
        let daemon = sharing_daemon(lab, Folios::Small)?;
        let start = |name: &str| {
            let work = format!("pagoda.work=seq,random,hot pagoda.mib={TOUCHED_MIB}");
            let mut options = GuestOptions::new(name, &work).memory("-m 256M").deadline(Duration::from_secs(1500));
            options.run_options = ["--share-group", "tenant"].map(String::from).to_vec();
            lab.guest(&daemon, &options)
        };
        let guests = [start("web1")?, start("web2")?];
        for guest in &guests {
            guest.wait_ready()?;
        }
        daemon.wait_vm("web1", "pages shared", SETTLE_MAX, |info| count(info, "share_merged_pages") > 1000)?;
        daemon.kill9()?;
        daemon.start_again()?;
        for guest in &guests {
            guest.finish()?;
        }
        Ok(())
    })
}
