//! What a clone borrows: the template is in RAM's place before the VMM goes on, writes to it are seen, and RAM is moved there by
//! an order that stands. The userfaultfd is used here as the daemon does.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use pagoda_abi::CHUNK_SIZE;
use pagoda_abi::attach::{Packet, Range};
use pagoda_abi::template::{len_of, table_at, trailer};

use crate::Toy;
use crate::daemon::{Daemon, REGION, Vm, checked};

const MIB: u64 = CHUNK_SIZE as u64;
/// Requests of ioctl(2) for a userfaultfd (linux/userfaultfd.h).
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_WAKE: u64 = 0x8010_aa02;
const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;
const UFFDIO_CONTINUE: u64 = 0xc020_aa07;
/// MISSING_SHMEM, THREAD_ID, PAGEFAULT_FLAG_WP, MINOR_SHMEM, WP_HUGETLBFS_SHMEM and EVENT_REMAP.
const FEATURES: u64 = 1 << 5 | 1 << 8 | 1 << 0 | 1 << 10 | 1 << 12 | 1 << 2;
const PAGEFAULT: u8 = 0x12;
const REMAP: u8 = 0x14;
const WP: u64 = 1 << 1;
const MINOR: u64 = 1 << 2;

/// A sealed template of these chunks, each full of its number.
fn template(chunks: &[u32]) -> OwnedFd {
    // SAFETY: memfd_create(2) reads a NUL-terminated name and makes a new fd that nobody else has.
    let file = unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        std::fs::File::from_raw_fd(checked(libc::memfd_create(c"template".as_ptr(), flags), "memfd_create"))
    };
    let count = chunks.len() as u32;
    file.set_len(len_of(count)).expect("set the template's length");
    for (slot, chunk) in (0..).zip(chunks) {
        file.write_all_at(&vec![*chunk as u8; CHUNK_SIZE], table_at(slot)).expect("fill the template");
        file.write_all_at(&chunk.to_le_bytes(), table_at(count) + u64::from(slot) * 4).expect("fill the table");
    }
    file.write_all_at(&trailer(count), len_of(count) - 16).expect("fill the trailer");
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: fcntl(2) of an fd of ours, with an int.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, "seal the template");
    file.into()
}

struct Uffd(OwnedFd);

impl Uffd {
    fn ioctl<const N: usize>(&self, request: u64, mut argument: [u64; N]) {
        // SAFETY: the structure of this request consists of as many words; the kernel fills the answered ones.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), request, &mut argument) }, "an ioctl of the userfaultfd");
    }

    fn register(&self, addr: u64, len: u64, mode: u64) {
        self.ioctl(UFFDIO_REGISTER, [addr, len, mode, 0]);
    }

    fn protect(&self, addr: u64, len: u64, on: bool) {
        self.ioctl(UFFDIO_WRITEPROTECT, [addr, len, u64::from(on)]);
    }

    /// The next message within some time: its event, flags and address.
    fn message(&self, ms: i32) -> Option<(u8, u64, u64)> {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut message = [0u64; 4];
        // SAFETY: poll(2) of one structure, and read(2) of a message of 32 bytes.
        unsafe {
            if checked(libc::poll(&mut poll, 1, ms), "poll") == 0 {
                return None;
            }
            assert_eq!(libc::read(self.0.as_raw_fd(), message.as_mut_ptr().cast(), 32), 32);
        }
        Some((message[0] as u8, message[1], message[2] & !4095))
    }

    fn expect(&self, event: u8) -> (u64, u64) {
        let (came, flags, addr) = self.message(20_000).expect("a message");
        assert_eq!(came, event, "flags {flags:#x}");
        (flags, addr)
    }
}

/// Where the VMM maps this file, by what its name in /proc/PID/maps has: address, length, offset.
fn mappings(pid: u32, name: &str) -> Vec<(u64, u64, u64)> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let hex = |text: &str| u64::from_str_radix(text, 16).expect("a number");
    let lines = maps.lines().filter(|line| line.contains(name));
    lines
        .map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (start, end) = fields.next().and_then(|range| range.split_once('-')).expect("a range");
            let offset = fields.nth(1).expect("an offset");
            (hex(start), hex(end) - hex(start), hex(offset))
        })
        .collect()
}

fn order(vm: &Vm, order: u64, chunk: u64) {
    vm.link.send(&Packet::Own { order, region: 0, offset: chunk * MIB, len: MIB }, &[]);
}

