//! What users ask for and see of moves: the API's words for what [`source`] and the sessions of VMs that come do.
//!
//! Nothing is decided here. Texts of other hosts have been looked at where they came in.

mod dry_run;

use std::cmp::Reverse;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use pagoda_api::types::{
    AdmitRequest, ApiError, ErrorCode, MoveDirection, MoveList, MoveMode, MoveOnTimeout, MoveOutcome, MovePhase,
    MovePlan, MoveReply, MoveRequest, MoveStatus, check_dram, check_min,
};
use pagoda_core::units::Bytes;
use pagoda_link::PublicKey;
use pagoda_link::hosts::Hosts;
use pagoda_move::owner::End;
use pagoda_move::rounds::{Mode, OnTimeout};
use pagoda_move::units::AttemptId;

use super::arbiter::shown;
use super::sessions::{Arrived, Input, Session};
use super::source::progress::{Ended, Progress};
use super::source::{self, Asked};
use crate::hosts;
use crate::registry::Registry;
use crate::remote::handover;

/// Begins a move, or says what it would come to.
///
/// # Errors
/// What keeps the VM from moving. Nothing is changed.
pub fn begin(registry: &Arc<Registry>, name: &str, request: &MoveRequest) -> Result<MoveReply, ApiError> {
    request.check().map_err(bad_request)?;
    let vm = registry.get(name)?;
    if let Some(dram) = request.dram {
        check_dram(dram, vm.memory_bytes).map_err(bad_request)?;
        check_min(vm.policy.min_bytes, dram).map_err(bad_request)?;
    }
    if request.dry_run {
        let Asked { has_arbiter, disks } = source::ask(registry, &wanted(name, request))?;
        let ping = hosts::ping(registry, &request.to)?;
        let dram = Some(request.dram.unwrap_or(vm.dram_limit_bytes));
        let such = AdmitRequest { memory_bytes: vm.memory_bytes, dram, min: vm.policy.min_bytes };
        let reserved = registry.would_admit(&such)?;
        let fate = registry.lock().get(name).and_then(|vm| handover::fate(&vm.record));
        let plan = dry_run::plan(&vm, &ping, &reserved, request, fate, source::STOP_COST);
        let plan = dry_run::with_disks(plan, disks);
        let arbiter = shown::of_plan(&registry.moves.arbiter.standing(), has_arbiter, &ping.name);
        return Ok(MoveReply::Plan(MovePlan { arbiter: Some(arbiter), ..plan }));
    }
    source::begin(registry, &wanted(name, request))?;
    show(registry, name).map(MoveReply::Begun)
}

/// Moves that are under way, and those that have ended of late: the last one of each VM.
pub fn list(registry: &Arc<Registry>) -> MoveList {
    let mut moves = under_way(registry);
    for (vm, peer) in registry.moves.unclear.all() {
        if moves.iter().all(|known| known.vm != vm) {
            moves.push(of_unclear(vm, host_name(registry, &peer)));
        }
    }
    let mut ended: Vec<(SystemTime, MoveStatus)> =
        registry.moves.outgoing.ended().into_iter().map(|ended| (ended.at, of_ended(ended))).collect();
    ended.extend(registry.moves.sessions.ended().into_iter().map(|ended| (ended.at, of_arrived(registry, &ended))));
    // Moves that ended last come first.
    ended.sort_by_key(|(at, _)| Reverse(*at));
    for (_, ended) in ended {
        if moves.iter().all(|known| known.vm != ended.vm) {
            moves.push(ended);
        }
    }
    // What becomes of them is about to be known.
    for vm in registry.moves.left() {
        if moves.iter().all(|known| known.vm != vm) {
            moves.push(of_left(vm));
        }
    }
    moves.sort_by(|a, b| a.vm.cmp(&b.vm));
    MoveList { moves }
}

/// The move of a VM: the one that is under way, else the last one.
///
/// # Errors
/// None is known.
pub fn show(registry: &Arc<Registry>, name: &str) -> Result<MoveStatus, ApiError> {
    list(registry).moves.into_iter().find(|known| known.vm == name).ok_or_else(|| unknown(name))
}

