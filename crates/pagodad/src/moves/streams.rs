//! Streams of moves that other hosts have begun, so that a host that is not trusted any more has none.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagoda_link::{Cutter, PublicKey};

type Open = BTreeMap<u64, (PublicKey, Cutter)>;

/// The streams that are open, each with the host that has begun it.
#[derive(Debug, Default)]
pub struct Streams {
    open: Arc<Mutex<Open>>,
    last: AtomicU64,
}

/// A stream that is known until this is dropped.
#[derive(Debug)]
pub struct Entered {
    open: Arc<Mutex<Open>>,
    number: u64,
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Streams {
    /// Enters a stream of this host. Whether the host is trusted has to be looked at behind this.
    pub fn enter(&self, peer: PublicKey, cutter: Cutter) -> Entered {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        lock(&self.open).insert(number, (peer, cutter));
        Entered { open: Arc::clone(&self.open), number }
    }

    /// Ends all streams of a host, at both ends.
    pub fn cut(&self, peer: &PublicKey) {
        lock(&self.open).values().filter(|(of, _)| of == peer).for_each(|(_, cutter)| cutter.cut());
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        lock(&self.open).remove(&self.number);
    }
}
