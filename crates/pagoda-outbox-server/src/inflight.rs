//! Which requests of the guest have been taken out of its rings and are not answered yet, in memory that outlives this process.
//!
//! The next process answers exactly these. The rings themselves do not say it: a request that waits for long has been
//! overwritten in the ring of available ones meanwhile. Each change is a few stores in an order, and whatever the last of them
//! was when the process was killed, [`Table::recover`] finds each request once. Whoever pops or completes holds the ring's lock.
//!
//! The keeper looks at it as well: while a ring has no request here, nothing is written into the guest's memory for it.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// The ring of FORGET, and that of all else.
pub const RINGS: usize = 2;
/// Entries of a ring. `pagoda run` asks for so many.
pub const HEADS_MAX: u16 = 1024;
/// Bytes of the table.
pub const TABLE_BYTES: u64 = (RINGS * RING_BYTES) as u64;

/// Of each ring: requests taken so far; what is being completed; where the ring began; then a mark for each head, and how many bytes
/// of its request, if that is a write, are in the file.
const TAKEN: usize = 0;
const COMPLETING: usize = 8;
const BEGAN_TAKEN: usize = 16;
const BEGAN_INDEX: usize = 24;
const MARKS: usize = 64;
const DONE: usize = MARKS + HEADS_MAX as usize * 8;
const RING_BYTES: usize = DONE + HEADS_MAX as usize * 8;

/// Of `COMPLETING`: there is one. Below are its head and the index that the used ring had before.
const IS_COMPLETING: u64 = 1 << 63;
/// Of a mark: the process has been killed once since the request was taken.
const IS_AGAIN: u64 = 1 << 63;

/// A request that has to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlight {
    pub head: u16,
    pub request: Request,
    /// Another process has been killed while it was carried out again.
    pub is_again: bool,
    /// So many bytes of a write are in the file.
    pub done: u64,
}

/// Number of a request, which no other has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    pub ring: usize,
    /// Counts the requests that were taken out of the ring, from 1 on.
    taken: u64,
}

impl Request {
    /// The same as one number; never 0.
    pub fn number(self) -> u64 {
        self.taken * RINGS as u64 + self.ring as u64
    }
}

#[derive(Debug)]
pub struct Table {
    region: MmapRegion<()>,
}

impl Table {
    /// # Errors
    /// It is shorter than a table, or cannot be mapped.
    pub fn map(file: File) -> io::Result<Table> {
        let region = MmapRegion::from_file(FileOffset::new(file, 0), TABLE_BYTES as usize).map_err(io::Error::other)?;
        Ok(Table { region })
    }

    fn word(&self, ring: usize, offset: usize) -> &AtomicU64 {
        self.region.get_atomic_ref(ring * RING_BYTES + offset).expect("a word of the table")
    }

    fn mark(&self, ring: usize, head: u16) -> &AtomicU64 {
        self.word(ring, MARKS + usize::from(head) * 8)
    }

    fn done(&self, ring: usize, head: u16) -> &AtomicU64 {
        self.word(ring, DONE + usize::from(head) * 8)
    }

    fn load(&self, ring: usize, offset: usize) -> u64 {
        self.word(ring, offset).load(Ordering::SeqCst)
    }

    /// The order of these is what the module is about.
    fn store(word: &AtomicU64, value: u64) {
        #[cfg(test)]
        tests::step();
        word.store(value, Ordering::SeqCst);
    }

    /// The index of the next request in the ring of available ones.
    pub fn next_index(&self, ring: usize) -> u16 {
        let since = self.load(ring, TAKEN).wrapping_sub(self.load(ring, BEGAN_TAKEN));
        (self.load(ring, BEGAN_INDEX) as u16).wrapping_add(since as u16)
    }

    /// The ring is to begin at this index. If it does not go on from where it was, the guest has begun anew, and nothing of
    /// before is answered.
    pub fn begin(&self, ring: usize, index: u16) {
        if index == self.next_index(ring) {
            return;
        }
        (0..HEADS_MAX).for_each(|head| Self::store(self.mark(ring, head), 0));
        Self::store(self.word(ring, COMPLETING), 0);
        Self::store(self.word(ring, BEGAN_TAKEN), self.load(ring, TAKEN));
        Self::store(self.word(ring, BEGAN_INDEX), u64::from(index));
    }

    /// A request has been popped. `None`: there is no such head, or it has not been answered since it was popped before.
    pub fn take(&self, ring: usize, head: u16) -> Option<Request> {
        if head >= HEADS_MAX || self.mark(ring, head).load(Ordering::SeqCst) != 0 {
            return None;
        }
        let taken = self.load(ring, TAKEN).wrapping_add(1);
        Self::store(self.done(ring, head), 0);
        Self::store(self.mark(ring, head), taken);
        Self::store(self.word(ring, TAKEN), taken);
        Some(Request { ring, taken })
    }

