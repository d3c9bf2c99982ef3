//! The control plane of one machine: a file. No other process is needed.
//!
//! The file is a log: eight bytes of magic, then records, each with its length and a checksum. Every change is on disk before
//! it is answered: an owner that starts again after a crash of the machine must not find a copy in sync that had left.
//! Several processes may have it open; each change is made under a lock of the file, after reading what others appended. A
//! record that a crash cut short is cut off, and the log is written anew without what is outdated when it has grown.
//!
//! | bytes | record |
//! |---|---|
//! | 0..4 | length of the body |
//! | 4..12 | first bytes of its SHA-256 |
//! | 12.. | body: kind (1), space (8), then for an owner (1): generation (4), its highest bit set where the space is sealed, all ones where it is forgotten; for an entry (2): slab (4), revision (8), lost (1), copies (1; none, and not lost: it was given back), and for each copy server (4), grant (8) |

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest;
use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

use rmap::control::{Change, ControlPlane, ControlReply, ControlRequest, Map, MapEntry, REPLICAS_MAX, Replica, Today};
use rmap::units::{Generation, ServerId, SlabNo, SpaceId, Version};

const MAGIC: &[u8; 8] = b"RMAPREG1";
const RECORD_HEADER: usize = 12;
const OWNER: u8 = 1;
const ENTRY: u8 = 2;
const OWNER_SIZE: usize = 13;
const ENTRY_SIZE: usize = 23;
const COPY_SIZE: usize = 12;
const BODY_MAX: usize = ENTRY_SIZE + REPLICAS_MAX * COPY_SIZE;
/// What stands as the generation of a space that is forgotten. A program of before that was possible takes it for one that had
/// all its owners: it makes no new one, and no change of its map.
const FORGOTTEN: u32 = u32::MAX;
/// Stands with the generation of a space that is sealed. An older program takes that for used-up generations, too.
const SEALED: u32 = 1 << 31;
/// The log is written anew when it has so many times the records that it needs, and some.
const COMPACT_FACTOR: u64 = 4;
const COMPACT_MIN: u64 = 4096;

/// Why the registry cannot be used.
#[derive(Debug, Error)]
pub enum RegistryError {
    #[error("registry {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} is not a registry of this version: give another path, or move the file away")]
    NotOurs { path: PathBuf },
    #[error("space {space:x} has an owner of generation {today}, not {asked}: nothing was done")]
    NotOwner { space: u64, asked: u32, today: u32 },
    #[error(
        "slab {slab} of space {space:x} is to have copies, to be lost or to be empty, one of them: nothing was changed"
    )]
    NotSound { space: u64, slab: u32 },
    #[error("space {space:x} has had {max} owners: make a new one", max = Generation::MAX.0)]
    GenerationsUsedUp { space: u64 },
}

#[derive(Debug, Default)]
struct Record {
    generation: u32,
    sealed: bool,
    map: BTreeMap<u32, MapEntry>,
}

/// The file and what it says.
#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    file: File,
    spaces: BTreeMap<u64, Record>,
    /// How far the file was read, and how many records that were.
    read_to: u64,
    records: u64,
}

impl Registry {
    /// Opens a registry, or makes one.
    ///
    /// # Errors
    /// The file cannot be used, or is something else.
    pub fn open(path: &Path) -> Result<Registry, RegistryError> {
        let fail = |source| RegistryError::Io { path: path.to_owned(), source };
        let file = open_file(path).map_err(fail)?;
        let mut registry = Registry { path: path.to_owned(), file, spaces: BTreeMap::new(), read_to: 0, records: 0 };
        registry.locked(|registry| {
            if registry.file.metadata()?.len() == 0 {
                registry.file.write_all(MAGIC)?;
                registry.file.sync_all()?;
            }
            Ok(())
        })?;
        let mut magic = [0; MAGIC.len()];
        let read = registry.file.seek(SeekFrom::Start(0)).and_then(|_| registry.file.read_exact(&mut magic));
        if read.is_err() || magic != *MAGIC {
            return Err(RegistryError::NotOurs { path: path.to_owned() });
        }
        registry.read_to = MAGIC.len() as u64;
        registry.locked(Registry::catch_up)?;
        Ok(registry)
    }

