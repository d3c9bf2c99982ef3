//! The page seal: AES-256-GCM-SIV (RFC 8452) under the space's key, which servers never see, bound to space, page number and
//! version.
//!
//! A server can neither read a page nor alter it, nor pass one off for another or an older one for the present one: the
//! client knows which version it wants.
//!
//! The version is the nonce. A control plane that was restored from a backup may give a generation twice, and then a version is
//! used twice, at servers that do not know of each other. Under GCM that would give the authentication key away; under GCM-SIV it
//! tells only whether the same page was written twice with the same content. It costs 1 us more a page.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, Nonce, UnboundKey};

use super::{KEY_SIZE, Rejected};
use crate::units::{PAGE_SIZE, Page, PageNo, SEAL_SIZE, SealedPage, SpaceId, Version};

/// The key of a space.
pub struct SpaceKey {
    key: LessSafeKey,
    space: SpaceId,
}

impl fmt::Debug for SpaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpaceKey({:?})", self.space)
    }
}

impl SpaceKey {
    /// # Panics
    /// Never: the key has the length of the algorithm.
    pub fn new(key: &[u8; KEY_SIZE], space: SpaceId) -> SpaceKey {
        let key = UnboundKey::new(&AES_256_GCM_SIV, key).expect("32 bytes");
        SpaceKey { key: LessSafeKey::new(key), space }
    }

    fn aad(&self, page: PageNo, version: Version) -> [u8; 24] {
        let mut aad = [0; 24];
        aad[..8].copy_from_slice(&self.space.0.to_le_bytes());
        aad[8..16].copy_from_slice(&page.0.to_le_bytes());
        aad[16..].copy_from_slice(&version.bits().to_le_bytes());
        aad
    }

    /// No version is used twice for a page under one control plane that never went back.
    fn nonce(version: Version) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&version.bits().to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    /// Seals the page that the first bytes are.
    ///
    /// # Panics
    /// Never: no page is too long for the algorithm.
    pub fn seal(&self, page: PageNo, version: Version, content: &mut SealedPage) {
        let (body, tag) = content.split_at_mut(PAGE_SIZE);
        let aad = Aad::from(self.aad(page, version));
        let seal = self.key.seal_in_place_separate_tag(SpaceKey::nonce(version), aad, body);
        tag[..SEAL_SIZE].copy_from_slice(seal.expect("a page is not too long").as_ref());
    }

    /// Opens to `content`, which is of no use when that fails.
    ///
    /// # Errors
    /// It is not what was sealed as this version of this page.
    pub fn open(&self, page: PageNo, version: Version, sealed: &[u8], content: &mut Page) -> Result<(), Rejected> {
        let (body, seal) = sealed.split_at_checked(PAGE_SIZE).ok_or(Rejected::NotAuthentic)?;
        let aad = Aad::from(self.aad(page, version));
        let opened = self.key.open_separate_gather(SpaceKey::nonce(version), aad, body, seal, content);
        opened.map_err(|_| Rejected::NotAuthentic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{Generation, SEALED_SIZE};

    #[test]
    fn opens_only_as_what_it_was_sealed_as() {
        let key = SpaceKey::new(&[7; KEY_SIZE], SpaceId(1));
        let version = |sequence| Version::new(Generation(2), sequence, false);
        let content = [0x5a; PAGE_SIZE];
        let mut sealed = [0; SEALED_SIZE];
        sealed[..PAGE_SIZE].copy_from_slice(&content);
        key.seal(PageNo(3), version(4), &mut sealed);
        let opens = |key: &SpaceKey, page, version, flip: Option<usize>| {
            let mut copy = sealed;
            if let Some(at) = flip {
                copy[at] ^= 1;
            }
            let mut opened = [0; PAGE_SIZE];
            key.open(PageNo(page), version, &copy, &mut opened).map(|()| opened == content)
        };
        assert_eq!(opens(&key, 3, version(4), None), Ok(true));
        let other = SpaceKey::new(&[7; KEY_SIZE], SpaceId(2));
        for (key, page, version, flip) in [
            (&key, 4, version(4), None),
            (&key, 3, version(3), None),
            (&key, 3, version(4), Some(0)),
            (&key, 3, version(4), Some(SEALED_SIZE - 1)),
            (&other, 3, version(4), None),
        ] {
            assert_eq!(opens(key, page, version, flip), Err(Rejected::NotAuthentic));
        }
        assert_ne!(sealed[..PAGE_SIZE], content);
    }

    #[test]
    fn the_same_version_twice_tells_nothing_of_the_contents() {
        let key = SpaceKey::new(&[7; KEY_SIZE], SpaceId(1));
        let seal = |content: u8| {
            let mut sealed = [content; SEALED_SIZE];
            key.seal(PageNo(3), Version::new(Generation(2), 4, false), &mut sealed);
            sealed
        };
        let (one, other) = (seal(0x5a), seal(0xa5));
        // Under a stream cipher with the same nonce, each byte would differ by 0x5a ^ 0xa5.
        let same = one[..PAGE_SIZE].iter().zip(&other).filter(|(one, other)| *one ^ *other == 0xff).count();
        assert!(same < 64, "{same} of {PAGE_SIZE}: chance gives 16");
    }
}
