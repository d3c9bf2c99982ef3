use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use pagoda_outbox::{Access, NewNode, ROOT};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::chain::{Memory, OwnRing, Part, WRITE};

const PAGE: usize = 4096;
/// Where the guest has the request, the bytes that it writes or reads, and the answer.
const REQUEST: u64 = 0;
const DATA: u64 = 0x10_0000;
const ANSWER: u64 = 0x1000;
const MEMORY_BYTES: usize = 0x40_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Write,
    Read,
}

struct Guest {
    memory: Memory,
    outbox: Outbox,
    header: InHeader,
    handle: u64,
}

impl Guest {
    fn new(space: usize) -> Guest {
        let memory = Memory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        let outbox = Outbox::new(space as u64, Duration::ZERO);
        let (ino, handle) = {
            let mut space = outbox.space();
            let ino = space.create(ROOT, b"f", NewNode::default()).unwrap().ino;
            (ino, space.open(ino, Access::Write).unwrap())
        };
        let header = InHeader { nodeid: ino.0, unique: 7, ..InHeader::default() };
        Guest { memory, outbox, header, handle: handle.0 }
    }

    /// Parts of memory that begin at [`DATA`] and follow one another.
    fn parts(lengths: &[usize], flags: u16) -> impl Iterator<Item = Part> {
        let mut address = DATA;
        lengths.iter().map(move |length| {
            let part = Part { address, length: *length as u32, flags };
            address += *length as u64;
            part
        })
    }

    /// The answer: what it says of errors, and the bytes behind its header that count.
    fn ask(&self, asked: Asked, bytes: &[u8], parts: Vec<Part>, again: Again) -> (i32, Vec<u8>) {
        self.memory.write_slice(bytes, GuestAddress(REQUEST)).unwrap();
        let mut all = vec![Part { address: REQUEST, length: bytes.len() as u32, flags: 0 }];
        let answer = Part { address: ANSWER, length: 64, flags: WRITE };
        all.extend(parts.iter().filter(|part| part.flags == 0));
        if asked == Asked::Write {
            all.push(answer);
        } else {
            all.push(Part { length: size_of::<OutHeader>() as u32, ..answer });
            all.extend(parts.iter().filter(|part| part.flags == WRITE));
        }
        let mut ring = OwnRing::new(&all).unwrap();
        let chain = ring.request().unwrap();
        let reader = Reader::new(&self.memory, chain.clone()).unwrap();
        let writer = Writer::new(&self.memory, chain).unwrap();
        let bytes = match asked {
            Asked::Write => write(&self.outbox, &self.header, reader, writer, again, |_| ()),
            Asked::Read => read(&self.outbox, &self.header, reader, writer),
        };
        let header: OutHeader = self.memory.read_obj(GuestAddress(ANSWER)).unwrap();
        assert_eq!((bytes.unwrap(), header.unique), (header.len as usize, 7));
        let mut behind = vec![0; header.len as usize - size_of::<OutHeader>()];
        let at = if asked == Asked::Write { ANSWER + size_of::<OutHeader>() as u64 } else { DATA };
        self.memory.read_slice(&mut behind, GuestAddress(at)).unwrap();
        (-header.error, behind)
    }

    /// How many bytes were written.
    fn write(&self, offset: usize, size: usize, lengths: &[usize], again: Again) -> Result<usize, i32> {
        let asked = WriteIn { fh: self.handle, offset: offset as u64, size: size as u32, ..WriteIn::default() };
        let (error, body) = self.ask(Asked::Write, asked.as_slice(), Guest::parts(lengths, 0).collect(), again);
        self.check();
        if error == 0 { Ok(u32::from_le_bytes(body[..4].try_into().unwrap()) as usize) } else { Err(error) }
    }

    fn read(&self, offset: usize, size: usize, lengths: &[usize]) -> Result<Vec<u8>, i32> {
        let asked = ReadIn { fh: self.handle, offset: offset as u64, size: size as u32, ..ReadIn::default() };
        let (error, body) = self.ask(Asked::Read, asked.as_slice(), Guest::parts(lengths, WRITE).collect(), Again::No);
        if error == 0 { Ok(body) } else { Err(error) }
    }

