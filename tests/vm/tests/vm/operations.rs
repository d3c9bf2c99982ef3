//! Operations on a whole VM that no daemon lived to end: the next one ends them, and the guest runs again.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use pagoda_abi::attach::Packet;
use pagoda_image::checked_text::{seal, unseal};
use pagoda_sys::socket::{Connection, Listener, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use vm_tests::qmp::Qmp;
use vm_tests::{Daemon, Folios, GuestOptions, Lab, Qemu, wait};

fn receive(agent: &Connection) -> Result<Packet> {
    match agent.recv()? {
        Received::Message { packet, .. } => Ok(packet),
        other => bail!("the agent went away: {other:?}"),
    }
}

/// Does something while the gate of the only VM is open: by a daemon of a few lines, which dies then.
fn with_open_gate(daemon: &Daemon, act: impl FnOnce() -> Result<()>) -> Result<()> {
    let listener = Listener::bind(&daemon.attach_socket())?;
    // The agent of a VM that has ended never comes.
    wait::until("the agent comes back", wait::HANG, || {
        let mut polled = [PollFd::new(&listener, PollFlags::IN)];
        let ready = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).context("look for the agent")?;
        Ok((ready > 0).then_some(()))
    })?;
    let agent = listener.accept()?;
    let hello = receive(&agent)?;
    ensure!(matches!(hello, Packet::Hello { .. }), "{hello:?}");
    agent.send(&Packet::Welcome { flags: 0 }, &[])?;
    agent.send(&Packet::Gate { seq: 1, open: true }, &[])?;
    let answer = receive(&agent)?;
    ensure!(answer == Packet::Gated { seq: 1, open: true }, "{answer:?}");
    act()
}

fn leave_ram_out(qmp: &mut Qmp) -> Result<()> {
    let capability = json!({ "capability": "x-ignore-shared", "state": true });
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": [capability] })).map(drop)
}

/// Has the VM's record say that a daemon died in the middle of its snapshot.
fn note_operation(daemon: &Daemon, name: &str) -> Result<()> {
    let [record, ..] = daemon.files_of(name);
    let text = fs::read_to_string(&record)?;
    let (first_line, json) = unseal(&text).map_err(anyhow::Error::msg)?;
    let mut content: Value = serde_json::from_str(json)?;
    content["operation"] = json!({ "kind": "snapshot", "image": "0".repeat(32), "resume": true });
    fs::write(&record, seal(first_line, &content.to_string()))?;
    Ok(())
}

fn cut_off(qemu: Qemu) -> Result<()> {
    Lab::run("an operation that was cut off", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let work = "pagoda.work=random:seconds=900,verify pagoda.mib=60";
        let guest = lab.guest(&daemon, &GuestOptions::new("web1", work).memory("-m 256M").qemu(qemu))?;
        guest.wait_phase("random")?;
        let mut qmp = guest.qmp()?;
        ensure!(leave_ram_out(&mut qmp).is_err(), "the gate is shut");
        daemon.kill9()?;
        with_open_gate(&daemon, || leave_ram_out(&mut qmp))?;
        wait::until("the gate is shut", wait::HANG, || Ok(leave_ram_out(&mut qmp).is_err().then_some(())))?;
        // The last step of a migration stops the guest, as in a snapshot.
        qmp.execute("migrate", json!({ "uri": "exec:cat >/dev/null" }))?;
        wait::until("the guest stands still", wait::HANG, || Ok((qmp.status()? == "postmigrate").then_some(())))?;
        note_operation(&daemon, "web1")?;
        daemon.start_again()?;
        wait::until("the guest runs again", wait::HANG, || Ok((qmp.status()? == "running").then_some(())))?;
        let [record, ..] = daemon.files_of("web1");
        wait::until("the record knows it", wait::HANG, || {
            let text = fs::read_to_string(&record).context("read the record")?;
            Ok((!text.contains("operation")).then_some(()))
        })?;
        let capabilities = qmp.execute("query-migrate-capabilities", json!({}))?;
        let is_off = |one: &Value| one["capability"] == "x-ignore-shared" && one["state"] == false;
        ensure!(capabilities.as_array().is_some_and(|all| all.iter().any(is_off)), "{capabilities}");
        ensure!(leave_ram_out(&mut qmp).is_err(), "the gate is open");
        daemon.set_dram_mib("web1", 128).context("its settings can be changed again")?;
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn the_next_daemon_lets_a_guest_run_that_stood_still() -> Result<()> {
    cut_off(Qemu::System)
}

#[test]
fn the_next_daemon_lets_a_guest_run_that_stood_still_qemu_10() -> Result<()> {
    cut_off(Qemu::Ten)
}
