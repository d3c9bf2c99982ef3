//! The parts of an S3 upload: how large each is, and which the server has. Pure.

use md5::{Digest, Md5};

use crate::failure::Cause;

/// The least that a part may have that is not the last ("Amazon S3 multipart upload limits").
pub const PART_BYTES_MIN: u64 = 5 << 20;
/// The most parts of one upload, from the same page.
pub const PARTS_MAX: u16 = 10_000;
/// After so many parts the next ones are twice as large. So 10,000 parts hold 5 TiB, more than a file of an outbox may have.
const DOUBLED_AFTER: u16 = 1_000;

/// The size of part `number`, from 1: small at first, so that little memory waits for it. None is larger than `most`.
pub fn part_bytes(number: u16, most: u64) -> u64 {
    let doublings = number.saturating_sub(1) / DOUBLED_AFTER;
    (PART_BYTES_MIN << doublings.min(16)).min(most.max(PART_BYTES_MIN))
}

/// A part that the server has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// As the server gave it.
    etag: String,
}

/// An upload that was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    id: String,
    parts: Vec<Part>,
    /// Everything below is in parts.
    end: u64,
}

impl Upload {
    pub fn new(id: String) -> Upload {
        Upload { id, parts: Vec::new(), end: 0 }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where the next part begins.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The number of the next part.
    ///
    /// # Errors
    /// There are as many as there may be.
    pub fn next_number(&self, most: u64) -> Result<u16, Cause> {
        let next = self.parts.len() + 1;
        u16::try_from(next)
            .ok()
            .filter(|next| *next <= PARTS_MAX)
            .ok_or(Cause::TooLarge { parts_max: u64::from(PARTS_MAX), part_bytes: part_bytes(PARTS_MAX, most) })
    }

    /// The server has the next part.
    pub fn add(&mut self, etag: String, bytes: u64) {
        self.parts.push(Part { etag });
        self.end += bytes;
    }

    /// A part that the server lists. Whether it is the next one: only those without a gap before them are of use.
    pub fn add_listed(&mut self, number: u16, etag: String, bytes: u64) -> bool {
        let is_next = usize::from(number) == self.parts.len() + 1 && bytes > 0 && !etag.is_empty();
        if is_next {
            self.add(etag, bytes);
        }
        is_next
    }

    pub fn etags(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|part| part.etag.as_str())
    }

    /// The ETag of the whole object where servers form it as S3 does: the MD5 of the parts' MD5s, and their number. `None` if a part's
    /// ETag is no MD5.
    pub fn expected_etag(&self) -> Option<String> {
        let mut whole = Md5::new();
        for part in &self.parts {
            whole.update(md5_of(&part.etag)?);
        }
        let digest: String = whole.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Some(format!("{digest}-{}", self.parts.len()))
    }
}

/// The MD5 that an ETag is.
fn md5_of(etag: &str) -> Option<[u8; 16]> {
    let text = etag.trim_matches('"').as_bytes();
    let mut md5 = [0; 16];
    if text.len() != 2 * md5.len() || !text.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in md5.iter_mut().zip(text.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(md5)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE_BYTES_MAX: u64 = pagoda_outbox::limits::FILE_BYTES_MAX;

    #[test]
    fn parts_hold_the_largest_file_and_stay_allowed() {
        let sizes: Vec<u64> = (1..=PARTS_MAX).map(|number| part_bytes(number, u64::MAX)).collect();
        assert!(sizes.iter().sum::<u64>() >= FILE_BYTES_MAX);
        assert!(sizes.iter().all(|bytes| (PART_BYTES_MIN..=5 << 30).contains(bytes)));
        assert_eq!((sizes[0], sizes[999], sizes[1000]), (PART_BYTES_MIN, PART_BYTES_MIN, 2 * PART_BYTES_MIN));
        assert_eq!(part_bytes(PARTS_MAX, 8 << 20), 8 << 20);
        assert_eq!(part_bytes(1, 0), PART_BYTES_MIN, "less is refused by the server");
    }

    #[test]
    fn parts_follow_one_another() {
        let mut upload = Upload::new("id".to_owned());
        assert!(!upload.add_listed(2, "b".to_owned(), 5), "the first is missing");
        assert!(upload.add_listed(1, "a".to_owned(), 7));
        assert!(!upload.add_listed(1, "a".to_owned(), 7));
        assert!(!upload.add_listed(2, String::new(), 7) && !upload.add_listed(2, "b".to_owned(), 0));
        upload.add("b".to_owned(), 3);
        assert_eq!((upload.end(), upload.next_number(0)), (10, Ok(3)));
        assert_eq!(upload.etags().collect::<Vec<_>>(), ["a", "b"]);
        for _ in 2..PARTS_MAX {
            upload.add("c".to_owned(), 1);
        }
        let too_large = Cause::TooLarge { parts_max: 10_000, part_bytes: PART_BYTES_MIN };
        assert_eq!(upload.next_number(PART_BYTES_MIN), Err(too_large));
    }

    #[test]
    fn the_whole_objects_etag() {
        let mut upload = Upload::new("id".to_owned());
        // Of parts "a" and "b": md5(0cc175b9c0f1b6a831c399e269772661 92eb5ffee6ae2fec3ad71c777531578f), by md5sum(1).
        upload.add("\"0cc175b9c0f1b6a831c399e269772661\"".to_owned(), 1);
        upload.add("92EB5FFEE6AE2FEC3AD71C777531578F".to_owned(), 1);
        assert_eq!(upload.expected_etag().unwrap(), "96e024ba2074fe77e8e965ba43a704be-2");
        upload.add("\"no-md5\"".to_owned(), 1);
        assert_eq!(upload.expected_etag(), None);
    }
}
