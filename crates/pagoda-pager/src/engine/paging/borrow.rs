//! Chunks that the VM borrows: found when it is armed, protected, and moved to the RAM file one after the other.
//!
//! A move is one order to the shim's agent. While it is under way nobody can write to the chunk, so what was copied stays true.
//! Whether it was done is seen in what the VMM maps; its answer only says when to look.

use std::time::{Duration, Instant};

use pagoda_abi::attach::Packet;
use pagoda_core::fault::{Event, OpId, Pages};
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx};
use pagoda_sys::Errno;
use pagoda_sys::uffd::{Fault, Resolved};

use super::Paging;
use super::borrowed::Move;
use crate::engine::broken::Broken;
use crate::engine::parts::EngineError;
use crate::loan::{Places, page};
use crate::recover::Found;
use crate::space::Shard;

/// How long a move may take that a daemon before this one has ordered: it waits for nothing but for messages to be read.
const MOVE_MAX: Duration = Duration::from_secs(10);
/// The pause between two looks whether the move is done.
const MOVE_PAUSE: Duration = Duration::from_micros(200);

impl Paging {
    /// Sees to it that no move is under way that an earlier daemon has ordered, nor ever begins.
    pub fn settle_moves(&self) -> Result<(), EngineError> {
        if self.borrow.is_none() {
            return Ok(());
        }
        let deadline = Instant::now() + MOVE_MAX;
        while !self.shared.take_back_move() {
            if Instant::now() > deadline {
                let why = "the VMM does not finish to move a part of its memory";
                return Err(EngineError::Loan(std::io::Error::other(why)));
            }
            // Faults among them are asked for again: all are woken when it is known where pages are.
            let mut faults = [Fault::default(); pagoda_sys::uffd::FAULTS_PER_READ];
            for shard in self.space.shards() {
                while shard.uffd.read(&mut faults).is_ok_and(|count| count > 0) {}
            }
            std::thread::sleep(MOVE_PAUSE);
        }
        Ok(())
    }

    /// Who moves a part of the VM's memory waits until its message is read, and meanwhile the kernel does nothing else with that
    /// userfaultfd. The faults that come with it are kept.
    pub fn hear(&self) {
        if self.borrow.is_none() {
            return;
        }
        let mut faults = [Fault::default(); pagoda_sys::uffd::FAULTS_PER_READ];
        for shard in self.space.shards() {
            while let Ok(count @ 1..) = shard.uffd.read(&mut faults) {
                self.heard.borrow_mut().extend(&faults[..count]);
            }
        }
    }

    /// A fault that was read so, if there is one.
    pub fn next_heard(&self) -> Option<Fault> {
        self.heard.borrow_mut().pop_front()
    }

    /// Whether [`Self::next_heard`] has a fault to give.
    pub fn has_heard(&self) -> bool {
        !self.heard.borrow().is_empty()
    }

    /// What the VMM maps where.
    pub fn places(&self) -> Result<Places, EngineError> {
        let Some(borrow) = &self.borrow else { return Ok(Places::default()) };
        borrow.loan.places(&self.space).map_err(EngineError::Loan)
    }

    /// Takes out of the RAM file what an earlier daemon has copied into it of chunks that are borrowed still.
    pub fn drop_copies(&self, places: &Places) -> Result<(), EngineError> {
        for chunk in &places.borrowed {
            let location = self.space.locate_chunk(*chunk);
            let punched = location.region.ram.punch(location.offset, location.len);
            let data = punched.and_then(|()| location.region.ram.next_data(location.offset));
            match data {
                Ok(at) if at.is_none_or(|at| at >= location.offset + location.len) => {}
                Ok(_) => return Err(EngineError::Loan(std::io::Error::other("a copied page is held by a pin"))),
                Err(errno) => return Err(EngineError::Loan(errno.into())),
            }
        }
        Ok(())
    }

