//! Other servers that may fill a slab here: for a while, one slab each, because its owner said so.
//!
//! The owner names the server's public key. That server begins an ordinary session, so no key is ever handed about and the
//! keys of each session are new; in it, it may write and trim pages of the slabs that it has tickets for, and nothing else.
//! The owner takes the ticket back before it asks what the slab has: a source that lies could store versions that nobody wrote.
//! A ticket counts only for the grant and the generation that it was given for. So what comes late, after the slab was
//! released, granted again or taken over, changes nothing; neither does what comes twice, because versions order it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::store::Store;
use crate::crypto::{KEY_SIZE, PublicKey};
use crate::units::{Generation, SlabNo, SpaceId, Time, Version};
use crate::wire::message::{Message, Status};

/// Slabs that are being filled by others, or were in the last [`TICKET_LIFE`]: 64 GiB of them.
pub const TICKETS_MAX: usize = 1024;
/// A ticket ends after this unless it is given again: 64 MiB take 1.8 s over 30 % of 1 Gbit/s.
pub const TICKET_LIFE: Duration = Duration::from_secs(30);

/// In the place of a server's public key.
const NOBODY: [u8; KEY_SIZE] = [0; KEY_SIZE];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticket {
    /// `None` since its owner took it back: what was asked before that may still come.
    source: Option<PublicKey>,
    generation: Generation,
    grant: Version,
    /// Number of the request.
    id: u64,
    until: Time,
}

#[derive(Debug)]
pub struct Tickets {
    all: HashMap<(SpaceId, SlabNo), Ticket>,
}

impl Tickets {
    pub fn new() -> Tickets {
        Tickets { all: HashMap::with_capacity(TICKETS_MAX) }
    }

    /// Whether a node has any ticket, and so may have a session.
    pub fn has_any(&self, now: Time, node: PublicKey) -> bool {
        self.all.values().any(|ticket| ticket.source == Some(node) && now < ticket.until)
    }

    /// All nodes that have any.
    pub fn sources(&self, now: Time) -> HashSet<PublicKey> {
        self.all.values().filter(|ticket| now < ticket.until).filter_map(|ticket| ticket.source).collect()
    }

    /// One for the same slab takes the place of the one before, unless that was asked for later.
    fn give(&mut self, now: Time, slab: (SpaceId, SlabNo), ticket: Ticket) -> Status {
        if self.all.len() >= TICKETS_MAX {
            self.all.retain(|_, old| now < old.until);
        }
        match self.all.get(&slab) {
            Some(old) if (old.generation, old.grant) == (ticket.generation, ticket.grant) && old.id > ticket.id => {}
            None if self.all.len() >= TICKETS_MAX => return Status::Full,
            _ => drop(self.all.insert(slab, ticket)),
        }
        Status::Ok
    }

    /// The owner of a slab lets another server fill it, which `key` is the public key of; none any more, if that is zeros.
    pub fn ask(
        &mut self,
        now: Time,
        store: &Store,
        slab: SlabNo,
        generation: Generation,
        request: &Message,
        key: &[u8],
    ) -> Status {
        let Ok(key) = <[u8; KEY_SIZE]>::try_from(key) else { return Status::BadRequest };
        match store.grant_of(request.space, slab, generation) {
            Err(status) => status,
            Ok(grant) if grant != request.version => Status::BadRequest,
            Ok(grant) => {
                let (source, until) = (Some(PublicKey(key)).filter(|key| key.0 != NOBODY), now + TICKET_LIFE);
                self.give(now, (request.space, slab), Ticket { source, generation, grant, id: request.id, until })
            }
        }
    }

    /// Why a server that is not a client may not write this; `None` if it may.
    pub fn refusal(
        &self,
        now: Time,
        store: &Store,
        node: PublicKey,
        slab: SlabNo,
        generation: Generation,
        request: &Message,
    ) -> Option<Status> {
        let ticket = self.all.get(&(request.space, slab));
        let Some(ticket) = ticket.filter(|ticket| ticket.source == Some(node) && now < ticket.until) else {
            return Some(Status::Denied);
        };
        match store.grant_of(request.space, slab, generation) {
            Ok(grant) if (ticket.generation, ticket.grant) == (generation, grant) => None,
            Ok(_) => Some(Status::Denied),
            Err(status) => Some(status),
        }
    }
}
