//! Moves that are ended in the middle, at either end: the guest runs on where it was, and nothing of it is left at the other host.

use anyhow::{Context, Result, ensure};
use pagoda_api::{MoveOutcome, MovePhase};
use vm_tests::{Lab, Qemu};

use super::hosts::{Hosts, text};
use super::{DOWNTIME, FILL, begin_slowly, ensure_moved, ensure_stayed, options, power_off, wait_over};

fn ended_by(name: &str, end: impl Fn(&Hosts) -> Result<()>, expected: &str) -> Result<()> {
    Lab::run(name, 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        begin_slowly(&hosts)?;
        let coming = hosts.other.daemon.client().move_of("web1")?;
        ensure!(coming.phase == MovePhase::Copying && coming.sent_bytes > 0, "{coming:?}");
        end(&hosts)?;
        let ended = wait_over(&hosts.one)?;
        println!("{ended:?}");
        let why = ended.why.clone().unwrap_or_default();
        ensure!(ended.outcome == MoveOutcome::GivenUp && why.contains(expected), "{ended:?}");
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        let known = wait_over(&hosts.other)?;
        ensure!(known.outcome == MoveOutcome::GivenUp, "{known:?}");
        for (who, whom) in [(&hosts.one, &hosts.other), (&hosts.other, &hosts.one)] {
            hosts.trust(who, whom)?;
        }
        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME).context("and then it moves")?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        // It runs there: too late.
        let late = hosts.other.daemon.run_cli(&["moves", "cancel", "web1"])?;
        ensure!(!late.status.success(), "it was cancelled where it runs");
        let mut control = hosts.other.control(&guest)?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}

#[test]
fn cancelled_at_its_destination() -> Result<()> {
    let cancel = |hosts: &Hosts| {
        let cancelled = hosts.other.daemon.run_cli(&["moves", "cancel", "web1"])?;
        ensure!(cancelled.status.success(), "{}", text(&cancelled.stderr));
        Ok(())
    };
    ended_by("a move is cancelled at its destination", cancel, "cancelled there")
}

#[test]
fn the_destination_trusts_its_source_no_more() -> Result<()> {
    let untrust = |hosts: &Hosts| hosts.other.daemon.client().untrust(hosts.one.name).map(drop).context("untrust");
    ended_by("the destination of a move trusts its source no more", untrust, "trust")
}

#[test]
fn the_source_trusts_its_destination_no_more() -> Result<()> {
    let untrust = |hosts: &Hosts| hosts.one.daemon.client().untrust(hosts.other.name).map(drop).context("untrust");
    ended_by("the source of a move trusts its destination no more", untrust, "not trusted any more")
}
