//! The store: owners and maps by compare-and-swap.
//!
//! Every change is one transaction that compares the owner's record with the caller's generation, so that a change of an
//! earlier owner, however late it arrives, cannot succeed once the record has changed. A record counts its changes twice,
//! once in its value and once by etcd's version of the key; the transaction compares the latter, the reader both.
//!
//! # An answer that was lost
//!
//! The same transaction is sent again. If the first one was carried out, or is carried out between, the second finds what
//! the first wrote, and recognizes it: an entry by its content, whose grants nobody else makes; an owner by its nonce.

use std::collections::HashMap;
use std::time::Instant;

use aws_lc_rs::rand;
use rmap::control::{Change, ControlPlane, ControlReply, ControlRequest, Map, MapEntry, REPLICAS_MAX, Today};
use rmap::units::{Generation, SpaceId};
use serde_json::{Value as Json, json};

use crate::config::EtcdConfig;
use crate::error::EtcdError;
use crate::gateway::{Found, Gateway, KeyValue, RangeReply, Reply, TxnReply, base64};
use crate::keys::{self, Keys};
use crate::values::{Owner, Value};

/// Entries changed by one transaction: half of what etcd takes by default (`--max-txn-ops`).
pub const BATCH_MAX: usize = 64;
/// Keys in one answer to a range.
const PAGE_KEYS: usize = 1024;
/// How long a call waits before it tries again after an error that may pass.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

/// A connection to etcd. Each call waits, at most for the patience that the configuration gives.
#[derive(Debug)]
pub struct Etcd {
    pub(crate) config: EtcdConfig,
    pub(crate) gateway: Gateway,
    pub(crate) keys: Keys,
    /// Spaces that others write and this one reads, as they were last seen.
    looked: HashMap<SpaceId, Looked>,
}

/// A space as it was, and no earlier than at this revision of the store.
#[derive(Debug)]
struct Looked {
    revision: u64,
    today: Today,
}

/// A key as it is; version 0 if it is not.
pub(crate) struct Slot<T> {
    pub version: u64,
    pub mod_revision: u64,
    pub value: Option<T>,
}

impl Etcd {
    /// Looks whether etcd is there.
    ///
    /// # Errors
    /// The configuration, or whatever is at these addresses.
    pub fn connect(config: EtcdConfig) -> Result<Etcd, EtcdError> {
        let mut etcd = Etcd::open(config)?;
        etcd.patiently(|etcd| etcd.range(etcd.keys.nodes().as_bytes(), None, 1).map(drop))?;
        Ok(etcd)
    }

    /// Without looking: for threads that go on while etcd is away.
    pub(crate) fn open(config: EtcdConfig) -> Result<Etcd, EtcdError> {
        Ok(Etcd { gateway: Gateway::new(&config)?, keys: Keys::new(&config.pool), config, looked: HashMap::new() })
    }

    /// The same again, until it is known what came of it.
    pub(crate) fn patiently<T>(
        &mut self,
        mut work: impl FnMut(&mut Etcd) -> Result<T, EtcdError>,
    ) -> Result<T, EtcdError> {
        let until = Instant::now() + self.config.patience;
        loop {
            match work(self) {
                Err(error) if error.is_transient() && Instant::now() < until => std::thread::sleep(PAUSE),
                result => return result,
            }
        }
    }

    pub(crate) fn call<T: Reply>(&mut self, path: &str, body: &Json) -> Result<T, EtcdError> {
        self.gateway.call(path, body)
    }

    /// Keys from `first` to before `end` (`None`: this one), at most `limit`, as they are after all changes so far.
    pub(crate) fn range(&mut self, first: &[u8], end: Option<&[u8]>, limit: usize) -> Result<Found, EtcdError> {
        self.range_at(first, end, limit, None)
    }

    /// The same as of a revision.
    fn range_at(
        &mut self,
        first: &[u8],
        end: Option<&[u8]>,
        limit: usize,
        revision: Option<u64>,
    ) -> Result<Found, EtcdError> {
        let mut body = json!({ "key": base64(first), "limit": limit.to_string() });
        if let Some(end) = end {
            body["range_end"] = base64(end).into();
        }
        if let Some(revision) = revision {
            body["revision"] = revision.to_string().into();
        }
        self.call::<RangeReply>("kv/range", &body).map(|reply| reply.found)
    }

