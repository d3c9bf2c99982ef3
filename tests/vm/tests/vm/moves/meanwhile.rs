//! What users and guests do while a VM moves: it waits, is refused by name, or ends the move. Nothing of it is lost.

use std::process::Child;

use anyhow::{Context, Result, ensure};
use pagoda_api::MoveOutcome;
use serde_json::json;
use vm_tests::qmp::Qmp;
use vm_tests::{GuestOptions, Lab, MIB, Qemu, wait};

use super::hosts::{Host, Hosts, text};
use super::moving::begin_and_send;
use super::{DOWNTIME, FILL, GIVEN_UP, WRITE, ensure_moved, ensure_stayed, options, power_off};

/// A first round takes some seconds.
const RATE: [&str; 2] = ["--bandwidth", "160M"];
/// In the middle of it.
const SOME: u64 = 8 * MIB;

/// With a monitor of the user's own, on whichever host it is.
fn with_monitor(lab: &Lab) -> GuestOptions {
    let monitor = format!("-qmp unix:{}/web1.user,server=on,wait=off", lab.dir().join("vms").display());
    options(Qemu::System).more("-device virtio-balloon-pci,id=b0").more(&monitor)
}

fn monitor(host: &Host) -> Result<Qmp> {
    Qmp::connect(&host.files.join("web1.user"))
}

fn begin(from: &Host, to: &Host) -> Result<Child> {
    begin_and_send(from, to, &[&RATE[..], &DOWNTIME[..]].concat(), SOME)
}

/// The exit status of the command, and what it said.
fn end(mut moving: Child) -> Result<(Option<i32>, String)> {
    let status = wait::until("the command ends", wait::HANG, || Ok(moving.try_wait()?))?;
    Ok((status.code(), text(&moving.wait_with_output()?.stderr)))
}

