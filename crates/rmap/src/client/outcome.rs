//! The types that callers see: spaces, limits, questions and results.

use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;

use super::servers::SERVERS_MAX;
use crate::client::index::SpaceIndex;
use crate::crypto::KEY_SIZE;
use crate::units::{Generation, SpaceId};

/// Spaces of one client: VMs of a host and their disks.
pub const SPACES_MAX: usize = 256;

/// Copies that a space may ask for.
pub const COPIES_MAX: usize = 2;
/// Operations at a time, the paper's small bounded write buffer among them: 1 MiB, what a link of 10 Gbit/s carries in a
/// millisecond.
pub const OPS_MAX: usize = 256;
/// Five timeouts at the shortest: a server is not given up for a few lost datagrams.
pub const FAIL_AFTER_MIN: Duration = Duration::from_millis(5);

/// A space as its owner opens it.
#[derive(Debug)]
pub struct SpaceSpec {
    pub id: SpaceId,
    pub pages: u64,
    /// 1 for what can be re-created, 2 otherwise.
    pub copies: usize,
    /// Slabs that servers keep room for, whatever others take; see [`super::Client::reserved`].
    pub reserve: usize,
    /// The secret by which its pages are sealed.
    pub key: [u8; KEY_SIZE],
}

/// A space of this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceRef(pub(super) SpaceIndex);

/// Chosen by the caller to recognize a result.
pub type Token = u64;

/// Why an operation was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// A write is under way until a copy in the making has it, too, even where its result was taken; writes leave a quarter of
    /// the slots to reads.
    #[error("as many operations are under way as can be, of at most {OPS_MAX}: take results first, or let time pass")]
    Busy,
    #[error("the page lies beyond the end of the space")]
    BeyondEnd,
    #[error("the space is only read here: it is sealed, or another client writes it")]
    ReadOnly,
    #[error("this owner has made all the writes that a generation allows: take the space over again")]
    VersionsUsedUp,
}

/// Why a client cannot do something.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClientError {
    #[error("{SERVERS_MAX} servers are the most that a client talks to")]
    TooManyServers,
    #[error("it is known at {addr} already")]
    KnownServer { addr: SocketAddr },
    #[error("{SPACES_MAX} spaces are the most that a client holds")]
    TooManySpaces,
    #[error("{copies} copies: give 1 or {max}", max = COPIES_MAX)]
    Copies { copies: usize },
    #[error("{pages} pages: give 1 to {max}")]
    Size { pages: u64, max: u64 },
    #[error("{slabs} slabs reserved: the space has {max}")]
    Reserve { slabs: usize, max: u64 },
    #[error("generation {generation}: give 1 to {max}", max = Generation::MAX.0)]
    Generation { generation: u32 },
    #[error("this client reads the space already")]
    KnownSpace,
    #[error("the map names server {server}, which is not in the list of servers")]
    UnknownServer { server: u32 },
}

/// Why an operation failed. Nothing that fails is ever answered with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    #[error("the last copy of the page is gone")]
    Lost,
    #[error("the space has another owner")]
    Fenced,
    #[error("no server has room: the page belongs to the local tier")]
    Declined,
    #[error("every copy of the page that answers is damaged")]
    Corrupt,
    /// Of a write: it may be done yet, before any later one to its page.
    #[error("every server that has the page, or the control plane, has been silent for too long; it may come back")]
    Silent,
}

/// How an operation that a caller had asked for has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A page; its content is where the caller of [`super::Client::poll_event`] wanted it.
    Read { token: Token, result: Result<(), Failure> },
    /// A write or trim that all copies in sync have, or the answer to [`super::Client::confirm`].
    Written { token: Token, result: Result<(), Failure> },
}
