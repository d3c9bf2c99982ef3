//! Answers messages about attempts that a host has no machine for: late ones, repeated ones, and those of a peer that missed an
//! end.

use crate::note::{Note, Offered, Owned};
use crate::units::{Generation, HostKey};
use crate::wire::Control;
use crate::wire::control::{DecidedBy, Verdict};
use crate::wire::offer::Hello;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Nothing,
    Send(Control),
    /// A grant that nobody here has asked for, or its withdrawal: [`super::Destination::refuse_unknown`], to whom the caller says which
    /// arbiter it asks now. While the host has a machine for another
    /// attempt, whose note this is, nothing is done: a grant that counts is repeated.
    Refuse(Offered, DecidedBy),
    /// The note cannot tell whether the peer speaks of the VM that is here, which has the same name. Nothing is said and nothing is done:
    /// one of the two may be ended by it. The peer repeats it, and an operator has to look.
    Unknown,
    /// The VM was offered to this very peer by this very attempt, was not granted, and runs there at a later generation with all of its
    /// memory: an operator has decided so. What is here has to end ([`super::Source::supersede`]).
    Superseded(Offered),
}

/// What a host says whose note of the VM is `note`, to a message of `peer` about an attempt that it has no machine for.
///
/// What may end a VM, here or there, is said of an attempt only that the note tells of, and to the peer of that attempt. VMs of one
/// name may be different ones, and a generation alone proves nothing.
pub fn answer(note: Option<Note>, peer: HostKey, message: &Control) -> Answer {
    let attempt = message.attempt();
    let is_of = |offered: Offered| offered.attempt == attempt && offered.peer == peer;
    let own = match note {
        Some(Note::Owned(own)) => Some(own),
        _ => None,
    };
    let proven = own.filter(|own| own.offered().is_some_and(is_of));
    match message {
        // Whoever has this note is about to go on with it, and the source says it again.
        Control::Resume { .. } if matches!(note, Some(Note::Accepted(offered, _)) if is_of(offered)) => Answer::Nothing,
        Control::Resume { .. } | Control::Reserve { .. } | Control::Check { .. } => {
            Answer::Send(Control::Forgotten { attempt })
        }
        Control::Grant { generation, .. } | Control::Withdraw { generation, .. } => {
            let by = match message {
                Control::Grant { by, .. } => *by,
                _ => DecidedBy::Grant,
            };
            let offered = Offered { attempt, peer, generation: *generation, register: None };
            let refuse = Answer::Refuse(offered, by);
            match (note, proven) {
                // It may have forgotten the attempt when the grant came, or before.
                (None, _) => refuse,
                (_, Some(Owned::Came(offered))) if offered.generation == *generation => {
                    Answer::Send(Control::Started { attempt, generation: *generation })
                }
                // A VM that had run here by that grant would be owned at its generation at least: it is another one.
                (Some(Note::Owned(own)), None) if own.generation() < *generation => refuse,
                // It may have run here, and gone on to a third host and back.
                (Some(Note::Owned(_)), _) => Answer::Unknown,
                (Some(_), _) => Answer::Nothing,
            }
        }
        Control::Started { generation, .. } => match (note, proven) {
            // It went there, or came back from there and has ended.
            (None, _) => settled(message, *generation, Verdict::Yours),
            (_, Some(Owned::Back(offered))) if offered.generation == *generation => {
                settled(message, offered.generation.next(), Verdict::Mine)
            }
            // Whether it has all of the VM is said next.
            (_, Some(Owned::Offered(offered))) if offered.generation == *generation => Answer::Nothing,
            (Some(Note::Owned(_)), _) => Answer::Unknown,
            // Whoever has this note is about to go on with it.
            (Some(_), _) => Answer::Nothing,
        },
        // One that lacks pages has no use for it: this host has them as they are now.
        Control::Whole { .. } => match proven {
            Some(Owned::Offered(offered)) => Answer::Superseded(offered),
            _ => Answer::Nothing,
        },
        // What a destination says that has not run the VM. One that runs it by now is ended by no generation of another VM.
        Control::Holds { .. } | Control::Refusal { .. } | Control::NoArbiter { .. } => match note {
            Some(Note::Given(offered, _)) if is_of(offered) => Answer::Nothing,
            _ => settled(message, proven.map_or(Generation(0), Owned::generation), Verdict::Mine),
        },
        _ => Answer::Nothing,
    }
}

/// What a hello says of an earlier attempt by the same source, as a message about that one: it is over, or the source would not
/// begin another. A destination that still has it takes this in first, and the hello when it is over. Nothing if it is the same
/// attempt: that has been greeted.
///
/// It ends no VM that runs at the destination: the hello may be of another one of the same name.
pub fn settled_by(hello: &Hello, earlier: Offered) -> Option<Control> {
    let settled = Control::Settled { attempt: earlier.attempt, generation: Generation(0), verdict: Verdict::Mine };
    (earlier.attempt != hello.attempt).then_some(settled)
}

fn settled(message: &Control, generation: Generation, verdict: Verdict) -> Answer {
    Answer::Send(Control::Settled { attempt: message.attempt(), generation, verdict })
}