    /// The next owner of a space, and where its slabs are.
    ///
    /// # Errors
    /// The file cannot be written, or the generations are used up.
    pub fn take_over(&mut self, space: SpaceId) -> Result<(Generation, Map), RegistryError> {
        let today = self.succeed(space, None, false)?;
        Ok((today.generation, today.map))
    }

    /// Seals a space, as [`ControlPlane::seal`] says.
    ///
    /// # Errors
    /// The file cannot be written; somebody took the space over; the generations are used up.
    pub fn seal(&mut self, space: SpaceId, generation: Generation) -> Result<Generation, RegistryError> {
        self.succeed(space, Some(generation), true).map(|today| today.generation)
    }

    /// The next generation of a space, after the `expected` one, if that is given.
    fn succeed(&mut self, space: SpaceId, expected: Option<Generation>, seal: bool) -> Result<Today, RegistryError> {
        let (before, next) = self.locked(|registry| {
            registry.catch_up()?;
            let record = registry.spaces.get(&space.0);
            let (before, sealed) = record.map_or((0, false), |record| (record.generation, record.sealed));
            let next = before + 1;
            if next <= Generation::MAX.0 && expected.is_none_or(|expected| expected.0 == before) {
                registry.append(&[encode_owner(space.0, next, sealed || seal)])?;
            }
            Ok((before, next))
        })?;
        if let Some(Generation(asked)) = expected.filter(|expected| expected.0 != before) {
            return Err(RegistryError::NotOwner { space: space.0, asked, today: before });
        }
        if next > Generation::MAX.0 {
            return Err(RegistryError::GenerationsUsedUp { space: space.0 });
        }
        Ok(self.today(space).unwrap_or_default())
    }

    /// As of the last look at the file.
    fn today(&self, space: SpaceId) -> Option<Today> {
        let Record { generation, sealed, map } = self.spaces.get(&space.0)?;
        let map = map.iter().map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect();
        Some(Today { generation: Generation(*generation), sealed: *sealed, map })
    }

    /// Forgets a space that is not used any more, whose last owner is of this generation: its records go when the log is next
    /// written anew. Numbers of spaces are random, and none is used twice.
    ///
    /// # Errors
    /// The file cannot be written; somebody took the space over.
    pub fn forget(&mut self, space: SpaceId, generation: Generation) -> Result<(), RegistryError> {
        let today = self.locked(|registry| {
            registry.catch_up()?;
            let Some(record) = registry.spaces.get(&space.0) else { return Ok(generation.0) };
            let today = record.generation;
            if today == generation.0 {
                registry.append(&[encode_word(space.0, FORGOTTEN)])?;
            }
            Ok(today)
        })?;
        if today != generation.0 {
            return Err(RegistryError::NotOwner { space: space.0, asked: generation.0, today });
        }
        Ok(())
    }