    /// All keys that begin so, in pages, all of them as of the first. What comes of each that is a `T` is for `keep`.
    pub(crate) fn all<T: Value>(
        &mut self,
        prefix: &str,
        keep: impl FnMut(&str, u64, T) -> Result<(), EtcdError>,
    ) -> Result<(), EtcdError> {
        self.all_at(prefix, None, keep)
    }

    /// The same as of a revision.
    fn all_at<T: Value>(
        &mut self,
        prefix: &str,
        mut revision: Option<u64>,
        mut keep: impl FnMut(&str, u64, T) -> Result<(), EtcdError>,
    ) -> Result<(), EtcdError> {
        let end = keys::end_of(prefix);
        let mut from = prefix.as_bytes().to_vec();
        loop {
            let found = self.patiently(|etcd| etcd.range_at(&from, Some(&end), PAGE_KEYS, revision))?;
            revision.get_or_insert(self.gateway.revision());
            for kv in &found.kvs {
                let key = String::from_utf8_lossy(&kv.key.0).into_owned();
                if kv.key.0 < from || kv.key.0 >= end {
                    return Err(garbage(&key, "it was not asked for"));
                }
                keep(&key, kv.version.0, decode(&key, kv)?)?;
                from = kv.key.0.clone();
                // The least key behind it.
                from.push(0);
            }
            if !found.more || found.kvs.is_empty() {
                return Ok(());
            }
        }
    }

    pub(crate) fn get<T: Value>(&mut self, key: &str) -> Result<Slot<T>, EtcdError> {
        let found = self.patiently(|etcd| etcd.range(key.as_bytes(), None, 1))?;
        slot(key, &found)
    }

    pub(crate) fn txn(&mut self, compare: &[Json], success: &[Json], failure: &[Json]) -> Result<TxnReply, EtcdError> {
        self.call("kv/txn", &json!({ "compare": compare, "success": success, "failure": failure }))
    }

    /// The owner of a space, checked. `None` if there is no such space.
    pub(crate) fn owner(&mut self, space: SpaceId) -> Result<Option<Owner>, EtcdError> {
        let key = self.keys.owner(space);
        let slot = self.get(&key)?;
        checked_owner(&key, slot)
    }

    /// The generation that owns a space today; 0 if nobody has owned it yet.
    ///
    /// # Errors
    /// etcd cannot say, or there is no such space.
    pub fn generation(&mut self, space: SpaceId) -> Result<Generation, EtcdError> {
        let owner = self.owner(space)?.ok_or_else(|| no_space(space))?;
        Ok(owner.generation)
    }

    /// The owner of a space and its map at the same moment.
    ///
    /// # Errors
    /// etcd cannot say, or there is no such space.
    pub fn look(&mut self, space: SpaceId) -> Result<(Owner, Map), EtcdError> {
        let owner = self.owner(space)?.ok_or_else(|| no_space(space))?;
        let revision = self.gateway.revision();
        Ok((owner, self.map_at(space, Some(revision))?))
    }

    /// Compares and swaps several entries of one space, all in one transaction where all can be. The answers are in the
    /// order of the requests.
    ///
    /// # Errors
    /// Requests that do not belong together; else each change may have happened or not.
    pub fn answer_batch(&mut self, requests: &[Change]) -> Result<Vec<ControlReply>, EtcdError> {
        let Some(first) = requests.first() else { return Ok(Vec::new()) };
        check_batch(first, requests)?;
        let mut replies: Vec<Option<ControlReply>> = vec![None; requests.len()];
        loop {
            let open: Vec<usize> = (0..requests.len()).filter(|at| replies[*at].is_none()).collect();
            if open.is_empty() {
                return Ok(replies.into_iter().flatten().collect());
            }
            let batch: Vec<&Change> = open.iter().map(|at| &requests[*at]).collect();
            for (at, reply) in open.into_iter().zip(self.transact(first, &batch)?) {
                replies[at] = reply;
            }
        }
    }

