//! Two servers, the owner of a slab at both, and what is lost and doubled between them.

use super::*;
use crate::units::{SEALED_SIZE, SlabNo};
use crate::wire::copy::{CopyOrder, ORDER_SIZE, RATE_MIN};

const SPACE: SpaceId = SpaceId(6);
const SOURCE: usize = 0;
const TARGET: usize = 1;

fn keys(server: usize) -> Keypair {
    Keypair::from_private([20 + server as u8; KEY_SIZE])
}

fn address(server: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 100 + server as u16))
}

fn version(sequence: u64, trimmed: bool) -> Version {
    Version::new(Generation(1), sequence, trimmed)
}

struct Pair {
    servers: [Server; 2],
    owners: [Session; 2],
    now: Time,
    /// Bytes and datagrams between the servers, both ways.
    bytes: [usize; 2],
    datagrams: u64,
}

impl Pair {
    /// Both have the slab: the source since grant 1, the target since grant 2.
    fn new() -> Pair {
        let server = |index: usize| {
            let config = ServerConfig {
                id: ServerId(index as u32),
                keys: keys(index),
                pool: PoolKey::new([3; KEY_SIZE]),
                admitted: vec![client_keys().public()],
                slabs: 2 + TRANSFERS_MAX,
                slab_size: SlabSize::new(64).unwrap(),
                quota: 99,
                epoch: BootEpoch(4),
                medium: None,
            };
            Server::new(config, Box::new(Counting(1 + index as u64))).unwrap()
        };
        let mut servers = [server(SOURCE), server(TARGET)];
        let owners = [SOURCE, TARGET].map(|index| {
            let entropy = SharedEntropy::new(Box::new(Counting(2)));
            let (head, key) = (Head::Hello { versions: SPOKEN, sender: 9 }, keys(index).public());
            let pool = PoolKey::new([3; KEY_SIZE]);
            let mut initiator = Initiator::new(&client_keys(), &key, &pool, head, &entropy);
            let (mut hello, mut out) = (initiator.hello, Vec::new());
            servers[index].on_datagram(Time(0), addr(), &mut hello);
            servers[index].poll_transmit(&mut out).expect("an answer");
            let Ok(Head::Accept { sender, .. }) = Head::decode(&out) else { panic!("not accepted") };
            Session::client(&initiator.finish(&out).unwrap().0, sender)
        });
        let mut pair = Pair { servers, owners, now: Time(1_000_000), bytes: [0; 2], datagrams: 0 };
        for index in [SOURCE, TARGET] {
            assert_eq!(pair.ask(index, &pair.about(Op::Fence, 0, 0), &[]).0, Status::Ok);
        }
        assert_eq!(pair.ask(SOURCE, &pair.about(Op::Grant, 0, 1), &NO_EPOCH).0, Status::Ok);
        assert_eq!(pair.ask(TARGET, &pair.about(Op::Grant, 0, 2), &NO_EPOCH).0, Status::Ok);
        pair
    }

    fn about(&self, op: Op, page: u64, sequence: u64) -> Message {
        Message { page: PageNo(page), version: version(sequence, false), ..request(op) }
    }

    /// The owner asks one of them; the reply's version comes with the status.
    fn ask(&mut self, index: usize, message: &Message, payload: &[u8]) -> (Status, u64) {
        let (mut datagrams, mut out) = (Vec::new(), Vec::new());
        let message = Message { payload: payload.len() as u16, ..*message };
        let length = self.owners[index].seal(&message, payload, DATAGRAM_MAX, &mut datagrams);
        datagrams.chunks_mut(length).for_each(|d| self.servers[index].on_datagram(self.now, addr(), d));
        assert_eq!(self.servers[index].poll_transmit(&mut out).map(|transmit| transmit.to), Some(addr()));
        let Ok(Head::Data { epoch, counter, .. }) = Head::decode(&out) else { panic!("no reply") };
        let (reply, ..) = Message::decode(self.owners[index].open(epoch, counter, &mut out).unwrap()).unwrap();
        let Direction::Reply { status, .. } = reply.direction else { panic!("no reply") };
        (status, reply.version.bits())
    }

