//! Streams over the loopback, with good and bad peers.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};

use pagoda_link::{Keypair, Link, LinkError, PublicKey, RECORD_MAX};

/// A wait that is over at once if all is well.
const SOON: Duration = Duration::from_secs(10);

fn keys(byte: u8) -> Keypair {
    Keypair::from_private([byte; 32])
}

fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Both ends of a stream.
fn pair() -> (Link, Link) {
    let (listener, address) = listen();
    let called = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Link::answer(&keys(2), stream, |key| {
            assert_eq!(*key, keys(1).public());
            Ok(())
        })
        .unwrap()
    });
    let caller = Link::connect(&keys(1), &keys(2).public(), &address).unwrap();
    (caller, called.join().unwrap())
}

#[test]
fn records_of_all_lengths_go_both_ways() {
    let (mut caller, mut called) = pair();
    assert_eq!(caller.peer, keys(2).public());
    assert_eq!(called.peer, keys(1).public());
    let contents: Vec<Vec<u8>> =
        [0, 1, 4096, 65_535, 65_536, RECORD_MAX].map(|len| (0..len).map(|at| at as u8).collect()).to_vec();
    let expected = contents.clone();
    let echo = thread::spawn(move || {
        for content in &expected {
            let got = called.receiver.receive().unwrap().to_vec();
            assert!(got == *content, "{} bytes", content.len());
            let mut draft = called.sender.draft();
            assert_eq!(draft.room(), RECORD_MAX);
            draft.space(got.len()).copy_from_slice(&got);
            draft.send().unwrap();
        }
        assert!(matches!(called.receiver.receive(), Err(LinkError::Closed)));
    });
    assert!(!caller.receiver.wait(Duration::ZERO).unwrap());
    for content in &contents {
        let (first, second) = content.split_at(content.len() / 3);
        caller.sender.send(&[first, second]).unwrap();
        assert!(caller.receiver.wait(SOON).unwrap());
        assert!(caller.receiver.receive().unwrap() == content, "{} bytes", content.len());
    }
    caller.sender.close().unwrap();
    echo.join().unwrap();
}

#[test]
fn who_is_not_trusted_hears_why() {
    let (listener, address) = listen();
    let called = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Link::answer(&keys(2), stream, |_| Err("it does not trust you:\u{7}\n run this".into())).unwrap_err()
    });
    let refused = Link::connect(&keys(1), &keys(2).public(), &address).unwrap_err();
    assert_eq!(refused.to_string(), "it refuses: it does not trust you:   run this");
    assert!(matches!(called.join().unwrap(), LinkError::Refused(_)));
}

#[test]
fn another_host_at_the_address_is_noticed() {
    let (listener, address) = listen();
    let called = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Link::answer(&keys(3), stream, |_| Ok(())).unwrap_err()
    });
    // It cannot read the hello, and says nothing.
    let error = Link::connect(&keys(1), &keys(2).public(), &address).unwrap_err();
    assert!(matches!(error, LinkError::Closed), "{error}");
    called.join().unwrap();
}

#[test]
fn what_is_no_pagodad_is_not_spoken_with() {
    let (listener, address) = listen();
    let called = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&[b'x'; 1000]).unwrap();
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
    });
    let error = Link::connect(&keys(1), &keys(2).public(), &address).unwrap_err();
    assert!(error.to_string().contains("no pagodad"), "{error}");
    called.join().unwrap();
}

/// A caller that sends a byte now and then does not hold a thread for long.
#[test]
fn a_caller_that_dawdles_is_given_up() {
    let (listener, address) = listen();
    let mut dawdler = TcpStream::connect(address).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let called = thread::spawn(move || Link::answer(&keys(2), stream, |_| Ok(())).unwrap_err());
    dawdler.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    // A read that ends for want of time is the pause; one that brings nothing is the end.
    while dawdler.write_all(b"p").is_ok()
        && dawdler.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    {}
    assert!(matches!(called.join().unwrap(), LinkError::Silent));
}

/// Whoever has heard a hello can send it once more, and nothing behind it.
#[test]
fn a_hello_that_is_sent_once_more_is_let_in_nowhere() {
    let (listener, address) = listen();
    let (between, proxy_address) = listen();
    let heard = thread::spawn(move || {
        let (mut caller, _) = between.accept().unwrap();
        let mut hello = [0; 112];
        caller.read_exact(&mut hello).unwrap();
        hello
    });
    assert!(Link::connect(&keys(1), &keys(2).public(), &proxy_address).is_err());
    let hello = heard.join().unwrap();
    let called = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Link::answer(&keys(2), stream, |_| panic!("nobody has shown a key")).unwrap_err()
    });
    let mut again = TcpStream::connect(address).unwrap();
    again.write_all(&hello).unwrap();
    again.write_all(&[&[17, 0, 0, 0][..], &[0x55; 17]].concat()).unwrap();
    let mut answer = Vec::new();
    let _ = again.read_to_end(&mut answer);
    assert_eq!(answer.len(), 64, "the handshake, and no record");
    assert!(matches!(called.join().unwrap(), LinkError::NotAuthentic));
}

/// Whoever is between the two can cut and change, and no changed byte gets through.
#[test]
fn what_is_changed_on_its_way_ends_the_stream() {
    let (listener, address) = listen();
    let (between, proxy_address) = listen();
    const AT: usize = 5000;
    thread::spawn(move || {
        let (caller, _) = between.accept().unwrap();
        let called = TcpStream::connect(address).unwrap();
        let mut back = (called.try_clone().unwrap(), caller.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut back.0, &mut back.1));
        let (mut from, mut to) = (caller, called);
        let mut passed = 0;
        let mut piece = [0; 1000];
        while let Ok(len @ 1..) = from.read(&mut piece) {
            if (passed..passed + len).contains(&AT) {
                piece[AT - passed] ^= 0x10;
            }
            passed += len;
            if to.write_all(&piece[..len]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    let called = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut link = Link::answer(&keys(2), stream, |_| Ok(())).unwrap();
        let mut good = 0;
        loop {
            match link.receiver.receive() {
                Ok(record) => {
                    assert!(record.iter().all(|byte| *byte == 7));
                    good += 1;
                }
                Err(error) => return (good, error),
            }
        }
    });
    let mut link = Link::connect(&keys(1), &keys(2).public(), &proxy_address).unwrap();
    for _ in 0..10 {
        if link.sender.send(&[&[7; 1000]]).is_err() {
            break;
        }
    }
    let (good, error) = called.join().unwrap();
    assert!(matches!(error, LinkError::NotAuthentic), "{error}");
    assert_eq!(good, 4, "those before the changed byte");
}

#[test]
fn a_cut_wakes_who_waits() {
    let (caller, mut called) = pair();
    let Link { sender, mut receiver, .. } = caller;
    let waiting = thread::spawn(move || receiver.receive().map(<[u8]>::to_vec).unwrap_err());
    sender.cut();
    assert!(matches!(waiting.join().unwrap(), LinkError::Closed));
    assert!(matches!(called.receiver.receive(), Err(LinkError::Closed)));
}

#[test]
fn a_host_that_is_not_there_is_named() {
    // Bound, and so nobody else's, but not listened on.
    let bound = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&bound, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddrV4::try_from(rustix::net::getsockname(&bound).unwrap()).unwrap().to_string();
    let error = Link::connect(&keys(1), &PublicKey([9; 32]), &address).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    let error = Link::connect(&keys(1), &keys(2).public(), "no address").unwrap_err();
    assert!(matches!(error, LinkError::Io(_)), "{error}");
}
