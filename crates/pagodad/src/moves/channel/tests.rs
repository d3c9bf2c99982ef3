//! Two ends over the loopback device.

use std::net::TcpListener;
use std::time::Instant;

use pagoda_core::bits::Run;
use pagoda_core::units::{Bytes, ChunkIdx};
use pagoda_move::map::PageRun;
use pagoda_move::units::{AttemptId, RoundNo};
use pagoda_move::wire::{Codec, RunKind};

use super::*;

const ATTEMPT: AttemptId = AttemptId(7);

/// A stream that was called, and its other end, as bare streams.
fn streams() -> (Link, Link) {
    let keys = |byte: u8| Keypair::from_private([byte; 32]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answer = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Link::answer(&keys(2), stream, |_| Ok(())).unwrap()
    });
    let called = Link::connect(&keys(1), &keys(2).public(), &address).unwrap();
    (called, answer.join().unwrap())
}

fn times(keep_alive: u64, silence: u64) -> Times {
    Times { keep_alive: Duration::from_millis(keep_alive), silence: Duration::from_millis(silence) }
}

fn accepted(mut link: Link, times: Times) -> Accepted {
    let first = link.receiver.receive().unwrap().to_vec();
    assert!(is_of_move(&first));
    Accepted::with(link, &first, times).unwrap()
}

fn data_ends() -> (DataSender, DataReceiver) {
    let (mut called, answered) = streams();
    called.sender.send(&[&[MOVE_DATA]]).unwrap();
    let Accepted::Data(receiver) = accepted(answered, TIMES) else { panic!("a data stream") };
    (DataSender::new(called).unwrap(), receiver)
}

