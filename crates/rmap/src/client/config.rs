//! What a client is told, and its limits.

use std::time::Duration;

use super::exchange::QUESTIONS_MAX;
use super::scrub::SCRUB_PASS;
use super::sealed::KEEP_AFTER;
use super::vacate::GIVE_BACK_AFTER;
use crate::crypto::{Keypair, PoolKey};
use crate::units::SlabSize;

/// What a client is told.
#[derive(Debug)]
pub struct ClientConfig {
    pub keys: Keypair,
    pub pool: PoolKey,
    pub slab_size: SlabSize,
    /// A server that says nothing for so long is given up where there is another copy.
    pub fail_after: Duration,
    /// What only servers have that have been silent for so long is not waited for: it fails, until one of them is heard again;
    /// `None`: it is waited for as long as it takes. Either way only a server's return with an empty memory, or
    /// [`super::Client::forget_content`], loses what it had. So long is the control plane waited for, too, where there is no
    /// [`ClientConfig::map_patience`].
    pub error_after: Option<Duration>,
    /// A server that fell silent, and was silent for longer, counts as one that has no slab to give. Zero for who has
    /// somewhere else for its pages: it is told at once.
    pub grant_patience: Duration,
    /// A write to a slab that nobody has needs the control plane's answer first; where that takes longer, it is declined, and so
    /// are others like it until there is an answer. `None`: they wait, and fail as [`super::Failure::Silent`] after
    /// [`ClientConfig::error_after`].
    pub map_patience: Option<Duration>,
    /// Servers that keep pages on a disk are asked for slabs where no other has one to give. Not for who has a disk of its own.
    pub uses_overflow_disk: bool,
    /// A slab in which no page has content goes back to its servers after this; `None`: only by [`super::Client::discard_slab`].
    pub give_back_after: Option<Duration>,
    /// In this time every copy of every page is looked at once, as far as a thousand pages a second suffice; `None`: damage is
    /// found when it is read.
    pub scrub_pass: Option<Duration>,
    /// Slabs of a space with two copies that were not written to for so long get parity instead of second copies, in groups of four,
    /// and second copies again before the next write; `None`: they keep their copies.
    pub parity_after: Option<Duration>,
    /// A sealed space that has too few copies, and whose map has not changed for so long, or twice, has nobody who sees to
    /// it: this client does.
    pub keep_after: Duration,
    /// After a server is lost, copies begin to be restored within this time, at random: all its clients lose it at once, and the same
    /// servers are left to them.
    pub rebuild_spread: Duration,
    /// Of the link; copies that restore redundancy use 30 % of it at most.
    pub link_bytes_per_second: u64,
    /// Datagrams are never larger, whatever the path carries.
    pub datagram_max: usize,
    /// Datagrams under one key; `None` for the usual number.
    pub rekey_every: Option<u64>,
    /// Questions about slabs that are under way at a time.
    #[doc(hidden)]
    pub questions_max: usize,
    #[doc(hidden)]
    pub fault: Option<Fault>,
}

/// Ways of being wrong, for tests of the tests.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Acknowledges a write that one copy has.
    AcksEarly,
    /// Opens a taken-over slab by the versions of its first copy.
    OpensUnreconciled,
    /// Counts a new copy as in sync before it has the pages.
    JoinsEmpty,
    /// Takes a server's word that it has copied everything.
    TrustsSources,
    /// Takes a page in whatever version a server has, and a server whatever life it is in.
    TrustsServers,
    /// Says that a slab's life begins with its grant: what waited for that was asked for before.
    EpochsAtGrants,
    /// Counts parity as complete before it has its pages.
    ParityEarly,
    /// Forgets a slab of the group when a page is put together from the others.
    LeavesMembersOut,
    /// Does not wait with writes until their group has no parity any more.
    WritesToFrozen,
    /// Takes a write that failed because nobody answered for one that no server has.
    ForgetsUnanswered,
    /// Says that it owns a space without a look at who does.
    TrustsItself,
    /// Reads what another client writes from the copies that it knows, without a look at the map.
    FollowsOldMaps,
    /// Takes a trim for the last write although another copy does not have it.
    BelievesTrims,
}

impl ClientConfig {
    /// With the usual limits: 30 ms and twice 30 s, for a link of 10 Gbit/s.
    pub fn new(keys: Keypair, pool: PoolKey) -> ClientConfig {
        ClientConfig {
            keys,
            pool,
            slab_size: SlabSize::default(),
            fail_after: Duration::from_millis(30),
            error_after: Some(Duration::from_secs(30)),
            grant_patience: Duration::from_secs(30),
            map_patience: None,
            uses_overflow_disk: true,
            give_back_after: Some(GIVE_BACK_AFTER),
            scrub_pass: Some(SCRUB_PASS),
            parity_after: None,
            keep_after: KEEP_AFTER,
            rebuild_spread: Duration::from_millis(500),
            link_bytes_per_second: 1_250_000_000,
            datagram_max: crate::wire::DATAGRAM_MAX,
            rekey_every: None,
            questions_max: QUESTIONS_MAX,
            fault: None,
        }
    }
}
