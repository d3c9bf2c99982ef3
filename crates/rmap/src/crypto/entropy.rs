//! Randomness as an argument, so that a simulation can be replayed.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};

/// A source of random bytes. That of the operating system is in `rmap-io`.
pub trait Entropy: Debug + Send {
    fn fill(&mut self, bytes: &mut [u8]);

    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}

/// A source that handshakes share with their owner.
#[derive(Clone, Debug)]
pub struct SharedEntropy(Arc<Mutex<Box<dyn Entropy>>>);

impl SharedEntropy {
    pub fn new(entropy: Box<dyn Entropy>) -> SharedEntropy {
        SharedEntropy(Arc::new(Mutex::new(entropy)))
    }

    pub fn fill(&self, bytes: &mut [u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).fill(bytes);
    }

    pub fn next_u64(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).next_u64()
    }
}

impl Random for SharedEntropy {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), snow::Error> {
        self.fill(dest);
        Ok(())
    }
}

/// Snow's algorithms with our randomness.
#[derive(Debug)]
pub struct Resolver(pub SharedEntropy);

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(self.0.clone()))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        DefaultResolver.resolve_dh(choice)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}
