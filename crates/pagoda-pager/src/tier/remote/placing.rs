//! Copies of pages that are written into the space for whoever the VM moves to, while the VM has the pages itself.
//!
//! They are not of this VM's tier: no bit of its map is set for them, and a page whose block there counts is not written over. Whoever
//! has asked for them knows which of them count. What was given up may still land, and counts nowhere.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use rmap::client::Failure;

use crate::tier::Placed;

/// How long a page may take: nobody waits for DRAM that it makes free, and it goes by the link instead.
pub const PLACE_PATIENCE: Duration = Duration::from_secs(5);
/// Pages that wait to be sent: as many as a client can have under way.
const WAITING_MAX: usize = rmap::client::OPS_MAX;

const PAGE: usize = PAGE_SIZE as usize;

/// Pages that wait, and what they hold.
#[derive(Debug)]
struct Waiting {
    first: PageIdx,
    content: Vec<u8>,
    /// Pages of it that have begun.
    begun: usize,
    since: Instant,
}

impl Waiting {
    fn pages(&self) -> usize {
        self.content.len() / PAGE
    }

    fn page(&self, index: usize) -> PageIdx {
        PageIdx(self.first.0 + index as u64)
    }
}

/// Copies that wait to be written into the space, and those under way.
#[derive(Debug, Default)]
pub struct Placing {
    waiting: VecDeque<Waiting>,
    waiting_pages: usize,
    /// The pages under way, by token, and since when they were asked for.
    begun: HashMap<u64, (PageIdx, Instant)>,
    ended: VecDeque<Placed>,
    /// Given up, and the client still tries them.
    abandoned: HashSet<u64>,
}

impl Placing {
    /// Whether nothing that was placed can land any more.
    pub fn is_still(&self) -> bool {
        self.waiting.is_empty() && self.begun.is_empty() && self.abandoned.is_empty()
    }

    /// Writes that were given up take room from others.
    pub fn has_abandoned(&self) -> bool {
        !self.abandoned.is_empty()
    }

    /// Whether it takes more pages now.
    pub fn has_room(&self) -> bool {
        self.waiting_pages < WAITING_MAX
    }

    /// Something waits to be begun.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Something waits, or is under way and waited for.
    pub fn is_busy(&self) -> bool {
        self.is_waiting() || !self.begun.is_empty()
    }

    /// How many pages are being written.
    pub fn begun(&self) -> usize {
        self.begun.len()
    }

    /// Chunks with pages that may still land.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkIdx> {
        let waiting = self.waiting.iter().map(|waiting| waiting.first.chunk());
        waiting.chain(self.begun.values().map(|(page, _)| page.chunk()))
    }

    /// Whole pages of one chunk.
    pub fn add(&mut self, first: PageIdx, content: Vec<u8>, now: Instant) {
        assert!(!content.is_empty() && content.len().is_multiple_of(PAGE), "parts of pages");
        self.waiting_pages += content.len() / PAGE;
        self.waiting.push_back(Waiting { first, content, begun: 0, since: now });
    }

    /// The next page that waits. It stays so until [`Placing::note_begun`].
    pub fn next(&self) -> Option<(PageIdx, &[u8])> {
        let waiting = self.waiting.front()?;
        let at = waiting.begun * PAGE;
        Some((waiting.page(waiting.begun), &waiting.content[at..at + PAGE]))
    }

    /// The next page is under way, by this token.
    pub fn note_begun(&mut self, token: u64) {
        let waiting = self.waiting.front_mut().expect("whoever begins one has looked at it");
        self.begun.insert(token, (waiting.page(waiting.begun), waiting.since));
        waiting.begun += 1;
        self.waiting_pages -= 1;
        if waiting.begun == waiting.pages() {
            self.waiting.pop_front();
        }
    }

    /// A write has ended. False: it is none of these.
    pub fn note_ended(&mut self, token: u64, result: Result<(), Failure>) -> bool {
        if let Some((page, _)) = self.begun.remove(&token) {
            self.ended.push_back(Placed { page, is_there: result.is_ok() });
            return true;
        }
        self.abandoned.remove(&token)
    }

    /// What became of a page. Each is given once.
    pub fn take_ended(&mut self) -> Option<Placed> {
        self.ended.pop_front()
    }

    /// Gives up all of them if one has taken too long. Whether that is so.
    pub fn expire(&mut self, now: Instant) -> bool {
        let is_late = |since: Instant| now.saturating_duration_since(since) >= PLACE_PATIENCE;
        let waits_long = self.waiting.front().is_some_and(|waiting| is_late(waiting.since));
        let has_late = waits_long || self.begun.values().any(|(_, since)| is_late(*since));
        if has_late {
            self.decline_all();
        }
        has_late
    }

    fn decline_all(&mut self) {
        self.abandoned.extend(self.begun.keys());
        let begun = self.begun.drain().map(|(_, (page, _))| page);
        let waiting = self.waiting.drain(..);
        let waiting = waiting.flat_map(|waiting| (waiting.begun..waiting.pages()).map(move |at| waiting.page(at)));
        self.ended.extend(begun.chain(waiting).map(|page| Placed { page, is_there: false }));
        self.waiting_pages = 0;
    }

    /// Nobody waits for any of them.
    pub fn forget(&mut self) {
        self.decline_all();
        self.ended.clear();
    }

    /// Another client goes on: nothing of the one before can land.
    pub fn replace(&mut self) {
        self.decline_all();
        self.abandoned.clear();
    }
}

