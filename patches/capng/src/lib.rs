//! Stands in for the crate `capng` in the build of `virtiofsd` as a library.
//!
//! `virtiofsd` changes capabilities where it passes a directory of the host through, which Pagoda does not use. The real
//! crate links libcap-ng, which every machine that builds Pagoda would need. Here each function refuses, and says that no
//! capability is held. Written anew: it has the names and types that `virtiofsd` calls, and nothing else.

use std::fmt;

pub type Capability = u32;
pub type Result<T> = std::result::Result<T, Error>;

/// Capabilities are not changed by this build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this build changes no capabilities")
    }
}

impl std::error::Error for Error {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub enum Type {
    EFFECTIVE,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    CAPS,
    BOTH,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    DROP,
    ADD,
}

#[derive(Debug, Clone, Copy)]
pub struct CUpdate {
    pub action: Action,
    pub cap_type: Type,
    pub capability: Capability,
}

pub fn clear(_: Set) {}

pub fn apply(_: Set) -> Result<()> {
    Err(Error)
}

pub fn update(_: Vec<CUpdate>) -> Result<()> {
    Err(Error)
}

pub fn get_caps_process() -> Result<()> {
    Err(Error)
}

pub fn name_to_capability(_: &str) -> Result<Capability> {
    Err(Error)
}

pub fn have_capability(_: Type, _: Capability) -> bool {
    false
}
