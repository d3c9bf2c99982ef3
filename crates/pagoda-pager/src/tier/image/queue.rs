//! What is to be read of an image and what has been read, between the tier and the threads that read. No I/O happens here.

use std::collections::VecDeque;
use std::time::Instant;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{FILLS_MAX, OPS_MAX, OpId};
use pagoda_core::units::{CHUNK_PAGES, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::swapfile::DirectBuffer;

use crate::tier::Target;

/// Pages of one job: 256 KiB, so that what a fault waits for is never behind more than that, and two threads share a chunk.
pub const JOB_PAGES: u16 = 64;
/// Bytes of a buffer.
pub const BUFFER_BYTES: usize = JOB_PAGES as usize * PAGE_SIZE as usize;
/// Threads that there are at least: one can take a fault while the other reads ahead.
pub const WORKERS: usize = 2;
/// And at most: a disk that answers in 100 us gives 80,000 pages a second to so many.
pub const WORKERS_MAX: usize = 8;
/// So many of them read ahead at a time: a fault that comes then finds another thread free.
const AHEAD_MAX: usize = WORKERS_MAX / 2;
/// Each thread can have a buffer. What has been read and not been taken in takes one too, so that no more is read than the engine
/// bears.
const BUFFERS_MAX: usize = WORKERS_MAX;
/// Jobs that wait: every operation of the machine's is one job, but for those that are of a chunk.
const JOBS_MAX: usize = OPS_MAX + FILLS_MAX * (CHUNK_PAGES / JOB_PAGES as u64) as usize;
/// Every so many jobs one is read ahead, even if faults wait: a fault may have joined it since.
const AHEAD_EVERY: u32 = 16;

/// Who wants the pages of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// An operation of the machine's.
    Op {
        /// The machine's operation that waits for the pages.
        op: OpId,
        /// Where its pages go.
        target: Target,
        /// A fault waits for them.
        demand: bool,
    },
    /// Who waits until it is done, with the number of its question.
    Caller(u64),
}

/// Pages of one chunk that are to be read.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub asker: Asker,
    pub chunk: ChunkIdx,
    /// The pages to read, of which there are at most [`JOB_PAGES`].
    pub pages: PageSet,
    pub asked: Instant,
}

/// Why a page could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub page: PageIdx,
    pub why: String,
}

/// A job that is done.
#[derive(Debug)]
pub struct Done {
    pub job: Job,
    /// The pages, one behind the other.
    pub content: DirectBuffer,
    /// The pages that could not be read.
    pub failed: PageSet,
    /// Why the first of these could not be read.
    pub failure: Option<Failure>,
}

impl Done {
    /// The content of the page that is the `slot`th of the job.
    pub fn page(&self, slot: usize) -> &[u8] {
        &self.content[slot * PAGE_SIZE as usize..(slot + 1) * PAGE_SIZE as usize]
    }
}

/// A thread that reads, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerIdx(pub u8);

#[derive(Clone, Copy, Debug)]
enum Worker {
    Idle,
    Busy(Job),
}

/// Jobs that wait, jobs that are done, and the buffers between them.
#[derive(Debug)]
pub struct Queue {
    demand: VecDeque<Job>,
    ahead: VecDeque<Job>,
    done: VecDeque<Done>,
    buffers: Vec<DirectBuffer>,
    /// Buffers that there are, in `buffers` or elsewhere.
    buffers_made: usize,
    workers: [Option<Worker>; WORKERS_MAX],
    /// Jobs that were taken.
    taken: u32,
    /// The number of the question whose caller waits, its job until a thread takes it, and the answer.
    call: Option<u64>,
    question: Option<Job>,
    answer: Option<Done>,
    is_closed: bool,
}

impl Queue {
    pub fn new() -> Queue {
        Queue {
            demand: VecDeque::with_capacity(JOBS_MAX),
            ahead: VecDeque::with_capacity(JOBS_MAX),
            done: VecDeque::with_capacity(BUFFERS_MAX),
            buffers: Vec::with_capacity(BUFFERS_MAX),
            buffers_made: 0,
            workers: [None; WORKERS_MAX],
            taken: 0,
            call: None,
            question: None,
            answer: None,
            is_closed: false,
        }
    }

