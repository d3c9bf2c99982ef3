//! Packets on the attach socket: `SOCK_SEQPACKET`, one message a packet, little-endian.
//!
//! ```text
//! offset  bytes  field
//! 0       4      magic "PGDA"
//! 4       2      version (ABI_VERSION of the sender)
//! 6       2      kind
//! 8       ..     body, by kind (below); its length follows from the kind and its counts
//! ```
//!
//! | kind | from | body | file descriptors | answer |
//! |---|---|---|---|---|
//! | 1 Fetch | `pagoda run` | token\[16\] | - | Fetched without regions, Refused |
//! | 2 Fetched | daemon | regions u32, monitor u32 (0/1), len u64 x regions | RAM x regions, monitor socket | - |
//! | 3 Prepare | shim | token\[16\] | - | Prepared, Refused |
//! | 4 Prepared | daemon | uffds u32, flags u32 | shared memory, /dev/userfaultfd (if `PREPARED_DEVICE`), template (if `PREPARED_TEMPLATE`), table and pool of shared pages (if `PREPARED_SHARING`) | Hello |
//! | 5 Hello | shim | token\[16\], pid u32, regions u32, uffds u32, {addr u64, len u64} x regions, {region u32, pad u32, offset u64, len u64} x uffds | RAM x regions, uffd x uffds, shared memory, table and pool if they were given, template if it was given | Welcome, Refused |
//! | 6 Welcome | daemon | flags u32 | - | - |
//! | 7 Refused | daemon | length u32, UTF-8 text | - | - |
//! | 8 Zap | daemon | seq u64, count u32, pad u32, {addr u64, len u64} x count | - | Zapped |
//! | 9 Zapped | shim | seq u64, epoch u64, errno u32 | - | - |
//! | 10 Collapse | daemon | as Zap | - | Collapsed |
//! | 11 Collapsed | shim | seq u64, errno u32, done u32 (ranges that succeeded) | - | - |
//! | 12 Clock | daemon | seq u64 | - | Clocked |
//! | 13 Clocked | shim | seq u64 | - | - |
//! | 14 Foreign | shim | reason u32 | - | on a Calls connection: Welcome, when all RAM is there for good |
//! | 15 Calls | shim | token\[16\] | - | Welcome, Refused |
//! | 16 Discard | shim, on a Calls connection | seq u64, region u32, pad u32, offset u64, len u64 | - | Discarded |
//! | 17 Discarded | daemon | seq u64 | - | - |
//! | 18 Folios | daemon | large u32 (0/1) | - | - |
//! | 19 Split | daemon | as Zap | - | - |
//! | 20 Join | daemon | as Zap | - | - |
//! | 21 Ram | shim | token\[16\] | - | Fetched without a monitor, Refused |
//! | 22 Gate | daemon | seq u64, open u32 (0/1) | - | Gated |
//! | 23 Gated | shim | seq u64, open u32 (0/1) | - | - |
//! | 24 Own | daemon | order u64, region u32, pad u32, offset u64, len u64 | - | Owned |
//! | 25 Owned | shim | order u64, errno u32 | - | - |
//! | 26 Outbox | `pagoda-outbox` | token\[16\] | - | Welcome with the listening socket of its control connection, Refused |
//! | 27 Look | daemon, on a control connection | seq u64 | - | Figures |
//! | 28 SetSpace | daemon, on a control connection | seq u64, bytes u64 | - | Figures with the new space |
//! | 29 Figures | `pagoda-outbox` | seq u64, u64 x 10, in the order of [`OutboxFigures`] | - | - |
//! | 30 Mapper | shim of a mapper | token\[16\] | - | Lent, Refused |
//! | 31 Lent | daemon | flags u32, slot u32, files u32, {dev u64, ino u64, len u64} x files | listening socket of its connections, shared memory, /dev/userfaultfd (if `PREPARED_DEVICE`) | - |
//! | 32 Maps | shim of a mapper | pid u32, maps u32, {region u32, pad u32, offset u64, len u64, addr u64} x maps | uffd, pidfd | Welcome |
//! | 33 Map | shim of a mapper | seq u64, region u32, pad u32, offset u64, len u64, addr u64 | - | Mapped |
//! | 34 Unmap | shim of a mapper | as Map | - | - |
//! | 35 Mapped | daemon | seq u64, errno u32 | - | - |
//! | 40 Jobs | daemon, on a control connection | seq u64, after u64 | - | JobsEnded with jobs of larger numbers than `after` |
//! | 41 JobsEnded | `pagoda-outbox` | seq u64, u64 x 11, in the order of [`OutboxCounts`], count u32, pad u32, {u64 x 6, in the order of [`OutboxJob`], mode u32, priority u32, job\[32\], destination\[32\]} x count | - | - |
//!
//! A connection starts with Fetch, Ram, Prepare, Hello, Calls, Outbox or Mapper. Fetch gives the monitor's socket to the command, Ram
//! gives the RAM files to the shim: only a process with the shim in it can have RAM, and only one, once.
//! * *Agent*: the connection after Welcome to Hello. The daemon sends Zap, Collapse and Clock. The shim answers in order, and may
//!   send Foreign at any time. Zapped carries the epoch *after* the zap: a direct I/O whose start epoch is at least that began after
//!   it ([`crate::shared`]). Folios says whether the guest's faults may fill holes with large folios, where FLAG_HUGE allowed them;
//!   at first they may. After Split, ranges are mapped page by page, though they consist of huge pages; after Join huge again, from
//!   their next use on.
//! * *Gate*: while it is open, QEMU finds the capability `x-ignore-shared`. It is shut at first, and whenever the connection breaks;
//!   Gated says how it is now. A shim that does not know Gate breaks the connection and comes back: the daemon takes that for a
//!   refusal, and the VM runs on.
//! * *Template* ([`crate::template`]): a shim that was given one has mapped it, where its table says, before it says Hello, and RAM a
//!   second time, without access. Own has it move a part of that second mapping into the template's place, if the order still stands
//!   ([`crate::shared`]). Owned comes when it does so, or does not.
//! * *Control*: the process of a VM's outbox proves by a token of its own which one it is, and gets a socket that whichever daemon
//!   there is connects to. On such a connection it says nothing but one Figures to each Look or SetSpace, and one JobsEnded to each
//!   Jobs. One that does not know Jobs breaks the connection: the daemon does not ask it again. A process whose daemon asks for no
//!   jobs keeps the last of them, and loses the others.
//! * *Mapper*: another process that maps a VM's RAM and has the shim in it (docs/mappers.md). It says Mapper before it opens
//!   anything, and gets a socket that whichever daemon there is connects to. There it says Maps first: its userfaultfd, and what it
//!   maps. It may be a child of the process that said Mapper; one such child at a time maps RAM. A new mapping has no access until
//!   the daemon has answered Map with Mapped and no error. Zap, Zapped, Clock, Clocked and Foreign are as on an agent's connection,
//!   with addresses of the mapper.
//! * *Calls*: after Welcome, the VMM's threads ask for Discard, one at a time, and say Foreign before they let others at RAM.

