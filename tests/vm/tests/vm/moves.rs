//! Guests that verify their memory move between two hosts: they go on as if nothing had been, and run on one host at a time.

mod arbiter;
mod copied;
mod disks;
mod drain;
mod ended;
mod etcd;
mod faults;
mod hosts;
mod killed;
mod matrix;
mod meanwhile;
mod moving;
mod network;
mod paused;
mod postcopy;
pub mod processes;
mod remote;
mod room;

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use pagoda_api::{AdmitRequest, CreateVm, HostPatch, MoveOutcome, MovePlan, MoveStatus, VmKind, VmSpec, VmState};
use vm_tests::control::Control;
use vm_tests::{Guest, GuestOptions, Lab, MIB, Qemu, wait};

use self::hosts::{Host, Hosts, text};

const MEMORY_MIB: u64 = 256;
const FILL: &str = "fill 120";
/// For a guest that writes all the time: until the test has had enough.
const WRITE: &str = "run random seconds=900 write=100";
/// On the machines of a CI a stop and a start may take longer than 30 ms.
const DOWNTIME: [&str; 2] = ["--downtime", "2s"];

fn options(qemu: Qemu) -> GuestOptions {
    GuestOptions::new("web1", "").qemu(qemu).memory(&format!("-m {MEMORY_MIB}M")).control()
}

/// The guest ends where it is, with a good verdict of its own, and leaves nothing there.
fn power_off(host: &Host, mut control: Control) -> Result<()> {
    control.send("poweroff")?;
    host.daemon.wait_gone("web1")?;
    let console = host.console();
    ensure!(console.contains("PAGODA result ok"), "its console on {}: {console}", host.name);
    Ok(())
}

/// It has moved: the source has nothing left, and one QEMU runs.
fn ensure_moved(hosts: &Hosts, from: &Host, to: &Host) -> Result<()> {
    from.ensure_nothing_left()?;
    let vm = to.daemon.vm("web1")?;
    ensure!(vm.state == VmState::Running && !vm.loading, "{vm:#?}");
    wait::until("one QEMU is left", wait::HANG, || Ok((hosts.qemus().len() == 1).then_some(())))?;
    ensure!(vm.pid == hosts.qemus().first().copied(), "{:?} {:?}", vm.pid, hosts.qemus());
    let ended = from.daemon.client().move_of("web1")?;
    println!("{ended:?}");
    ensure!(ended.outcome == MoveOutcome::Moved && ended.host == to.name, "{ended:?}");
    Ok(())
}

/// It runs where it was, and nothing of it is on the other host.
fn ensure_stayed(hosts: &Hosts, guest: &Guest, control: &mut Control) -> Result<()> {
    let vm = hosts.one.daemon.vm("web1")?;
    ensure!(vm.state == VmState::Running, "{vm:#?}");
    control.run("run random passes=1 write=100")?;
    control.run("verify").context("it goes on where it was")?;
    wait::until("one QEMU is left", wait::HANG, || Ok((hosts.qemus() == [guest.pid()]).then_some(())))
}

fn idle_moves(qemu: Qemu) -> Result<()> {
    Lab::run("an idle guest moves", 2, |lab| {
        let options = options(qemu);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        let plan = hosts.try_move(&hosts.one, &hosts.other, &["--dry-run", "--json"])?;
        ensure!(plan.status.success(), "{}", text(&plan.stderr));
        let plan: MovePlan = serde_json::from_slice(&plan.stdout)?;
        println!("{plan:?}");
        ensure!(plan.fits && plan.sends_bytes >= 120 * MIB, "{plan:?}");

        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME)?;
        guest.wait_exit(wait::HANG)?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("its memory is right there")?;
        control.run("run random passes=2 write=100")?;
        control.run("verify").context("it goes on there")?;
        power_off(&hosts.other, control)?;
        hosts.other.daemon.wait_gone("web1")
    })
}

#[test]
fn an_idle_guest_moves() -> Result<()> {
    idle_moves(Qemu::System)
}

#[test]
fn an_idle_guest_moves_qemu_10() -> Result<()> {
    idle_moves(Qemu::Ten)
}