    /// What has been popped is no request that could be answered.
    pub fn skip(&self, ring: usize) {
        Self::store(self.word(ring, TAKEN), self.load(ring, TAKEN).wrapping_add(1));
    }

    /// Puts the answer into the used ring by `push`, whose index is `used` before. Nothing, if the guest has begun anew since.
    pub fn complete(&self, head: u16, request: Request, used: u16, push: impl FnOnce()) -> bool {
        let Request { ring, taken } = request;
        if self.mark(ring, head).load(Ordering::SeqCst) & !IS_AGAIN != taken {
            return false;
        }
        Self::store(self.word(ring, COMPLETING), IS_COMPLETING | u64::from(head) << 16 | u64::from(used));
        push();
        Self::store(self.mark(ring, head), 0);
        Self::store(self.word(ring, COMPLETING), 0);
        true
    }

    /// So many bytes of a write are in the file, and will be when this process is killed.
    pub fn note_done(&self, head: u16, request: Request, bytes: u64) {
        if self.mark(request.ring, head).load(Ordering::SeqCst) & !IS_AGAIN == request.taken {
            Self::store(self.done(request.ring, head), bytes);
        }
    }

    /// It is carried out once more.
    pub fn note_again(&self, head: u16, request: Request) {
        Self::store(self.mark(request.ring, head), request.taken | IS_AGAIN);
    }

    /// Whether a request of this ring was taken and is not answered yet. If there is none, and none is taken any more, nothing more is
    /// written into the guest's memory for this ring: a mark goes after all that was written for its request.
    pub fn is_busy(&self, ring: usize) -> bool {
        (0..HEADS_MAX).any(|head| self.mark(ring, head).load(Ordering::SeqCst) != 0)
    }

    /// The process was ended on purpose, so no request that it carried out again is to blame for its end.
    pub fn forgive(&self) {
        for mark in (0..RINGS).flat_map(|ring| (0..HEADS_MAX).map(move |head| self.mark(ring, head))) {
            let value = mark.load(Ordering::SeqCst);
            if value & IS_AGAIN != 0 {
                Self::store(mark, value & !IS_AGAIN);
            }
        }
    }

