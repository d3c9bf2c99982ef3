//! Both sides of the link, and sides that mean no good.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use pagoda_outbox::limits::READERS_MAX;
use pagoda_outbox::{Access, HandleId, Ino, NewNode, ROOT, ReaderId, Refusal, Selection};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::net::SendFlags;
use vm_memory::{FileOffset, MmapRegion};

use super::answer::{Answer, Entry, Found};
use super::client::{Files, Given};
use super::message::ENTRIES_MAX;
use super::request::Request;
use super::server::Transmitters;
use super::*;
use crate::outbox::{Again, Outbox, file_memory};
use crate::sandbox::allow_transmitting;

const PAGE: u64 = 4096;
const ALL: Selection = Selection { start: 0, end: None };

/// A space, and a thread that answers a transmitter.
struct Served {
    outbox: Arc<Outbox>,
    ends: Option<Ends>,
    answering: JoinHandle<()>,
}

impl Served {
    fn new() -> Served {
        let outbox = Arc::new(Outbox::new(1 << 20, Duration::ZERO));
        let (theirs, ours) = pair().unwrap();
        let served = Arc::clone(&outbox);
        let answering = std::thread::spawn(move || Transmitters::default().answer(&served, ours));
        Served { outbox, ends: Some(theirs), answering }
    }

    fn files(&mut self) -> Files {
        Files::new(self.ends.take().unwrap()).unwrap()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> (Ino, HandleId) {
        let mut space = self.outbox.space();
        let ino = space.create(ROOT, name.as_bytes(), NewNode::default()).unwrap().ino;
        let handle = space.open(ino, Access::Write).unwrap();
        drop(space);
        self.write((ino, handle), 0, bytes);
        (ino, handle)
    }

    fn write(&self, (ino, handle): (Ino, HandleId), at: u64, bytes: &[u8]) {
        let put = |file: &File, at, count| file.write_all_at(&bytes[..count], at).map(|()| count);
        self.outbox.write(handle, ino, at, bytes.len() as u64, Again::No, put).unwrap();
    }

    /// The transmitter has gone, or is not answered any more.
    fn end(self) -> Arc<Outbox> {
        drop(self.ends);
        self.answering.join().unwrap();
        self.outbox
    }
}

/// How often somebody was woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_reader_goes_through_a_file_with_one_descriptor() {
    let mut served = Served::new();
    let files = served.files();
    let file = served.file("f", &[7; 6000]);
    let found = files.find([&b"f"[..]].into_iter()).unwrap().unwrap();
    assert_eq!((found.ino, found.size, found.is_complete), (file.0, 6000, false));
    assert_eq!(files.find([&b"f"[..], b"x"].into_iter()).unwrap(), None);
    let reader = files.attach(file.0, ALL).unwrap().unwrap();
    let (mut memory, waker) = (None, Waker::noop());
    let mut next = |from, max| files.next(reader, from, max, &mut memory, waker).unwrap();
    assert_eq!(next(0, 5000), Given::Bytes { offset: 0, length: 5000, is_rest: false });
    assert_eq!(served.outbox.space().attributes(file.0).unwrap().cursor, 5000, "before it was answered");
    assert_eq!(next(5000, 5000), Given::Bytes { offset: 5000, length: 1000, is_rest: true });
    assert_eq!(next(6000, 5000), Given::Wait);
    let mut bytes = vec![0; 6000];
    memory.as_ref().unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [7; 6000]);

    // What was acknowledged goes with the next question; and alone, if it is much or time for it.
    let disposable = || served.outbox.space().figures().disposable;
    files.note_acknowledged(reader, 5000);
    files.pause(reader);
    assert_eq!(files.figures().unwrap().disposable, 0);
    assert_eq!(files.next(reader, 6000, 1, &mut memory, waker).unwrap(), Given::Wait);
    assert_eq!(disposable(), 0, "there is nothing to be asked");
    served.outbox.settle();
    assert_eq!(files.next(reader, 6000, 1, &mut memory, waker).unwrap(), Given::Wait);
    assert_eq!(disposable(), PAGE);
    served.write(file, 6000, &vec![8; 400 << 10]);
    assert!(matches!(files.next(reader, 6000, 1 << 20, &mut memory, waker).unwrap(), Given::Bytes { .. }));
    files.note_acknowledged(reader, 300 << 10);
    files.pause(reader);
    assert_eq!(files.figures().unwrap().disposable, 300 << 10);
    files.note_acknowledged(reader, 304 << 10);
    files.say_acknowledged();
    assert_eq!(files.figures().unwrap().disposable, 304 << 10);

    // Who goes has not acknowledged the rest.
    files.note_acknowledged(reader, 308 << 10);
    files.detach(reader);
    assert_eq!((files.figures().unwrap().readers, disposable()), (0, 308 << 10));
    served.outbox.space().release(file.1).unwrap();
    let rest = Selection { start: 308 << 10, end: Some(u64::MAX - 1) };
    let (second, mut memory) = (files.attach(file.0, rest).unwrap().unwrap(), None);
    let length = 6000 + (400 << 10) - (308 << 10);
    let given = files.next(second, 308 << 10, 1 << 20, &mut memory, waker).unwrap();
    assert_eq!(given, Given::Bytes { offset: 308 << 10, length, is_rest: false }, "the end comes");
    assert_eq!(files.next(second, 0, 1, &mut memory, waker).unwrap(), Given::End);
    assert_eq!(files.attach(Ino(99), ALL).unwrap(), Err(Refusal::NotFound));
    let reader = |_| files.attach(file.0, rest).unwrap();
    let refused = (0..READERS_MAX).map(reader).find_map(Result::err);
    assert_eq!(refused, Some(Refusal::TooManyReaders));
    drop(files);
    let outbox = served.end();
    assert_eq!(outbox.space().figures().readers, 0, "they go with the transmitter");
}

