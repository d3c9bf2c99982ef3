//! Units of memory: pages, chunks and bytes, each its own type, so that they cannot be mixed up.
//!
//! This file alone converts between them. A name that ends in `_floor` or `_ceil` rounds; every other
//! conversion is exact. Arithmetic that overflows is a bug of the caller and panics in every profile,
//! except where the name says `saturating` or `checked`.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

/// Bytes in a page: the base page of x86-64, and the smallest unit userfaultfd resolves.
pub const PAGE_SIZE: u64 = 4096;
/// Pages in a chunk (VMemDirect, section 4.1: "the 256-page memory chunk").
pub const CHUNK_PAGES: u64 = 256;
/// Bytes in a chunk: 1 MiB.
pub const CHUNK_SIZE: u64 = PAGE_SIZE * CHUNK_PAGES;
/// The largest space: what four-level EPT can map, 2^48 bytes. Every chunk number below it fits in 32 bits.
pub const SPACE_SIZE_MAX: Bytes = Bytes(1 << 48);

/// A page by its number in the VM's RAM, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIdx(pub u64);

/// A number of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(pub u64);

/// A chunk of [`CHUNK_PAGES`] pages by its number in the VM's RAM, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIdx(pub u32);

/// A number of chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkCount(pub u32);

/// A number of bytes, or an offset in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl PageIdx {
    /// The page that holds the byte at `offset`.
    pub const fn containing(offset: Bytes) -> PageIdx {
        PageIdx(offset.0 / PAGE_SIZE)
    }

    /// The chunk this page belongs to.
    pub const fn chunk(self) -> ChunkIdx {
        let chunk = self.0 / CHUNK_PAGES;
        assert!(chunk <= u32::MAX as u64, "page beyond SPACE_SIZE_MAX");
        ChunkIdx(chunk as u32)
    }

    /// The page's index in its chunk. A chunk has 256 pages, so every `u8` is one of them.
    pub const fn index_in_chunk(self) -> u8 {
        (self.0 % CHUNK_PAGES) as u8
    }

    /// Where the page starts, in the RAM file and in the swap file alike.
    pub const fn offset(self) -> Bytes {
        Bytes(self.0 * PAGE_SIZE)
    }

    pub const fn checked_add(self, count: PageCount) -> Option<PageIdx> {
        match self.0.checked_add(count.0) {
            Some(page) => Some(PageIdx(page)),
            None => None,
        }
    }

    pub const fn checked_sub(self, count: PageCount) -> Option<PageIdx> {
        match self.0.checked_sub(count.0) {
            Some(page) => Some(PageIdx(page)),
            None => None,
        }
    }
}

impl PageCount {
    pub const ZERO: PageCount = PageCount(0);

    pub const fn bytes(self) -> Bytes {
        Bytes(self.0.checked_mul(PAGE_SIZE).expect("more pages than u64 bytes can hold"))
    }

    /// The chunks that these pages fill completely.
    pub const fn chunks_floor(self) -> ChunkCount {
        ChunkCount(chunk_number(self.0 / CHUNK_PAGES))
    }

    /// The chunks that these pages need, the last one perhaps in part.
    pub const fn chunks_ceil(self) -> ChunkCount {
        ChunkCount(chunk_number(self.0.div_ceil(CHUNK_PAGES)))
    }

    pub const fn saturating_sub(self, other: PageCount) -> PageCount {
        PageCount(self.0.saturating_sub(other.0))
    }
}

impl ChunkIdx {
    /// The chunk that holds the byte at `offset`.
    pub const fn containing(offset: Bytes) -> ChunkIdx {
        PageIdx::containing(offset).chunk()
    }

    pub const fn first_page(self) -> PageIdx {
        PageIdx(self.0 as u64 * CHUNK_PAGES)
    }

    pub const fn last_page(self) -> PageIdx {
        PageIdx(self.0 as u64 * CHUNK_PAGES + (CHUNK_PAGES - 1))
    }

    /// The page at `index` in this chunk.
    pub const fn page(self, index: u8) -> PageIdx {
        PageIdx(self.0 as u64 * CHUNK_PAGES + index as u64)
    }

    /// Where the chunk starts, in the RAM file and in the swap file alike.
    pub const fn offset(self) -> Bytes {
        Bytes(self.0 as u64 * CHUNK_SIZE)
    }

    /// The number as an index of a table with one entry per chunk.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl ChunkCount {
    pub const ZERO: ChunkCount = ChunkCount(0);

