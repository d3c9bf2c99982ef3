use std::sync::atomic::Ordering;

use pagoda_abi::Token;
use pagoda_abi::attach::{List, RANGES_MAX, Range};
use pagoda_abi::shared::{SHARED_MAGIC, Shared};
use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::testing::disk_path;

fn message(received: Received) -> (Packet, Vec<OwnedFd>) {
    match received {
        Received::Message { packet, fds } => (packet, fds),
        other => panic!("{other:?} instead of a message"),
    }
}

fn largest() -> Packet {
    let mut ranges: List<Range, RANGES_MAX> = List::default();
    while ranges.push(Range { addr: 1 << 40, len: 1 << 20 }) {}
    Packet::Zap { seq: 1, ranges }
}

#[test]
fn packets_and_descriptors_arrive_in_order_and_the_end_is_seen() {
    let (a, b) = Connection::pair().unwrap();
    assert!(matches!(b.try_recv().unwrap(), Received::Nothing));
    let wakes: Vec<_> = (0..FDS_MAX).map(|_| crate::process::Wake::new().unwrap()).collect();
    let fds: Vec<_> = wakes.iter().map(|wake| wake.as_fd()).collect();
    a.send(&largest(), &fds).unwrap();
    a.send(&Packet::Clock { seq: 2 }, &[]).unwrap();
    let (packet, received) = message(b.recv().unwrap());
    assert_eq!((packet, received.len()), (largest(), FDS_MAX));
    for (fd, wake) in received.iter().zip(&wakes) {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        assert!(wake.clear(), "the same eventfd");
    }
    let (packet, received) = message(b.try_recv().unwrap());
    assert_eq!((packet, received.len()), (Packet::Clock { seq: 2 }, 0));
    drop(a);
    assert!(matches!(b.recv().unwrap(), Received::Closed));
    assert!(matches!(b.send(&Packet::Clock { seq: 3 }, &[]), Err(SocketError::Closed)));
}

#[test]
fn a_peer_that_breaks_the_rules_is_refused() {
    let (a, b) = Connection::pair().unwrap();
    let wake = crate::process::Wake::new().unwrap();
    let too_many = vec![wake.as_fd(); FDS_MAX + 9];
    assert!(matches!(a.send(&Packet::Clock { seq: 1 }, &too_many), Err(SocketError::TooManyFds)));
    let raw = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX + 9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        rustix::net::sendmsg(&a, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    };
    let clock = Packet::Clock { seq: 1 }.encode();
    raw(clock.as_bytes(), &too_many);
    raw(clock.as_bytes(), &too_many[..FDS_MAX + 1]);
    raw(&[0; PACKET_MAX + 1], &[]);
    raw(b"GET / HTTP/1.1", &too_many[..2]);
    raw(clock.as_bytes(), &[]);
    assert!(matches!(b.recv(), Err(SocketError::TooManyFds)));
    assert!(matches!(b.recv(), Err(SocketError::TooManyFds)));
    assert!(matches!(b.recv(), Err(SocketError::TooLong)));
    assert!(matches!(b.recv(), Err(SocketError::Decode(DecodeError::Magic))));
    assert_eq!(message(b.recv().unwrap()).0, Packet::Clock { seq: 1 });
}

#[test]
fn the_daemons_socket_is_private_and_exclusive_and_a_stale_one_is_replaced() {
    use std::os::unix::fs::PermissionsExt;
    let path = disk_path("socket");
    assert!(matches!(Connection::connect(&path), Err(SocketError::NoDaemon { .. })));
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(matches!(Listener::bind(&path), Err(SocketError::InUse { .. })));
    let _probe = listener.accept().unwrap();
    let client = Connection::connect(listener.path()).unwrap();
    let server = listener.accept().unwrap();
    let me = Peer {
        pid: std::process::id(),
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    assert_eq!((server.peer().unwrap(), client.peer().unwrap()), (me, me));
    client.send(&Packet::Fetch { token: Token([3; 16]) }, &[]).unwrap();
    assert_eq!(message(server.recv().unwrap()).0, Packet::Fetch { token: Token([3; 16]) });
    server.set_nonblocking(true).unwrap();
    assert!(matches!(server.recv().unwrap(), Received::Nothing));
    drop(listener);
    let next = Listener::bind(&path).unwrap();
    drop(next);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "a file").unwrap();
    assert!(matches!(Listener::bind(&path), Err(SocketError::NotSocket { .. })));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn shared_memory_is_seen_by_both_and_cannot_shrink() {
    let ours = SharedMap::create().unwrap();
    assert_eq!((ours.epoch.load(Ordering::SeqCst), ours.oldest_io()), (1, u64::MAX));
    let theirs = SharedMap::from_fd(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
    let slot = theirs.start_io(0);
    assert_eq!(ours.oldest_io(), 1);
    theirs.finish_io(slot);
    assert_eq!(theirs.advance(), 2);
    ours.intents[0].declare(7, [1, 2, 3, 4]);
    assert_eq!(theirs.intents[0].read(), Some((7, [1, 2, 3, 4])));
    assert_eq!(rustix::fs::ftruncate(ours.as_fd(), 0), Err(Errno::PERM));
}

#[test]
fn foreign_shared_memory_is_refused() {
    let refused = |fd: OwnedFd, word: &str| {
        let error = SharedMap::from_fd(fd).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    let memfd = |len: u64, seals| {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let len = rustix::fs::fstat(SharedMap::create().unwrap().as_fd()).unwrap().st_size as u64;
    assert!(len >= size_of::<Shared>() as u64);
    refused(memfd(len, SealFlags::empty()), "not sealed");
    refused(memfd(len + 4096, SealFlags::SHRINK), "expected");
    refused(memfd(len, SealFlags::SHRINK), "another layout");
    refused(std::fs::File::open("/dev/null").unwrap().into(), "not sealed");
    let altered = SharedMap::create().unwrap();
    altered.magic.store(SHARED_MAGIC + 1, Ordering::SeqCst);
    refused(altered.as_fd().try_clone_to_owned().unwrap(), "another layout");
}
