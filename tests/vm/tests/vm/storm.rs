//! Eviction storms: the cap moves down and up again and again under verifying guests.

use std::time::Duration;

use anyhow::{Result, ensure};
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, Watch};

const CAPS_MIB: [u64; 4] = [300, 96, 200, 128];

fn finished(guest: &Guest) -> bool {
    let is_over = |text: &String| pagoda_guest::lines::Line::parse(text).is_some_and(|line| line.result().is_some());
    guest.console.lines(0).iter().any(is_over) || guest.wait_exit(Duration::ZERO).is_ok()
}

/// Moves the caps of `vms` until one of them has ended.
fn storm(daemon: &Daemon, guests: &[&Guest]) -> Result<u32> {
    const SETTLE_MAX: Duration = Duration::from_secs(300);
    let mut rounds = 0;
    for (step, cap) in CAPS_MIB.iter().enumerate().cycle() {
        for (index, guest) in guests.iter().enumerate() {
            // Against each other: one grows while the other shrinks.
            let cap = if index % 2 == 0 { *cap } else { CAPS_MIB[(step + 1) % CAPS_MIB.len()] };
            if guests.iter().any(|guest| finished(guest)) {
                return Ok(rounds);
            }
            let obeyed = daemon.set_dram_mib(&guest.name, cap).and_then(|()| {
                daemon.wait_vm(&guest.name, "within its cap", SETTLE_MAX, |info| info.resident_bytes <= cap << 20)
            });
            // It may have ended in this moment.
            if let Err(error) = obeyed
                && !guests.iter().any(|guest| finished(guest))
            {
                return Err(error);
            }
        }
        rounds += 1;
    }
    Ok(rounds)
}

fn options(name: &str) -> GuestOptions {
    GuestOptions::new(name, "pagoda.work=random:seconds=10,hot:seconds=5 pagoda.mib=300").memory("-m 512M").dram("300M")
}

#[test]
fn one_vm_small_folios() -> Result<()> {
    Lab::run("eviction storm, 4 KiB", 1, |lab| one_vm(lab, Folios::Small))
}

#[test]
fn one_vm_large_folios() -> Result<()> {
    Lab::run("eviction storm, large folios", 1, |lab| one_vm(lab, Folios::Large))
}

fn one_vm(lab: &Lab, folios: Folios) -> Result<()> {
    let daemon = lab.daemon(folios)?;
    let guest = lab.guest(&daemon, &options("web1").cpus(2))?;
    guest.wait_phase("random")?;
    let watch = Watch::start(&daemon, "web1");
    let rounds = storm(&daemon, &[&guest])?;
    guest.finish()?;
    let seen = watch.stop()?;
    ensure!(rounds >= 3, "only {rounds} rounds");
    seen.ensure_paged(20_000)?;
    daemon.wait_gone("web1")
}

#[test]
fn two_vms() -> Result<()> {
    Lab::run("eviction storm, two VMs", 2, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let guests = [lab.guest(&daemon, &options("web1"))?, lab.guest(&daemon, &options("web2"))?];
        for guest in &guests {
            guest.wait_phase("random")?;
        }
        let rounds = storm(&daemon, &[&guests[0], &guests[1]])?;
        for guest in &guests {
            guest.finish()?;
        }
        ensure!(rounds >= 2, "only {rounds} rounds");
        daemon.wait_gone("web1")?;
        daemon.wait_gone("web2")
    })
}
