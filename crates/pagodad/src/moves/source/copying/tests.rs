//! Rounds over the loopback device, with an engine and a destination of the test: what arrives is what the guest has at its stop,
//! also if the connection is cut in between.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};

use pagoda_core::bits::PageSet;
use pagoda_core::chance::Chance;
use pagoda_core::fault::{ChunkOrder, Pages};
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_link::hosts::Host;
use pagoda_link::{Keypair, Link};
use pagoda_move::arrival::Arrival;
use pagoda_move::rounds::{Mode, OnTimeout};
use pagoda_move::units::AttemptId;
use pagoda_move::wire::{Codec, Control, Data, RunKind};
use pagoda_pager::handle::{Content, CopyOrder, Inbox, Way, channel_pair};

use super::*;
use crate::moves::channel::{Accepted, ControlSender, DataReceiver, STREAMS, connect};

const ATTEMPT: AttemptId = AttemptId(5);
const PAGES: PageCount = PageCount(3 * 256 + 44);

/// What the guest has: each page is filled with one byte.
#[derive(Debug)]
struct Ram {
    bytes: Vec<u8>,
    written: BTreeSet<u64>,
    clock: u64,
    /// What the pool has of each page.
    pool: Vec<Option<u8>>,
}

impl Ram {
    fn write(&mut self, page: u64, byte: u8) {
        self.bytes[page as usize] = byte;
        self.written.insert(page);
    }

    fn look(&mut self) -> Look {
        self.clock += 1;
        let mut map = PageMap::empty(PAGES);
        std::mem::take(&mut self.written).into_iter().for_each(|page| map.insert(PageIdx(page)));
        let written: Vec<(_, PageSet)> = map.filled().collect();
        Look { written, protected_at: self.clock, oldest_io: u64::MAX }
    }

    fn copy(&self, pages: Pages) -> Copied {
        let first = pages.first().0 as usize;
        let bytes = &self.bytes[first..first + usize::from(pages.run.len)];
        let content = match bytes.iter().all(|byte| *byte == 0) {
            true => Content::Zeros,
            false => Content::Bytes(bytes.iter().flat_map(|byte| [*byte; PAGE_SIZE as usize]).collect()),
        };
        Copied { pages, content }
    }

    /// As a copy, but that the pool takes it.
    fn place(&mut self, pages: Pages) -> Copied {
        let copied = self.copy(pages);
        if matches!(copied.content, Content::Zeros) {
            return copied;
        }
        let first = pages.first().0 as usize;
        for page in first..first + usize::from(pages.run.len) {
            self.pool[page] = Some(self.bytes[page]);
        }
        Copied { pages, content: Content::Placed }
    }

    fn content(&self) -> Vec<(ChunkIdx, PageSet)> {
        let mut map = PageMap::empty(PAGES);
        (0..PAGES.0).filter(|page| self.bytes[*page as usize] != 0).for_each(|page| map.insert(PageIdx(page)));
        map.filled().collect()
    }
}

fn serve(inbox: &Inbox, ram: &Mutex<Ram>, is_over: &AtomicBool, seed: u64) {
    let mut chance = Chance::new(seed);
    let mut orders: Vec<CopyOrder> = Vec::new();
    // The pool has acknowledged them.
    let mut placed: Vec<(Sender<Copied>, Copied)> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        match inbox.next() {
            Some(Command::LookForWrites(asker)) => drop(asker.send(Ok(ram.lock().unwrap().look()))),
            Some(Command::CopyOut(order)) => orders.push(order),
            Some(Command::AskOrder(asker)) => {
                let in_dram = PAGES.chunks_ceil().iter().collect();
                drop(asker.send(ChunkOrder { in_dram, ..ChunkOrder::default() }));
            }
            Some(Command::AskContent(asker)) => drop(asker.send(ram.lock().unwrap().content())),
            Some(_) => {}
            None if !placed.is_empty() && chance.per_mille(500) => {
                let (to, copied) = placed.swap_remove(chance.within(0, placed.len() as u64 - 1) as usize);
                drop(to.send(copied));
            }
            // The engine answers orders in any order.
            None if !orders.is_empty() => {
                let order = orders.swap_remove(chance.within(0, orders.len() as u64 - 1) as usize);
                // The pool takes most of what it may have.
                if order.way == Way::Place && chance.per_mille(800) {
                    placed.push((order.to, ram.lock().unwrap().place(order.pages)));
                } else {
                    drop(order.to.send(ram.lock().unwrap().copy(order.pages)));
                }
            }
            None => thread::yield_now(),
        }
    }
}

