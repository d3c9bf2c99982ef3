//! A server as a client sees it: session, round trips, windows, and what waits for it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use super::FAIL_AFTER_MIN;
use super::exchange::LINE_MAX;
use super::returns::{RETURNS_MAX, Return};
use super::servers::ServerInfo;
use crate::client::index::PeerIndex;
use crate::crypto::handshake::Initiator;
use crate::crypto::session::Session;
use crate::round_trip::{RTO_MAX, RTO_MIN, RoundTrip};
use crate::units::{BootEpoch, Class, Time};
use crate::wire::DATAGRAM_MIN_MAX;
use crate::wire::message::{Pressure, Status};
use crate::wire::report::Report;

/// Signs of life that a silent server is asked for, at most, in the second half of the time after which it is given up: where a fifth of
/// all datagrams is lost each way, all are in one of five million cases.
const LAST_SIGNS: u32 = 16;
/// After so many timeouts without an answer it gives signs of life and no more: those do not count then, and it is given up.
const TIMEOUTS_MAX: u32 = 64;
/// A hello is repeated after this, then after twice as long, and so on.
const HELLO_RETRY_MIN: Duration = Duration::from_millis(5);
const HELLO_RETRY_MAX: Duration = Duration::from_secs(1);

/// What a server can be asked for by those who may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// To have everything moved elsewhere, and to end then.
    Begin,
    CallOff,
}

/// A set of servers, a bit for each [`PeerIndex`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerSet(u64);

impl PeerSet {
    pub fn has(self, peer: PeerIndex) -> bool {
        self.0 & 1 << peer.0 != 0
    }

    pub fn insert(&mut self, peer: PeerIndex) {
        self.0 |= 1 << peer.0;
    }

    pub fn remove(&mut self, peer: PeerIndex) {
        self.0 &= !(1 << peer.0);
    }

    pub fn is_subset_of(self, other: PeerSet) -> bool {
        self.0 & !other.0 == 0
    }

    pub fn union(self, other: PeerSet) -> PeerSet {
        PeerSet(self.0 | other.0)
    }

    pub fn intersection(self, other: PeerSet) -> PeerSet {
        PeerSet(self.0 & other.0)
    }

    pub fn minus(self, other: PeerSet) -> PeerSet {
        PeerSet(self.0 & !other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub fn iter(self) -> impl Iterator<Item = PeerIndex> {
        let rest = std::iter::successors(Some(self.0), |rest| Some(rest & rest.wrapping_sub(1)));
        rest.take_while(|rest| *rest != 0).map(|rest| PeerIndex(rest.trailing_zeros() as usize))
    }
}

impl FromIterator<PeerIndex> for PeerSet {
    fn from_iter<I: IntoIterator<Item = PeerIndex>>(peers: I) -> PeerSet {
        let mut set = PeerSet::default();
        peers.into_iter().for_each(|peer| set.insert(peer));
        set
    }
}

/// Whether a server can be counted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Not heard yet, but not for long.
    Connecting {
        since: Time,
    },
    Up,
    /// Silent. Copies there are dropped where there is one at a server that answers.
    Down {
        since: Time,
    },
}

#[derive(Debug)]
pub struct Greeting {
    pub initiator: Initiator,
    /// What we shall call the session.
    pub number: u32,
    pub sent_at: Option<Time>,
    /// Where the last one went.
    pub sent_to: Option<SocketAddr>,
    wait: Duration,
}

impl Greeting {
    pub fn new(initiator: Initiator, number: u32) -> Greeting {
        Greeting { initiator, number, sent_at: None, sent_to: None, wait: HELLO_RETRY_MIN }
    }

    pub fn due_at(&self) -> Time {
        self.sent_at.map_or(Time::default(), |at| at + self.wait)
    }

