//! A daemon of a few lines: it speaks the attach protocol step by step, as each case tells it, and pages nothing.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use pagoda_abi::attach::{FDS_MAX, PACKET_MAX, PREPARED_DEVICE, PREPARED_TEMPLATE, Packet, Ranges, Region, Shard};
use pagoda_abi::shared::{SHARED_MAGIC, Shared};
use pagoda_abi::{Token, attach};

pub const TOKEN: Token = Token(*b"the shim's tests");
pub const REGION: u64 = 8 << 20;
/// Longer than anything here takes on a busy machine; then the case fails instead of hanging.
const PATIENCE_S: i64 = 60;

pub fn checked(result: c_int, what: &str) -> c_int {
    assert!(result >= 0, "{what}: {}", std::io::Error::last_os_error());
    result
}

fn owned(fd: c_int) -> OwnedFd {
    // SAFETY: a new fd that nobody else has.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn memfd(len: u64) -> OwnedFd {
    // SAFETY: memfd_create(2) reads a NUL-terminated name; ftruncate(2) has no memory conditions.
    unsafe {
        let fd = owned(checked(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC), "memfd_create"));
        checked(libc::ftruncate(fd.as_raw_fd(), len as i64), "ftruncate");
        fd
    }
}

pub struct Daemon {
    listener: OwnedFd,
    pub socket: PathBuf,
    pub ram: Vec<OwnedFd>,
    shared_fd: OwnedFd,
    pub shared: &'static Shared,
}

/// What a Hello brought.
pub struct Vm {
    pub pid: u32,
    pub regions: Vec<Region>,
    pub shards: Vec<Shard>,
    pub fds: Vec<OwnedFd>,
    pub link: Link,
}

/// The same before it is answered.
pub struct Hello {
    pub pid: u32,
    pub regions: Vec<Region>,
    pub shards: Vec<Shard>,
    pub fds: Vec<OwnedFd>,
    link: Link,
}

/// A connection of the toy VMM to this daemon.
pub struct Link(OwnedFd);

impl Daemon {
    pub fn new(dir: &Path, sizes: &[u64]) -> Daemon {
        let socket = dir.join("attach.sock");
        let _ = std::fs::remove_file(&socket);
        let shared_fd = memfd(size_of::<Shared>() as u64);
        // SAFETY: a new mapping of a file long enough; never unmapped; all its fields are atomics, zero bits are valid.
        let shared = unsafe {
            let fd = shared_fd.as_raw_fd();
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(std::ptr::null_mut(), size_of::<Shared>(), access, libc::MAP_SHARED, fd, 0);
            assert_ne!(at, libc::MAP_FAILED);
            &*at.cast::<Shared>()
        };
        shared.magic.store(SHARED_MAGIC, Ordering::SeqCst);
        shared.epoch.store(1, Ordering::SeqCst);
        let ram = sizes.iter().map(|size| memfd(*size)).collect();
        Daemon { listener: listen(&socket), socket, ram, shared_fd, shared }
    }

    /// The daemon dies: nobody listens, and the path is gone.
    pub fn die(&mut self) {
        std::fs::remove_file(&self.socket).expect("remove the socket");
        self.listener = memfd(0);
    }

    pub fn revive(&mut self) {
        self.listener = listen(&self.socket);
    }

    pub fn accept(&self) -> Link {
        // SAFETY: accept4(2) without an address to fill.
        let fd = unsafe {
            libc::accept4(self.listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC)
        };
        let link = Link(owned(checked(fd, "accept")));
        limit(&link.0);
        link
    }

    /// Answers a VM that takes its RAM.
    pub fn give_ram(&self) {
        let link = self.accept();
        assert_eq!(link.receive().0, Packet::Ram { token: TOKEN });
        let mut lens = attach::List::default();
        for file in &self.ram {
            // SAFETY: a plain C structure, which fstat(2) fills.
            let stat = unsafe {
                let mut stat: libc::stat = std::mem::zeroed();
                checked(libc::fstat(file.as_raw_fd(), &mut stat), "fstat");
                stat
            };
            assert!(lens.push(stat.st_size as u64));
        }
        let fds: Vec<RawFd> = self.ram.iter().map(AsRawFd::as_raw_fd).collect();
        link.send(&Packet::Fetched { monitor: false, lens }, &fds);
    }

    /// Serves a VM's start: Ram, Fetched, Prepare, Prepared, Hello, Welcome.
    pub fn attach(&self, uffds: u32) -> Vm {
        self.prepare_with(uffds, None).welcome()
    }

