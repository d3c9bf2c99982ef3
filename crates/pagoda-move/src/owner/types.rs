//! Events, actions and times of both machines.

use std::time::Duration;

use super::claim::{Claim, Registered};
use crate::note::Note;
use crate::units::{AttemptId, RegisterId};
use crate::wire::Control;

/// What is not answered is sent again after this long, and whatever failed is tried again. A few round trips of any link.
pub const RETRY_EVERY: Duration = Duration::from_millis(200);
/// So long after its grant a source asks the arbiter for the VM: half of the ten seconds within which that has to decide, so that
/// a note, a slow answer and a second question have the other half.
pub const TAKE_BACK_AFTER: Duration = Duration::from_secs(5);
/// A destination that has not reached the arbiter for so long asks for a grant that needs none. Well below
/// [`TAKE_BACK_AFTER`]: afterwards it is too late. A source waits as long before its stop, and then gives such a grant.
pub const NO_ARBITER_AFTER: Duration = Duration::from_secs(1);
/// An attempt is given up when its link was away for so long: a host that is stopped for half a minute is waited for.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(40);
/// A VM that was stopped for its last pages runs again at its source if they are not there after so long.
pub const STOPPED_MAX: Duration = Duration::from_secs(5);

/// How QEMU is on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qemu {
    Running,
    /// It is there and does not run the VM.
    Stopped,
    Dead,
}

/// What a machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Send(Control),
    /// Replaces the VM's note, or removes it. `Written` follows when that is durable, or has failed; then it may be either.
    /// There is one at a time.
    Write(Option<Note>),
    /// Reserves memory and starts QEMU, which waits for its state. `Prepared` or `CannotPrepare` follows.
    Prepare,
    /// Stops the VM, lets QEMU save its state and looks for the last pages that changed. `Stopped` follows.
    Stop,
    /// The VM runs on, or for the first time.
    Run,
    /// Ends QEMU here, if it is there, and gives back what the VM has on this host or is reserved for it.
    Discard,
    /// `Arbiter` follows. A question that was asked may take effect even if no answer comes.
    Ask(Claim),
    /// The register of this attempt is needed by nobody any more. It may stay all the same.
    Unregister(RegisterId, AttemptId),
    /// The attempt has ended. Nothing of it is left but what the note says.
    End(End),
}

/// How an attempt ended for one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The VM is at its destination.
    Moved,
    /// The VM is where it was: the attempt was given up before the grant.
    GivenUp,
    /// The VM is where it was: the grant came back.
    CameBack,
    /// QEMU has died at the host that owns the VM.
    Crashed,
    /// This host has lost the VM to one with a larger generation, by an operator's decision.
    Superseded,
    /// An operator has given the VM up, which lacked pages of a host that is gone.
    Lost,
}

#[derive(Clone, Debug)]
pub enum SourceEvent<'a> {
    LinkUp,
    LinkDown,
    Message(&'a Control),
    /// The destination asks the same arbiter as this host.
    Agreed(RegisterId),
    /// The rounds have come to their end: now the VM stops.
    Switch,
    /// The VM is stopped, QEMU's state `completed`, its last pages known.
    Stopped,
    /// The destination has acknowledged all that the VM needs to run there.
    Complete,
    Written(bool),
    /// What the arbiter has now, or nothing if it was not reached.
    Arbiter(Option<Registered>),
    QemuDied,
    /// The user, or a limit, ends the attempt.
    Cancel,
    /// An operator says that the destination is gone for good.
    Resolve,
    Tick,
}

#[derive(Clone, Debug)]
pub enum DestinationEvent<'a> {
    LinkUp,
    LinkDown,
    Message(&'a Control),
    /// Memory is reserved and QEMU waits for its state.
    Prepared,
    /// Not possible: no room, or QEMU does not start.
    CannotPrepare,
    /// The VM can run: its state is loaded, and each page is here or known to be missing.
    Loaded,
    /// Every page is here for good.
    Whole,
    Written(bool),
    /// What the arbiter has now, or nothing if it was not reached.
    Arbiter(Option<Registered>),
    QemuDied,
    /// QEMU had ended before it was told to let the guest run, as `Run` wanted, and nobody has heard that it runs.
    NeverRan,
    /// An operator says that the source is gone for good.
    Resolve,
    Tick,
}
