//! Where the journals are in a model, and what becomes of journals that no space has written.

use pagoda_outbox::journal::batch;
use pagoda_outbox::{Access, NewNode, ROOT, Restored, Selection, Space, Time};
use proptest::prelude::*;

/// The two journals, as a server writes them.
#[derive(Default)]
pub struct Disk {
    journals: [Vec<u8>; 2],
    current: usize,
    epoch: u64,
}

/// Small, so that many a run begins several.
const JOURNAL_BYTES_MAX: usize = 512;

impl Disk {
    pub fn begin(&mut self, space: &mut Space) {
        let _ = space.take_changes();
        (self.current, self.epoch) = (1 - self.current, self.epoch + 1);
        self.journals[self.current] = batch(&space.snapshot(self.epoch));
    }

    pub fn commit(&mut self, space: &mut Space) {
        let Some(changes) = space.take_changes() else { return };
        self.journals[self.current].extend(batch(&changes));
        if self.journals[self.current].len() > JOURNAL_BYTES_MAX {
            self.begin(space);
        }
    }

    /// Something was being written that is not whole: to the end of the valid journal, or as a snapshot into the other.
    pub fn tear(&mut self, written: usize) {
        let torn = batch(b"what is never whole");
        let torn = &torn[..written % torn.len()];
        self.journals[self.current].extend_from_slice(torn);
        let other = &mut self.journals[1 - self.current];
        other.truncate(written % (other.len() + 1));
    }

    pub fn restore(&self) -> Restored {
        Space::restore([&self.journals[0], &self.journals[1]]).unwrap()
    }
}

/// A space with something of everything.
fn sample() -> Space {
    let mut space = Space::new(1 << 20);
    let now = Time { seconds: 1, nanos: 2 };
    let dir = space.make_directory(ROOT, b"dir", NewNode::default()).unwrap().ino;
    for (name, bytes) in [(&b"sealed"[..], 10_000), (b"grows", 5000), (b"empty", 0)] {
        let ino = space.create(dir, name, NewNode::default()).unwrap().ino;
        let handle = space.open_by(ino, Access::Write, 7).unwrap();
        if bytes > 0 {
            let write = space.plan_write(handle, ino, 0, bytes).unwrap();
            space.complete_write(&write, bytes, now);
        }
        if name == b"sealed" {
            space.release(handle).unwrap();
            let reader = space.attach(ino, Selection { start: 0, end: None }).unwrap();
            space.next(reader, 9000).unwrap();
            space.acknowledge(reader, 9000).unwrap();
            space.detach(reader);
        }
    }
    space
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, ..ProptestConfig::default() })]

    /// Whoever had the process in his hands may have written the journal. It is refused, or is a space that keeps its rules.
    #[test]
    fn a_journal_of_anybody(changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..4), cut in any::<usize>()) {
        let mut records = sample().snapshot(3);
        for (at, byte) in &changes {
            let at = at % records.len();
            records[at] = *byte;
        }
        if cut % 8 == 0 {
            records.truncate(cut / 8 % records.len());
        }
        let journal = batch(&records);
        let Ok(Restored { mut space, .. }) = Space::restore([&journal, &[]]) else { return Ok(()) };
        space.abandon(Time::default());
        for reclaim in space.plan_reclaim(1 << 40) {
            space.complete_reclaim(reclaim);
        }
        let figures = space.figures();
        prop_assert!(figures.disposable <= figures.used);
        let again = batch(&space.snapshot(4));
        prop_assert!(Space::restore([&again, &journal]).is_ok());
    }
}

#[test]
fn a_request_that_was_not_answered_leaves_nothing_open() {
    let mut space = sample();
    space.forget_request(7, false);
    let dir = space.lookup(ROOT, b"dir").unwrap().ino;
    assert!(space.lookup(dir, b"grows").unwrap().is_complete);
    assert_eq!(space.lookup(dir, b"empty").unwrap().size, 0);
}
