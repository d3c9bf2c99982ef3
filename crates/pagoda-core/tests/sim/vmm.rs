//! The VMM: threads that read, write and verify, direct I/O that pins frames, and pages given back.

use pagoda_core::fault::Access;

use crate::rng::Rng;
use crate::world::{Frame, Pte, World};

/// Largest direct I/O, in pages.
const IO_PAGES_MAX: usize = 40;
/// Contents that many pages have, that of a page of zeros among them.
pub const SAME_CONTENTS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    Awake,
    /// In a fault on this page.
    On(usize),
}

#[derive(Debug)]
enum Task {
    Touch { page: usize, access: Access },
    Io(Io),
}

/// A direct read of a disk into guest memory.
#[derive(Debug)]
struct Io {
    start_epoch: u64,
    pages: Vec<usize>,
    pinned: Vec<Frame>,
    landed: bool,
}

/// Where a thread goes next.
#[derive(Debug)]
enum Habit {
    Uniform,
    Hot(Vec<usize>),
    Sweep { at: usize, stride: usize },
}

#[derive(Debug)]
struct Thread {
    habit: Habit,
    writes_per_mille: usize,
    ios_per_mille: usize,
    task: Option<Task>,
    sleep: Sleep,
    /// Steps of the VMM since the task came to this page.
    age: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    pub token: u64,
    pub first: usize,
    pub count: usize,
}

#[derive(Debug)]
pub struct Vmm {
    threads: Vec<Thread>,
    /// The guest's own idea of every page: the oracle.
    pub truth: Vec<u64>,
    pub discards: Vec<Discard>,
    pub verified: u64,
    version: u64,
    /// How many writes in a thousand write what other pages hold too.
    sameness: usize,
    token: u64,
}

impl Vmm {
    pub fn new(truth: Vec<u64>, rng: &mut Rng) -> Vmm {
        let pages = truth.len();
        let threads = (0..rng.within(1, 10)).map(|_| Thread::new(pages, rng)).collect();
        let version = truth.iter().copied().max().unwrap_or(0);
        let sameness = *rng.pick(&[0, 300, 900]);
        Vmm { threads, truth, discards: Vec::new(), verified: 0, version, sameness, token: 0 }
    }

    /// One thread goes one step. `fresh`: it may begin something new.
    pub fn step(&mut self, world: &mut World, rng: &mut Rng, fresh: bool) {
        self.wake(world, rng);
        let index = rng.below(self.threads.len());
        if self.threads[index].task.is_none() {
            if fresh {
                self.begin(index, world, rng);
            }
            return;
        }
        let thread = &mut self.threads[index];
        if thread.sleep != Sleep::Awake {
            return;
        }
        match thread.task.as_mut() {
            Some(Task::Touch { page, access }) => {
                let (page, access) = (*page, *access);
                let writes_per_mille = thread.writes_per_mille;
                let Some(frame) = world.reach(page, access) else {
                    thread.sleep = Sleep::On(page);
                    return;
                };
                if access == Access::Write {
                    let content = self.next_content(rng);
                    frame.set(content);
                    self.truth[page] = content;
                } else {
                    assert_eq!(frame.get(), self.truth[page], "the guest reads a wrong page {page}");
                    self.verified += 1;
                }
                // Often what is read is then written.
                let writes = access == Access::Read && rng.per_mille(writes_per_mille);
                self.threads[index].task = writes.then_some(Task::Touch { page, access: Access::Write });
            }
            Some(Task::Io(io)) if io.pinned.len() < io.pages.len() => {
                let page = io.pages[io.pinned.len()];
                match world.reach(page, Access::Write) {
                    Some(frame) => {
                        io.pinned.push(frame);
                        thread.age = 0;
                    }
                    None => thread.sleep = Sleep::On(page),
                }
            }
            Some(Task::Io(io)) if !io.landed => {
                io.landed = rng.per_mille(150);
                for (page, frame) in io.pages.iter().zip(&io.pinned).filter(|_| io.landed) {
                    self.version += 1;
                    let same = rng.per_mille(self.sameness);
                    let content = if same { rng.below(SAME_CONTENTS) as u64 } else { self.version };
                    frame.set(content);
                    self.truth[*page] = content;
                }
            }
            Some(Task::Io(io)) => {
                let slot = world.slots.iter().position(|epoch| *epoch == io.start_epoch).expect("the I/O has a slot");
                world.slots.swap_remove(slot);
                thread.task = None;
            }
            None => {}
        }
    }

    fn next_content(&mut self, rng: &mut Rng) -> u64 {
        self.version += 1;
        if rng.per_mille(self.sameness) { rng.below(SAME_CONTENTS) as u64 } else { self.version }
    }

    fn begin(&mut self, index: usize, world: &mut World, rng: &mut Rng) {
        let pages = world.pages();
        let page = self.threads[index].next(pages, rng);
        let thread = &self.threads[index];
        let task = if rng.per_mille(thread.ios_per_mille) {
            let count = rng.within(1, IO_PAGES_MAX).min(pages - page);
            // The clock is read before the system call.
            Task::Io(Io {
                start_epoch: world.epoch,
                pages: (page..page + count).collect(),
                pinned: Vec::new(),
                landed: false,
            })
        } else {
            let access = if rng.per_mille(thread.writes_per_mille) { Access::Write } else { Access::Read };
            Task::Touch { page, access }
        };
        if task.pages().iter().any(|page| self.discards.iter().any(|discard| discard.covers(*page))) {
            return;
        }
        if let Task::Io(io) = &task {
            world.slots.push(io.start_epoch);
        }
        let thread = &mut self.threads[index];
        (thread.task, thread.age) = (Some(task), 0);
    }

