//! The journal of a space, as bytes: what another process needs to go on when the one that serves it has been killed.
//!
//! A journal is a sequence of *batches*. A batch is a length, a checksum and records, and counts if it is whole. So a process
//! that is killed while it writes one has written all of it or nothing. There are two journals. The first batch of each is a
//! *snapshot* with a number; the one with the higher number is valid. When it has become long, a snapshot of all is written into
//! the other one ([`crate::Space::snapshot`]).
//!
//! Whoever writes here holds the bytes where they outlive it, and writes a batch before anything that follows from it is done:
//! before the guest is answered, bytes are sent or memory is given back.

/// Length and checksum of a batch.
const HEAD_BYTES: usize = 4 + 8;

/// Of 64 bits (FNV-1a). It tells what is not whole from what is, and protects against nobody.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A batch as it is written.
pub fn batch(records: &[u8]) -> Vec<u8> {
    let length =
        u32::try_from(records.len()).expect("a snapshot has at most NODES_MAX files, each of less than 64 KiB");
    let mut bytes = Vec::with_capacity(HEAD_BYTES + records.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&checksum(records).to_le_bytes());
    bytes.extend_from_slice(records);
    bytes
}

/// The records of the first batch, and what is behind it. `None`: there is no whole one.
fn first(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<8>()?;
    let length = u32::from_le_bytes(*length) as usize;
    if length == 0 || length > rest.len() {
        return None;
    }
    let (records, rest) = rest.split_at(length);
    (checksum(records) == u64::from_le_bytes(*sum)).then_some((records, rest))
}

/// The records of all batches up to the first that is not whole.
pub fn batches(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (records, rest) = first(bytes)?;
        bytes = rest;
        Some(records)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_whole_does_not_count() {
        let (one, two) = (batch(b"one"), batch(b"the second"));
        let both = [one.clone(), two].concat();
        for end in 0..=both.len() {
            let expected = match end {
                end if end < one.len() => 0,
                end if end < both.len() => 1,
                _ => 2,
            };
            // What is behind was never written, or is of an earlier life.
            for behind in [&[][..], &[0; 64], &[0xff; 64]] {
                let bytes = [&both[..end], behind].concat();
                assert_eq!(batches(&bytes).count(), expected, "{end} bytes");
            }
        }
        let mut bad = both.clone();
        bad[HEAD_BYTES] ^= 1;
        assert_eq!(batches(&bad).count(), 0);
    }
}
