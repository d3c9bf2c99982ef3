//! The connections on which threads of the VMM call the engine and wait for its answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_abi::attach::{FLAG_LENT, ForeignReason, Packet};
use pagoda_sys::ring::Ring;
use pagoda_sys::socket::{Connection, Received, SocketError};

use crate::source::Source;

/// Connections at most: one is enough, two while one is being replaced.
const CALLS_MAX: usize = 4;

/// How long the next call is waited for without sleeping: the VMM asks again within some 10 us while its guest gives
/// pages up.
const LINGER: Duration = Duration::from_micros(50);

/// A connection on which the VMM's threads call.
struct Call {
    id: u32,
    connection: Connection,
    /// What was read last is not answered yet.
    is_under_way: bool,
    /// The token of the discard that is under way, if one is.
    discard: Option<u64>,
    /// It was answered since the connection was read last.
    was_answered: bool,
}

/// What a connection has brought.
#[derive(Debug)]
pub enum Heard {
    /// The guest gives these bytes of a region back.
    Discard { seq: u64, region: u32, offset: u64, len: u64 },
    /// Somebody else is about to reach the VM's memory, and waits until all of it is there for good.
    Foreign { reason: ForeignReason },
    /// There is nothing to read now.
    Nothing,
    /// It is of no use any more: [`Calls::close`] it.
    Closed,
}

/// All connections of the VMM's threads, each with at most one call under way.
pub struct Calls {
    /// The VM's name, for messages.
    vm: Arc<str>,
    calls: Vec<Call>,
    /// Connections made so far, which numbers them.
    made: u32,
    /// Connections that wait until all RAM is there for good.
    pin_waiters: Vec<u32>,
}

