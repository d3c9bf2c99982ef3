use std::cell::Cell;

use proptest::prelude::*;

use super::*;
use crate::disk::LOOKS_A_ROUND;
use crate::wire::{OPTION_MAGIC, Reader, SIMPLE_REPLY_MAGIC, option};
use rmap::client::{Event, PageRun, Refused, Token};
use rmap::units::Page;

const PAGES: usize = 16;
const SIZE: u64 = (PAGES * PAGE_SIZE) as u64;

/// Pages that answer at once.
struct Memory {
    pages: Vec<Option<Box<Page>>>,
    events: Vec<(Event, Page)>,
}

impl Memory {
    fn new() -> Memory {
        Memory { pages: vec![None; PAGES], events: Vec::new() }
    }
}

impl Pages for Memory {
    fn read(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        let content = self.pages[page.0 as usize].as_deref().copied().unwrap_or([0; PAGE_SIZE]);
        self.events.push((Event::Read { token, result: Ok(()) }, content));
        Ok(())
    }

    fn write(&mut self, page: PageNo, content: &Page, token: Token) -> Result<(), Refused> {
        self.pages[page.0 as usize] = Some(Box::new(*content));
        self.events.push((Event::Written { token, result: Ok(()) }, [0; PAGE_SIZE]));
        Ok(())
    }

    fn trim(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.pages[page.0 as usize] = None;
        self.events.push((Event::Written { token, result: Ok(()) }, [0; PAGE_SIZE]));
        Ok(())
    }

    fn confirm(&mut self, token: Token) -> Result<(), Refused> {
        self.events.push((Event::Written { token, result: Ok(()) }, [0; PAGE_SIZE]));
        Ok(())
    }

    fn queued(&self) -> usize {
        0
    }

    fn run(&self, page: PageNo, max: u64) -> PageRun {
        let hole = self.pages[page.0 as usize].is_none();
        let alike = self.pages[page.0 as usize..].iter().take(max as usize).take_while(|p| p.is_none() == hole);
        PageRun { pages: alike.count() as u64, hole }
    }
}

struct Test {
    connection: Connection,
    disk: Disk,
    memory: Memory,
    offer: Offer,
}

impl Test {
    fn new() -> Test {
        let offer = Offer { name: "disk".to_owned(), size: SIZE, read_only: false };
        let mut test = Test { connection: Connection::default(), disk: Disk::new(SIZE), memory: Memory::new(), offer };
        assert_eq!(test.answers().len(), 18, "the greeting");
        test
    }

    /// After a negotiation with structured replies and `base:allocation`.
    fn agreed() -> Test {
        let mut test = Test::new();
        let opt = |number: u32, content: &[u8]| {
            let length = (content.len() as u32).to_be_bytes();
            [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length, content].concat()
        };
        let contexts = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";
        test.send(&3_u32.to_be_bytes());
        test.send(&opt(option::STRUCTURED_REPLY, b""));
        test.send(&opt(option::SET_META_CONTEXT, contexts));
        test.send(&opt(option::GO, &[0; 6]));
        assert!(!test.connection.is_negotiating());
        test.answers();
        test
    }

    /// Sends bytes and lets everything happen that follows.
    fn send(&mut self, mut bytes: &[u8]) {
        loop {
            let room = self.connection.room();
            let count = room.len().min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            self.connection.filled(count);
            bytes = &bytes[count..];
            loop {
                self.disk.begin_round();
                self.connection.advance(0, &self.offer, &mut self.disk, &mut self.memory);
                self.disk.run(&mut self.memory);
                while let Some((_, request)) = self.disk.poll_done() {
                    self.connection.answer(&self.disk, request);
                    self.disk.free(request);
                }
                let events = std::mem::take(&mut self.memory.events);
                if events.is_empty() && !self.disk.has_more() {
                    break;
                }
                for (event, page) in events {
                    self.disk.on_event(event, &page, &mut self.memory);
                }
            }
            if bytes.is_empty() || !self.connection.wants_input() {
                return;
            }
        }
    }

    fn answers(&mut self) -> Vec<u8> {
        let answers = self.connection.output().to_vec();
        self.connection.sent(answers.len());
        answers
    }

    fn request(&mut self, command: u16, flags: u16, offset: u64, length: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        RequestHeader { flags, command, cookie: 9, offset, length }.encode(&mut bytes);
        bytes.extend_from_slice(content);
        self.send(&bytes);
        self.answers()
    }
}