mod mapper;
mod outbox;
mod text;

pub use self::mapper::{LentFile, LentMap, MAPS_MAX};
pub use self::outbox::{JOBS_MAX, LABEL_BYTES, OutboxCounts, OutboxFigures, OutboxJob};
pub use self::text::{REFUSED_TEXT_MAX, Text};
use crate::{ABI_VERSION, REGIONS_MAX, Token, UFFDS_MAX};

/// Largest packet either side sends; a longer one is refused unread.
pub const PACKET_MAX: usize = 4096;
/// Ranges in one Zap or Collapse: a packet's worth, and more than one page-out batch needs.
pub const RANGES_MAX: usize = 128;
/// File descriptors in one packet.
pub const FDS_MAX: usize = REGIONS_MAX + UFFDS_MAX + 4;

const MAGIC: [u8; 4] = *b"PGDA";
const HEADER: usize = 8;

/// Prepared: the packet carries an fd of `/dev/userfaultfd`; make the userfaultfds by its `USERFAULTFD_IOC_NEW`.
pub const PREPARED_DEVICE: u32 = 1;
/// Prepared: the packet's last two fds are the table of shared pages and the pool of its share group, good for nothing but
/// to be kept and handed over in every Hello.
pub const PREPARED_SHARING: u32 = 4;
/// Prepared: the packet carries the template of the VM's snapshot, to be mapped and kept.
pub const PREPARED_TEMPLATE: u32 = 8;
/// Prepared: the VM may lend its RAM to mappers, and the shim asks for leave each time ([`ForeignReason::RamFdLent`]).
pub const PREPARED_LENDING: u32 = 16;
/// Prepared and Welcome: map RAM with `MADV_HUGEPAGE`.
pub const FLAG_HUGE: u32 = 2;
/// Welcome to a Foreign of [`ForeignReason::RamFdLent`]: the daemon knows the mapper, and nothing is pinned.
pub const FLAG_LENT: u32 = 32;