#[test]
fn a_reader_that_waits_is_told_of_more() {
    let mut served = Served::new();
    let files = Arc::new(served.files());
    let file = served.file("f", b"bytes");
    let reader = files.attach(file.0, ALL).unwrap().unwrap();
    let woken = Arc::new(Woken::default());
    let (mut memory, waker) = (None, Waker::from(Arc::clone(&woken)));
    assert!(matches!(files.next(reader, 0, PAGE, &mut memory, &waker).unwrap(), Given::Bytes { .. }));
    // Nobody who does not wait is told.
    served.write(file, 5, b"more");
    assert!(matches!(files.next(reader, 5, PAGE, &mut memory, &waker).unwrap(), Given::Bytes { .. }));
    assert_eq!(files.next(reader, 9, PAGE, &mut memory, &waker).unwrap(), Given::Wait);
    assert_eq!(files.next(reader, 9, PAGE, &mut memory, &waker).unwrap(), Given::Wait);
    let listening = Arc::clone(&files);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
    let gone = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&gone);
    let listener =
        std::thread::spawn(move || runtime.block_on(listening.listen(|| counted.store(1, Ordering::SeqCst))));
    served.write(file, 9, b"even more");
    while woken.0.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    served.write(file, 18, b"and more");
    assert!(matches!(files.next(reader, 9, PAGE, &mut memory, &waker).unwrap(), Given::Bytes { length: 17, .. }));
    assert_eq!((woken.0.load(Ordering::SeqCst), gone.load(Ordering::SeqCst)), (1, 0), "nobody waits any more");
    drop((listener, served));
}

#[test]
fn directories_of_any_size_are_listed() {
    let mut served = Served::new();
    let files = served.files();
    for count in [0, ENTRIES_MAX - 1, ENTRIES_MAX, 2 * ENTRIES_MAX, 300] {
        let directory = {
            let mut space = served.outbox.space();
            let directory = space.make_directory(ROOT, format!("d{count}").as_bytes(), NewNode::default()).unwrap().ino;
            for index in 0..count {
                space.create(directory, format!("{index:0>255}").as_bytes(), NewNode::default()).unwrap();
            }
            directory
        };
        let listed = files.list(directory).unwrap().unwrap();
        let names: Vec<String> = listed.iter().map(|entry| String::from_utf8(entry.name.to_vec()).unwrap()).collect();
        assert_eq!(names, (0..count).map(|index| format!("{index:0>255}")).collect::<Vec<_>>());
    }
    assert_eq!(files.list(Ino(9999)).unwrap(), None);
}