    /// One transaction. `None` for what another entry kept from succeeding.
    fn transact(&mut self, about: &Change, batch: &[&Change]) -> Result<Vec<Option<ControlReply>>, EtcdError> {
        let owner = self.keys.owner(about.space);
        let slabs: Vec<String> = batch.iter().map(|request| self.keys.slab(request.space, request.slab)).collect();
        // Its first record is of generation 0.
        let mut compare = vec![version_is(&owner, u64::from(about.generation.0) + 1)];
        let before = |request: &&Change| request.entry.revision - 1;
        compare.extend(slabs.iter().zip(batch).map(|(key, request)| version_is(key, before(request))));
        let puts: Vec<Json> = slabs.iter().zip(batch).map(|(key, r)| put(key, &r.entry.encode(), None)).collect();
        let looks: Vec<Json> = std::iter::once(&owner).chain(&slabs).map(|key| look(key)).collect();
        let reply = self.patiently(|etcd| etcd.txn(&compare, &puts, &looks))?;
        if reply.succeeded {
            return Ok(vec![Some(ControlReply::Done); batch.len()]);
        }
        let mut found = reply.responses.iter().map(|op| op.response_range.as_ref());
        let today = checked_owner(&owner, slot(&owner, found.next().flatten().unwrap_or(&Found::default()))?)?;
        if today.ok_or_else(|| no_space(about.space))?.generation != about.generation {
            return Ok(vec![Some(ControlReply::Fenced); batch.len()]);
        }
        let mut replies = Vec::with_capacity(batch.len());
        for (key, request) in slabs.iter().zip(batch) {
            let slot: Slot<MapEntry> = slot(key, found.next().flatten().unwrap_or(&Found::default()))?;
            let entry = checked_entry(key, slot)?;
            replies.push(if entry == request.entry {
                Some(ControlReply::Done)
            } else if entry.revision == before(request) {
                None
            } else {
                Some(ControlReply::Conflict(entry))
            });
        }
        if replies.iter().all(Option::is_none) {
            return Err(garbage(&owner, "its transaction failed, and every comparison holds"));
        }
        Ok(replies)
    }

    /// A space, for a reader: as it is at some moment after this was called. One that has not changed since the last time, which
    /// who reads what others write asks for all the time, is not sent again.
    fn seen(&mut self, space: SpaceId) -> Result<ControlReply, EtcdError> {
        if let Some(looked) = self.looked.remove(&space)
            && self.is_unchanged(space, looked.revision)?
        {
            let today = looked.today.clone();
            self.looked.insert(space, looked);
            return Ok(ControlReply::Seen(today));
        }
        let Some(Owner { generation, sealed, .. }) = self.owner(space)? else { return Ok(ControlReply::Gone) };
        let revision = self.gateway.revision();
        let today = Today { generation, sealed, map: self.map_at(space, Some(revision))? };
        self.looked.insert(space, Looked { revision, today: today.clone() });
        Ok(ControlReply::Seen(today))
    }

    /// Whether a space is there, and nothing of it has changed since a revision.
    fn is_unchanged(&mut self, space: SpaceId, revision: u64) -> Result<bool, EtcdError> {
        let (owner, map) = (self.keys.owner(space), self.keys.map(space));
        let older = |key: &[u8], end: Option<&[u8]>| {
            let mut compare = json!({ "key": base64(key), "target": "MOD", "result": "LESS" });
            compare["mod_revision"] = (revision + 1).to_string().into();
            if let Some(end) = end {
                compare["range_end"] = base64(end).into();
            }
            compare
        };
        let there = json!({ "key": base64(&owner), "target": "VERSION", "result": "GREATER", "version": "0" });
        let compare = [there, older(owner.as_bytes(), None), older(map.as_bytes(), Some(&keys::end_of(&map)))];
        // A transaction that looks at nothing would be answered by a member that has not heard of the last changes.
        let looks = [look(&owner)];
        Ok(self.patiently(|etcd| etcd.txn(&compare, &looks, &looks))?.succeeded)
    }

