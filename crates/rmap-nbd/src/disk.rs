//! Requests become pieces of one page each, pieces become reads and writes of pages.
//!
//! Owns which pages are being written. A page is *held* from the beginning of a write to it, or of the read that a write of
//! a part of it needs first, until the write is answered. No other write to a held page begins, so neighbours in a page
//! never undo each other, and what was acknowledged is never overwritten by what was read before. Reads hold nothing: they
//! may see a page before or after a write that is under way, as the protocol allows, never a mixture of both.
//!
//! Sans-I/O, like everything around it: [`Pages`] is the client of the pool, or a model of it in tests.

use std::collections::{HashSet, VecDeque};

use crate::wire::Errno;
use rmap::client::{Event, Failure, OPS_MAX, PageRun, QUEUED_READS_MAX, Refused, Token};
use rmap::units::{PAGE_SIZE, Page, PageNo};

/// Pieces under way that write: as many as a client has operations. Each has room for a page.
const WRITES_MAX: usize = OPS_MAX;
/// Those that read: as many as the client may take, its operations and what waits there for silent servers.
const READS_MAX: usize = OPS_MAX + QUEUED_READS_MAX;
/// Neither WRITE, nor what else writes, nor reads that ask somebody have more of the client's operations than this, or others would
/// wait for them.
const ONE_KIND_MAX: usize = OPS_MAX - OPS_MAX / 4;
/// Pieces of one READ under way. More of them make it no faster, and of what silent servers have a few long ones would take all.
const PIECES_A_READ: usize = ONE_KIND_MAX;
/// Pieces that a request begins before the next one has its turn.
const PIECES_A_TURN: usize = 16;
/// Steps over holes that a request takes before the next one has its turn: each may be a slab or a page.
const HOLES_A_TURN: usize = 1024;
/// Pages that are looked at in one round for being holes or not, by all requests of all connections together. Even where each of them
/// is a run of its own, which takes some tens of nanoseconds, a round is over before a server that must answer within
/// [`FAIL_AFTER_MIN`](rmap::client::FAIL_AFTER_MIN) is given up.
pub const LOOKS_A_ROUND: u64 = 1 << 16;
/// Requests, and of a READ its bytes, for which room is made at the start. Of swap, one reads 32 KiB: eight pages (page-cluster).
const REQUESTS_READY: usize = 256;
const READ_READY: usize = 32 << 10;
/// A request's buffer is kept for the next one up to this size.
const BUFFER_KEPT_MAX: usize = 256 << 10;

/// The question whether nobody else owns the pages; other tokens are slots of pieces.
const CONFIRM: Token = Token::MAX;

const ZERO_PAGE: Page = [0; PAGE_SIZE];

/// Where pages are. Results come later, by token.
pub trait Pages {
    /// # Errors
    /// Nothing was begun.
    fn read(&mut self, page: PageNo, token: Token) -> Result<(), Refused>;
    /// # Errors
    /// Nothing was begun.
    fn write(&mut self, page: PageNo, content: &Page, token: Token) -> Result<(), Refused>;
    /// Makes a page zero.
    ///
    /// # Errors
    /// Nothing was begun.
    fn trim(&mut self, page: PageNo, token: Token) -> Result<(), Refused>;
    /// Asks whether nobody else owns the pages, at some moment from now on. The result comes as of a write.
    ///
    /// # Errors
    /// Nothing was asked.
    fn confirm(&mut self, token: Token) -> Result<(), Refused>;
    /// Reads that wait for a silent server, and keep no slot from others.
    fn queued(&self) -> usize;
    /// How many pages from `page` on, at most `max`, are alike in being holes or not.
    fn run(&self, page: PageNo, max: u64) -> PageRun;
}

/// What a request asks the disk to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// Whole pages become holes, or pages of zeros; parts of pages become zeros.
    Zero {
        holes: bool,
    },
    /// Whole pages become holes; parts of pages stay.
    Trim,
}