/// Gives a move up if that is still possible, at either end. How it has ended is seen later.
///
/// # Errors
/// No move is under way; it has come here already.
pub fn cancel(registry: &Arc<Registry>, name: &str) -> Result<MoveStatus, ApiError> {
    if let Some((_, session)) = registry.moves.sessions.of_vm(name) {
        let phase = session.progress.lock().unwrap_or_else(PoisonError::into_inner).phase;
        let host = host_name(registry, &session.peer);
        if phase_of(phase) == MovePhase::Granted {
            let what = format!("{name} was granted by {host}, and the arbiter has not said yet whose it is");
            return Err(ApiError::new(ErrorCode::WrongState, what, Some("cancel it at the host that it comes from")));
        }
        if !matches!(phase_of(phase), MovePhase::Preparing | MovePhase::Disks | MovePhase::Copying | MovePhase::Stopped)
        {
            let what = format!("{name} has come from {host}, and is this host's");
            return Err(ApiError::new(ErrorCode::WrongState, what, Some("move it back if you want it there")));
        }
        // One that ends in this moment, or is granted, is as if this had come later.
        let _ = session.inputs.try_send(Input::Cancel("its move was cancelled there".to_owned()));
        return show(registry, name);
    }
    source::cancel(registry, name)?;
    show(registry, name)
}

/// The other host is gone for good, an operator says.
///
/// # Errors
/// No move is under way.
pub fn resolve(registry: &Arc<Registry>, name: &str) -> Result<MoveStatus, ApiError> {
    match registry.moves.sessions.of_vm(name) {
        // One that ends in this moment needs nobody's word.
        Some((_, session)) => drop(session.inputs.send(Input::Resolve)),
        None => source::resolve(registry, name)?,
    }
    tracing::warn!(vm = %name, "an operator says that the other host of its move is gone for good");
    show(registry, name)
}

fn wanted(name: &str, request: &MoveRequest) -> source::Request {
    source::Request {
        vm: name.to_owned(),
        to: request.to.clone(),
        dram: request.dram,
        bandwidth: request.bandwidth,
        downtime: Duration::from_millis(request.downtime_ms),
        max_time: request.max_time_s.map(Duration::from_secs),
        on_timeout: match request.on_timeout {
            MoveOnTimeout::Abort => OnTimeout::Abort,
            MoveOnTimeout::Postcopy => OnTimeout::Postcopy,
            MoveOnTimeout::SlowGuest => OnTimeout::SlowGuest,
        },
        mode: match request.mode {
            MoveMode::Auto | MoveMode::Precopy => Mode::Precopy,
            MoveMode::Postcopy => Mode::Postcopy,
            MoveMode::Hybrid => Mode::Hybrid,
        },
        split: request.split,
        shared_disks: request.shared_disks,
        copy_disks: request.copy_disks,
    }
}

/// Those that are under way, from this host and to it.
pub fn under_way(registry: &Registry) -> Vec<MoveStatus> {
    let outgoing = registry.moves.outgoing.all();
    let mut moves: Vec<MoveStatus> = outgoing.iter().map(|progress| of_outgoing(progress, MoveOutcome::None)).collect();
    for session in registry.moves.sessions.all() {
        let memory = registry.lock().get(&session.vm).map_or(0, |vm| vm.record.memory());
        moves.push(of_incoming(&session, host_name(registry, &session.peer), memory));
    }
    moves
}

