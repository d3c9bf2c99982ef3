//! The toy VMM: maps its RAM and does what it is told on standard input, a line a command, a line an answer.

use std::ffi::{CStr, c_int, c_long, c_uint, c_void};
use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::thread::JoinHandle;

use crate::daemon::{REGION, checked};

const BLOCK: usize = 4096;
/// Where in RAM the disk's and the pipe's data go.
const IO_OFFSET: usize = 1 << 20;

struct Toy {
    fds: Vec<c_int>,
    ram: Vec<*mut u8>,
    waiting: Option<Waiting>,
    context: *mut c_void,
    ring: Option<Box<[u64; 27]>>,
}

/// An I/O that waits for what happens at the other end of a pipe.
struct Waiting {
    other_end: End,
    thread: JoinHandle<()>,
}

enum End {
    Pipe(c_int),
    Event(c_int),
}

pub fn run() {
    let paths = std::env::var("PAGODA_RAM").unwrap();
    // Without close-on-exec, as QEMU opens it, and kept for as long as the process lives.
    let fds: Vec<c_int> = paths.split(',').map(|path| checked(open_as_qemu(path), path)).collect();
    let ram: Vec<*mut u8> = fds.iter().map(|fd| map_unattached(*fd, fds[fds.len() - 1])).collect();
    let mut toy = Toy { fds, ram, waiting: None, context: std::ptr::null_mut(), ring: None };
    answer("attached");
    for line in std::io::stdin().lock().lines() {
        answer(&toy.obey(&line.unwrap()));
    }
}

fn answer(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).unwrap();
}

fn open_as_qemu(path: &str) -> c_int {
    let path = std::ffi::CString::new(path).unwrap();
    // SAFETY: open(2) with a path that ends in NUL.
    unsafe { libc::open(path.as_ptr(), libc::O_RDWR) }
}

