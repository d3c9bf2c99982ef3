//! Whether a VM could move now: the checks of both hosts, as far as they can be made before anything is changed.

use std::sync::mpsc::{RecvTimeoutError, channel as queue};
use std::thread;
use std::time::Duration;

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode};
use pagoda_core::units::Bytes;
use pagoda_link::LinkError;
use pagoda_move::note::Note;
use pagoda_move::units::{AttemptId, ConnectionNo};
use pagoda_move::wire::Control;
use pagoda_move::wire::offer::{Capabilities, Reason};

use super::check::{Checked, check};
use super::request::{Request, new_attempt};
use crate::hosts;
use crate::moves::channel::{self, ControlReceiver};
use crate::moves::notes::FIRST;
use crate::registry::Registry;

/// How long the other host may take to compare. It does nothing else for it.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What two hosts say of a VM that could move.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Both hosts ask one and the same arbiter.
    pub has_arbiter: bool,
    /// Bytes of the disks that would be copied.
    pub disks: Bytes,
}

/// Asks the destination, too.
///
/// # Errors
/// What keeps the VM from moving. Nothing is changed here or there.
pub fn ask(registry: &std::sync::Arc<Registry>, request: &Request) -> Result<Asked, ApiError> {
    let checked = check(registry, request)?;
    let refuse = |why: String| {
        let what = format!("{} does not move to {}: {why}", request.vm, checked.host.name);
        ApiError::new(ErrorCode::Refused, what, None)
    };
    let failed = |error: anyhow::Error| refuse(in_full(error.as_ref()));
    let own = match registry.moves.notes().read(&request.vm).map_err(failed)? {
        None => FIRST,
        Some(Note::Owned(owned)) => owned.generation(),
        Some(_) => return Err(refuse("an earlier move of it has not ended: see `pagoda moves`".to_owned())),
    };
    let connection = channel::connect(&checked.own, &checked.host, &request.vm, 0);
    let (sender, mut receiver) = connection.map_err(|error| unreachable(&checked, &error))?.control;
    let attempt = new_attempt().map_err(failed)?;
    let hello = Control::Hello(checked.offer.hello(attempt, ConnectionNo(1), own));
    let silent = |why: String| ApiError::new(ErrorCode::Unreachable, format!("{}: {why}", checked.host.name), None);
    sender.send(&hello).map_err(|error| silent(in_full(&error)))?;
    // It says now and then that it is there, which is no answer.
    let (done, is_done) = queue::<()>();
    let watched = sender.clone();
    let watch = move || {
        if is_done.recv_timeout(ANSWER_MAX) == Err(RecvTimeoutError::Timeout) {
            watched.cut();
        }
    };
    thread::Builder::new().name("ask".into()).spawn(watch).map_err(|error| silent(error.to_string()))?;
    let mut answer = || -> Result<Control, ApiError> {
        match answer(&mut receiver, attempt).map_err(silent)? {
            Control::Refuse { reasons, .. } => Err(refuse(in_words(&reasons))),
            answer => Ok(answer),
        }
    };
    let Control::Welcome(welcome) = answer()? else {
        return Err(silent("it does not say that the VM is welcome".into()));
    };
    if welcome.capabilities.has(Capabilities::DISKS) {
        let specification = checked.offer.specification.clone();
        sender.send(&Control::Check { attempt, specification }).map_err(|error| silent(in_full(&error)))?;
        answer()?;
    }
    drop(done);
    let has_arbiter = welcome.capabilities.has(Capabilities::ARBITER);
    let disks = checked.offer.disks.iter().map(|disk| disk.content).fold(0, u64::saturating_add);
    Ok(Asked { has_arbiter, disks: Bytes(disks) })
}

/// What the destination says of the attempt: that it is welcome, or possible, or why not.
fn answer(receiver: &mut ControlReceiver, attempt: AttemptId) -> Result<Control, String> {
    loop {
        match receiver.receive().map_err(|error| in_full(&error))? {
            message if message.attempt() != attempt => {}
            message @ (Control::Welcome(_) | Control::Possible { .. } | Control::Refuse { .. }) => return Ok(message),
            Control::Forgotten { .. } => return Err("it does not know any more what it was asked".to_owned()),
            _ => {}
        }
    }
}

/// What a host says that refuses, and what to do about it.
pub fn in_words(reasons: &[Reason]) -> String {
    let told: Vec<String> = reasons.iter().map(|reason| format!("{} ({})", reason.what, reason.remedy)).collect();
    told.join("; ")
}

/// A host that does not trust this one has refused: it answers.
pub fn unreachable(checked: &Checked, error: &LinkError) -> ApiError {
    let said = hosts::unreachable(&checked.host, error, &checked.own.public());
    ApiError { code: if hosts::is_distrust(error) { ErrorCode::Refused } else { said.code }, ..said }
}