/// The error of a simple or structured answer.
fn error_of(answer: &[u8]) -> u32 {
    let mut reader = Reader(answer);
    if reader.u32() == Some(SIMPLE_REPLY_MAGIC) {
        return reader.u32().unwrap();
    }
    reader.u16().unwrap();
    let kind = reader.u16().unwrap();
    if kind == chunk::ERROR { Reader(&answer[20..]).u32().unwrap() } else { 0 }
}

#[test]
fn written_and_read_and_described() {
    let mut test = Test::agreed();
    let page = PAGE_SIZE as u32;
    assert_eq!(error_of(&test.request(command::WRITE, 0, 4090, 12, &[7; 12])), 0);
    let answer = test.request(command::READ, command_flag::DF, 4089, 14, b"");
    assert_eq!(answer[20..28], 4089_u64.to_be_bytes());
    assert_eq!(answer[28..], [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
    let extents = |answer: &[u8]| -> Vec<(u32, u32)> {
        let pair = |p: &[u8]| (Reader(p).u32().unwrap(), Reader(&p[4..]).u32().unwrap());
        answer[24..].chunks_exact(8).map(pair).collect()
    };
    let status = test.request(command::BLOCK_STATUS, 0, 100, 4 * page, b"");
    assert_eq!(extents(&status), [(2 * page - 100, STATE_DATA), (2 * page + 100, STATE_HOLE_ZERO)]);
    let one = test.request(command::BLOCK_STATUS, command_flag::REQ_ONE, 100, 4 * page, b"");
    assert_eq!(extents(&one), [(2 * page - 100, STATE_DATA)]);
    // A trim of half a page changes nothing; zeros do.
    assert_eq!(error_of(&test.request(command::TRIM, 0, 4090, 12, b"")), 0);
    assert_eq!(test.request(command::READ, 0, 4090, 1, b"")[28..], [7]);
    assert_eq!(error_of(&test.request(command::WRITE_ZEROES, 0, 4090, 11, b"")), 0);
    assert_eq!(test.request(command::READ, 0, 4100, 2, b"")[28..], [0, 7]);
    assert_eq!(error_of(&test.request(command::WRITE_ZEROES, 0, 0, 2 * page, b"")), 0);
    assert!(test.memory.pages.iter().all(Option::is_none));
    assert_eq!(error_of(&test.request(command::WRITE_ZEROES, command_flag::NO_HOLE, 0, page, b"")), 0);
    assert!(test.memory.pages[0].is_some());
    assert_eq!(error_of(&test.request(command::FLUSH, 0, 0, 0, b"")), 0);
}

#[test]
fn what_may_not_be_asked_is_refused() {
    let mut test = Test::agreed();
    let mut check = |command: u16, flags: u16, offset: u64, length: u32, error: Errno| {
        let content = if command == command::WRITE { vec![1; length as usize] } else { Vec::new() };
        let answer = test.request(command, flags, offset, length, &content);
        assert_eq!(error_of(&answer), error as u32, "command {command} flags {flags} at {offset}, {length} bytes");
    };
    check(command::READ, 0, SIZE, 1, Errno::Invalid);
    check(command::READ, 0, u64::MAX, 2, Errno::Invalid);
    check(command::READ, 0, 0, 0, Errno::Invalid);
    check(command::READ, 0, 0, REQUEST_MAX + 1, Errno::Invalid);
    check(command::READ, command_flag::NO_HOLE, 0, 1, Errno::Invalid);
    check(command::WRITE, 0, SIZE - 1, 2, Errno::NoSpace);
    check(command::WRITE, 0, u64::MAX, 600_000, Errno::NoSpace);
    check(command::WRITE_ZEROES, 0, SIZE, 1, Errno::NoSpace);
    check(command::WRITE_ZEROES, command_flag::FAST_ZERO | command_flag::NO_HOLE, 0, 1, Errno::NotSupported);
    check(command::TRIM, 0, SIZE, 1, Errno::Invalid);
    check(command::BLOCK_STATUS, 0, SIZE, 1, Errno::Invalid);
    check(5, 0, 0, 1, Errno::Invalid);
    check(77, 0, 0, 1, Errno::Invalid);
    assert!(test.memory.pages.iter().all(Option::is_none), "nothing was changed");
    assert_eq!(error_of(&test.request(command::FLUSH, 0, 0, 0, b"")), 0, "the connection lives on");
}

#[test]
fn what_is_read_only_is_not_written() {
    let mut test = Test::agreed();
    let page = PAGE_SIZE as u32;
    assert_eq!(error_of(&test.request(command::WRITE, 0, 0, page, &[7; PAGE_SIZE])), 0);
    test.offer.read_only = true;
    let refused = Errno::NotPermitted as u32;
    assert_eq!(error_of(&test.request(command::WRITE, 0, 0, page, &[8; PAGE_SIZE])), refused);
    assert_eq!(error_of(&test.request(command::TRIM, 0, 0, page, b"")), refused);
    assert_eq!(error_of(&test.request(command::WRITE_ZEROES, 0, 0, page, b"")), refused);
    assert_eq!(test.request(command::READ, 0, 0, 2, b"")[28..], [7, 7]);
    assert_eq!(error_of(&test.request(command::FLUSH, 0, 0, 0, b"")), 0);
}

#[test]
fn what_breaks_the_rules_ends_the_connection() {
    for bytes in [vec![0_u8; REQUEST_SIZE], {
        let mut bytes = Vec::new();
        let header = RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length: REQUEST_MAX + 1 };
        header.encode(&mut bytes);
        bytes
    }] {
        let mut test = Test::agreed();
        test.send(&bytes);
        assert!(test.connection.is_over());
        assert!(!test.connection.wants_input());
    }
}

/// Whoever says goodbye gets what was asked before, and nothing of what comes after.
#[test]
fn what_was_asked_before_a_disconnect_is_done_and_answered() {
    let mut test = Test::agreed();
    let (size, header) =
        (SIZE as u32, |command, length| RequestHeader { flags: 0, command, cookie: 9, offset: 0, length });
    assert_eq!(error_of(&test.request(command::WRITE, 0, 0, size, &[7; SIZE as usize])), 0);
    let mut bytes = Vec::new();
    header(command::WRITE_ZEROES, size).encode(&mut bytes);
    header(command::DISCONNECT, 0).encode(&mut bytes);
    header(command::WRITE, PAGE_SIZE as u32).encode(&mut bytes);
    let room = test.connection.room();
    room[..bytes.len()].copy_from_slice(&bytes);
    test.connection.filled(bytes.len());
    test.connection.advance(0, &test.offer, &mut test.disk, &mut test.memory);
    assert!(!test.connection.wants_input() && test.connection.is_leaving());
    assert!(!test.connection.is_over(), "nothing of it was done yet");
    test.send(&[7; PAGE_SIZE]);
    assert!(test.memory.pages.iter().all(Option::is_none), "all of it became zero");
    assert!(!test.connection.is_over(), "the answer was not sent yet");
    let answer = test.answers();
    assert_eq!((answer.len(), error_of(&answer)), (16, 0), "one answer");
    assert!(test.connection.is_over());
}

/// A server that is to end takes the content of a WRITE that has begun, and no further request.
#[test]
fn a_write_that_has_begun_is_the_last_request() {
    let mut test = Test::agreed();
    let mut bytes = Vec::new();
    let page = PAGE_SIZE as u32;
    RequestHeader { flags: 0, command: command::WRITE, cookie: 9, offset: 0, length: 2 * page }.encode(&mut bytes);
    test.send(&[&bytes[..], &[7; PAGE_SIZE]].concat());
    test.connection.leave();
    test.send(b"");
    assert!(test.connection.wants_input() && !test.connection.is_over());
    test.send(&[&[8; PAGE_SIZE][..], &bytes, &[9; 2 * PAGE_SIZE]].concat());
    assert_eq!(error_of(&test.answers()), 0);
    assert!(test.connection.is_over());
    let first_bytes = [0, 1].map(|page: usize| test.memory.pages[page].as_ref().unwrap()[0]);
    assert_eq!(first_bytes, [7, 8]);
    // Who has not agreed on anything waits for nothing.
    let mut test = Test::new();
    test.connection.leave();
    assert!(test.connection.is_over());
}

/// A disk of holes that counts the pages that are looked at.
struct Counted {
    looked_at: Cell<u64>,
}

impl Pages for Counted {
    fn read(&mut self, _: PageNo, _: Token) -> Result<(), Refused> {
        unreachable!("nothing is read")
    }

    fn write(&mut self, _: PageNo, _: &Page, _: Token) -> Result<(), Refused> {
        unreachable!("nothing is written")
    }

    fn trim(&mut self, _: PageNo, _: Token) -> Result<(), Refused> {
        unreachable!("nothing is trimmed")
    }

    fn confirm(&mut self, _: Token) -> Result<(), Refused> {
        unreachable!("nothing is trimmed")
    }

    fn queued(&self) -> usize {
        0
    }

    fn run(&self, _: PageNo, max: u64) -> PageRun {
        self.looked_at.set(self.looked_at.get() + max);
        PageRun { pages: max, hole: true }
    }
}

/// As many BLOCK_STATUS as fit into the input, of as many pages as there can be, are answered in many rounds: others have their turn
/// between them.
#[test]
fn a_round_looks_at_few_pages() {
    const LENGTH: u32 = 1 << 31;
    let mut test = Test::agreed();
    let mut disk = Disk::new(u64::from(LENGTH));
    let mut pages = Counted { looked_at: Cell::new(0) };
    let mut bytes = Vec::new();
    RequestHeader { flags: 0, command: command::BLOCK_STATUS, cookie: 9, offset: 0, length: LENGTH }.encode(&mut bytes);
    let requests = INPUT_MAX / bytes.len();
    let bytes = bytes.repeat(requests);
    let room = test.connection.room();
    assert!(room.len() >= bytes.len());
    room[..bytes.len()].copy_from_slice(&bytes);
    test.connection.filled(bytes.len());
    let (mut rounds, mut answers) = (0, 0);
    loop {
        pages.looked_at.set(0);
        disk.begin_round();
        test.connection.advance(0, &test.offer, &mut disk, &mut pages);
        let looked_at = pages.looked_at.get();
        assert!(looked_at < LOOKS_A_ROUND + STATUS_PAGES_MAX, "{looked_at} pages in round {rounds}");
        rounds += 1;
        answers += test.answers().len();
        if !disk.has_more() {
            break;
        }
    }
    assert_eq!((rounds, answers), (requests, requests * 32), "each takes a round, and all are answered");
}

#[test]
fn a_client_that_reads_nothing_is_not_read_for_ever() {
    let mut test = Test::agreed();
    let mut bytes = Vec::new();
    for cookie in 0..20_000 {
        RequestHeader { flags: 0, command: command::READ, cookie, offset: 0, length: SIZE as u32 }.encode(&mut bytes);
    }
    test.send(&bytes);
    assert!(!test.connection.wants_input(), "its requests wait in its own socket");
    assert!(test.connection.output().len() <= PROMISED_MAX + REQUESTS_MAX * 64);
    // As soon as it reads, it is served again.
    test.answers();
    test.send(b"");
    assert!(!test.connection.output().is_empty());
}

proptest! {
    /// Any bytes after the negotiation, in any cuts: no panic, and no memory beyond the limits.
    #[test]
    fn any_bytes(requests in prop::collection::vec(
        (0_u16..10, 0_u16..32, 0_u64..2 * SIZE, 0_u32..3 * SIZE as u32, 0_usize..6000), 1..30),
        cut in 1_usize..5000,
    ) {
        let mut test = Test::agreed();
        let mut bytes = Vec::new();
        for (command, flags, offset, length, content) in requests {
            RequestHeader { flags, command, cookie: 1, offset, length }.encode(&mut bytes);
            bytes.resize(bytes.len() + content, 0x25);
        }
        for part in bytes.chunks(cut) {
            test.send(part);
            test.answers();
        }
    }

    /// Any bytes from the beginning.
    #[test]
    fn any_negotiation(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut test = Test::new();
        test.send(&[&[0, 0, 0, 3], &bytes[..]].concat());
        prop_assert!(test.connection.output().len() < INPUT_MAX + 4096);
    }
}

/// A client that takes its answers in pieces, and asks for more before it has all of them, gets each byte once, and the buffer
/// does not grow with what was sent.
#[test]
fn answers_are_taken_in_pieces() {
    const EACH: u32 = 2 * PAGE_SIZE as u32;
    let mut test = Test::agreed();
    let contents: Vec<u8> = (0..SIZE).map(|at| (at % 253) as u8).collect();
    test.request(command::WRITE, 0, 0, SIZE as u32, &contents);
    let capacity = test.connection.output.capacity();
    let (mut taken, mut expected) = (Vec::new(), Vec::new());
    for round in 0..200 {
        let offset = round % (PAGES as u64 - 1) * PAGE_SIZE as u64;
        let mut bytes = Vec::new();
        RequestHeader { flags: 0, command: command::READ, cookie: round, offset, length: EACH }.encode(&mut bytes);
        test.send(&bytes);
        chunk_header(&mut expected, round, chunk::OFFSET_DATA, 8 + EACH);
        expected.extend_from_slice(&offset.to_be_bytes());
        expected.extend_from_slice(&contents[offset as usize..offset as usize + EACH as usize]);
        // A little less than comes, so that there is always something left.
        let count = (test.connection.output().len() - 1).min(EACH as usize + 31);
        taken.extend_from_slice(&test.connection.output()[..count]);
        test.connection.sent(count);
    }
    taken.extend_from_slice(&test.answers());
    assert!(taken == expected);
    assert_eq!(test.connection.output.capacity(), capacity);
}
