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
//! | 12.. | body: kind (1), space (8), then for an owner (1): generation (4), all ones where the space is forgotten; for an entry (2): slab (4), revision (8), lost (1), copies (1), and for each copy server (4), grant (8) |

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest;
use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

use crate::control::{ControlPlane, ControlReply, ControlRequest, Map, MapEntry, REPLICAS_MAX, Replica};
use crate::units::{Generation, ServerId, SlabNo, SpaceId, Version};

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
    #[error("space {space:x} has an owner of generation {today}, not {asked}: it is not forgotten")]
    NotOwner { space: u64, asked: u32, today: u32 },
    #[error("space {space:x} has had {max} owners: make a new one", max = Generation::MAX.0)]
    GenerationsUsedUp { space: u64 },
}

#[derive(Debug, Default)]
struct Record {
    generation: u32,
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
        let next = self.locked(|registry| {
            registry.catch_up()?;
            let next = registry.spaces.get(&space.0).map_or(0, |record| record.generation) + 1;
            if next <= Generation::MAX.0 {
                registry.append(&encode_owner(space.0, next))?;
            }
            Ok(next)
        })?;
        if next > Generation::MAX.0 {
            return Err(RegistryError::GenerationsUsedUp { space: space.0 });
        }
        let map = self.spaces.get(&space.0).map(|record| &record.map).into_iter().flatten();
        Ok((Generation(next), map.map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect()))
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
                registry.append(&encode_owner(space.0, FORGOTTEN))?;
            }
            Ok(today)
        })?;
        if today != generation.0 {
            return Err(RegistryError::NotOwner { space: space.0, asked: generation.0, today });
        }
        Ok(())
    }

    /// The owner of a space, 0 if it had none yet, and where its slabs are.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn look(&mut self, space: SpaceId) -> Result<(Generation, Vec<(SlabNo, MapEntry)>), RegistryError> {
        self.locked(Registry::catch_up)?;
        let record = self.spaces.get(&space.0);
        let map = record.map(|record| &record.map).into_iter().flatten();
        let generation = Generation(record.map_or(0, |record| record.generation));
        Ok((generation, map.map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect()))
    }

    /// Compares and swaps one entry of a map.
    ///
    /// # Errors
    /// The file cannot be written: nothing is changed.
    pub fn answer(&mut self, request: &ControlRequest) -> Result<ControlReply, RegistryError> {
        self.locked(|registry| {
            registry.catch_up()?;
            let record = registry.spaces.get(&request.space.0);
            let Some(record) = record.filter(|record| record.generation == request.generation.0) else {
                return Ok(ControlReply::Fenced);
            };
            let today = record.map.get(&request.slab.0).cloned().unwrap_or_default();
            if today.revision + 1 != request.entry.revision || request.entry.replicas.len() > REPLICAS_MAX {
                return Ok(ControlReply::Conflict(today));
            }
            registry.append(&encode_entry(request.space, request.slab, &request.entry))?;
            Ok(ControlReply::Done)
        })
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

    fn append(&mut self, body: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.read_to))?;
        let record = encode_record(body);
        self.file.write_all(&record)?;
        self.file.sync_data()?;
        self.apply(body);
        self.records += 1;
        self.read_to += record.len() as u64;
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
            bytes.extend(encode_record(&encode_owner(*space, record.generation)));
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
        if body[0] == OWNER && word(&body[9..]) == FORGOTTEN {
            self.spaces.remove(&id);
            return;
        }
        let record = self.spaces.entry(id).or_default();
        if body[0] == OWNER {
            record.generation = word(&body[9..]);
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

fn encode_owner(space: u64, generation: u32) -> Vec<u8> {
    let mut body = vec![OWNER];
    body.extend_from_slice(&space.to_le_bytes());
    body.extend_from_slice(&generation.to_le_bytes());
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
    (word(&body[9..]), MapEntry { revision: long(&body[13..]), replicas, lost: body[21] != 0 })
}

#[cfg(test)]
mod tests;