fn of_outgoing(progress: &Progress, outcome: MoveOutcome) -> MoveStatus {
    MoveStatus {
        vm: progress.vm.clone(),
        direction: MoveDirection::Out,
        host: progress.to.clone(),
        phase: phase_of(progress.phase),
        sent_bytes: progress.sent.0,
        spared_bytes: progress.spared.0,
        pool_bytes: progress.placed.0,
        saved_bytes: progress.saved.0,
        left_bytes: progress.left.0,
        total_bytes: progress.total.0,
        round: if progress.sent.0 == 0 && progress.round == 0 { 0 } else { progress.round.saturating_add(1) },
        bytes_per_second: progress.rate.map(|rate| rate.0),
        written_bytes_per_second: progress.written_rate.0,
        elapsed_ms: millis(progress.elapsed),
        eta_ms: progress.eta.map(millis),
        expected_downtime_ms: progress.expected_downtime.map(millis),
        downtime_ms: progress.downtime.map(millis),
        write_delay_us: micros(progress.write_delay),
        disk_total_bytes: progress.disks.total.0,
        disk_copied_bytes: progress.disks.done.0,
        disk_files: progress.disk_files.clone(),
        waits: progress.waits.clone(),
        arbiter: progress.arbiter.clone(),
        outcome,
        why: None,
    }
}

/// Of an earlier daemon's, whose VM's agent has not come back yet.
fn of_left(vm: String) -> MoveStatus {
    let progress = Progress { phase: "left", ..Progress::new(&vm, "", AttemptId(1), Bytes::ZERO) };
    let waits = Some("the daemon has just started".to_owned());
    MoveStatus { waits, ..of_outgoing(&progress, MoveOutcome::None) }
}

/// Nothing is done about it here.
fn of_unclear(vm: String, host: String) -> MoveStatus {
    let waits = format!(
        "{host} speaks of a VM of this name that moved between the two hosts, and the note here does not tell of that: it may be another \
         one, or one that an operator has let run. Nothing is ended. Look at `pagoda ls` on both hosts"
    );
    MoveStatus { host, waits: Some(waits), ..of_left(vm) }
}

fn of_ended(ended: Ended) -> MoveStatus {
    let outcome = match ended.end {
        // It was not taken, or never asked for.
        End::GivenUp if is_untouched(&ended.progress) => MoveOutcome::Refused,
        end => outcome_of(end),
    };
    let status = of_outgoing(&ended.progress, outcome);
    // What was said of a move that went on.
    let nothing_more = MoveStatus { phase: MovePhase::Over, waits: None, eta_ms: None, ..status };
    MoveStatus { expected_downtime_ms: None, write_delay_us: 0, why: ended.why, ..nothing_more }
}

const fn outcome_of(end: End) -> MoveOutcome {
    match end {
        End::Moved => MoveOutcome::Moved,
        End::GivenUp => MoveOutcome::GivenUp,
        End::CameBack => MoveOutcome::CameBack,
        End::Crashed => MoveOutcome::Crashed,
        End::Superseded => MoveOutcome::Superseded,
        End::Lost => MoveOutcome::Lost,
    }
}

/// The status of a move to this host that has ended.
fn of_arrived(registry: &Registry, ended: &Arrived) -> MoveStatus {
    let status = of_incoming(&ended.session, host_name(registry, &ended.session.peer), 0);
    let why = status.why.clone().or_else(|| {
        (ended.end == End::Superseded).then(|| {
            "an operator has taken it back at the host that it came from, where it runs; what was here is ended"
                .to_owned()
        })
    });
    let over = MoveStatus { phase: MovePhase::Over, outcome: outcome_of(ended.end), why, ..status };
    MoveStatus { sent_bytes: ended.came.0, elapsed_ms: millis(ended.elapsed), ..over }
}

/// Whether nothing of the VM was sent yet: no page, and nothing of a disk.
fn is_untouched(progress: &Progress) -> bool {
    progress.sent.0 == 0 && progress.round == 0 && !progress.has_begun
}

/// This host knows little of it: the source has the rounds and the clock.
fn of_incoming(session: &Session, host: String, memory: u64) -> MoveStatus {
    let progress = session.progress.lock().unwrap_or_else(PoisonError::into_inner);
    MoveStatus {
        vm: session.vm.clone(),
        direction: MoveDirection::In,
        host,
        phase: phase_of(progress.phase),
        sent_bytes: session.came().0,
        spared_bytes: 0,
        pool_bytes: 0,
        saved_bytes: 0,
        left_bytes: progress.left,
        total_bytes: memory,
        round: progress.rounds,
        bytes_per_second: None,
        written_bytes_per_second: 0,
        elapsed_ms: millis(session.began.elapsed()),
        eta_ms: None,
        expected_downtime_ms: None,
        downtime_ms: None,
        write_delay_us: 0,
        disk_total_bytes: 0,
        disk_copied_bytes: 0,
        disk_files: Vec::new(),
        waits: None,
        arbiter: progress.arbiter.clone(),
        outcome: MoveOutcome::None,
        why: progress.why.clone(),
    }
}

