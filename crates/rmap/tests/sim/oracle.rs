//! What is right: every page is a register with one writer at a time.
//!
//! Writes are ordered by their owners, then by submission: a new owner's come after all of the old one's, whenever they were
//! submitted. A read returns the last acknowledged write or one that was under way, never an older one, never another page's, never
//! zeros unless the page was never written or trimmed. What one read has returned, later ones do not take back. Once a new
//! owner has read or written a page, nothing of the old ones lands on it.

use std::collections::{BTreeMap, BTreeSet};

use rmap::units::{PAGE_SIZE, Page};

/// A write to a page: its owner, and how manieth it is of all. The first one stands for "never written".
pub type Nth = (u32, u32);

const NEVER: Nth = (0, 0);

#[derive(Debug)]
struct Write {
    /// 0 for a trim.
    value: u64,
    acked: bool,
    /// A trim of what was a hole: it was done when it was asked for. Whether the page was lost by then.
    hole: Option<bool>,
    fate: Fate,
    /// When it became void, in reads that had begun by then.
    void_at: u64,
}

impl Write {
    fn new(value: u64, acked: bool, fate: Fate) -> Write {
        Write { value, acked, hole: None, fate, void_at: 0 }
    }

    fn make_void(&mut self, at: u64) {
        (self.fate, self.void_at) = (Fate::Void, at);
    }
}

/// What may still come of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Open,
    /// A newer owner's write came after it. Whether it took effect before cannot be told any more.
    Superseded,
    /// It failed before anything was sent, or a newer owner has seen the page without it: it must not land.
    Void,
}

#[derive(Debug)]
struct Register {
    writes: BTreeMap<Nth, Write>,
    /// The newest owner that has seen or changed it, and what it saw last.
    seen_by: u32,
    seen: Nth,
    /// The owner that was told that it is lost.
    lost: Option<u32>,
}

impl Default for Register {
    fn default() -> Register {
        let never = Write::new(0, true, Fate::Open);
        Register { writes: BTreeMap::from([(NEVER, never)]), seen_by: 0, seen: NEVER, lost: None }
    }
}

/// A read as it began.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    oldest: Nth,
    /// Others read it at the same time, and one may hear of a loss while another's answer is on its way. Where parity is made,
    /// it may even come back: parity that was complete in time may get into the map after the loss of a member.
    may_still_be_there: bool,
    /// A reader of a sealed space that knows a page to be trimmed asks nobody for it, whatever others have heard.
    is_shared: bool,
    /// How many reads of what others write had begun before it.
    order: u64,
}

#[derive(Debug, Default)]
pub struct Oracle {
    pages: BTreeMap<(u64, u64), Register>,
    /// Sealed spaces that have parity, or will.
    with_parity: BTreeSet<u64>,
    values: u64,
    /// Reads of what others write.
    begun: u64,
    pub verified: u64,
    pub acked: u64,
    pub lost: u64,
}

/// The page that stands for a value: it says whose page it is, in every word.
pub fn page_of(space: u64, page: u64, value: u64) -> Page {
    let mut bytes = [0; PAGE_SIZE];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let mixed = value ^ (space << 56) ^ (page << 40) ^ ((at as u64) << 24).rotate_left(at as u32 & 7);
        word.copy_from_slice(&mixed.to_le_bytes());
    }
    bytes
}

impl Oracle {
    /// A write begins: which it is, and the value to write.
    pub fn write(&mut self, space: u64, page: u64, generation: u32, trim: bool) -> (Nth, u64) {
        self.values += 1;
        let value = if trim { 0 } else { self.values };
        let register = self.pages.entry((space, page)).or_default();
        let fate = if generation < register.seen_by { Fate::Void } else { Fate::Open };
        let nth = (generation, self.values as u32);
        register.writes.insert(nth, Write::new(value, false, fate));
        (nth, value)
    }

    /// A trim begins of what its owner knows to be a hole.
    pub fn trim_hole(&mut self, space: u64, page: u64, generation: u32) -> Nth {
        let (nth, _) = self.write(space, page, generation, true);
        let register = self.pages.entry((space, page)).or_default();
        let was_lost = register.lost.is_some_and(|by| by <= generation);
        register.writes.entry(nth).and_modify(|write| write.hole = Some(was_lost));
        nth
    }

    pub fn acknowledged(&mut self, space: u64, page: u64, nth: Nth) -> Result<(), String> {
        let register = self.pages.entry((space, page)).or_default();
        let (generation, seen_by) = (nth.0, register.seen_by);
        self.acked += 1;
        let Some(write) = register.writes.get_mut(&nth) else { return Err("what was acknowledged?".to_owned()) };
        write.acked = true;
        // What is lost since a hole was trimmed is no less trimmed.
        let was_lost = write.hole;
        if write.fate == Fate::Void {
            return Err(format!("a write of generation {generation} landed after {seen_by}"));
        }
        if write.fate == Fate::Superseded || generation < seen_by {
            return Ok(());
        }
        // A past owner may hear late of what was done while the page was there.
        if was_lost.unwrap_or(register.lost.is_some_and(|by| by <= generation)) {
            return Err("a write to a lost page was acknowledged".to_owned());
        }
        register.seen_by = generation;
        register.seen = register.seen.max(nth);
        for (_, write) in register.writes.range_mut(..(generation, 0)) {
            if !write.acked && write.fate == Fate::Open {
                write.fate = Fate::Superseded;
            }
        }
        Ok(())
    }

