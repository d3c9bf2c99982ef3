//! The space with its memory: what the file server and the transmitter's questions share.
//!
//! Locks: the space's first, then that of the memfds or of the notice. No lock is held over a system call on a file's memory;
//! the space knows of each one before it begins and after it ends. Under the space's lock the journal is written: whatever was
//! changed under it is there before anything follows from it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant, SystemTime};

use pagoda_abi::attach::OutboxFigures;
use pagoda_outbox::{HandleId, Ino, Meter, Next, ReaderId, Reclaim, ReclaimKind, Refusal, Space, State, Time};
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom};

use crate::errno::error;
use crate::journal::Journal;
use crate::keeper::line::Line;
use crate::left::{Left, fit};
use crate::locked::{Held, Locked};

/// How long a writer sleeps at most before it looks again.
const WAIT_SLICE: Duration = Duration::from_millis(100);
/// Writers that may wait for room at the same time: fewer than the file server's threads, so that others go on. Measured:
/// with no thread left over, `ls` took 16.5 s.
pub const WAITING_MAX: usize = 56;
/// Memory is given back in pieces of at least this size while there are any, or each page would cost a call.
const RECLAIM_BYTES_MIN: u64 = 1 << 20;

#[derive(Debug)]
pub struct Outbox {
    space: Mutex<Held>,
    /// Notified when there may be room for a writer.
    room: Condvar,
    memory: Mutex<HashMap<Ino, Arc<File>>>,
    /// To the process that keeps files' memory if this one ends.
    line: Option<Line>,
    /// Who is told of what readers may wait for.
    notice: Mutex<Option<Waker>>,
    waiting: Mutex<usize>,
    /// Writes that have waited and have not ended: each keeps its place until then, or later ones could take it.
    places: Mutex<usize>,
    /// How long writes have waited for room, summed over writes, in microseconds.
    blocked_us: AtomicU64,
    /// Writes that got no space.
    refused_writes: AtomicU64,
    meter: Mutex<Meter>,
    began: Instant,
    /// How long a write may wait for room.
    block_max: Duration,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked was in no change of the space: its methods do not panic half-way, or the process has ended.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn now() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Time { seconds: since.as_secs(), nanos: since.subsec_nanos() }
}

/// Memory for a file's bytes. The transmitter gets the same descriptor and must not write by it, though nothing here can open it anew for
/// reading alone: so its position is behind all that a file can have, and system calls that write where the position is fail.
/// Those that write elsewhere, or move the position, are not on the transmitter's list ([`crate::sandbox`]).
///
/// Not sealed by the kernel: F_SEAL_FUTURE_WRITE also forbids to punch holes (mm/shmem.c, shmem_fallocate).
pub fn file_memory() -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create("pagoda-outbox", MemfdFlags::CLOEXEC)?);
    rustix::fs::seek(&file, SeekFrom::Start(i64::MAX as u64))?;
    Ok(file)
}

impl Outbox {
    /// One that ends with its process.
    #[cfg(test)]
    pub fn new(budget: u64, block_max: Duration) -> Outbox {
        Outbox::of(Held { space: Space::new(budget), journal: None }, HashMap::new(), None, block_max)
    }

    /// Goes on where another process has ended, or begins with a space of `budget` bytes.
    ///
    /// # Errors
    /// The journal is not a space's, or memory cannot be made to fit it.
    pub fn take_over(left: Left, budget: u64, block_max: Duration) -> io::Result<Outbox> {
        let (mut journal, restored) = Journal::open(left.journal)?;
        let mut space = restored.unwrap_or_else(|| Space::new(budget));
        let mut memory = HashMap::new();
        let mut kept = left.memory;
        for file in space.file_memory() {
            match kept.remove(&file.ino) {
                Some(bytes) => {
                    fit(&bytes, file)?;
                    memory.insert(file.ino, Arc::new(bytes));
                }
                None if file.size > 0 => space.lose(file.ino, now()),
                None => {}
            }
        }
        for (ino, gone) in kept {
            gone.set_len(0)?;
            left.line.forget(ino)?;
        }
        journal.begin(&mut space);
        let outbox = Outbox::of(Held { space, journal: Some(journal) }, memory, Some(left.line), block_max);
        // Files that nobody has any more.
        outbox.reclaim(0);
        Ok(outbox)
    }

    fn of(held: Held, memory: HashMap<Ino, Arc<File>>, line: Option<Line>, block_max: Duration) -> Outbox {
        Outbox {
            space: Mutex::new(held),
            room: Condvar::new(),
            memory: Mutex::new(memory),
            line,
            notice: Mutex::default(),
            waiting: Mutex::new(0),
            places: Mutex::new(0),
            blocked_us: AtomicU64::new(0),
            refused_writes: AtomicU64::new(0),
            meter: Mutex::default(),
            began: Instant::now(),
            block_max,
        }
    }

