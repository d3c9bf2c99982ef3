//! Whose command line it is to be, and the words for what it cannot have.

use super::super::error::ArgError;
use super::super::words::Opt;

/// What becomes of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// The clone may have no network card.
    None,
    /// The clone has a network namespace of its own, in which its addresses and its ports are nobody else's.
    Isolated,
}

/// Whose command line it is to be.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    pub name: &'a str,
    pub net: Net,
    /// The snapshot has what was on its disks.
    pub has_disks: bool,
}

/// An option that makes QEMU listen on an address of the host.
pub fn listens(option: &Opt<'_>, net: Net) -> Result<Option<String>, ArgError> {
    if net == Net::Isolated {
        return Ok(None);
    }
    Err(ArgError::new(
        format!("{} listens on an address that its source has", shown(option)),
        "clone with --net isolated, where each has addresses of its own, or start the VM without that",
    ))
}

/// A path that QEMU makes something at.
pub fn suffixed(path: &str, name: &str) -> String {
    format!("{path}.{name}")
}

/// The option as the user wrote it.
pub fn shown(option: &Opt<'_>) -> String {
    format!("-{} {}", option.name, option.value).trim_end().to_owned()
}

pub fn unknown(what: &str) -> ArgError {
    ArgError::new(
        format!("{what} is not known to be right for two VMs at a time"),
        "start the VM without it, take a snapshot of that and clone it: docs/clones.md lists what can be cloned",
    )
}