/// What the destination of the test has received.
#[derive(Debug)]
struct Arrived {
    bytes: Vec<u8>,
    arrival: Arrival,
    newest: ConnectionNo,
    control: Option<ControlSender>,
}

fn take(mut receiver: DataReceiver, arrived: &Mutex<Arrived>) {
    let Ok(Some(Data::Open { attempt, connection, stream, round })) = receiver.receive() else { return };
    {
        let mut arrived = arrived.lock().unwrap();
        if connection > arrived.newest {
            arrived.newest = connection;
            arrived.arrival.connect();
        }
        arrived.arrival.open(attempt, stream, round).unwrap();
    }
    while let Ok(Some(data)) = receiver.receive() {
        let mut arrived = arrived.lock().unwrap();
        if arrived.newest != connection {
            return;
        }
        match data {
            Data::Run { pages, kind } => {
                assert!(arrived.arrival.counts(stream, pages).unwrap());
                let content = match kind {
                    RunKind::Content(Codec::Raw, content) => content,
                    RunKind::Zero => &[],
                    other => panic!("{other:?}"),
                };
                for (index, page) in pages.iter().enumerate() {
                    arrived.bytes[page.0 as usize] = content.get(index * PAGE_SIZE as usize).copied().unwrap_or(0);
                }
            }
            Data::RoundEnd { round } => {
                let kept = arrived.arrival.end_round(stream, round).unwrap();
                if let (Some(round), Some(control)) = (kept, &arrived.control) {
                    let _ = control.send(&Control::RoundKept { attempt: ATTEMPT, round });
                }
            }
            Data::Open { .. } => panic!("opened twice"),
        }
    }
}

fn settings() -> Settings {
    Settings {
        mode: Mode::Precopy,
        downtime_max: Duration::from_millis(200),
        stop_cost: Duration::from_millis(1),
        bandwidth_max: None,
        time_max: None,
        on_timeout: OnTimeout::Abort,
    }
}

/// Moves until all is there, and gives what is in the pool instead. The guest writes, and the connection is cut so often. Every other connection compresses pages.
fn drive(
    (called, own): (&Host, &Keypair),
    engine: &Arc<Handle>,
    ram: &Mutex<Ram>,
    chance: &mut Chance,
    mut cuts: u32,
    extent: Extent,
) -> PageMap {
    let (own_inputs, inputs): (_, Receiver<Input>) = channel();
    let (began, mut no) = (Instant::now(), 1);
    let open = |no, round| {
        let connection = connect(own, called, "web1", STREAMS).unwrap();
        let line = Line::open(ConnectionNo(no), connection, ATTEMPT, round, &own_inputs).unwrap();
        if no % 2 == 1 {
            line.let_compress(None, true);
        }
        line
    };
    let mut line = open(no, RoundNo(0));
    let mut copying =
        Copying::begin(engine, settings(), extent, ConnectionNo(1), &own_inputs, Moment(began.elapsed())).unwrap();
    let mut writes = 600;
    loop {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "it does not end: {:?}",
            copying.rounds.progress(Moment::default())
        );
        let now = || Moment(began.elapsed());
        match inputs.recv_timeout(Duration::from_millis(1)) {
            Ok(Input::Copied(no, copied)) => copying.copied(no, copied, &line).unwrap(),
            Ok(Input::Sent { connection, gone }) => copying.sent(connection, gone),
            Ok(Input::Received(no, Control::RoundKept { round, .. }, _)) if no == line.no => {
                let has_all = copying.kept(round, now());
                if has_all {
                    return copying.handed_over().clone();
                }
            }
            _ => {}
        }
        if !copying.is_stopped && writes > 0 {
            writes -= 1;
            let byte = if chance.per_mille(400) { 0 } else { chance.within(1, 255) as u8 };
            ram.lock().unwrap().write(chance.within(0, PAGES.0 - 1), byte);
        }
        if cuts > 0 && chance.per_mille(10) {
            cuts -= 1;
            line.cut();
            copying.lost_link();
            no += 1;
            line = open(no, copying.round());
        }
        match copying.pump(&line, now()) {
            Turn::Wait(_) | Turn::SendState(_) => {}
            Turn::Switch => copying.stopped(now()).unwrap(),
            Turn::GiveUp(why) => panic!("{why}"),
        }
    }
}