    /// The same up to the Hello.
    pub fn prepare_with(&self, uffds: u32, template: Option<&OwnedFd>) -> Hello {
        self.give_ram();
        let link = self.accept();
        assert_eq!(link.receive().0, Packet::Prepare { token: TOKEN });
        // SAFETY: open(2) with a NUL-terminated path.
        let device = unsafe { libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        let device = owned(checked(device, "/dev/userfaultfd: these tests need to be root"));
        let given = if template.is_some() { PREPARED_TEMPLATE } else { 0 };
        let prepared = Packet::Prepared { uffds, flags: PREPARED_DEVICE | given };
        let mut fds = vec![self.shared_fd.as_raw_fd(), device.as_raw_fd()];
        fds.extend(template.map(AsRawFd::as_raw_fd));
        link.send(&prepared, &fds);
        hear(link)
    }

    /// Reads Hello and says Welcome.
    pub fn greet(&self, link: Link) -> Vm {
        hear(link).welcome()
    }
}

fn hear(link: Link) -> Hello {
    let (packet, fds) = link.receive();
    let Packet::Hello { token, pid, regions, shards } = packet else { panic!("not a Hello: {packet:?}") };
    assert_eq!(token, TOKEN);
    let (regions, shards) = (regions.as_slice().to_vec(), shards.as_slice().to_vec());
    // Those of RAM, the userfaultfds, the shared memory, and the template if there is one.
    assert!((regions.len() + shards.len() + 1..=regions.len() + shards.len() + 2).contains(&fds.len()));
    Hello { pid, regions, shards, fds, link }
}

impl Hello {
    pub fn welcome(self) -> Vm {
        let Hello { pid, regions, shards, fds, link } = self;
        link.send(&Packet::Welcome { flags: 0 }, &[]);
        Vm { pid, regions, shards, fds, link }
    }
}

impl Link {
    pub fn send(&self, packet: &Packet, fds: &[RawFd]) {
        let encoded = packet.encode();
        let mut iov =
            libc::iovec { iov_base: encoded.as_bytes().as_ptr().cast_mut().cast(), iov_len: encoded.as_bytes().len() };
        let mut control = [0u64; 32];
        // SAFETY: a plain C structure; `control` is large enough for FDS_MAX fds and aligned; sendmsg(2) reads what is
        // alive through the call.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&mut iov, 1);
            if !fds.is_empty() {
                let size = size_of_val(fds) as u32;
                message.msg_control = control.as_mut_ptr().cast();
                message.msg_controllen = libc::CMSG_SPACE(size) as usize;
                let header = libc::CMSG_FIRSTHDR(&message);
                ((*header).cmsg_level, (*header).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
                (*header).cmsg_len = libc::CMSG_LEN(size) as usize;
                std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
            }
            checked(libc::sendmsg(self.0.as_raw_fd(), &message, libc::MSG_NOSIGNAL) as c_int, "sendmsg");
        }
    }

    pub fn receive(&self) -> (Packet, Vec<OwnedFd>) {
        let mut bytes = [0u8; PACKET_MAX];
        let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = [0u64; 32];
        let mut fds = Vec::new();
        // SAFETY: a plain C structure; recvmsg(2) fills buffers that are alive through the call; the header's data is
        // fds that are now ours.
        let len = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&mut iov, 1);
            (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
            let len = libc::recvmsg(self.0.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC);
            let header = libc::CMSG_FIRSTHDR(&message);
            if !header.is_null() {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<c_int>();
                assert!(count <= FDS_MAX);
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                fds.extend((0..count).map(|index| owned(data.add(index).read_unaligned())));
            }
            checked(len as c_int, "recvmsg") as usize
        };
        (Packet::decode(&bytes[..len]).expect("a packet"), fds)
    }

    /// Asks the agent to read the queues, so that everything that has completed is off the clock.
    pub fn clock(&self) {
        self.send(&Packet::Clock { seq: 7 }, &[]);
        assert_eq!(self.receive().0, Packet::Clocked { seq: 7 });
    }

    pub fn zap(&self, ranges: &[attach::Range]) -> (u64, u32) {
        let mut list = Ranges::default();
        ranges.iter().for_each(|range| assert!(list.push(*range)));
        self.send(&Packet::Zap { seq: 9, ranges: list }, &[]);
        match self.receive().0 {
            Packet::Zapped { seq: 9, epoch, errno } => (epoch, errno),
            other => panic!("not Zapped: {other:?}"),
        }
    }
}

fn listen(path: &Path) -> OwnedFd {
    // SAFETY: a plain C structure; bind(2) reads its length of bytes; the others have no memory conditions.
    unsafe {
        let socket = checked(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0), "socket");
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        let bytes = path.as_os_str().as_bytes();
        assert!(bytes.len() < address.sun_path.len(), "path too long for a socket: {path:?}");
        for (to, from) in address.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        let size = size_of_val(&address) as u32;
        checked(libc::bind(socket, (&raw const address).cast(), size), "bind");
        checked(libc::listen(socket, 8), "listen");
        let socket = owned(socket);
        limit(&socket);
        socket
    }
}

fn limit(socket: &OwnedFd) {
    let time = libc::timeval { tv_sec: PATIENCE_S, tv_usec: 0 };
    let size = size_of_val(&time) as u32;
    // SAFETY: setsockopt(2) reads one timeval.
    let set = unsafe {
        let fd = socket.as_raw_fd();
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const time).cast(), size)
    };
    checked(set, "SO_RCVTIMEO");
}
