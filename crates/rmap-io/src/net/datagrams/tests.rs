//! Real sockets on the loopback. It hands over in one buffer what was sent in one call, and joins nothing that was not: so what comes
//! shows what the kernel was given.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::port::Port;
use super::*;
use rmap::crypto::session::Session;
use rmap::units::{Class, Generation, PageNo, SEALED_SIZE, SpaceId, Version};
use rmap::wire::DATAGRAM_SIZES;
use rmap::wire::message::{Direction, Message, Op};

const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// What does not come is an error, not a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a receiver has got so far, by datagrams and by the kernel's buffers.
#[derive(Default)]
struct Arrived {
    datagrams: Vec<Vec<u8>>,
    /// The bytes of each of the kernel's buffers, and of each datagram but the last in it.
    buffers: Vec<(usize, usize)>,
}

impl Arrived {
    fn expect(&self, buffers: &[(usize, usize)], datagrams: &[Vec<u8>]) {
        assert_eq!(self.buffers, buffers);
        assert_eq!(lengths(&self.datagrams), lengths(datagrams));
        assert!(self.datagrams == datagrams, "other bytes came than were sent");
    }
}

fn lengths(datagrams: &[Vec<u8>]) -> Vec<usize> {
    datagrams.iter().map(Vec::len).collect()
}

fn bind() -> (Datagrams, SocketAddr) {
    let datagrams = Datagrams::bind(ANY).unwrap();
    let addr = datagrams.local_addr().unwrap();
    let (gso, gro) = datagrams.batches();
    assert!(gso > 1 && gro > 1, "this kernel has no GSO or no GRO");
    (datagrams, addr)
}

/// So many bytes, and nothing after them.
fn arrived(receiver: &mut Datagrams, from: SocketAddr, bytes: usize) -> Arrived {
    let deadline = Instant::now() + PATIENCE;
    let mut arrived = Arrived::default();
    while arrived.datagrams.iter().map(Vec::len).sum::<usize>() < bytes {
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        poll(&mut [PollFd::new(receiver, PollFlags::IN)], Some(&second)).unwrap();
        receiver.metas.fill(RecvMeta::default());
        let datagrams = &mut arrived.datagrams;
        let took = |addr, datagram: &mut [u8]| {
            assert_eq!(addr, from);
            datagrams.push(datagram.to_vec());
        };
        receiver.receive(took).unwrap();
        arrived.buffers.extend(receiver.metas.iter().map(|meta| (meta.len, meta.stride)).filter(|(len, _)| *len > 0));
        assert!(Instant::now() < deadline, "{:?} of {bytes} bytes", arrived.buffers);
    }
    assert!(!receiver.receive(|_, _| {}).unwrap(), "more than was sent");
    arrived
}

/// Bytes of which no two places near one another have the same.
fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

fn cut(contents: &[u8], segment: usize) -> Vec<Vec<u8>> {
    contents.chunks(segment).map(<[u8]>::to_vec).collect()
}

/// A page on its way in datagrams of at most `size` bytes, and how long each is.
fn page(size: usize) -> (Vec<u8>, usize) {
    let message = Message {
        op: Op::Write,
        class: Class::Eviction,
        direction: Direction::Request { cut: size as u16, generation: Generation(1) },
        id: 1,
        space: SpaceId(1),
        page: PageNo(0),
        version: Version::new(Generation(1), 1, false),
        payload: SEALED_SIZE as u16,
    };
    let mut out = Vec::new();
    let segment = Session::lay_out(&message, &content(SEALED_SIZE), size, &mut out);
    (out, segment)
}

/// Whatever the path carries.
#[test]
fn a_page_leaves_in_one_call() {
    let ((mut sender, from), (mut receiver, to)) = (bind(), bind());
    let mut counts = Vec::new();
    for size in DATAGRAM_SIZES {
        let (contents, segment) = page(size);
        sender.send(Transmit { to, segment }, &contents);
        let arrived = arrived(&mut receiver, from, contents.len());
        arrived.expect(&[(contents.len(), segment)], &cut(&contents, segment));
        counts.push(arrived.datagrams.len());
    }
    assert_eq!(counts, [4, 4, 3, 3, 1]);
}

#[test]
fn the_last_of_several_may_be_shorter() {
    let ((mut sender, from), (mut receiver, to)) = (bind(), bind());
    for last in [1, 700, 1199, 1200] {
        let contents = content(3 * 1200 + last);
        sender.send(Transmit { to, segment: 1200 }, &contents);
        let arrived = arrived(&mut receiver, from, contents.len());
        arrived.expect(&[(contents.len(), 1200)], &cut(&contents, 1200));
    }
}

