//! Daemons that are killed at any moment of a move: one host has the VM in the end, and the VM has all of its memory.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vm_tests::{Lab, Qemu, wait};

use super::hosts::{Hosts, text};
use super::moving::settled;
use super::{DOWNTIME, options, power_off};

/// Whose daemon is killed in the middle of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
    Both,
}

/// After so much of the time that the move before took, in tenths. Beyond the last one there is nothing left to be killed.
const MOMENTS: [u32; 6] = [1, 4, 7, 8, 9, 10];

fn killed_at_any_time(victim: Victim) -> Result<()> {
    // One slot: of the two QEMUs one runs.
    Lab::run("daemons are killed in the middle of moves", 1, |lab| {
        let options = options(Qemu::System).memory("-m 144M");
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 48")?;
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
        ensure!(span < Duration::from_secs(60), "it takes {span:?}");
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