/// Maps a region. Until the last one is mapped nobody manages them, and they have no access.
fn map_unattached(fd: c_int, last: c_int) -> *mut u8 {
    let ram = map(fd, libc::MAP_SHARED);
    if fd != last {
        // A pipe copies, so there is nothing to follow, whatever standard error is.
        let (_reader, writer) = std::io::pipe().unwrap();
        // SAFETY: write(2) reports a buffer that cannot be read.
        let written = unsafe { libc::write(writer.as_raw_fd(), ram.cast(), 1) };
        assert_eq!((written, errno()), (-1, libc::EFAULT));
    }
    ram
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn map(fd: c_int, kind: c_int) -> *mut u8 {
    // SAFETY: a new mapping at an address of the kernel's choice.
    unsafe { libc::mmap(std::ptr::null_mut(), REGION as usize, libc::PROT_READ | libc::PROT_WRITE, kind, fd, 0).cast() }
}

/// Where the chunk begins that a command names.
fn chunk_of(command: &str) -> usize {
    command[5..].parse::<usize>().unwrap() << 20
}

/// A call's outcome: "ok" or the error.
fn outcome(result: c_int) -> String {
    if result == 0 { "ok".into() } else { format!("{}", std::io::Error::last_os_error().raw_os_error().unwrap()) }
}

impl Toy {
    fn obey(&mut self, command: &str) -> String {
        let (fd, ram) = (self.fds[0], self.ram[0]);
        let page = (2 * BLOCK) as libc::off_t;
        // SAFETY: `ram` is REGION bytes of mapped memory, and every call here keeps to it.
        unsafe {
            match command {
                "touch" => {
                    std::ptr::write_bytes(ram, 0x5a, REGION as usize);
                    "ok".into()
                }
                "verify" => {
                    let bytes = std::slice::from_raw_parts(ram, REGION as usize);
                    if bytes.iter().all(|byte| *byte == 0x5a) { "ok".into() } else { "wrong".into() }
                }
                "punch" => {
                    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    outcome(libc::fallocate(fd, mode, page - 10, 3 * page))
                }
                _ if command.starts_with("peek ") => ram.add(chunk_of(command)).read_volatile().to_string(),
                _ if command.starts_with("poke ") => {
                    ram.add(chunk_of(command)).write_volatile(119);
                    "ok".into()
                }
                _ if command.starts_with("drop ") => {
                    outcome(libc::madvise(ram.add(chunk_of(command)).cast(), 1 << 20, libc::MADV_DONTNEED))
                }
                "remove" => outcome(libc::madvise(ram.add(page as usize).cast(), BLOCK, libc::MADV_REMOVE)),
                "truncate" => outcome(libc::ftruncate(fd, 0)),
                "map again" => outcome(c_int::from(map(fd, libc::MAP_SHARED).cast() == libc::MAP_FAILED)),
                "map private" => outcome(c_int::from(map(fd, libc::MAP_PRIVATE).cast() == libc::MAP_FAILED)),
                "mremap" => {
                    let size = REGION as usize;
                    let moved = libc::mremap(ram.cast(), size, 2 * size, libc::MREMAP_MAYMOVE);
                    outcome(c_int::from(moved == libc::MAP_FAILED))
                }
                "unmap second" => outcome(libc::munmap(self.ram[1].cast(), REGION as usize)),
                "send fd" => send_fd(fd),
                "raw ring" => {
                    let mut params = [0u32; 30];
                    outcome(c_int::from(libc::syscall(libc::SYS_io_uring_setup, 4, &mut params) < 0))
                }
                "disk sync" => self.disk(|fd, buffer| libc::pread(fd, buffer, BLOCK, 0) as i64),
                "disk libaio" => self.disk_queued(Toy::libaio_read),
                "disk io_uring" => self.disk_queued(Toy::uring_read),
                "wait read" => self.wait_for_event(|fd, buffer| libc::read(fd, buffer, 8)),
                "wait readv" => self.wait_for_event(|fd, buffer| {
                    let iov = [part(buffer, 3), part(buffer.add(BLOCK), 5)];
                    libc::readv(fd, iov.as_ptr(), 2)
                }),
                "wait preadv2" => self.wait_for_event(|fd, buffer| libc::preadv2(fd, &part(buffer, 8), 1, -1, 0)),
                "wait fread" => self.wait_for_event(|fd, buffer| {
                    let stream = libc::fdopen(fd, c"r".as_ptr());
                    libc::setvbuf(stream, std::ptr::null_mut(), libc::_IONBF, 0);
                    libc::fread(buffer, 1, 8, stream) as isize
                }),
                "wait syscall read" => {
                    self.wait_for_event(|fd, buffer| libc::syscall(libc::SYS_read, fd, buffer, 8) as isize)
                }
                "wait syscall readv" => {
                    self.wait_for_event(|fd, buffer| libc::syscall(libc::SYS_readv, fd, &part(buffer, 8), 1) as isize)
                }
                // A pipe copies: the read may wait for ever and holds nothing back.
                "wait pipe" => self.wait(|fd, buffer| {
                    assert_eq!(libc::read(fd, buffer as *mut c_void, BLOCK), BLOCK as isize);
                }),
                "wait libaio" => {
                    let context = self.context() as usize;
                    self.wait(move |fd, buffer| {
                        assert_eq!(submit_aio(context as *mut _, fd, buffer), 1, "io_submit on a pipe");
                        reap_aio(context as *mut _);
                    })
                }
                "wait io_uring" => {
                    let ring = self.ring() as usize;
                    self.wait(move |fd, buffer| {
                        submit_uring(ring as *mut _, fd, buffer);
                        reap_uring(ring as *mut _);
                    })
                }
                "feed" => {
                    let waiting = self.waiting.take().unwrap();
                    match waiting.other_end {
                        End::Pipe(fd) => {
                            assert_eq!(libc::write(fd, [1u8; BLOCK].as_ptr().cast(), BLOCK), BLOCK as isize)
                        }
                        End::Event(fd) => assert_eq!(libc::write(fd, [1u8; 8].as_ptr().cast(), 8), 8),
                    }
                    waiting.thread.join().unwrap();
                    "ok".into()
                }
                other => panic!("no such command: {other}"),
            }
        }
    }

    fn io_buffer(&self) -> usize {
        self.ram[0] as usize + IO_OFFSET
    }

    /// Reads one block of a real file with O_DIRECT.
    fn disk(&mut self, read: impl FnOnce(c_int, *mut c_void) -> i64) -> String {
        let path = std::env::var("TOY_DISK").unwrap();
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).expect("open the disk O_DIRECT");
        let buffer = self.io_buffer() as *mut u8;
        // SAFETY: BLOCK bytes at `buffer` are RAM.
        unsafe { std::ptr::write_bytes(buffer, 0, BLOCK) };
        assert_eq!(read(file.as_raw_fd(), buffer.cast()), BLOCK as i64);
        // SAFETY: as above; the I/O is over.
        let bytes = unsafe { std::slice::from_raw_parts(buffer, BLOCK) };
        if bytes.iter().all(|byte| *byte == 0xd1) { "ok".into() } else { "wrong".into() }
    }

    fn disk_queued(&mut self, read: fn(&mut Toy, c_int, usize) -> i64) -> String {
        let buffer = self.io_buffer();
        let mut result = 0;
        let this: *mut Toy = self;
        // SAFETY: `disk` uses the toy only before and after it calls this closure.
        self.disk(|fd, _| unsafe {
            result = read(&mut *this, fd, buffer);
            result
        })
    }

    /// Starts a read from an empty pipe on a thread of its own: it is in flight until "feed". The queues have it on the clock
    /// whatever the file is.
    fn wait(&mut self, read: impl FnOnce(c_int, usize) + Send + 'static) -> String {
        let ([read_end, write_end], buffer) = (pipe(0), self.io_buffer());
        let thread = std::thread::spawn(move || read(read_end, buffer));
        self.waiting = Some(Waiting { other_end: End::Pipe(write_end), thread });
        "ok".into()
    }

    /// Starts a read of an eventfd, which nobody knows to copy.
    fn wait_for_event(&mut self, read: impl FnOnce(c_int, *mut c_void) -> isize + Send + 'static) -> String {
        // SAFETY: eventfd(2) makes a new fd.
        let fd = unsafe { checked(libc::eventfd(0, libc::EFD_CLOEXEC), "eventfd") };
        let buffer = self.io_buffer();
        let thread = std::thread::spawn(move || assert_eq!(read(fd, buffer as *mut c_void), 8));
        self.waiting = Some(Waiting { other_end: End::Event(fd), thread });
        "ok".into()
    }

    fn context(&mut self) -> *mut c_void {
        if self.context.is_null() {
            // SAFETY: io_setup(3) fills a null context.
            let made = unsafe {
                let setup: extern "C" fn(c_int, *mut *mut c_void) -> c_int = symbol(c"io_setup");
                setup(16, &mut self.context)
            };
            assert_eq!(made, 0, "io_setup");
        }
        self.context
    }

    fn libaio_read(&mut self, fd: c_int, buffer: usize) -> i64 {
        let context = self.context();
        assert_eq!(submit_aio(context, fd, buffer), 1);
        reap_aio(context)
    }

    fn ring(&mut self) -> *mut u64 {
        let ring = self.ring.get_or_insert_with(|| {
            let mut ring = Box::new([0u64; 27]);
            // SAFETY: `struct io_uring` of liburing 2 is 216 bytes.
            let made = unsafe {
                let init: extern "C" fn(c_uint, *mut u64, c_uint) -> c_int = symbol(c"io_uring_queue_init");
                init(8, ring.as_mut_ptr(), 0)
            };
            assert_eq!(made, 0, "io_uring_queue_init");
            // SAFETY: `kring_entries` of the completion queue points into the mapped ring.
            assert_eq!(unsafe { *(ring[16] as *const u32) }, 2048, "the shim asks for a larger completion queue");
            ring
        });
        ring.as_mut_ptr()
    }

    fn uring_read(&mut self, fd: c_int, buffer: usize) -> i64 {
        let ring = self.ring();
        submit_uring(ring, fd, buffer);
        reap_uring(ring)
    }
}

