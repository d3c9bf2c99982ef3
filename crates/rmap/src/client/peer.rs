//! A server as a client sees it: its session, what it said of itself, and the requests that are for it.
//!
//! Each file below has one duty of a session, and only these touch its state: the handshake and the server's address
//! (`handshake.rs`), the sizes of datagrams (`path.rs`), what is sent next (`send.rs`), what comes in (`receive.rs`), and what
//! follows from silence (`silence.rs`). What all that means for slabs and operations is in what the methods return; the client
//! does it. The requests themselves are in [`Exchanges`]: a session has their numbers, in the order in which they are sent.

mod greeting;
mod handshake;
mod path;
mod receive;
mod send;
mod set;
mod silence;
#[cfg(test)]
mod test_access;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use super::exchange::{ExchangeId, Exchanges, LINE_MAX};
use super::servers::ServerInfo;
use crate::crypto::session::Session;
use crate::round_trip::RoundTrip;
use crate::units::{BootEpoch, Class, ServerId, Time};
use crate::wire::message::{Pressure, Status};
use crate::wire::report::Report;
use greeting::Greeting;
use path::Path;

pub use handshake::Accepted;
pub use receive::{Heard, LoadChange};
pub use set::PeerSet;
pub use silence::Watched;

/// What a server can be asked for by those who may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// To have everything moved elsewhere, and to end then.
    Begin,
    CallOff,
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

/// What a client knows of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerView {
    pub id: ServerId,
    pub reach: Reach,
    /// The time from a request to its reply, smoothed over many of them.
    pub round_trip: Duration,
    /// As its last reply said.
    pub free_slabs: u32,
    pub pressure: Pressure,
    /// It keeps its pages on a disk.
    pub overflow_disk: bool,
    /// The largest datagram that is known to get through, in bytes.
    pub datagram: usize,
    /// Its answer to [`crate::client::Client::ask_reports`].
    pub report: Option<Report>,
    /// Its answer to [`crate::client::Client::ask_drain`].
    pub drain: Option<Status>,
}

#[derive(Debug)]
pub struct Peer {
    info: ServerInfo,
    /// Where it was last heard; until then, where it is listed.
    addr: SocketAddr,
    /// Where it said that it is, in which life. Only a handshake proves it.
    hint: Option<(SocketAddr, BootEpoch)>,
    reach: Reach,
    /// It was heard again after a silence, or for the first time.
    up_since: Time,
    /// It gave signs of life, and no answer for a page, so a copy there was given up. It is asked to take none for a while.
    stalled_at: Option<Time>,
    session: Option<Session>,
    /// What we call the session: datagrams for another one are of an earlier one.
    number: u32,
    greeting: Option<Greeting>,
    epoch: Option<BootEpoch>,
    trip: RoundTrip,
    heard_at: Time,
    /// Since when something is unanswered and nothing was heard.
    unanswered_since: Option<Time>,
    /// When the last request was sent that it certainly answered. What is heard may have lain somewhere for long.
    lived_at: Time,
    /// Copies elsewhere are to be dropped for its own, once it has answered something that was asked after this.
    doubted_since: Option<Time>,
    /// Writes wait to hear whether it has room, as of this time or later.
    room_wanted_since: Option<Time>,
    /// When a sign of life was last asked for.
    pinged_at: Time,
    ping_due: bool,
    /// Whether it is to be asked how it is, and to be drained or not; and what it said.
    report_due: bool,
    report: Option<Report>,
    drain_due: Option<Drain>,
    drain: Option<Status>,
    /// It filled a slab elsewhere with versions that nobody wrote: it is not asked to copy any more.
    made_up_versions: bool,
    /// Its pages lie on a disk, as it says: for slabs that no other server takes, and only as long as none does.
    overflow_disk: bool,
    resend_at: Time,
    backoff: u32,
    /// Timeouts since it last answered a request, whatever it said.
    timeouts: u32,
    write_credits: u16,
    writes_out: u16,
    pressure: Pressure,
    free_slabs: u32,
    path: Path,
    /// Exchanges that were not sent yet, by class.
    queues: [VecDeque<ExchangeId>; Class::ALL.len()],
    /// To be sent again, before anything new.
    resends: VecDeque<ExchangeId>,
    /// Exchanges that were sent, oldest first; those that ended since are skipped.
    in_flight: VecDeque<ExchangeId>,
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
            pressure: Pressure::None,
            free_slabs: 0,
            path: Path::new(now),
            queues: Class::ALL.map(|_| VecDeque::with_capacity(LINE_MAX)),
            resends: VecDeque::with_capacity(LINE_MAX),
            in_flight: VecDeque::with_capacity(LINE_MAX),
        }
    }

    pub fn info(&self) -> &ServerInfo {
        &self.info
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn epoch(&self) -> Option<BootEpoch> {
        self.epoch
    }

    pub fn reach(&self) -> Reach {
        self.reach
    }

    pub fn pressure(&self) -> Pressure {
        self.pressure
    }

    /// As it said last, less what it was asked for since.
    pub fn free_slabs(&self) -> u32 {
        self.free_slabs
    }

    pub fn has_overflow_disk(&self) -> bool {
        self.overflow_disk
    }

    /// The time from a request to its reply, smoothed over many of them.
    pub fn round_trip(&self) -> Duration {
        self.trip.smoothed()
    }

    /// When the last request was sent that it certainly answered.
    pub fn lived_at(&self) -> Time {
        self.lived_at
    }

    pub fn is_up(&self) -> bool {
        self.reach == Reach::Up && self.session.is_some()
    }

    pub fn is_down(&self) -> bool {
        matches!(self.reach, Reach::Down { .. })
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

    /// It may be asked to copy slabs to others.
    pub fn is_trusted(&self) -> bool {
        !self.made_up_versions
    }

    /// It filled a slab elsewhere with versions that nobody wrote.
    pub fn distrust(&mut self) {
        self.made_up_versions = true;
    }

    /// It is to be asked for one of its slabs.
    pub fn take_slab(&mut self) {
        self.free_slabs -= 1;
    }

    /// It has refused a slab.
    pub fn found_full(&mut self) {
        self.free_slabs = 0;
    }

    /// A request waits until it may be sent.
    pub fn queue(&mut self, class: Class, id: ExchangeId, exchanges: &Exchanges) {
        exchanges.line_up(&mut self.queues[class as usize], id);
    }

    /// It is to be asked how it is.
    pub fn ask_report(&mut self) {
        (self.report_due, self.report) = (true, None);
    }

    pub fn ask_drain(&mut self, drain: Drain) {
        (self.drain_due, self.drain) = (Some(drain), None);
    }

    pub fn view(&self) -> ServerView {
        ServerView {
            id: self.info.id,
            reach: self.reach,
            round_trip: self.trip.smoothed(),
            free_slabs: self.free_slabs,
            pressure: self.pressure,
            overflow_disk: self.overflow_disk,
            datagram: self.path.cut(),
            report: self.report,
            drain: self.drain,
        }
    }
}