#[test]
fn a_connection_has_a_control_stream_and_data_streams() {
    let own = Keypair::from_private([1; 32]);
    let theirs = Keypair::from_private([2; 32]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = Host { name: "b".to_owned(), key: theirs.public(), address: listener.local_addr().unwrap().to_string() };
    let answer = thread::spawn(move || {
        let take = |_: u8| accepted(Link::answer(&theirs, listener.accept().unwrap().0, |_| Ok(())).unwrap(), TIMES);
        (0..3).map(take).collect::<Vec<Accepted>>()
    });
    let connection = connect(&own, &host, "web1", STREAMS).unwrap();
    let ends = answer.join().unwrap();
    let ends: [Accepted; 3] = ends.try_into().unwrap();
    let [Accepted::Control(vm, sender, mut receiver), Accepted::Data(_), Accepted::Data(_)] = ends else {
        panic!("the control stream is first")
    };
    assert_eq!(vm, "web1");
    let (own_sender, mut own_receiver) = connection.control;
    own_sender.send(&Control::Whole { attempt: ATTEMPT }).unwrap();
    assert_eq!(receiver.receive().unwrap(), Control::Whole { attempt: ATTEMPT });
    // Both ways, from several threads, and longer than a record.
    let part = |offset: u64| {
        let bytes = vec![offset as u8; 256 << 10];
        Control::State { attempt: ATTEMPT, offset: Bytes(offset), bytes }
    };
    let threads: Vec<_> = (0..4)
        .map(|offset| {
            let sender = sender.clone();
            thread::spawn(move || sender.send(&part(offset)).unwrap())
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let mut received: Vec<Control> = (0..4).map(|_| own_receiver.receive().unwrap()).collect();
    received.sort_by_key(|message| match message {
        Control::State { offset, .. } => offset.0,
        _ => u64::MAX,
    });
    assert_eq!(received, (0..4).map(part).collect::<Vec<_>>());
    // What was queued is sent before the end.
    own_sender.send(&Control::Forgotten { attempt: ATTEMPT }).unwrap();
    drop(own_sender);
    assert_eq!(receiver.receive().unwrap(), Control::Forgotten { attempt: ATTEMPT });
    assert!(matches!(receiver.receive(), Err(ChannelError::Link(LinkError::Closed))));
}

#[test]
fn frames_are_longer_than_records_and_shorter() {
    let (mut sender, mut receiver) = data_ends();
    let run = |chunk: u32, len: u16| PageRun { chunk: ChunkIdx(chunk), run: Run { start: 0, len } };
    let content: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 4096) as u8 ^ at as u8).collect();
    let whole = content.clone();
    let send = thread::spawn(move || {
        for chunk in 0..5 {
            let kind = RunKind::Content(Codec::Raw, &whole);
            sender.send(&Data::Run { pages: run(chunk, 256), kind }).unwrap();
            sender.send(&Data::Run { pages: run(chunk, 1), kind: RunKind::Zero }).unwrap();
        }
        sender.send(&Data::RoundEnd { round: RoundNo(3) }).unwrap();
        sender.flush().unwrap();
        sender.flush().unwrap();
    });
    for chunk in 0..5 {
        let kind = RunKind::Content(Codec::Raw, &content);
        assert!(receiver.receive().unwrap() == Some(Data::Run { pages: run(chunk, 256), kind }), "chunk {chunk}");
        assert_eq!(receiver.receive().unwrap(), Some(Data::Run { pages: run(chunk, 1), kind: RunKind::Zero }));
    }
    assert_eq!(receiver.receive().unwrap(), Some(Data::RoundEnd { round: RoundNo(3) }));
    send.join().unwrap();
    assert_eq!(receiver.receive().unwrap(), None);
}

#[test]
fn compressed_pages_come_as_they_were() {
    let (mut sender, mut receiver) = data_ends();
    let pages = |chunk| PageRun { chunk: ChunkIdx(chunk), run: Run { start: 3, len: 64 } };
    let content: Vec<u8> = (0..64 << 12).map(|at: u32| (at / 100) as u8).collect();
    let block = lz4_flex::block::compress(&content);
    let whole = content.clone();
    let send = thread::spawn(move || {
        for chunk in 0..3 {
            let kind = RunKind::Content(Codec::Lz4, &block);
            sender.send(&Data::Run { pages: pages(chunk), kind }).unwrap();
            let kind = RunKind::Content(Codec::Raw, &whole);
            sender.send(&Data::Run { pages: pages(chunk), kind }).unwrap();
        }
        // A block of fewer pages than its run has.
        let short = lz4_flex::block::compress(&whole[4096..]);
        sender.send(&Data::Run { pages: pages(9), kind: RunKind::Content(Codec::Lz4, &short) }).unwrap();
        sender.flush().unwrap();
    });
    for chunk in [0, 0, 1, 1, 2, 2] {
        let data = Data::Run { pages: pages(chunk), kind: RunKind::Content(Codec::Raw, &content) };
        assert!(receiver.receive().unwrap() == Some(data), "chunk {chunk}");
    }
    let error = receiver.receive().unwrap_err();
    assert!(matches!(&error, ChannelError::Malformed(_)) && error.to_string().contains("shorter"), "{error}");
    send.join().unwrap();
}

#[test]
fn garbage_ends_a_stream() {
    let check = |records: &[&[u8]], expected: fn(&ChannelError) -> bool| {
        let (mut called, answered) = streams();
        called.sender.send(&[&[MOVE_DATA]]).unwrap();
        let Accepted::Data(mut receiver) = accepted(answered, TIMES) else { panic!("a data stream") };
        records.iter().for_each(|record| called.sender.send(&[record]).unwrap());
        drop(called);
        let error = receiver.receive().unwrap_err();
        assert!(expected(&error), "{records:?}: {error}");
    };
    let is_malformed = |error: &ChannelError| matches!(error, ChannelError::Malformed(_));
    check(&[&[9, 0, 0, 0, 8, 0, 0, 0]], is_malformed);
    // There is no room for what is too long, however little of it has come.
    check(&[&[2, 0, 0, 0, 255, 255, 255, 255]], is_malformed);
    check(&[&[7, 0, 0, 0, 5, 0, 0, 0, 1, 2, 3, 4, 5]], is_malformed);
    check(&[&[7, 0, 0], &[0, 4], &[0, 0, 0, 1, 2]], |error| matches!(error, ChannelError::CutShort));
    check(&[&[7]], |error| matches!(error, ChannelError::CutShort));
}

#[test]
fn a_first_record_that_no_move_begins_with_is_refused() {
    for first in [&[MOVE_CONTROL, 0xff][..], &[MOVE_CONTROL; TEXT_MAX + 2], &[MOVE_DATA, 0], &[4], &[7], &[]] {
        let (_called, answered) = streams();
        assert!(Accepted::new(answered, first).is_err(), "{first:?}");
    }
    assert!(!is_of_move(&[1]) && !is_of_move(&[]) && is_of_move(&[MOVE_DATA]));
}

#[test]
fn an_idle_control_stream_lives_and_a_silent_one_ends() {
    let (mut called, answered) = streams();
    called.sender.send(&[&[MOVE_CONTROL]]).unwrap();
    let Accepted::Control(_, _sender, mut receiver) = accepted(answered, times(10_000, 200)) else { panic!() };
    let (sender, _receiver) = control(called, times(20, 10_000)).unwrap();
    let began = Instant::now();
    let later = thread::spawn(move || {
        // Longer than it may be silent, and nobody says anything.
        let (_nobody, nothing) = channel::<()>();
        nothing.recv_timeout(Duration::from_millis(700)).unwrap_err();
        sender.send(&Control::Whole { attempt: ATTEMPT }).unwrap();
        sender
    });
    assert_eq!(receiver.receive().unwrap(), Control::Whole { attempt: ATTEMPT });
    assert!(began.elapsed() > Duration::from_millis(600));
    drop(later.join().unwrap());

    let (mut called, answered) = streams();
    called.sender.send(&[&[MOVE_CONTROL]]).unwrap();
    let Accepted::Control(_, _sender, mut receiver) = accepted(answered, times(10_000, 200)) else { panic!() };
    assert!(matches!(receiver.receive(), Err(ChannelError::Link(LinkError::Silent))));
    drop(called);
}

#[test]
fn a_cut_ends_whoever_waits() {
    let (sender, mut receiver) = data_ends();
    let waits = thread::spawn(move || receiver.receive().map(|data| data.is_none()));
    drop(sender);
    assert!(waits.join().unwrap().unwrap());
    let (mut sender, _receiver) = data_ends();
    let cutter = sender.cutter();
    let sends = thread::spawn(move || {
        let content = vec![1; 1 << 20];
        let pages = PageRun { chunk: ChunkIdx(0), run: Run { start: 0, len: 256 } };
        while sender.send(&Data::Run { pages, kind: RunKind::Content(Codec::Raw, &content) }).is_ok() {}
    });
    cutter.cut();
    sends.join().unwrap();
    let (mut called, answered) = streams();
    called.sender.send(&[&[MOVE_CONTROL]]).unwrap();
    let Accepted::Control(_, control, mut receiver) = accepted(answered, TIMES) else { panic!() };
    let waits = thread::spawn(move || receiver.receive().is_err());
    control.cut();
    assert!(waits.join().unwrap());
}
