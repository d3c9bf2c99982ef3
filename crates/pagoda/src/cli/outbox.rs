//! Options of a VM's outbox.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;
use pagoda_api::check_outbox_space;

use crate::units::{format_rate, parse_rate, parse_seconds, parse_size};

/// How long a writer may be kept waiting: the guest's kernel complains of tasks that wait for 120 s.
const WAIT_SECONDS_MAX: i64 = 100;

/// Bytes a second below which a reply of an ordinary size would last for minutes, and a piece for seconds: 0.1 Mbit/s.
const RATE_MIN: u64 = 12_500;

pub(super) fn space(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    check_outbox_space(bytes).map(|()| bytes)
}

/// Seconds, as many as an attribute may have.
fn ttl(text: &str) -> Result<u64, String> {
    let seconds = parse_seconds(text)?;
    let is_in_range = (1..=u64::from(u32::MAX)).contains(&seconds);
    is_in_range.then_some(seconds).ok_or_else(|| format!("{text}: give 1s to {}s", u32::MAX))
}

/// A rate in bytes a second, of [`RATE_MIN`] at least.
fn rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = NonZeroU64::new(parse_rate(text)?).filter(|rate| rate.get() >= RATE_MIN);
    rate.ok_or_else(|| format!("{text} is too slow: give at least {}", format_rate(RATE_MIN)))
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
    /// (`pagoda outbox`). With auto and --outbox-slo it begins with 64M, and the daemon
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
    /// What clients of the outbox are sent at most, all together: bits a second, such as 200M or 2.5G
    ///
    /// 200M is 200 million bits, as networks count. What counts are the bytes of files.
    #[arg(long, value_name = "RATE", value_parser = rate, requires = "outbox")]
    pub outbox_rate: Option<NonZeroU64>,
    /// What each connection of a client is sent at most
    #[arg(long, value_name = "RATE", value_parser = rate, requires = "outbox")]
    pub outbox_client_rate: Option<NonZeroU64>,
    /// Remove files so long after they were sealed, such as 60s or 10m, also if nobody has fetched them [default: never]
    ///
    /// A file's or directory's own `user.pagoda.ttl` goes before: seconds, or `never`.
    #[arg(long, value_name = "TIME", value_parser = ttl, requires = "outbox")]
    pub outbox_ttl: Option<u64>,
    /// Let the outbox's process keep the host's namespaces, where a user may not have own ones
    #[arg(long, requires = "outbox")]
    pub outbox_no_namespaces: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        assert_eq!(rate("200M").map(NonZeroU64::get), Ok(25_000_000));
        assert_eq!(rate("100k").map(NonZeroU64::get), Ok(RATE_MIN));
        for bad in ["99k", "0M", "200", "fast"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ages() {
        assert_eq!((ttl("60s"), ttl("2h")), (Ok(60), Ok(7200)));
        for bad in ["0s", "60", "4294967296s", "never"] {
            assert!(ttl(bad).is_err(), "{bad}");
        }
    }
}
