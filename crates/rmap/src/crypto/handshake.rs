//! The handshake: Noise IKpsk1 (revision 34) over X25519 by `snow`, for nothing but the keys of a session.
//!
//! The client knows the server's public key, the server the public keys it admits, and both the pool's key. A hello first
//! shows by a code that its sender knows the pool's key; without it, it costs the server one HMAC and is not answered.

use std::fmt;

use aws_lc_rs::{constant_time, hmac};
use snow::{Builder, HandshakeState};

use super::entropy::{Resolver, SharedEntropy};
use super::{KEY_SIZE, Rejected};
use crate::units::{BootEpoch, ServerId};
use crate::wire::datagram::{
    ACCEPT_PAYLOAD_SIZE, ACCEPT_SIZE, HEADER_SIZE, HELLO_PAYLOAD_SIZE, HELLO_SIZE, Head, MAC_SIZE, NOISE_HELLO_SIZE,
    REFUSE_SIZE,
};

const PATTERN: &str = "Noise_IKpsk1_25519_ChaChaPoly_SHA256";
/// Binds a handshake to this protocol.
const PROLOGUE: &[u8] = b"rmap 1";
/// Where the code stands in a hello: at its end.
const HELLO_MAC_AT: usize = HELLO_SIZE - MAC_SIZE;

/// A node's public key: its name to the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey(pub [u8; KEY_SIZE]);

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The private and the public key of a node.
#[derive(Clone)]
pub struct Keypair {
    private: [u8; KEY_SIZE],
    public: PublicKey,
}

impl fmt::Debug for Keypair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keypair({:?})", self.public)
    }
}

impl Keypair {
    pub fn generate(entropy: &SharedEntropy) -> Keypair {
        let mut private = [0; KEY_SIZE];
        entropy.fill(&mut private);
        Keypair::from_private(private)
    }

    /// # Panics
    /// Never: X25519 takes any 32 bytes.
    pub fn from_private(private: [u8; KEY_SIZE]) -> Keypair {
        use snow::resolvers::{CryptoResolver, DefaultResolver};
        let mut dh = DefaultResolver.resolve_dh(&snow::params::DHChoice::Curve25519).expect("snow has X25519");
        dh.set(&private);
        let mut public = [0; KEY_SIZE];
        public.copy_from_slice(&dh.pubkey()[..KEY_SIZE]);
        Keypair { private, public: PublicKey(public) }
    }

    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// To be stored where nobody else can read it.
    pub fn private(&self) -> &[u8; KEY_SIZE] {
        &self.private
    }
}

/// What all nodes of a pool share.
#[derive(Clone)]
pub struct PoolKey {
    psk: [u8; KEY_SIZE],
    codes: hmac::Key,
}

impl fmt::Debug for PoolKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoolKey")
    }
}

impl PoolKey {
    pub fn new(key: [u8; KEY_SIZE]) -> PoolKey {
        let derived = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), b"rmap hello code");
        PoolKey { psk: key, codes: hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref()) }
    }

    fn code(&self, parts: &[&[u8]]) -> [u8; MAC_SIZE] {
        let mut context = hmac::Context::with_key(&self.codes);
        parts.iter().for_each(|part| context.update(part));
        let mut code = [0; MAC_SIZE];
        code.copy_from_slice(&context.sign().as_ref()[..MAC_SIZE]);
        code
    }

    /// Whether a hello comes from somebody who knows this key.
    pub fn admits_hello(&self, hello: &[u8]) -> bool {
        hello.len() == HELLO_SIZE
            && constant_time::verify_slices_are_equal(&hello[HELLO_MAC_AT..], &self.code(&[&hello[..HELLO_MAC_AT]]))
                .is_ok()
    }

    /// The answer to a hello in versions that the server does not speak. Bound to that hello.
    pub fn refuse(&self, head: Head, hello: &[u8]) -> [u8; REFUSE_SIZE] {
        let mut datagram = [0; REFUSE_SIZE];
        datagram[..HEADER_SIZE].copy_from_slice(&head.encode());
        let code = self.code(&[&datagram[..HEADER_SIZE], &hello[HELLO_MAC_AT..]]);
        datagram[HEADER_SIZE..].copy_from_slice(&code);
        datagram
    }

    /// The code of an announcement. No other code begins as what it is made of does.
    pub fn announcement_code(&self, announcement: &[u8]) -> [u8; MAC_SIZE] {
        self.code(&[b"rmap announcement", announcement])
    }

    /// Whether a refusal answers this hello.
    pub fn admits_refusal(&self, datagram: &[u8], hello: &[u8]) -> bool {
        let code = self.code(&[&datagram[..HEADER_SIZE], &hello[HELLO_MAC_AT..]]);
        constant_time::verify_slices_are_equal(&datagram[HEADER_SIZE..], &code).is_ok()
    }
}

/// What a server says of itself in a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerHello {
    pub epoch: BootEpoch,
    pub server: ServerId,
    pub slab_pages: u32,
    pub write_credits: u16,
    /// Its pages lie on a disk: it is for slabs that no other server takes.
    pub overflow_disk: bool,
}