    /// Registers a part of the VM's memory, and of what will be moved into it: each by how it is mapped.
    pub fn register(&self, shard: &Shard, places: &Places) -> Result<(), Errno> {
        let mut at = shard.addr;
        let addrs = places.borrowed.iter().map(|chunk| self.space.locate_chunk(*chunk).addr);
        // Chunks next to one another may be of two userfaultfds.
        for (addr, len) in runs_of(addrs.filter(|addr| shard.covers(*addr))) {
            if at < addr {
                shard.uffd.register(at, addr - at)?;
            }
            shard.uffd.register_private(addr, len)?;
            at = addr + len;
        }
        if at < shard.addr + shard.len {
            shard.uffd.register(at, shard.addr + shard.len - at)?;
        }
        self.register_spare(shard, places)
    }

    /// The pieces have to be of the userfaultfd of the place that they will be moved to.
    fn register_spare(&self, shard: &Shard, places: &Places) -> Result<(), Errno> {
        let Some(borrow) = &self.borrow else { return Ok(()) };
        for chunk in &places.borrowed {
            let location = self.space.locate_chunk(*chunk);
            if !shard.covers(location.addr) {
                continue;
            }
            let spare = borrow.loan.spare_of(&self.space, *chunk, places).ok_or(Errno::NXIO)?;
            shard.uffd.register(spare, CHUNK_SIZE)?;
        }
        Ok(())
    }

    /// From now on every write to what is borrowed is seen.
    pub fn protect_borrowed(&self, places: &Places) -> Result<(), EngineError> {
        for chunk in &places.borrowed {
            let location = self.space.locate_chunk(*chunk);
            let protected = self.space.uffd(location.addr).protect(location.addr, location.len);
            protected.map_err(|errno| EngineError::Loan(errno.into()))?;
        }
        Ok(())
    }

    /// Which chunks are borrowed, and which pages of them were written. Behind [`Paging::protect_borrowed`]: a page that an
    /// earlier daemon let be written may have been written just before that.
    pub fn find_private(&self, places: &Places, found: &mut Found) -> Result<(), EngineError> {
        let Some(borrow) = &self.borrow else { return Ok(()) };
        for chunk in &places.borrowed {
            let private = borrow.loan.private(&self.space, *chunk).map_err(EngineError::Loan)?;
            let located = &mut found[chunk.as_usize()];
            (located.borrowed, located.private) = (true, private);
        }
        Ok(())
    }

    /// Executes `Fence`: protects a borrowed chunk, then moves the clock on.
    pub fn fence(&mut self, op: OpId, chunk: ChunkIdx) {
        let location = self.space.locate_chunk(chunk);
        let uffd = self.space.uffd(location.addr);
        let protected = self.retry(|| Resolved::of(uffd.protect(location.addr, location.len)));
        // The clock moves on behind the protection, as behind a zap.
        let epoch = protected.is_all().then(|| self.shared.advance());
        if epoch.is_none() {
            tracing::debug!(vm = %self.vm, ?protected, "what is borrowed could not be write-protected");
        }
        self.push_correction(Event::Fenced { op, epoch });
    }

    /// Executes `Own`, when its turn comes: see [`Paging::next_move`].
    pub fn begin_own(&mut self, op: OpId, chunk: ChunkIdx) {
        if let Some(borrow) = &mut self.borrow {
            borrow.waiting.push_back((op, chunk));
        }
    }

