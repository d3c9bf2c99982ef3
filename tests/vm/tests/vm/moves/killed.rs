//! Daemons that are killed at any moment of a move: one host has the VM in the end, and the VM has all of its memory.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::VmState;
use vm_tests::{Lab, Qemu, wait};

use super::hosts::{Host, Hosts, text};
use super::{DOWNTIME, FILL, MEMORY_MIB, options, power_off};

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
    Both,
}

/// After so much of the time that the move before took, in tenths. Beyond the last one there is nothing left to be killed.
const MOMENTS: [u32; 6] = [1, 4, 7, 8, 9, 10];

/// The host that has the VM, once there is one and nothing is under way any more.
fn settled(hosts: &Hosts) -> Result<&Host> {
    let both = [&hosts.one, &hosts.other];
    let found = wait::until("one host has the VM", wait::HANG, || {
        let mut having = Vec::new();
        for host in both {
            let client = host.daemon.client();
            // A daemon that has just started may not answer yet.
            let (Ok(vms), Ok(moves)) = (client.vms(), client.moves()) else { return Ok(None) };
            if moves.moves.iter().any(|of| !of.is_over()) {
                return Ok(None);
            }
            let vm = vms.vms.into_iter().find(|vm| vm.name == "web1");
            having.extend(vm.map(|vm| (host, vm)));
        }
        Ok(match &having[..] {
            [(host, vm)] if vm.state == VmState::Running && !vm.loading => Some(*host),
            _ => None,
        })
    });
    found.with_context(|| {
        let list = |host: &Host| (host.daemon.client().vms().ok(), host.daemon.client().moves().ok());
        format!("{:#?} {:#?}", list(&hosts.one), list(&hosts.other))
    })
}

fn killed_at_any_time(victim: Victim) -> Result<()> {
    Lab::run("daemons are killed in the middle of moves", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        let begun = Instant::now();
        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME)?;
        let span = begun.elapsed();
        let mut at = &hosts.other;
        control = at.control(&guest)?;
        for (round, tenths) in MOMENTS.into_iter().enumerate() {
            let to = if at.name == hosts.one.name { &hosts.other } else { &hosts.one };
            let mut moving = at.daemon.cli()?;
            moving.args(["vm", "move", "web1", "--to", to.name]).args(DOWNTIME);
            let mut moving = moving.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().context("start the move")?;
            let until = Instant::now() + span * tenths / 10;
            while Instant::now() < until {
                // Looks are what users do meanwhile.
                let _ = at.daemon.client().moves();
            }
            let killed = match victim {
                Victim::Source => vec![at],
                Victim::Destination => vec![to],
                Victim::Both => vec![at, to],
            };
            killed.iter().try_for_each(|host| host.daemon.kill9())?;
            killed.iter().try_for_each(|host| host.daemon.start_again().map(drop))?;
            hosts.wait_connected()?;
            let status = wait::until("the command ends", wait::HANG, || Ok(moving.try_wait()?))?;
            let said = text(&moving.wait_with_output()?.stderr);
            let found = settled(&hosts)?;
            println!("round {round}: {victim:?} after {tenths}/10: {status}, it is on {}; {said}", found.name);
            if found.name != at.name {
                control = found.control(&guest)?;
            }
            at = found;
            control.run("verify").with_context(|| format!("round {round}, {victim:?}"))?;
            control.run("run random passes=1 write=50")?;
            ensure!(hosts.qemus().len() == 1, "{:?}", hosts.qemus());
            let other = if at.name == hosts.one.name { &hosts.other } else { &hosts.one };
            other.ensure_nothing_left().with_context(|| format!("round {round}, {victim:?}"))?;
        }
        ensure!(span < Duration::from_secs(60), "{MEMORY_MIB} MiB take {span:?}");
        power_off(at, control)
    })
}

#[test]
fn the_source_at_any_time() -> Result<()> {
    killed_at_any_time(Victim::Source)
}

#[test]
fn the_destination_at_any_time() -> Result<()> {
    killed_at_any_time(Victim::Destination)
}

#[test]
fn both_at_any_time() -> Result<()> {
    killed_at_any_time(Victim::Both)
}
