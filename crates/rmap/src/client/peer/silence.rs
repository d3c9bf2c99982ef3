//! What follows from a server's silence: requests are sent again, reads hedged, signs of life asked for, and it is given up.

use std::time::Duration;

use super::greeting::Greeting;
use super::{Peer, Reach};
use crate::client::FAIL_AFTER_MIN;
use crate::client::config::ClientConfig;
use crate::client::exchange::{Exchange, Exchanges, Role};
use crate::round_trip::{RTO_MAX, RTO_MIN};
use crate::units::{Class, Time};

/// Signs of life that a silent server is asked for, at most, in the second half of the time after which it is given up: where a fifth of
/// all datagrams is lost each way, all are in one of five million cases.
const LAST_SIGNS: u32 = 16;
/// After so many timeouts without an answer it gives signs of life and no more: those do not count then, and it is given up.
const TIMEOUTS_MAX: u32 = 64;
/// A server that nothing is asked of is asked for a sign of life, and for its load.
const PING_IDLE: Duration = Duration::from_secs(1);
/// Before this, a server that never answered is not counted as down: a handshake takes a while under load.
const CONNECT_AFTER: Duration = Duration::from_millis(100);
/// A page that a server does not answer for, although it is heard, is no longer waited for where there is another copy. By then each of the
/// 256 operations was asked for twice, if all are lost and each timeout of 8 ms repeats one.
const PAGE_PATIENCE: Duration = Duration::from_secs(5);
/// The same of a server that such a copy was given up of lately: the next of its copies is not waited for as long.
const STALLED_PATIENCE: Duration = Duration::from_millis(500);
/// How long that is remembered. The server is given no copy meanwhile: it would keep those who write waiting again.
const STALLED_FOR: Duration = Duration::from_secs(60);
/// The rebuild budget is looked at this often while something waits for it.
const REBUILD_WAIT: Duration = Duration::from_micros(100);

/// What time has brought.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watched {
    /// It was given no copies for a while, and may have some again.
    pub takes_copies: bool,
    /// It is silent, and was not before: it is to be given up.
    pub is_silent: bool,
    /// It has been silent for [`ClientConfig::error_after`].
    pub is_long_silent: bool,
}

impl Peer {
    /// When [`Peer::watch`] is to be called, at the latest. It counts as silent for long already, or not.
    pub fn due(
        &mut self,
        now: Time,
        config: &ClientConfig,
        is_long_silent: bool,
        exchanges: &Exchanges,
    ) -> Option<Time> {
        self.skip_ended(exchanges);
        let reach = match self.reach {
            Reach::Connecting { since } => Some(since + CONNECT_AFTER),
            Reach::Down { since } => config.error_after.filter(|_| !is_long_silent).map(|after| since + after),
            Reach::Up => self.due_up(now, config.fail_after, exchanges),
        };
        self.greeting.as_ref().map(Greeting::due_at).into_iter().chain(reach).min()
    }

    fn due_up(&self, now: Time, fail_after: Duration, exchanges: &Exchanges) -> Option<Time> {
        // A request that is under way asks for a sign of life, too.
        let idle = self.in_flight.is_empty().then(|| self.heard_at.max(self.pinged_at) + PING_IDLE);
        let silent = self.unanswered_since.map(|since| since + fail_after.max(FAIL_AFTER_MIN));
        let oldest = self.in_flight.front().and_then(|id| exchanges.in_flight(*id));
        let resend = oldest.map(|(_, sent_at)| self.resend_due(sent_at));
        let may_hedge = |exchange: &Exchange| !exchange.hedged && matches!(exchange.role, Role::Read { .. });
        let hedge = oldest.filter(|(exchange, _)| may_hedge(exchange)).map(|(_, at)| at + self.trip.hedge());
        let rebuild = self.queues[Class::Rebuild as usize].front().map(|_| now + REBUILD_WAIT);
        [idle, silent, self.life_due(fail_after), resend, hedge, rebuild].into_iter().flatten().min()
    }

    /// Looks what time has brought. What is due to be sent again or asked of others is not touched.
    pub fn watch(&mut self, now: Time, config: &ClientConfig, exchanges: &Exchanges) -> Watched {
        let mut watched = Watched::default();
        match self.reach {
            Reach::Connecting { since } => watched.is_silent = now.since(since) >= CONNECT_AFTER,
            Reach::Down { since } => {
                watched.is_long_silent = config.error_after.is_some_and(|after| now.since(since) >= after);
            }
            Reach::Up => {
                self.skip_ended(exchanges);
                watched.takes_copies = self.stalled_at.take_if(|at| now.since(*at) >= STALLED_FOR).is_some();
                let fail_after = config.fail_after.max(FAIL_AFTER_MIN);
                watched.is_silent = self.unanswered_since.is_some_and(|since| now.since(since) >= fail_after);
            }
        }
        if self.reach == Reach::Up && !watched.is_silent {
            self.poll_life(now, config);
        }
        watched
    }

