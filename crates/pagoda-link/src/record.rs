//! Sealing of records: AES-256-GCM, with the index of the record in its direction as the nonce.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | length of what follows, little-endian: the content and 16. Authenticated with it |
//! | 4.. | the content, encrypted; then the tag of 16 bytes |

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rmap::crypto::KEY_SIZE;

/// Content of one record: 64 pages and what is said of them.
pub const RECORD_MAX: usize = (256 << 10) + (4 << 10);
pub const LEN_SIZE: usize = 4;
pub const TAG_SIZE: usize = 16;
/// Records in a direction. AES-GCM is safe for far more; a stream that sends for years begins anew.
const RECORDS_MAX: u64 = 1 << 40;

/// Seals or opens what goes one way.
pub struct Seal {
    key: LessSafeKey,
    next: u64,
}

/// A record is not the one that has to come.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAuthentic;

impl Seal {
    /// # Panics
    /// Never: the key has the length of the algorithm.
    pub fn new(key: &[u8; KEY_SIZE]) -> Seal {
        let key = UnboundKey::new(&AES_256_GCM, key).expect("32 bytes");
        Seal { key: LessSafeKey::new(key), next: 0 }
    }

    fn nonce(&mut self) -> Result<Nonce, NotAuthentic> {
        let index = self.next;
        if index >= RECORDS_MAX {
            return Err(NotAuthentic);
        }
        self.next += 1;
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&index.to_be_bytes());
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// Makes a record of `frame`: room for the length, and the content behind it.
    ///
    /// # Errors
    /// There were too many records.
    ///
    /// # Panics
    /// The content is longer than [`RECORD_MAX`].
    pub fn seal(&mut self, frame: &mut Vec<u8>) -> Result<(), NotAuthentic> {
        let content = frame.len() - LEN_SIZE;
        assert!(content <= RECORD_MAX, "a record of {content} bytes");
        let len = ((content + TAG_SIZE) as u32).to_le_bytes();
        frame[..LEN_SIZE].copy_from_slice(&len);
        let nonce = self.nonce()?;
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(len), &mut frame[LEN_SIZE..]);
        frame.extend_from_slice(tag.map_err(|_| NotAuthentic)?.as_ref());
        Ok(())
    }

    /// Opens what stands behind a length; gives the content.
    ///
    /// # Errors
    /// It is not the record that has to come: the stream is of no use any more.
    pub fn open<'a>(&mut self, len: [u8; LEN_SIZE], sealed: &'a mut [u8]) -> Result<&'a [u8], NotAuthentic> {
        let nonce = self.nonce()?;
        self.key.open_in_place(nonce, Aad::from(len), sealed).map(|content| &*content).map_err(|_| NotAuthentic)
    }
}

/// The bytes behind a length, if a record can have so many.
pub fn sealed_len(len: [u8; LEN_SIZE]) -> Option<usize> {
    let len = u32::from_le_bytes(len) as usize;
    (TAG_SIZE..=RECORD_MAX + TAG_SIZE).contains(&len).then_some(len)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sealed(seal: &mut Seal, content: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; LEN_SIZE];
        frame.extend_from_slice(content);
        seal.seal(&mut frame).unwrap();
        frame
    }

    fn opened(open: &mut Seal, frame: &[u8]) -> Result<Vec<u8>, NotAuthentic> {
        let len: [u8; LEN_SIZE] = frame[..LEN_SIZE].try_into().unwrap();
        let mut body = frame[LEN_SIZE..].to_vec();
        open.open(len, &mut body).map(<[u8]>::to_vec)
    }

    #[test]
    fn records_are_opened_in_their_order_alone() {
        let key = [7; KEY_SIZE];
        let (mut seal, mut open) = (Seal::new(&key), Seal::new(&key));
        let frames = ["one", "two", ""].map(|text| sealed(&mut seal, text.as_bytes()));
        assert_eq!(opened(&mut open, &frames[0]).unwrap(), b"one");
        assert_eq!(opened(&mut open, &frames[0]), Err(NotAuthentic), "once more");
        let mut open = Seal::new(&key);
        assert_eq!(opened(&mut open, &frames[1]), Err(NotAuthentic), "before the first");
        let mut open = Seal::new(&key);
        let all: Vec<_> = frames.iter().map(|frame| opened(&mut open, frame).unwrap()).collect();
        assert_eq!(all, [&b"one"[..], b"two", b""]);
        assert_eq!(opened(&mut Seal::new(&[8; KEY_SIZE]), &frames[0]), Err(NotAuthentic), "another key");
    }

    #[test]
    fn lengths_are_bounded() {
        let len = |len: usize| sealed_len((len as u32).to_le_bytes());
        assert_eq!(len(TAG_SIZE - 1), None);
        assert_eq!(len(TAG_SIZE), Some(TAG_SIZE));
        assert_eq!(len(RECORD_MAX + TAG_SIZE), Some(RECORD_MAX + TAG_SIZE));
        assert_eq!(len(RECORD_MAX + TAG_SIZE + 1), None);
        assert_eq!(len(u32::MAX as usize), None);
    }

    proptest! {
        #[test]
        fn no_changed_byte_is_taken(content in prop::collection::vec(any::<u8>(), 0..300), at in any::<prop::sample::Index>(), bit in 0..8) {
            let key = [7; KEY_SIZE];
            let mut frame = sealed(&mut Seal::new(&key), &content);
            let at = at.index(frame.len());
            frame[at] ^= 1_u8 << bit;
            prop_assert_eq!(opened(&mut Seal::new(&key), &frame), Err(NotAuthentic));
        }
    }
}
