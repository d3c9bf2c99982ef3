//! The operating system's random numbers.

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use rmap::crypto::Entropy;

/// Random bytes of the operating system.
#[derive(Debug, Default)]
pub struct SystemEntropy(SystemRandom);

impl Entropy for SystemEntropy {
    /// # Panics
    /// If the system has no randomness: no key would be safe.
    fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes).expect("the system's random numbers");
    }
}
