//! The record of what a VM needs of its image right after it was made of it: read when the VM is made, made anew if it is missing
//! or lacks much. It is advice. Whatever goes wrong with it is said once, and the VM does without.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::units::ChunkIdx;
use pagoda_image::{Image, Touched};

use super::recorder::Recorder;
use crate::threads;

/// How long after its guest was let run the VM's needs are noted.
pub const RECORD_FOR: Duration = Duration::from_secs(10);
/// A guest that does not run so long after its VM was made, because its user paused it or QEMU hangs, tells nothing of the start.
const LET_RUN_MAX: Duration = Duration::from_secs(150);

#[derive(Debug, Clone, Copy)]
enum Until {
    /// The guest is let run, which it is before this moment or never.
    LetRun(Instant),
    Over(Instant),
}

/// The record that a new VM was given, and the one that is made of it.
#[derive(Debug)]
pub struct Record {
    image: Arc<Image>,
    vm: String,
    /// The record that there was; empty if there was none.
    known: Touched,
    recorder: Recorder,
    until: Until,
}

impl Record {
    /// Of a VM that is made now. Reads the record that there is, for which it waits for the disk.
    pub fn begin(image: Arc<Image>, vm: &str, label: &str) -> Record {
        let known = image.touched().unwrap_or_else(|why| {
            tracing::warn!(image = label, "the record of pages to prefetch is not used, and is made anew: {why}");
            None
        });
        let known = known.unwrap_or_default();
        let recorder = Recorder::new(image.chunks(), &known);
        Record { image, vm: vm.to_owned(), known, recorder, until: Until::LetRun(Instant::now() + LET_RUN_MAX) }
    }

    /// The record that there was.
    pub fn known(&self) -> &Touched {
        &self.known
    }

    /// The VM needs these pages of the image.
    pub fn note(&mut self, chunk: ChunkIdx, pages: PageSet) {
        self.recorder.note(chunk, pages);
    }

    /// The guest was let run, now or before.
    pub fn note_let_run(&mut self) {
        if matches!(self.until, Until::LetRun(_)) {
            self.until = Until::Over(Instant::now() + RECORD_FOR);
        }
    }

    /// Whether recording has ended: its time is over, or the record is full.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        match self.until {
            Until::LetRun(end) => now >= end,
            Until::Over(end) => now >= end || self.recorder.is_full(),
        }
    }

    /// Has a thread write the record, if it is to be another one. The thread may wait for the disk as long as that takes, and has
    /// nothing of the VM.
    pub fn end(self) {
        let Record { image, vm, known, recorder, until } = self;
        if matches!(until, Until::LetRun(_)) {
            return;
        }
        let Some(record) = recorder.into_record(known) else { return };
        let thread = std::thread::Builder::new().name(threads::name("touched", &vm));
        let spawned = thread.spawn(move || match image.keep_touched(&record) {
            Ok(()) => tracing::debug!(vm, pages = record.pages().0, "what it needed first was noted in its image"),
            Err(error) => tracing::warn!(vm, "note in its image what it needed first: {error}"),
        });
        if let Err(error) = spawned {
            tracing::warn!("start the thread that notes what a VM needed first: {error}");
        }
    }

    /// Bytes of memory that it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.recorder.memory_bytes()
    }
}