    fn write(&mut self, index: usize, page: u64, sequence: u64) {
        let byte = sequence as u8;
        let status = self.ask(index, &self.about(Op::Write, page, sequence), &[byte; SEALED_SIZE]).0;
        assert_eq!(status, Status::Ok);
    }

    fn admit(&mut self, sequence: u64) -> Status {
        let key = keys(SOURCE).public().0;
        self.ask(TARGET, &self.about(Op::Admit, 0, sequence), &key).0
    }

    fn order(&self) -> [u8; ORDER_SIZE] {
        let (key, addr, grant) = (keys(TARGET).public(), address(TARGET), version(2, false));
        CopyOrder { key, addr, bytes_per_second: 1_000_000_000, grant }.encode()
    }

    /// Begins the copy of the slab of `page`, or asks how far it is.
    fn copy(&mut self, page: u64, order: &[u8]) -> (Status, u64) {
        let grant = if page == 0 { 1 } else { page };
        self.ask(SOURCE, &self.about(Op::Copy, page, grant), order)
    }

    fn progress(&mut self) -> Option<Progress> {
        self.servers[SOURCE].transfers.report_progress(SPACE, SlabNo(0))
    }

    /// What they say to each other, until the transfer ends or `until` datagrams were sent. Of a thousand, `loss` are lost
    /// and as many doubled.
    fn run(&mut self, loss: u64, until: u64) {
        let mut chance = Counting(77);
        while self.progress() == Some(Progress::Running) && self.datagrams < until {
            let mut quiet = true;
            for index in [SOURCE, TARGET] {
                let mut out = Vec::new();
                while let Some(transmit) = self.servers[index].poll_transmit(&mut out) {
                    quiet = false;
                    for datagram in out.chunks(transmit.segment) {
                        self.datagrams += 1;
                        self.bytes[index] += datagram.len();
                        let roll = chance.next_u64() % 1000;
                        let copies = if roll < loss { 0 } else { 1 + usize::from(roll < 2 * loss) };
                        for _ in (0..copies).filter(|_| transmit.to == address(1 - index)) {
                            self.servers[1 - index].on_datagram(self.now, address(index), &mut datagram.to_vec());
                        }
                    }
                    out.clear();
                    self.now = self.now + std::time::Duration::from_micros(10);
                }
            }
            if quiet && let Some(due) = self.servers[SOURCE].poll_timeout() {
                self.now = self.now.max(due);
                self.servers[SOURCE].on_timeout(self.now);
            }
        }
    }

    fn versions(&self, index: usize) -> Vec<Version> {
        self.servers[index].shared.state().store.versions(SPACE, PageNo(0), Generation(1)).unwrap().1.to_vec()
    }
}

#[test]
fn a_slab_comes_over_whatever_is_lost_or_doubled() {
    for loss in [0, 50, 200] {
        let mut pair = Pair::new();
        (0..60).for_each(|page| pair.write(SOURCE, page, 10 + page));
        let trim = Message { version: version(100, true), ..pair.about(Op::Trim, 5, 0) };
        assert_eq!(pair.ask(SOURCE, &trim, &[]).0, Status::Ok);
        // Written while the slab is copied: the owner sends it to both, and this one is there already.
        pair.write(TARGET, 7, 101);
        assert_eq!(pair.admit(2), Status::Ok);
        let order = pair.order();
        assert_eq!(pair.copy(0, &order), (Status::Ok, Progress::Running as u64));
        assert_eq!(pair.copy(0, &order), (Status::Ok, Progress::Running as u64), "asking again begins nothing");
        pair.run(loss, u64::MAX);
        assert_eq!(pair.copy(0, &order), (Status::Ok, Progress::Sent as u64), "{loss} of 1000 lost");
        let mut expected = pair.versions(SOURCE);
        expected[7] = version(101, false);
        assert_eq!(pair.versions(TARGET), expected, "{loss} of 1000 lost");
        for page in [0, 7, 59] {
            let mut state = pair.servers[TARGET].shared.state();
            let stored = state.store.read(SPACE, PageNo(page), Generation(1)).unwrap();
            let byte = if page == 7 { 101 } else { 10 + page as u8 };
            assert_eq!(stored.sealed, Some(&[byte; SEALED_SIZE][..]));
        }
    }
}