    pub const fn pages(self) -> PageCount {
        PageCount(self.0 as u64 * CHUNK_PAGES)
    }

    pub const fn bytes(self) -> Bytes {
        Bytes(self.0 as u64 * CHUNK_SIZE)
    }

    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    pub const fn saturating_sub(self, other: ChunkCount) -> ChunkCount {
        ChunkCount(self.0.saturating_sub(other.0))
    }

    /// Every chunk of a space this large, in order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = ChunkIdx> + Clone {
        (0..self.0).map(ChunkIdx)
    }
}

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);

    pub const fn from_kib(kib: u64) -> Bytes {
        Bytes(kib.checked_mul(1 << 10).expect("size beyond u64"))
    }

    pub const fn from_mib(mib: u64) -> Bytes {
        Bytes(mib.checked_mul(1 << 20).expect("size beyond u64"))
    }

    pub const fn from_gib(gib: u64) -> Bytes {
        Bytes(gib.checked_mul(1 << 30).expect("size beyond u64"))
    }

    pub const fn pages_floor(self) -> PageCount {
        PageCount(self.0 / PAGE_SIZE)
    }

    pub const fn pages_ceil(self) -> PageCount {
        PageCount(self.0.div_ceil(PAGE_SIZE))
    }

    pub const fn chunks_floor(self) -> ChunkCount {
        ChunkCount(chunk_number(self.0 / CHUNK_SIZE))
    }

    pub const fn chunks_ceil(self) -> ChunkCount {
        ChunkCount(chunk_number(self.0.div_ceil(CHUNK_SIZE)))
    }

    pub const fn is_multiple_of_page(self) -> bool {
        self.0.is_multiple_of(PAGE_SIZE)
    }

    pub const fn is_multiple_of_chunk(self) -> bool {
        self.0.is_multiple_of(CHUNK_SIZE)
    }

    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(bytes) => Some(Bytes(bytes)),
            None => None,
        }
    }

    /// The number as an index or a length of memory of this process.
    pub const fn as_usize(self) -> usize {
        const { assert!(usize::BITS == 64) };
        self.0 as usize
    }
}

const fn chunk_number(chunks: u64) -> u32 {
    assert!(chunks <= u32::MAX as u64, "size beyond SPACE_SIZE_MAX");
    chunks as u32
}

/// `Idx + Count`, `Idx - Count`, `Idx - Idx`, and the arithmetic of counts.
macro_rules! arithmetic {
    ($count:ident $(, $index:ident)?) => {
        impl Add for $count {
            type Output = $count;
            fn add(self, other: $count) -> $count {
                $count(self.0.checked_add(other.0).expect("overflow in an addition of sizes"))
            }
        }
        impl Sub for $count {
            type Output = $count;
            fn sub(self, other: $count) -> $count {
                $count(self.0.checked_sub(other.0).expect("underflow in a difference of sizes"))
            }
        }
        impl AddAssign for $count {
            fn add_assign(&mut self, other: $count) {
                *self = *self + other;
            }
        }
        impl SubAssign for $count {
            fn sub_assign(&mut self, other: $count) {
                *self = *self - other;
            }
        }
        impl Sum for $count {
            fn sum<I: Iterator<Item = $count>>(counts: I) -> $count {
                counts.fold($count(0), Add::add)
            }
        }
        $(
            impl Add<$count> for $index {
                type Output = $index;
                fn add(self, count: $count) -> $index {
                    $index(self.0.checked_add(count.0).expect("overflow of an index"))
                }
            }
            impl Sub<$count> for $index {
                type Output = $index;
                fn sub(self, count: $count) -> $index {
                    $index(self.0.checked_sub(count.0).expect("underflow of an index"))
                }
            }
            impl Sub for $index {
                type Output = $count;
                fn sub(self, other: $index) -> $count {
                    $count(self.0.checked_sub(other.0).expect("underflow in a distance"))
                }
            }
        )?
    };
}
arithmetic!(PageCount, PageIdx);
arithmetic!(ChunkCount, ChunkIdx);
arithmetic!(Bytes);