    /// As [`ControlPlane::take_over`], if nobody has owned the space since this generation.
    ///
    /// # Errors
    /// As there; [`EtcdError::Raced`] if somebody has.
    pub fn take_over_from(&mut self, space: SpaceId, expected: Generation) -> Result<(Generation, Map), EtcdError> {
        let today = self.succeed(space, Some(expected), false)?;
        Ok((today.generation, today.map))
    }

    /// The next generation of a space, after the `expected` one, if that is given.
    ///
    /// The order: the owner's record first, then the map. From the moment the record has changed, no change of an
    /// earlier owner can succeed, so what is read after it is the map that all of them left.
    fn succeed(&mut self, space: SpaceId, expected: Option<Generation>, seal: bool) -> Result<Today, EtcdError> {
        let key = self.keys.owner(space);
        let before = self.owner(space)?.ok_or_else(|| no_space(space))?;
        if expected.is_some_and(|expected| expected != before.generation) {
            return Err(EtcdError::Raced { host: before.host, generation: before.generation.0 });
        }
        if before.generation >= Generation::MAX {
            return Err(EtcdError::GenerationsUsedUp);
        }
        let (generation, sealed) = (Generation(before.generation.0 + 1), before.sealed || seal);
        let owner = Owner { generation, sealed, host: self.config.host.clone(), nonce: random()? };
        let compare = [version_is(&key, u64::from(generation.0))];
        let (puts, looks) = ([put(&key, &owner.encode(), None)], [look(&key)]);
        let reply = self.patiently(|etcd| etcd.txn(&compare, &puts, &looks))?;
        if !reply.succeeded {
            let today = checked_owner(&key, slot(&key, &only(reply))?)?.ok_or_else(|| no_space(space))?;
            if today != owner {
                return Err(EtcdError::Raced { host: today.host, generation: today.generation.0 });
            }
        }
        Ok(Today { generation, sealed, map: self.read_map(space)? })
    }

    fn read_map(&mut self, space: SpaceId) -> Result<Map, EtcdError> {
        self.map_at(space, None)
    }

    /// A map as of a revision, or as it is.
    fn map_at(&mut self, space: SpaceId, revision: Option<u64>) -> Result<Map, EtcdError> {
        let prefix = self.keys.map(space);
        let mut map = Map::new();
        self.all_at(&prefix, revision, |key, version, entry: MapEntry| {
            let slab = keys::slab_of(&prefix, key).ok_or_else(|| garbage(key, "no slab has this number"))?;
            let slot = Slot { version, mod_revision: 0, value: Some(entry) };
            map.push((slab, checked_entry(key, slot)?));
            Ok(())
        })?;
        Ok(map)
    }
}

impl ControlPlane for Etcd {
    type Error = EtcdError;

    fn take_over(&mut self, space: SpaceId) -> Result<(Generation, Map), EtcdError> {
        let today = self.succeed(space, None, false)?;
        Ok((today.generation, today.map))
    }

    fn seal(&mut self, space: SpaceId, generation: Generation) -> Result<Generation, EtcdError> {
        self.succeed(space, Some(generation), true).map(|today| today.generation)
    }

    fn answer(&mut self, request: &ControlRequest) -> Result<ControlReply, EtcdError> {
        match request {
            ControlRequest::Change(change) => {
                let replies = self.answer_batch(std::slice::from_ref(change))?;
                Ok(replies.into_iter().next().unwrap_or(ControlReply::Later))
            }
            ControlRequest::Look { space } => self.seen(*space),
            ControlRequest::Confirm { space, generation } => {
                let owner = self.owner(*space)?.map(|owner| owner.generation);
                Ok(if owner == Some(*generation) { ControlReply::Done } else { ControlReply::Fenced })
            }
            ControlRequest::Keep { space, generation } => match self.owner(*space)? {
                None => Ok(ControlReply::Gone),
                Some(owner) if !owner.sealed => self.seen(*space),
                Some(_) => match self.succeed(*space, Some(*generation), true) {
                    Err(EtcdError::Raced { .. }) => self.seen(*space),
                    today => Ok(ControlReply::Kept(today?)),
                },
            },
        }
    }
}

