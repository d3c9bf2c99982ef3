//! The rings without QEMU: the guest's side of a ring in plain memory.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::time::Duration;

use pagoda_outbox::{Access, HandleId, Ino, NewNode, ROOT};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::MemfdFlags;
use virtiofsd::fuse::{FlushIn, ReadIn, ReleaseIn};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::*;
use crate::chain::{Part, WRITE};
use crate::inflight::TABLE_BYTES;

/// For what has to come; tests do not end before.
const PATIENCE_SECONDS: i64 = 20;
const SIZE: u16 = 16;
/// The ring of all but FORGET.
const RING: usize = 1;
/// Where the ring's parts and requests are.
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const DATA: u64 = 0x4000;
const ANSWER: u64 = 0x8000;
const MEMORY_BYTES: usize = 0x1_0000;
/// A descriptor's flag: another one follows.
const NEXT: u16 = 1;

struct Guest {
    memory: Memory,
    vrings: [Vring; RINGS],
    table_file: File,
    outbox: Arc<Outbox>,
    /// The ring's call event, which the device notifies of answers.
    call: File,
}

impl Guest {
    fn new() -> Guest {
        let memory = Memory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        let atomic = Atomic::new(memory.clone());
        let vrings = [0, 1].map(|_| Vring::new(atomic.clone(), HEADS_MAX).unwrap());
        let call = File::from(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let vring = &vrings[RING];
        vring.set_queue_size(SIZE);
        vring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).unwrap();
        vring.set_queue_event_idx(true);
        vring.set_call(Some(call.try_clone().unwrap()));
        vring.set_enabled(true);
        vring.set_queue_ready(true);
        let table_file = File::from(rustix::fs::memfd_create("table", MemfdFlags::CLOEXEC).unwrap());
        table_file.set_len(TABLE_BYTES).unwrap();
        Guest { memory, vrings, table_file, outbox: Arc::new(Outbox::new(1 << 20, Duration::ZERO)), call }
    }

    fn table(&self) -> Table {
        Table::map(self.table_file.try_clone().unwrap()).unwrap()
    }

    /// The next process, which takes over what there is.
    fn start(&self) -> Backend {
        let backend = Backend::start(&self.outbox, self.table()).unwrap();
        backend.update_memory(Atomic::new(self.memory.clone())).unwrap();
        backend.set_event_idx(true);
        backend
    }

