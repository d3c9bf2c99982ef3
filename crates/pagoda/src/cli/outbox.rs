//! Options of a VM's outbox.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use pagoda_api::check_outbox_space;

use crate::units::parse_size;

/// How long a writer may be kept waiting: the guest's kernel complains of tasks that wait for 120 s.
const WAIT_SECONDS_MAX: i64 = 100;

pub(super) fn space(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    check_outbox_space(bytes).map(|()| bytes)
}

/// A size, or one that follows an SLO.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceChoice {
    Size(u64),
    Auto,
}

/// What an outbox that follows an SLO begins with.
const SPACE_BYTES_BEGIN: u64 = 64 << 20;

impl SpaceChoice {
    /// The bytes that it begins with.
    pub fn bytes(self) -> u64 {
        match self {
            SpaceChoice::Size(bytes) => bytes,
            SpaceChoice::Auto => SPACE_BYTES_BEGIN,
        }
    }
}

pub(super) fn choice(text: &str) -> Result<SpaceChoice, String> {
    if text == "auto" { Ok(SpaceChoice::Auto) } else { space(text).map(SpaceChoice::Size) }
}

#[derive(Debug, Args)]
pub struct OutboxOptions {
    /// Give the VM an outbox: a file system in this much memory of the host, whose files the host sends
    ///
    /// In the guest: mount -t virtiofs outbox /mnt/out. Clients read by HTTP, also what still grows. What has been delivered is
    /// given back when there is need; a full space makes writers wait. The pool keeps this memory beside that of the VM
    /// (`pagoda outbox`), and the VM is pinned: all of it stays in DRAM. With auto and --outbox-slo it begins with 64M, and the daemon
    /// chooses its size (`pagoda outbox set --help`).
    #[arg(long, value_name = "SIZE|auto", value_parser = choice)]
    pub outbox: Option<SpaceChoice>,
    /// What the size of an outbox of --outbox auto follows, such as 'p90 4.6s'
    #[arg(long, value_name = "STATISTIC TIME", requires = "outbox")]
    pub outbox_slo: Option<String>,
    /// Where clients of the outbox connect; port 0 is any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0", requires = "outbox")]
    pub outbox_listen: SocketAddr,
    /// A file with the token that clients give (Authorization: Bearer TOKEN) [default: one is made and shown]
    #[arg(long, value_name = "FILE", requires = "outbox")]
    pub outbox_token: Option<PathBuf>,
    /// Seconds that a write waits for room before it fails with ENOSPC
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "outbox",
        value_parser = clap::value_parser!(u64).range(0..=WAIT_SECONDS_MAX as u64))]
    pub outbox_wait: u64,
    /// Seconds for which files that nobody has fetched stay after the VM's end
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "outbox")]
    pub outbox_linger: u64,
    /// Let the outbox's process keep the host's namespaces, where a user may not have own ones
    #[arg(long, requires = "outbox")]
    pub outbox_no_namespaces: bool,
}