    /// Removes files that are too old. Whoever calls that does so from time to time.
    pub fn expire(&self) {
        if self.space().expire(self.began.elapsed(), now()) {
            self.settle();
        }
    }

    pub fn space(&self) -> Locked<'_> {
        Locked::new(lock(&self.space))
    }

    /// Milliseconds since this process took over or began.
    pub fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    pub fn meter(&self) -> Meter {
        *lock(&self.meter)
    }

    pub fn refused_writes(&self) -> u64 {
        self.refused_writes.load(Ordering::Relaxed)
    }

    /// Takes down who waits for what from now on: after each change of it, or times count for the state before.
    pub fn observe(&self) {
        let readers = self.space().busy_readers();
        let waits = *lock(&self.waiting) > 0;
        lock(&self.meter).observe(self.began.elapsed().as_micros() as u64, readers, waits);
    }

    /// Gives the space another size. Below what is used: what was delivered goes ([`Self::give_back_excess`]), and nothing is
    /// written until enough has.
    pub fn resize(&self, budget: u64) {
        self.space().set_budget(budget);
        self.room.notify_all();
    }

    /// Gives back about `most` bytes of what was delivered, but no more than what is used beyond the space. Whether there was
    /// anything.
    pub fn give_back_excess(&self, most: u64) -> bool {
        let excess = self.space().excess();
        self.reclaim(excess.min(most))
    }

    /// The figures that the daemon asks for.
    pub fn figures(&self) -> OutboxFigures {
        let figures = self.space().figures();
        OutboxFigures {
            space: figures.budget,
            used: figures.used,
            disposable: figures.disposable,
            files: figures.nodes.saturating_sub(1),
            readers: figures.readers,
            waiting: *lock(&self.waiting) as u64,
            written: figures.bytes_written,
            acknowledged: figures.bytes_acknowledged,
            refused: figures.refused_changes,
            blocked_us: self.blocked_us.load(Ordering::Relaxed),
        }
    }

    /// The memory of a file, made at its first use.
    fn memory(&self, ino: Ino) -> io::Result<Arc<File>> {
        let mut memory = lock(&self.memory);
        if let Some(file) = memory.get(&ino) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(file_memory()?);
        if let Some(line) = &self.line {
            line.keep(ino, file.as_fd())?;
        }
        memory.insert(ino, Arc::clone(&file));
        Ok(file)
    }

    /// The memory of a file that has bytes. Never made anew: that of a file that went would stay for ever.
    fn existing_memory(&self, ino: Ino) -> Option<Arc<File>> {
        lock(&self.memory).get(&ino).map(Arc::clone)
    }

    /// Writes `length` bytes of a guest, all of them unless there is no room for too long.
    pub fn write(
        &self,
        handle: HandleId,
        ino: Ino,
        offset: u64,
        length: u64,
        again: Again,
        mut incoming: impl Incoming,
    ) -> io::Result<u64> {
        let mut done = match again {
            Again::No => 0,
            Again::Yes { done } => done.min(length),
        };
        incoming.skip(done)?;
        let mut deadline = None;
        let mut place = None;
        while done < length {
            let at = offset.checked_add(done).ok_or_else(|| error(Refusal::TooLarge))?;
            let planned = self.space().plan_write(handle, ino, at, length - done);
            let write = match planned {
                Ok(write) => write,
                Err(Refusal::BelowCursor) if again != Again::No => {
                    match self.is_written(ino, at, length - done, &mut incoming)? {
                        Some(there) => done += there,
                        None if done > 0 => break,
                        None => return Err(error(Refusal::BelowCursor)),
                    }
                    continue;
                }
                Err(refusal @ (Refusal::Full | Refusal::Busy)) => {
                    if refusal == Refusal::Full {
                        incoming.note(Progress::Waits);
                    }
                    let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.block_max);
                    let waited = self.wait_for_room(ino, length - done, deadline, &mut place);
                    if waited == Waited::Again {
                        continue;
                    }
                    self.refused_writes.fetch_add(1, Ordering::Relaxed);
                    if done > 0 {
                        break;
                    }
                    return Err(error(refusal));
                }
                Err(_) if done > 0 => break,
                Err(refusal) => return Err(error(refusal)),
            };
            let wanted = write.range.end - write.range.start;
            let put = self.memory(ino).and_then(|file| {
                let put = incoming.put(&file, write.range.start, wanted as usize);
                let written = put.as_ref().map_or(0, |bytes| *bytes as u64);
                if written < wanted {
                    self.clear_behind(ino, &file, write.range.start + written..write.range.end)?;
                }
                put
            });
            let written = put.as_ref().map_or(0, |bytes| *bytes as u64);
            self.space().complete_write(&write, written, now());
            self.settle();
            match put {
                Ok(_) if written == wanted => done += written,
                Ok(_) => return Ok(done + written),
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
            incoming.note(Progress::Done(done));
        }
        Ok(done)
    }

    /// An earlier process was killed while it carried out a write of `length` bytes at `at`, and what is below the send cursor was sent.
    /// How many of the bytes are below, if they are those that were sent; `None` if they are others, which nobody will ever have.
    fn is_written(&self, ino: Ino, at: u64, length: u64, incoming: &mut impl Incoming) -> io::Result<Option<u64>> {
        let attributes = self.space().attributes(ino).map_err(error)?;
        let below = attributes.cursor.saturating_sub(at).min(length);
        if at < attributes.freed || below == 0 {
            return Err(error(Refusal::Broken));
        }
        let file = self.existing_memory(ino).ok_or_else(|| error(Refusal::NotFound))?;
        let mut there = vec![0; below as usize];
        file.read_exact_at(&mut there, at)?;
        if self.space().attributes(ino).map_err(error)?.freed > at {
            return Err(error(Refusal::Broken));
        }
        Ok((incoming.take(below as usize)? == there).then_some(below))
    }

    /// A write has failed after it may have changed memory behind the file's end, where zeros belong.
    fn clear_behind(&self, ino: Ino, file: &File, range: Range<u64>) -> io::Result<()> {
        let size = self.space().attributes(ino).map_err(error)?.size;
        let behind = range.start.max(size)..range.end;
        if behind.start < behind.end {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(failed) = rustix::fs::fallocate(file, flags, behind.start, behind.end - behind.start) {
                // What is there now is nobody's, and could become part of the file.
                self.space().lose(ino, now());
                return Err(failed.into());
            }
        }
        Ok(())
    }

    /// An earlier process has not answered the request, which is carried out `again`, or the guest gets an error for it.
    pub fn forget_request(&self, request: u64, again: bool) {
        self.space().forget_request(request, again);
        self.settle();
    }

    /// All that an earlier process has left is carried out.
    pub fn let_go(&self) {
        self.space().let_go();
        self.settle();
    }

    fn wait_for_room<'a>(&'a self, ino: Ino, want: u64, deadline: Instant, place: &mut Option<Place<'a>>) -> Waited {
        if self.reclaim(want.max(RECLAIM_BYTES_MIN)) {
            return Waited::Again;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Waited::TooLong;
        }
        if place.is_none() {
            *place = Place::take(&self.places);
        }
        if place.is_none() {
            return Waited::TooLong;
        }
        *lock(&self.waiting) += 1;
        self.observe();
        let began = Instant::now();
        self.space().wait(&self.room, WAIT_SLICE.min(left));
        let waited_us = began.elapsed().as_micros() as u64;
        self.space().job_waited(ino, waited_us);
        self.blocked_us.fetch_add(waited_us, Ordering::Relaxed);
        *lock(&self.waiting) -= 1;
        self.observe();
        Waited::Again
    }

    /// Gives back files that went, and up to about `want` bytes that were delivered. Whether there was anything.
    pub fn reclaim(&self, want: u64) -> bool {
        let plan = self.space().plan_reclaim(want);
        let any = !plan.is_empty();
        for reclaim in plan {
            if self.give_back(&reclaim) {
                self.space().complete_reclaim(reclaim);
            }
        }
        if any {
            self.room.notify_all();
        }
        any
    }

    /// Whether the kernel has the memory again. If not, it stays counted.
    fn give_back(&self, reclaim: &Reclaim) -> bool {
        match &reclaim.kind {
            // A reader's or writer's reference may be left for a moment; nobody can reach its bytes any more.
            ReclaimKind::Drop => {
                let Some(file) = lock(&self.memory).remove(&reclaim.ino) else { return true };
                let is_given_back = file.set_len(0).is_ok();
                // If the keeper does not hear it, it is gone and this process is about to go.
                let _ = self.line.as_ref().map(|line| line.forget(reclaim.ino));
                is_given_back
            }
            ReclaimKind::Punch(range) => {
                let file = self.existing_memory(reclaim.ino);
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let punched =
                    |file: Arc<File>| rustix::fs::fallocate(&*file, flags, range.start, range.end - range.start);
                file.is_none_or(|file| punched(file).is_ok())
            }
        }
    }

    /// After something has changed that others wait for.
    pub fn settle(&self) {
        self.reclaim(0);
        self.observe();
        if let Some(notice) = lock(&self.notice).as_ref() {
            notice.wake_by_ref();
        }
        self.room.notify_all();
    }

    /// From now on this one is woken after each change that readers may wait for.
    pub fn set_notice(&self, notice: Option<Waker>) {
        *lock(&self.notice) = notice;
    }

    /// Gives a file another size.
    pub fn truncate(&self, ino: Ino, size: u64) -> io::Result<()> {
        self.space().plan_resize(ino, size).map_err(error)?;
        let done = self.memory(ino).and_then(|file| file.set_len(size));
        self.space().complete_resize(ino, done.is_ok(), now());
        self.settle();
        done
    }

    /// Bytes for the guest itself. `get` reads a number of bytes from an offset of a file.
    pub fn read(
        &self,
        handle: HandleId,
        ino: Ino,
        offset: u64,
        length: u64,
        get: impl FnOnce(&File, u64, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let length = self.space().check_read(handle, ino, offset, length).map_err(error)?;
        if length == 0 {
            return Ok(0);
        }
        let file = self.existing_memory(ino).ok_or_else(|| error(Refusal::NotFound))?;
        let bytes = get(&file, offset, length as usize)?;
        // What was given back while it was read came as zeros.
        self.space().check_read(handle, ino, offset, length).map_err(error)?;
        Ok(bytes)
    }

    /// The guest has started anew or is gone.
    pub fn abandon(&self) {
        self.space().abandon(now());
        self.settle();
    }

    /// What a reader sends next.
    pub fn next(&self, reader: ReaderId, ino: Ino, max: u64) -> io::Result<Given> {
        let (next, file) = {
            let mut space = self.space();
            (space.next(reader, max).map_err(error)?, space.attributes(ino).map_err(error)?)
        };
        self.observe();
        Ok(match next {
            Next::Bytes { offset, length } => {
                let memory = self.existing_memory(ino).ok_or_else(|| error(Refusal::NotFound))?;
                let is_rest = file.state == State::Open && !file.is_complete && offset + length >= file.size;
                Given::Bytes { memory, offset, length, is_rest }
            }
            Next::Wait => Given::Wait,
            Next::End => Given::End,
            Next::Broken => Given::Broken,
        })
    }

    /// Until something may have changed, or for `most`.
    pub fn wait_change(&self, most: Duration) {
        self.space().wait(&self.room, most);
    }

    /// Nothing that was published waits for a delivery.
    pub fn is_delivered(&self) -> bool {
        self.space().is_drained()
    }

    #[cfg(test)]
    pub fn memory_files(&self) -> Vec<Arc<File>> {
        lock(&self.memory).values().cloned().collect()
    }

    /// What readers have delivered, or that they are gone.
    pub fn deliver(&self, change: impl FnOnce(&mut Space)) {
        let mut space = self.space();
        change(&mut space);
        let excess = space.excess();
        drop(space);
        self.observe();
        self.reclaim(excess);
        self.room.notify_all();
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Waited {
    Again,
    TooLong,
}

/// One of the [`WAITING_MAX`] places of writes that wait for room.
#[derive(Debug)]
struct Place<'a>(&'a Mutex<usize>);

impl<'a> Place<'a> {
    fn take(places: &'a Mutex<usize>) -> Option<Place<'a>> {
        let mut taken = lock(places);
        if *taken >= WAITING_MAX {
            return None;
        }
        *taken += 1;
        Some(Place(places))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *lock(self.0) -= 1;
    }
}

/// Whether a process was killed that carried out the same request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    No,
    Yes {
        /// So many of a write's bytes are known to be in the file.
        done: u64,
    },
}

/// How far a write is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// So many of its bytes are in the file, and will be if the process is killed.
    Done(u64),
    /// There is no room for its next page. An earlier process that carried it out has left nothing in the file: a page that it
    /// began to write has room.
    Waits,
}