/// Of the flags in a [`ServerHello`], the only one there is. Others are of no meaning yet.
const OVERFLOW_DISK: u8 = 1;

impl ServerHello {
    fn encode(self) -> [u8; ACCEPT_PAYLOAD_SIZE] {
        let mut bytes = [0; ACCEPT_PAYLOAD_SIZE];
        bytes[..8].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.server.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.slab_pages.to_le_bytes());
        bytes[16..18].copy_from_slice(&self.write_credits.to_le_bytes());
        bytes[18] = if self.overflow_disk { OVERFLOW_DISK } else { 0 };
        bytes
    }

    fn decode(bytes: &[u8; ACCEPT_PAYLOAD_SIZE]) -> ServerHello {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        ServerHello {
            epoch: BootEpoch(u64::from(word(0)) | u64::from(word(4)) << 32),
            server: ServerId(word(8)),
            slab_pages: word(12),
            write_credits: u16::from_le_bytes([bytes[16], bytes[17]]),
            overflow_disk: bytes[18] & OVERFLOW_DISK != 0,
        }
    }
}

/// The secrets of a session, before they become keys.
#[derive(Clone)]
pub struct Secrets {
    pub to_server: [u8; KEY_SIZE],
    pub to_client: [u8; KEY_SIZE],
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

fn builder<'a>(own: &'a Keypair, pool: &'a PoolKey, entropy: &SharedEntropy) -> Result<Builder<'a>, snow::Error> {
    Builder::with_resolver(PATTERN.parse()?, Box::new(Resolver(entropy.clone())))
        .local_private_key(&own.private)?
        .psk(1, &pool.psk)?
        .prologue(PROLOGUE)
}

/// A client's half of a handshake.
#[derive(Debug)]
pub struct Initiator {
    noise: HandshakeState,
    /// The datagram, to be sent again as it is.
    pub hello: [u8; HELLO_SIZE],
}

impl Initiator {
    /// # Panics
    /// If snow lacks an algorithm that this crate asks for at compile time.
    pub fn new(own: &Keypair, server: &PublicKey, pool: &PoolKey, head: Head, entropy: &SharedEntropy) -> Initiator {
        let noise =
            builder(own, pool, entropy).and_then(|builder| builder.remote_public_key(&server.0)?.build_initiator());
        let mut noise = noise.expect("the pattern and its keys are complete");
        let mut hello = [0; HELLO_SIZE];
        hello[..HEADER_SIZE].copy_from_slice(&head.encode());
        let message = &mut hello[HEADER_SIZE..HELLO_MAC_AT];
        let written = noise.write_message(&[0; HELLO_PAYLOAD_SIZE], message).expect("the first message fits");
        debug_assert_eq!(written, NOISE_HELLO_SIZE);
        let code = pool.code(&[&hello[..HELLO_MAC_AT]]);
        hello[HELLO_MAC_AT..].copy_from_slice(&code);
        Initiator { noise, hello }
    }

    /// The server's answer. An answer that is not authentic changes nothing.
    ///
    /// # Errors
    /// It is not this server's answer to this hello.
    pub fn finish(&mut self, accept: &[u8]) -> Result<(Secrets, ServerHello), Rejected> {
        let mut payload = [0; ACCEPT_PAYLOAD_SIZE];
        self.noise.read_message(&accept[HEADER_SIZE..], &mut payload).map_err(|_| Rejected::NotAuthentic)?;
        let (to_server, to_client) = self.noise.dangerously_get_raw_split();
        Ok((Secrets { to_server, to_client }, ServerHello::decode(&payload)))
    }
}

/// A server's half, in one step: who greets, the secrets, the answer.
///
/// # Errors
/// The hello does not fit this server's key and the pool's.
pub fn respond(
    own: &Keypair,
    pool: &PoolKey,
    hello: &[u8],
    head: Head,
    about: ServerHello,
    entropy: &SharedEntropy,
) -> Result<(PublicKey, Secrets, [u8; ACCEPT_SIZE]), Rejected> {
    let not_authentic = |_: snow::Error| Rejected::NotAuthentic;
    let mut noise = builder(own, pool, entropy).and_then(Builder::build_responder).map_err(not_authentic)?;
    let mut payload = [0; HELLO_PAYLOAD_SIZE];
    noise.read_message(&hello[HEADER_SIZE..HEADER_SIZE + NOISE_HELLO_SIZE], &mut payload).map_err(not_authentic)?;
    let mut public = [0; KEY_SIZE];
    public.copy_from_slice(noise.get_remote_static().ok_or(Rejected::NotAuthentic)?);
    let mut accept = [0; ACCEPT_SIZE];
    accept[..HEADER_SIZE].copy_from_slice(&head.encode());
    noise.write_message(&about.encode(), &mut accept[HEADER_SIZE..]).map_err(not_authentic)?;
    let (to_server, to_client) = noise.dangerously_get_raw_split();
    Ok((PublicKey(public), Secrets { to_server, to_client }, accept))
}