    /// Makes a space known that had no owner yet, so that who reads it before its first owner can tell that from one that was
    /// forgotten.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn expect(&mut self, space: SpaceId) -> Result<(), RegistryError> {
        self.locked(|registry| {
            registry.catch_up()?;
            let is_known = registry.spaces.contains_key(&space.0);
            if is_known { Ok(()) } else { registry.append(&[encode_owner(space.0, 0, false)]) }
        })
    }

    /// The owner of a space, and where its slabs are.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn look(&mut self, space: SpaceId) -> Result<Today, RegistryError> {
        self.locked(Registry::catch_up)?;
        Ok(self.today(space).unwrap_or_default())
    }

    /// Compares and swaps one entry of a map.
    ///
    /// # Errors
    /// The file cannot be written: nothing is changed.
    pub fn swap(&mut self, change: &Change) -> Result<ControlReply, RegistryError> {
        let replies = self.swap_all(std::slice::from_ref(change))?;
        Ok(replies.into_iter().next().unwrap_or(ControlReply::Later))
    }

    /// Compares and swaps entries, one after the other, and makes them durable together: when a server dies, every slab that
    /// it had changes, and a flush of the disk takes some milliseconds.
    ///
    /// # Errors
    /// The file cannot be written: each change may have happened or not. An entry that cannot be: none has.
    pub fn swap_all(&mut self, changes: &[Change]) -> Result<Vec<ControlReply>, RegistryError> {
        if let Some(Change { space, slab, .. }) = changes.iter().find(|change| !change.entry.is_sound()) {
            return Err(RegistryError::NotSound { space: space.0, slab: slab.0 });
        }
        self.locked(|registry| {
            registry.catch_up()?;
            let mut replies = Vec::with_capacity(changes.len());
            let (mut bodies, mut slots) = (Vec::new(), HashSet::new());
            for change in changes {
                // A second change of an entry is compared with what the first one made of it.
                if !slots.insert((change.space, change.slab)) {
                    registry.append(&std::mem::take(&mut bodies))?;
                }
                let refusal = registry.refusal(change);
                if refusal.is_none() {
                    bodies.push(encode_entry(change.space, change.slab, &change.entry));
                }
                replies.push(refusal.unwrap_or(ControlReply::Done));
            }
            registry.append(&bodies)?;
            Ok(replies)
        })
    }

    /// Why a change cannot be made.
    fn refusal(&self, change: &Change) -> Option<ControlReply> {
        let record = self.spaces.get(&change.space.0);
        let Some(record) = record.filter(|record| record.generation == change.generation.0) else {
            return Some(ControlReply::Fenced);
        };
        let today = record.map.get(&change.slab.0).cloned().unwrap_or_default();
        let fits = today.revision + 1 == change.entry.revision && change.entry.replicas.len() <= REPLICAS_MAX;
        (!fits).then_some(ControlReply::Conflict(today))
    }

    /// Answers a client's questions, in their order. Changes that follow one another are made together.
    ///
    /// # Errors
    /// As of [`Registry::swap_all`].
    pub fn answer_all(&mut self, requests: &[ControlRequest]) -> Result<Vec<ControlReply>, RegistryError> {
        let mut replies = Vec::with_capacity(requests.len());
        let mut changes = Vec::new();
        for request in requests {
            if let ControlRequest::Change(change) = request {
                changes.push(change.clone());
                continue;
            }
            if !changes.is_empty() {
                replies.extend(self.swap_all(&std::mem::take(&mut changes))?);
            }
            replies.push(self.answer(request)?);
        }
        if !changes.is_empty() {
            replies.extend(self.swap_all(&changes)?);
        }
        Ok(replies)
    }

    /// Answers one request of a client by the file as it is now, or changes the file by it.
    ///
    /// # Errors
    /// The file cannot be used: nothing is changed.
    pub fn answer(&mut self, request: &ControlRequest) -> Result<ControlReply, RegistryError> {
        match request {
            ControlRequest::Change(change) => self.swap(change),
            ControlRequest::Look { space } => {
                self.locked(Registry::catch_up)?;
                Ok(self.today(*space).map_or(ControlReply::Gone, ControlReply::Seen))
            }
            ControlRequest::Confirm { space, generation } => {
                self.locked(Registry::catch_up)?;
                let owner = self.spaces.get(&space.0).map(|record| record.generation);
                Ok(if owner == Some(generation.0) { ControlReply::Done } else { ControlReply::Fenced })
            }
            ControlRequest::Keep { space, generation } => {
                self.locked(Registry::catch_up)?;
                match self.today(*space) {
                    None => return Ok(ControlReply::Gone),
                    Some(today) if !today.sealed => return Ok(ControlReply::Seen(today)),
                    Some(_) => {}
                }
                match self.succeed(*space, Some(*generation), true) {
                    Ok(today) => Ok(ControlReply::Kept(today)),
                    Err(RegistryError::NotOwner { .. }) => {
                        Ok(self.today(*space).map_or(ControlReply::Gone, ControlReply::Seen))
                    }
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// Does something while no other process changes the file, in the file that has this name now.
    fn locked<T>(&mut self, work: impl FnOnce(&mut Registry) -> io::Result<T>) -> Result<T, RegistryError> {
        let path = self.path.clone();
        let fail = |source| RegistryError::Io { path, source };
        self.lock()
            .and_then(|()| {
                let done = work(self);
                flock(&self.file, FlockOperation::Unlock)?;
                done
            })
            .map_err(fail)
    }

    fn lock(&mut self) -> io::Result<()> {
        loop {
            flock(&self.file, FlockOperation::LockExclusive)?;
            let (ours, named) = (self.file.metadata()?, std::fs::metadata(&self.path));
            use std::os::unix::fs::MetadataExt;
            if named.is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())) {
                return Ok(());
            }
            // Somebody has written it anew.
            self.file = open_file(&self.path)?;
            self.spaces.clear();
            (self.read_to, self.records) = (MAGIC.len() as u64, 0);
        }
    }

    /// Reads what was appended, and cuts off what a crash left unfinished.
    fn catch_up(&mut self) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.read_to))?;
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes)?;
        let mut rest = &bytes[..];
        while let Some((body, after)) = next_record(rest) {
            self.apply(body);
            self.records += 1;
            self.read_to += (RECORD_HEADER + body.len()) as u64;
            rest = after;
        }
        if !rest.is_empty() {
            self.file.set_len(self.read_to)?;
        }
        Ok(())
    }

    /// All of it is on disk before any of it counts.
    fn append(&mut self, bodies: &[Vec<u8>]) -> io::Result<()> {
        if bodies.is_empty() {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(self.read_to))?;
        let records: Vec<u8> = bodies.iter().flat_map(|body| encode_record(body)).collect();
        if let Err(error) = self.file.write_all(&records).and_then(|()| self.file.sync_data()) {
            // Nor is any of it to be found there by the next look, as the first records are that a full disk had room for.
            self.file.set_len(self.read_to)?;
            return Err(error);
        }
        bodies.iter().for_each(|body| self.apply(body));
        self.records += bodies.len() as u64;
        self.read_to += records.len() as u64;
        let needed: usize = self.spaces.values().map(|record| 1 + record.map.len()).sum();
        if self.records > COMPACT_MIN + COMPACT_FACTOR * needed as u64 {
            self.compact()?;
        }
        Ok(())
    }

    /// Writes the file anew, under another name, and puts it in the place of the old one.
    fn compact(&mut self) -> io::Result<()> {
        let name = self.path.with_extension("new");
        let mut bytes = MAGIC.to_vec();
        let mut records = 0;
        for (space, record) in &self.spaces {
            bytes.extend(encode_record(&encode_owner(*space, record.generation, record.sealed)));
            for (slab, entry) in &record.map {
                bytes.extend(encode_record(&encode_entry(SpaceId(*space), SlabNo(*slab), entry)));
            }
            records += 1 + record.map.len() as u64;
        }
        let mut file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&name)?;
        flock(&file, FlockOperation::LockExclusive)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&name, &self.path)?;
        if let Some(dir) = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            File::open(dir)?.sync_all()?;
        }
        self.file = file;
        (self.read_to, self.records) = (bytes.len() as u64, records);
        Ok(())
    }

    fn apply(&mut self, body: &[u8]) {
        let mut id = [0; 8];
        id.copy_from_slice(&body[1..9]);
        let id = u64::from_le_bytes(id);
        let owner = (body[0] == OWNER).then(|| word(&body[9..]));
        if owner == Some(FORGOTTEN) {
            self.spaces.remove(&id);
            return;
        }
        let record = self.spaces.entry(id).or_default();
        if let Some(owner) = owner {
            (record.generation, record.sealed) = (owner & !SEALED, owner & SEALED != 0);
        } else {
            let (slab, entry) = decode_entry(body);
            record.map.insert(slab, entry);
        }
    }
}