    /// Threads whose page was woken try again; their message may stay behind and is stale then.
    fn wake(&mut self, world: &mut World, rng: &mut Rng) {
        for pages in std::mem::take(&mut world.woken) {
            for thread in &mut self.threads {
                if matches!(thread.sleep, Sleep::On(page) if pages.contains(&page)) {
                    thread.sleep = Sleep::Awake;
                    if rng.coin() {
                        world.messages.retain(|message| !pages.contains(&message.page));
                    }
                }
            }
        }
        for thread in self.threads.iter_mut().filter(|thread| thread.task.is_some()) {
            thread.age += 1;
        }
    }

    /// All threads want the same few pages, mostly to read them.
    pub fn crowd(&mut self, pages: &[usize], rng: &mut Rng) {
        for thread in &mut self.threads {
            thread.habit = Habit::Hot(pages.to_vec());
            (thread.writes_per_mille, thread.ios_per_mille) = (*rng.pick(&[0, 0, 50]), 0);
        }
    }

    pub fn change_phase(&mut self, rng: &mut Rng) {
        let index = rng.below(self.threads.len());
        self.threads[index].change(self.truth.len(), rng);
    }

    /// Something that is no answer wakes a thread, a signal for example: it faults again.
    pub fn interrupt(&mut self, rng: &mut Rng) {
        let index = rng.below(self.threads.len());
        self.threads[index].sleep = Sleep::Awake;
    }

    /// The guest gives pages back that nobody uses at the moment, and does not use them until that is done.
    pub fn give_back(&mut self, rng: &mut Rng) -> Option<Discard> {
        let pages = self.truth.len();
        let first = rng.below(pages);
        let most = *rng.pick(&[8, 600]);
        let count = rng.within(1, most).min(pages - first);
        let discard = Discard { token: self.token, first, count };
        let used = self.threads.iter().filter_map(|thread| thread.task.as_ref());
        let used = used.flat_map(|task| task.pages()).any(|page| discard.covers(page));
        let given = self.discards.iter().any(|other| (first..first + count).any(|page| other.covers(page)));
        if used || given {
            return None;
        }
        self.token += 1;
        self.discards.push(discard);
        Some(discard)
    }

    pub fn gave_back(&mut self, token: u64) -> std::ops::Range<usize> {
        let index =
            self.discards.iter().position(|discard| discard.token == token).expect("a discard that was asked for");
        let discard = self.discards.swap_remove(index);
        let pages = discard.first..discard.first + discard.count;
        self.truth[pages.clone()].fill(0);
        pages
    }

    pub fn is_given_back(&self, page: usize) -> bool {
        self.discards.iter().any(|discard| discard.covers(page))
    }

    pub fn idle(&self) -> bool {
        self.threads.iter().all(|thread| thread.task.is_none()) && self.discards.is_empty()
    }

    /// Reads every page, one after the other, by each thread.
    pub fn sweep_all(&mut self, rng: &mut Rng) {
        for thread in &mut self.threads {
            (thread.writes_per_mille, thread.ios_per_mille) = (*rng.pick(&[0, 0, 100, 400]), 0);
            thread.habit = Habit::Sweep { at: 0, stride: 1 };
        }
    }

    /// Steps that the oldest task has lasted, and what it is about.
    pub fn oldest(&self) -> (u32, String) {
        let oldest = self.threads.iter().filter(|thread| thread.task.is_some()).max_by_key(|thread| thread.age);
        oldest.map_or((0, String::new()), |thread| (thread.age, format!("{:?} {:?}", thread.task, thread.sleep)))
    }
}

impl Thread {
    fn new(pages: usize, rng: &mut Rng) -> Thread {
        let habit = Habit::Uniform;
        let mut thread =
            Thread { habit, writes_per_mille: 0, ios_per_mille: 0, task: None, sleep: Sleep::Awake, age: 0 };
        thread.change(pages, rng);
        thread
    }

    /// Another phase of the program.
    fn change(&mut self, pages: usize, rng: &mut Rng) {
        // Few places, so that threads meet.
        self.habit = match rng.below(4) {
            0 => Habit::Uniform,
            1 => Habit::Sweep { at: pages / 4 * rng.below(4), stride: *rng.pick(&[1, 1, 1, 2, 7]) },
            _ => {
                let base = pages / 4 * rng.below(4);
                let spread = *rng.pick(&[2, 20, 100, 600]);
                Habit::Hot((0..rng.within(2, 24)).map(|_| (base + rng.below(spread)) % pages).collect())
            }
        };
        self.writes_per_mille = *rng.pick(&[0, 10, 100, 500, 900]);
        self.ios_per_mille = *rng.pick(&[0, 0, 20, 200]);
    }

    fn next(&mut self, pages: usize, rng: &mut Rng) -> usize {
        match &mut self.habit {
            Habit::Uniform => rng.below(pages),
            Habit::Hot(hot) => *rng.pick(hot),
            Habit::Sweep { at, stride } => {
                *at = (*at + *stride) % pages;
                *at
            }
        }
    }
}

impl Task {
    fn pages(&self) -> Vec<usize> {
        match self {
            Task::Touch { page, .. } => vec![*page],
            Task::Io(io) => io.pages.clone(),
        }
    }
}

impl Discard {
    pub fn covers(&self, page: usize) -> bool {
        (self.first..self.first + self.count).contains(&page)
    }
}

/// The VMM drops entries by itself, as memory compaction and exit of a mapping do.
pub fn drop_entries(world: &mut World, rng: &mut Rng) {
    let first = rng.below(world.pages());
    let count = rng.within(1, 300).min(world.pages() - first);
    world.pte[first..first + count].fill(Pte::Absent);
}
