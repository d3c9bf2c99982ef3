//! Values of keys in etcd: small JSON with a version. They are checked before they are believed, whoever wrote them.

use std::net::SocketAddr;

use rmap::announce::AnnounceKey;
use rmap::client::SPACE_SLABS_MAX;
use rmap::control::{MapEntry, REPLICAS_MAX, Replica, Replicas};
use rmap::crypto::PublicKey;
use rmap::servers::parse_key;
use rmap::units::{BootEpoch, Generation, SLABS_MAX, ServerId, SlabSize, SpaceId, Version};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest name of a space, a pool, a host.
pub const NAME_MAX: usize = 64;
/// Longest value that is looked at: several times what any takes.
pub const VALUE_MAX: usize = 4096;
/// Longest name of a VM, which may have letters of any language.
const VM_NAME_MAX: usize = 255;
/// Of the values. Another one is refused: nothing is guessed.
const VERSION: u32 = 1;

/// What a server is ready for, as it says itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    Up,
    /// Gives no slabs away.
    Full,
    /// Wants its slabs moved elsewhere.
    Draining,
}

/// A server, as its leased record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: ServerId,
    pub addr: SocketAddr,
    pub key: PublicKey,
    pub zone: u32,
    pub slab_size: SlabSize,
    /// Slabs in all, and those that nobody has.
    pub slabs: u32,
    pub free: u32,
    pub state: NodeState,
    pub epoch: BootEpoch,
    /// Who signs its announcements, if it makes any.
    pub announcer: Option<AnnounceKey>,
}

/// A space, as it was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    pub name: String,
    pub id: SpaceId,
    pub pages: u64,
    pub copies: usize,
    /// Slabs that are to be kept free for it at every server.
    pub reserve: u32,
}

/// Who has a space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// 0 until it has its first.
    pub generation: Generation,
    /// Nobody writes to the space any more: the host is the one that keeps its copies, or sealed it.
    pub sealed: bool,
    pub host: String,
    /// Of one attempt to take over: its author knows it again.
    pub nonce: u64,
}

/// Which registers those of moves are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistersId {
    /// Random, and not 0.
    pub nonce: u64,
}

/// Who owns a VM that moves, as its arbiter has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// The VM's name, for operators.
    pub vm: String,
    pub generation: u64,
    /// The owner's public key.
    pub owner: [u8; 32],
}

/// A value of etcd.
pub trait Value: Sized {
    fn encode(&self) -> Vec<u8>;

    /// # Errors
    /// What is wrong with it.
    fn decode(bytes: &[u8]) -> Result<Self, String>;
}

/// 64 bits as 16 hexadecimal digits: other readers of JSON keep 53 bits of a number.
#[derive(Clone, Copy, Debug)]
struct Hex(u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:016x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = digits.then(|| u64::from_str_radix(&text, 16).ok()).flatten();
        number.map(Hex).ok_or_else(|| D::Error::custom("16 hexadecimal digits are wanted"))
    }
}

