//! Many sessions: of one node, of many, and of servers that came to fill slabs.

use std::time::Duration;

use super::*;
use crate::server::sessions::{OWN_IDLE, SESSION_IDLE, SESSIONS_PER_NODE};
use crate::server::workers::SESSIONS_MAX;

/// A server, its clients, and the clock. Hellos come no faster than a server answers them.
struct Crowd {
    server: Server,
    now: Time,
    sessions: Vec<Session>,
}

impl Crowd {
    fn new(clients: &[Keypair]) -> Crowd {
        let mut server = server();
        server.admit(clients.iter().map(Keypair::public).collect()).unwrap();
        Crowd { server, now: Time(0), sessions: Vec::new() }
    }

    /// Whether a hello of this node is answered with a session.
    fn begins(&mut self, keys: &Keypair) -> bool {
        self.now = self.now + Duration::from_millis(5);
        let session = greet_at(&mut self.server, self.now, &mut hello(keys, [3; KEY_SIZE], SPOKEN));
        let begins = session.is_some();
        self.sessions.extend(session);
        begins
    }

    /// Whether a session is there: a sign of life is asked for.
    fn is_there(&mut self, session: usize) -> bool {
        let mut datagram = Vec::new();
        self.sessions[session].seal(&request(Op::Probe), &[], DATAGRAM_MAX, &mut datagram);
        self.server.on_datagram(self.now, addr(), &mut datagram);
        self.server.poll_transmit(&mut Vec::new()).is_some()
    }

    fn all_are_there(&mut self) -> bool {
        (0..self.sessions.len()).all(|session| self.is_there(session))
    }
}

/// A host has a client for each of its VMs, all of them under its one key.
#[test]
fn sessions_of_one_node_end_none_of_each_other() {
    for count in [17_usize, 100] {
        let mut crowd = Crowd::new(&[client_keys()]);
        for begun in 0..count {
            assert!(crowd.begins(&client_keys()), "{begun} of {count}");
            // As clients do every second.
            assert!(!begun.is_multiple_of(10) || crowd.all_are_there(), "{begun} of {count}");
        }
        crowd.now = crowd.now + Duration::from_secs(1);
        assert!(crowd.all_are_there(), "{count}");
        assert_eq!((crowd.server.sessions.count(), crowd.server.stats().throttled), (count, 0));
    }
}

/// A node has half of the slots, and another one finds one when somebody is silent for long; nobody's session ends who
/// is heard.
#[test]
fn a_full_table_ends_what_is_silent_and_nothing_else() {
    let nodes = [2, 8, 9].map(|byte| Keypair::from_private([byte; KEY_SIZE]));
    let mut crowd = Crowd::new(&nodes);
    for node in &nodes[..2] {
        (0..SESSIONS_PER_NODE).for_each(|begun| assert!(crowd.begins(node), "{begun}"));
        assert!(crowd.all_are_there());
        assert!(!crowd.begins(node), "it has its share");
    }
    assert_eq!(crowd.server.sessions.count(), SESSIONS_MAX);
    assert!(crowd.all_are_there());
    assert!(!crowd.begins(&nodes[2]), "all are heard");
    assert!(crowd.all_are_there());
    // All are heard but one, which the same node may then have another one for.
    let silent = 3;
    crowd.now = crowd.now + OWN_IDLE;
    let others: Vec<usize> = (0..crowd.sessions.len()).filter(|session| *session != silent).collect();
    assert!(others.iter().all(|session| crowd.is_there(*session)));
    assert!(!crowd.begins(&nodes[2]), "it is not silent for long enough");
    assert!(crowd.begins(&nodes[0]));
    assert!(others.iter().all(|session| crowd.is_there(*session)) && !crowd.is_there(silent));
    // Another node waits for longer.
    let silent = SESSIONS_MAX - 3;
    crowd.now = crowd.now + SESSION_IDLE;
    let others: Vec<usize> = others.into_iter().chain([SESSIONS_MAX]).filter(|session| *session != silent).collect();
    assert!(others.iter().all(|session| crowd.is_there(*session)));
    assert!(crowd.begins(&nodes[2]));
    assert!(others.iter().all(|session| crowd.is_there(*session)) && !crowd.is_there(silent));
}

/// Servers that came with a ticket stay for as long as it is needed, and no longer where a client wants their place.
#[test]
fn guests_without_a_ticket_go_for_a_client() {
    let sources = [8, 9].map(|byte| Keypair::from_private([byte; KEY_SIZE]));
    let mut crowd = Crowd::new(&[client_keys()]);
    let (space, generation) = (request(Op::Grant).space, Generation(1));
    for (slab, source) in sources.iter().enumerate() {
        let (slab, grant) = (SlabNo(slab as u32), Version::new(generation, 1 + slab as u64, false));
        assert_eq!(crowd.server.lend(space, slab, generation, grant), Status::Ok);
        let ask = Message { version: grant, ..request(Op::Admit) };
        let State { store, tickets, .. } = &mut *crowd.server.shared.state();
        assert_eq!(tickets.ask(Time(0), store, slab, generation, &ask, &source.public().0), Status::Ok);
    }
    for source in &sources {
        (0..SESSIONS_MAX / 2).for_each(|begun| assert!(crowd.begins(source), "{begun}"));
    }
    assert_eq!(crowd.server.sessions.count(), SESSIONS_MAX);
    assert!(crowd.all_are_there());
    assert!(!crowd.begins(&client_keys()), "their tickets are good");
    // All are heard, and nothing else is wanted of them.
    crowd.now = Time(0) + TICKET_LIFE;
    assert!((1..SESSIONS_MAX).all(|session| crowd.is_there(session)));
    assert!(crowd.begins(&client_keys()));
    assert!(!crowd.is_there(0), "the longest silent");
    assert!((1..SESSIONS_MAX).all(|session| crowd.is_there(session)));
    assert!((0..10).all(|_| crowd.begins(&client_keys())));
}
