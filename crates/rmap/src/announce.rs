//! A server's announcement of itself: a hint at which address it is, and how it is. It admits nobody, and nobody answers it.
//!
//! An announcement carries two proofs. The first is a code under the pool's key. It keeps strangers from costing a listener more
//! than a checksum. The second is a signature, which says which server it was. The code alone does not say that, because every
//! client knows the pool's key and could make it. The signing key follows from the node's static key. A listener knows the public
//! half from the operator or from etcd, and ignores all servers that it does not know.
//!
//! An announcement may be replayed. So a listener takes from a server only a stamp that is later than the last one, and none that
//! is older than [`AGE_MAX`]. A copy is worth nothing to a listener that heard the original. To others it is worth something for
//! as long as that, but it says no more than the server itself said. What a listener makes of it is a greeting, which fails
//! unless the server is there.
//!
//! | bytes | |
//! |---|---|
//! | 0 | 5, which no datagram of the protocol begins with |
//! | 1 | version, 1 |
//! | 2 | pressure |
//! | 3 | family of the address: 4 or 6 |
//! | 4..8 | number of the server |
//! | 8..16 | boot epoch |
//! | 16..24 | stamp: milliseconds since 1970 |
//! | 24..28, 28..32 | slabs, and how many are free |
//! | 32..36 | zone |
//! | 36..38, 38..40 | port, zeros |
//! | 40..56 | address; of IPv4 the first four bytes, then zeros |
//! | 56..88 | the server's public key |
//! | 88..152 | Ed25519 signature over `rmap announcement` and all before it |
//! | 152..168 | the pool's code over all before it |
//!
//! All numbers are little-endian.

mod key;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use aws_lc_rs::{constant_time, hmac};
use thiserror::Error;

pub use key::AnnounceKey;

use crate::client::{Hint, SERVERS_MAX, ServerInfo};
use crate::crypto::{KEY_SIZE, Keypair, PoolKey, PublicKey};
use crate::units::{BootEpoch, ServerId};
use crate::wire::message::Pressure;

/// Bytes of every announcement.
pub const ANNOUNCEMENT_SIZE: usize = 168;
/// Clocks of a pool may differ by so much, and a copy of an announcement is of use for as long.
pub const AGE_MAX: Duration = Duration::from_secs(60);
/// How often a server announces itself.
pub const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);
/// Signatures that are looked at in a second, 40 us each: four times what all servers of a pool send.
const CHECKS_PER_SECOND: u32 = 4 * SERVERS_MAX as u32;

const KIND: u8 = 5;
const VERSION: u8 = 1;
const SIGNED: usize = 88;
const CODED: usize = 152;
const CONTEXT: &[u8] = b"rmap announcement";

/// What a server says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    pub server: ServerId,
    pub addr: SocketAddr,
    pub key: PublicKey,
    pub zone: u32,
    pub epoch: BootEpoch,
    pub slabs: u32,
    pub free: u32,
    pub pressure: Pressure,
}

impl Announcement {
    /// Where the server says it is, as [`Client::hint`](crate::client::Client::hint) takes it.
    pub fn hint(&self) -> Hint {
        Hint { server: self.server, addr: self.addr, epoch: self.epoch }
    }
}

/// Why one was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Ignored {
    #[error("no version has it")]
    Malformed,
    #[error("not of this pool")]
    Stranger,
    #[error("of a server that is not known here")]
    Unknown,
    #[error("not signed by the server that it names")]
    Forged,
    #[error("seen before, or older than what was")]
    Replayed,
    #[error("of another time than this clock's")]
    Late,
    #[error("more than can be looked at")]
    TooMany,
}

/// Makes the announcements of one server.
#[derive(Debug)]
pub struct Announcer {
    signer: Ed25519KeyPair,
    pool: PoolKey,
}

impl Announcer {
    /// # Panics
    /// Never: Ed25519 takes any seed of 32 bytes.
    pub fn new(keys: &Keypair, pool: PoolKey) -> Announcer {
        let seed = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, keys.private()), b"rmap announcement key");
        let signer = Ed25519KeyPair::from_seed_unchecked(seed.as_ref()).expect("a seed of 32 bytes");
        Announcer { signer, pool }
    }

    /// For who is to believe it.
    pub fn public(&self) -> AnnounceKey {
        let mut key = [0; KEY_SIZE];
        key.copy_from_slice(self.signer.public_key().as_ref());
        AnnounceKey(key)
    }

    /// `stamp_ms` grows with each, also over lives of the server: milliseconds since 1970.
    pub fn encode(&self, stamp_ms: u64, about: &Announcement) -> [u8; ANNOUNCEMENT_SIZE] {
        let mut bytes = [0; ANNOUNCEMENT_SIZE];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &[KIND, VERSION, about.pressure as u8, if about.addr.is_ipv4() { 4 } else { 6 }]);
        put(4, &about.server.0.to_le_bytes());
        put(8, &about.epoch.0.to_le_bytes());
        put(16, &stamp_ms.to_le_bytes());
        put(24, &about.slabs.to_le_bytes());
        put(28, &about.free.to_le_bytes());
        put(32, &about.zone.to_le_bytes());
        put(36, &about.addr.port().to_le_bytes());
        match about.addr.ip() {
            IpAddr::V4(ip) => put(40, &ip.octets()),
            IpAddr::V6(ip) => put(40, &ip.octets()),
        }
        put(56, &about.key.0);
        let signature = self.signer.sign(&in_context(&bytes[..SIGNED]));
        bytes[SIGNED..CODED].copy_from_slice(signature.as_ref());
        let code = self.pool.announcement_code(&bytes[..CODED]);
        bytes[CODED..].copy_from_slice(&code);
        bytes
    }
}