    pub fn sent(&mut self, now: Time, to: SocketAddr) {
        if self.sent_at.is_some() {
            self.wait = (self.wait * 2).min(HELLO_RETRY_MAX);
        }
        (self.sent_at, self.sent_to) = (Some(now), Some(to));
    }
}

#[derive(Debug)]
pub struct Peer {
    pub info: ServerInfo,
    /// Where it was last heard; until then, where it is listed.
    pub addr: SocketAddr,
    /// Where it said that it is, in which life. Only a handshake proves it.
    pub hint: Option<(SocketAddr, BootEpoch)>,
    pub reach: Reach,
    /// It was heard again after a silence, or for the first time.
    pub up_since: Time,
    /// It gave signs of life, and no answer for a page, so a copy there was given up. It is asked to take none for a while.
    pub stalled_at: Option<Time>,
    pub session: Option<Session>,
    /// What we call the session: datagrams for another one are of an earlier one.
    pub number: u32,
    pub greeting: Option<Greeting>,
    pub epoch: Option<BootEpoch>,
    pub trip: RoundTrip,
    pub heard_at: Time,
    /// Since when something is unanswered and nothing was heard.
    pub unanswered_since: Option<Time>,
    /// When the last request was sent that it certainly answered. What is heard may have lain somewhere for long.
    pub lived_at: Time,
    /// Copies elsewhere are to be dropped for its own, once it has answered something that was asked after this.
    pub doubted_since: Option<Time>,
    /// Writes wait to hear whether it has room, as of this time or later.
    pub room_wanted_since: Option<Time>,
    /// When a sign of life was last asked for.
    pub pinged_at: Time,
    pub ping_due: bool,
    /// Whether it is to be asked how it is, and to be drained or not; and what it said.
    pub report_due: bool,
    pub report: Option<Report>,
    pub drain_due: Option<Drain>,
    pub drain: Option<Status>,
    /// It filled a slab elsewhere with versions that nobody wrote: it is not asked to copy any more.
    pub made_up_versions: bool,
    /// Its pages lie on a disk, as it says: for slabs that no other server takes, and only as long as none does.
    pub overflow_disk: bool,
    pub resend_at: Time,
    pub backoff: u32,
    /// Timeouts since it last answered a request, whatever it said.
    pub timeouts: u32,
    pub write_credits: u16,
    pub writes_out: u16,
    /// What is to be given back to it when it answers, and how many of such requests are under way.
    pub returns: VecDeque<Return>,
    pub returning: usize,
    pub pressure: Pressure,
    pub free_slabs: u32,
    /// The largest datagram that is known to get there and back.
    pub cut: usize,
    /// Sizes still to be tried on this path: a bit each of `DATAGRAM_SIZES`.
    pub probes: u8,
    pub probed_at: Time,
    /// Exchanges that were not sent yet, by class.
    pub queues: [VecDeque<u64>; Class::ALL.len()],
    /// To be sent again, before anything new.
    pub resends: VecDeque<u64>,
    /// Exchanges that were sent, oldest first; those that ended since are skipped.
    pub in_flight: VecDeque<u64>,
}

impl Peer {
    pub fn new(info: ServerInfo, now: Time) -> Peer {
        Peer {
            addr: info.addr,
            hint: None,
            info,
            reach: Reach::Connecting { since: now },
            up_since: now,
            stalled_at: None,
            session: None,
            number: 0,
            greeting: None,
            epoch: None,
            trip: RoundTrip::default(),
            heard_at: now,
            unanswered_since: None,
            lived_at: Time::default(),
            doubted_since: None,
            room_wanted_since: None,
            pinged_at: now,
            ping_due: false,
            report_due: false,
            report: None,
            drain_due: None,
            drain: None,
            made_up_versions: false,
            overflow_disk: false,
            resend_at: now,
            backoff: 0,
            timeouts: 0,
            write_credits: 1,
            writes_out: 0,
            returns: VecDeque::with_capacity(RETURNS_MAX),
            returning: 0,
            pressure: Pressure::None,
            free_slabs: 0,
            cut: DATAGRAM_MIN_MAX,
            probes: 0,
            probed_at: now,
            queues: Class::ALL.map(|_| VecDeque::with_capacity(LINE_MAX)),
            resends: VecDeque::with_capacity(LINE_MAX),
            in_flight: VecDeque::with_capacity(LINE_MAX),
        }
    }

