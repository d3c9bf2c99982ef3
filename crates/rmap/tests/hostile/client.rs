//! A client, and a server that says anything in its session. It does not have the key of the pages.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use rmap::client::{Client, ClientConfig, Event, Fault, ServerInfo, SpaceRef, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest, MapEntry, Replica, Today};
use rmap::crypto::entropy::SharedEntropy;
use rmap::crypto::handshake::{ServerHello, respond};
use rmap::crypto::session::Session;
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::units::{
    BootEpoch, Class, Generation, PAGE_SIZE, PageNo, SEALED_SIZE, ServerId, SlabNo, SlabSize, SpaceId, Time, Version,
};
use rmap::wire::datagram::Head;
use rmap::wire::message::{Direction, Load, Message, Op, Pressure, Status};
use rmap::wire::{DATAGRAM_MIN_MAX, OVERHEAD, PROTOCOL_VERSION};

use crate::input::{Input, Noise, page_of};

const PAGES: u64 = 16;
const SLAB_PAGES: u32 = 8;
/// Requests that the server remembers; it forgets the oldest.
const ASKED_MAX: usize = 64;

fn addr() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 9))
}

/// What may be read of a page.
#[derive(Clone, Debug, Default)]
struct Page {
    /// Every value that was ever written, for reads take their time.
    values: Vec<u8>,
    /// A write was acknowledged: from then on it is zero only by a trim.
    written: bool,
    trimmed: bool,
}

#[derive(Debug)]
enum Begun {
    /// Of what another client writes: a server that has the only copy may say that there is nothing.
    Follow {
        page: u64,
    },
    /// Whether zeros would be right as far as was known when it began.
    Read {
        page: u64,
        zero: bool,
    },
    Write {
        page: u64,
    },
    Trim,
}

struct Run {
    client: Client,
    space: SpaceRef,
    /// The same space, as another client would read it.
    followed: SpaceRef,
    map: BTreeMap<u32, MapEntry>,
    now: Time,
    session: Option<Session>,
    keys: (Keypair, PoolKey),
    entropy: SharedEntropy,
    asked: VecDeque<Message>,
    /// Pages in the order of their pieces, as they were sent.
    partial: Vec<u8>,
    stored: BTreeMap<u64, (Version, Vec<u8>)>,
    pages: BTreeMap<u64, Page>,
    begun: BTreeMap<u64, Begun>,
    tokens: u64,
    came_back: u64,
}

impl Run {
    fn new(fault: Option<Fault>) -> Run {
        let (own, keys, pool) =
            (Keypair::from_private([2; KEY_SIZE]), Keypair::from_private([1; KEY_SIZE]), PoolKey::new([3; KEY_SIZE]));
        let mut config = ClientConfig::new(own, pool.clone());
        config.fault = fault;
        config.slab_size = SlabSize::new(SLAB_PAGES).expect("a power of two");
        let mut client = Client::new(config, Box::new(Noise::new(1)));
        let info = ServerInfo { id: ServerId(1), addr: addr(), key: keys.public(), zone: 0, announcer: None };
        client.add_server(Time(0), info).expect("one server");
        let spec = SpaceSpec { id: SpaceId(1), pages: PAGES, copies: 1, reserve: 0, key: [7; KEY_SIZE] };
        let space = client.attach(&spec, Generation(1), &[]).expect("the limits are kept");
        let followed = client.attach_reader(&spec, &Today::default()).expect("the limits are kept");
        Run {
            client,
            space,
            followed,
            map: BTreeMap::new(),
            now: Time(1),
            session: None,
            keys: (keys, pool),
            entropy: SharedEntropy::new(Box::new(Noise::new(2))),
            asked: VecDeque::new(),
            partial: Vec::new(),
            stored: BTreeMap::new(),
            pages: (0..PAGES).map(|page| (page, Page::default())).collect(),
            begun: BTreeMap::new(),
            tokens: 0,
            came_back: 0,
        }
    }

    /// Takes what the client sends. A hello is answered as it should be.
    fn listen(&mut self) {
        let mut out = Vec::new();
        while let Some(transmit) = self.client.poll_transmit(self.now, &mut out) {
            for datagram in out.chunks_mut(transmit.segment) {
                match Head::decode(datagram) {
                    Ok(Head::Hello { sender, .. }) => self.greet(sender, datagram),
                    Ok(Head::Data { epoch, counter, .. }) => self.receive(epoch, counter, datagram),
                    other => panic!("{other:?} from a client"),
                }
            }
            out.clear();
        }
    }