    /// What another process has left, oldest first. `used` is the used ring's index.
    pub fn recover(&self, ring: usize, used: u16) -> Vec<InFlight> {
        if self.next_index(ring) == 0 && used == 0 {
            // Both begin at 0, and a ring that has gone round lacks an answer for each request in flight. So this one is new, and
            // what was left is of a ring that stopped at the very index at which this one begins.
            (0..HEADS_MAX).for_each(|head| Self::store(self.mark(ring, head), 0));
        }
        let completing = self.load(ring, COMPLETING);
        let head = (completing >> 16) as u16;
        if completing & IS_COMPLETING != 0 && completing as u16 != used && head < HEADS_MAX {
            Self::store(self.mark(ring, head), 0);
        }
        Self::store(self.word(ring, COMPLETING), 0);
        let all = self.load(ring, TAKEN);
        let mut found = Vec::new();
        for head in 0..HEADS_MAX {
            let mark = self.mark(ring, head).load(Ordering::SeqCst);
            let taken = mark & !IS_AGAIN;
            if taken > all {
                // It is in the ring still.
                Self::store(self.mark(ring, head), 0);
            } else if taken > 0 {
                let done = self.done(ring, head).load(Ordering::SeqCst);
                found.push(InFlight { head, request: Request { ring, taken }, is_again: mark & IS_AGAIN != 0, done });
            }
        }
        found.sort_by_key(|found| found.request);
        found
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use proptest::prelude::*;
    use rustix::fs::MemfdFlags;

    use super::*;

    thread_local! {
        /// Stores until the process is killed.
        static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    /// Instead of the panic hook's words for each of thousands.
    struct Killed;

    pub fn step() {
        let left = LEFT.get();
        if left == 0 {
            std::panic::resume_unwind(Box::new(Killed));
        }
        LEFT.set(left.saturating_sub(1));
    }

    fn memory() -> File {
        let file = File::from(rustix::fs::memfd_create("table", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(TABLE_BYTES).unwrap();
        file
    }

    /// The guest's side of a ring.
    #[derive(Default)]
    struct Guest {
        available: Vec<u16>,
        used: Vec<u16>,
        waiting: BTreeSet<u16>,
        answered: usize,
    }

    impl Guest {
        fn ask(&mut self, head: u16) {
            if self.waiting.insert(head) {
                self.available.push(head);
            }
        }

        fn hear(&mut self) {
            for head in self.used.drain(self.answered..).collect::<Vec<_>>() {
                assert!(self.waiting.remove(&head), "{head} is answered, and was not asked");
                self.used.push(head);
                self.answered += 1;
            }
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Ask(u16),
        Pop,
        Complete(usize),
    }

    fn ops() -> impl Strategy<Value = Vec<(Op, Option<u64>)>> {
        let op = prop_oneof![
            3 => (0_u16..6).prop_map(Op::Ask),
            3 => Just(Op::Pop),
            2 => any::<usize>().prop_map(Op::Complete),
        ];
        prop::collection::vec((op, prop::option::weighted(0.2, 0_u64..8)), 1..60)
    }

    /// A process: what it has taken.
    struct Process {
        table: Table,
        next: u16,
        taken: Vec<(u16, Request)>,
    }

    impl Process {
        fn start(table: Table, guest: &Guest) -> Process {
            let next = table.next_index(1);
            let found = table.recover(1, guest.used.len() as u16);
            Process { table, next, taken: found.iter().map(|found| (found.head, found.request)).collect() }
        }

        fn apply(&mut self, op: &Op, guest: &mut Guest) {
            match op {
                Op::Ask(head) => guest.ask(*head),
                Op::Pop => {
                    let Some(head) = guest.available.get(usize::from(self.next)) else { return };
                    self.next += 1;
                    let request = self.table.take(1, *head).expect("it was answered before it was asked again");
                    self.taken.push((*head, request));
                }
                Op::Complete(pick) if !self.taken.is_empty() => {
                    let (head, request) = self.taken[pick % self.taken.len()];
                    let used = guest.used.len() as u16;
                    assert!(self.table.complete(head, request, used, || guest.used.push(head)));
                    self.taken.retain(|(other, _)| *other != head);
                }
                Op::Complete(_) => {}
            }
        }
    }

    proptest! {
        #[test]
        fn each_request_is_answered_once_whenever_processes_are_killed(ops in ops()) {
            let file = memory();
            let table = || Table::map(file.try_clone().unwrap()).unwrap();
            let mut guest = Guest::default();
            let mut process = Process::start(table(), &guest);
            for (op, kill) in ops {
                LEFT.set(kill.unwrap_or(u64::MAX));
                let ended = catch_unwind(AssertUnwindSafe(|| process.apply(&op, &mut guest)));
                if let Err(payload) = &ended {
                    prop_assert!(payload.is::<Killed>());
                }
                guest.hear();
                if kill.is_some() {
                    // The next one may be killed while it recovers.
                    let _ = catch_unwind(AssertUnwindSafe(|| Process::start(table(), &guest)));
                    LEFT.set(u64::MAX);
                    process = Process::start(table(), &guest);
                }
            }
            LEFT.set(u64::MAX);
            for _ in 0..guest.available.len() {
                process.apply(&Op::Pop, &mut guest);
            }
            while !process.taken.is_empty() {
                process.apply(&Op::Complete(0), &mut guest);
                guest.hear();
            }
            prop_assert!(guest.waiting.is_empty(), "{:?} are never answered", guest.waiting);
        }
    }

    #[test]
    fn a_guest_that_begins_anew_gets_no_answers_of_before() {
        let table = Table::map(memory()).unwrap();
        table.begin(1, 65530);
        let request = table.take(1, 3).unwrap();
        assert_eq!(table.take(1, 3), None, "it is not answered yet");
        assert_eq!(table.take(1, HEADS_MAX), None);
        table.skip(1);
        assert_eq!(table.next_index(1), 65532);
        table.begin(1, 65532);
        assert_eq!(table.recover(1, 0).len(), 1, "it goes on");
        table.note_again(3, request);
        assert!(table.recover(1, 0)[0].is_again);
        table.forgive();
        assert!(!table.recover(1, 0)[0].is_again);
        assert_eq!((table.is_busy(0), table.is_busy(1)), (false, true));
        table.begin(1, 0);
        assert!(!table.is_busy(1));
        assert_eq!((table.next_index(1), table.recover(1, 0).len()), (0, 0));
        assert!(!table.complete(3, request, 0, || panic!("an answer of before")));
        let next = table.take(1, 3).unwrap();
        assert!(next.number() > request.number());
        assert_eq!(table.next_index(1), 1);
        assert!(table.complete(3, next, 0, || assert!(table.is_busy(1), "its answer is not written yet")));
        assert!(!table.is_busy(1), "it was answered");
    }

    #[test]
    fn a_ring_that_begins_where_another_one_stopped_is_told_from_it() {
        let table = Table::map(memory()).unwrap();
        for (used, left) in [(65535, 1), (0, 0)] {
            table.begin(0, 65535);
            table.take(0, 7).unwrap();
            table.begin(0, 0);
            assert_eq!(table.recover(0, used).len(), left, "its used ring is at {used}");
            assert_eq!(table.is_busy(0), left > 0);
        }
    }
}