/// Without a ticket, to nobody, or to another than the one who was meant: some hellos, and no page.
#[test]
fn an_address_gets_no_more_than_hellos_until_it_has_shown_who_it_is() {
    let silent = CopyOrder { addr: address(7), ..CopyOrder::decode(&Pair::new().order()).unwrap() };
    let wrong = CopyOrder { key: keys(7).public(), addr: address(TARGET), ..silent };
    for (ticket, order) in [(false, Pair::new().order()), (true, silent.encode()), (true, wrong.encode())] {
        let mut pair = Pair::new();
        pair.write(SOURCE, 0, 10);
        assert_eq!(pair.admit(2), Status::Ok);
        if !ticket {
            pair.servers[TARGET].shared.state().tickets = Tickets::new();
        }
        pair.copy(0, &order);
        pair.run(0, u64::MAX);
        assert_eq!(pair.copy(0, &order), (Status::Ok, Progress::Failed as u64));
        assert_eq!(pair.bytes, [4 * crate::wire::datagram::HELLO_SIZE, 0]);
        assert_eq!(pair.versions(TARGET), [Version::NEVER; 64]);
    }
}

#[test]
fn only_the_owner_of_today_has_a_slab_copied_and_only_so_many() {
    let mut pair = Pair::new();
    let order = pair.order();
    let unheld = pair.about(Op::Copy, 64, 1);
    assert_eq!(pair.ask(SOURCE, &unheld, &order).0, Status::UnknownSlab);
    let other_grant = pair.about(Op::Copy, 0, 2);
    assert_eq!(pair.ask(SOURCE, &other_grant, &order).0, Status::BadRequest);
    let mut slow = CopyOrder::decode(&order).unwrap();
    slow.bytes_per_second = RATE_MIN - 1;
    assert_eq!(pair.copy(0, &slow.encode()).0, Status::BadRequest);
    let late = Direction::Request { cut: DATAGRAM_MIN_MAX as u16, generation: Generation(0) };
    let stale = Message { direction: late, ..pair.about(Op::Copy, 0, 1) };
    assert_eq!(pair.ask(SOURCE, &stale, &order).0, Status::StaleGeneration);
    assert_eq!(pair.progress(), None);
    for slab in 1..=TRANSFERS_MAX as u64 {
        assert_eq!(pair.ask(SOURCE, &pair.about(Op::Grant, 64 * slab, 64 * slab), &NO_EPOCH).0, Status::Ok);
        let begun = pair.copy(64 * slab, &order);
        assert_eq!(begun.0, Status::Ok);
    }
    assert_eq!(pair.copy(0, &order).0, Status::Full);
}

/// In the middle: the slab is granted again at either end, or taken over. What was on its way does not land.
#[test]
fn a_copy_ends_with_its_grant_and_its_owner() {
    for (what, index, sequence) in
        [(Op::Grant, SOURCE, 500), (Op::Grant, TARGET, 500), (Op::Fence, SOURCE, 0), (Op::Fence, TARGET, 0)]
    {
        let mut pair = Pair::new();
        (0..64).for_each(|page| pair.write(SOURCE, page, 10 + page));
        assert_eq!(pair.admit(2), Status::Ok);
        let order = pair.order();
        pair.copy(0, &order);
        pair.run(0, 60);
        assert_eq!(pair.progress(), Some(Progress::Running), "{what:?}: in the middle");
        let mut state = pair.servers[index].shared.state();
        let status = match what {
            Op::Grant => {
                state.store.grant(SPACE, SlabNo(0), Generation(1), (version(sequence, false), Version::NEVER), true)
            }
            _ => state.store.fence(SPACE, Generation(2), 7),
        };
        drop(state);
        assert_eq!(status, Status::Ok);
        let generation = Generation(if what == Op::Fence { 2 } else { 1 });
        let there = |pair: &Pair| {
            let at_target = if index == TARGET { generation } else { Generation(1) };
            pair.servers[TARGET].shared.state().store.versions(SPACE, PageNo(0), at_target).unwrap().1.to_vec()
        };
        let before = there(&pair);
        pair.run(0, u64::MAX);
        assert_eq!(pair.progress(), Some(Progress::Failed), "{what:?} at {index}");
        if index == TARGET {
            assert_eq!(there(&pair), before, "{what:?}: nothing lands any more");
        }
    }
}
