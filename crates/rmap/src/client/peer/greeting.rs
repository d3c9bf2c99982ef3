//! One handshake that is under way.

use std::net::SocketAddr;
use std::time::Duration;

use crate::crypto::handshake::Initiator;
use crate::transmit::Transmit;
use crate::units::Time;

/// A hello is repeated after this, then after twice as long, and so on.
const HELLO_RETRY_MIN: Duration = Duration::from_millis(5);
const HELLO_RETRY_MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Greeting {
    pub initiator: Initiator,
    /// What we shall call the session.
    pub number: u32,
    /// When the last hello went out, and where to.
    sent: Option<(Time, SocketAddr)>,
    wait: Duration,
}

impl Greeting {
    pub fn new(initiator: Initiator, number: u32) -> Greeting {
        Greeting { initiator, number, sent: None, wait: HELLO_RETRY_MIN }
    }

    pub fn sent(&self) -> Option<(Time, SocketAddr)> {
        self.sent
    }

    pub fn due_at(&self) -> Time {
        self.sent.map_or(Time::default(), |(at, _)| at + self.wait)
    }

    /// Sends the hello, if it is time.
    pub fn poll(&mut self, now: Time, to: SocketAddr, out: &mut Vec<u8>) -> Option<Transmit> {
        if self.due_at() > now {
            return None;
        }
        if self.sent.replace((now, to)).is_some() {
            self.wait = (self.wait * 2).min(HELLO_RETRY_MAX);
        }
        out.extend_from_slice(&self.initiator.hello);
        Some(Transmit { to, segment: self.initiator.hello.len() })
    }
}