#[test]
fn other_operations_are_refused() -> Result<()> {
    Lab::run("operations on a VM that moves", 1, |lab| {
        let options = with_monitor(lab);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        let moving = begin(&hosts.one, &hosts.other)?;
        for words in [
            &["vm", "set", "web1", "--dram", "128M"][..],
            &["vm", "set", "web1", "--balloon-target", "128M"],
            &["vm", "set", "web1", "--shares", "7"],
            &["vm", "snapshot", "web1", "--name", "meanwhile"],
            &["vm", "move", "web1", "--to", "host2"],
            &["vm", "cont", "web1"],
            &["vm", "rm", "web1"],
        ] {
            let done = hosts.one.daemon.run_cli(words)?;
            let said = text(&done.stderr);
            println!("{words:?}: {}: {said}", done.status);
            ensure!(!done.status.success(), "{words:?} while it moves");
            let is_named = said.contains("a move of web1 is under way") || words[1] == "rm";
            ensure!(is_named, "{words:?}: {said}");
        }
        // Nobody may end or change it at the other host either.
        for words in [
            &["vm", "set", "web1", "--dram", "128M"][..],
            &["vm", "rm", "web1"],
            &["vm", "cont", "web1"],
            &["vm", "snapshot", "web1", "--name", "meanwhile"],
            &["vm", "move", "web1", "--to", "host1"],
        ] {
            let done = hosts.other.daemon.run_cli(words)?;
            println!("there {words:?}: {}: {}", done.status, text(&done.stderr));
            ensure!(!done.status.success(), "{words:?} where it comes to");
        }
        control.run("verify").context("it runs meanwhile")?;
        let (status, said) = end(moving)?;
        ensure!(status == Some(0), "{status:?}: {said}");
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let vm = hosts.other.daemon.vm("web1")?;
        ensure!(vm.dram_limit_bytes == vm.memory_bytes && vm.balloon.is_none(), "{vm:#?}");
        let mut control = hosts.other.control(&guest)?;
        control.run("verify")?;
        // There all of it is possible again.
        for words in [&["vm", "set", "web1", "--dram", "192M"][..], &["vm", "set", "web1", "--dram", "all"]] {
            let done = hosts.other.daemon.run_cli(words)?;
            ensure!(done.status.success(), "{words:?}: {}", text(&done.stderr));
        }
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}

#[test]
fn its_user_pauses_it() -> Result<()> {
    Lab::run("a VM is paused and let run while it moves", 1, |lab| {
        let options = with_monitor(lab);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;

        // Paused when it is to be stopped: nobody knows whether it is to run there.
        let moving = begin(&hosts.one, &hosts.other)?;
        let mut user = monitor(&hosts.one)?;
        user.execute("stop", json!({}))?;
        let (status, said) = end(moving)?;
        println!("paused: {status:?}: {said}");
        ensure!(status == Some(GIVEN_UP) && said.contains("paused"), "{status:?}: {said}");
        ensure!(user.status()? == "paused", "{}", user.status()?);
        user.execute("cont", json!({}))?;
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;

        // For a moment only.
        let moving = begin(&hosts.one, &hosts.other)?;
        user.execute("stop", json!({}))?;
        user.execute("cont", json!({}))?;
        control.run("verify").context("it runs on")?;
        let (status, said) = end(moving)?;
        ensure!(status == Some(0), "{status:?}: {said}");
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify")?;

        // Paused from before its move: it stays so.
        monitor(&hosts.other)?.execute("stop", json!({}))?;
        hosts.moves(&hosts.other, &hosts.one, &DOWNTIME)?;
        let mut user = monitor(&hosts.one)?;
        ensure!(user.status()? == "paused", "{}", user.status()?);
        user.execute("cont", json!({}))?;
        let mut control = hosts.one.control(&guest)?;
        control.run("verify")?;
        ensure_moved(&hosts, &hosts.other, &hosts.one)?;
        power_off(&hosts.one, control)
    })
}

#[test]
fn the_guest_is_reset() -> Result<()> {
    Lab::run("a guest is reset while it moves", 1, |lab| {
        let options = with_monitor(lab).may_reboot();
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        let moving = begin(&hosts.one, &hosts.other)?;
        // What it says there first, when it has booted, is not to be missed.
        let mut there = hosts.other.control(&guest)?;
        monitor(&hosts.one)?.execute("system_reset", json!({}))?;
        control.wait_ready().context("it boots again")?;
        control.run("fill 40")?;
        let (status, said) = end(moving)?;
        ensure!(status == Some(0), "{status:?}: {said}");
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        there.run("verify")?;

        // In the middle of its boot, or soon after.
        let moving = begin_and_send(&hosts.other, &hosts.one, &DOWNTIME, MIB)?;
        let mut back = hosts.one.control(&guest)?;
        monitor(&hosts.other)?.execute("system_reset", json!({}))?;
        let (status, said) = end(moving)?;
        ensure!(status == Some(0), "{status:?}: {said}");
        ensure_moved(&hosts, &hosts.other, &hosts.one)?;
        let is_ready = || Ok((there.has_said("ready") || back.has_said("ready")).then_some(()));
        wait::until("it goes on with its boot", wait::HANG, is_ready)?;
        back.run(FILL)?;
        back.run("verify")?;
        power_off(&hosts.one, back)
    })
}

/// Round after round is as long as the one before.
#[test]
fn a_guest_that_writes_faster_than_the_link() -> Result<()> {
    Lab::run("a guest writes faster than the link sends", 1, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        hosts.network.slow("300mbit")?;
        control.send(WRITE)?;
        control.wait_progress()?;
        let done = hosts.try_move(&hosts.one, &hosts.other, &["--max-time", "10s", "--downtime", "100ms"])?;
        let said = text(&done.stderr);
        let ended = hosts.one.daemon.client().move_of("web1")?;
        println!("{}: {said} {ended:?}", done.status);
        ensure!(done.status.code() == Some(GIVEN_UP) && ended.outcome == MoveOutcome::GivenUp, "{ended:?}");
        ensure!(ended.round > 1 && ended.elapsed_ms < 15_000 && ended.downtime_ms.is_none(), "{ended:?}");
        control.enough()?;
        control.reply().context("it has run all the time")?;
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        control.send("poweroff")?;
        hosts.one.daemon.wait_gone("web1")
    })
}

/// What the guest's writers wait now, by the word of its engine.
fn write_delay(host: &Host) -> Result<u64> {
    let vm = host.daemon.vm("web1")?;
    vm.counters.get("move_write_delay_us").copied().context("its engine says what writers wait")
}

/// The same guest and half of that link: once its writers are slowed, what it writes in a round can be sent.
#[test]
fn a_guest_that_writes_faster_than_the_link_is_slowed() -> Result<()> {
    Lab::run("a guest that writes faster than the link is slowed", 1, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        hosts.network.slow("150mbit")?;
        let slowly = ["--max-time", "4s", "--downtime", "100ms", "--on-timeout", "slow-guest"];

        // It is cancelled: its writers run at once.
        control.send(WRITE)?;
        control.wait_progress()?;
        let moving = begin_and_send(&hosts.one, &hosts.other, &slowly, SOME)?;
        let slowed = wait::until("its writers are slowed", wait::HANG, || {
            let status = hosts.one.daemon.client().move_of("web1")?;
            ensure!(!status.is_over(), "{status:?}");
            Ok((status.write_delay_us > 0).then_some(status))
        })?;
        ensure!(slowed.elapsed_ms >= 4000, "{slowed:?}");
        let shown = hosts.one.daemon.run_cli(&["moves", "show", "web1"])?;
        let shown = text(&shown.stdout);
        println!("{shown}");
        ensure!(shown.contains(" us for each first write to a page"), "{shown}");
        ensure!(write_delay(&hosts.one)? > 0, "nobody is slowed");
        let shown = hosts.one.daemon.vm("web1")?.moving.context("it is seen that it moves")?;
        ensure!(shown.host == hosts.other.name && shown.sent_bytes > 0, "{shown:?}");
        let explained = hosts.one.daemon.client().explain("web1")?;
        ensure!(explained.lines.iter().any(|line| line.term == "move"), "{explained:?}");
        let cancelled = hosts.one.daemon.run_cli(&["moves", "cancel", "web1"])?;
        ensure!(cancelled.status.success(), "{}", text(&cancelled.stderr));
        let (status, said) = end(moving)?;
        ensure!(status == Some(GIVEN_UP), "{status:?}: {said}");
        ensure!(write_delay(&hosts.one)? == 0, "it is slowed, and does not move");
        control.enough()?;
        control.reply().context("it has run all the time")?;
        ensure_stayed(&hosts, &guest, &mut control)?;

        control.send(WRITE)?;
        control.wait_progress()?;
        hosts.moves(&hosts.one, &hosts.other, &slowly)?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        ensure!(write_delay(&hosts.other)? == 0, "it is slowed where it has come to");
        let mut control = hosts.other.control(&guest)?;
        control.enough()?;
        control.reply().context("each page had what was written last")?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}
