//! How a stream begins: Noise IK (revision 34) over X25519 by `snow`. It serves for nothing but the keys of the two directions.
//!
//! The caller knows the key of the host that it calls. The called host learns the caller's key. The bytes before a Noise message
//! say which versions are spoken. They are not authentic by themselves, so each end says the version once more in its first
//! record.

use aws_lc_rs::error::Unspecified;
use rmap::crypto::entropy::{Resolver, SharedEntropy};
use rmap::crypto::{KEY_SIZE, Keypair, PublicKey};
use rmap_io::SystemEntropy;
use snow::{Builder, HandshakeState};
use thiserror::Error;

const PATTERN: &str = "Noise_IK_25519_ChaChaPoly_SHA256";
const MAGIC: &[u8; 8] = b"pagodaln";
/// Versions that this code speaks.
pub const VERSION_MIN: u8 = 1;
pub const VERSION_MAX: u8 = 1;
/// Magic, versions and zeros.
const HEAD_SIZE: usize = 16;
/// A key, a sealed key, and the tag of an empty payload.
const FIRST_SIZE: usize = KEY_SIZE + KEY_SIZE + TAG_SIZE + TAG_SIZE;
const SECOND_SIZE: usize = KEY_SIZE + TAG_SIZE;
const TAG_SIZE: usize = 16;
pub const HELLO_SIZE: usize = HEAD_SIZE + FIRST_SIZE;
pub const ANSWER_SIZE: usize = HEAD_SIZE + SECOND_SIZE;

/// Why two hosts cannot speak with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoHandshake {
    #[error("what answers there is no pagodad that takes other hosts' VMs")]
    NotPagoda,
    #[error(
        "it speaks versions {0} to {1} of the protocol between hosts, and this one {VERSION_MIN} to {VERSION_MAX}: update the older one"
    )]
    Versions(u8, u8),
    #[error("it does not have the private key of the host that it should be")]
    NotAuthentic,
}

impl From<snow::Error> for NoHandshake {
    fn from(_: snow::Error) -> NoHandshake {
        NoHandshake::NotAuthentic
    }
}

impl From<Unspecified> for NoHandshake {
    fn from(_: Unspecified) -> NoHandshake {
        NoHandshake::NotAuthentic
    }
}

/// The keys of the two directions, and the version that is spoken.
pub struct Secrets {
    pub from_caller: [u8; KEY_SIZE],
    pub to_caller: [u8; KEY_SIZE],
    pub version: u8,
}

impl Secrets {
    fn of(noise: &mut HandshakeState, version: u8) -> Secrets {
        let (from_caller, to_caller) = noise.dangerously_get_raw_split();
        Secrets { from_caller, to_caller, version }
    }
}

fn head(first: u8, second: u8) -> [u8; HEAD_SIZE] {
    let mut head = [0; HEAD_SIZE];
    head[..8].copy_from_slice(MAGIC);
    (head[8], head[9]) = (first, second);
    head
}

/// The two numbers of a head.
fn numbers(head: &[u8]) -> Result<(u8, u8), NoHandshake> {
    let is_ours = head[..8] == *MAGIC && head[10..HEAD_SIZE] == [0; HEAD_SIZE - 10];
    if is_ours { Ok((head[8], head[9])) } else { Err(NoHandshake::NotPagoda) }
}

fn builder<'a>(own: &'a Keypair, prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    let entropy = SharedEntropy::new(Box::new(SystemEntropy::default()));
    Builder::with_resolver(PATTERN.parse()?, Box::new(Resolver(entropy)))
        .local_private_key(own.private())?
        .prologue(prologue)
}

/// The caller's half of a handshake, between its hello and the answer.
pub struct Caller(HandshakeState);

impl Caller {
    /// What the caller sends first.
    ///
    /// # Errors
    /// The key of the other one is none.
    pub fn begin(own: &Keypair, called: &PublicKey) -> Result<(Caller, [u8; HELLO_SIZE]), NoHandshake> {
        let mut hello = [0; HELLO_SIZE];
        let (start, message) = hello.split_at_mut(HEAD_SIZE);
        start.copy_from_slice(&head(VERSION_MIN, VERSION_MAX));
        let mut noise = builder(own, start)?.remote_public_key(&called.0)?.build_initiator()?;
        let written = noise.write_message(&[], message)?;
        debug_assert_eq!(written, FIRST_SIZE);
        Ok((Caller(noise), hello))
    }

