//! One client of the disk: bytes in, bytes out. Does no I/O, so that any bytes can be tried on it.
//!
//! Content of a WRITE goes to the disk as it comes, and is not collected: a connection's memory is its two buffers and what
//! it has asked to read. Whatever a client sends beyond that waits in its own socket.

use crate::disk::{Disk, Kind, Pages};
use crate::negotiation::{Agreed, Negotiation, Offer, Progress, greet};
use crate::wire::{
    BASE_ALLOCATION_ID, Errno, REQUEST_MAX, REQUEST_SIZE, RequestHeader, STATE_DATA, STATE_HOLE_ZERO, chunk,
    chunk_error, chunk_header, command, command_flag, simple_reply,
};
use rmap::units::{PAGE_SIZE, PageNo};

/// Bytes taken from a socket ahead of being handled: a window of requests, or a piece of a long WRITE.
pub const INPUT_MAX: usize = 256 << 10;
/// Bytes of answers that a client may wait for: one READ of the greatest size, or many shorter ones.
pub const PROMISED_MAX: usize = REQUEST_MAX as usize + (64 << 10);
/// Requests of one connection under way. Those beyond wait in its socket.
pub const REQUESTS_MAX: usize = 256;
/// Extents in one answer to BLOCK_STATUS.
pub const EXTENTS_MAX: usize = 2048;
/// Pages that one BLOCK_STATUS looks at (1 GiB of them): it may say less than it was asked, and is asked again.
pub const STATUS_PAGES_MAX: u64 = 1 << 18;
/// Of the buffer of answers, at the start and when all were sent.
const OUTPUT_KEPT_MAX: usize = 1 << 20;
const CHUNK_OFFSET_SIZE: u32 = 8;

/// A buffer that is filled behind and emptied in front, and never grows.
#[derive(Debug)]
struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    fn new() -> Input {
        Input { bytes: vec![0; INPUT_MAX].into(), start: 0, end: 0 }
    }

    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn is_full(&self) -> bool {
        self.end - self.start == INPUT_MAX
    }

    fn room(&mut self) -> &mut [u8] {
        // Moved only when little room is left behind, so that each byte moves seldom.
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if INPUT_MAX - self.end < INPUT_MAX / 4 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
    }
}

#[derive(Debug)]
enum Phase {
    Negotiating(Negotiation),
    /// No request is being taken in: the header of the next one is awaited.
    Ready(Agreed),
    /// The content of a WRITE comes; it belongs to a request of the disk.
    Content(Agreed, usize),
    /// The content of a WRITE that is refused is skipped.
    Skipping {
        agreed: Agreed,
        left: u32,
    },
    /// No request is taken any more. Those that have begun are done and answered first.
    Leaving(Agreed),
    /// The client has broken the rules, or has never agreed on anything. What it asked for is of no use any more.
    Over,
}

/// The protocol's state with one client, from its greeting on.
#[derive(Debug)]
pub struct Connection {
    phase: Phase,
    /// The request that is being taken in is the last one.
    leaves: bool,
    input: Input,
    output: Vec<u8>,
    sent: usize,
    requests: usize,
    /// Bytes of READs under way.
    promised: usize,
}

impl Default for Connection {
    fn default() -> Connection {
        let mut output = Vec::with_capacity(OUTPUT_KEPT_MAX);
        greet(&mut output);
        let phase = Phase::Negotiating(Negotiation::default());
        Connection { phase, leaves: false, input: Input::new(), output, sent: 0, requests: 0, promised: 0 }
    }
}

impl Connection {
    /// Whether the client may send more now.
    pub fn wants_input(&self) -> bool {
        !self.has_ended() && !self.input.is_full()
    }

    /// Room for what the client sends; [`Connection::filled`] says how much came.
    pub fn room(&mut self) -> &mut [u8] {
        self.input.room()
    }

    pub fn filled(&mut self, count: usize) {
        self.input.end += count;
    }

    /// What is to be sent; [`Connection::sent`] says how much was.
    pub fn output(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    pub fn sent(&mut self, count: usize) {
        self.sent += count;
        // Each byte moves seldom, and the buffer of a client that always has something to take does not grow.
        if self.sent > self.output.len() / 2 {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
        if self.output.is_empty() {
            self.output.shrink_to(OUTPUT_KEPT_MAX);
        }
    }

    /// Whether something of what has come was not handled yet.
    pub fn has_input(&self) -> bool {
        !self.has_ended() && !self.input.filled().is_empty()
    }

    /// Whether nothing more is taken from the client.
    fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Leaving(_) | Phase::Over)
    }

    /// No further request begins. Of a WRITE that has begun the content may still come.
    pub fn leave(&mut self) {
        if self.is_negotiating() {
            self.phase = Phase::Over;
        }
        self.leaves = true;
    }

    /// Whether no request is taken any more, and some that have begun are still to be done.
    pub fn is_leaving(&self) -> bool {
        matches!(self.phase, Phase::Leaving(_)) && self.requests > 0
    }

