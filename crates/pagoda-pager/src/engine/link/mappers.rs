//! The connections to mappers, and zaps that the VMM has done and mappers have still to do.
//!
//! A zap is done in the VMM first, then in every mapper that may have entries; it is answered when all have. A mapper that is not
//! connected is waited for: it may have entries that nobody can remove. One that has ended has none.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_abi::attach::{Packet, Ranges};
use pagoda_sys::ring::{Ring, RingError};
use pagoda_sys::socket::{Connection, Received};

use super::agent::Asked;
use crate::mapper::NewMapper;
use crate::source::Source;

/// The pause between two attempts to reach a mapper.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// So long one is waited for in any case.
const GREET_MIN: Duration = Duration::from_millis(10);
/// How long one may take to say what it maps to a new daemon.
pub const GREET_MAX: Duration = Duration::from_secs(10);

struct Link {
    slot: usize,
    pid: u32,
    pidfd: OwnedFd,
    socket: PathBuf,
    connection: Option<Connection>,
    /// Counts connections: what an earlier one still brings is not read.
    generation: u32,
    /// It has said on this connection what it maps, and was welcomed.
    is_greeted: bool,
    next_try: Instant,
    clock_asked: bool,
    /// The process that maps RAM: its id, as it says, and its pidfd. It is the mapper itself or a child of it.
    worker: Option<Worker>,
    /// The mapper itself has ended.
    is_over: bool,
}

/// A process that maps RAM.
struct Worker {
    /// Its id as the process says it; `start` is the start time of this process.
    pid: u32,
    start: u64,
    pidfd: OwnedFd,
}

/// A zap that the VMM has done.
#[derive(Debug)]
pub struct Zapped {
    pub asked: Asked,
    pub done: bool,
    /// The clock's value behind it.
    pub epoch: u64,
}

/// The one under way in mappers.
struct Current {
    zapped: Zapped,
    /// Answers to earlier numbers are none of this one.
    first_seq: u64,
    /// Answers that are missing, by mapper.
    left: Vec<(usize, usize)>,
}

/// The mappers of one VM, and the zap that they are doing.
pub struct MapperLinks {
    /// The VM's name, for messages.
    vm: Arc<str>,
    links: Vec<Link>,
    seq: u64,
    current: Option<Current>,
    queue: VecDeque<Zapped>,
}