impl Kind {
    /// Whole pages of it need nothing where there is a hole.
    fn makes_holes(self) -> bool {
        matches!(self, Kind::Trim | Kind::Zero { holes: true })
    }
}

/// A request with all that is known of it.
#[derive(Debug)]
pub struct Request {
    /// The connection, as long as it is there.
    owner: Option<usize>,
    pub cookie: u64,
    pub kind: Kind,
    pub error: Option<Errno>,
    /// The content that a READ has found.
    pub data: Vec<u8>,
    begin: u64,
    /// Where the next piece begins.
    next: u64,
    end: u64,
    /// What it waits for: pieces under way, and the word that its holes are holes.
    pieces: usize,
    /// Some of it was a hole, and nothing was done there.
    has_skipped: bool,
}

impl Request {
    /// Where it begins on the disk, in bytes.
    pub fn offset(&self) -> u64 {
        self.begin
    }

    fn is_over(&self) -> bool {
        self.next == self.end && self.pieces == 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Free,
    Read,
    /// The page is read because a part of it is written.
    Fetch,
    /// Old and new are put together and wait for room to be written.
    Merged,
    Write,
}

#[derive(Debug)]
struct Piece {
    step: Step,
    request: usize,
    page: PageNo,
    /// The part of the page that is meant.
    start: usize,
    end: usize,
    /// Whether it belongs to a WRITE.
    of_write: bool,
}

/// The requests to one disk.
#[derive(Debug)]
pub struct Disk {
    size: u64,
    requests: Vec<Request>,
    free_requests: Vec<usize>,
    /// First those that write, then those that read.
    pieces: Vec<Piece>,
    free_writes: Vec<usize>,
    free_reads: Vec<usize>,
    /// Of those that write, what is written of a part of a page: the new content, and after the read all of it.
    contents: Vec<Box<Page>>,
    /// Those that belong to a WRITE, and those that read what they write a part of.
    of_writes: usize,
    fetching: usize,
    held: HashSet<u64>,
    /// Requests but WRITE that have pieces to begin.
    running: VecDeque<usize>,
    merged: VecDeque<usize>,
    done: VecDeque<usize>,
    /// Requests that are done if what they took for holes are holes; and how many of them, from the first on, the question under way
    /// is for.
    unsure: VecDeque<usize>,
    confirming: usize,
    /// Pages that may still be looked at in this round.
    looks_left: u64,
    /// Something waits for the next round, and for nothing else.
    has_more: bool,
}

/// Why a piece did not begin.
enum Later {
    /// The page is held, or there is no room.
    Wait,
    Failed(Errno),
}

impl Disk {
    /// `size` in bytes, a multiple of the page's.
    pub fn new(size: u64) -> Disk {
        let piece = |_| Piece { step: Step::Free, request: 0, page: PageNo(0), start: 0, end: 0, of_write: false };
        let request = |_| Request {
            owner: None,
            cookie: 0,
            kind: Kind::Read,
            error: None,
            data: Vec::with_capacity(READ_READY),
            begin: 0,
            next: 0,
            end: 0,
            pieces: 0,
            has_skipped: false,
        };
        Disk {
            size,
            requests: (0..REQUESTS_READY).map(request).collect(),
            free_requests: (0..REQUESTS_READY).rev().collect(),
            pieces: (0..WRITES_MAX + READS_MAX).map(piece).collect(),
            free_writes: (0..WRITES_MAX).rev().collect(),
            free_reads: (WRITES_MAX..WRITES_MAX + READS_MAX).rev().collect(),
            contents: vec![Box::new(ZERO_PAGE); WRITES_MAX],
            of_writes: 0,
            fetching: 0,
            held: HashSet::with_capacity(2 * WRITES_MAX),
            running: VecDeque::with_capacity(REQUESTS_READY),
            merged: VecDeque::with_capacity(WRITES_MAX),
            done: VecDeque::with_capacity(REQUESTS_READY),
            unsure: VecDeque::with_capacity(REQUESTS_READY),
            confirming: 0,
            looks_left: LOOKS_A_ROUND,
            has_more: false,
        }
    }

