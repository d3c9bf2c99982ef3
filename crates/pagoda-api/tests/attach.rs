//! Fetching a monitor from small daemons that run in threads of this process.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use pagoda_abi::attach::{List, Packet, Text};
use pagoda_abi::{REGIONS_MAX, Token};
use pagoda_api::CreatedVm;
use pagoda_api::attach::{FetchError, fetch};
use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

const TOKEN: Token = Token(*b"0123456789abcdef");

/// Fetches from a daemon that answers `answer` with so many files.
fn fetched(name: &str, answer: Option<Packet>, files: usize) -> Result<Option<OwnedFd>, FetchError> {
    let path: PathBuf = std::env::temp_dir().join(format!("pagoda-fetch-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();

    let memfd = || rustix::fs::memfd_create("monitor", MemfdFlags::CLOEXEC).unwrap();
    let files: Vec<OwnedFd> = (0..files).map(|_| memfd()).collect();
    let daemon = std::thread::spawn(move || {
        let peer = rustix::net::accept(&listener).unwrap();
        let mut bytes = [0; 64];
        let got = rustix::net::recvmsg(
            &peer,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut RecvAncillaryBuffer::default(),
            RecvFlags::empty(),
        )
        .unwrap();
        assert_eq!(Packet::decode(&bytes[..got.bytes]), Ok(Packet::Fetch { token: TOKEN }));
        let Some(answer) = answer else { return };
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        rustix::net::sendmsg(&peer, &[IoSlice::new(answer.encode().as_bytes())], &mut control, SendFlags::NOSIGNAL)
            .unwrap();
    });
    let vm = CreatedVm {
        name: "web1".into(),
        token: TOKEN.to_hex(),
        attach_socket: path.clone(),
        shim: "/s.so".into(),
        outbox_token: None,
    };
    let result = fetch(&vm);
    daemon.join().unwrap();
    std::fs::remove_file(&path).unwrap();
    result
}

fn answer(monitor: bool, lens: &[u64]) -> Option<Packet> {
    let mut list = List::default();
    assert!(lens.iter().all(|bytes| list.push(*bytes)));
    Some(Packet::Fetched { monitor, lens: list })
}

#[test]
fn the_monitor_arrives_close_on_exec() {
    let monitor = fetched("monitor", answer(true, &[]), 1).unwrap().unwrap();
    assert!(rustix::io::fcntl_getfd(&monitor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    assert!(fetched("plain", answer(false, &[]), 0).unwrap().is_none());
}

#[test]
fn what_does_not_fit_is_refused() {
    let check = |name: &str, answer: Option<Packet>, files: usize, expected: &str| {
        let said = fetched(name, answer, files).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    };
    check("closed", None, 0, "without an answer");
    check("few", answer(true, &[]), 0, "something else");
    check("many", answer(false, &[]), 1, "something else");
    // An older daemon would hand over RAM as well.
    check("ram", answer(true, &[4096]), 2, "something else");
    check("other", Some(Packet::Welcome { flags: 0 }), 0, "Welcome");
    let refused = Packet::Refused { text: Text::new("no such token") };
    check("refused", Some(refused), 0, "no such token");
}

#[test]
fn nobody_listens() {
    let vm = CreatedVm {
        name: "web1".into(),
        token: TOKEN.to_hex(),
        attach_socket: "/nonexistent/attach".into(),
        shim: "/s.so".into(),
        outbox_token: None,
    };
    assert!(matches!(fetch(&vm).unwrap_err(), FetchError::Io { .. }));
    let vm = CreatedVm { token: "xyz".into(), ..vm };
    assert!(matches!(fetch(&vm).unwrap_err(), FetchError::Token));
}
