//! The naive reference: it knows every byte and every page by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use pagoda_outbox::{Attributes, FileMemory, Ino, Mode, Next, ReaderId, Reclaim, ReclaimKind, Refusal, Selection};
use proptest::prelude::*;

use crate::Place;

pub const PAGE: u64 = 4096;

#[derive(Debug, Default)]
struct File {
    is_on_close: bool,
    deliveries: u8,
    writers: usize,
    is_sealed: bool,
    is_broken: bool,
    size: u64,
    /// Content by byte; what is not here is a hole.
    bytes: BTreeMap<u64, u8>,
    /// Pages that the kernel has.
    real: BTreeSet<u64>,
    /// Pages that may be written.
    charged: BTreeSet<u64>,
    /// Pages that are gone for good.
    punched: BTreeSet<u64>,
    writes: Vec<Range<u64>>,
    sent_end: u64,
    /// How often a byte has arrived.
    arrived: BTreeMap<u64, u8>,
    ttl: u32,
    /// When it was first looked whether it is too old.
    seen: Option<u64>,
}

#[derive(Debug)]
struct Reader {
    ino: Ino,
    selection: Selection,
    given: u64,
    acknowledged: u64,
}

#[derive(Debug, Default)]
pub struct Reference {
    files: BTreeMap<Ino, File>,
    readers: BTreeMap<ReaderId, Reader>,
    pub default_ttl: Option<u64>,
}

fn pages(range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
    range.start / PAGE..range.end.div_ceil(PAGE)
}

impl File {
    fn freed(&self) -> u64 {
        self.punched.last().map_or(0, |page| (page + 1) * PAGE)
    }

    fn is_complete(&self) -> bool {
        !self.is_broken && self.writers == 0 && self.writes.is_empty()
    }

    fn is_published(&self) -> bool {
        !self.is_on_close || self.is_complete()
    }

    fn sendable_end(&self) -> u64 {
        let undecided = self.writes.iter().map(|write| write.start).min().unwrap_or(u64::MAX);
        match () {
            () if !self.is_published() => self.sent_end,
            () if self.is_complete() => self.size,
            () => self.size.min(undecided).min(self.first_gap()),
        }
    }

    /// Where the first byte is missing of those that are not sent yet.
    fn first_gap(&self) -> u64 {
        let written = self.bytes.range(self.sent_end..).map(|(at, _)| *at);
        self.sent_end + written.zip(self.sent_end..).take_while(|(at, expected)| at == expected).count() as u64
    }

    fn changeable(&self, at: u64) -> Result<(), Refusal> {
        if self.is_sealed {
            return Err(Refusal::Sealed);
        }
        if self.is_broken {
            return Err(Refusal::Broken);
        }
        if at < self.sent_end || at < self.freed() { Err(Refusal::BelowCursor) } else { Ok(()) }
    }
}

impl Reference {
    fn file(&mut self, ino: Ino) -> &mut File {
        self.files.get_mut(&ino).expect("a file that was created")
    }

    pub fn create(&mut self, ino: Ino, mode: Mode, deliveries: u8, ttl: u32) {
        let file = File { is_on_close: mode == Mode::OnClose, deliveries, ttl, ..File::default() };
        assert!(self.files.insert(ino, file).is_none(), "numbers are used once");
    }

    pub fn offset(&self, ino: Ino, place: Place) -> u64 {
        match place {
            Place::At(at) => at,
            Place::NearCursor(behind) => (self.files[&ino].sent_end + behind).saturating_sub(1),
        }
    }

    pub fn check_open(&mut self, ino: Ino) -> Result<(), Refusal> {
        let file = self.file(ino);
        match () {
            () if file.is_sealed => Err(Refusal::Sealed),
            () if file.is_broken => Err(Refusal::Broken),
            () => Ok(()),
        }
    }

    pub fn open(&mut self, ino: Ino) {
        self.file(ino).writers += 1;
    }

    pub fn release(&mut self, ino: Ino) {
        let file = self.file(ino);
        file.writers -= 1;
        file.is_sealed |= file.writers == 0 && file.size > 0;
    }

