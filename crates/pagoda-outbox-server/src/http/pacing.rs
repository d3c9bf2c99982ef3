//! Rates: of all clients together, and of each.

use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use pagoda_outbox::Pace;
use tokio::time::{Sleep, sleep_until};

/// Bytes a second; `None`: as fast as it goes.
pub type Rate = Option<NonZeroU64>;

/// A rate, for those who share it.
#[derive(Debug)]
pub struct Pacer {
    began: Instant,
    pace: Option<Mutex<Pace>>,
}

impl Pacer {
    pub fn new(rate: Rate) -> Pacer {
        Pacer { began: Instant::now(), pace: rate.map(|rate| Mutex::new(Pace::new(rate))) }
    }

    /// The most that should be sent at once.
    pub fn turn_bytes(&self) -> u64 {
        let pace = self.pace.as_ref().map(|pace| pace.lock().unwrap_or_else(PoisonError::into_inner).turn_bytes());
        pace.unwrap_or(u64::MAX)
    }

    /// When so many bytes may be sent, if not now.
    fn reserve(&self, bytes: u64) -> Option<Instant> {
        let now = self.began.elapsed();
        let mut pace = self.pace.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let at = pace.reserve(now, bytes);
        (at > now).then(|| self.began.checked_add(at)).flatten()
    }
}

/// The way of one piece through the rates that it is subject to.
#[derive(Debug, Default)]
pub struct Turn {
    /// Rates at which the piece has its reservation.
    reserved: usize,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Turn {
    /// Ready when the piece may be sent. One rate after the other: who waits for its own takes nothing of what others share.
    pub fn poll(&mut self, context: &mut Context<'_>, bytes: u64, pacers: [&Pacer; 2]) -> Poll<()> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                ready!(sleep.as_mut().poll(context));
                self.sleep = None;
            }
            let Some(pacer) = pacers.get(self.reserved) else { return Poll::Ready(()) };
            self.reserved += 1;
            self.sleep = pacer.reserve(bytes).map(|at| Box::pin(sleep_until(at.into())));
        }
    }
}