fn check_batch(first: &Change, requests: &[Change]) -> Result<(), EtcdError> {
    let together = |r: &Change| (r.space, r.generation) == (first.space, first.generation);
    let mut slabs: Vec<u32> = requests.iter().map(|request| request.slab.0).collect();
    slabs.sort_unstable();
    slabs.dedup();
    if requests.len() > BATCH_MAX || slabs.len() != requests.len() || !requests.iter().all(together) {
        return invalid(format!("a batch is of one owner, and of at most {BATCH_MAX} different slabs"));
    }
    if first.generation == Generation(0) || first.generation > Generation::MAX {
        return invalid(format!("generation {}", first.generation.0));
    }
    for Change { entry, .. } in requests {
        if entry.revision == 0 || entry.replicas.len() > REPLICAS_MAX {
            return invalid(format!("revision {} with {} copies", entry.revision, entry.replicas.len()));
        }
        MapEntry::decode(&entry.encode()).or_else(invalid)?;
    }
    Ok(())
}

pub(crate) fn invalid<T>(what: String) -> Result<T, EtcdError> {
    Err(EtcdError::Invalid { what })
}

pub(crate) fn garbage(key: &str, what: impl Into<String>) -> EtcdError {
    EtcdError::Garbage { key: key.to_owned(), what: what.into() }
}

fn no_space(space: SpaceId) -> EtcdError {
    EtcdError::NoSuchSpace { name: format!("{:016x}", space.0) }
}

fn decode<T: Value>(key: &str, kv: &KeyValue) -> Result<T, EtcdError> {
    T::decode(&kv.value.0).map_err(|what| garbage(key, what))
}

/// What a range over one key found.
pub(crate) fn slot<T: Value>(key: &str, found: &Found) -> Result<Slot<T>, EtcdError> {
    match &found.kvs[..] {
        [] => Ok(Slot { version: 0, mod_revision: 0, value: None }),
        [kv] if kv.key.0 == key.as_bytes() && kv.version.0 > 0 => {
            Ok(Slot { version: kv.version.0, mod_revision: kv.mod_revision.0, value: Some(decode(key, kv)?) })
        }
        _ => Err(garbage(key, "another key was answered")),
    }
}

/// What the only operation of a failed transaction found.
pub(crate) fn only(reply: TxnReply) -> Found {
    reply.responses.into_iter().next().and_then(|op| op.response_range).unwrap_or_default()
}

fn checked_owner(key: &str, slot: Slot<Owner>) -> Result<Option<Owner>, EtcdError> {
    match &slot.value {
        Some(owner) if u64::from(owner.generation.0) + 1 != slot.version => {
            let Slot { version, .. } = slot;
            Err(garbage(key, format!("generation {} in change {version}", owner.generation.0)))
        }
        _ => Ok(slot.value),
    }
}

fn checked_entry(key: &str, slot: Slot<MapEntry>) -> Result<MapEntry, EtcdError> {
    let entry = slot.value.unwrap_or_default();
    if entry.revision != slot.version {
        return Err(garbage(key, format!("revision {} in change {}", entry.revision, slot.version)));
    }
    Ok(entry)
}

/// The key was changed so many times since it was made; 0 if it is not there.
pub(crate) fn version_is(key: &str, version: u64) -> Json {
    json!({ "key": base64(key), "target": "VERSION", "result": "EQUAL", "version": version.to_string() })
}

pub(crate) fn put(key: &str, value: &[u8], lease: Option<u64>) -> Json {
    let mut body = json!({ "key": base64(key), "value": base64(value) });
    if let Some(lease) = lease {
        body["lease"] = lease.to_string().into();
    }
    json!({ "request_put": body })
}

pub(crate) fn look(key: &str) -> Json {
    json!({ "request_range": { "key": base64(key) } })
}

/// # Errors
/// The system has no randomness.
pub(crate) fn random() -> Result<u64, EtcdError> {
    let mut bytes = [0; 8];
    rand::fill(&mut bytes).map_err(|_| EtcdError::Invalid { what: "the system has no random numbers".to_owned() })?;
    Ok(u64::from_le_bytes(bytes))
}