    fn greet(&mut self, sender: u32, hello: &[u8]) {
        let head = Head::Accept { version: PROTOCOL_VERSION, receiver: sender, sender: 5 };
        let about = ServerHello {
            epoch: BootEpoch(1),
            server: ServerId(1),
            slab_pages: SLAB_PAGES,
            write_credits: 32,
            overflow_disk: false,
        };
        let (keys, pool) = &self.keys;
        let (_, secrets, mut accept) =
            respond(keys, pool, hello, head, about, &self.entropy).expect("the client's hello");
        self.session = Some(Session::server(&secrets, sender));
        self.client.on_datagram(self.now, addr(), &mut accept);
    }

    fn receive(&mut self, epoch: u8, counter: u64, datagram: &mut [u8]) {
        let Some(session) = &mut self.session else { return };
        // Of the session before this one.
        let Ok(body) = session.open(epoch, counter, datagram) else { return };
        let (message, fragment, part) = Message::decode(body).expect("what a client says makes sense");
        if message.op == Op::Write {
            if fragment.index == 0 {
                self.partial.clear();
            }
            self.partial.extend_from_slice(part);
            if fragment.index + 1 < fragment.count {
                return;
            }
            if self.partial.len() == SEALED_SIZE {
                self.stored.insert(message.page.0, (message.version, self.partial.clone()));
            }
        }
        if self.asked.len() == ASKED_MAX {
            self.asked.pop_front();
        }
        self.asked.push_back(message);
    }

    /// Answers one of the requests that were heard: rightly most of the time, and otherwise in any way.
    fn answer(&mut self, input: &mut Input<'_>) {
        if self.asked.is_empty() {
            return;
        }
        let at = input.below(self.asked.len());
        let asked = if input.below(4) == 0 { self.asked.get(at).copied() } else { self.asked.remove(at) };
        let Some(asked) = asked else { return };
        let honest = input.below(4) != 0;
        let mut reply = asked;
        let mut payload = Vec::new();
        if matches!(asked.op, Op::Read | Op::ReadGranted)
            && let Some((version, sealed)) = self.stored.get(&asked.page.0)
        {
            (reply.version, payload) = (*version, sealed.clone());
        }
        let load = Load { free_slabs: 4, write_credits: 32, queued: 0 };
        let (mut status, mut pressure) = (Status::Ok, Pressure::None);
        if !honest {
            match input.below(8) {
                0 => status = Status::ALL[input.below(Status::ALL.len())],
                1 => pressure = Pressure::ALL[input.below(Pressure::ALL.len())],
                2 => reply.version = Version::from_bits(input.number(&[0, 1, 1 << 44, 1 << 44 | 3, u64::MAX])),
                // It never had the page, or a trim came that nobody has sent.
                3 => {
                    reply.version = Version::from_bits(input.number(&[0, 1 << 44 | 1, 1 << 44 | 9]));
                    payload.clear();
                }
                4 => payload.truncate(input.byte().into()),
                5 => reply.page = PageNo(input.number(&[0, 1, 8, u64::MAX])),
                // Another page, in the version that is asked for.
                6 => {
                    let other = self.stored.values().nth(input.below(self.stored.len().max(1)));
                    payload = other.map(|(_, sealed)| sealed.clone()).unwrap_or_default();
                }
                _ => {
                    if let Some(byte) = payload.get_mut(input.word() as usize % SEALED_SIZE) {
                        *byte ^= input.byte();
                    }
                }
            }
            if input.below(8) == 0 {
                reply.id = input.number(&[0, 1]);
                reply.op = Op::ALL[input.below(Op::ALL.len())];
            }
        }
        reply.direction = Direction::Reply { status, pressure, load };
        reply.payload = payload.len() as u16;
        let cut = if input.below(2) == 0 { DATAGRAM_MIN_MAX } else { payload.len() + OVERHEAD };
        let Some(session) = &mut self.session else { return };
        let mut out = Vec::new();
        let segment = session.seal(&reply, &payload, cut, &mut out);
        for datagram in out.chunks_mut(segment) {
            self.client.on_datagram(self.now, addr(), datagram);
        }
    }