impl ControlPlane for Registry {
    type Error = RegistryError;

    fn take_over(&mut self, space: SpaceId) -> Result<(Generation, Map), RegistryError> {
        Registry::take_over(self, space)
    }

    fn seal(&mut self, space: SpaceId, generation: Generation) -> Result<Generation, RegistryError> {
        Registry::seal(self, space, generation)
    }

    fn answer(&mut self, request: &ControlRequest) -> Result<ControlReply, RegistryError> {
        Registry::answer(self, request)
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn long(bytes: &[u8]) -> u64 {
    u64::from(word(bytes)) | u64::from(word(&bytes[4..])) << 32
}

fn checksum(body: &[u8]) -> [u8; 8] {
    let mut sum = [0; 8];
    sum.copy_from_slice(&digest::digest(&digest::SHA256, body).as_ref()[..8]);
    sum
}

fn encode_record(body: &[u8]) -> Vec<u8> {
    let mut record = (body.len() as u32).to_le_bytes().to_vec();
    record.extend_from_slice(&checksum(body));
    record.extend_from_slice(body);
    record
}

/// The first record's body and what follows it. `None` if it is not whole.
fn next_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = word(bytes.get(..4)?) as usize;
    if length > BODY_MAX {
        return None;
    }
    let body = bytes.get(RECORD_HEADER..RECORD_HEADER + length)?;
    let whole = match *body.first()? {
        OWNER => length == OWNER_SIZE,
        ENTRY => length >= ENTRY_SIZE && length == ENTRY_SIZE + usize::from(body[ENTRY_SIZE - 1]) * COPY_SIZE,
        _ => false,
    };
    (whole && bytes[4..RECORD_HEADER] == checksum(body)).then(|| (body, &bytes[RECORD_HEADER + length..]))
}

fn encode_owner(space: u64, generation: u32, sealed: bool) -> Vec<u8> {
    encode_word(space, if sealed { generation | SEALED } else { generation })
}

fn encode_word(space: u64, word: u32) -> Vec<u8> {
    let mut body = vec![OWNER];
    body.extend_from_slice(&space.to_le_bytes());
    body.extend_from_slice(&word.to_le_bytes());
    body
}

fn encode_entry(space: SpaceId, slab: SlabNo, entry: &MapEntry) -> Vec<u8> {
    let mut body = vec![ENTRY];
    body.extend_from_slice(&space.0.to_le_bytes());
    body.extend_from_slice(&slab.0.to_le_bytes());
    body.extend_from_slice(&entry.revision.to_le_bytes());
    body.extend_from_slice(&[u8::from(entry.lost), entry.replicas.len() as u8]);
    for replica in &entry.replicas {
        body.extend_from_slice(&replica.server.0.to_le_bytes());
        body.extend_from_slice(&replica.grant.bits().to_le_bytes());
    }
    body
}

/// Of a body that [`next_record`] found whole.
fn decode_entry(body: &[u8]) -> (u32, MapEntry) {
    let copy = |bytes: &[u8]| Replica { server: ServerId(word(bytes)), grant: Version::from_bits(long(&bytes[4..])) };
    let replicas = body[ENTRY_SIZE..].chunks_exact(COPY_SIZE).map(copy).collect();
    let (revision, lost) = (long(&body[13..]), body[21] != 0);
    // What is not sound is never written: without copies, and not lost, it was given back.
    let empty = !lost && body.len() == ENTRY_SIZE;
    (word(&body[9..]), MapEntry { revision, replicas, lost, empty })
}

#[cfg(test)]
mod tests;
