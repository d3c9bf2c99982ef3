//! Guests run at their destination before their memory is there: what they need comes first, whatever happens meanwhile.

use std::process::Child;

use anyhow::{Context, Result, ensure};
use pagoda_api::{MovePhase, VmState};
use vm_tests::{GuestOptions, Lab, MIB, Qemu, wait};

use super::hosts::{Host, Hosts, text};
use super::moving::{begin, end, settled, wait_phase};
use super::network::Way;
use super::{DOWNTIME, FILL, WRITE, ensure_moved, options, power_off};

/// Exit status of `pagoda vm move`.
const MOVED: i32 = 0;

const POSTCOPY: [&str; 4] = ["--downtime", "2s", "--mode", "postcopy"];
/// What nobody waits for comes at 4 MB/s, so that a tail lasts.
const SLOW: [&str; 6] = ["--downtime", "2s", "--mode", "postcopy", "--bandwidth", "32M"];

fn moves(options: &GuestOptions, how: &[&str]) -> Result<()> {
    Lab::run("a guest runs there before its memory does", 2, |lab| {
        let hosts = Hosts::start(lab, options)?;
        let guest = hosts.guest(lab, options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        control.send(WRITE)?;
        control.wait_progress()?;
        hosts.moves(&hosts.one, &hosts.other, how)?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.wait_progress().context("it goes on with what it did")?;
        control.enough()?;
        control.reply().context("each page had what was written last")?;
        control.run("verify")?;
        hosts.moves(&hosts.other, &hosts.one, &DOWNTIME).context("and back as any other")?;
        control = hosts.one.control(&guest)?;
        control.run("verify")?;
        power_off(&hosts.one, control)?;
        hosts.other.ensure_nothing_left()
    })
}

#[test]
fn a_guest_that_writes() -> Result<()> {
    moves(&options(Qemu::System), &POSTCOPY)
}

#[test]
fn a_guest_that_writes_qemu_10() -> Result<()> {
    moves(&options(Qemu::Ten), &POSTCOPY)
}

/// What is in swap at its source comes from there, and what it has no room for goes into swap at its destination.
#[test]
fn a_guest_that_writes_and_pages() -> Result<()> {
    moves(&options(Qemu::System).dram("96M"), &POSTCOPY)
}

#[test]
fn hybrid_of_a_guest_that_writes_and_pages() -> Result<()> {
    moves(&options(Qemu::System).dram("96M"), &["--downtime", "25ms", "--mode", "hybrid"])
}

/// A guest whose memory is coming, and the command that has moved it.
fn begin_tail(hosts: &Hosts) -> Result<Child> {
    let moving = begin(&hosts.one, &hosts.other, &SLOW)?;
    wait_phase(&hosts.one, MovePhase::Postcopy)?;
    Ok(moving)
}

fn left(host: &Host) -> Result<u64> {
    Ok(host.daemon.client().move_of("web1")?.left_bytes)
}

#[test]
fn what_it_needs_comes_first() -> Result<()> {
    Lab::run("a thread does not wait for what others do not need", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        guest.control()?.run(FILL)?;
        let moving = begin_tail(&hosts)?;
        let before = left(&hosts.one)?;
        let mut control = hosts.other.control(&guest)?;
        // All of what it has filled, which by itself would come in half a minute.
        control.run("verify")?;
        let after = left(&hosts.one)?;
        println!("{before} bytes were missing before it was read, {after} behind that");
        ensure!(before > 64 * MIB && after < before / 2, "{before} {after}");
        end(moving, &[MOVED])?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}

#[test]
fn a_cut_link_is_waited_for() -> Result<()> {
    Lab::run("the link is cut while memory follows", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        guest.control()?.run(FILL)?;
        let mut moving = begin_tail(&hosts)?;
        let mut control = hosts.other.control(&guest)?;
        for way in [Way::Both, Way::From(0), Way::From(1)] {
            hosts.network.cut(way)?;
            control.send("verify")?;
            wait::until("a host notices the cut", wait::HANG, || {
                let status = hosts.one.daemon.client().move_of("web1")?;
                ensure!(!status.is_over(), "{status:?}");
                Ok(status.waits.is_some().then_some(()))
            })?;
            hosts.network.heal(way)?;
            control.reply().with_context(|| format!("what it needed has come: {way:?}"))?;
            if moving.try_wait()?.is_some() {
                break;
            }
        }
        end(moving, &[MOVED])?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}

#[derive(Clone, Copy, Debug)]
enum Victim {
    Source,
    Destination,
    Both,
}

fn killed(victims: &[Victim]) -> Result<()> {
    Lab::run("daemons are killed while memory follows", 2, |lab| {
        let options = options(Qemu::System).dram("160M");
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        guest.control()?.run(FILL)?;
        let mut moving = begin_tail(&hosts)?;
        let mut control = hosts.other.control(&guest)?;
        for victim in victims {
            control.send("run random passes=1 write=50")?;
            let killed = match victim {
                Victim::Source => vec![&hosts.one],
                Victim::Destination => vec![&hosts.other],
                Victim::Both => vec![&hosts.one, &hosts.other],
            };
            killed.iter().try_for_each(|host| host.daemon.kill9())?;
            killed.iter().try_for_each(|host| host.daemon.start_again().map(drop))?;
            control.reply().with_context(|| format!("{victim:?} was killed, and it goes on"))?;
            control.run("verify").with_context(|| format!("{victim:?} was killed"))?;
        }
        moving.wait().context("the command ends")?;
        let at = settled(&hosts)?;
        ensure!(at.name == hosts.other.name, "it is on {}", at.name);
        hosts.one.ensure_nothing_left()?;
        ensure!(hosts.qemus().len() == 1, "{:?}", hosts.qemus());
        control.run("verify")?;
        power_off(&hosts.other, control)?;
        hosts.other.ensure_nothing_left()
    })
}

#[test]
fn the_source_is_killed() -> Result<()> {
    killed(&[Victim::Source])
}

#[test]
fn the_destination_is_killed() -> Result<()> {
    killed(&[Victim::Destination, Victim::Both])
}

#[test]
fn a_guest_that_ends_needs_nothing_more() -> Result<()> {
    Lab::run("a guest ends while its memory follows", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        guest.control()?.run(FILL)?;
        let mut moving = begin_tail(&hosts)?;
        let vm = hosts.other.daemon.vm("web1")?;
        ensure!(vm.state == VmState::Running, "{vm:#?}");
        let snapshot = hosts.other.daemon.run_cli(&["vm", "snapshot", "web1", "--name", "early", "--no-disks"])?;
        let said = text(&snapshot.stderr);
        ensure!(!snapshot.status.success() && said.contains("host"), "{} {said}", snapshot.status);
        let control = hosts.other.control(&guest)?;
        power_off(&hosts.other, control)?;
        wait::until("the move ends", wait::HANG, || Ok(moving.try_wait()?))?;
        hosts.one.ensure_nothing_left()?;
        hosts.other.ensure_nothing_left()
    })
}
