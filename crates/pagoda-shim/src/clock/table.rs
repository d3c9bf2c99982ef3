//! What one queue has in flight: requests by the key that their completions will carry.
//!
//! A key may be in flight more than once (nothing forbids an application to give every request the same `user_data`).
//! Then no completion tells which of them ended, so the key keeps its oldest clock slot until the last of them has:
//! late, never early.

use pagoda_abi::shared::Shared;

/// Keys in flight in one queue. Twice the completion queue the shim asks for ([`super::uring::CQ_ENTRIES`]) and more
/// than QEMU's libaio context holds (1024 requests), so that it stays half empty and probes stay short.
pub const CAPACITY: usize = 4096;

/// Whether a request may read or write guest RAM: only then it needs the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// It may read or write guest RAM.
    Ram,
    /// It can touch no guest RAM.
    Other,
}

/// A place in the clock. All zero bits are "none", so that the tables of unused queues cost no memory.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Held(u32);

impl Held {
    const NOTHING: Held = Held(0);
    /// The clock had no free slot, which [`Shared::untracked`] counts.
    const OVERFLOW: Held = Held(1);

    fn start(clock: &Shared, hint: usize) -> Held {
        super::start_io(clock, hint).map_or(Held::OVERFLOW, |slot| Held(slot as u32 + 2))
    }

    fn finish(self, clock: Option<&Shared>) {
        // A slot is only ever taken from a clock, and the clock never goes away.
        let Some(clock) = clock else { return };
        match self {
            Held::NOTHING => {}
            Held::OVERFLOW => clock.finish_io(None),
            Held(slot) => clock.finish_io(Some(slot as usize - 2)),
        }
    }
}

#[derive(Clone, Copy)]
struct Entry {
    key: u64,
    /// Requests in flight with this key; 0 marks a free entry.
    pending: u32,
    held: Held,
}

/// Why a request or completion could not be noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// More keys in flight than [`CAPACITY`].
    Full,
    /// A completion of something that was never seen submitted, or completions that were overwritten unread.
    Surprise,
    /// RAM is touched before there is a clock.
    TooEarly,
}

/// The table. Linear probing, deletion by shifting back.
pub struct Table {
    entries: [Entry; CAPACITY],
    keys: usize,
    pending: u64,
}

impl Table {
    /// A table of a queue with nothing in flight.
    pub const EMPTY: Table =
        Table { entries: [Entry { key: 0, pending: 0, held: Held::NOTHING }; CAPACITY], keys: 0, pending: 0 };

    /// How many requests are in flight.
    pub fn pending(&self) -> u64 {
        self.pending
    }

    /// Whether any of them may touch RAM.
    pub fn holds_ram(&self) -> bool {
        self.entries.iter().any(|entry| entry.pending > 0 && entry.held != Held::NOTHING)
    }