    fn begin(&mut self, input: &mut Input<'_>) {
        let (page, value) = (u64::from(input.byte()) % PAGES, input.byte().max(1));
        let class = Class::ALL[input.below(Class::ALL.len())];
        self.tokens += 1;
        let (now, number, token) = (self.now, PageNo(page), self.tokens);
        let known = self.pages.get_mut(&page).expect("a page of the space");
        let (client, space) = (&mut self.client, self.space);
        let (result, begun) = match input.below(6) {
            0 => {
                known.trimmed = true;
                (client.trim(now, space, number, class, token), Begun::Trim)
            }
            1 | 2 => {
                known.values.push(value);
                (client.write(now, space, number, class, &page_of(page, value), token), Begun::Write { page })
            }
            3 => (client.read(now, self.followed, number, class, token), Begun::Follow { page }),
            _ => (client.read(now, space, number, class, token), Begun::Read { page, zero: !known.written }),
        };
        if result.is_ok() {
            self.begun.insert(token, begun);
        }
    }

    /// The control plane, which others may have asked before.
    fn control(&mut self, input: &mut Input<'_>) {
        let Some((id, request)) = self.client.poll_control(self.now) else { return };
        let ControlRequest::Change(change) = request else {
            let map = self.map.iter().map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect();
            let reply = match input.below(16) {
                0 => ControlReply::Later,
                _ => ControlReply::Seen(Today { generation: Generation(1), sealed: false, map }),
            };
            return self.client.on_control(self.now, id, reply);
        };
        let replica = Replica { server: ServerId(input.below(3) as u32), grant: Version::from_bits(input.word()) };
        let reply = match input.below(64) {
            0 => ControlReply::Fenced,
            1 => ControlReply::Conflict(MapEntry { revision: 1, ..MapEntry::of(vec![replica]) }),
            2..8 => ControlReply::Later,
            8..12 => ControlReply::Conflict(change.entry.clone()),
            _ => ControlReply::Done,
        };
        if matches!(&reply, ControlReply::Done) || reply == ControlReply::Conflict(change.entry.clone()) {
            self.map.insert(change.slab.0, change.entry);
        }
        self.client.on_control(self.now, id, reply);
    }

    fn take_results(&mut self) {
        let mut content = [0xee; PAGE_SIZE];
        while let Some(event) = self.client.poll_event(&mut content) {
            let (token, result) = match event {
                Event::Read { token, result } | Event::Written { token, result } => (token, result),
            };
            match self.begun.remove(&token).expect("an operation that was begun, and ended once") {
                Begun::Follow { page } if result.is_ok() => {
                    let zeros = content.iter().all(|byte| *byte == 0);
                    let right = self.pages[&page].values.iter().any(|value| content == page_of(page, *value));
                    assert!(zeros || right, "page {page}, as another client reads it: {:?}", &content[..16]);
                }
                Begun::Read { page, zero } if result.is_ok() => {
                    let known = &self.pages[&page];
                    let zeros = content.iter().all(|byte| *byte == 0);
                    let right = known.values.iter().any(|value| content == page_of(page, *value));
                    assert!(
                        right || (zeros && (zero || known.trimmed)),
                        "page {page}: {:?}, {known:?}",
                        &content[..16]
                    );
                    self.came_back += u64::from(right);
                }
                Begun::Write { page } if result.is_ok() => {
                    self.pages.get_mut(&page).expect("a page of the space").written = true;
                }
                // An error may come at any time; it is never zeros.
                _ => {}
            }
        }
    }
}

/// Whatever the input says, the client lives, ends every operation once, and reads of a page nothing but what was written to it.
/// How many pages came back.
pub fn run(bytes: &[u8]) -> u64 {
    run_with(bytes, None)
}

pub fn run_with(bytes: &[u8], fault: Option<Fault>) -> u64 {
    let mut run = Run::new(fault);
    let mut input = Input(bytes);
    run.listen();
    while !input.is_over() {
        match input.below(16) {
            0 => {
                let mut datagram: Vec<u8> = (0..input.byte()).map(|_| input.byte()).collect();
                run.client.on_datagram(run.now, addr(), &mut datagram);
            }
            1 => {
                run.now = run.now + Duration::from_micros(1 << input.below(22));
                run.client.on_timeout(run.now);
            }
            2..8 => run.begin(&mut input),
            _ => run.answer(&mut input),
        }
        run.now = run.now + Duration::from_micros(20);
        run.control(&mut input);
        run.listen();
        run.take_results();
    }
    run.came_back
}