    /// Whether it still has to agree on an export.
    pub fn is_negotiating(&self) -> bool {
        matches!(self.phase, Phase::Negotiating(_))
    }

    /// Whether it is over: everything that had to be done is done, and everything was sent.
    pub fn is_over(&self) -> bool {
        self.has_ended() && !self.is_leaving() && self.output().is_empty()
    }

    /// Handles what has come, as far as there is room, and as one round of the disk has time for it. `owner` is how the disk calls this connection.
    pub fn advance(&mut self, owner: usize, offer: &Offer, disk: &mut Disk, pages: &mut impl Pages) {
        while self.step(owner, offer, disk, pages) {}
    }

    /// `true` if there may be more to do.
    fn step(&mut self, owner: usize, offer: &Offer, disk: &mut Disk, pages: &mut impl Pages) -> bool {
        match &mut self.phase {
            Phase::Leaving(_) | Phase::Over => false,
            Phase::Ready(agreed) | Phase::Skipping { agreed, .. } if self.leaves => {
                self.phase = Phase::Leaving(*agreed);
                false
            }
            Phase::Negotiating(_) if self.output.len() - self.sent > INPUT_MAX => false,
            Phase::Negotiating(negotiation) => {
                match negotiation.advance(offer, self.input.filled(), &mut self.output) {
                    Progress::Starved => return false,
                    Progress::Used(used) => self.input.consume(used),
                    Progress::Agreed(used, agreed) => {
                        self.input.consume(used);
                        self.phase = Phase::Ready(agreed);
                    }
                    Progress::Over => self.phase = Phase::Over,
                }
                true
            }
            Phase::Content(agreed, request) => {
                let used = disk.put(*request, self.input.filled(), pages);
                self.input.consume(used);
                if disk.has_all(*request) {
                    self.phase = Phase::Ready(*agreed);
                    return true;
                }
                false
            }
            Phase::Skipping { agreed, left } => {
                let skipped = self.input.filled().len().min(*left as usize);
                *left -= skipped as u32;
                self.input.consume(skipped);
                if *left == 0 {
                    self.phase = Phase::Ready(*agreed);
                    return true;
                }
                false
            }
            Phase::Ready(agreed) => {
                let agreed = *agreed;
                let Some(bytes) = self.input.filled().first_chunk::<REQUEST_SIZE>() else { return false };
                let Some(header) = RequestHeader::decode(bytes) else {
                    self.phase = Phase::Over;
                    return true;
                };
                if !self.has_room_for(&header) || (header.command == command::BLOCK_STATUS && !disk.may_look()) {
                    return false;
                }
                self.input.consume(REQUEST_SIZE);
                self.request(owner, (agreed, offer.read_only), &header, disk, pages);
                true
            }
        }
    }

    /// Whether a request may begin, by what is under way and what has to be sent.
    fn has_room_for(&self, header: &RequestHeader) -> bool {
        let pending = self.output.len() - self.sent + self.promised;
        let more = if header.command == command::READ { header.length.min(REQUEST_MAX) as usize } else { 0 };
        self.requests < REQUESTS_MAX && (pending == 0 || pending + more <= PROMISED_MAX)
    }

    fn request(
        &mut self,
        owner: usize,
        (agreed, read_only): (Agreed, bool),
        header: &RequestHeader,
        disk: &mut Disk,
        pages: &mut impl Pages,
    ) {
        let RequestHeader { command, cookie, offset, length, .. } = *header;
        if command == command::DISCONNECT {
            // The protocol has everything that was asked before it handled first.
            self.phase = Phase::Leaving(agreed);
            return;
        }
        // A WRITE of any length may follow, and only a sane one is worth being skipped.
        if command == command::WRITE && length > REQUEST_MAX {
            self.phase = Phase::Over;
            return;
        }
        if let Err(error) = check(header, agreed, disk.size()).and_then(|()| check_write(command, read_only)) {
            self.refuse(agreed, header, error);
            if command == command::WRITE {
                self.phase = Phase::Skipping { agreed, left: length };
            }
            return;
        }
        let kind = match command {
            command::READ => Kind::Read,
            command::WRITE => Kind::Write,
            command::TRIM => Kind::Trim,
            command::WRITE_ZEROES => Kind::Zero { holes: header.flags & command_flag::NO_HOLE == 0 },
            command::BLOCK_STATUS => return self.block_status(header, disk, pages),
            // Every write that was answered is at all copies in sync.
            _ => return simple_reply(&mut self.output, cookie, None),
        };
        let request = disk.begin(owner, cookie, kind, offset, length);
        self.requests += 1;
        self.promised += if kind == Kind::Read { length as usize } else { 0 };
        if kind == Kind::Write {
            self.phase = Phase::Content(agreed, request);
        }
    }

