//! The quantities of the protocol, each its own type, so that they cannot be mixed up.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// Bytes in a page: what a VM's pager and a file system move.
pub const PAGE_SIZE: usize = 4096;
/// Bytes of the seal beside each page: the tag of AES-256-GCM-SIV.
pub const SEAL_SIZE: usize = 16;
/// A page as servers hold it and the wire carries it.
pub const SEALED_SIZE: usize = PAGE_SIZE + SEAL_SIZE;
/// Pages in a slab unless a server is told otherwise: 64 MiB, which 10 Gbit/s move in 55 ms.
pub const SLAB_PAGES: u32 = 16_384;
/// Slabs of one server: 64 TiB of the usual size; page numbers end later.
pub const SLABS_MAX: usize = 1 << 20;

/// The content of a page.
pub type Page = [u8; PAGE_SIZE];
/// Room for a page and its seal.
pub type SealedPage = [u8; SEALED_SIZE];

/// The page in such room.
pub fn content_of(room: &SealedPage) -> &Page {
    room.first_chunk().expect("a page is smaller than a sealed one")
}

/// A moment of the driver's monotonic clock, in nanoseconds since some start of its choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// How long ago `earlier` was; zero if it lies ahead.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, span: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// A space: pages under one name, with one writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub u64);

/// A page by its number in its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo(pub u64);

/// A slab by its number in its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlabNo(pub u32);

/// A server by the number that the operator gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub u32);

/// One life of a server process. Its memory is gone with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BootEpoch(pub u64);

/// Counts the owners of a space; each new owner has the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u32);

impl Generation {
    /// The generation is part of every version: 20 bits, a million hand-overs.
    pub const MAX: Generation = Generation((1 << GENERATION_BITS) - 1);
}

const GENERATION_BITS: u32 = 20;
const SEQUENCE_BITS: u32 = 43;

/// The version of a page: who wrote it, as the how-manieth write of this owner, and whether it was a trim.
///
/// No two writes to a space have the same one, so it also serves as the nonce of the page's seal; but for pages that an owner takes over
/// and seals anew ([`Version::taken_over`]), of which each has one a generation. Later writes have greater ones, whoever the owner, so
/// that servers can refuse late datagrams by comparing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// The version of a page that was never written.
    pub const NEVER: Version = Version(0);
    /// Writes of one owner: 8.8e12, a year at 250,000 a second. The next generation starts anew.
    pub const SEQUENCE_MAX: u64 = (1 << SEQUENCE_BITS) - 1;

    /// # Panics
    /// If `sequence` or `generation` is beyond its limit, which the owner checks before.
    pub fn new(generation: Generation, sequence: u64, trimmed: bool) -> Version {
        assert!(sequence <= Version::SEQUENCE_MAX && generation <= Generation::MAX, "version out of range");
        Version((u64::from(generation.0) << (SEQUENCE_BITS + 1)) | (sequence << 1) | u64::from(trimmed))
    }

    /// What an owner finds and writes anew has this one: after all that owners before it wrote, and before all that it writes itself,
    /// of which some may have its version already. It is each page's own content, and so the same bytes however often it is sealed.
    ///
    /// # Panics
    /// As [`Version::new`].
    pub fn taken_over(generation: Generation) -> Version {
        Version::new(generation, 0, false)
    }

    pub fn from_bits(bits: u64) -> Version {
        Version(bits)
    }

    pub fn bits(self) -> u64 {
        self.0
    }

    /// The owner whose write it is.
    pub fn generation(self) -> Generation {
        Generation((self.0 >> (SEQUENCE_BITS + 1)) as u32)
    }

    /// Whether the page has content: it was written, and not trimmed since.
    pub fn has_content(self) -> bool {
        self.0 != 0 && self.0 & 1 == 0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trimmed = if self.0 & 1 == 1 { " trimmed" } else { "" };
        write!(f, "{}.{}{trimmed}", self.0 >> (SEQUENCE_BITS + 1), (self.0 >> 1) & Version::SEQUENCE_MAX)
    }
}

/// Pages in a slab, a power of two. The same at all servers of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabSize(u32);

impl SlabSize {
    /// `None` unless `pages` is a power of two that one message about a slab can handle.
    pub fn new(pages: u32) -> Option<SlabSize> {
        (pages.is_power_of_two() && pages <= 1 << 20).then_some(SlabSize(pages))
    }

    pub fn pages(self) -> usize {
        self.0 as usize
    }

    /// The slab of a page. `None` where slab numbers end.
    pub fn slab(self, page: PageNo) -> Option<SlabNo> {
        u32::try_from(page.0 >> self.0.trailing_zeros()).ok().map(SlabNo)
    }

    /// The index of a page in its slab.
    pub fn index(self, page: PageNo) -> usize {
        (page.0 & u64::from(self.0 - 1)) as usize
    }

    pub fn page(self, slab: SlabNo, index: usize) -> PageNo {
        PageNo((u64::from(slab.0) << self.0.trailing_zeros()) + index as u64)
    }
}

impl Default for SlabSize {
    fn default() -> SlabSize {
        SlabSize(SLAB_PAGES)
    }
}

/// What waits first: a guest's fault before what it may need next, before what leaves its DRAM, before copies that restore
/// redundancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Demand,
    Prefetch,
    Eviction,
    Rebuild,
}

impl Class {
    pub const ALL: [Class; 4] = [Class::Demand, Class::Prefetch, Class::Eviction, Class::Rebuild];

    /// Whether a server that has too much to do may say so instead of doing it.
    pub fn may_be_put_off(self) -> bool {
        matches!(self, Class::Prefetch | Class::Rebuild)
    }

    /// Its name in the labels of metrics.
    pub fn word(self) -> &'static str {
        match self {
            Class::Demand => "demand",
            Class::Prefetch => "prefetch",
            Class::Eviction => "eviction",
            Class::Rebuild => "rebuild",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_owners_and_later_writes_have_greater_versions() {
        let version = |generation, sequence, trimmed| Version::new(Generation(generation), sequence, trimmed);
        let ordered = [
            Version::NEVER,
            version(1, 1, false),
            version(1, 2, true),
            version(1, Version::SEQUENCE_MAX, false),
            version(2, 0, false),
            version(Generation::MAX.0, Version::SEQUENCE_MAX, true),
        ];
        assert!(ordered.is_sorted());
        assert_eq!(ordered.map(Version::has_content), [false, true, false, true, true, false]);
        assert_eq!(version(3, 7, true).to_string(), "3.7 trimmed");
    }

    #[test]
    fn slabs_of_pages() {
        let size = SlabSize::new(8).unwrap();
        for (page, slab, index) in [(0, 0, 0), (7, 0, 7), (8, 1, 0), (29, 3, 5)] {
            assert_eq!((size.slab(PageNo(page)), size.index(PageNo(page))), (Some(SlabNo(slab)), index));
            assert_eq!(size.page(SlabNo(slab), index), PageNo(page));
        }
        assert_eq!(size.slab(PageNo(u64::MAX)), None);
        assert_eq!([0, 3, 1 << 21].map(SlabSize::new), [None; 3]);
    }
}