impl Calls {
    pub fn new(vm: Arc<str>) -> Calls {
        Calls { vm, calls: Vec::with_capacity(CALLS_MAX), made: 0, pin_waiters: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.calls.len()
    }

    fn find(&mut self, id: u32) -> Option<&mut Call> {
        self.calls.iter_mut().find(|call| call.id == id)
    }

    /// The connection that has to be closed before another one is made.
    pub fn surplus(&self) -> Option<u32> {
        (self.calls.len() == CALLS_MAX).then(|| self.calls[0].id)
    }

    /// Takes a new connection.
    pub fn connect(&mut self, ring: &mut Ring, connection: Connection) {
        self.made += 1;
        let id = self.made;
        match ring.poll_multishot(connection.as_fd(), Source::Calls(id).key()) {
            Ok(()) => self.calls.push(Call { id, connection, is_under_way: false, discard: None, was_answered: false }),
            Err(error) => tracing::warn!(vm = %self.vm, "calls: {error}"),
        }
    }

    /// Reads the next call. While one is under way the next stays in the socket: a VMM that does not wait for answers
    /// waits for room there, and costs the daemon no memory.
    pub fn receive(&mut self, id: u32) -> Heard {
        let Calls { vm, calls, .. } = self;
        let Some(call) = calls.iter_mut().find(|call| call.id == id && !call.is_under_way) else {
            return Heard::Nothing;
        };
        call.was_answered = false;
        match call.connection.try_recv() {
            Ok(Received::Message { packet: Packet::Discard { seq, region, offset, len }, .. }) => {
                Heard::Discard { seq, region, offset, len }
            }
            Ok(Received::Message { packet: Packet::Foreign { reason }, .. }) => Heard::Foreign { reason },
            Ok(Received::Message { packet, .. }) => {
                tracing::warn!(%vm, ?packet, "the VMM called something it cannot");
                Heard::Closed
            }
            Ok(Received::Nothing) => Heard::Nothing,
            Ok(Received::Closed) => Heard::Closed,
            Err(error) => {
                tracing::warn!(%vm, "calls: {error}");
                Heard::Closed
            }
        }
    }

    /// Waits for more calls of a connection. False: it is of no use any more.
    #[must_use]
    pub fn poll_again(&mut self, ring: &mut Ring, id: u32) -> bool {
        let Some(call) = self.find(id) else { return true };
        ring.poll_multishot(call.connection.as_fd(), Source::Calls(id).key()).is_ok()
    }

    /// After a call: whether the next one is there, or comes at once. A guest that inflates its balloon gives up page
    /// by page, and each would cost a wake-up. Ends when anything else is to be done: its completion also says if a
    /// call is left.
    pub fn another_comes(&mut self, ring: &mut Ring, id: u32) -> bool {
        let start = Instant::now();
        loop {
            let Some(call) = self.find(id) else { return false };
            if call.is_under_way || ring.is_due() {
                return false;
            }
            if call.connection.is_readable() {
                return true;
            }
            if start.elapsed() > LINGER {
                return false;
            }
            std::thread::yield_now();
        }
    }

    /// A call that was read is not answered yet.
    pub fn begin(&mut self, id: u32) {
        if let Some(call) = self.find(id) {
            call.is_under_way = true;
        }
    }

    /// The call under way is this discard.
    pub fn begin_discard(&mut self, id: u32, token: u64) {
        if let Some(call) = self.find(id) {
            call.discard = Some(token);
        }
    }

    /// The call under way waits for [`Calls::release_pin_waiters`].
    pub fn wait_for_pin(&mut self, id: u32) {
        self.pin_waiters.push(id);
    }

    /// The token of a discard, from its connection and its number there.
    pub fn token(id: u32, seq: u64) -> u64 {
        u64::from(id) << 32 | (seq & u64::from(u32::MAX))
    }

    /// Answers a discard: its caller goes on.
    pub fn complete_discard(&mut self, ring: &mut Ring, token: u64) {
        let (id, seq) = ((token >> 32) as u32, token & u64::from(u32::MAX));
        if let Err(error) = self.answer(id, &Packet::Discarded { seq }) {
            let expected = matches!(error, SocketError::Closed);
            tracing::debug!(vm = %self.vm, expected, "calls: {error}");
            // Its discard has ended, so there is nothing to abandon.
            self.close(ring, id);
        }
    }

    /// Lets those go on who are about to give others access to RAM: all of it is there, and stays.
    pub fn release_pin_waiters(&mut self) {
        for id in std::mem::take(&mut self.pin_waiters) {
            let _ = self.answer(id, &Packet::Welcome { flags: 0 });
        }
    }

    /// Says whether RAM may be given to the VM's mapper without a pin.
    pub fn answer_lend(&mut self, id: u32, is_known: bool) {
        let _ = self.answer(id, &Packet::Welcome { flags: if is_known { FLAG_LENT } else { 0 } });
    }

    /// Ends a call, and has the next one read ([`Calls::next_answered`]).
    fn answer(&mut self, id: u32, answer: &Packet) -> Result<(), SocketError> {
        let Some(call) = self.find(id) else { return Ok(()) };
        (call.is_under_way, call.discard, call.was_answered) = (false, None, true);
        call.connection.send(answer, &[])
    }

    /// A connection whose call was answered and that was not read since.
    pub fn next_answered(&self) -> Option<u32> {
        self.calls.iter().find(|call| call.was_answered).map(|call| call.id)
    }

    /// The discard that is under way on a connection.
    pub fn discard_of(&self, id: u32) -> Option<u64> {
        self.calls.iter().find(|call| call.id == id)?.discard
    }

    /// Closes a connection. A discard that is under way on it has to be abandoned before.
    pub fn close(&mut self, ring: &mut Ring, id: u32) {
        self.calls.retain(|call| call.id != id);
        self.pin_waiters.retain(|waiter| *waiter != id);
        let _ = ring.cancel_poll(Source::Calls(id).key());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected() -> (Calls, Ring, Connection) {
        let mut ring = Ring::new(8).unwrap();
        let mut calls = Calls::new("a".into());
        let (ours, vmm) = Connection::pair().unwrap();
        calls.connect(&mut ring, ours);
        (calls, ring, vmm)
    }

    /// The VMM's discard `seq` is read, and under way.
    fn begin_discard(calls: &mut Calls, vmm: &Connection, seq: u64) -> u64 {
        vmm.send(&Packet::Discard { seq, region: 0, offset: 0, len: 4096 }, &[]).unwrap();
        assert!(matches!(calls.receive(1), Heard::Discard { seq: read, .. } if read == seq));
        let token = Calls::token(1, seq);
        calls.begin(1);
        calls.begin_discard(1, token);
        token
    }

    #[test]
    fn the_next_call_is_read_when_the_last_has_been_answered() {
        let (mut calls, mut ring, vmm) = connected();
        let token = begin_discard(&mut calls, &vmm, 1);
        vmm.send(&Packet::Foreign { reason: ForeignReason::DmaMapped }, &[]).unwrap();
        assert!(matches!(calls.receive(1), Heard::Nothing));
        assert_eq!((calls.discard_of(1), calls.next_answered()), (Some(token), None));
        calls.complete_discard(&mut ring, token);
        let answer = vmm.recv().unwrap();
        assert!(matches!(answer, Received::Message { packet: Packet::Discarded { seq: 1 }, .. }));
        assert_eq!((calls.discard_of(1), calls.next_answered()), (None, Some(1)));
        assert!(matches!(calls.receive(1), Heard::Foreign { .. }));
        assert_eq!(calls.next_answered(), None);
    }

    #[test]
    fn who_waits_for_a_pin_is_let_go_on_once() {
        let (mut calls, _ring, vmm) = connected();
        calls.begin(1);
        calls.wait_for_pin(1);
        calls.release_pin_waiters();
        calls.release_pin_waiters();
        assert!(matches!(vmm.recv().unwrap(), Received::Message { packet: Packet::Welcome { .. }, .. }));
        assert!(!vmm.is_readable());
    }

    #[test]
    fn a_connection_that_cannot_be_answered_is_closed() {
        let (mut calls, mut ring, vmm) = connected();
        let token = begin_discard(&mut calls, &vmm, 7);
        drop(vmm);
        calls.complete_discard(&mut ring, token);
        assert_eq!((calls.len(), calls.discard_of(1)), (0, None));
        assert!(matches!(calls.receive(1), Heard::Nothing));
        assert!(calls.poll_again(&mut ring, 1));
    }

    #[test]
    fn the_first_connection_makes_room_for_one_too_many() {
        let (mut calls, mut ring, _vmm) = connected();
        let mut ends = Vec::new();
        for _ in 1..CALLS_MAX {
            assert_eq!(calls.surplus(), None);
            let (ours, vmm) = Connection::pair().unwrap();
            calls.connect(&mut ring, ours);
            ends.push(vmm);
        }
        assert_eq!(calls.surplus(), Some(1));
        calls.close(&mut ring, 1);
        assert_eq!(calls.surplus(), None);
    }
}