    pub fn abandon(&mut self) {
        for file in self.files.values_mut().filter(|file| file.writers > 0) {
            file.is_broken = true;
            file.writers = 0;
        }
    }

    pub fn is_too_old(&mut self, ino: Ino, now: u64) -> bool {
        let default_ttl = self.default_ttl;
        let file = self.file(ino);
        if !file.is_sealed || !file.is_complete() {
            return false;
        }
        let age = now - *file.seen.get_or_insert(now);
        match file.ttl {
            0 => default_ttl.is_some_and(|ttl| age >= ttl),
            1..10 => age >= u64::from(file.ttl),
            _ => false,
        }
    }

    pub fn room(&mut self, ino: Ino, offset: u64, length: u64, free: u64) -> Result<u64, Refusal> {
        let file = self.file(ino);
        file.changeable(offset)?;
        let (mut free, mut end) = (free / PAGE, offset);
        for page in pages(&(offset..offset + length)) {
            if !file.charged.contains(&page) {
                let Some(less) = free.checked_sub(1) else { break };
                free = less;
            }
            end = ((page + 1) * PAGE).min(offset + length);
        }
        if end == offset { Err(Refusal::Full) } else { Ok(end - offset) }
    }

    pub fn begin_write(&mut self, ino: Ino, range: Range<u64>) {
        let file = self.file(ino);
        file.charged.extend(pages(&range));
        file.writes.push(range);
    }

    pub fn write(&mut self, ino: Ino, range: Range<u64>, written: u64, fill: u8) {
        let file = self.file(ino);
        let at = file.writes.iter().position(|write| *write == range).unwrap();
        file.writes.swap_remove(at);
        let done = range.start..range.start + written;
        assert!(written == 0 || done.start >= file.sent_end, "bytes that were sent would change");
        for page in pages(&done).filter(|_| written > 0) {
            assert!(!file.punched.contains(&page) && file.charged.contains(&page));
            file.real.insert(page);
        }
        file.bytes.extend(done.clone().map(|at| (at, fill)));
        if written > 0 {
            file.size = file.size.max(done.end);
        }
    }

    pub fn check_resize(&mut self, ino: Ino, size: u64) -> Result<(), Refusal> {
        let file = self.file(ino);
        file.changeable(size)?;
        if file.writes.is_empty() { Ok(()) } else { Err(Refusal::Busy) }
    }

    pub fn resize(&mut self, ino: Ino, size: u64) {
        let file = self.file(ino);
        file.size = size;
        file.bytes.split_off(&size);
        file.real.split_off(&size.div_ceil(PAGE));
        file.charged.split_off(&size.div_ceil(PAGE));
    }

    pub fn may_attach(&mut self, ino: Ino, start: u64) -> bool {
        let file = self.file(ino);
        let is_beyond = file.is_complete() && start > file.size;
        !file.is_broken && file.is_published() && start >= file.freed() && !is_beyond
    }

    pub fn attach(&mut self, reader: ReaderId, ino: Ino, selection: Selection) {
        self.readers.insert(reader, Reader { ino, selection, given: selection.start, acknowledged: selection.start });
    }

    pub fn next(&mut self, id: ReaderId, max: u64, next: Next) -> Result<(), TestCaseError> {
        let reader = self.readers.get_mut(&id).unwrap();
        let file = self.files.get_mut(&reader.ino).unwrap();
        let wanted_end = reader.selection.end.unwrap_or(u64::MAX);
        let end = file.sendable_end().min(wanted_end).min(reader.given + max);
        let expected = match () {
            () if reader.given >= wanted_end => Next::End,
            () if end > reader.given => Next::Bytes { offset: reader.given, length: end - reader.given },
            () if file.is_broken => Next::Broken,
            () if file.is_complete() && file.sendable_end() == file.size => Next::End,
            () => Next::Wait,
        };
        prop_assert_eq!(next, expected);
        if let Next::Bytes { offset, length } = next {
            for page in pages(&(offset..offset + length)) {
                prop_assert!(!file.punched.contains(&page), "sends what was given back");
            }
            reader.given = offset + length;
            file.sent_end = file.sent_end.max(reader.given);
        }
        Ok(())
    }