macro_rules! display_as_number {
    ($($unit:ident),*) => {$(
        impl fmt::Display for $unit {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}
display_as_number!(PageIdx, PageCount, ChunkIdx, ChunkCount);

/// The binary units, largest first: what is printed, the letter that is understood, and the shift.
const SIZE_UNITS: [(&str, u8, u32); 6] =
    [("EiB", b'e', 60), ("PiB", b'p', 50), ("TiB", b't', 40), ("GiB", b'g', 30), ("MiB", b'm', 20), ("KiB", b'k', 10)];

/// `512 MiB`, `1.5 GiB`, `17 B`: the largest unit that leaves at least 1, with at most two decimals.
/// Rounds down, so that what is printed is never more than what is there. The result parses again.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(&(unit, _, shift)) = SIZE_UNITS.iter().find(|(_, _, shift)| self.0 >> shift > 0) else {
            return f.pad(&format!("{} B", self.0));
        };
        let whole = self.0 >> shift;
        let rest = self.0 & ((1 << shift) - 1);
        let hundredths = ((u128::from(rest) * 100) >> shift) as u64;
        f.pad(&match (hundredths, hundredths % 10) {
            (0, _) => format!("{whole} {unit}"),
            (_, 0) => format!("{whole}.{} {unit}", hundredths / 10),
            _ => format!("{whole}.{hundredths:02} {unit}"),
        })
    }
}

/// Why a text is not a size. The messages are for the user who typed it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    #[error("empty size; give a number with a unit, such as 512M or 1.5G")]
    Empty,
    #[error("size {input:?} does not start with a number; write it like 512M or 1.5G")]
    NotANumber { input: String },
    #[error(
        "unknown unit {unit:?} in size {input:?}; the units are B, K, M, G, T, P (or KiB, MiB, ...), powers of 1024"
    )]
    UnknownUnit { input: String, unit: String },
    #[error("{unit:?} in size {input:?} may mean a power of 1000 or of 1024; write {} or {}iB for the power of 1024", &unit[..1], &unit[..1])]
    DecimalUnit { input: String, unit: String },
    #[error("size {input:?} is not a whole number of bytes; did you leave out a unit such as M or G?")]
    PartOfAByte { input: String },
    #[error("size {input:?} is beyond the largest possible, 16 EiB - 1 B")]
    TooLarge { input: String },
}

/// Digits after the point that count: 10^-18 EiB is less than two bytes, and u128 has room for them.
const FRACTION_DIGITS_MAX: usize = 18;

/// Reads `512M`, `1.5GiB`, `2 g`, `4096`. Units are powers of 1024, as in QEMU. A fraction of a unit
/// that is no whole number of bytes is rounded down.
impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        let input = text.trim();
        if input.is_empty() {
            return Err(ParseBytesError::Empty);
        }
        let owned = || input.to_owned();
        let unit_at = input.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(input.len());
        let (number, unit) = (&input[..unit_at], input[unit_at..].trim_start());
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || fraction.contains('.') || (number.contains('.') && fraction.is_empty()) {
            return Err(ParseBytesError::NotANumber { input: owned() });
        }
        let shift = parse_unit(input, unit)?;
        if shift == 0 && fraction.bytes().any(|digit| digit != b'0') {
            return Err(ParseBytesError::PartOfAByte { input: owned() });
        }
        let too_large = || ParseBytesError::TooLarge { input: owned() };
        let whole: u64 = whole.parse().map_err(|_| too_large())?;
        let bytes = u128::from(whole) << shift;
        u64::try_from(bytes + fraction_of(fraction, shift)).map(Bytes).map_err(|_| too_large())
    }
}

/// The shift that a unit stands for.
fn parse_unit(input: &str, unit: &str) -> Result<u32, ParseBytesError> {
    let lower = unit.to_ascii_lowercase();
    if matches!(lower.as_str(), "" | "b") {
        return Ok(0);
    }
    let known = SIZE_UNITS.iter().find(|(_, letter, _)| lower.as_bytes()[0] == *letter);
    match (known, &lower.as_bytes()[1..]) {
        (Some(&(_, _, shift)), b"" | b"i" | b"ib") => Ok(shift),
        (Some(_), b"b") => Err(ParseBytesError::DecimalUnit { input: input.to_owned(), unit: unit.to_owned() }),
        _ => Err(ParseBytesError::UnknownUnit { input: input.to_owned(), unit: unit.to_owned() }),
    }
}