    /// Signs of life and probes, where it is time for them.
    fn poll_life(&mut self, now: Time, config: &ClientConfig) {
        let quiet = self.in_flight.is_empty() && now.since(self.heard_at.max(self.pinged_at)) >= PING_IDLE;
        if quiet || self.life_due(config.fail_after).is_some_and(|due| due <= now) {
            self.pinged_at = now;
            self.ping_due = true;
            self.unanswered_since.get_or_insert(now);
        }
        self.path.poll(now, config.datagram_max);
    }

    /// Requests that ended are not the oldest that is under way.
    pub(super) fn skip_ended(&mut self, exchanges: &Exchanges) {
        while self.in_flight.pop_front_if(|id| exchanges.in_flight(*id).is_none()).is_some() {}
    }

    /// The oldest request, if it is to be sent again. One at a time: what else is lost shows when it is answered, or by being overtaken.
    pub fn late_request(&self, now: Time, exchanges: &Exchanges) -> Option<Exchange> {
        let (oldest, sent_at) = exchanges.in_flight(*self.in_flight.front()?)?;
        (self.resend_due(sent_at) <= now).then_some(*oldest)
    }

    fn resend_due(&self, sent_at: Time) -> Time {
        (sent_at + self.timeout()).max(self.resend_at)
    }

    /// Sends the [`Peer::late_request`] again.
    pub fn resend_late(&mut self, now: Time, late: &Exchange, exchanges: &mut Exchanges) {
        let timeout = self.timeout();
        self.in_flight.pop_front();
        if !self.resends.contains(&late.id) {
            exchanges.line_up(&mut self.resends, late.id);
        }
        self.resend_at = now + timeout;
        self.backoff += 1;
        self.timeouts += 1;
        self.path.lost(now, late.tries_lost());
        exchanges.shrink_window(now, self.trip.smoothed());
    }

    /// The oldest request, if it is a read that takes long and was asked of nobody else. It counts as hedged from now on.
    pub fn hedge(&mut self, now: Time, exchanges: &mut Exchanges) -> Option<Exchange> {
        let (oldest, sent_at) = exchanges.in_flight_mut(*self.in_flight.front()?)?;
        let is_late = matches!(oldest.role, Role::Read { .. }) && now >= sent_at + self.trip.hedge();
        (is_late && !std::mem::replace(&mut oldest.hedged, true)).then_some(*oldest)
    }

    /// It is silent: nothing is expected of it.
    pub fn give_up(&mut self, now: Time) {
        self.reach = Reach::Down { since: now };
        self.unanswered_since = None;
        (self.doubted_since, self.room_wanted_since) = (None, None);
    }

    /// Everything that it has not answered is to be sent to it again, and leaves the room for its replies to others' until then.
    pub fn resend_all(&mut self, exchanges: &mut Exchanges) {
        for id in self.in_flight.drain(..) {
            if exchanges.peek(id).is_some() && !self.resends.contains(&id) {
                exchanges.line_up(&mut self.resends, id);
            }
        }
        self.resends.iter().for_each(|id| exchanges.give_partial(*id));
    }

    /// Until when a page is waited for that it was first asked for at `asked_at`.
    pub fn page_patience(&self, asked_at: Time) -> Time {
        asked_at.max(self.up_since) + self.stalled_at.map_or(PAGE_PATIENCE, |_| STALLED_PATIENCE)
    }

    /// A copy was given up for which it gave no answer in time.
    pub fn has_stalled(&mut self, now: Time) {
        self.stalled_at = Some(now);
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
    fn life_due(&self, fail_after: Duration) -> Option<Time> {
        let since = self.unanswered_since?;
        let half = fail_after.max(FAIL_AFTER_MIN) / 2;
        let last_signs = (since + half).max(self.pinged_at + RTO_MIN.max(half / LAST_SIGNS));
        match () {
            () if self.in_flight.is_empty() || self.must_be_certain() => {
                Some(last_signs.min(self.pinged_at + self.timeout()))
            }
            () if self.timeouts >= TIMEOUTS_MAX => None,
            () => Some(last_signs),
        }
    }

    /// Whether only the answer to a ping will do.
    pub(super) fn must_be_certain(&self) -> bool {
        self.doubted_since.is_some() || self.room_wanted_since.is_some()
    }

    /// When the oldest unanswered request is sent again.
    pub(in crate::client) fn timeout(&self) -> Duration {
        (self.trip.timeout() * 2_u32.pow(self.backoff.min(4))).min(RTO_MAX)
    }
}
