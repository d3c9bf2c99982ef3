//! What a daemon that starts does about a VM that was moving, by what its note says and by what QEMU says.

use super::destination::Destination;
use super::source::Source;
use super::types::{Action, Qemu};
use crate::note::Note;
use crate::units::{HostKey, Moment};

/// Who goes on with a VM after a restart.
#[derive(Clone, Debug)]
pub enum Recovered {
    /// Nobody: the VM is this host's alone, or not here.
    Settled,
    Source(Box<Source>),
    Destination(Box<Destination>),
}

/// The host `me` finds this note, which has been made durable since it was read, and QEMU like this. The link is down at first.
///
/// A VM that is this host's and that an attempt had stopped runs on. A VM that its user has paused is no such VM: the caller
/// leaves out the `Run` for it.
pub fn recover(me: HostKey, note: Option<Note>, qemu: Qemu, now: Moment, actions: &mut Vec<Action>) -> Recovered {
    let destination = |destination| Recovered::Destination(Box::new(destination));
    match note {
        None => Recovered::Settled,
        Some(Note::Owned(_)) => {
            if qemu == Qemu::Stopped {
                actions.push(Action::Run);
            }
            Recovered::Settled
        }
        Some(Note::Given(offered, decision)) => {
            Recovered::Source(Box::new(Source::recover(me, offered, decision, qemu, now, actions)))
        }
        Some(Note::Incoming(offered)) => destination(Destination::recover_incoming(me, offered, now, actions)),
        Some(Note::Accepted(offered, by)) => {
            destination(Destination::recover_accepted(me, offered, by, qemu, now, actions))
        }
        Some(Note::Refused(offered)) => destination(Destination::recover_refused(me, offered, now, actions)),
    }
}