/// The bytes in a decimal fraction of the unit `1 << shift`, rounded down.
fn fraction_of(digits: &str, shift: u32) -> u128 {
    let mut numerator: u128 = 0;
    let mut denominator: u128 = 1;
    for digit in digits.bytes().take(FRACTION_DIGITS_MAX) {
        numerator = numerator * 10 + u128::from(digit - b'0');
        denominator *= 10;
    }
    (numerator << shift) / denominator
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read() {
        let check = |input: &str, expected: u64| assert_eq!(input.parse(), Ok(Bytes(expected)), "{input:?}");
        check("0", 0);
        check("4096", 4096);
        check("17B", 17);
        check("512M", 512 << 20);
        check("512m", 512 << 20);
        check("1G", 1 << 30);
        check("1.5GiB", 3 << 29);
        check(" 2 gib ", 2 << 30);
        check("1Ti", 1 << 40);
        check("0.1K", 102);
        check("1.0", 1);
        check("1.9999999999999999999999999999K", 2047);
        check("15.999999999999999999E", u64::MAX - 1);
        check("18446744073709551615", u64::MAX);
    }

    #[test]
    fn bad_sizes_say_what_to_do() {
        let check = |input: &str, expected: &str| {
            let message = input.parse::<Bytes>().expect_err(input).to_string();
            assert!(message.contains(expected), "{input:?}: {message}");
        };
        check("", "give a number with a unit");
        check("  ", "give a number with a unit");
        check("big", "does not start with a number");
        check("-1G", "does not start with a number");
        check(".5G", "does not start with a number");
        check("1.G", "does not start with a number");
        check("1.2.3G", "does not start with a number");
        check("1X", "unknown unit \"X\"");
        check("1Gigabyte", "unknown unit");
        check("1µ", "unknown unit");
        check("1MB", "write M or MiB");
        check("1.5", "leave out a unit");
        check("16E", "beyond the largest");
        check("99999999999999999999", "beyond the largest");
    }

    #[test]
    fn sizes_are_printed_rounded_down() {
        let check = |bytes: u64, expected: &str| assert_eq!(Bytes(bytes).to_string(), expected);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1024, "1 KiB");
        check(512 << 20, "512 MiB");
        check(3 << 29, "1.5 GiB");
        check((1 << 30) - 1, "1023.99 MiB");
        check((1 << 40) + (1 << 40) / 16, "1.06 TiB");
        check(u64::MAX, "15.99 EiB");
        assert_eq!(format!("{:>10}|{:<8}|", Bytes(1 << 20), PageIdx(7)), "     1 MiB|7       |");
    }

    #[test]
    fn conversions_round_as_named() {
        let bytes = Bytes(CHUNK_SIZE + PAGE_SIZE + 1);
        assert_eq!((bytes.pages_floor(), bytes.pages_ceil()), (PageCount(257), PageCount(258)));
        assert_eq!((bytes.chunks_floor(), bytes.chunks_ceil()), (ChunkCount(1), ChunkCount(2)));
        assert_eq!((PageCount(511).chunks_floor(), PageCount(511).chunks_ceil()), (ChunkCount(1), ChunkCount(2)));
        assert_eq!(PageCount(512).chunks_ceil(), ChunkCount(2));
        assert_eq!(ChunkIdx(3).last_page(), PageIdx(1023));
        assert_eq!(PageIdx(1023) - PageIdx(1000), PageCount(23));
        assert_eq!(SPACE_SIZE_MAX.chunks_floor().bytes(), SPACE_SIZE_MAX);
    }

    proptest! {
        #[test]
        fn a_page_is_where_its_chunk_says(page in 0..SPACE_SIZE_MAX.0 / PAGE_SIZE, byte in 0..PAGE_SIZE) {
            let page = PageIdx(page);
            prop_assert_eq!(page.chunk().page(page.index_in_chunk()), page);
            prop_assert_eq!(PageIdx::containing(page.offset() + Bytes(byte)), page);
            prop_assert!(page.chunk().first_page() <= page && page <= page.chunk().last_page());
        }

        #[test]
        fn what_is_printed_parses_to_no_more(bytes in any::<u64>(), shift in 0..64u32) {
            let bytes = Bytes(bytes >> shift);
            let read: Bytes = bytes.to_string().parse().unwrap();
            prop_assert!(read <= bytes);
            prop_assert!(bytes.0 - read.0 <= bytes.0 / 100, "{} printed as {}", bytes.0, bytes);
        }

        #[test]
        fn any_text_is_a_size_or_an_error(text in "\\PC{0,12}") {
            let _ = text.parse::<Bytes>();
        }
    }
}