#[derive(Deserialize)]
struct Versioned {
    v: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeText {
    v: u32,
    id: u32,
    addr: SocketAddr,
    key: String,
    zone: u32,
    slab_pages: u32,
    slabs: u32,
    free: u32,
    state: NodeState,
    epoch: Hex,
    /// Programs of before there were announcements do not see a server that says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    announcer: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpaceText {
    v: u32,
    name: String,
    id: Hex,
    pages: u64,
    copies: usize,
    reserve: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnerText {
    v: u32,
    generation: u32,
    /// Where it is not said it is not so. Programs of before there were sealed spaces refuse a record that says it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    sealed: bool,
    host: String,
    nonce: Hex,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryText {
    v: u32,
    revision: u64,
    lost: bool,
    /// Where it is not said it is not so. Programs of before slabs were given back refuse a record that says it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    empty: bool,
    copies: Vec<CopyText>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CopyText {
    server: u32,
    grant: Hex,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RegistersText {
    v: u32,
    nonce: Hex,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RegisterText {
    v: u32,
    vm: String,
    generation: Hex,
    owner: String,
}

fn text(value: &impl Serialize) -> Vec<u8> {
    // Strings and numbers: there is nothing in them that JSON cannot say.
    serde_json::to_vec(value).unwrap_or_default()
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    if bytes.len() > VALUE_MAX {
        return Err(format!("{} bytes are more than {VALUE_MAX}", bytes.len()));
    }
    let Versioned { v } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if v != VERSION {
        return Err(format!("version {v} is not spoken here, {VERSION} is"));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

fn wrong<T>(what: impl Into<String>) -> Result<T, String> {
    Err(what.into())
}

/// # Errors
/// What is wrong with it: 1 to [`NAME_MAX`] of a-z, 0-9, '-', '_', '.'.
pub fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"-_.".contains(&c);
    if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(allowed) {
        return wrong(format!("a name is 1 to {NAME_MAX} of a-z, 0-9, '-', '_', '.'"));
    }
    Ok(())
}

impl Space {
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        check_name(&self.name)?;
        if self.pages == 0 || self.pages > (SPACE_SLABS_MAX as u64) << 20 {
            return wrong(format!("{} pages", self.pages));
        }
        if !(1..=2).contains(&self.copies) {
            return wrong(format!("{} copies: give 1 or 2", self.copies));
        }
        if self.reserve as usize > SLABS_MAX {
            return wrong(format!("a reservation of {} slabs", self.reserve));
        }
        Ok(())
    }
}

impl Value for Node {
    fn encode(&self) -> Vec<u8> {
        text(&NodeText {
            v: VERSION,
            id: self.id.0,
            addr: self.addr,
            key: format!("{:?}", self.key),
            zone: self.zone,
            slab_pages: self.slab_size.pages() as u32,
            slabs: self.slabs,
            free: self.free,
            state: self.state,
            epoch: Hex(self.epoch.0),
            announcer: self.announcer.map(|key| format!("{key:?}")),
        })
    }

    fn decode(bytes: &[u8]) -> Result<Node, String> {
        let NodeText { id, addr, key, zone, slab_pages, slabs, free, state, epoch, announcer, .. } = parse(bytes)?;
        let digits = "a public key is 64 hexadecimal digits";
        let Some(key) = parse_key(&key) else { return wrong(digits) };
        let announcer = announcer.map(|key| parse_key(&key).ok_or(digits)).transpose()?.map(|key| AnnounceKey(key.0));
        let Some(slab_size) = SlabSize::new(slab_pages) else { return wrong(format!("slabs of {slab_pages} pages")) };
        if slabs as usize > SLABS_MAX || free > slabs {
            return wrong(format!("{free} slabs free of {slabs}"));
        }
        if addr.port() == 0 || addr.ip().is_unspecified() || addr.ip().is_multicast() {
            return wrong(format!("no server can be reached at {addr}"));
        }
        let (id, epoch) = (ServerId(id), BootEpoch(epoch.0));
        Ok(Node { id, addr, key, zone, slab_size, slabs, free, state, epoch, announcer })
    }
}

impl Value for Space {
    fn encode(&self) -> Vec<u8> {
        let Space { name, id, pages, copies, reserve } = self.clone();
        text(&SpaceText { v: VERSION, name, id: Hex(id.0), pages, copies, reserve })
    }

    fn decode(bytes: &[u8]) -> Result<Space, String> {
        let SpaceText { name, id, pages, copies, reserve, .. } = parse(bytes)?;
        let space = Space { name, id: SpaceId(id.0), pages, copies, reserve };
        space.check()?;
        Ok(space)
    }
}

impl Value for Owner {
    fn encode(&self) -> Vec<u8> {
        let host = self.host.clone();
        let (generation, sealed) = (self.generation.0, self.sealed);
        text(&OwnerText { v: VERSION, generation, sealed, host, nonce: Hex(self.nonce) })
    }

    fn decode(bytes: &[u8]) -> Result<Owner, String> {
        let OwnerText { generation, sealed, host, nonce, .. } = parse(bytes)?;
        check_name(&host)?;
        if generation > Generation::MAX.0 {
            return wrong(format!("generation {generation}"));
        }
        Ok(Owner { generation: Generation(generation), sealed, host, nonce: nonce.0 })
    }
}

impl Value for RegistersId {
    fn encode(&self) -> Vec<u8> {
        text(&RegistersText { v: VERSION, nonce: Hex(self.nonce) })
    }

    fn decode(bytes: &[u8]) -> Result<RegistersId, String> {
        let RegistersText { nonce, .. } = parse(bytes)?;
        if nonce.0 == 0 {
            return wrong("registers of the number 0");
        }
        Ok(RegistersId { nonce: nonce.0 })
    }
}

impl Value for Register {
    fn encode(&self) -> Vec<u8> {
        let owner = format!("{:?}", PublicKey(self.owner));
        text(&RegisterText { v: VERSION, vm: self.vm.clone(), generation: Hex(self.generation), owner })
    }

    fn decode(bytes: &[u8]) -> Result<Register, String> {
        let RegisterText { vm, generation, owner, .. } = parse(bytes)?;
        if vm.is_empty() || vm.len() > VM_NAME_MAX || vm.chars().any(char::is_control) {
            return wrong(format!("the name of a VM is 1 to {VM_NAME_MAX} bytes without control characters"));
        }
        let Some(owner) = parse_key(&owner) else { return wrong("a public key is 64 hexadecimal digits") };
        if generation.0 == 0 {
            return wrong("generation 0");
        }
        Ok(Register { vm, generation: generation.0, owner: owner.0 })
    }
}

impl Value for MapEntry {
    fn encode(&self) -> Vec<u8> {
        let copy = |replica: &Replica| CopyText { server: replica.server.0, grant: Hex(replica.grant.bits()) };
        let copies = self.replicas.iter().map(copy).collect();
        text(&EntryText { v: VERSION, revision: self.revision, lost: self.lost, empty: self.empty, copies })
    }

    fn decode(bytes: &[u8]) -> Result<MapEntry, String> {
        let EntryText { revision, lost, empty, copies, .. } = parse(bytes)?;
        let replica =
            |copy: &CopyText| Replica { server: ServerId(copy.server), grant: Version::from_bits(copy.grant.0) };
        let replicas: Replicas = copies.iter().map(replica).collect();
        if replicas.len() > REPLICAS_MAX {
            return wrong(format!("{} copies", replicas.len()));
        }
        let twice = |(at, one): (usize, &Replica)| replicas[..at].iter().any(|other| other.server == one.server);
        if replicas.iter().enumerate().any(twice) {
            return wrong("two copies at one server");
        }
        if replicas.iter().any(|replica| replica.grant == Version::NEVER) {
            return wrong("a copy without a grant");
        }
        let entry = MapEntry { revision, replicas, lost, empty };
        // An entry that lost its copies by mistake would read as zeros.
        if !entry.is_sound() {
            return wrong("copies in sync, or lost, or empty: one of them");
        }
        Ok(entry)
    }
}

#[cfg(test)]
mod tests;