fn part(iov_base: *mut c_void, iov_len: usize) -> libc::iovec {
    libc::iovec { iov_base, iov_len }
}

fn pipe(flags: c_int) -> [c_int; 2] {
    let mut ends = [0; 2];
    // SAFETY: pipe2(2) fills two fds.
    checked(unsafe { libc::pipe2(ends.as_mut_ptr(), flags | libc::O_CLOEXEC) }, "pipe2");
    ends
}

/// A function as the VMM's own code would find it: the preloaded library first.
unsafe fn symbol<F: Copy>(name: &CStr) -> F {
    // SAFETY: dlsym(3) with a NUL-terminated name; the caller names the function's type, which is a pointer.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        assert!(!found.is_null(), "{name:?}: install libaio1 and liburing2");
        std::mem::transmute_copy(&found)
    }
}

/// Submits a PREAD; the request block is leaked, so that it stays valid.
fn submit_aio(context: *mut c_void, fd: c_int, buffer: usize) -> c_int {
    let iocb = Box::leak(Box::new([0u64; 8]));
    iocb[2] = (fd as u64) << 32; // opcode 0, priority 0, fd
    (iocb[3], iocb[4]) = (buffer as u64, BLOCK as u64);
    let mut list = [iocb.as_mut_ptr()];
    // SAFETY: one valid request for a valid context.
    unsafe {
        let submit: extern "C" fn(*mut c_void, c_long, *mut *mut u64) -> c_int = symbol(c"io_submit");
        submit(context, 1, list.as_mut_ptr())
    }
}