/// Why a VM's memory can no longer be evicted (Foreign).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignReason {
    /// An fd of the RAM file left the process over a socket (vhost-user).
    RamFdSent,
    /// A VFIO, vDPA or similar driver was told to map RAM for DMA.
    DmaMapped,
    /// RAM was registered as fixed buffers of io_uring: pinned for as long as the ring lives.
    FixedBuffers,
    /// Direct I/O goes through an interface whose progress the shim cannot see.
    UntrackedIo,
    /// An fd of the RAM file is about to be sent to a mapper. Nothing is pinned if the daemon knows that mapper.
    RamFdLent,
}

impl ForeignReason {
    fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            1 => Self::RamFdSent,
            2 => Self::DmaMapped,
            3 => Self::FixedBuffers,
            4 => Self::UntrackedIo,
            5 => Self::RamFdLent,
            _ => return None,
        })
    }

    /// The number on the wire.
    pub const fn to_u32(self) -> u32 {
        match self {
            Self::RamFdSent => 1,
            Self::DmaMapped => 2,
            Self::FixedBuffers => 3,
            Self::UntrackedIo => 4,
            Self::RamFdLent => 5,
        }
    }
}

/// A list with a fixed capacity: packets are built and read without allocation, as the shim must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List<T: Copy + Default, const N: usize> {
    items: [T; N],
    len: usize,
}

impl<T: Copy + Default, const N: usize> Default for List<T, N> {
    fn default() -> Self {
        List { items: [T::default(); N], len: 0 }
    }
}

impl<T: Copy + Default, const N: usize> List<T, N> {
    /// Appends; `false` when the list is full.
    pub fn push(&mut self, item: T) -> bool {
        let Some(slot) = self.items.get_mut(self.len) else { return false };
        *slot = item;
        self.len += 1;
        true
    }

    /// The items so far.
    pub fn as_slice(&self) -> &[T] {
        &self.items[..self.len]
    }
}

/// One region as the VMM mapped it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// The region is mapped at this address of the VMM.
    pub addr: u64,
    /// The region has so many bytes.
    pub len: u64,
}

/// The part of a region that one userfaultfd covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shard {
    /// Index of the region.
    pub region: u32,
    /// First byte, from the region's start.
    pub offset: u64,
    /// The userfaultfd covers so many bytes.
    pub len: u64,
}

/// A range of the VMM's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// The range begins at this address.
    pub addr: u64,
    /// The range has so many bytes.
    pub len: u64,
}

/// All that a mapper maps.
pub type Maps = List<LentMap, MAPS_MAX>;

/// Ranges of one command.
pub type Ranges = List<Range, RANGES_MAX>;