    /// Copies what differs of the chunk whose turn it is, and says what the agent has to be told.
    pub fn next_move(&mut self) -> Result<Option<Packet>, Broken> {
        let (op, chunk, kept, content) = loop {
            let Some(borrow) = self.borrow.as_mut().filter(|borrow| borrow.moving.is_none()) else { return Ok(None) };
            let Some((op, chunk)) = borrow.waiting.pop_front() else { return Ok(None) };
            match borrow.loan.read(&self.space, chunk) {
                Ok((kept, content)) => break (op, chunk, kept, content),
                Err(error) => {
                    // Its pidfd says whether the VMM has ended; else it is tried again.
                    tracing::warn!(vm = %self.vm, "read what is borrowed: {error}");
                    self.push(Event::OwnDone { op, kept: None });
                }
            }
        };
        let location = self.space.locate_chunk(chunk);
        let data = location.region.ram.next_data(location.offset).map_err(|errno| format!("look at RAM: {errno}"))?;
        if data.is_some_and(|at| at < location.offset + location.len) {
            return Err("the RAM file has pages of a chunk that is borrowed".into());
        }
        let first = location.pages().start;
        for index in kept.iter() {
            location.region.small.write_page(first + u64::from(index), page(content, index));
        }
        let order = self.shared.order_move();
        if let Some(borrow) = &mut self.borrow {
            borrow.moving = Some(Move { op, chunk, kept, order });
        }
        Ok(Some(self.move_packet(chunk, order)))
    }

    fn move_packet(&self, chunk: ChunkIdx, order: u64) -> Packet {
        let location = self.space.locate_chunk(chunk);
        let region = self.space.regions().position(|(_, region)| region.addr == location.region.addr).unwrap_or(0);
        Packet::Own { order, region: region as u32, offset: location.offset, len: location.len }
    }

    /// The agent's connection is a new one, so that the answer to a move may be lost: the move has been done, is asked for
    /// anew, or is being done, which [`Paging::finish_move`] hears of.
    pub fn repeat_move(&mut self) -> Result<Option<Packet>, Broken> {
        let Some(moving) = self.borrow.as_ref().and_then(|borrow| borrow.moving) else { return Ok(None) };
        if !self.shared.take_back_move() {
            return Ok(None);
        }
        if self.finish_move(moving.order)? {
            return Ok(None);
        }
        let order = self.shared.order_move();
        if let Some(moving) = self.borrow.as_mut().and_then(|borrow| borrow.moving.as_mut()) {
            moving.order = order;
        }
        Ok(Some(self.move_packet(moving.chunk, order)))
    }

    /// Whether the VM has a template, of which it may borrow.
    pub fn may_borrow(&self) -> bool {
        self.borrow.is_some()
    }

    /// This is the order of the move under way, and of none before it.
    pub fn is_moving(&self, order: u64) -> bool {
        self.borrow.as_ref().and_then(|borrow| borrow.moving).is_some_and(|moving| moving.order == order)
    }

    /// Looks whether this move has been done. True: it was, and the machine hears of it next.
    pub fn finish_move(&mut self, order: u64) -> Result<bool, Broken> {
        let Some(borrow) = &mut self.borrow else { return Ok(false) };
        let Some(moving) = borrow.moving.filter(|moving| moving.order == order) else { return Ok(false) };
        match borrow.loan.is_borrowed(&self.space, moving.chunk) {
            Ok(true) => Ok(false),
            Ok(false) => {
                borrow.moving = None;
                self.push_first(Event::OwnDone { op: moving.op, kept: Some(moving.kept) });
                Ok(true)
            }
            // The VMM is gone, and its pidfd tells that.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => {
                Err(format!("a part of its memory was to be moved, and is not where it should be: {error}").into())
            }
        }
    }

    /// This move could not be done, and was not: what was copied for it leaves the RAM file.
    pub fn give_up_move(&mut self, order: u64) -> Result<(), Broken> {
        let Some(borrow) = &mut self.borrow else { return Ok(()) };
        let Some(moving) = borrow.moving.take_if(|moving| moving.order == order) else { return Ok(()) };
        let pages = Pages { chunk: moving.chunk, run: pagoda_core::bits::Run { start: 0, len: 256 } };
        self.ram_punch(pages)?;
        self.push(Event::OwnDone { op: moving.op, kept: None });
        Ok(())
    }
}

/// Chunks next to one another as ranges of addresses.
fn runs_of(addrs: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for addr in addrs {
        match runs.last_mut() {
            Some((start, len)) if *start + *len == addr => *len += CHUNK_SIZE,
            _ => runs.push((addr, CHUNK_SIZE)),
        }
    }
    runs
}