    /// Nothing is to be read any more.
    pub fn close(&mut self) {
        self.is_closed = true;
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// So many more jobs can wait: there cannot be more operations.
    pub fn has_room_for(&self, jobs: usize) -> bool {
        self.demand.len().max(self.ahead.len()) + jobs <= JOBS_MAX
    }

    /// Another job, for which there is room.
    pub fn push(&mut self, job: Job) {
        let queue = match job.asker {
            Asker::Op { demand: true, .. } => &mut self.demand,
            Asker::Op { demand: false, .. } => &mut self.ahead,
            Asker::Caller(call) => {
                (self.call, self.question, self.answer) = (Some(call), Some(job), None);
                return;
            }
        };
        queue.push_back(job);
    }

    /// The next job for a thread, with a buffer; one has to be made if it comes without. `None`: there is nothing to do, or no
    /// buffer is free.
    pub fn take(&mut self, worker: WorkerIdx) -> Option<(Job, Option<DirectBuffer>)> {
        // Its caller takes in nothing while it waits, so it must not wait for a buffer.
        if let Some(job) = self.question.take() {
            self.workers[usize::from(worker.0)] = Some(Worker::Busy(job));
            return Some((job, None));
        }
        if self.buffers.is_empty() && self.buffers_made == BUFFERS_MAX {
            return None;
        }
        let is_turn_of_ahead = self.taken % AHEAD_EVERY == AHEAD_EVERY - 1;
        let may_read_ahead = self.reading_ahead() < AHEAD_MAX;
        let (demand, ahead) = (&mut self.demand, &mut self.ahead);
        let job = match () {
            () if !may_read_ahead => demand.pop_front(),
            () if is_turn_of_ahead => ahead.pop_front().or_else(|| demand.pop_front()),
            () => demand.pop_front().or_else(|| ahead.pop_front()),
        }?;
        self.taken = self.taken.wrapping_add(1);
        self.workers[usize::from(worker.0)] = Some(Worker::Busy(job));
        let buffer = self.buffers.pop();
        self.buffers_made += usize::from(buffer.is_none());
        Some((job, buffer))
    }

    /// Threads that read what no fault waits for.
    fn reading_ahead(&self) -> usize {
        let is_ahead =
            |worker: &&Worker| matches!(worker, Worker::Busy(Job { asker: Asker::Op { demand: false, .. }, .. }));
        self.workers.iter().flatten().filter(is_ahead).count()
    }

    /// A thread has done its job.
    pub fn end(&mut self, worker: WorkerIdx, done: Done) {
        self.workers[usize::from(worker.0)] = Some(Worker::Idle);
        match done.job.asker {
            Asker::Op { .. } => self.done.push_back(done),
            Asker::Caller(call) if self.call == Some(call) => self.answer = Some(done),
            // Nobody waits for it any more.
            Asker::Caller(_) => {}
        }
    }

    /// The answer to a question, if it is there.
    pub fn take_answer(&mut self) -> Option<Done> {
        let answer = self.answer.take()?;
        self.call = None;
        Some(answer)
    }

    /// Nobody waits for an answer any more.
    pub fn forget_call(&mut self) {
        (self.call, self.question) = (None, None);
    }

    /// What was done comes behind what is in `into` already.
    pub fn take_done(&mut self, into: &mut VecDeque<Done>) {
        into.append(&mut self.done);
    }

    /// A buffer is free again.
    pub fn give(&mut self, buffer: DirectBuffer) {
        self.buffers.push(buffer);
    }

    /// Another thread is to be made: none of those that there are is free to take the next job. Its number.
    pub fn add_worker(&mut self) -> Option<WorkerIdx> {
        let is_spare = |worker: &Option<Worker>| matches!(worker, Some(Worker::Idle));
        if self.is_closed || (self.workers() >= WORKERS && self.workers.iter().any(is_spare)) {
            return None;
        }
        let free = self.workers.iter().position(Option::is_none)?;
        self.workers[free] = Some(Worker::Idle);
        Some(WorkerIdx(free as u8))
    }

    /// A thread ends, or could not be made.
    pub fn remove_worker(&mut self, worker: WorkerIdx) {
        self.workers[usize::from(worker.0)] = None;
    }

    /// A thread that had nothing to do for a while ends, with a buffer. False: it is one of those that stay.
    pub fn retire(&mut self, worker: WorkerIdx) -> bool {
        let is_idle = self.question.is_none() && self.demand.is_empty() && self.ahead.is_empty();
        // Those that work may wait for a disk that does not answer, and nobody makes a thread for what comes then.
        let others = (0..).map(WorkerIdx).zip(&self.workers).filter(|(other, _)| *other != worker);
        let has_spare = others.into_iter().any(|(_, other)| matches!(other, Some(Worker::Idle)));
        let retires = is_idle && has_spare && self.workers() > WORKERS;
        if retires {
            self.remove_worker(worker);
            self.buffers_made -= usize::from(self.buffers.pop().is_some());
        }
        retires
    }

    /// How many threads there are.
    pub fn workers(&self) -> usize {
        self.workers.iter().flatten().count()
    }

    /// Bytes of all buffers.
    pub fn memory_bytes(&self) -> u64 {
        (self.buffers_made * BUFFER_BYTES) as u64
    }

    /// Pages that were asked for before `deadline` and have not been read, and since when the first is waited for.
    pub fn late(&self, deadline: Instant) -> Option<(u64, Instant)> {
        let running = self.workers.iter().flatten().filter_map(|worker| match worker {
            Worker::Busy(job) => Some(job),
            Worker::Idle => None,
        });
        let waiting = self.question.iter().chain(&self.demand).chain(&self.ahead);
        let late = waiting.chain(running).filter(|job| job.asked < deadline);
        late.map(|job| (u64::from(job.pages.count()), job.asked))
            .reduce(|(pages, since), (more, asked)| (pages + more, since.min(asked)))
    }
}

#[cfg(test)]
mod tests;
