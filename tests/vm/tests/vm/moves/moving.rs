//! A move that is under way, and its end, as users see them.

use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{MovePhase, MoveStatus, VmState};
use vm_tests::wait;

use super::hosts::{Host, Hosts, text};

/// A move is in its next phase within seconds, or it is over.
pub const PHASE_MAX: Duration = Duration::from_secs(60);

/// Starts to move the VM.
pub fn begin(from: &Host, to: &Host, how: &[&str]) -> Result<Child> {
    let mut moving = from.daemon.cli()?;
    moving.args(["vm", "move", "web1", "--to", to.name]).args(how);
    moving.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("start the move")
}

/// The same, and waits until so much has been sent.
pub fn begin_and_send(from: &Host, to: &Host, how: &[&str], bytes: u64) -> Result<Child> {
    let mut moving = begin(from, to, how)?;
    wait::until("memory is sent", wait::HANG, || {
        ensure!(moving.try_wait()?.is_none(), "it does not move: {:?}", move_of(from));
        // The one before it may be known still.
        Ok(move_of(from).is_some_and(|of| !of.is_over() && of.sent_bytes >= bytes).then_some(()))
    })?;
    Ok(moving)
}

/// What the command says, which has ended in one of these ways.
pub fn end(mut moving: Child, expected: &[i32]) -> Result<String> {
    let status = wait::until("the command ends", wait::HANG, || Ok(moving.try_wait()?))?;
    let output = moving.wait_with_output()?;
    let said = text(&output.stdout) + &text(&output.stderr);
    let last = said.trim().rsplit(['\n', '\r']).next().unwrap_or_default().to_owned();
    ensure!(status.code().is_some_and(|code| expected.contains(&code)), "{status}: {said}");
    Ok(format!("{status}: {last}"))
}

pub fn move_of(host: &Host) -> Option<MoveStatus> {
    host.daemon.client().move_of("web1").ok()
}

pub fn wait_phase(host: &Host, phase: MovePhase) -> Result<()> {
    let mut last = None;
    let found = wait::until(&format!("the move is {}", phase.word()), PHASE_MAX, || {
        last = move_of(host).filter(|of| !of.is_over() || phase == MovePhase::Over);
        Ok(last.as_ref().is_some_and(|of| of.phase == phase).then_some(()))
    });
    found.with_context(|| format!("{last:?}"))
}

/// The host that has the VM, once there is one and nothing is under way any more.
pub fn settled(hosts: &Hosts) -> Result<&Host> {
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