#[cfg(test)]
mod tests {
    use pagoda_core::chance::Chance;

    use super::*;

    fn pages(first: u64, count: usize) -> (PageIdx, Vec<u8>) {
        let content = (0..count).flat_map(|at| [(first as usize + at) as u8; PAGE]).collect();
        (PageIdx(first), content)
    }

    fn ended(placing: &mut Placing) -> Vec<(u64, bool)> {
        std::iter::from_fn(|| placing.take_ended()).map(|placed| (placed.page.0, placed.is_there)).collect()
    }

    #[test]
    fn each_page_ends_once_and_counts_only_when_the_pool_has_it() {
        let now = Instant::now();
        let mut placing = Placing::default();
        let (first, content) = pages(10, 3);
        placing.add(first, content, now);
        for token in [1, 2] {
            let (page, content) = placing.next().unwrap();
            assert_eq!((page.0, content[0]), (9 + token, 9 + token as u8));
            placing.note_begun(token);
        }
        assert!(placing.note_ended(2, Ok(())) && !placing.note_ended(2, Ok(())) && !placing.note_ended(9, Ok(())));
        assert!(placing.note_ended(1, Err(Failure::Declined)));
        assert_eq!(ended(&mut placing), [(11, true), (10, false)]);
        assert!(!placing.expire(now + PLACE_PATIENCE / 2) && !placing.is_still());
        placing.note_begun(3);
        assert!(placing.expire(now + PLACE_PATIENCE));
        assert_eq!(ended(&mut placing), [(12, false)]);
        // What lands late counts for nothing, and is waited for before the space may be another's.
        assert!(!placing.is_still() && placing.has_abandoned() && !placing.is_busy());
        assert!(placing.note_ended(3, Ok(())));
        assert!(ended(&mut placing).is_empty() && placing.is_still());
    }

    /// Against a list of what was asked for.
    #[test]
    fn nothing_is_forgotten_in_any_order() {
        for seed in 1..30 {
            let mut chance = Chance::new(seed);
            let (mut placing, mut now, mut token) = (Placing::default(), Instant::now(), 0);
            let (mut asked, mut answered, mut open): (u64, Vec<(u64, bool)>, Vec<u64>) = (0, Vec::new(), Vec::new());
            let mut landed = HashSet::new();
            for _ in 0..300 {
                match chance.within(0, 9) {
                    0..3 if placing.has_room() => {
                        let (first, content) = pages(asked, chance.within(1, 64) as usize);
                        asked += (content.len() / PAGE) as u64;
                        placing.add(first, content, now);
                    }
                    0..6 => {
                        if let Some((page, content)) = placing.next() {
                            assert_eq!(content, [page.0 as u8; PAGE], "seed {seed}");
                            let page = page.0;
                            token += 1;
                            placing.note_begun(token);
                            open.push(token);
                            landed.insert((token, page));
                        }
                    }
                    6..8 if !open.is_empty() => {
                        let token = open.swap_remove(chance.within(0, open.len() as u64 - 1) as usize);
                        let result = if chance.per_mille(900) { Ok(()) } else { Err(Failure::Silent) };
                        assert!(placing.note_ended(token, result), "seed {seed}");
                    }
                    8 if chance.per_mille(20) => {
                        placing.replace();
                        open.clear();
                    }
                    _ => {
                        now += Duration::from_millis(chance.within(0, 300));
                        placing.expire(now);
                    }
                }
                answered.extend(ended(&mut placing));
            }
            placing.replace();
            answered.extend(ended(&mut placing));
            let mut pages: Vec<u64> = answered.iter().map(|(page, _)| *page).collect();
            pages.sort_unstable();
            assert!(pages.into_iter().eq(0..asked), "seed {seed}: each page ends once");
            let was_begun = |page: u64| landed.iter().any(|(_, begun)| *begun == page);
            assert!(answered.iter().all(|(page, is_there)| !is_there || was_begun(*page)), "seed {seed}");
            assert!(placing.is_still() && placing.has_room(), "seed {seed}");
        }
    }
}