fn writing_moves(dram: Option<&str>) -> Result<()> {
    Lab::run("a guest that writes moves", 2, |lab| {
        let options = GuestOptions { dram: dram.map(str::to_owned), ..options(Qemu::System) };
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        control.send(WRITE)?;
        control.wait_progress()?;
        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME)?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.wait_progress().context("it goes on with what it did")?;
        control.enough()?;
        control.reply().context("each page had what was written last")?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}

#[test]
fn a_guest_that_writes_moves() -> Result<()> {
    writing_moves(None)
}

/// What is in swap at its source moves too, and what comes in and goes out meanwhile.
#[test]
fn a_guest_that_writes_and_pages_moves() -> Result<()> {
    writing_moves(Some("96M"))
}

#[test]
fn into_less_dram() -> Result<()> {
    Lab::run("a guest moves into less DRAM", 2, |lab| {
        const DRAM_MIB: u64 = 128;
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 160")?;
        let dram = format!("{DRAM_MIB}M");
        hosts.moves(&hosts.one, &hosts.other, &[&DOWNTIME[..], &["--dram", &dram]].concat())?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let vm = hosts.other.daemon.vm("web1")?;
        let (limit, resident) = (vm.dram_limit_bytes, vm.resident_bytes);
        ensure!(limit == DRAM_MIB * MIB && resident <= limit && vm.swapped_bytes > 32 * MIB, "{vm:#?}");
        let mut control = hosts.other.control(&guest)?;
        control.run("verify").context("also what is in swap is right")?;
        power_off(&hosts.other, control)
    })
}

/// How often it moves, unless this says more.
const MOVES: usize = 6;
const MOVES_ENV: &str = "PAGODA_MOVES";

#[test]
fn back_and_forth() -> Result<()> {
    Lab::run("a guest moves back and forth", 2, |lab| {
        let times = std::env::var(MOVES_ENV).map_or(Ok(MOVES), |moves| moves.parse()).context(MOVES_ENV)? / 2;
        let options = options(Qemu::System).dram("128M");
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        for time in 0..times {
            for (from, to) in [(&hosts.one, &hosts.other), (&hosts.other, &hosts.one)] {
                hosts.moves(from, to, &DOWNTIME)?;
                ensure_moved(&hosts, from, to)?;
                control = to.control(&guest)?;
                control.run("verify").with_context(|| format!("time {time}, on {}", to.name))?;
                control.run("run random passes=1 write=50")?;
            }
        }
        power_off(&hosts.one, control)
    })
}

/// Exit statuses, as `pagoda --help` has them.
const REFUSED: i32 = 6;
const GIVEN_UP: i32 = 7;

#[test]
fn what_is_refused_changes_nothing() -> Result<()> {
    Lab::run("moves that are refused", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        let other = &hosts.other;
        let mut refused = |case: &str, status: i32, expected: &str| {
            let done = hosts.try_move(&hosts.one, other, &[])?;
            let said = text(&done.stderr);
            println!("{case}: {said}");
            ensure!(done.status.code() == Some(status) && said.contains(expected), "{case}: {} {said}", done.status);
            ensure_stayed(&hosts, &guest, &mut control).with_context(|| case.to_owned())
        };

        other.daemon.client().untrust(hosts.one.name)?;
        refused("it is not trusted there", REFUSED, "pagoda host trust")?;
        hosts.trust(other, &hosts.one)?;

        let accepts = other.accepts(&options)?;
        for (case, section, expected) in [
            ("nothing is accepted", accepts.replace("accept = true", "accept = false"), "accept"),
            ("its program is not listed", accepts.replace("programs = [", "programs = [\"/bin/true\"] #"), "program"),
            ("its directory is not listed", accepts.replace("paths = [", "paths = [\"/usr/share\"] #"), "path"),
            ("its user is not listed", accepts.replace("\"root\"", "65534"), "user"),
        ] {
            other.daemon.stop()?;
            other.configure(&section)?;
            other.daemon.start_again()?;
            hosts.wait_connected()?;
            refused(case, REFUSED, expected)?;
        }
        other.daemon.stop()?;
        other.configure(&accepts)?;
        other.daemon.start_again()?;
        hosts.wait_connected()?;

        let same_name = CreateVm {
            name: "web1".into(),
            memory: vec![64 * MIB],
            kind: VmKind::Plain,
            spec: VmSpec::default(),
            launch: None,
            outbox: None,
        };
        other.daemon.client().create(&same_name)?;
        refused("the name is taken", REFUSED, "web1")?;
        other.daemon.client().delete("web1")?;

        leave_no_room(other)?;
        refused("there is no room", REFUSED, "admitted")?;
        other.ensure_nothing_left()?;

        control.send("poweroff")?;
        hosts.one.daemon.wait_gone("web1")
    })
}

