//! The other side of a real `pagoda-outbox`: QEMU by vhost-user, a guest's kernel by a ring in a memfd, and the daemon.

use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pagoda_abi::attach::{OutboxFigures, Packet};
use pagoda_sys::socket::{Connection, Listener, Received};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtiofsd::fuse::{CreateIn, EntryOut, InHeader, InitInCompat, Opcode, OpenOut, OutHeader, WriteIn};
use vm_memory::ByteValued;

/// For what has to come; tests do not end before.
const PATIENCE: Duration = Duration::from_secs(60);
const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// The guest's memory, from address 0 on; each life of the guest has a half of it.
const MEMORY_BYTES: u64 = 1 << 20;
pub const LIFE_BYTES: u64 = MEMORY_BYTES / 2;
/// Where QEMU has mapped it.
const MAPPED: u64 = 0x7f00_0000_0000;
/// The ring of all but FORGET, and its parts in a life's memory.
const RING: u32 = 1;
const SIZE: u16 = 64;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// The first of the places of requests. Each has its answer behind it.
const REQUESTS: u64 = 0x4000;
const REQUEST_BYTES: u64 = 0x400;
const ANSWER: u64 = 0x200;
/// What a write takes its bytes from.
const CONTENT: u64 = 0x2_0000;
/// Flags of descriptors (virtio 1.2, 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Messages of vhost-user, and features.
mod kind {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
}
const VERSION_1: u64 = 1 << 32;
const EVENT_INDEX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const MQ_AND_REPLY_ACK: u64 = 0b1001;

/// A request on its way.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    answer: u64,
    /// The used ring's index when it and all before it are answered.
    index: u16,
}