    /// A round begins: what the last one left for it can go on.
    pub fn begin_round(&mut self) {
        (self.looks_left, self.has_more) = (LOOKS_A_ROUND, false);
    }

    /// Whether something could go on in another round without anything having to come first.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether pages may be looked at in this round. If not, there is more to do in the next one.
    pub fn may_look(&mut self) -> bool {
        self.has_more |= self.looks_left == 0;
        self.looks_left > 0
    }

    /// [`Pages::run`], which counts as a part of this round.
    pub fn look(&mut self, page: PageNo, max: u64, pages: &impl Pages) -> PageRun {
        let run = pages.run(page, max);
        self.looks_left = self.looks_left.saturating_sub(run.pages);
        run
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Begins a request of `length` bytes, at least one, that lie in the disk. The content of a WRITE comes by
    /// [`Disk::put`].
    pub fn begin(&mut self, owner: usize, cookie: u64, kind: Kind, offset: u64, length: u32) -> usize {
        debug_assert!(length > 0 && offset + u64::from(length) <= self.size);
        let id = self.free_requests.pop().unwrap_or(self.requests.len());
        let mut data = self.requests.get_mut(id).map(|request| std::mem::take(&mut request.data)).unwrap_or_default();
        data.clear();
        if kind == Kind::Read {
            data.resize(length as usize, 0);
        }
        let end = offset + u64::from(length);
        let request = Request {
            owner: Some(owner),
            cookie,
            kind,
            error: None,
            data,
            begin: offset,
            next: offset,
            end,
            pieces: 0,
            has_skipped: false,
        };
        if id == self.requests.len() {
            self.requests.push(request);
        } else {
            self.requests[id] = request;
        }
        if kind != Kind::Write {
            self.running.push_back(id);
        }
        id
    }

    /// Takes content of a WRITE, as many whole pieces as there are in `bytes` and as can begin now. Gives the bytes used.
    pub fn put(&mut self, id: usize, bytes: &[u8], pages: &mut impl Pages) -> usize {
        let mut used = 0;
        loop {
            let Request { next, end, .. } = self.requests[id];
            let (page, start, stop) = piece_at(next, end);
            let Some(content) = bytes.get(used..used + stop - start) else { return used };
            if content.is_empty() {
                return used;
            }
            match self.begin_write(id, page, start, content, pages) {
                Ok(()) => {}
                Err(Later::Wait) => return used,
                Err(Later::Failed(error)) => self.requests[id].error = Some(error),
            }
            used += stop - start;
            self.requests[id].next += (stop - start) as u64;
            self.finish_if_over(id);
        }
    }

    /// Whether a WRITE has all of its content.
    pub fn has_all(&self, id: usize) -> bool {
        self.requests[id].next == self.requests[id].end
    }

    /// Begins what can begin now.
    pub fn run(&mut self, pages: &mut impl Pages) {
        for _ in 0..self.merged.len() {
            if let Some(piece) = self.merged.pop_front() {
                self.store_merged(piece, pages);
            }
        }
        for _ in 0..self.running.len() {
            let Some(id) = self.running.pop_front() else { break };
            self.run_request(id, pages);
            if self.requests[id].next < self.requests[id].end {
                self.running.push_back(id);
            } else {
                self.finish_if_over(id);
            }
        }
        self.confirm(pages);
    }

    /// Asks for all requests together that wait for that whether this is still the owner who knows what the holes are.
    fn confirm(&mut self, pages: &mut impl Pages) {
        if self.confirming > 0 || self.unsure.is_empty() {
            return;
        }
        match pages.confirm(CONFIRM).map_err(later) {
            Ok(()) => self.confirming = self.unsure.len(),
            Err(Later::Wait) => {}
            Err(Later::Failed(error)) => self.end_unsure(self.unsure.len(), Some(error)),
        }
    }

    fn end_unsure(&mut self, count: usize, error: Option<Errno>) {
        for _ in 0..count {
            let Some(id) = self.unsure.pop_front() else { return };
            let request = &mut self.requests[id];
            request.pieces -= 1;
            request.error = request.error.or(error);
            self.finish_if_over(id);
        }
    }

    fn run_request(&mut self, id: usize, pages: &mut impl Pages) {
        let (mut begun, mut holes) = (0, 0);
        while begun < PIECES_A_TURN {
            let Request { next, end, kind, .. } = self.requests[id];
            if next == end {
                return;
            }
            // Others have their turn first. Of pieces that were begun results will come; of holes nothing does.
            if holes == HOLES_A_TURN {
                self.has_more = true;
                return;
            }
            if kind.makes_holes() && !self.may_look() {
                return;
            }
            let (page, start, stop) = piece_at(next, end);
            let whole = stop - start == PAGE_SIZE;
            // A part of a page that is trimmed stays as it is.
            if kind == Kind::Trim && !whole {
                holes += 1;
                self.requests[id].next += (stop - start) as u64;
                continue;
            }
            if let Some(length) = self.hole_at(kind, page, (next, end), pages) {
                holes += 1;
                self.requests[id].next += length;
                self.requests[id].has_skipped = true;
                continue;
            }
            let result = match kind {
                Kind::Read => self.begin_read(id, page, (start, stop), pages),
                Kind::Zero { holes: true } | Kind::Trim if whole => self.begin_trim(id, page, pages),
                Kind::Zero { .. } | Kind::Trim | Kind::Write => {
                    self.begin_write(id, page, start, &ZERO_PAGE[..stop - start], pages)
                }
            };
            match result {
                Ok(()) => begun += 1,
                Err(Later::Wait) => return,
                Err(Later::Failed(error)) => self.requests[id].error = Some(error),
            }
            self.requests[id].next += (stop - start) as u64;
        }
    }

    /// The bytes from `next` on for which nothing is to be done, as there is a hole.
    ///
    /// A hole that is not held is zero at every copy: its last write was a trim that all have, or there was none. Where a write has
    /// failed that may be done yet, [`Pages::run`] says that there is no hole. All of that is what this owner knows, and no server was
    /// asked that would refuse one of the past: the request is answered when [`Pages::confirm`] says that it still was the owner.
    fn hole_at(&mut self, kind: Kind, page: PageNo, (next, end): (u64, u64), pages: &impl Pages) -> Option<u64> {
        if !kind.makes_holes() || self.held.contains(&page.0) {
            return None;
        }
        let most = if self.held.is_empty() { (end - next).div_ceil(PAGE_SIZE as u64) } else { 1 };
        let run = self.look(page, most, pages);
        let until = (page.0 + run.pages) * PAGE_SIZE as u64;
        run.hole.then(|| until.min(end) - next)
    }

    fn begin_read(
        &mut self,
        id: usize,
        page: PageNo,
        (start, end): (usize, usize),
        pages: &mut impl Pages,
    ) -> Result<(), Later> {
        let piece = self.free_read(id, pages)?;
        pages.read(page, piece as Token).map_err(later)?;
        self.take_piece(piece, Step::Read, id, page, (start, end), false);
        Ok(())
    }

    fn begin_trim(&mut self, id: usize, page: PageNo, pages: &mut impl Pages) -> Result<(), Later> {
        let piece = self.free_write(false)?;
        if self.held.contains(&page.0) {
            return Err(Later::Wait);
        }
        pages.trim(page, piece as Token).map_err(later)?;
        self.held.insert(page.0);
        self.take_piece(piece, Step::Write, id, page, (0, PAGE_SIZE), false);
        Ok(())
    }

    /// Writes `content` at `start` of a page; a part of a page is read first.
    fn begin_write(
        &mut self,
        id: usize,
        page: PageNo,
        start: usize,
        content: &[u8],
        pages: &mut impl Pages,
    ) -> Result<(), Later> {
        let of_write = self.requests[id].kind == Kind::Write;
        let piece = self.free_write(of_write)?;
        if self.held.contains(&page.0) {
            return Err(Later::Wait);
        }
        let end = start + content.len();
        let step = if let Ok(whole) = <&Page>::try_from(content) {
            pages.write(page, whole, piece as Token).map_err(later)?;
            Step::Write
        } else {
            pages.read(page, piece as Token).map_err(later)?;
            self.contents[piece][start..end].copy_from_slice(content);
            Step::Fetch
        };
        self.held.insert(page.0);
        self.take_piece(piece, step, id, page, (start, end), of_write);
        Ok(())
    }

    fn free_write(&self, of_write: bool) -> Result<usize, Later> {
        let others = WRITES_MAX - self.free_writes.len() - self.of_writes;
        let own = if of_write { self.of_writes } else { others };
        let piece = self.free_writes.last().filter(|_| own < ONE_KIND_MAX);
        piece.copied().ok_or(Later::Wait)
    }

    fn free_read(&self, id: usize, pages: &impl Pages) -> Result<usize, Later> {
        // Of those that wait for silent servers, as many as can be may be reads for writes.
        let queued = pages.queued().saturating_sub(self.fetching);
        let asking = (READS_MAX - self.free_reads.len()).saturating_sub(queued);
        let may_begin = asking < ONE_KIND_MAX && self.requests[id].pieces < PIECES_A_READ;
        self.free_reads.last().filter(|_| may_begin).copied().ok_or(Later::Wait)
    }

    /// The piece that [`Disk::free_write`] or [`Disk::free_read`] gave.
    fn take_piece(
        &mut self,
        piece: usize,
        step: Step,
        request: usize,
        page: PageNo,
        (start, end): (usize, usize),
        of_write: bool,
    ) {
        let free = if step == Step::Read { &mut self.free_reads } else { &mut self.free_writes };
        free.pop();
        self.of_writes += usize::from(of_write);
        self.fetching += usize::from(step == Step::Fetch);
        self.requests[request].pieces += 1;
        let taken = &mut self.pieces[piece];
        (taken.step, taken.request, taken.page) = (step, request, page);
        (taken.start, taken.end, taken.of_write) = (start, end, of_write);
    }

    /// A result, and for a read the page. [`Disk::run`] follows.
    pub fn on_event(&mut self, event: Event, page: &Page, pages: &mut impl Pages) {
        let (Event::Read { token, result } | Event::Written { token, result }) = event;
        if token == CONFIRM {
            // Those that came since then wait for the next answer.
            let count = std::mem::take(&mut self.confirming);
            return self.end_unsure(count, result.err().map(errno));
        }
        let id = token as usize;
        let Some(piece) = self.pieces.get_mut(id) else { return };
        if let Err(failure) = result {
            return self.end_piece(id, Some(errno(failure)));
        }
        match piece.step {
            Step::Read => {
                let request = &mut self.requests[piece.request];
                let at = (piece.page.0 * PAGE_SIZE as u64 + piece.start as u64 - request.begin) as usize;
                // Of one that is abandoned, no room is left.
                if let Some(room) = request.data.get_mut(at..at + piece.end - piece.start) {
                    room.copy_from_slice(&page[piece.start..piece.end]);
                }
                self.end_piece(id, None);
            }
            Step::Fetch => {
                let content = &mut self.contents[id];
                content[..piece.start].copy_from_slice(&page[..piece.start]);
                content[piece.end..].copy_from_slice(&page[piece.end..]);
                self.fetching -= 1;
                self.store_merged(id, pages);
            }
            Step::Write => self.end_piece(id, None),
            Step::Free | Step::Merged => debug_assert!(false, "a result for nothing"),
        }
    }

    fn store_merged(&mut self, id: usize, pages: &mut impl Pages) {
        let piece = &mut self.pieces[id];
        piece.step = Step::Merged;
        match pages.write(piece.page, &self.contents[id], id as Token).map_err(later) {
            Ok(()) => piece.step = Step::Write,
            Err(Later::Wait) => self.merged.push_back(id),
            Err(Later::Failed(error)) => self.end_piece(id, Some(error)),
        }
    }

    fn end_piece(&mut self, id: usize, error: Option<Errno>) {
        let Piece { step, request, page, of_write, .. } = self.pieces[id];
        if step == Step::Read {
            self.free_reads.push(id);
        } else {
            self.held.remove(&page.0);
            self.free_writes.push(id);
        }
        self.pieces[id].step = Step::Free;
        self.of_writes -= usize::from(of_write);
        self.fetching -= usize::from(step == Step::Fetch);
        self.requests[request].pieces -= 1;
        self.requests[request].error = self.requests[request].error.or(error);
        self.finish_if_over(request);
    }

    fn finish_if_over(&mut self, id: usize) {
        let request = &mut self.requests[id];
        if !request.is_over() {
            return;
        }
        let has_skipped = std::mem::take(&mut request.has_skipped);
        if has_skipped && request.error.is_none() && request.owner.is_some() {
            request.pieces += 1;
            return self.unsure.push_back(id);
        }
        if request.owner.is_some() {
            self.done.push_back(id);
        } else {
            self.free(id);
        }
    }

    /// The next request that is over, with its connection. It is to be given to [`Disk::free`].
    pub fn poll_done(&mut self) -> Option<(usize, usize)> {
        while let Some(id) = self.done.pop_front() {
            match self.requests[id].owner {
                Some(owner) => return Some((owner, id)),
                None => self.free(id),
            }
        }
        None
    }

    pub fn request(&self, id: usize) -> &Request {
        &self.requests[id]
    }

    pub fn free(&mut self, id: usize) {
        let request = &mut self.requests[id];
        request.owner = None;
        request.data.clear();
        request.data.shrink_to(BUFFER_KEPT_MAX);
        self.free_requests.push(id);
    }

    /// A connection is gone. What is under way ends by itself; nothing more of it begins.
    pub fn abandon(&mut self, owner: usize) {
        for id in 0..self.requests.len() {
            let request = &mut self.requests[id];
            if request.owner != Some(owner) {
                continue;
            }
            request.owner = None;
            request.next = request.end;
            // What is under way may be so for long, and there may be many of these.
            request.data.clear();
            request.data.shrink_to(BUFFER_KEPT_MAX);
            self.running.retain(|running| *running != id);
            if self.requests[id].pieces == 0 && !self.done.contains(&id) {
                self.free(id);
            }
        }
    }

    /// Pages that are being read, written or trimmed.
    pub fn pages_under_way(&self) -> usize {
        self.pieces.len() - self.free_writes.len() - self.free_reads.len()
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.pages_under_way() == 0 && self.running.is_empty() && self.unsure.is_empty() && self.done.is_empty()
    }
}

/// The page at `next`, and the part of it that lies before `end`.
fn piece_at(next: u64, end: u64) -> (PageNo, usize, usize) {
    let start = (next % PAGE_SIZE as u64) as usize;
    let length = (end - next).min((PAGE_SIZE - start) as u64) as usize;
    (PageNo(next / PAGE_SIZE as u64), start, start + length)
}

fn later(refused: Refused) -> Later {
    match refused {
        Refused::Busy => Later::Wait,
        Refused::ReadOnly => Later::Failed(Errno::NotPermitted),
        Refused::BeyondEnd | Refused::VersionsUsedUp => Later::Failed(Errno::Io),
    }
}

fn errno(failure: Failure) -> Errno {
    match failure {
        Failure::Lost | Failure::Corrupt | Failure::Silent => Errno::Io,
        Failure::Declined => Errno::NoSpace,
        Failure::Fenced => Errno::Shutdown,
    }
}

#[cfg(test)]
mod tests;
