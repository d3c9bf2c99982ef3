//! The thread that brings an image's content to the disk while the image is filled: see [`Ledger::write_back`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use pagoda_image::Ledger;

use crate::threads;

/// How often it looks for something to write back: less comes meanwhile than filling waits for.
pub const LOOK: Duration = Duration::from_millis(20);
/// How long the end of a VM waits for the disk to take a piece. Behind that nobody waits for it: the thread itself says so if the
/// disk fails.
const END_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Shared {
    ledger: Arc<Ledger>,
    /// The image is no longer filled.
    is_over: AtomicBool,
    /// What came of it, once it has ended.
    ended: OnceLock<Result<(), String>>,
}

/// See the module. It ends with this, and is not waited for: the disk may hang.
#[derive(Debug)]
pub struct WriteBack {
    shared: Arc<Shared>,
}

/// What a thread has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Works,
    /// It has ended, as it was told to. Nobody but it has heard of an error of the disk, and there was none.
    Ended,
    Failed(String),
}

impl WriteBack {
    /// Nothing, and all is written back at the end, if there is no thread to be had.
    pub fn start(ledger: &Arc<Ledger>, vm: &str) -> Option<WriteBack> {
        let shared = Shared { ledger: Arc::clone(ledger), is_over: AtomicBool::new(false), ended: OnceLock::new() };
        let shared = Arc::new(shared);
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(threads::name("sync", vm));
        let spawned = thread.spawn(move || {
            // This thread alone sets it, and only here.
            let _ = own.ended.set(work(&own));
        });
        spawned.inspect_err(|error| tracing::warn!(vm, "write an image back while it is filled: {error}")).ok()?;
        Some(WriteBack { shared })
    }

    /// Tells the thread to end.
    pub fn end(&self) {
        self.shared.is_over.store(true, Ordering::Release);
    }

    /// Waits until it has ended, as it was told to, or until the disk has not answered for long.
    ///
    /// # Errors
    /// The disk's.
    pub fn wait_ended(&self) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match self.progress() {
                Progress::Ended => return Ok(()),
                Progress::Failed(why) => return Err(why),
                Progress::Works if begun.elapsed() < END_MAX => std::thread::sleep(LOOK),
                Progress::Works => return Ok(()),
            }
        }
    }

    /// What it has come to.
    pub fn progress(&self) -> Progress {
        match self.shared.ended.get() {
            None => Progress::Works,
            Some(Ok(())) => Progress::Ended,
            Some(Err(why)) => Progress::Failed(why.clone()),
        }
    }
}

impl Drop for WriteBack {
    fn drop(&mut self) {
        self.end();
    }
}

fn work(shared: &Shared) -> Result<(), String> {
    while !shared.is_over.load(Ordering::Acquire) {
        match shared.ledger.write_back() {
            Ok(true) => {}
            Ok(false) => std::thread::sleep(LOOK),
            Err(error) => {
                // By itself: nobody hears of this error a second time, and the engine may have ended.
                let why = error.to_string();
                let _ = shared.ledger.lose(&why);
                return Err(why);
            }
        }
    }
    Ok(())
}