    /// Fills what is written next.
    fn fill(&self, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(DATA)).unwrap();
    }

    fn check(&self) {
        let real: u64 = self.outbox.memory_files().iter().map(|file| file.metadata().unwrap().blocks() * 512).sum();
        let figures = self.outbox.space().figures();
        assert!(real <= figures.used && figures.used <= figures.budget, "{real} bytes are real: {figures:?}");
    }
}

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + at / 251) as u8).collect()
}

#[test]
fn no_more_is_written_than_was_asked_for() {
    let guest = Guest::new(4 * PAGE);
    guest.fill(&content(1 << 20));
    assert_eq!(guest.write(0, PAGE, &[1 << 20], Again::No), Ok(PAGE), "one part of a MiB");
    assert_eq!(guest.read(0, 2 * PAGE, &[2 * PAGE]), Ok(content(PAGE)));
    assert_eq!(guest.write(PAGE, 10, &[3, 1 << 20], Again::No), Ok(10));
    assert_eq!(guest.write(PAGE + 10, 0, &[PAGE], Again::No), Ok(0));
    assert_eq!(guest.write(PAGE + 10, 100, &[40], Again::No), Ok(40), "it has fewer bytes than it says");
    assert_eq!(guest.write(0, (1 << 20) + 1, &[PAGE], Again::No), Err(libc::EINVAL));
}

/// The room ends at a page of the file, and the parts at pages of the program's buffer.
#[test]
fn a_write_for_which_there_is_room_in_part() {
    let guest = Guest::new(3 * PAGE);
    let whole = content(5 * PAGE);
    guest.fill(&whole);
    let lengths = [PAGE - 100, PAGE, PAGE, PAGE, PAGE + 100];
    assert_eq!(guest.write(1000, 5 * PAGE, &lengths, Again::No), Ok(3 * PAGE - 1000));
    assert_eq!(guest.read(1000, 3 * PAGE, &[100, 3 * PAGE]), Ok(whole[..3 * PAGE - 1000].to_vec()));
    assert_eq!(guest.write(3 * PAGE, 100, &[100], Again::No), Err(libc::ENOSPC));
}

#[test]
fn a_read_ends_with_the_file() {
    let guest = Guest::new(4 * PAGE);
    guest.fill(&content(5000));
    guest.write(0, 5000, &[5000], Again::No).unwrap();
    // As while a write behind is under way.
    guest.outbox.memory_files()[0].write_all_at(&[9; 100], 5000).unwrap();
    assert_eq!(guest.read(0, 2 * PAGE, &[3000, 3 * PAGE]), Ok(content(5000)));
    assert_eq!(guest.read(4999, 1, &[PAGE]), Ok(content(5000)[4999..].to_vec()));
    assert_eq!(guest.read(5000, 1, &[PAGE]), Ok(vec![]));
    assert_eq!(guest.read(0, 8, &[4]), Ok(content(4)), "there is room for fewer");
}

#[test]
fn what_a_failed_write_has_left_becomes_no_part_of_the_file() {
    let guest = Guest::new(8 * PAGE);
    guest.fill(&content(100));
    guest.write(0, 100, &[100], Again::No).unwrap();
    let failing = |file: &File, at: u64, count: usize| -> io::Result<usize> {
        file.write_all_at(&vec![9; count], at)?;
        Err(io::Error::from_raw_os_error(libc::EFAULT))
    };
    let ino = Ino(guest.header.nodeid);
    let failed = guest.outbox.write(HandleId(guest.handle), ino, 50, 3 * PAGE as u64, Again::No, failing);
    assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::EFAULT));
    guest.outbox.truncate(ino, 2 * PAGE as u64).unwrap();
    let there = guest.read(100, 2 * PAGE, &[2 * PAGE]).unwrap();
    assert_eq!(there, vec![0; 2 * PAGE - 100]);
    guest.check();
}

#[test]
fn a_write_goes_on_behind_what_is_known_to_be_done() {
    let guest = Guest::new(8 * PAGE);
    let whole = content(2 * PAGE);
    guest.fill(&whole);
    guest.write(0, PAGE, &[PAGE], Again::No).unwrap();
    assert_eq!(guest.write(0, 2 * PAGE, &[100, 2 * PAGE - 100], Again::Yes { done: PAGE as u64 }), Ok(2 * PAGE));
    assert_eq!(guest.read(0, 2 * PAGE, &[2 * PAGE]), Ok(whole));
    assert_eq!(guest.write(0, PAGE, &[PAGE], Again::Yes { done: u64::MAX }), Ok(PAGE));
}
