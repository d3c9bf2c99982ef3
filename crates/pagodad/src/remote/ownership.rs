//! Whose the remote tier of a VM is that moves, or has moved.
//!
//! Only a tier that etcd keeps is handed over: one in a registry file is copied, and stays this host's. Who owns the VM says its note
//! ([`crate::moves::notes`]); a record without a move is always this host's. `docs/decisions/2026-11-29-remote-tier-moves.md`.

use anyhow::Result;
use pagoda_move::note::{Note, Offered, Owned};

use super::open::Before;
use super::space::Dirs;
use crate::record::{Operation, OperationKind, Record};

/// Whose a tier is, as far as this host knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// It is this host's.
    Here,
    /// Another host's, for good.
    Elsewhere,
    /// Another host may have it, or may still get it.
    Undecided,
}

/// See [`Owner`].
///
/// # Errors
/// The VM's note cannot be read. Nobody knows then.
pub fn owner_of(dirs: &Dirs, record: &Record) -> Result<Owner> {
    let operation = record.operation.filter(|operation| is_shared(record) && operation.kind.is_move());
    Ok(match operation {
        None => Owner::Here,
        Some(operation) => owner_by(operation, dirs.notes.read(&record.name)?),
    })
}

/// The same of a VM that moves and has this note. A move begins with a note, and ends with one if the VM stays or has come. One that tells
/// of another attempt may be another VM's.
fn owner_by(operation: Operation, note: Option<Note>) -> Owner {
    let is_its = |offered: Offered| operation.image.0 == offered.attempt.0.into();
    match (operation.kind, note) {
        (OperationKind::Move, Some(Note::Owned(_))) => Owner::Here,
        (OperationKind::Move, Some(Note::Given(offered, _))) if is_its(offered) => Owner::Undecided,
        (OperationKind::Arrival, Some(Note::Owned(Owned::Came(offered)))) if is_its(offered) => Owner::Here,
        (
            OperationKind::Arrival,
            Some(Note::Incoming(offered) | Note::Accepted(offered, _) | Note::Refused(offered)),
        ) if is_its(offered) => Owner::Undecided,
        _ => Owner::Elsewhere,
    }
}

/// Who may have owned the tier of a VM before this host, which may own it ([`may_own`]). A destination that was offered the VM may run it
/// by the word of an operator, and changes its tier then, before this host hears of it. One that was granted it and did not answer may
/// have run it before an operator let it run here again.
///
/// # Errors
/// As [`owner_of`].
pub fn before(dirs: &Dirs, record: &Record) -> Result<Before> {
    let was_offered = |note| matches!(note, Some(Note::Owned(Owned::Offered(_) | Owned::Back(_))));
    let is_doubtful = is_shared(record) && was_offered(dirs.notes.read(&record.name)?);
    Ok(if is_doubtful { Before::ThisHost } else { Before::Anybody })
}

fn is_shared(record: &Record) -> bool {
    record.remote.as_ref().is_some_and(|remote| remote.cluster.is_some())
}

/// Whether this host may open the tier of a VM as its owner: the VM may run here, or runs.
///
/// # Errors
/// As [`owner_of`].
pub fn may_own(dirs: &Dirs, record: &Record) -> Result<bool> {
    Ok(match owner_of(dirs, record)? {
        Owner::Here => true,
        Owner::Elsewhere => false,
        Owner::Undecided => {
            let arrives = record.operation.is_some_and(|operation| operation.kind == OperationKind::Arrival);
            arrives && matches!(dirs.notes.read(&record.name)?, Some(Note::Accepted(..)))
        }
    })
}