pub fn what_is_borrowed_is_read_written_and_moved(dir: &Path) {
    let mut daemon = Daemon::new(dir, &[REGION]);
    let mut toy = Toy::start(dir, &daemon);
    let template = template(&[1, 2, 5]);
    let hello = daemon.prepare_with(1, Some(&template));
    let addr = hello.regions[0].addr;
    // It outlives this daemon, as the VMM's own does.
    let uffd = Uffd(hello.fds[1].try_clone().expect("duplicate the userfaultfd"));
    uffd.ioctl(UFFDIO_API, [0xaa, FEATURES, 0]);
    let places = mappings(hello.pid, "memfd:template");
    assert_eq!(places, [(addr + MIB, 2 * MIB, 0), (addr + 5 * MIB, MIB, 2 * MIB)]);
    let spare = mappings(hello.pid, "memfd:test").into_iter().find(|(at, len, _)| *len == REGION && *at != addr);
    let (spare, ..) = spare.expect("RAM is mapped a second time");
    for (at, len, _) in places {
        uffd.register(at, len, 1 | 2);
        uffd.protect(at, len, true);
    }
    for chunk in [1, 2, 5] {
        uffd.register(spare + chunk * MIB, MIB, 1 | 2 | 4);
    }
    let mut vm = hello.welcome();
    assert_eq!(toy.line(), "attached");

    // What is read is the template's, and nobody is asked.
    assert_eq!((toy.ask("peek 1"), toy.ask("peek 2"), toy.ask("peek 5")), ("1".into(), "2".into(), "5".into()));
    assert_eq!(uffd.message(50), None);
    toy.send("poke 1");
    let (flags, at) = uffd.expect(PAGEFAULT);
    assert_eq!((flags & WP, at), (WP, addr + MIB));
    uffd.protect(at, 4096, false);
    assert_eq!(toy.line(), "ok");
    assert_eq!(toy.ask("peek 1"), "119");

    // It is in no file, so nothing may drop it.
    assert_eq!(toy.ask("drop 1"), "ok");
    assert_eq!(vm.link.zap(&[Range { addr: addr + MIB, len: MIB }]).1, libc::EINVAL as u32);
    assert_eq!(vm.link.zap(&[Range { addr, len: MIB }]).1, 0, "what is not borrowed is RAM as ever");
    assert_eq!(toy.ask("peek 1"), "119");

    // An order that does not stand, and one of a daemon that is gone.
    order(&vm, 99, 1);
    assert_eq!(vm.link.receive().0, Packet::Owned { order: 99, errno: libc::ECANCELED as u32 });
    let old = daemon.shared.order_move();
    daemon.die();
    assert!(daemon.shared.take_back_move());
    order(&vm, old, 1);
    drop(vm);
    daemon.revive();
    let next = daemon.greet(daemon.accept());
    vm = next;
    // The mover may come to the order only now: whoever is connected gets its answer.
    let given_up = Packet::Owned { order: old, errno: libc::ECANCELED as u32 };
    let answer = |vm: &Vm| match vm.link.receive().0 {
        packet if packet == given_up => vm.link.receive().0,
        packet => packet,
    };
    vm.link.send(&Packet::Clock { seq: 7 }, &[]);
    assert_eq!(answer(&vm), Packet::Clocked { seq: 7 });
    assert_eq!(mappings(vm.pid, "memfd:template").len(), 2, "nothing was moved");

    // Protected, copied, moved: one page is in the RAM file, and the VMM finds it there.
    uffd.protect(addr + MIB, MIB, true);
    let ram = std::fs::File::from(daemon.ram[0].try_clone().expect("duplicate RAM's fd"));
    ram.write_all_at(&[119; 4096], MIB).expect("copy the page");
    let number = daemon.shared.order_move();
    order(&vm, number, 1);
    uffd.expect(REMAP);
    assert_eq!(answer(&vm), Packet::Owned { order: number, errno: 0 });
    assert_eq!(mappings(vm.pid, "memfd:template"), [(addr + 2 * MIB, MIB, MIB), (addr + 5 * MIB, MIB, 2 * MIB)]);
    toy.send("peek 1");
    let (flags, at) = uffd.expect(PAGEFAULT);
    assert_eq!((flags & MINOR, at), (MINOR, addr + MIB), "RAM's, and registered");
    uffd.ioctl(UFFDIO_CONTINUE, [at, 4096, 0, 0]);
    assert_eq!(toy.line(), "119");
    // It is RAM from now on.
    assert_eq!(vm.link.zap(&[Range { addr: addr + MIB, len: MIB }]).1, 0);
    let again = daemon.shared.order_move();
    order(&vm, again, 1);
    assert_eq!(vm.link.receive().0, Packet::Owned { order: again, errno: libc::EINVAL as u32 });
    assert_eq!(toy.ask("peek 2"), "2");
    uffd.ioctl(UFFDIO_WAKE, [addr, REGION]);
    toy.end();
}