    /// Nothing was done for this write, and nothing will be.
    pub fn declined(&mut self, space: u64, page: u64, nth: Nth) {
        if let Some(write) = self.pages.entry((space, page)).or_default().writes.get_mut(&nth) {
            write.make_void(self.begun);
        }
    }

    pub fn lost(&mut self, space: u64, page: u64, generation: u32) {
        self.lost += 1;
        self.pages.entry((space, page)).or_default().lost.get_or_insert(generation);
    }

    pub fn begin_read(&mut self, space: u64, page: u64, generation: u32, shared: bool) -> Begun {
        let register = self.pages.entry((space, page)).or_default();
        let own = register.writes.range(..=(generation, u32::MAX));
        let oldest = own.rev().find(|(_, write)| write.acked).map_or(NEVER, |(nth, _)| *nth);
        let seen = if register.seen_by == generation { register.seen } else { NEVER };
        let may_come_back = register.lost.is_none() || self.with_parity.contains(&space);
        Begun { oldest: oldest.max(seen), may_still_be_there: shared && may_come_back, is_shared: shared, order: 0 }
    }

    /// A read by a host that does not own the space begins.
    pub fn begin_follow(&mut self, space: u64, page: u64) -> Begun {
        let register = self.pages.entry((space, page)).or_default();
        let oldest = register.writes.iter().rev().find(|(_, write)| write.acked).map_or(NEVER, |(nth, _)| *nth);
        self.begun += 1;
        Begun { oldest, may_still_be_there: true, is_shared: true, order: self.begun }
    }

    /// What it returned: the last write that was acknowledged when it began, or a later one that nobody had found missing by then.
    /// Which it was, if it can be told.
    pub fn end_follow(&mut self, space: u64, page: u64, begun: Begun, got: &Page) -> Result<Option<Nth>, String> {
        let register = self.pages.entry((space, page)).or_default();
        let zero = got.iter().all(|byte| *byte == 0);
        let fits = |value: u64| if value == 0 { zero } else { *got == page_of(space, page, value) };
        let alive = |write: &Write| write.acked || write.fate != Fate::Void || write.void_at >= begun.order;
        let found = register.writes.range(begun.oldest..).rev().find(|(_, write)| alive(write) && fits(write.value));
        let Some((nth, _)) = found else {
            let any = register.writes.iter().find(|(_, write)| fits(write.value)).map(|(nth, _)| nth);
            return Err(format!("another host read {any:?} (zeros: {zero}), expected {:?} or later", begun.oldest));
        };
        self.verified += 1;
        Ok((!zero).then_some(*nth))
    }

    /// From now on parity is made for a sealed space.
    pub fn gets_parity(&mut self, space: u64) {
        self.with_parity.insert(space);
    }

    pub fn end_read(&mut self, space: u64, page: u64, generation: u32, begun: Begun, got: &Page) -> Result<(), String> {
        let register = self.pages.entry((space, page)).or_default();
        let zero = got.iter().all(|byte| *byte == 0);
        let may_be_read = begun.may_still_be_there || begun.is_shared && zero;
        if register.lost.is_some_and(|by| by <= generation) && !may_be_read {
            return Err("a lost page was read".to_owned());
        }
        let fits = |value: u64| if value == 0 { zero } else { *got == page_of(space, page, value) };
        // An owner of the past may still see what it was about to write.
        let past = generation < register.seen_by;
        let alive = |write: &Write| past || write.fate != Fate::Void || write.acked;
        let candidates = register.writes.range(begun.oldest..=(generation, u32::MAX));
        let found = candidates.rev().find(|(_, write)| alive(write) && fits(write.value)).map(|(nth, _)| *nth);
        let Some(nth) = found else {
            let any = register.writes.iter().find(|(_, write)| fits(write.value)).map(|(nth, _)| nth);
            let last = register.writes.keys().next_back();
            return Err(format!("read {any:?} (zeros: {zero}), expected {:?} to {last:?}", begun.oldest));
        };
        self.verified += 1;
        // Zeros may be any of several trims: the least that it can have been.
        let seen = if zero { begun.oldest } else { nth };
        if generation > register.seen_by {
            // What the earlier owners had not finished and this one does not see is gone for good.
            for (late, write) in register.writes.range_mut(..(generation, 0)) {
                if *late > nth && !write.acked {
                    write.make_void(self.begun);
                }
            }
            register.seen_by = generation;
            register.seen = seen;
        } else if generation == register.seen_by {
            register.seen = register.seen.max(seen);
        }
        Ok(())
    }

    /// Pages that must be readable.
    pub fn pages_of(&self, space: u64) -> Vec<u64> {
        self.pages
            .iter()
            .filter(|((of, _), register)| *of == space && register.lost.is_none())
            .map(|((_, page), _)| *page)
            .collect()
    }
}
