//! The threads that read an image for one VM.
//!
//! The engine leaves jobs in the [`Queue`] and takes in what is done, and never waits for a thread. A thread takes a job, reads
//! it with nothing locked, compares each page with its checksum, and makes the tier's descriptor readable. There is always a
//! thread that is free to take the next job, up to [`super::queue::WORKERS_MAX`]; those beyond [`WORKERS`] end when they have nothing to do.
//!
//! A thread that the disk does not answer stays in its system call, as long as that takes. It has nothing of the VM but a buffer
//! of its own and the image's files; so the VM ends without it, and it ends when the disk answers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_image::{Content as Found, Image};
use pagoda_sys::process::Wake;
use pagoda_sys::swapfile::DirectBuffer;

use super::queue::{Asker, BUFFER_BYTES, Done, Failure, Job, Queue, WORKERS, WorkerIdx};
use crate::threads;

/// How long a thread has nothing to do before it ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// What the tier and the threads share.
#[derive(Debug)]
struct Shared {
    image: Arc<Image>,
    /// The name that each thread has.
    name: String,
    queue: Mutex<Queue>,
    /// There is something to do.
    work: Condvar,
    /// There is an answer.
    answered: Condvar,
    /// Something was done that the engine is to take in.
    wake: Wake,
}

/// The reading threads of one VM, and the queue that they share with the tier.
#[derive(Debug)]
pub struct Readers {
    shared: Arc<Shared>,
    calls: u64,
}

impl Readers {
    /// Threads that read the image for this VM.
    ///
    /// # Errors
    /// No thread or no eventfd is to be had.
    pub fn start(image: Arc<Image>, vm: &str) -> io::Result<Readers> {
        let (queue, wake) = (Mutex::new(Queue::new()), Wake::new()?);
        let name = threads::name("image", vm);
        let shared = Arc::new(Shared { image, name, queue, work: Condvar::new(), answered: Condvar::new(), wake });
        // Ends them again if one cannot be made.
        let readers = Readers { shared, calls: 0 };
        for _ in 0..WORKERS {
            // Unlocked again before a thread is made: if that fails, it is locked to say so.
            let worker = readers.shared.lock().add_worker();
            if let Some(worker) = worker {
                spawn(&readers.shared, worker)?;
            }
        }
        Ok(readers)
    }

    /// Has these `count` jobs done, in this order. False, and nothing is asked for, if too much waits.
    #[must_use]
    pub fn ask(&self, count: usize, jobs: impl Iterator<Item = Job>) -> bool {
        let mut queue = self.shared.lock();
        let has_room = queue.has_room_for(count);
        if has_room {
            jobs.take(count).for_each(|job| queue.push(job));
        }
        drop(queue);
        (0..count).for_each(|_| self.shared.work.notify_one());
        has_room
    }

    /// Becomes readable when something is done.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Takes in what is done.
    pub fn take_done(&self, into: &mut VecDeque<Done>) {
        // First: what is done after the look makes it readable again.
        self.shared.wake.clear();
        self.shared.lock().take_done(into);
    }

    /// Gives a buffer back.
    pub fn give(&self, buffer: DirectBuffer) {
        self.shared.lock().give(buffer);
        self.shared.work.notify_one();
    }

    /// Reads one page and waits for it, `patience` at most.
    ///
    /// # Errors
    /// It cannot be read, or not in time: in words.
    pub fn read_now(&mut self, page: PageIdx, out: &mut [u8], patience: Duration) -> Result<(), String> {
        self.calls += 1;
        let pages = PageSet::single(page.index_in_chunk());
        let asked = Instant::now();
        let job = Job { asker: Asker::Caller(self.calls), chunk: page.chunk(), pages, asked };
        let mut queue = self.shared.lock();
        queue.push(job);
        self.shared.work.notify_one();
        let done = loop {
            if let Some(done) = queue.take_answer() {
                break done;
            }
            let Some(left) = patience.checked_sub(asked.elapsed()) else {
                queue.forget_call();
                return Err(format!("the disk did not answer within {} s", patience.as_secs()));
            };
            queue = self.shared.answered.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(queue);
        if let Some(failure) = done.failure {
            return Err(failure.why);
        }
        out.copy_from_slice(done.page(0));
        Ok(())
    }

    /// Bytes of memory that the pages on their way take.
    pub fn memory_bytes(&self) -> u64 {
        self.shared.lock().memory_bytes()
    }

    /// Pages that are waited for longer than `max`, and how long the first is.
    pub fn late(&self, max: Duration) -> Option<(u64, Duration)> {
        let deadline = Instant::now().checked_sub(max)?;
        let (pages, since) = self.shared.lock().late(deadline)?;
        Some((pages, since.elapsed()))
    }
}

impl Drop for Readers {
    /// Nobody is waited for: see the module.
    fn drop(&mut self) {
        self.shared.lock().close();
        self.shared.work.notify_all();
    }
}

impl Shared {
    /// No I/O happens, and nothing of the caller's runs, while this is held.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spawn(shared: &Arc<Shared>, worker: WorkerIdx) -> io::Result<()> {
    let own = Arc::clone(shared);
    let thread = std::thread::Builder::new().name(shared.name.clone());
    let spawned = thread.spawn(move || work(&own, worker));
    if spawned.is_err() {
        shared.lock().remove_worker(worker);
    }
    spawned.map(drop)
}

/// What a thread does until there is nothing to do for it any more.
fn work(shared: &Arc<Shared>, worker: WorkerIdx) {
    let mut queue = shared.lock();
    while !queue.is_closed() {
        if let Some((job, buffer)) = queue.take(worker) {
            let helper = queue.add_worker();
            drop(queue);
            if let Some(helper) = helper
                && let Err(error) = spawn(shared, helper)
            {
                // The threads that there are go on.
                tracing::debug!("start another thread that reads an image: {error}");
            }
            let len = if matches!(job.asker, Asker::Op { .. }) { BUFFER_BYTES } else { PAGE_SIZE as usize };
            let done = read(&shared.image, job, buffer.unwrap_or_else(|| DirectBuffer::new(len)));
            shared.lock().end(worker, done);
            match job.asker {
                Asker::Op { .. } => shared.wake.wake(),
                Asker::Caller(_) => shared.answered.notify_all(),
            }
            queue = shared.lock();
        } else {
            let waited = shared.work.wait_timeout(queue, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            queue = waited.0;
            if waited.1.timed_out() && queue.retire(worker) {
                return;
            }
        }
    }
    queue.remove_worker(worker);
}

/// Reads a job's pages. If they cannot be had together, each is read alone, so that one that is damaged takes no other along.
fn read(image: &Image, job: Job, mut content: DirectBuffer) -> Done {
    let (mut failed, mut failure) = (PageSet::EMPTY, None);
    let len = usize::from(job.pages.count()) * PAGE_SIZE as usize;
    // A caller asks for one page after the other, which the page cache serves better.
    let is_op = matches!(job.asker, Asker::Op { .. });
    if !is_op || image.read_blocks(job.chunk, job.pages, &mut content[..len]).is_err() {
        for (index, content) in job.pages.iter().zip(content.chunks_exact_mut(PAGE_SIZE as usize)) {
            let page = job.chunk.page(index);
            let why = match image.read_page(page, content) {
                Ok(Found::Block) => continue,
                Ok(Found::Zero | Found::Missing) => "its map has no block of the page any more".to_owned(),
                Err(error) => error.to_string(),
            };
            failed.set(index);
            failure.get_or_insert(Failure { page, why });
        }
    }
    Done { job, content, failed, failure }
}