    fn write(&self, bytes: &[u8], at: u64) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn word(&self, at: u64) -> u16 {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    fn set_available(&self, index: u16) {
        self.write(&index.to_le_bytes(), AVAILABLE + 2);
    }

    /// Puts a request at the ring's beginning, whose first descriptor is 0.
    fn put(&self, opcode: Opcode, node: u64, body: &[u8], answer_bytes: u32) {
        let length = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader { len: length, opcode: opcode as u32, unique: 7, nodeid: node, ..InHeader::default() };
        self.write(header.as_slice(), DATA);
        self.write(body, DATA + size_of::<InHeader>() as u64);
        let parts =
            [Part { address: DATA, length, flags: NEXT }, Part { address: ANSWER, length: answer_bytes, flags: WRITE }];
        for (at, part) in parts.iter().enumerate() {
            let place = DESCRIPTORS + 16 * at as u64;
            self.write(&part.address.to_le_bytes(), place);
            self.write(&part.length.to_le_bytes(), place + 8);
            self.write(&part.flags.to_le_bytes(), place + 12);
            self.write(&(at as u16 + 1).to_le_bytes(), place + 14);
        }
        self.set_available(1);
    }

    /// Waits for the first answer: its bytes by the ring, and its error.
    fn answer(&self) -> (u32, i32) {
        let patience = Timespec { tv_sec: PATIENCE_SECONDS, tv_nsec: 0 };
        while self.word(USED + 2) == 0 {
            let ready = poll(&mut [PollFd::new(&self.call.as_fd(), PollFlags::IN)], Some(&patience)).unwrap();
            assert!(ready > 0, "no answer comes");
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        let bytes = self.memory.read_obj(GuestAddress(USED + 8)).unwrap();
        let header: OutHeader = self.memory.read_obj(GuestAddress(ANSWER)).unwrap();
        (bytes, header.error)
    }

    fn all(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES];
        self.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    fn growing(&self) -> (Ino, HandleId) {
        let ino = self.outbox.space().create(ROOT, b"grows", NewNode::default()).unwrap().ino;
        let handle = self.outbox.space().open(ino, Access::Write).unwrap();
        let put = |file: &File, at, count: usize| file.write_all_at(&vec![1; count], at).map(|()| count);
        assert_eq!(self.outbox.write(handle, ino, 0, 100, crate::outbox::Again::No, put).unwrap(), 100);
        (ino, handle)
    }

    /// As if two processes had ended over some request while this one was on its way.
    fn leave_twice(&self) {
        let table = self.table();
        let request = table.take(RING, 0).unwrap();
        table.note_again(0, request);
        self.vrings[RING].set_queue_next_avail(1);
    }
}

/// The ring is looked at, in a thread of its own. Panics if there is no end to that.
fn look(backend: &Arc<Backend>, guest: &Guest) {
    let (backend, vrings) = (Arc::clone(backend), guest.vrings.clone());
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        backend.handle_event(RING as u16, EventSet::IN, &vrings, 0).unwrap();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(PATIENCE_SECONDS as u64)).expect("the thread does not come back");
}

#[test]
fn a_close_is_carried_out_though_two_processes_have_ended() {
    let guest = Guest::new();
    let (ino, handle) = guest.growing();
    let asked = ReleaseIn { fh: handle.0, ..ReleaseIn::default() };
    guest.put(Opcode::Release, ino.0, asked.as_slice(), 16);
    guest.leave_twice();
    look(&Arc::new(guest.start()), &guest);
    assert_eq!(guest.answer(), (16, 0));
    assert!(guest.outbox.space().attributes(ino).unwrap().is_complete, "nobody can close it any more");
    assert!(!guest.table().is_busy(RING));
}

#[test]
fn what_has_no_effect_succeeds_and_the_rest_fails_after_two_processes() {
    for (opcode, error) in [
        (Opcode::Flush, 0),
        (Opcode::Fsync, 0),
        (Opcode::Releasedir, 0),
        (Opcode::Destroy, 0),
        (Opcode::Getattr, -libc::EIO),
        (Opcode::Mkdir, -libc::EIO),
    ] {
        let guest = Guest::new();
        guest.put(opcode, ROOT.0, FlushIn::default().as_slice(), 16);
        guest.leave_twice();
        look(&Arc::new(guest.start()), &guest);
        assert_eq!(guest.answer(), (16, error), "{opcode:?}");
    }
}

#[test]
fn a_request_without_room_for_an_answer_gets_none() {
    for opcode in [Opcode::Read, Opcode::Readdir, Opcode::Readdirplus, Opcode::Getattr] {
        let guest = Guest::new();
        let (ino, handle) = guest.growing();
        let asked = ReadIn { fh: handle.0, size: 8, ..ReadIn::default() };
        guest.put(opcode, if opcode as u32 == Opcode::Read as u32 { ino.0 } else { ROOT.0 }, asked.as_slice(), 8);
        let before = guest.all()[ANSWER as usize..].to_vec();
        let backend = Arc::new(guest.start());
        look(&backend, &guest);
        assert_eq!(guest.answer().0, 0, "{opcode:?}");
        assert_eq!(guest.all()[ANSWER as usize..], before);
        assert!(!guest.table().is_busy(RING), "{opcode:?}: it would be carried out again");
    }
}

#[test]
fn a_ring_that_lies_about_its_index_is_left() {
    let guest = Guest::new();
    let backend = Arc::new(guest.start());
    guest.put(Opcode::Statfs, ROOT.0, &[], 200);
    for lie in [SIZE + 1, u16::MAX] {
        guest.set_available(lie);
        look(&backend, &guest);
    }
    assert!(!guest.table().is_busy(RING));
    // When its index is right again, it is served.
    guest.set_available(1);
    look(&backend, &guest);
    assert_eq!(guest.answer().1, 0);
}

#[test]
fn a_ring_that_ends_behind_the_memory_is_left() {
    let guest = Guest::new();
    // Its index is there, and its entries are not.
    let available = MEMORY_BYTES as u64 - 4;
    guest.vrings[RING].set_queue_info(DESCRIPTORS, available, USED).unwrap();
    guest.write(&1_u16.to_le_bytes(), available + 2);
    look(&Arc::new(guest.start()), &guest);
    assert!(!guest.table().is_busy(RING));
}

#[test]
fn a_ring_that_was_stopped_is_not_written() {
    let guest = Guest::new();
    let backend = Arc::new(guest.start());
    guest.put(Opcode::Statfs, ROOT.0, &[], 200);
    // As another kernel finds it.
    guest.write(&[0xa5; 0x1000], USED);
    guest.vrings[RING].set_queue_ready(false);
    let before = guest.all();
    look(&backend, &guest);
    assert!(guest.all() == before, "a stopped ring was written");
    assert!(!guest.table().is_busy(RING), "a request was taken out of it");
}