fn check(seed: u64, cuts: u32) {
    let extent = Extent { pages: PAGES, dram: PAGES, is_split: false };
    assert!(check_with(seed, cuts, extent).is_empty());
}

/// Gives what went into the pool.
fn check_with(seed: u64, cuts: u32, extent: Extent) -> PageMap {
    let mut chance = Chance::new(seed);
    let bytes = (0..PAGES.0).map(|_| if chance.per_mille(500) { 0 } else { chance.within(1, 255) as u8 }).collect();
    // The first look has all pages.
    let ram = Ram { bytes, written: (0..PAGES.0).collect(), clock: 0, pool: vec![None; PAGES.0 as usize] };
    let (ram, is_over) = (Arc::new(Mutex::new(ram)), Arc::new(AtomicBool::new(false)));
    let (handle, inbox) = channel_pair().unwrap();
    let engine = {
        let (ram, is_over) = (Arc::clone(&ram), Arc::clone(&is_over));
        thread::spawn(move || serve(&inbox, &ram, &is_over, seed))
    };
    let (own, theirs) = (Keypair::from_private([1; 32]), Keypair::from_private([2; 32]));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let host = Host { name: "b".to_owned(), key: theirs.public(), address };
    let arrived = Arc::new(Mutex::new(Arrived {
        bytes: vec![0; PAGES.0 as usize],
        arrival: Arrival::new(ATTEMPT, PAGES, STREAMS),
        newest: ConnectionNo(0),
        control: None,
    }));
    let there = Arc::clone(&arrived);
    // It ends with the test.
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let mut link = Link::answer(&theirs, stream, |_| Ok(())).unwrap();
            let first = link.receiver.receive().unwrap().to_vec();
            match Accepted::new(link, &first).unwrap() {
                Accepted::Control(_, sender, mut receiver) => {
                    there.lock().unwrap().control = Some(sender);
                    thread::spawn(move || while receiver.receive().is_ok() {});
                }
                Accepted::Data(receiver) => {
                    let there = Arc::clone(&there);
                    thread::spawn(move || take(receiver, &there));
                }
                Accepted::Disk(..) => panic!("no disk is copied"),
            }
        }
    });
    let in_pool = drive((&host, &own), &Arc::new(handle), &ram, &mut chance, cuts, extent);
    is_over.store(true, Ordering::Relaxed);
    engine.join().unwrap();
    let (ram, arrived) = (ram.lock().unwrap(), arrived.lock().unwrap());
    let has = |page: usize| match in_pool.contains(PageIdx(page as u64)) {
        true => ram.pool[page],
        false => Some(arrived.bytes[page]),
    };
    let wrong: Vec<usize> = (0..PAGES.0 as usize).filter(|page| Some(ram.bytes[*page]) != has(*page)).collect();
    assert!(wrong.is_empty(), "seed {seed}: pages {wrong:?} are not those of the guest");
    in_pool
}

/// What does not fit is in the pool, or has come.
#[test]
fn what_is_in_the_pool_and_what_arrives_are_what_the_guest_has() {
    for seed in 1..9 {
        let extent = Extent { pages: PAGES, dram: PageCount(140), is_split: true };
        let in_pool = check_with(seed, if seed % 2 == 0 { 3 } else { 0 }, extent);
        println!("seed {seed}: {} pages in the pool", in_pool.count().0);
        assert!(in_pool.count().0 > 32, "seed {seed}");
        // The first chunk is the hottest, and fits.
        assert!(in_pool.chunk(ChunkIdx(0)).is_empty(), "seed {seed}");
    }
}

#[test]
fn what_arrives_is_what_the_guest_has() {
    (1..4).for_each(|seed| check(seed, 0));
}

#[test]
fn connections_that_are_cut_lose_nothing() {
    (1..9).for_each(|seed| check(seed, 4));
}