/// One packet. See the module's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // lives on the stack of the one thread that handles it
#[allow(missing_docs)] // the table above
pub enum Packet {
    Fetch { token: Token },
    Fetched { monitor: bool, lens: List<u64, REGIONS_MAX> },
    Prepare { token: Token },
    Prepared { uffds: u32, flags: u32 },
    Hello { token: Token, pid: u32, regions: List<Region, REGIONS_MAX>, shards: List<Shard, UFFDS_MAX> },
    Welcome { flags: u32 },
    Refused { text: Text },
    Zap { seq: u64, ranges: Ranges },
    Zapped { seq: u64, epoch: u64, errno: u32 },
    Collapse { seq: u64, ranges: Ranges },
    Collapsed { seq: u64, errno: u32, done: u32 },
    Clock { seq: u64 },
    Clocked { seq: u64 },
    Foreign { reason: ForeignReason },
    Calls { token: Token },
    Discard { seq: u64, region: u32, offset: u64, len: u64 },
    Discarded { seq: u64 },
    Folios { large: bool },
    Split { seq: u64, ranges: Ranges },
    Join { seq: u64, ranges: Ranges },
    Ram { token: Token },
    Gate { seq: u64, open: bool },
    Gated { seq: u64, open: bool },
    Own { order: u64, region: u32, offset: u64, len: u64 },
    Owned { order: u64, errno: u32 },
    Outbox { token: Token },
    Look { seq: u64 },
    SetSpace { seq: u64, bytes: u64 },
    Figures { seq: u64, figures: OutboxFigures },
    Mapper { token: Token },
    Lent { flags: u32, slot: u32, files: List<LentFile, REGIONS_MAX> },
    Maps { pid: u32, maps: Maps },
    Map { seq: u64, map: LentMap },
    Unmap { seq: u64, map: LentMap },
    Mapped { seq: u64, errno: u32 },
    Jobs { seq: u64, after: u64 },
    JobsEnded { seq: u64, counts: OutboxCounts, jobs: List<OutboxJob, JOBS_MAX> },
}

/// Why a packet could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// Shorter than its kind and counts say, or longer.
    Length,
    /// The packet does not begin with our magic.
    Magic,
    /// Sent by another version; the value is theirs.
    Version(u16),
    /// A kind, count or reason outside its range.
    Value,
}