    pub fn is_up(&self) -> bool {
        self.reach == Reach::Up && self.session.is_some()
    }

    /// It may have a slab to give.
    pub fn can_lend(&self) -> bool {
        self.is_up() && self.stalled_at.is_none() && self.pressure == Pressure::None && self.free_slabs > 0
    }

    /// It has slabs for those that it promised some, whatever it has said to others.
    pub fn keeps_promises(&self) -> bool {
        self.is_up() && self.stalled_at.is_none() && self.pressure <= Pressure::Yellow
    }

    /// What it has is to be moved away as soon as there is room elsewhere.
    pub fn wants_relief(&self) -> bool {
        self.pressure >= Pressure::Orange || self.overflow_disk
    }

    pub fn is_down(&self) -> bool {
        matches!(self.reach, Reach::Down { .. })
    }

    /// Something that it was asked at this time was answered.
    pub fn lived(&mut self, asked_at: Time) {
        self.lived_at = self.lived_at.max(asked_at);
    }

    /// Asks for a sign of life that was asked for at `since` or later.
    pub fn doubt(&mut self, now: Time, since: Time) {
        self.doubted_since = Some(self.doubted_since.map_or(since, |earlier| earlier.min(since)));
        self.ping_for(now, since);
    }

    /// The same, for the room that it has then.
    pub fn ask_for_room(&mut self, now: Time, since: Time) {
        self.room_wanted_since = Some(self.room_wanted_since.map_or(since, |earlier| earlier.min(since)));
        self.ping_for(now, since);
    }

    pub(super) fn ping_for(&mut self, now: Time, since: Time) {
        if self.pinged_at < since {
            (self.ping_due, self.pinged_at) = (true, now);
        }
        self.unanswered_since.get_or_insert(now);
    }

    /// When a sign of life is to be asked for again, if one is awaited that nothing else that is under way will bring. The answer to a
    /// repeated request does not say to which of them, so where there is doubt it is no proof.
    ///
    /// Where it is doubtful for long whether there is anybody, requests do not come often enough: most of them and of their answers
    /// are several datagrams, and all of them have to arrive. See [`LAST_SIGNS`].
    pub fn life_due(&self, configured: Duration) -> Option<Time> {
        let since = self.unanswered_since?;
        let half = self.fail_after(configured) / 2;
        let last_signs = (since + half).max(self.pinged_at + RTO_MIN.max(half / LAST_SIGNS));
        match () {
            () if self.in_flight.is_empty() || self.must_be_certain() => {
                Some(last_signs.min(self.pinged_at + self.timeout()))
            }
            () if self.timeouts >= TIMEOUTS_MAX => None,
            () => Some(last_signs),
        }
    }

    /// Long datagrams are lost, and shorter ones are not: from now on only the shortest are sent, and asked for.
    pub fn cut_short(&mut self, now: Time) {
        if self.cut > DATAGRAM_MIN_MAX {
            (self.cut, self.probed_at) = (DATAGRAM_MIN_MAX, now);
        }
    }

    /// Whether only the answer to a ping will do.
    pub fn must_be_certain(&self) -> bool {
        self.doubted_since.is_some() || self.room_wanted_since.is_some()
    }

    /// When the oldest unanswered request is sent again.
    pub fn timeout(&self) -> Duration {
        (self.trip.timeout() * 2_u32.pow(self.backoff.min(4))).min(RTO_MAX)
    }

    /// When silence becomes failure: by then a request was sent several times.
    pub fn fail_after(&self, configured: Duration) -> Duration {
        configured.max(FAIL_AFTER_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let set: PeerSet = [1, 5, 63].map(PeerIndex).into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [1, 5, 63].map(PeerIndex));
        let smaller: PeerSet = [PeerIndex(5)].into_iter().collect();
        assert!(smaller.is_subset_of(set) && !set.is_subset_of(smaller));
        assert_eq!(set.minus(smaller).union(smaller), set);
    }
}
