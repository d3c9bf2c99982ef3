//! An image that is lost, and whose files do not say so yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_image::{ImageId, Ledger};

/// The pause between two attempts to note a loss.
const PAUSE: Duration = Duration::from_secs(1);

/// A loss that the image's files do not record yet.
#[derive(Debug)]
pub struct Unnoted {
    ledger: Arc<Ledger>,
    why: String,
    tried: Instant,
}

impl Unnoted {
    /// The first attempt has failed.
    pub fn new(ledger: Arc<Ledger>, why: String) -> Unnoted {
        Unnoted { ledger, why, tried: Instant::now() }
    }

    pub fn id(&self) -> ImageId {
        self.ledger.id()
    }

    /// Tries again, now and then. True: it is noted.
    pub fn retry(&mut self) -> bool {
        if self.tried.elapsed() < PAUSE {
            return false;
        }
        self.tried = Instant::now();
        self.ledger.lose(&self.why)
    }
}
