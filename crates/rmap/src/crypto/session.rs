//! The keys of a session: one direction each way, counters as nonces, a new key every so often.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hmac;

use super::handshake::Secrets;
use super::replay::ReplayWindow;
use super::{KEY_SIZE, Rejected};
use crate::wire::datagram::{HEADER_SIZE, Head};
use crate::wire::message::{self, Fragment, Message};
use crate::wire::{OVERHEAD, PROTOCOL_VERSION, TAG_SIZE};

/// Datagrams under one key. NIST SP 800-38D allows 2^32; fewer cost nothing, and what is recorded ages sooner.
const REKEY_DATAGRAMS: u64 = 1 << 24;
/// A session ends before its counter could come near its end.
const COUNTER_MAX: u64 = 1 << 56;

/// One key of a chain. The next follows from this one's secret, never the other way round.
struct Link {
    number: u64,
    secret: [u8; KEY_SIZE],
    key: LessSafeKey,
}

impl Link {
    fn new(number: u64, secret: [u8; KEY_SIZE]) -> Link {
        let key = derive(&secret, b"rmap key");
        let key = UnboundKey::new(&AES_256_GCM, &key).expect("32 bytes");
        Link { number, secret, key: LessSafeKey::new(key) }
    }

    fn next(&self) -> Link {
        Link::new(self.number + 1, derive(&self.secret, b"rmap next"))
    }
}

fn derive(secret: &[u8; KEY_SIZE], label: &[u8]) -> [u8; KEY_SIZE] {
    let mut derived = [0; KEY_SIZE];
    derived.copy_from_slice(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), label).as_ref());
    derived
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// An established session, seen from one side.
pub struct Session {
    /// What the peer calls the session.
    remote: u32,
    send: Link,
    counter: u64,
    rekey_every: u64,
    receive: Link,
    /// For datagrams that were overtaken by a new key.
    receive_last: Option<Link>,
    window: ReplayWindow,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({:08x}, {} sent)", self.remote, self.counter)
    }
}

impl Session {
    pub fn client(secrets: &Secrets, remote: u32) -> Session {
        Session::new(secrets.to_server, secrets.to_client, remote)
    }

    pub fn server(secrets: &Secrets, remote: u32) -> Session {
        Session::new(secrets.to_client, secrets.to_server, remote)
    }

    fn new(send: [u8; KEY_SIZE], receive: [u8; KEY_SIZE], remote: u32) -> Session {
        Session {
            remote,
            send: Link::new(0, send),
            counter: 0,
            rekey_every: REKEY_DATAGRAMS,
            receive: Link::new(0, receive),
            receive_last: None,
            window: ReplayWindow::default(),
        }
    }

    /// Keys change this often instead, so that a simulation sees it happen.
    pub fn rekey_every(&mut self, datagrams: u64) {
        self.rekey_every = datagrams.max(1);
    }

    /// Whether it is time for a new handshake.
    pub fn is_worn_out(&self) -> bool {
        self.counter >= COUNTER_MAX
    }

    /// Appends a message with its whole payload to `out`, encrypted, in datagrams of at most `cut` bytes. Gives the length
    /// of each.
    pub fn seal(&mut self, message: &Message, payload: &[u8], cut: usize, out: &mut Vec<u8>) -> usize {
        let start = out.len();
        let segment = Session::lay_out(message, payload, cut, out);
        self.encrypt(&mut out[start..], segment);
        segment
    }

    /// The first half of [`Session::seal`], which needs the payload: appends the datagrams, with room for heads and tags. What
    /// may be touched by one thread at a time is not needed for the second, which takes longer.
    pub fn lay_out(message: &Message, payload: &[u8], cut: usize, out: &mut Vec<u8>) -> usize {
        let count = Fragment::count_for(payload.len(), cut);
        let segment = OVERHEAD + Fragment { index: 0, count }.length(payload.len());
        for index in 0..count {
            let fragment = Fragment { index, count };
            let end = out.len() + segment;
            out.resize(out.len() + HEADER_SIZE, 0);
            out.extend_from_slice(&message.encode(fragment));
            out.extend_from_slice(&payload[fragment.range(payload.len())]);
            out.resize(end, 0);
        }
        segment
    }

    /// The second half of [`Session::seal`]: datagrams of `segment` bytes each, as they were laid out.
    ///
    /// # Panics
    /// If the counter ran out: the owner looks at [`Session::is_worn_out`].
    pub fn encrypt(&mut self, datagrams: &mut [u8], segment: usize) {
        datagrams.chunks_exact_mut(segment).for_each(|datagram| self.encrypt_one(datagram));
    }

    fn encrypt_one(&mut self, datagram: &mut [u8]) {
        assert!(self.counter < 2 * COUNTER_MAX, "no nonce is used twice");
        if self.counter / self.rekey_every > self.send.number {
            self.send = self.send.next();
        }
        let epoch = (self.send.number & 0xff) as u8;
        let head = Head::Data { version: PROTOCOL_VERSION, epoch, receiver: self.remote, counter: self.counter };
        let head = head.encode();
        let (body, tag) = datagram.split_at_mut(datagram.len() - TAG_SIZE);
        let (room, body) = body.split_at_mut(HEADER_SIZE);
        room.copy_from_slice(&head);
        let sealed = self.send.key.seal_in_place_separate_tag(nonce(self.counter), Aad::from(head), body);
        tag.copy_from_slice(sealed.expect("a datagram is not too long").as_ref());
        self.counter += 1;
    }

    /// Opens a data datagram in place and gives the fragment in it. Only an authentic one changes anything.
    ///
    /// # Errors
    /// It is not authentic, or was seen before.
    pub fn open<'a>(&mut self, epoch: u8, counter: u64, datagram: &'a mut [u8]) -> Result<&'a [u8], Rejected> {
        if !self.window.admits(counter) {
            return Err(Rejected::Replayed);
        }
        let (head, body) = datagram.split_at_mut(HEADER_SIZE);
        if body.len() < message::HEADER_SIZE + TAG_SIZE {
            return Err(Rejected::NotAuthentic);
        }
        let aad = Aad::from(&*head);
        let fits = |link: &Link| (link.number & 0xff) as u8 == epoch;
        let ahead = ((self.receive.number + 1) & 0xff) as u8 == epoch;
        let mut next = None;
        let key = match &self.receive_last {
            _ if fits(&self.receive) => &self.receive.key,
            Some(last) if fits(last) => &last.key,
            _ if ahead => &next.insert(self.receive.next()).key,
            _ => return Err(Rejected::NotAuthentic),
        };
        let opened = key.open_in_place(nonce(counter), aad, body).map_err(|_| Rejected::NotAuthentic)?;
        if let Some(next) = next {
            self.receive_last = Some(std::mem::replace(&mut self.receive, next));
        }
        self.window.mark(counter);
        Ok(opened)
    }
}
