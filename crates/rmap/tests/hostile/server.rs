//! A server, and a client that says anything in its session.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};

use rmap::crypto::entropy::SharedEntropy;
use rmap::crypto::handshake::Initiator;
use rmap::crypto::session::Session;
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Fault, Server, ServerConfig};
use rmap::units::{BootEpoch, Class, Generation, PageNo, SEALED_SIZE, ServerId, SlabSize, SpaceId, Time, Version};
use rmap::wire::datagram::{Head, Versions};
use rmap::wire::message::{Direction, EPOCH_SIZE, Message, Op, Status};
use rmap::wire::{DATAGRAM_MAX, PROTOCOL_VERSION};

use crate::input::{Input, Noise};

const SLAB_PAGES: u32 = 8;

fn addr() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 9))
}

/// A server of two slabs, and a session with it.
fn met() -> (Server, Session) {
    let (own, keys, pool) = (Keypair::from_private([2; KEY_SIZE]), Keypair::from_private([1; KEY_SIZE]), [3; KEY_SIZE]);
    let config = ServerConfig {
        id: ServerId(1),
        keys: keys.clone(),
        pool: PoolKey::new(pool),
        admitted: vec![own.public()],
        slabs: 2,
        slab_size: SlabSize::new(SLAB_PAGES).expect("a power of two"),
        quota: 2,
        epoch: BootEpoch(4),
        medium: None,
    };
    let mut server = Server::new(config, Box::new(Noise::new(1))).expect("the limits are kept");
    server.set_admins(vec![own.public()]);
    let head = Head::Hello { versions: Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION }, sender: 9 };
    let entropy = SharedEntropy::new(Box::new(Noise::new(2)));
    let mut initiator = Initiator::new(&own, &keys.public(), &PoolKey::new(pool), head, &entropy);
    server.on_datagram(Time(0), addr(), &mut initiator.hello.clone());
    let mut out = Vec::new();
    server.poll_transmit(&mut out).expect("an answer");
    let Ok(Head::Accept { sender, .. }) = Head::decode(&out) else { panic!("not accepted") };
    let (secrets, _) = initiator.finish(&out).expect("the server's answer");
    (server, Session::client(&secrets, sender))
}

/// What a page holds that was written in a version. Content and version travel in different places, so a server that mixes
/// pages up is seen.
fn content_of(space: SpaceId, page: PageNo, version: Version) -> [u8; SEALED_SIZE] {
    let seed = Noise::new(space.0 ^ page.0.rotate_left(20) ^ version.bits().rotate_left(40)).next();
    let mut bytes = [0; SEALED_SIZE];
    bytes.chunks_mut(8).zip(0_u64..).for_each(|(field, at)| {
        let word = seed.wrapping_add(at).to_le_bytes();
        field.copy_from_slice(&word[..field.len()]);
    });
    bytes
}

/// What is asked for most.
const USUAL: [Op; 4] = [Op::Grant, Op::Write, Op::Read, Op::ReadGranted];

/// A request, and how it is cut. Half of them could be a client's.
fn request(input: &mut Input<'_>) -> (Message, usize) {
    let op = match input.below(2) {
        0 => USUAL[input.below(USUAL.len())],
        _ => Op::ALL[input.below(Op::ALL.len())],
    };
    let likely = input.below(2) == 0;
    let cut = if likely { DATAGRAM_MAX as u64 } else { input.number(&[1200, 1422, 4192, 0, 1199, 4193]) } as u16;
    let generation = if likely { 1 } else { input.number(&[1, 2, 0, u64::from(Generation::MAX.0)]) } as u32;
    let written = input.number(&[1, 2, 3, 4, 5, 0]) << 1;
    let version = match op {
        Op::Write => Version::from_bits(1 << 44 | written),
        Op::Trim => Version::from_bits(1 << 44 | written | 1),
        _ => Version::from_bits(input.number(&[0, 1, 2, 1 << 44 | 2, 1 << 44 | 4, u64::MAX])),
    };
    let message = Message {
        op,
        class: Class::ALL[input.below(Class::ALL.len())],
        direction: Direction::Request { cut, generation: Generation(generation) },
        id: input.number(&[0, 1, 2, 3, 4]),
        space: SpaceId(if likely { 1 } else { input.number(&[1, 2, 0]) }),
        page: PageNo(input.number(&[0, 1, 7, 8, 9, 16, u64::MAX])),
        version,
        payload: match op {
            Op::Write => SEALED_SIZE as u16,
            Op::Grant => EPOCH_SIZE as u16,
            _ => 0,
        },
    };
    (message, usize::from(cut))
}