    /// Takes the answer of the called host, which gives the keys of the stream.
    ///
    /// # Errors
    /// It is not that of the host with this key, or is in no version that this one speaks.
    pub fn end(mut self, answer: &[u8; ANSWER_SIZE]) -> Result<Secrets, NoHandshake> {
        let (least, most) = numbers(answer)?;
        // One that takes the versions answers with one number.
        if least != most || answer[HEAD_SIZE..] == [0; SECOND_SIZE] {
            return Err(NoHandshake::Versions(least, most));
        }
        if !(VERSION_MIN..=VERSION_MAX).contains(&least) {
            return Err(NoHandshake::NotPagoda);
        }
        self.0.read_message(&answer[HEAD_SIZE..], &mut [])?;
        Ok(Secrets::of(&mut self.0, least))
    }
}

/// What the called one answers, and whether the two go on.
pub struct Answer {
    pub bytes: [u8; ANSWER_SIZE],
    /// The caller's key, and the keys of the stream.
    pub then: Result<(PublicKey, Secrets), NoHandshake>,
}

/// The called one's half, in one step.
///
/// # Errors
/// The hello is none, or not meant for this host: it is not answered.
pub fn answer(own: &Keypair, hello: &[u8; HELLO_SIZE]) -> Result<Answer, NoHandshake> {
    let (start, message) = hello.split_at(HEAD_SIZE);
    let (least, most) = numbers(start)?;
    let version = most.min(VERSION_MAX);
    let mut bytes = [0; ANSWER_SIZE];
    if version < least.max(VERSION_MIN) {
        bytes[..HEAD_SIZE].copy_from_slice(&head(VERSION_MIN, VERSION_MAX));
        return Ok(Answer { bytes, then: Err(NoHandshake::Versions(least, most)) });
    }
    let mut noise = builder(own, start)?.build_responder()?;
    noise.read_message(message, &mut [])?;
    let key = noise.get_remote_static().and_then(|key| key.try_into().ok()).ok_or(NoHandshake::NotAuthentic)?;
    bytes[..HEAD_SIZE].copy_from_slice(&head(version, version));
    let written = noise.write_message(&[], &mut bytes[HEAD_SIZE..])?;
    debug_assert_eq!(written, SECOND_SIZE);
    Ok(Answer { bytes, then: Ok((PublicKey(key), Secrets::of(&mut noise, version))) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(byte: u8) -> Keypair {
        Keypair::from_private([byte; KEY_SIZE])
    }

    #[test]
    fn both_ends_have_the_same_keys_and_know_each_other() {
        let (caller, called) = (keys(1), keys(2));
        let (begun, hello) = Caller::begin(&caller, &called.public()).unwrap();
        let answered = answer(&called, &hello).unwrap();
        let (who, theirs) = answered.then.unwrap_or_else(|error| panic!("{error}"));
        let ours = begun.end(&answered.bytes).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(who, caller.public());
        assert_eq!((ours.from_caller, ours.to_caller), (theirs.from_caller, theirs.to_caller));
        assert_ne!(ours.from_caller, ours.to_caller);
        assert_eq!((ours.version, theirs.version), (VERSION_MAX, VERSION_MAX));
    }

    #[test]
    fn others_and_changed_bytes_are_refused() {
        let (caller, called) = (keys(1), keys(2));
        let (_, hello) = Caller::begin(&caller, &called.public()).unwrap();
        assert!(answer(&keys(3), &hello).is_err(), "it is meant for another one");
        for at in 0..HELLO_SIZE {
            let mut changed = hello;
            changed[at] ^= 1;
            // Another greatest version is bound, too, and another magic is not looked at further.
            assert!(answer(&called, &changed).map_or(true, |answer| answer.then.is_err()), "byte {at} of the hello");
        }
        let bytes = answer(&called, &hello).unwrap().bytes;
        for at in 0..ANSWER_SIZE {
            // Each needs a begun handshake of its own, which has other keys.
            let (begun, hello) = Caller::begin(&caller, &called.public()).unwrap();
            let mut changed = answer(&called, &hello).unwrap().bytes;
            changed[at] ^= 1;
            assert!(begun.end(&changed).is_err(), "byte {at} of the answer");
        }
        let (begun, _) = Caller::begin(&caller, &called.public()).unwrap();
        assert!(begun.end(&bytes).is_err(), "the answer to another hello");
    }

    #[test]
    fn versions_that_do_not_meet_are_named_at_both_ends() {
        let (caller, called) = (keys(1), keys(2));
        let (begun, mut hello) = Caller::begin(&caller, &called.public()).unwrap();
        (hello[8], hello[9]) = (VERSION_MAX + 1, VERSION_MAX + 4);
        let answered = answer(&called, &hello).unwrap();
        assert_eq!(answered.then.err(), Some(NoHandshake::Versions(VERSION_MAX + 1, VERSION_MAX + 4)));
        assert_eq!(begun.end(&answered.bytes).err(), Some(NoHandshake::Versions(VERSION_MIN, VERSION_MAX)));
    }
}
