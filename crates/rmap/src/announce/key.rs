//! The public key by which listeners know who has signed an announcement.

use std::fmt;

use crate::crypto::KEY_SIZE;

/// The public half of a server's signing key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AnnounceKey(pub [u8; KEY_SIZE]);

impl fmt::Debug for AnnounceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