/// Makes the pool so small that no VM as the tests' has room.
fn leave_no_room(host: &Host) -> Result<()> {
    /// A part of the pool is kept free, so that a step is not quite as far as it should be.
    const STEPS: u32 = 10;
    let client = host.daemon.client();
    for _ in 0..STEPS {
        let room = client.admit(&AdmitRequest { memory_bytes: MEMORY_MIB * MIB, dram: None, min: 0 })?;
        if !room.admitted {
            return Ok(());
        }
        let pool =
            client.host()?.policy.pool_bytes.saturating_sub(room.memory_free_bytes) + room.memory_needed_bytes / 2;
        client.patch_host(&HostPatch { pool: Some(pool), ..HostPatch::default() })?;
    }
    anyhow::bail!("{} has room still", host.name)
}

/// So slow that something can happen in the middle: 5 MB/s, for 120 MiB.
const SLOW: [&str; 2] = ["--bandwidth", "40M"];

/// Waits until so much has been sent.
fn wait_sent(host: &Host, bytes: u64) -> Result<()> {
    wait::until("memory is sent", wait::HANG, || {
        // It may not have begun yet.
        let Ok(status) = host.daemon.client().move_of("web1") else { return Ok(None) };
        ensure!(!status.is_over(), "{status:?}");
        Ok((status.sent_bytes >= bytes).then_some(()))
    })
}

/// Starts to move the VM to the other host, and leaves it in the middle.
fn begin_slowly(hosts: &Hosts) -> Result<()> {
    let begun = hosts.try_move(&hosts.one, &hosts.other, &[&SLOW[..], &["--detach"]].concat())?;
    ensure!(begun.status.success(), "{}", text(&begun.stderr));
    wait_sent(&hosts.one, 8 * MIB)
}

/// How the move has ended, when it has.
fn wait_over(host: &Host) -> Result<MoveStatus> {
    wait::until("the move is over", wait::HANG, || {
        let status = host.daemon.client().move_of("web1")?;
        Ok(status.is_over().then_some(status))
    })
}

#[test]
fn a_destination_that_is_killed_ends_the_move() -> Result<()> {
    Lab::run("the destination's daemon is killed", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        let mut moving = hosts.one.daemon.cli()?;
        moving.args(["vm", "move", "web1", "--to", hosts.other.name]).args(SLOW);
        let mut moving = moving.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("start the move")?;
        wait_sent(&hosts.one, 8 * MIB)?;
        hosts.other.daemon.kill9()?;
        control.run("verify").context("it runs meanwhile")?;
        hosts.other.daemon.start_again()?;
        let status = wait::until("the move ends", wait::HANG, || Ok(moving.try_wait()?))?;
        let said = text(&moving.wait_with_output()?.stderr);
        println!("{said}");
        ensure!(status.code() == Some(GIVEN_UP), "{status}: {said}");
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        hosts.wait_connected()?;

        hosts.moves(&hosts.one, &hosts.other, &DOWNTIME).context("and then it moves")?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}

#[test]
fn a_move_is_cancelled() -> Result<()> {
    Lab::run("a move is cancelled", 2, |lab| {
        let options = options(Qemu::System);
        let hosts = Hosts::start(lab, &options)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        begin_slowly(&hosts)?;
        let second = hosts.try_move(&hosts.one, &hosts.other, &[])?;
        ensure!(!second.status.success(), "it moves already");
        let cancelled = hosts.one.daemon.run_cli(&["moves", "cancel", "web1"])?;
        ensure!(cancelled.status.success(), "{}", text(&cancelled.stderr));
        let ended = wait_over(&hosts.one)?;
        ensure!(ended.outcome == MoveOutcome::GivenUp, "{ended:?}");
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        control.send("poweroff")?;
        hosts.one.daemon.wait_gone("web1")
    })
}
