//! Fetching RAM from small daemons that run in threads of this process.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use pagoda_abi::attach::{List, Packet, Text};
use pagoda_abi::{REGIONS_MAX, Token};
use pagoda_api::CreatedVm;
use pagoda_api::attach::{FetchError, Fetched, fetch};
use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

const TOKEN: Token = Token(*b"0123456789abcdef");

fn memfd(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// Fetches regions of `memory` from a daemon that answers `answer` with files of `sizes`.
fn fetched(name: &str, answer: Option<Packet>, sizes: &[u64], memory: &[u64]) -> Result<Fetched, FetchError> {
    let path: PathBuf = std::env::temp_dir().join(format!("pagoda-fetch-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();

    let files: Vec<OwnedFd> = sizes.iter().map(|bytes| memfd(*bytes)).collect();
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
    let vm =
        CreatedVm { name: "web1".into(), token: TOKEN.to_hex(), attach_socket: path.clone(), shim: "/s.so".into() };
    let result = fetch(&vm, memory);
    daemon.join().unwrap();
    std::fs::remove_file(&path).unwrap();
    result
}

fn lens(memory: &[u64]) -> List<u64, REGIONS_MAX> {
    let mut lens = List::default();
    assert!(memory.iter().all(|bytes| lens.push(*bytes)));
    lens
}

#[test]
fn ram_and_monitor_arrive_close_on_exec() {
    let answer = Packet::Fetched { monitor: true, lens: lens(&[4096, 8192]) };
    let got = fetched("both", Some(answer), &[4096, 8192, 0], &[4096, 8192]).unwrap();
    assert_eq!((got.ram.len(), got.monitor.is_some()), (2, true));
    let size = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_size;
    assert_eq!((size(&got.ram[0]), size(&got.ram[1])), (4096, 8192));
    for fd in &got.ram {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let check = |name: &str, answer: Option<Packet>, sizes: &[u64], expected: &str| {
        let said = fetched(name, answer, sizes, &[4096]).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    };
    let good = Packet::Fetched { monitor: false, lens: lens(&[4096]) };
    check("closed", None, &[], "without an answer");
    check("few", Some(good), &[], "0 descriptors for 1 regions");
    check("many", Some(good), &[4096, 4096], "2 descriptors for 1 regions");
    check("small", Some(good), &[4095], "instead of 4096");
    check("other", Some(Packet::Welcome { flags: 0 }), &[], "Welcome");
    let wrong = Packet::Fetched { monitor: false, lens: lens(&[8192]) };
    check("lens", Some(wrong), &[8192], "regions of [8192]");
    let refused = Packet::Refused { text: Text::new("no such token") };
    check("refused", Some(refused), &[], "no such token");
}

#[test]
fn nobody_listens() {
    let vm = CreatedVm {
        name: "web1".into(),
        token: TOKEN.to_hex(),
        attach_socket: "/nonexistent/attach".into(),
        shim: "/s.so".into(),
    };
    assert!(matches!(fetch(&vm, &[4096]).unwrap_err(), FetchError::Io { .. }));
    let vm = CreatedVm { token: "xyz".into(), ..vm };
    assert!(matches!(fetch(&vm, &[4096]).unwrap_err(), FetchError::Token));
}
