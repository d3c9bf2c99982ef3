//! Why the policy refuses a change.

use super::admission::Refused;
use super::settings::{InvalidSettings, VMS_MAX};

/// Why a change of the policy is refused. The messages are for the operator who asked for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages are the documentation
pub enum SettingsError {
    #[error(transparent)]
    Invalid(#[from] InvalidSettings),
    #[error(transparent)]
    NotAdmitted(#[from] Refused),
    #[error("there are {VMS_MAX} VMs already, the most that are managed; stop one")]
    TooManyVms,
    #[error("there is a VM with number {id} already")]
    VmExists { id: u32 },
    #[error("there is no VM with number {id}")]
    NoSuchVm { id: u32 },
}