/// The bytes of a guest's write, in their order.
pub trait Incoming {
    /// Writes the next `count` bytes to the file at `at`, never more. Gives their number, which is smaller if the request ends before.
    fn put(&mut self, file: &File, at: u64, count: usize) -> io::Result<usize>;

    /// The next `count` bytes, or those that there are.
    fn take(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let copy = File::from(rustix::fs::memfd_create("pagoda-copy", MemfdFlags::CLOEXEC)?);
        let mut bytes = vec![0; self.put(&copy, 0, count)?];
        copy.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    fn skip(&mut self, count: u64) -> io::Result<()> {
        if count > 0 { self.take(count as usize).map(drop) } else { Ok(()) }
    }

    /// Is told how far the write is.
    fn note(&mut self, _progress: Progress) {}
}

impl<F: FnMut(&File, u64, usize) -> io::Result<usize>> Incoming for F {
    fn put(&mut self, file: &File, at: u64, count: usize) -> io::Result<usize> {
        self(file, at, count)
    }
}

#[derive(Debug)]
pub enum Given {
    /// These bytes of a file's memory. They do not change, and stay until the reader is detached.
    Bytes {
        memory: Arc<File>,
        offset: u64,
        length: u64,
        /// There are no more now, and it is not the end.
        is_rest: bool,
    },
    Wait,
    End,
    Broken,
}