/// What no transmitter of ours says is not answered, and what its readers had is let go of.
#[test]
fn a_hostile_transmitter_is_not_answered() {
    let stranger = ReaderId(12345);
    type Says<'a> = &'a dyn Fn(&Ends, ReaderId);
    let bad: [Says<'_>; 9] = [
        &|ends, _| say(ends, &Request::Next { reader: stranger, acknowledged: 0, max: 1 }.packet()),
        &|ends, _| say(ends, &Request::Detach { reader: stranger, acknowledged: 0 }.packet()),
        &|ends, reader| say(ends, &Request::Acknowledge(vec![(reader, 0), (stranger, 1)]).packet()),
        &|ends, reader| {
            say(ends, &Request::Detach { reader, acknowledged: 0 }.packet());
            say(ends, &Request::Detach { reader, acknowledged: 0 }.packet());
        },
        &|ends, _| say(ends, &Answer::Wait.packet()),
        &|ends, _| say_bytes(ends, b"short"),
        &|ends, _| say_bytes(ends, &vec![1; PACKET_BYTES_MAX + 1]),
        &|ends, _| say_bytes(ends, &vec![0xff; 1000]),
        &|ends, _| say_bytes(ends, b""),
    ];
    for bad in bad {
        let mut served = Served::new();
        let (ino, _) = served.file("f", &[1; 9000]);
        let ends = served.ends.take().unwrap();
        say(&ends, &Request::Attach { ino, selection: ALL }.packet());
        let Answer::Attached(reader) = heard(&ends) else { panic!() };
        // More than there is, and more than was given.
        say(&ends, &Request::Next { reader, acknowledged: 0, max: u64::MAX }.packet());
        assert_eq!(heard(&ends), Answer::Bytes { offset: 0, length: 9000, is_rest: true });
        say(&ends, &Request::Acknowledge(vec![(reader, u64::MAX)]).packet());
        bad(&ends, reader);
        let outbox = served.end();
        assert!(Receiver::new().receive(&ends.calls).unwrap().is_none());
        let space = outbox.space();
        let (figures, file) = (space.figures(), space.attributes(ino).unwrap());
        assert_eq!((figures.readers, figures.bytes_acknowledged, file.cursor), (0, 9000, 9000));
    }
}

fn say_bytes(ends: &Ends, bytes: &[u8]) {
    rustix::net::send(&ends.calls, bytes, SendFlags::empty()).unwrap();
}

fn say(ends: &Ends, packet: &Packet) {
    let frame = packet.frame();
    let parts = [IoSlice::new(&frame), IoSlice::new(packet.tail())];
    rustix::net::sendmsg(&ends.calls, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL).unwrap();
}

fn heard(ends: &Ends) -> Answer {
    Answer::of(&Receiver::new().receive(&ends.calls).unwrap().unwrap().0).unwrap()
}

/// The next answer to a reader is this one, with this beside it.
fn next_after(answer: &Answer, beside: Option<OwnedFd>, memory: &mut Option<Arc<File>>) -> io::Result<Given> {
    let (theirs, ours) = pair().unwrap();
    let files = Files::new(theirs).unwrap();
    send(&ours.calls, &Answer::Attached(ReaderId(1)).packet(), None).unwrap();
    let reader = files.attach(Ino(2), ALL).unwrap().unwrap();
    send(&ours.calls, &answer.packet(), beside.as_ref().map(AsFd::as_fd)).unwrap();
    files.next(reader, 0, PAGE, memory, Waker::noop())
}