impl MapperLinks {
    pub fn new(vm: Arc<str>) -> MapperLinks {
        MapperLinks { vm, links: Vec::new(), seq: 0, current: None, queue: VecDeque::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// The slots of all mappers that are known.
    pub fn slots(&self) -> Vec<usize> {
        self.links.iter().map(|link| link.slot).collect()
    }

    fn find(&mut self, slot: usize) -> Option<&mut Link> {
        self.links.iter_mut().find(|link| link.slot == slot)
    }

    /// Takes in a mapper, which is watched from now on.
    ///
    /// # Errors
    /// Of the ring.
    pub fn add(&mut self, ring: &mut Ring, new: NewMapper) -> Result<(), RingError> {
        let NewMapper { slot, pid, pidfd, socket, .. } = new;
        self.links.retain(|link| link.slot != slot);
        ring.poll_multishot(pidfd.as_fd(), Source::MapperExit(slot as u32).key())?;
        let next_try = Instant::now();
        let connection = None;
        self.links.push(Link {
            slot,
            pid,
            pidfd,
            socket,
            connection,
            generation: 0,
            is_greeted: false,
            next_try,
            clock_asked: false,
            worker: None,
            is_over: false,
        });
        Ok(())
    }

    /// A process says what it maps. False: the one before has not ended, and has entries.
    ///
    /// # Errors
    /// Of the ring.
    pub fn meet_worker(&mut self, ring: &mut Ring, slot: usize, pid: u32, pidfd: OwnedFd) -> Result<bool, RingError> {
        let Some(link) = self.find(slot) else { return Ok(false) };
        if let Some(known) = &link.worker {
            return Ok(known.pid == pid);
        }
        // By it the next daemon knows whether it runs still.
        let Ok(start) = pagoda_sys::process::start_time(pid) else { return Ok(false) };
        ring.poll_multishot(pidfd.as_fd(), Source::WorkerExit(slot as u32).key())?;
        link.worker = Some(Worker { pid, start, pidfd });
        Ok(true)
    }

    /// Whether the process that maps RAM has ended. It has no entries then, and another may come.
    pub fn worker_ended(&mut self, ring: &mut Ring, slot: usize) -> bool {
        let Some(link) = self.find(slot) else { return false };
        if !link.worker.as_ref().is_some_and(|worker| pagoda_sys::process::has_ended(worker.pidfd.as_fd())) {
            return false;
        }
        link.worker = None;
        let _ = ring.cancel_poll(Source::WorkerExit(slot as u32).key());
        self.disconnect(ring, slot);
        // The next process finds a connection waiting: the socket outlives the one that has ended.
        if let Some(link) = self.find(slot) {
            link.next_try = Instant::now();
        }
        true
    }

    /// The process that maps RAM: its id and start.
    pub fn worker(&self, slot: usize) -> Option<(u32, u64)> {
        let worker = self.links.iter().find(|link| link.slot == slot)?.worker.as_ref()?;
        Some((worker.pid, worker.start))
    }

    /// Waits for the end of the process that maps RAM again, if the poll is over.
    pub fn poll_worker(&mut self, ring: &mut Ring, slot: usize) -> Result<(), RingError> {
        let Some(worker) = self.find(slot).and_then(|link| link.worker.as_ref()) else { return Ok(()) };
        ring.poll_multishot(worker.pidfd.as_fd(), Source::WorkerExit(slot as u32).key())
    }

    /// Its pidfd is readable: whether it has ended, and the process that maps RAM too. It is forgotten then.
    pub fn has_ended(&mut self, ring: &mut Ring, slot: usize) -> bool {
        let Some(link) = self.find(slot) else { return false };
        link.is_over |= pagoda_sys::process::has_ended(link.pidfd.as_fd());
        if !link.is_over || link.worker.is_some() {
            return false;
        }
        let (pid, generation) = (link.pid, link.generation);
        if link.connection.is_some() {
            let _ = ring.cancel_poll(source(slot, generation).key());
        }
        let _ = std::fs::remove_file(&link.socket);
        self.links.retain(|link| link.slot != slot);
        tracing::info!(vm = %self.vm, pid, "a process that mapped its memory has ended");
        true
    }

    /// The VM has ended: no daemon connects to its mappers any more.
    pub fn remove_sockets(&self) {
        for link in &self.links {
            let _ = std::fs::remove_file(&link.socket);
        }
    }

    /// Waits for its end again, if the poll is over.
    pub fn poll_exit(&mut self, ring: &mut Ring, slot: usize) -> Result<(), RingError> {
        let Some(link) = self.find(slot) else { return Ok(()) };
        ring.poll_multishot(link.pidfd.as_fd(), Source::MapperExit(slot as u32).key())
    }

    /// Connects to those that are not connected, if it is time.
    pub fn connect(&mut self, ring: &mut Ring) {
        let now = Instant::now();
        for link in self.links.iter_mut().filter(|link| link.connection.is_none() && now >= link.next_try) {
            link.next_try = now + RETRY_PAUSE;
            let connected = Connection::connect_at_once(&link.socket);
            let polled = connected.map_err(|error| error.to_string()).and_then(|connection| {
                link.generation = (link.generation + 1) & GENERATION_MASK;
                let key = source(link.slot, link.generation).key();
                ring.poll_multishot(connection.as_fd(), key).map_err(|error| error.to_string())?;
                Ok(connection)
            });
            match polled {
                Ok(connection) => link.connection = Some(connection),
                Err(error) => tracing::debug!(vm = %self.vm, pid = link.pid, "mapper: {error}"),
            }
        }
    }

    /// Connects to one and waits for what it says first. For a daemon that takes a VM over: nothing of it is done before.
    ///
    /// # Errors
    /// It does not answer.
    pub fn greet(&mut self, ring: &mut Ring, slot: usize, deadline: Instant) -> Result<(Packet, Vec<OwnedFd>), String> {
        let Some(link) = self.find(slot) else { return Err("it is not known".into()) };
        let connection = Connection::connect_at_once(&link.socket).map_err(|error| error.to_string())?;
        let wait = deadline.saturating_duration_since(Instant::now()).max(GREET_MIN);
        let wait = connection.set_nonblocking(false).and_then(|()| connection.set_patience(Some(wait)));
        wait.map_err(|error| error.to_string())?;
        let received = connection.recv().map_err(|error| error.to_string())?;
        let Received::Message { packet, fds } = received else {
            return Err(format!("process {} does not say what it maps", link.pid));
        };
        connection.set_nonblocking(true).map_err(|error| error.to_string())?;
        link.generation = (link.generation + 1) & GENERATION_MASK;
        let polled = ring.poll_multishot(connection.as_fd(), source(slot, link.generation).key());
        polled.map_err(|error| error.to_string())?;
        link.connection = Some(connection);
        Ok((packet, fds))
    }

    /// The next packet of this connection. `None`: there is none now, or the connection is not there any more.
    pub fn receive(&mut self, ring: &mut Ring, slot: usize, generation: u32) -> Option<(Packet, Vec<OwnedFd>)> {
        let vm = Arc::clone(&self.vm);
        let link = self.find(slot).filter(|link| link.generation == generation)?;
        match link.connection.as_ref()?.try_recv() {
            Ok(Received::Message { packet, fds }) => return Some((packet, fds)),
            Ok(Received::Nothing) => return None,
            Ok(Received::Closed) => tracing::debug!(%vm, pid = link.pid, "a mapper's connection ended"),
            Err(error) => tracing::warn!(%vm, pid = link.pid, "mapper: {error}"),
        }
        self.disconnect(ring, slot);
        None
    }

    /// Waits for more packets of this connection, if it is still the mapper's.
    pub fn poll_again(&mut self, ring: &mut Ring, slot: usize, generation: u32) {
        let Some(link) = self.find(slot).filter(|link| link.generation == generation) else { return };
        let Some(connection) = &link.connection else { return };
        if ring.poll_multishot(connection.as_fd(), source(slot, generation).key()).is_err() {
            self.disconnect(ring, slot);
        }
    }

    /// Gives a connection up; another is made soon.
    pub fn disconnect(&mut self, ring: &mut Ring, slot: usize) {
        let Some(link) = self.find(slot) else { return };
        if link.connection.take().is_some() {
            let _ = ring.cancel_poll(source(slot, link.generation).key());
        }
        (link.is_greeted, link.clock_asked) = (false, false);
        link.next_try = Instant::now() + RETRY_PAUSE;
    }

    /// It was welcomed: zaps may be sent to it.
    pub fn note_greeted(&mut self, slot: usize) {
        // A connection that did not take the welcome is gone.
        if let Some(link) = self.find(slot).filter(|link| link.connection.is_some()) {
            link.is_greeted = true;
        }
    }

    pub fn is_greeted(&self, slot: usize) -> bool {
        self.links.iter().any(|link| link.slot == slot && link.is_greeted)
    }

    /// Sends a packet. A connection that does not take it is given up.
    pub fn send(&mut self, ring: &mut Ring, slot: usize, packet: &Packet) {
        let Some(connection) = self.find(slot).and_then(|link| link.connection.as_ref()) else { return };
        if let Err(error) = connection.send(packet, &[]) {
            tracing::debug!(vm = %self.vm, "mapper: {error}");
            self.disconnect(ring, slot);
        }
    }

    /// Has mappers look which direct I/O of theirs has completed.
    pub fn ask_clock(&mut self, ring: &mut Ring) {
        for slot in self.slots() {
            let link = self.find(slot).filter(|link| link.is_greeted && !link.clock_asked);
            if let Some(link) = link {
                link.clock_asked = true;
                self.seq += 1;
                let seq = self.seq;
                self.send(ring, slot, &Packet::Clock { seq });
            }
        }
    }

    /// A mapper has looked which of its direct I/O has ended.
    pub fn complete_clock(&mut self, slot: usize) {
        if let Some(link) = self.find(slot) {
            link.clock_asked = false;
        }
    }

    /// The VMM has done a zap: mappers are next.
    pub fn queue(&mut self, zapped: Zapped) {
        self.queue.push_back(zapped);
    }

    /// The next zap for mappers, if none is under way. [`MapperLinks::begin`] follows.
    pub fn next(&mut self) -> Option<Zapped> {
        if self.current.is_some() { None } else { self.queue.pop_front() }
    }

    /// The one under way, to be begun anew: a mapper came or went.
    pub fn restart(&mut self) {
        if let Some(current) = self.current.take() {
            self.queue.push_front(current.zapped);
        }
    }

    /// Begins it: what each mapper is to unmap. Gives it back if nobody has to do anything.
    pub fn begin(&mut self, ring: &mut Ring, zapped: Zapped, packets: Vec<(usize, Vec<Ranges>)>) -> Option<Zapped> {
        let left: Vec<(usize, usize)> = packets.iter().map(|(slot, packets)| (*slot, packets.len())).collect();
        if left.iter().all(|(_, count)| *count == 0) {
            return Some(zapped);
        }
        self.current = Some(Current { zapped, first_seq: self.seq + 1, left });
        for (slot, packets) in packets {
            for ranges in packets {
                self.seq += 1;
                let seq = self.seq;
                self.send(ring, slot, &Packet::Zap { seq, ranges });
            }
        }
        None
    }

    /// A mapper has answered. The zap, if that was the last answer.
    pub fn complete(&mut self, slot: usize, seq: u64, epoch: u64, errno: u32) -> Option<Zapped> {
        let asked = self.seq;
        let current = self.current.as_mut().filter(|current| seq >= current.first_seq && seq <= asked)?;
        let left = current.left.iter_mut().find(|(of, left)| *of == slot && *left > 0)?;
        left.1 -= 1;
        current.zapped.done &= errno == 0;
        current.zapped.epoch = current.zapped.epoch.max(epoch);
        if current.left.iter().any(|(_, left)| *left > 0) {
            return None;
        }
        self.current.take().map(|current| current.zapped)
    }

    /// What page-out waits for, if a mapper is not there.
    pub fn waits(&self) -> Option<String> {
        let is_waiting = self.current.is_some() || !self.queue.is_empty();
        let absent = self.links.iter().find(|link| is_waiting && !link.is_greeted)?;
        Some(format!("process {}, which maps its memory, to answer; until then nothing of it leaves DRAM", absent.pid))
    }
}

/// As many bits of the count as a completion's key carries.
const GENERATION_MASK: u32 = 0x00ff_ffff;

fn source(slot: usize, generation: u32) -> Source {
    Source::Mapper { slot: slot as u8, generation }
}

#[cfg(test)]
mod tests {
    use pagoda_core::fault::OpId;

    use super::*;

    fn zapped(op: u16) -> Zapped {
        Zapped { asked: Asked::Chunks(OpId(op)), done: true, epoch: 5 }
    }

    fn op_of(zapped: Option<Zapped>) -> Option<(u16, bool, u64)> {
        zapped.map(|zapped| match zapped.asked {
            Asked::Chunks(op) => (op.0, zapped.done, zapped.epoch),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_zap_is_done_when_every_mapper_has_answered() {
        let mut ring = Ring::new(8).unwrap();
        let mut links = MapperLinks::new("a".into());
        links.queue(zapped(1));
        links.queue(zapped(2));
        let first = links.next().unwrap();
        let two = vec![(0, vec![Ranges::default()]), (1, vec![Ranges::default()])];
        assert!(links.begin(&mut ring, first, two).is_none());
        assert!(links.next().is_none(), "one at a time");
        assert!(links.complete(0, 1, 9, 0).is_none());
        // Another mapper came: all are asked again, and what was answered before counts no more.
        links.restart();
        let first = links.next().unwrap();
        assert!(links.begin(&mut ring, first, vec![(0, vec![Ranges::default()])]).is_none());
        assert!(links.complete(0, 2, 7, 0).is_none(), "an answer to the question before");
        assert_eq!(op_of(links.complete(0, 3, 8, 0)), Some((1, true, 9)), "no earlier than any answer");
        let second = links.next().unwrap();
        assert!(links.begin(&mut ring, second, vec![(0, vec![Ranges::default(); 2])]).is_none());
        assert!(links.complete(0, 4, 2, 22).is_none());
        assert!(links.complete(1, 5, 2, 0).is_none(), "another mapper's answer");
        assert_eq!(op_of(links.complete(0, 5, 3, 0)), Some((2, false, 5)), "one range could not be unmapped");
        assert_eq!(op_of(links.begin(&mut ring, zapped(3), Vec::new())), Some((3, true, 5)), "nobody maps it");
    }
}