fn in_context(body: &[u8]) -> [u8; CONTEXT.len() + SIGNED] {
    let mut message = [0; CONTEXT.len() + SIGNED];
    message[..CONTEXT.len()].copy_from_slice(CONTEXT);
    message[CONTEXT.len()..].copy_from_slice(body);
    message
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// The fields and the stamp; nothing is proved by it.
fn decode(bytes: &[u8; ANNOUNCEMENT_SIZE]) -> Option<(Announcement, u64)> {
    let zeros = |range: std::ops::Range<usize>| bytes[range].iter().all(|byte| *byte == 0);
    if bytes[..2] != [KIND, VERSION] || !zeros(38..40) {
        return None;
    }
    let mut octets = [0; 16];
    octets.copy_from_slice(&bytes[40..56]);
    let ip: IpAddr = match bytes[3] {
        4 if zeros(44..56) => Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]).into(),
        6 => Ipv6Addr::from(octets).into(),
        _ => return None,
    };
    let pressure = *Pressure::ALL.get(usize::from(bytes[2]))?;
    let port = u16::from_le_bytes([bytes[36], bytes[37]]);
    let (slabs, free) = (word(bytes, 24), word(bytes, 28));
    // Nobody is greeted at an address that is nobody's, or everybody's.
    if port == 0 || ip.is_unspecified() || ip.is_multicast() || ip == Ipv4Addr::BROADCAST || free > slabs {
        return None;
    }
    let mut key = [0; KEY_SIZE];
    key.copy_from_slice(&bytes[56..88]);
    let about = Announcement {
        server: ServerId(word(bytes, 4)),
        addr: SocketAddr::new(ip, port),
        key: PublicKey(key),
        zone: word(bytes, 32),
        epoch: BootEpoch(long(bytes, 8)),
        slabs,
        free,
        pressure,
    };
    Some((about, long(bytes, 16)))
}

#[derive(Debug)]
struct Known {
    key: PublicKey,
    signer: AnnounceKey,
    last_ms: u64,
}

/// Who listens: the servers that it knows, and the last stamp of each.
#[derive(Debug)]
pub struct Listening {
    pool: PoolKey,
    known: HashMap<ServerId, Known>,
    /// The second, and the signatures looked at in it.
    checks: (u64, u32),
}

impl Listening {
    pub fn new(pool: PoolKey) -> Listening {
        Listening { pool, known: HashMap::with_capacity(SERVERS_MAX), checks: (0, 0) }
    }

    /// Makes a server known, as the operator or etcd names it. `false` if it does not announce itself, or there are
    /// [`SERVERS_MAX`] already.
    pub fn know(&mut self, server: &ServerInfo) -> bool {
        let Some(signer) = server.announcer else { return false };
        let room = self.known.len() < SERVERS_MAX || self.known.contains_key(&server.id);
        if room {
            self.known.insert(server.id, Known { key: server.key, signer, last_ms: 0 });
        }
        room
    }

    /// What a datagram says, if it is to be believed. Cheap checks come first.
    ///
    /// # Errors
    /// Why it is not. Nothing is answered and nothing remembered.
    pub fn take(&mut self, now_ms: u64, datagram: &[u8]) -> Result<Announcement, Ignored> {
        let bytes: &[u8; ANNOUNCEMENT_SIZE] = datagram.try_into().map_err(|_| Ignored::Malformed)?;
        let (about, stamp_ms) = decode(bytes).ok_or(Ignored::Malformed)?;
        let code = self.pool.announcement_code(&bytes[..CODED]);
        constant_time::verify_slices_are_equal(&bytes[CODED..], &code).map_err(|_| Ignored::Stranger)?;
        let known = self.known.get_mut(&about.server).filter(|known| known.key == about.key);
        let known = known.ok_or(Ignored::Unknown)?;
        if stamp_ms <= known.last_ms {
            return Err(Ignored::Replayed);
        }
        if u128::from(stamp_ms.abs_diff(now_ms)) > AGE_MAX.as_millis() {
            return Err(Ignored::Late);
        }
        let second = now_ms / 1000;
        if self.checks.0 != second {
            self.checks = (second, 0);
        }
        if self.checks.1 >= CHECKS_PER_SECOND {
            return Err(Ignored::TooMany);
        }
        self.checks.1 += 1;
        UnparsedPublicKey::new(&ED25519, known.signer.0)
            .verify(&in_context(&bytes[..SIGNED]), &bytes[SIGNED..CODED])
            .map_err(|_| Ignored::Forged)?;
        known.last_ms = stamp_ms;
        Ok(about)
    }
}

#[cfg(test)]
mod tests;
