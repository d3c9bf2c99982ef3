//! What a setting can be, on the command line and in the file alike.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::ValueEnum;
use pagoda_core::fault::PageInPolicy;
use serde::Deserialize;

/// Where groups are looked up.
pub(super) const GROUPS: &str = "/etc/group";

/// When RAM is made of large folios.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LargeFolios {
    /// Where the host's settings give them.
    #[default]
    Auto,
    /// Pages of 4 KiB only.
    Off,
}

/// How much comes in for a fault on a page in swap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageIn {
    /// One page, or its chunk of 1 MiB and read-ahead, as the faults before it suggest.
    #[default]
    Adaptive,
    /// Always the page alone.
    Page,
    /// Always its whole chunk.
    Chunk,
    /// Always the page, and the rest of its chunk behind it.
    PageThenChunk,
}

impl PageIn {
    /// The engine's word for it.
    pub fn policy(self) -> PageInPolicy {
        match self {
            Self::Adaptive => PageInPolicy::Adaptive,
            Self::Page => PageInPolicy::Page,
            Self::Chunk => PageInPolicy::Chunk,
            Self::PageThenChunk => PageInPolicy::PageThenChunk,
        }
    }
}

/// Which part of a VM leaves DRAM next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// What was used least recently.
    #[default]
    Queues,
    /// Anything: for guests that swap by themselves.
    Random,
}

impl Replacement {
    /// The engine's word for it.
    pub fn policy(self) -> pagoda_core::fault::Replacement {
        match self {
            Self::Queues => pagoda_core::fault::Replacement::Queues,
            Self::Random => pagoda_core::fault::Replacement::Random,
        }
    }
}

/// Where the metrics are served over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Metrics {
    On(SocketAddr),
    Off,
}

impl FromStr for Metrics {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            text => match text.parse() {
                Ok(addr) => Ok(Self::On(addr)),
                Err(_) => Err(format!("{text:?} is neither \"off\" nor an address and a port such as 127.0.0.1:9464")),
            },
        }
    }
}

impl TryFrom<String> for Metrics {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// A group of the host by its name or number, not looked up yet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Group {
    Name(String),
    Gid(u32),
}

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.contains([':', '\n']) {
            return Err(format!("{text:?} is not the name of a group"));
        }
        Ok(text.parse().map_or_else(|_| Self::Name(text.to_owned()), Self::Gid))
    }
}

impl TryFrom<String> for Group {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Gid(gid) => write!(f, "{gid}"),
        }
    }
}

impl Group {
    /// `groups` is the text of /etc/group. Groups of a directory service are named by their number.
    pub(super) fn gid(&self, groups: &str) -> Result<u32> {
        let name = match self {
            Self::Gid(gid) => return Ok(*gid),
            Self::Name(name) => name,
        };
        let of_line = |line: &str| {
            let mut fields = line.split(':');
            (fields.next() == Some(name.as_str())).then(|| fields.nth(1)?.parse().ok()).flatten()
        };
        groups
            .lines()
            .find_map(of_line)
            .with_context(|| format!("{GROUPS} has no group {name}: make it with groupadd, or give the group's number"))
    }
}
