//! Messages about attempts that a host has no machine for: late ones, repeated ones, and those of a peer that missed an end.

use crate::note::{Note, Offered};
use crate::units::{Generation, HostKey};
use crate::wire::Control;
use crate::wire::control::{DecidedBy, Verdict};
use crate::wire::offer::Hello;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Nothing,
    Send(Control),
    /// A grant that nobody here has asked for, or its withdrawal: [`super::Destination::refuse_unknown`]. While the host has a machine for another
    /// attempt, whose note this is, nothing is done: a grant that counts is repeated.
    Refuse(Offered, DecidedBy),
    /// The VM runs at a host that owns it at a later generation, by an operator's decision. What is here has to end: QEMU first,
    /// then the note.
    Superseded(Generation),
}

/// What a host says whose note of the VM is `note`, to a message of `peer` about an attempt that it has no machine for.
pub fn answer(note: Option<Note>, peer: HostKey, message: &Control) -> Answer {
    let attempt = message.attempt();
    let own = match note {
        Some(Note::Owned(generation)) => Some(generation),
        _ => None,
    };
    match message {
        Control::Resume { .. } | Control::Reserve { .. } => Answer::Send(Control::Forgotten { attempt }),
        Control::Grant { generation, by, .. } => match note {
            None => Answer::Refuse(Offered { attempt, peer, generation: *generation }, *by),
            // It ran here, and may have gone on to a third host and back.
            Some(Note::Owned(own)) if own >= *generation => {
                Answer::Send(Control::Started { attempt, generation: *generation })
            }
            Some(_) => Answer::Nothing,
        },
        // It may have forgotten the attempt when the grant came, or before.
        Control::Withdraw { generation, .. } if note.is_none() => {
            Answer::Refuse(Offered { attempt, peer, generation: *generation }, DecidedBy::Grant)
        }
        Control::Started { generation, .. } => match own {
            Some(own) if own < *generation => Answer::Superseded(*generation),
            Some(own) => settled(message, own, Verdict::Mine),
            None => settled(message, *generation, Verdict::Yours),
        },
        // What a destination says that has not run the VM.
        Control::Holds { .. } | Control::Refusal { .. } | Control::NoArbiter { .. } => match own {
            Some(own) => settled(message, own, Verdict::Mine),
            None => settled(message, Generation(0), Verdict::Mine),
        },
        _ => Answer::Nothing,
    }
}

/// What a hello says of an earlier attempt by the same source, as a message about that one: it is over, or the source would not
/// begin another. A destination that still has it takes this in first, and the hello when it is over. Nothing if it is the same
/// attempt: that has been greeted.
pub fn settled_by(hello: &Hello, earlier: Offered) -> Option<Control> {
    let settled = Control::Settled { attempt: earlier.attempt, generation: hello.generation, verdict: Verdict::Mine };
    (earlier.attempt != hello.attempt).then_some(settled)
}

fn settled(message: &Control, generation: Generation, verdict: Verdict) -> Answer {
    Answer::Send(Control::Settled { attempt: message.attempt(), generation, verdict })
}