pub struct Vm {
    outbox: Child,
    dir: PathBuf,
    socket: UnixStream,
    memory: File,
    kick: File,
    call: File,
    /// Where the guest's memory of this life begins.
    life: u64,
    asked: u16,
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.outbox.kill();
        let _ = self.outbox.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn event() -> File {
    File::from(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap())
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        // As tests/kit looks for what notifies of nothing: memory in common, and other processes.
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

impl Vm {
    /// With a space of so many bytes. The guest has not begun.
    pub fn new(name: &str, space: u64) -> Vm {
        let dir = std::env::temp_dir().join(format!("pagoda-outbox-process-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let vmm = UnixListener::bind(dir.join("vhost")).unwrap();
        let daemon = Listener::bind(&dir.join("attach")).unwrap();
        let control = Listener::bind(&dir.join("control")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda-outbox"));
        command.args(["--name", "vm1", "--listen", "127.0.0.1:0", "--wait", "600", "--linger", "0"]);
        command.args(["--no-namespaces", "--space-bytes", &space.to_string(), "--attach-socket"]);
        command.arg(dir.join("attach")).env("PAGODA_OUTBOX_TOKEN", TOKEN).env("PAGODA_OUTBOX_CONTROL_TOKEN", TOKEN);
        let outbox = command.stdin(OwnedFd::from(vmm)).stdout(Stdio::null()).spawn().unwrap();
        let asks = daemon.accept().unwrap();
        assert!(matches!(asks.recv().unwrap(), Received::Message { packet: Packet::Outbox { .. }, .. }));
        asks.send(&Packet::Welcome { flags: 0 }, &[control.as_fd()]).unwrap();
        let memory = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY_BYTES).unwrap();
        let socket = UnixStream::connect(dir.join("vhost")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let vm = Vm { outbox, dir, socket, memory, kick: event(), call: event(), life: 0, asked: 0 };
        vm.agree();
        vm
    }

    fn say(&self, kind: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let bytes = [words(&[kind, 1, payload.len() as u32]), payload.to_vec()].concat();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || beside.push(SendAncillaryMessage::ScmRights(fds)));
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn ask(&self, kind: u32, payload: &[u8]) -> Vec<u8> {
        self.say(kind, payload, &[]);
        let mut header = [0; 12];
        (&self.socket).read_exact(&mut header).expect("an answer");
        assert_eq!(header[..4], kind.to_ne_bytes(), "the answer to something else");
        let mut payload = vec![0; u32::from_ne_bytes(header[8..].try_into().unwrap()) as usize];
        (&self.socket).read_exact(&mut payload).expect("the rest of an answer");
        payload
    }

    /// What QEMU says once.
    fn agree(&self) {
        self.ask(kind::GET_FEATURES, &[]);
        self.ask(kind::GET_PROTOCOL_FEATURES, &[]);
        self.say(kind::SET_PROTOCOL_FEATURES, &MQ_AND_REPLY_ACK.to_ne_bytes(), &[]);
        self.say(kind::SET_OWNER, &[], &[]);
        self.say(kind::SET_FEATURES, &(VERSION_1 | EVENT_INDEX | PROTOCOL_FEATURES).to_ne_bytes(), &[]);
        let region: Vec<u8> =
            [1, 0, MEMORY_BYTES, MAPPED, 0].iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
        self.say(kind::SET_MEM_TABLE, &region, &[self.memory.as_fd()]);
    }

    /// The ring begins, or goes on, as QEMU says it: how the guest is told of answers comes last.
    pub fn start(&mut self, index: u16) {
        (self.kick, self.call) = (event(), event());
        self.say(kind::SET_VRING_NUM, &words(&[RING, SIZE.into()]), &[]);
        self.say(kind::SET_VRING_BASE, &words(&[RING, index.into()]), &[]);
        let place = |part: u64| MAPPED + self.life + part;
        let parts: Vec<u8> =
            [place(0), place(USED), place(AVAILABLE), 0].iter().flat_map(|at| at.to_ne_bytes()).collect();
        self.say(kind::SET_VRING_ADDR, &[words(&[RING, 0]), parts].concat(), &[]);
        self.say(kind::SET_VRING_KICK, &u64::from(RING).to_ne_bytes(), &[self.kick.as_fd()]);
        self.say(kind::SET_VRING_ENABLE, &words(&[RING, 1]), &[]);
        self.say(kind::SET_VRING_CALL, &u64::from(RING).to_ne_bytes(), &[self.call.as_fd()]);
    }

    /// Gives the ring's index.
    pub fn stop(&self) -> u16 {
        self.say(kind::SET_VRING_ENABLE, &words(&[RING, 0]), &[]);
        let answer = self.ask(kind::GET_VRING_BASE, &words(&[RING, 0]));
        u32::from_ne_bytes(answer[4..].try_into().unwrap()) as u16
    }

    /// Another kernel has the other half of the memory; all that was in this one's is gone.
    pub fn begin_anew(&mut self, filled: u8) {
        self.memory.write_all_at(&vec![filled; LIFE_BYTES as usize], self.life).unwrap();
        self.life = LIFE_BYTES - self.life;
        self.memory.write_all_at(&vec![0; LIFE_BYTES as usize], self.life).unwrap();
        self.asked = 0;
    }

    /// The memory of the life before this.
    pub fn before(&self) -> Vec<u8> {
        let mut bytes = vec![0; LIFE_BYTES as usize];
        self.memory.read_exact_at(&mut bytes, LIFE_BYTES - self.life).unwrap();
        bytes
    }

    fn put(&self, bytes: &[u8], at: u64) {
        self.memory.write_all_at(bytes, self.life + at).unwrap();
    }

    /// Puts a request into the ring: what it says, and as many bytes of content.
    pub fn request(&mut self, opcode: Opcode, node: u64, body: &[u8], content: u32) -> Asked {
        let head = self.asked % (SIZE / 3) * 3;
        let at = REQUESTS + u64::from(head / 3) * REQUEST_BYTES;
        let length = (size_of::<InHeader>() + body.len()) as u32;
        let (opcode, len) = (opcode as u32, length + content);
        let header = InHeader { len, opcode, unique: u64::from(self.asked) + 1, nodeid: node, ..InHeader::default() };
        self.put(&[header.as_slice(), body].concat(), at);
        let mut parts = vec![(at, length, NEXT), (CONTENT, content, NEXT), (at + ANSWER, ANSWER as u32, WRITE)];
        parts.retain(|(_, length, _)| *length > 0);
        for (number, (address, length, flags)) in (head..).zip(parts) {
            let address = (self.life + address).to_le_bytes();
            let rest = [flags.to_le_bytes(), (number + 1).to_le_bytes()].concat();
            self.put(&[&address[..], &length.to_le_bytes(), &rest].concat(), 16 * u64::from(number));
        }
        self.put(&head.to_le_bytes(), AVAILABLE + 4 + 2 * u64::from(self.asked % SIZE));
        self.asked += 1;
        self.put(&self.asked.to_le_bytes(), AVAILABLE + 2);
        (&self.kick).write_all(&1_u64.to_ne_bytes()).unwrap();
        Asked { answer: at + ANSWER, index: self.asked }
    }

    /// Waits as a driver does, that looks when it is notified: the error, and what follows it.
    pub fn answer(&self, asked: Asked) -> (i32, Vec<u8>) {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        loop {
            let mut used = [0; 2];
            self.memory.read_exact_at(&mut used, self.life + USED + 2).unwrap();
            if u16::from_le_bytes(used) == asked.index {
                break;
            }
            // The guest wants to hear of the next answer.
            self.put(&used, AVAILABLE + 4 + 2 * u64::from(SIZE));
            self.memory.read_exact_at(&mut used, self.life + USED + 2).unwrap();
            if u16::from_le_bytes(used) == asked.index {
                break;
            }
            assert!(
                poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&patience)).unwrap() > 0,
                "nobody tells it"
            );
            let _ = (&self.call).read(&mut [0; 8]);
        }
        let mut answer = vec![0; ANSWER as usize];
        self.memory.read_exact_at(&mut answer, self.life + asked.answer).unwrap();
        let error = i32::from_le_bytes(answer[4..8].try_into().unwrap());
        (error, answer[size_of::<OutHeader>()..].to_vec())
    }

    pub fn mount(&mut self) {
        let init = InitInCompat { major: 7, minor: 31, ..InitInCompat::default() };
        let asked = self.request(Opcode::Init, 0, init.as_slice(), 0);
        assert_eq!(self.answer(asked).0, 0);
    }

    /// Makes a file: its number and a handle.
    pub fn create(&mut self, name: &str) -> (u64, u64) {
        let create = CreateIn { flags: libc::O_WRONLY as u32, mode: 0o644, ..CreateIn::default() };
        let body = [create.as_slice(), name.as_bytes(), &[0]].concat();
        let asked = self.request(Opcode::Create, 1, &body, 0);
        let (error, answer) = self.answer(asked);
        assert_eq!(error, 0);
        let number = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
        assert!(size_of::<EntryOut>() + size_of::<OpenOut>() < ANSWER as usize);
        (number(0), number(size_of::<EntryOut>()))
    }

    pub fn write(&mut self, (node, fh): (u64, u64), offset: u64, bytes: u32) -> Asked {
        let write = WriteIn { fh, offset, size: bytes, ..WriteIn::default() };
        self.put(&vec![7; bytes as usize], CONTENT);
        self.request(Opcode::Write, node, write.as_slice(), bytes)
    }

    fn of_daemon(&self, packet: &Packet) -> OutboxFigures {
        until("an answer to the daemon", || {
            let daemon = Connection::connect(&self.dir.join("control")).ok()?;
            daemon.set_patience(Some(PATIENCE)).ok()?;
            daemon.send(packet, &[]).ok()?;
            match daemon.recv().ok()? {
                Received::Message { packet: Packet::Figures { figures, .. }, .. } => Some(figures),
                _ => None,
            }
        })
    }

    pub fn figures(&self) -> OutboxFigures {
        self.of_daemon(&Packet::Look { seq: 1 })
    }

    pub fn set_space(&self, bytes: u64) {
        self.of_daemon(&Packet::SetSpace { seq: 1, bytes });
    }

    /// Waits until a write waits for room.
    pub fn wait_waiting(&self) {
        until("a write that waits", || (self.figures().waiting > 0).then_some(()));
    }

    /// The process that serves; none that has ended.
    pub fn worker(&self) -> i32 {
        let keeper = self.outbox.id();
        until("a process that serves", || {
            let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
            let pid = children.split_whitespace().next()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            pid.parse().ok().filter(|_| !stat.contains(") Z "))
        })
    }

    /// Kills the process that serves, and waits until another one is there.
    pub fn kill_worker(&self) {
        let killed = self.worker();
        let pid = rustix::process::Pid::from_raw(killed).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        until("another process that serves", || (self.worker() != killed).then_some(()));
    }
}