/// Whatever the input says, the server lives, answers in its session, and returns pages as they were written. How many it
/// returned.
pub fn run(bytes: &[u8]) -> u64 {
    run_with(bytes, None)
}

pub fn run_with(bytes: &[u8], fault: Option<Fault>) -> u64 {
    let (mut server, mut session) = met();
    let mut input = Input(bytes);
    let mut pages = 0;
    let mut heard = Heard::default();
    let mut now = Time(1);
    while !input.is_over() {
        now = now + std::time::Duration::from_micros(input.byte().into());
        let (mut datagram, mut segments) = (Vec::new(), DATAGRAM_MAX);
        match input.below(16) {
            // A stranger's, or a replayed one's remains.
            0 => {
                datagram = (0..input.byte()).map(|_| input.byte()).collect();
                if let Some(kind) = datagram.first_mut() {
                    *kind %= 6;
                }
            }
            kind => {
                let (message, cut) = request(&mut input);
                let content = content_of(message.space, message.page, message.version);
                // Mostly none, or little would be written.
                let is_grant = message.op == Op::Grant;
                let epoch = if is_grant { input.number(&[0, 0, 0, 0, 0, 1 << 44 | 2, 1 << 44 | 4]) } else { 0 };
                let epoch = epoch.to_le_bytes();
                let mut payload = if is_grant { &epoch[..] } else { &content[..message.payload.into()] };
                if kind == 1 {
                    // What a client says of its own page is its own affair.
                    payload = &content[..input.below(256)];
                    heard.lied_of.insert((message.space.0, message.page.0, message.version.bits()));
                }
                let segment = session.seal(&message, payload, cut, &mut datagram);
                // Of several one gets lost, or all but one.
                let count = datagram.len() / segment;
                let one = input.below(count) * segment;
                match input.below(8) {
                    0 => drop(datagram.drain(one..one + segment)),
                    1 => datagram = datagram[one..one + segment].to_vec(),
                    _ => {}
                }
                segments = segment;
                if kind == 2 && !datagram.is_empty() {
                    let at = input.number(&[0]) as usize % datagram.len();
                    datagram[at] ^= input.byte();
                }
            }
        }
        for datagram in datagram.chunks_mut(segments) {
            server.on_datagram(now, addr(), datagram);
        }
        server.inject(fault);
        let mut out = Vec::new();
        while let Some(transmit) = server.poll_transmit(&mut out) {
            assert!(transmit.segment <= DATAGRAM_MAX, "{transmit:?}");
            for reply in out.chunks_mut(transmit.segment) {
                pages += u64::from(heard.take(&mut session, reply));
            }
            out.clear();
        }
        assert!(server.held_slabs() + server.free_slabs() <= 2);
    }
    pages
}

#[derive(Debug, Default)]
struct Heard {
    /// Pages that are on their way, by the request's number.
    parts: HashMap<u64, Vec<u8>>,
    /// Pages in versions of which the client told different things.
    lied_of: HashSet<(u64, u64, u64)>,
}

impl Heard {
    /// A datagram of the server. `true` if it was the end of a page that is right.
    fn take(&mut self, session: &mut Session, reply: &mut [u8]) -> bool {
        let Ok(Head::Data { epoch, counter, .. }) = Head::decode(reply) else { return false };
        let body = session.open(epoch, counter, reply).expect("the server's own datagram");
        let (message, fragment, part) = Message::decode(body).expect("what a server says makes sense");
        let Direction::Reply { status, .. } = message.direction else { panic!("a server asks nothing: {message:?}") };
        let is_page = matches!(message.op, Op::Read | Op::ReadGranted) && status == Status::Ok && message.payload > 0;
        if !is_page {
            return false;
        }
        let content = self.parts.entry(message.id).or_default();
        if fragment.index == 0 {
            content.clear();
        }
        content.extend_from_slice(part);
        let whole = fragment.index + 1 == fragment.count;
        let honest = !self.lied_of.contains(&(message.space.0, message.page.0, message.version.bits()));
        let right = *content == content_of(message.space, message.page, message.version);
        assert!(right || !whole || !honest, "{message:?}");
        whole && honest
    }
}