impl std::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DecodeError::Length => write!(f, "packet has the wrong length"),
            DecodeError::Magic => write!(f, "packet is not Pagoda's"),
            DecodeError::Version(theirs) => {
                write!(
                    f,
                    "peer speaks version {theirs} of the attach protocol, this is version {ABI_VERSION}: install matching pagoda packages"
                )
            }
            DecodeError::Value => write!(f, "packet has a field out of range"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// Bytes of one packet, without allocation.
#[derive(Clone, Debug)]
pub struct Encoded {
    bytes: [u8; PACKET_MAX],
    len: usize,
}

impl Encoded {
    /// What goes on the wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn put(&mut self, bytes: &[u8]) {
        // Every body fits: the caps above are chosen for it, and `largest_packets_fit` checks it.
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn numbered(&mut self, number: u64, value: u32) {
        self.u64(number);
        self.u32(value);
    }

    fn words<const N: usize>(&mut self, words: [u64; N]) {
        words.into_iter().for_each(|word| self.u64(word));
    }

    fn figures(&mut self, seq: u64, figures: OutboxFigures) {
        self.u64(seq);
        self.words(figures.to_words());
    }

    fn map(&mut self, map: &LentMap) {
        self.u32(map.region);
        self.u32(0);
        self.words([map.offset, map.len, map.addr]);
    }

    fn lent(&mut self, words: [u32; 2], files: &List<LentFile, REGIONS_MAX>) {
        words.into_iter().for_each(|word| self.u32(word));
        self.u32(files.len as u32);
        files.as_slice().iter().for_each(|file| self.words([file.dev, file.ino, file.len]));
    }

    fn maps(&mut self, pid: u32, maps: &Maps) {
        self.u32(pid);
        self.u32(maps.len as u32);
        maps.as_slice().iter().for_each(|map| self.map(map));
    }

    fn jobs(&mut self, seq: u64, counts: &OutboxCounts, jobs: &List<OutboxJob, JOBS_MAX>) {
        self.u64(seq);
        self.words(counts.to_words());
        self.u32(jobs.len as u32);
        self.u32(0);
        for job in jobs.as_slice() {
            self.words(job.to_words());
            self.u32(u32::from(job.is_on_close));
            self.u32(job.priority);
            self.put(&job.id);
            self.put(&job.destination);
        }
    }

    fn ranges(&mut self, seq: u64, ranges: &Ranges) {
        self.u64(seq);
        self.u32(ranges.len as u32);
        self.u32(0);
        for range in ranges.as_slice() {
            self.u64(range.addr);
            self.u64(range.len);
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(DecodeError::Length)?;
        self.0 = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.take().map(u64::from_le_bytes)
    }

    fn words<const N: usize>(&mut self) -> Result<[u64; N], DecodeError> {
        let mut words = [0; N];
        for word in &mut words {
            *word = self.u64()?;
        }
        Ok(words)
    }

    /// A number, then a part of a region.
    fn part(&mut self) -> Result<(u64, u32, u64, u64), DecodeError> {
        let (number, region) = (self.u64()?, self.u32()?);
        self.u32()?;
        Ok((number, region, self.u64()?, self.u64()?))
    }

    fn map(&mut self) -> Result<LentMap, DecodeError> {
        let region = self.u32()?;
        self.u32()?;
        let [offset, len, addr] = self.words()?;
        Ok(LentMap { region, offset, len, addr })
    }

    fn list<T: Copy + Default, const N: usize>(
        &mut self,
        item: impl Fn(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<List<T, N>, DecodeError> {
        let mut list = List::default();
        for _ in 0..self.count(N)? {
            list.push(item(self)?);
        }
        Ok(list)
    }

    fn count(&mut self, max: usize) -> Result<usize, DecodeError> {
        let count = self.u32()? as usize;
        if count > max { Err(DecodeError::Value) } else { Ok(count) }
    }

    fn token(&mut self) -> Result<Token, DecodeError> {
        self.take().map(Token)
    }

    fn jobs(&mut self) -> Result<List<OutboxJob, JOBS_MAX>, DecodeError> {
        let count = self.count(JOBS_MAX)?;
        self.u32()?;
        let mut jobs = List::default();
        for _ in 0..count {
            let words = self.words()?;
            let is_on_close = match self.u32()? {
                0 => false,
                1 => true,
                _ => return Err(DecodeError::Value),
            };
            jobs.push(OutboxJob::new(words, is_on_close, self.u32()?, self.take()?, self.take()?));
        }
        Ok(jobs)
    }

    fn ranges(&mut self) -> Result<(u64, Ranges), DecodeError> {
        let seq = self.u64()?;
        let count = self.count(RANGES_MAX)?;
        self.u32()?;
        let mut ranges = Ranges::default();
        for _ in 0..count {
            ranges.push(Range { addr: self.u64()?, len: self.u64()? });
        }
        Ok((seq, ranges))
    }
}

impl Packet {
    const fn kind(&self) -> u16 {
        match self {
            Packet::Fetch { .. } => 1,
            Packet::Fetched { .. } => 2,
            Packet::Prepare { .. } => 3,
            Packet::Prepared { .. } => 4,
            Packet::Hello { .. } => 5,
            Packet::Welcome { .. } => 6,
            Packet::Refused { .. } => 7,
            Packet::Zap { .. } => 8,
            Packet::Zapped { .. } => 9,
            Packet::Collapse { .. } => 10,
            Packet::Collapsed { .. } => 11,
            Packet::Clock { .. } => 12,
            Packet::Clocked { .. } => 13,
            Packet::Foreign { .. } => 14,
            Packet::Calls { .. } => 15,
            Packet::Discard { .. } => 16,
            Packet::Discarded { .. } => 17,
            Packet::Folios { .. } => 18,
            Packet::Split { .. } => 19,
            Packet::Join { .. } => 20,
            Packet::Ram { .. } => 21,
            Packet::Gate { .. } => 22,
            Packet::Gated { .. } => 23,
            Packet::Own { .. } => 24,
            Packet::Owned { .. } => 25,
            Packet::Outbox { .. } => 26,
            Packet::Look { .. } => 27,
            Packet::SetSpace { .. } => 28,
            Packet::Figures { .. } => 29,
            Packet::Mapper { .. } => 30,
            Packet::Lent { .. } => 31,
            Packet::Maps { .. } => 32,
            Packet::Map { .. } => 33,
            Packet::Unmap { .. } => 34,
            Packet::Mapped { .. } => 35,
            Packet::Jobs { .. } => 40,
            Packet::JobsEnded { .. } => 41,
        }
    }

    /// Lays the packet out.
    pub fn encode(&self) -> Encoded {
        let mut out = Encoded { bytes: [0; PACKET_MAX], len: 0 };
        out.put(&MAGIC);
        out.put(&ABI_VERSION.to_le_bytes());
        out.put(&self.kind().to_le_bytes());
        match self {
            Packet::Fetch { token }
            | Packet::Ram { token }
            | Packet::Prepare { token }
            | Packet::Calls { token }
            | Packet::Outbox { token }
            | Packet::Mapper { token } => out.put(&token.0),
            Packet::Fetched { monitor, lens } => {
                out.u32(lens.len as u32);
                out.u32(u32::from(*monitor));
                lens.as_slice().iter().for_each(|len| out.u64(*len));
            }
            Packet::Prepared { uffds, flags } => {
                out.u32(*uffds);
                out.u32(*flags);
            }
            Packet::Hello { token, pid, regions, shards } => {
                out.put(&token.0);
                out.u32(*pid);
                out.u32(regions.len as u32);
                out.u32(shards.len as u32);
                for region in regions.as_slice() {
                    out.u64(region.addr);
                    out.u64(region.len);
                }
                for shard in shards.as_slice() {
                    out.u32(shard.region);
                    out.u32(0);
                    out.u64(shard.offset);
                    out.u64(shard.len);
                }
            }
            Packet::Welcome { flags } => out.u32(*flags),
            Packet::Refused { text } => {
                out.u32(text.as_str().len() as u32);
                out.put(text.as_str().as_bytes());
            }
            Packet::Zap { seq, ranges }
            | Packet::Collapse { seq, ranges }
            | Packet::Split { seq, ranges }
            | Packet::Join { seq, ranges } => out.ranges(*seq, ranges),
            Packet::Zapped { seq, epoch, errno } => {
                out.words([*seq, *epoch]);
                out.u32(*errno);
            }
            Packet::Collapsed { seq, errno, done } => {
                out.numbered(*seq, *errno);
                out.u32(*done);
            }
            Packet::Clock { seq } | Packet::Clocked { seq } | Packet::Discarded { seq } | Packet::Look { seq } => {
                out.u64(*seq);
            }
            Packet::SetSpace { seq, bytes: value } | Packet::Jobs { seq, after: value } => out.words([*seq, *value]),
            Packet::Figures { seq, figures } => out.figures(*seq, *figures),
            Packet::JobsEnded { seq, counts, jobs } => out.jobs(*seq, counts, jobs),
            Packet::Foreign { reason } => out.u32(reason.to_u32()),
            Packet::Folios { large } => out.u32(u32::from(*large)),
            Packet::Gate { seq, open } | Packet::Gated { seq, open } => out.numbered(*seq, u32::from(*open)),
            Packet::Owned { order: seq, errno } | Packet::Mapped { seq, errno } => out.numbered(*seq, *errno),
            Packet::Lent { flags, slot, files } => out.lent([*flags, *slot], files),
            Packet::Maps { pid, maps } => out.maps(*pid, maps),
            Packet::Map { seq, map } | Packet::Unmap { seq, map } => {
                out.u64(*seq);
                out.map(map);
            }
            Packet::Discard { seq, region, offset, len } | Packet::Own { order: seq, region, offset, len } => {
                out.numbered(*seq, *region);
                out.u32(0);
                out.u64(*offset);
                out.u64(*len);
            }
        }
        out
    }

    /// Reads a packet that arrived; anything malformed is an error, nothing is trusted.
    pub fn decode(bytes: &[u8]) -> Result<Packet, DecodeError> {
        if bytes.len() < HEADER {
            return Err(DecodeError::Length);
        }
        let mut r = Reader(bytes);
        if r.take::<4>()? != MAGIC {
            return Err(DecodeError::Magic);
        }
        let version = u16::from_le_bytes(r.take()?);
        if version != ABI_VERSION {
            return Err(DecodeError::Version(version));
        }
        let kind = u16::from_le_bytes(r.take()?);
        let packet = Packet::decode_body(kind, &mut r)?;
        if r.0.is_empty() { Ok(packet) } else { Err(DecodeError::Length) }
    }

    /// What follows the header of a packet of this kind.
    fn decode_body(kind: u16, r: &mut Reader<'_>) -> Result<Packet, DecodeError> {
        Ok(match kind {
            1 => Packet::Fetch { token: r.token()? },
            2 => {
                let count = r.count(REGIONS_MAX)?;
                let monitor = r.u32()? != 0;
                let mut lens = List::default();
                for _ in 0..count {
                    lens.push(r.u64()?);
                }
                Packet::Fetched { monitor, lens }
            }
            3 => Packet::Prepare { token: r.token()? },
            4 => Packet::Prepared { uffds: r.count(UFFDS_MAX)? as u32, flags: r.u32()? },
            5 => {
                let (token, pid) = (r.token()?, r.u32()?);
                let (region_count, shard_count) = (r.count(REGIONS_MAX)?, r.count(UFFDS_MAX)?);
                let mut regions = List::default();
                for _ in 0..region_count {
                    regions.push(Region { addr: r.u64()?, len: r.u64()? });
                }
                let mut shards = List::default();
                for _ in 0..shard_count {
                    let region = r.u32()?;
                    r.u32()?;
                    shards.push(Shard { region, offset: r.u64()?, len: r.u64()? });
                }
                Packet::Hello { token, pid, regions, shards }
            }
            6 => Packet::Welcome { flags: r.u32()? },
            7 => {
                let len = r.count(REFUSED_TEXT_MAX)?;
                let text = r.0.get(..len).ok_or(DecodeError::Length)?;
                let text = Text::new(std::str::from_utf8(text).map_err(|_| DecodeError::Value)?);
                r.0 = &r.0[len..];
                Packet::Refused { text }
            }
            8 => {
                let (seq, ranges) = r.ranges()?;
                Packet::Zap { seq, ranges }
            }
            9 => Packet::Zapped { seq: r.u64()?, epoch: r.u64()?, errno: r.u32()? },
            10 => {
                let (seq, ranges) = r.ranges()?;
                Packet::Collapse { seq, ranges }
            }
            11 => Packet::Collapsed { seq: r.u64()?, errno: r.u32()?, done: r.u32()? },
            12 => Packet::Clock { seq: r.u64()? },
            13 => Packet::Clocked { seq: r.u64()? },
            14 => Packet::Foreign { reason: ForeignReason::from_u32(r.u32()?).ok_or(DecodeError::Value)? },
            15 => Packet::Calls { token: r.token()? },
            16 => {
                let (seq, region, offset, len) = r.part()?;
                Packet::Discard { seq, region, offset, len }
            }
            17 => Packet::Discarded { seq: r.u64()? },
            18 => Packet::Folios { large: r.u32()? != 0 },
            19 => {
                let (seq, ranges) = r.ranges()?;
                Packet::Split { seq, ranges }
            }
            20 => {
                let (seq, ranges) = r.ranges()?;
                Packet::Join { seq, ranges }
            }
            21 => Packet::Ram { token: r.token()? },
            22 => Packet::Gate { seq: r.u64()?, open: r.u32()? != 0 },
            23 => Packet::Gated { seq: r.u64()?, open: r.u32()? != 0 },
            24 => {
                let (order, region, offset, len) = r.part()?;
                Packet::Own { order, region, offset, len }
            }
            25 => Packet::Owned { order: r.u64()?, errno: r.u32()? },
            kind => return Packet::decode_of_outbox(kind, r),
        })
    }

    /// The same of a packet on the connections of an outbox's process.
    fn decode_of_outbox(kind: u16, r: &mut Reader<'_>) -> Result<Packet, DecodeError> {
        Ok(match kind {
            26 => Packet::Outbox { token: r.token()? },
            27 => Packet::Look { seq: r.u64()? },
            28 => Packet::SetSpace { seq: r.u64()?, bytes: r.u64()? },
            29 => Packet::Figures { seq: r.u64()?, figures: OutboxFigures::of_words(r.words()?) },
            30 => Packet::Mapper { token: r.token()? },
            31 => {
                let file = |r: &mut Reader<'_>| r.words().map(|[dev, ino, len]| LentFile { dev, ino, len });
                Packet::Lent { flags: r.u32()?, slot: r.u32()?, files: r.list(file)? }
            }
            32 => Packet::Maps { pid: r.u32()?, maps: r.list(Reader::map)? },
            33 => Packet::Map { seq: r.u64()?, map: r.map()? },
            34 => Packet::Unmap { seq: r.u64()?, map: r.map()? },
            35 => Packet::Mapped { seq: r.u64()?, errno: r.u32()? },
            40 => Packet::Jobs { seq: r.u64()?, after: r.u64()? },
            41 => Packet::JobsEnded { seq: r.u64()?, counts: OutboxCounts::of_words(r.words()?), jobs: r.jobs()? },
            _ => return Err(DecodeError::Value),
        })
    }
}

#[cfg(test)]
mod tests;