    fn home(key: u64) -> usize {
        // Multiplicative hashing (Knuth, volume 3, 6.4): keys are pointers, whose low bits hardly differ.
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CAPACITY.ilog2())) as usize
    }

    /// The entry of this key, or the free one where it would go. One entry is always free, so the search ends.
    fn find(&self, key: u64) -> usize {
        let mut index = Self::home(key);
        while self.entries[index].pending > 0 && self.entries[index].key != key {
            index = (index + 1) % CAPACITY;
        }
        index
    }

    /// A request is about to be submitted. It starts its clock, so this comes before the system call.
    pub fn add(&mut self, key: u64, touch: Touch, clock: Option<&Shared>) -> Result<(), Fault> {
        let index = self.find(key);
        if self.entries[index].pending == 0 {
            if self.keys + 1 == CAPACITY {
                return Err(Fault::Full);
            }
            self.keys += 1;
            self.entries[index] = Entry { key, pending: 0, held: Held::NOTHING };
        }
        let entry = &mut self.entries[index];
        entry.pending += 1;
        self.pending += 1;
        if touch == Touch::Ram && entry.held == Held::NOTHING {
            // The entry's index spreads a queue's requests over the clock's slots.
            entry.held = Held::start(clock.ok_or(Fault::TooEarly)?, index);
        }
        Ok(())
    }

    /// One request of this key has ended.
    pub fn complete(&mut self, key: u64, clock: Option<&Shared>) -> Result<(), Fault> {
        let index = self.find(key);
        let entry = &mut self.entries[index];
        if entry.pending == 0 {
            return Err(Fault::Surprise);
        }
        entry.pending -= 1;
        self.pending -= 1;
        if entry.pending == 0 {
            entry.held.finish(clock);
            self.keys -= 1;
            self.close_gap(index);
        }
        Ok(())
    }

    /// Every request has ended.
    pub fn complete_all(&mut self, clock: Option<&Shared>) {
        for entry in self.entries.iter_mut().filter(|entry| entry.pending > 0) {
            entry.held.finish(clock);
            entry.pending = 0;
        }
        self.keys = 0;
        self.pending = 0;
    }

    /// Moves entries back over the one just freed, so that every key is still found from its home without a gap.
    fn close_gap(&mut self, mut gap: usize) {
        let mut index = gap;
        loop {
            index = (index + 1) % CAPACITY;
            let entry = self.entries[index];
            if entry.pending == 0 {
                return;
            }
            let from_home = (index + CAPACITY - Self::home(entry.key)) % CAPACITY;
            let from_gap = (index + CAPACITY - gap) % CAPACITY;
            if from_home >= from_gap {
                self.entries[gap] = entry;
                self.entries[index].pending = 0;
                gap = index;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::testing::{Rng, boxed_table, shared};
    use std::collections::HashMap;
    use std::sync::atomic::Ordering;

    #[test]
    fn random_operations_match_a_map_and_no_slot_is_early_or_leaked() {
        let seed = 0x5eed_0001;
        let (clock, mut table, mut rng) = (shared(), boxed_table(), Rng::new(seed));
        let mut model: HashMap<u64, (u32, bool)> = HashMap::new();
        for step in 0..200_000 {
            // Few distinct keys, so that duplicates and collisions happen; aligned as pointers are.
            let key = 0x7f00_0000_0000 + rng.below(600) * 64;
            if rng.below(2) == 0 {
                let touch = if rng.below(2) == 0 { Touch::Ram } else { Touch::Other };
                table.add(key, touch, Some(&clock)).unwrap();
                let entry = model.entry(key).or_default();
                *entry = (entry.0 + 1, entry.1 || touch == Touch::Ram);
            } else {
                let known = model.get_mut(&key);
                assert_eq!(table.complete(key, Some(&clock)).is_ok(), known.is_some(), "seed {seed:#x} step {step}");
                if let Some(entry) = known {
                    entry.0 -= 1;
                    if entry.0 == 0 {
                        model.remove(&key);
                    }
                }
            }
            if step % 997 == 0 {
                let held = clock.io.iter().filter(|slot| slot.load(Ordering::SeqCst) != 0).count();
                assert_eq!(held, model.values().filter(|entry| entry.1).count(), "seed {seed:#x} step {step}");
                assert_eq!(table.pending(), model.values().map(|entry| u64::from(entry.0)).sum::<u64>());
            }
        }
        table.complete_all(Some(&clock));
        assert_eq!(clock.oldest_io(), u64::MAX);
    }

    #[test]
    fn a_key_twice_in_flight_keeps_its_oldest_epoch_to_the_end() {
        let (clock, mut table) = (shared(), boxed_table());
        table.add(7, Touch::Ram, Some(&clock)).unwrap();
        let zap = clock.advance();
        table.add(7, Touch::Ram, Some(&clock)).unwrap();
        table.complete(7, Some(&clock)).unwrap();
        assert!(clock.oldest_io() < zap, "the first may still be the one in flight");
        table.complete(7, Some(&clock)).unwrap();
        assert_eq!(clock.oldest_io(), u64::MAX);
    }

    #[test]
    fn a_full_table_and_a_stranger_are_faults() {
        let mut table = boxed_table();
        for key in 1..CAPACITY as u64 {
            table.add(key, Touch::Other, None).unwrap();
        }
        assert_eq!(table.add(u64::MAX, Touch::Other, None), Err(Fault::Full));
        assert_eq!(table.complete(u64::MAX, None), Err(Fault::Surprise));
        assert_eq!(boxed_table().add(1, Touch::Ram, None), Err(Fault::TooEarly));
    }
}