    /// A position some eighths between what has arrived and what was given.
    pub fn share_of(&self, id: ReaderId, share: u64) -> u64 {
        let reader = &self.readers[&id];
        reader.acknowledged + (reader.given - reader.acknowledged) * share / 8
    }

    pub fn acknowledge(&mut self, id: ReaderId, position: u64) {
        let reader = self.readers.get_mut(&id).unwrap();
        let file = self.files.get_mut(&reader.ino).unwrap();
        for at in reader.acknowledged..position.min(reader.given) {
            *file.arrived.entry(at).or_default() += 1;
        }
        reader.acknowledged = reader.acknowledged.max(position.min(reader.given));
    }

    pub fn detach(&mut self, id: ReaderId) {
        self.readers.remove(&id);
    }

    /// Nothing that somebody still needs may be planned to go.
    pub fn plan_reclaim(&mut self, reclaim: &Reclaim) -> Result<(), TestCaseError> {
        let file = self.files.get_mut(&reclaim.ino).unwrap();
        match &reclaim.kind {
            ReclaimKind::Punch(range) => {
                prop_assert!(range.start % PAGE == 0 && range.end % PAGE == 0);
                for at in range.start..range.end.min(file.size) {
                    let arrived = file.arrived.get(&at).copied().unwrap_or(0);
                    prop_assert!(arrived >= file.deliveries, "byte {at} was delivered {arrived} times");
                }
                prop_assert!(range.end <= file.size || file.is_sealed, "the last page may still grow");
                let mut readers = self.readers.values().filter(|reader| reader.ino == reclaim.ino);
                prop_assert!(readers.all(|reader| reader.acknowledged >= range.end.min(file.size)));
                for page in pages(range) {
                    file.charged.remove(&page);
                    file.punched.insert(page);
                }
            }
            ReclaimKind::Drop => {
                prop_assert!(!self.readers.values().any(|reader| reader.ino == reclaim.ino));
                prop_assert!(file.writers == 0 && file.writes.is_empty());
            }
        }
        Ok(())
    }

    pub fn reclaim(&mut self, reclaim: &Reclaim) {
        let file = self.file(reclaim.ino);
        match &reclaim.kind {
            ReclaimKind::Punch(range) => pages(range).for_each(|page| {
                file.real.remove(&page);
            }),
            ReclaimKind::Drop => file.real.clear(),
        }
    }

    /// The process is killed: writes under way have changed anything of what they may, and memory that was to be given back
    /// may be there still. Then the next one makes files' memory fit.
    pub fn kill(&mut self, kept: &[FileMemory], is_kept: impl Fn(Ino) -> bool) {
        self.readers.clear();
        for (ino, file) in &mut self.files {
            // Ages are counted anew.
            file.seen = None;
            for write in std::mem::take(&mut file.writes) {
                file.real.extend(pages(&write));
            }
            if !is_kept(*ino) {
                file.real.clear();
                continue;
            }
            let memory = kept.iter().find(|memory| memory.ino == *ino).expect("a file that is kept has memory");
            assert_eq!((memory.size, memory.freed), (file.size, file.freed()));
            let end = memory.size.div_ceil(PAGE);
            file.real.retain(|page| (memory.freed / PAGE..end).contains(page));
            file.charged.split_off(&end);
        }
    }

    pub fn real_bytes(&self) -> u64 {
        self.files.values().map(|file| file.real.len() as u64 * PAGE).sum()
    }

    pub fn check_file(&self, found: &Attributes) -> Result<(), TestCaseError> {
        let file = &self.files[&found.ino];
        prop_assert_eq!(found.size, file.size);
        prop_assert_eq!(found.cursor, file.sent_end);
        prop_assert_eq!(found.freed, file.freed());
        prop_assert_eq!(found.charged, file.charged.len() as u64 * PAGE);
        prop_assert_eq!(found.is_complete, file.is_complete());
        prop_assert_eq!(found.is_published, file.is_published());
        Ok(())
    }
}
