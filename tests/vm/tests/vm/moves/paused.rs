//! Guests that their user has paused: they stay so, at whichever host they are in the end, and run on when their user wants it.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use pagoda_api::MoveOutcome;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use vm_tests::qmp::Qmp;
use vm_tests::{Lab, MIB, Qemu, wait};

use super::hosts::{Host, Hosts, text};
use super::{DOWNTIME, FILL, GIVEN_UP, REFUSED, ensure_moved, ensure_stayed, options, power_off, wait_sent};

/// Some seconds for what [`FILL`] fills.
const SLOWLY: [&str; 2] = ["--bandwidth", "200M"];

/// By the daemon's own monitor, which serves one client at a time.
fn qmp<T>(host: &Host, say: impl Fn(&mut Qmp) -> Result<T>) -> Result<T> {
    let path = host.daemon.state_dir().join("vms/web1.qmp");
    wait::until("the monitor answers", wait::HANG, || Ok(Qmp::connect(&path).and_then(|mut qmp| say(&mut qmp)).ok()))
}

fn status(host: &Host) -> Result<String> {
    let status = qmp(host, |qmp| qmp.execute("query-status", json!({})))?;
    Ok(status["status"].as_str().context("a status")?.to_owned())
}

fn pause(host: &Host) -> Result<()> {
    qmp(host, |qmp| qmp.execute("stop", json!({})))?;
    ensure!(status(host)? == "paused");
    Ok(())
}

fn let_run(host: &Host) -> Result<()> {
    let done = host.daemon.run_cli(&["vm", "cont", "web1"])?;
    ensure!(done.status.success(), "pagoda vm cont: {} {}", done.status, text(&done.stderr));
    ensure!(status(host)? == "running");
    Ok(())
}

#[test]
fn a_paused_guest_moves_and_is_continued_there() -> Result<()> {
    Lab::run("a paused guest moves", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        pause(&hosts.one)?;
        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME)?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        ensure!(status(&hosts.other)? == "paused", "nobody lets it run but its user");
        // QEMU before 10.0 would abort. A daemon that starts knows it, too.
        hosts.other.daemon.stop()?;
        hosts.other.daemon.start_again()?;
        hosts.wait_connected()?;
        // It says so as long as it does not know yet what its QEMU can.
        const NOT_YET: i32 = 1;
        let again = wait::until("the daemon knows its VM again", wait::HANG, || {
            let tried = hosts.try_move(&hosts.other, &hosts.one, &[])?;
            Ok((tried.status.code() != Some(NOT_YET)).then_some(tried))
        })?;
        let said = text(&again.stderr);
        ensure!(again.status.code() == Some(REFUSED) && said.contains("pagoda vm cont"), "{} {said}", again.status);
        let_run(&hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("its memory is right")?;
        hosts.moves(&hosts.other, &hosts.one, &DOWNTIME).context("and then it moves")?;
        ensure_moved(&hosts, &hosts.other, &hosts.one)?;
        power_off(&hosts.one, hosts.one.control(&guest)?)
    })
}

/// The QEMU at the destination does not take the state, so that the source gives up after 5 s, with the VM stopped.
#[test]
fn a_paused_guest_whose_move_is_given_up_after_its_stop_is_continued_where_it_was() -> Result<()> {
    Lab::run("the move of a paused guest is given up after its stop", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        pause(&hosts.one)?;
        let mut moving = hosts.one.daemon.cli()?;
        moving.args(["vm", "move", "web1", "--to", hosts.other.name]).args(SLOWLY);
        let moving = moving.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("start the move")?;
        wait_sent(&hosts.one, 8 * MIB)?;
        let others: Vec<u32> = hosts.qemus().into_iter().filter(|pid| *pid != guest.pid()).collect();
        ensure!(others.len() == 1, "{others:?}");
        let waiting = i32::try_from(others[0]).ok().and_then(Pid::from_raw).context("a process")?;
        kill_process(waiting, Signal::STOP).context("stop the QEMU that waits")?;
        let done = moving.wait_with_output()?;
        let said = text(&done.stderr);
        println!("{said}");
        ensure!(done.status.code() == Some(GIVEN_UP), "{} {said}", done.status);
        let ended = hosts.one.daemon.client().move_of("web1")?;
        ensure!(ended.outcome == MoveOutcome::GivenUp, "{ended:?}");
        // QEMU's word for a guest that was paused when its state was saved.
        ensure!(status(&hosts.one)? == "postmigrate", "it stays as its user has left it");
        let_run(&hosts.one)?;
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME).context("and then it moves")?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        power_off(&hosts.other, hosts.other.control(&guest)?)
    })
}