/// The words of [`source`] and of the sessions.
fn phase_of(word: &str) -> MovePhase {
    match word {
        "" | "greeting" | "reserving" | "preparing" => MovePhase::Preparing,
        "disks" => MovePhase::Disks,
        "copying" => MovePhase::Copying,
        "stopping" | "finishing" | "loading" | "ready" => MovePhase::Stopped,
        "granted" | "claiming" => MovePhase::Granted,
        "postcopy" => MovePhase::Postcopy,
        "moved" | "running" | "ending" => MovePhase::Settling,
        "over" => MovePhase::Over,
        _ => MovePhase::Unknown,
    }
}

/// Its name, or its key if it is not trusted any more.
fn host_name(registry: &Registry, key: &PublicKey) -> String {
    let hosts = Hosts::in_dir(&registry.config.hosts.dir).all().unwrap_or_default();
    let found = hosts.into_iter().find(|host| host.key == *key);
    found.map_or_else(|| format!("{key:?}"), |host| host.name)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn bad_request(text: String) -> ApiError {
    ApiError::new(ErrorCode::BadRequest, text, None)
}

fn unknown(name: &str) -> ApiError {
    let what = format!("no move of {name} is known");
    ApiError::new(ErrorCode::NoSuchVm, what, Some("`pagoda moves` shows those that are, for an hour after their end"))
}

#[cfg(test)]
mod tests {
    use pagoda_move::units::Rate;

    use super::*;

    fn progress() -> Progress {
        Progress::new("web1", "host2", AttemptId(3), Bytes::from_gib(4))
    }

    #[test]
    fn a_move_that_has_just_begun() {
        let status = of_outgoing(&progress(), MoveOutcome::None);
        assert_eq!((status.phase, status.round, status.left_bytes), (MovePhase::Preparing, 0, 4 << 30));
        assert!(!status.is_over() && status.direction == MoveDirection::Out && status.host == "host2", "{status:?}");
        let first = Progress { phase: "copying", sent: Bytes(4096), rate: Some(Rate(7)), ..progress() };
        let status = of_outgoing(&first, MoveOutcome::None);
        assert_eq!((status.phase, status.round, status.bytes_per_second), (MovePhase::Copying, 1, Some(7)));
        let slowed = Progress { write_delay: Duration::from_micros(400), ..first };
        assert_eq!((status.write_delay_us, of_outgoing(&slowed, MoveOutcome::None).write_delay_us), (0, 400));
    }

    #[test]
    fn ends_have_names() {
        let ended = |end, sent| Ended {
            progress: Progress {
                sent: Bytes(sent),
                waits: Some("w".into()),
                eta: Some(Duration::ZERO),
                write_delay: Duration::from_micros(50),
                ..progress()
            },
            end,
            why: Some("because".into()),
            at: SystemTime::UNIX_EPOCH,
        };
        for (end, sent, expected) in [
            (End::Moved, 4096, MoveOutcome::Moved),
            (End::GivenUp, 0, MoveOutcome::Refused),
            (End::GivenUp, 4096, MoveOutcome::GivenUp),
            (End::CameBack, 4096, MoveOutcome::CameBack),
            (End::Crashed, 0, MoveOutcome::Crashed),
            (End::Superseded, 0, MoveOutcome::Superseded),
            (End::Lost, 0, MoveOutcome::Lost),
        ] {
            let status = of_ended(ended(end, sent));
            assert_eq!((status.outcome, status.phase), (expected, MovePhase::Over), "{end:?}");
            assert!(status.waits.is_none() && status.eta_ms.is_none() && status.write_delay_us == 0);
            assert!(status.why.as_deref() == Some("because"));
        }
    }
}