/// Of whatever sizes, one after the other, as from several peers.
#[test]
fn what_comes_at_once_is_taken_apart_as_it_was_sent() {
    let ((mut sender, from), (mut receiver, to)) = (bind(), bind());
    let sent = [(1200, 1200), (700, 700), (700, 700), (3000, 1000), (1472, 1472), (2500, 1472), (60, 60)];
    let mut expected = Vec::new();
    for (length, segment) in sent {
        let contents = content(length);
        sender.send(Transmit { to, segment }, &contents);
        expected.extend(cut(&contents, segment));
    }
    let bytes = sent.iter().map(|(length, _)| length).sum();
    arrived(&mut receiver, from, bytes).expect(&sent, &expected);
}

/// What is sent to whom, in this order, by [`Port::send_all`].
fn send_all(port: &mut Port, messages: &[(Transmit, Vec<u8>)]) {
    let (mut out, mut messages) = (Vec::new(), messages.iter());
    port.send_all(&mut out, |out| {
        let (transmit, contents) = messages.next()?;
        out.extend_from_slice(contents);
        Some(*transmit)
    });
    assert_eq!(out, []);
}

/// Sends messages, each to one of some receivers, its bytes in datagrams of a length; each hears what was sent to it, in these calls.
fn expect_calls(sent: &[(usize, usize, usize)], calls: &[&[(usize, usize)]]) {
    let mut port = Port::bind(ANY).unwrap();
    let from = port.local_addr().unwrap();
    let mut receivers: Vec<(Datagrams, SocketAddr)> = calls.iter().map(|_| bind()).collect();
    let message = |(to, length, segment): &(usize, usize, usize)| {
        (Transmit { to: receivers[*to].1, segment: *segment }, content(*length))
    };
    let messages: Vec<(Transmit, Vec<u8>)> = sent.iter().map(message).collect();
    send_all(&mut port, &messages);
    for ((receiver, to), calls) in receivers.iter_mut().zip(calls) {
        let own = messages.iter().filter(|(transmit, _)| transmit.to == *to);
        let datagrams: Vec<_> = own.flat_map(|(transmit, contents)| cut(contents, transmit.segment)).collect();
        let bytes = calls.iter().map(|(length, _)| length).sum();
        arrived(receiver, from, bytes).expect(calls, &datagrams);
    }
}

/// What follows a shorter datagram, is of another size or goes elsewhere begins another call.
#[test]
fn messages_of_one_size_to_one_peer_leave_in_one_call() {
    let sent = [
        (0, 3600, 1200),
        (0, 2400, 1200),
        (0, 1700, 1200),
        (0, 1200, 1200),
        (0, 1600, 800),
        (1, 1600, 800),
        (1, 800, 800),
        (0, 800, 800),
    ];
    expect_calls(&sent, &[&[(7700, 1200), (1200, 1200), (1600, 800), (800, 800)], &[(2400, 800)]]);
}

#[test]
fn a_call_takes_no_more_than_the_kernel_does() {
    expect_calls(&[(0, 80, 80); 100], &[&[(64 * 80, 80), (36 * 80, 80)]]);
    expect_calls(&[(0, 4192, 4192); 20], &[&[(15 * 4192, 4192), (5 * 4192, 4192)]]);
}

/// More datagrams than any kernel cuts in a call are as good as a path without GSO.
#[test]
fn what_the_kernel_does_not_cut_goes_one_by_one() {
    let ((mut sender, from), (mut receiver, to)) = (bind(), bind());
    let contents = content(200 * 80 - 30);
    sender.send(Transmit { to, segment: 80 }, &contents);
    assert_eq!(sender.batches().0, 1, "the kernel has refused nothing");
    let one_by_one = arrived(&mut receiver, from, contents.len()).datagrams;
    assert!(one_by_one == cut(&contents, 80), "{:?}", lengths(&one_by_one));
    let (contents, segment) = page(1200);
    sender.send(Transmit { to, segment }, &contents);
    assert!(arrived(&mut receiver, from, contents.len()).datagrams == cut(&contents, segment), "what follows");
}

/// Somebody sends faster than is taken in: the caller has its turn, and the rest comes with the next one.
#[test]
fn a_turn_ends_while_more_is_there() {
    let ((mut sender, _), (mut receiver, to)) = (bind(), bind());
    let sent: usize = BATCH * BATCHES_A_TURN + 5;
    (0..sent).for_each(|_| sender.send(Transmit { to, segment: 60 }, &content(60)));
    let turn = |receiver: &mut Datagrams| {
        let mut came = 0;
        let any = receiver.receive(|_, _| came += 1).unwrap();
        assert_eq!(any, came > 0);
        came
    };
    assert_eq!([0; 3].map(|_| turn(&mut receiver)), [BATCH * BATCHES_A_TURN, 5, 0]);
}