/// Waits for a completion by reading the ring, as QEMU does, so that no call tells the shim.
fn reap_aio(context: *mut c_void) -> i64 {
    let ring = context.cast::<u32>();
    // SAFETY: the context is its mapped ring: nr, head, tail in words 1 to 3, 32-byte events from byte 32 on.
    unsafe {
        let (nr, head) = (*ring.add(1), ring.add(2));
        while ring.add(3).read_volatile() == head.read_volatile() {
            std::thread::yield_now();
        }
        let event = ring.cast::<u64>().add(4 + 4 * head.read_volatile() as usize);
        let result = event.add(2).read_volatile() as i64;
        head.write_volatile((head.read_volatile() + 1) % nr);
        result
    }
}

fn submit_uring(ring: *mut u64, fd: c_int, buffer: usize) {
    const READ: u64 = 22;
    // SAFETY: a valid ring with room; an entry is 64 bytes.
    unsafe {
        let get: extern "C" fn(*mut u64) -> *mut [u64; 8] = symbol(c"io_uring_get_sqe");
        let submit: extern "C" fn(*mut u64) -> c_int = symbol(c"io_uring_submit");
        // opcode, flags, priority, fd | offset -1: as read(2) | address | length, flags | user_data
        *get(ring) = [READ | (fd as u64) << 32, u64::MAX, buffer as u64, BLOCK as u64, 77, 0, 0, 0];
        assert_eq!(submit(ring), 1);
    }
}

/// Waits for a completion by reading the queue, without a call.
fn reap_uring(ring: *mut u64) -> i64 {
    // SAFETY: the completion queue's khead, ktail, kring_mask and cqes are words 13, 14, 15 and 19 of the ring.
    unsafe {
        let word = |index: usize| *ring.add(index) as *mut u32;
        let (head, tail, mask, cqes) = (word(13), word(14), *word(15), word(19).cast::<[u32; 4]>());
        while tail.read_volatile() == head.read_volatile() {
            std::thread::yield_now();
        }
        let cqe = *cqes.add((*head & mask) as usize);
        assert_eq!(cqe[0], 77);
        head.write_volatile(*head + 1);
        i64::from(cqe[2] as i32)
    }
}

fn send_fd(fd: c_int) -> String {
    let (ours, _theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let mut byte = 0u8;
    let mut iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = [0u64; 4];
    // SAFETY: as in `daemon::Link::send`; a duplicate, so that the fd differs from the one in the environment.
    unsafe {
        let copy = File::from_raw_fd(checked(libc::dup(fd), "dup"));
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut iov, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        ((*header).cmsg_level, (*header).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(copy.as_raw_fd());
        outcome(c_int::from(libc::sendmsg(ours.as_raw_fd(), &message, 0) < 0))
    }
}