    /// Once a READ is answered with structure, it always is.
    fn refuse(&mut self, agreed: Agreed, header: &RequestHeader, error: Errno) {
        let structured = matches!(header.command, command::READ | command::BLOCK_STATUS) && agreed.structured;
        if structured {
            chunk_error(&mut self.output, header.cookie, error);
        } else {
            simple_reply(&mut self.output, header.cookie, Some(error));
        }
    }

    fn block_status(&mut self, header: &RequestHeader, disk: &mut Disk, pages: &impl Pages) {
        let RequestHeader { offset, length, flags, cookie, .. } = *header;
        let end = offset + u64::from(length);
        let most = if flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
        let head = self.output.len();
        chunk_header(&mut self.output, cookie, chunk::BLOCK_STATUS, 0);
        self.output.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        let extents = self.output.len();
        let (mut at, mut last, mut count) = (offset, None, 0);
        let looked_at = |at: u64| (at - offset) / PAGE_SIZE as u64;
        while at < end && looked_at(at) < STATUS_PAGES_MAX {
            let page = PageNo(at / PAGE_SIZE as u64);
            let asked = (end - at).div_ceil(PAGE_SIZE as u64) + 1;
            let run = disk.look(page, asked.min(STATUS_PAGES_MAX - looked_at(at)), pages);
            let until = ((page.0 + run.pages) * PAGE_SIZE as u64).min(end);
            let state = if run.hole { STATE_HOLE_ZERO } else { STATE_DATA };
            let length = (until - at) as u32;
            if last == Some(state) {
                let at = self.output.len() - 8;
                let (_, tail) = self.output.split_at_mut(at);
                let before = u32::from_be_bytes([tail[0], tail[1], tail[2], tail[3]]);
                tail[..4].copy_from_slice(&(before + length).to_be_bytes());
            } else if count == most {
                break;
            } else {
                self.output.extend_from_slice(&length.to_be_bytes());
                self.output.extend_from_slice(&state.to_be_bytes());
                count += 1;
                last = Some(state);
            }
            at = until;
        }
        let size = (4 + self.output.len() - extents) as u32;
        self.output[head + 16..head + 20].copy_from_slice(&size.to_be_bytes());
    }

    /// The answer to a request of this connection that is over.
    pub fn answer(&mut self, disk: &Disk, request: usize) {
        let request = disk.request(request);
        let structured = match self.phase {
            Phase::Ready(agreed)
            | Phase::Content(agreed, _)
            | Phase::Skipping { agreed, .. }
            | Phase::Leaving(agreed) => agreed.structured,
            Phase::Negotiating(_) | Phase::Over => return,
        };
        let out = &mut self.output;
        match (request.kind, request.error) {
            (Kind::Read, Some(error)) if structured => chunk_error(out, request.cookie, error),
            (Kind::Read, None) if structured => {
                let length = request.data.len() as u32;
                chunk_header(out, request.cookie, chunk::OFFSET_DATA, CHUNK_OFFSET_SIZE + length);
                out.extend_from_slice(&request.offset().to_be_bytes());
                out.extend_from_slice(&request.data);
            }
            (kind, error) => {
                simple_reply(out, request.cookie, error);
                if kind == Kind::Read && error.is_none() {
                    out.extend_from_slice(&request.data);
                }
            }
        }
        self.requests -= 1;
        self.promised -= request.data.len();
    }
}

/// What a request may ask.
fn check(header: &RequestHeader, agreed: Agreed, size: u64) -> Result<(), Errno> {
    let RequestHeader { flags, command, offset, length, .. } = *header;
    let allowed = match command {
        command::READ => command_flag::DF | command_flag::FUA,
        command::WRITE | command::TRIM => command_flag::FUA,
        command::FLUSH => command_flag::FUA,
        command::WRITE_ZEROES => command_flag::FUA | command_flag::NO_HOLE | command_flag::FAST_ZERO,
        command::BLOCK_STATUS if agreed.base_allocation => command_flag::REQ_ONE | command_flag::FUA,
        _ => return Err(Errno::Invalid),
    };
    if flags & !allowed != 0 || (flags & command_flag::DF != 0 && !agreed.structured) {
        return Err(Errno::Invalid);
    }
    // Zeros that are no hole are as slow as any content.
    let slow = command_flag::NO_HOLE | command_flag::FAST_ZERO;
    if flags & slow == slow {
        return Err(Errno::NotSupported);
    }
    if command == command::FLUSH {
        return Ok(());
    }
    let inside = offset.checked_add(u64::from(length)).is_some_and(|end| end <= size);
    match command {
        _ if length == 0 => Err(Errno::Invalid),
        command::WRITE | command::WRITE_ZEROES if !inside => Err(Errno::NoSpace),
        command::READ if length > REQUEST_MAX => Err(Errno::Invalid),
        _ if !inside => Err(Errno::Invalid),
        _ => Ok(()),
    }
}

/// Clients are told that the disk is read-only; not all listen.
fn check_write(command: u16, read_only: bool) -> Result<(), Errno> {
    let writes = matches!(command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if writes && read_only { Err(Errno::NotPermitted) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
