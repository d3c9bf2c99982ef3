//! Equal pages of VMs in one share group: shared when they are cold, verified whatever happens meanwhile.
//!
//! Toys of the same seed hold the same pages, each of them once.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmInfo;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, DaemonOptions, Folios, Lab, MIB, Toy};

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