#[test]
fn a_hostile_process_that_serves_is_not_believed() {
    let memory = || Some(OwnedFd::from(file_memory().unwrap()));
    let bytes = |offset, length| Answer::Bytes { offset, length, is_rest: false };
    assert!(next_after(&bytes(0, PAGE), memory(), &mut None).is_ok());
    assert!(next_after(&bytes(0, PAGE), None, &mut None).is_err(), "no memory");
    for bad in [bytes(1, 5), bytes(0, 0), bytes(0, PAGE + 1), bytes(u64::MAX, 1), Answer::Attached(ReaderId(1))] {
        assert!(next_after(&bad, memory(), &mut None).is_err(), "{bad:?}");
    }
    let mut known = memory().map(|fd| Arc::new(File::from(fd)));
    assert!(next_after(&bytes(0, PAGE), memory(), &mut known).is_err(), "another memory");
    let (pipe, _other) = std::io::pipe().unwrap();
    assert!(next_after(&bytes(0, PAGE), Some(pipe.into()), &mut None).is_err(), "no file");

    let (theirs, ours) = pair().unwrap();
    let files = Files::new(theirs).unwrap();
    let entry = |ino| Entry {
        name: Box::from(*b"n"),
        found: Found {
            ino: Ino(ino),
            kind: pagoda_outbox::Kind::File,
            state: pagoda_outbox::State::Open,
            size: 0,
            cursor: 0,
            freed: 0,
            is_complete: true,
            is_published: true,
        },
    };
    let entries =
        |inos: &[u64]| Answer::Entries { entries: inos.iter().map(|ino| entry(*ino)).collect(), is_last: false };
    // A listing that would never end.
    for answer in [entries(&[5, 6]), entries(&[6, 7])] {
        send(&ours.calls, &answer.packet(), None).unwrap();
    }
    assert!(files.list(Ino(1)).is_err());
    // What was told is heard until it goes; what nobody says ends it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
    let gone = AtomicUsize::new(0);
    let listen = || runtime.block_on(files.listen(|| gone.store(1, Ordering::SeqCst)));
    rustix::net::send(&ours.bell, &[Told::VmmGone.byte(), Told::More.byte(), 9], SendFlags::empty()).unwrap();
    assert!(listen().is_err() && gone.load(Ordering::SeqCst) == 1);
    drop(ours);
    assert!(listen().is_ok());
    assert!(files.figures().is_err());
}

/// The transmitter has descriptors by which files could be written, and no system call that does it.
#[test]
fn a_transmitter_cannot_change_a_file() {
    let memory = file_memory().unwrap();
    memory.write_all_at(&[1; 2 * PAGE as usize], 0).unwrap();
    let other = file_memory().unwrap();
    other.write_all_at(&[2; PAGE as usize], 0).unwrap();
    let plain = File::from(rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC).unwrap());
    let check = std::thread::spawn(move || {
        allow_transmitting().unwrap();
        let mut byte = [0];
        assert!(rustix::io::read(&memory, &mut byte).is_err(), "its position is behind all");
        assert!(rustix::io::write(&plain, b"x").is_ok(), "elsewhere the same call does it");
        assert!(rustix::io::write(&memory, b"x").is_err());
        assert!(rustix::io::writev(&memory, &[IoSlice::new(b"x")]).is_err());
        assert!(rustix::io::pwrite(&memory, b"x", 0).is_err());
        assert!(rustix::io::pwritev(&memory, &[IoSlice::new(b"x")], 0).is_err());
        assert!(rustix::fs::sendfile(&memory, &other, Some(&mut 0), PAGE as usize).is_err());
        assert!(rustix::fs::copy_file_range(&other, Some(&mut 0), &memory, Some(&mut 0), 1).is_err());
        assert!(rustix::fs::seek(&memory, rustix::fs::SeekFrom::Start(0)).is_err());
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&memory, punch, 0, PAGE).is_err());
        assert!(rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, 9 * PAGE).is_err());
        assert!(rustix::fs::fcntl_setfl(&memory, rustix::fs::OFlags::APPEND).is_err());
        assert!(rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).is_err());
        assert!(rustix::fs::memfd_create("more", MemfdFlags::CLOEXEC).is_err());
        assert!(
            std::net::TcpStream::connect("127.0.0.1:1").is_err_and(|error| error.raw_os_error() == Some(libc::EPERM))
        );
        let map = |protection| {
            let at = FileOffset::new(memory.try_clone().unwrap(), 0);
            MmapRegion::<()>::build(Some(at), PAGE as usize, protection, libc::MAP_SHARED)
        };
        assert!(map(libc::PROT_READ).is_ok() && map(libc::PROT_READ | libc::PROT_WRITE).is_err());
        assert!(map(libc::PROT_READ | libc::PROT_EXEC).is_err());
        let mut bytes = vec![0; 2 * PAGE as usize];
        memory.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 1));
        assert_eq!(memory.read_at(&mut byte, 2 * PAGE).unwrap(), 0);
    });
    check.join().unwrap();
}
