//! What a move of the VM to another host asks of its engine: looks at what was written, and copies of pages.
//!
//! The order: the VM is armed, and what it borrows is its own -> most pages that may be written are protected, in steps -> the first
//! look, which gives all pages -> copies, as they are asked for, and further looks. Copies leave time for faults, unless the VM stands
//! still for its last pages.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Event, IoError, Pages, Refusal, Source, Stall};
use pagoda_core::units::{PAGE_SIZE, PageCount};
use pagoda_sys::ring::Ring;

use super::imager::{Pace, refusal_text};
use super::paging::Paging;
use super::slowing::Slowed;
use super::stall::stall_text;
use crate::handle::{Content, Copied, CopyOrder, Look};

/// Thousandths of the engine's time for protecting and copying pages while the VM runs.
const MOVE_PER_MILLE: u32 = 500;
/// Pages of one copy: some 50 us, for which faults wait.
const COPY_PAGES: u16 = 64;
/// Copies among which one is looked for that needs no read, while no further read may begin: 64 chunks of RAM at least.
const AHEAD: usize = 256;
/// Runs of pages that are named and not copied before anything else is looked at: some microseconds.
const NAMED_RUNS: usize = 32;
/// When a copy that was refused is asked for again: whatever is under way with its chunk takes about as long.
const LATER: Duration = Duration::from_micros(200);
/// How long a look waits until the VM is armed and owns what it has borrowed.
const READY_MAX: Duration = Duration::from_secs(5);

/// What the loop is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Nothing,
    /// Give the machine `Event::Prepare`, and then call [`Mover::note_step`].
    Protect,
    /// Give the machine `Event::Look`, and then call [`Mover::answer_look`].
    Look,
    /// Give the machine this event, and then call [`Mover::note_step`].
    Copy(Pages),
}

/// A VM whose pages are on their way from another host. Until they are there its memory is the kernel's.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    /// Its cap from then on.
    pub limit: PageCount,
}

#[derive(Debug)]
struct Copying {
    pages: Pages,
    to: Sender<Copied>,
}

/// See the module.
#[derive(Debug)]
pub struct Mover {
    is_on: bool,
    hurries: bool,
    pace: Pace,
    looking: Option<(Sender<Result<Look, String>>, Instant)>,
    /// Asked for, and not given to the machine.
    wanted: VecDeque<Copying>,
    /// All that is next in `wanted` has to be read, and as much as may be is being read.
    waits_for_reads: bool,
    /// Given to the machine, in this order: a run goes when all of its pages are copied or refused.
    given: Vec<Copying>,
    /// Refused until then.
    later: VecDeque<(Instant, Copying)>,
    /// Its writers. What they have waited counts for all moves.
    slowed: Slowed,
}

impl Mover {
    /// Of a VM that does not move.
    pub fn new() -> Mover {
        Mover {
            is_on: false,
            hurries: false,
            pace: Pace::new(MOVE_PER_MILLE),
            looking: None,
            wanted: VecDeque::new(),
            waits_for_reads: false,
            given: Vec::new(),
            later: VecDeque::new(),
            slowed: Slowed::default(),
        }
    }

    /// The VM moves.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// The move begins or ends. What was asked for is forgotten at its end: whoever waits for it hears that nothing comes.
    pub fn switch(&mut self, on: bool, paging: &mut Paging) {
        if on == self.is_on {
            return;
        }
        let mut slowed = std::mem::take(&mut self.slowed);
        slowed.stop(Instant::now());
        *self = Mover { is_on: on, slowed, ..Mover::new() };
        // What is known of writes is of no use to anybody from now on.
        paging.push(Event::Prepare { on });
        paging.push(Event::Forget);
    }

    /// The VM stands still, and its last pages are waited for, or it runs again.
    pub fn hurry(&mut self, on: bool) {
        self.hurries = on;
        self.slowed.stop(Instant::now());
    }

    /// First writes of these threads wait so long from now on. A VM that does not move or stands still is not slowed.
    pub fn slow(&mut self, delay: Duration, threads: Vec<u32>) {
        let now = Instant::now();
        if self.is_on && !self.hurries { self.slowed.set(delay, threads, now) } else { self.slowed.stop(now) }
    }

    /// Writers that are slowed.
    pub fn slowed(&mut self) -> &mut Slowed {
        &mut self.slowed
    }

    /// How long the loop may wait before it looks for answers that are due.
    pub fn slowed_wait(&self) -> Duration {
        self.slowed.wait(Instant::now())
    }

    /// Somebody wants to know what was written.
    pub fn ask_look(&mut self, asker: Sender<Result<Look, String>>) {
        match self.is_on {
            true => self.looking = Some((asker, Instant::now())),
            false => drop(asker.send(Err("the VM does not move".to_owned()))),
        }
    }

    /// Somebody wants a copy.
    pub fn ask_copy(&mut self, order: CopyOrder) {
        let copying = Copying { pages: order.pages, to: order.to };
        self.waits_for_reads = false;
        match self.is_on {
            true if order.is_urgent => self.wanted.push_front(copying),
            true => self.wanted.push_back(copying),
            false => {}
        }
    }

    /// What is to be done next, if anything is due.
    pub fn turn(&mut self, paging: &Paging) -> Turn {
        if !self.is_on || paging.is_halted() {
            self.fail_halted(paging);
            return Turn::Nothing;
        }
        let now = Instant::now();
        while self.later.front().is_some_and(|(until, _)| *until <= now) {
            let (_, copying) = self.later.pop_front().expect("looked at");
            self.wanted.push_front(copying);
        }
        let is_due = self.hurries || self.pace.is_due(paging.has_page_faults(), now);
        if let Some((_, since)) = &self.looking {
            return match paging.machine().can_look() {
                Ok(()) if self.hurries || paging.machine().sweeps() > 0 => Turn::Look,
                Ok(()) if is_due => Turn::Protect,
                Ok(()) => Turn::Nothing,
                Err(why) => self.wait_to_look(why, now - *since),
            };
        }
        if !is_due {
            return Turn::Nothing;
        }
        self.name_handed_over(paging);
        let Some(at) = self.next_copy(paging) else { return Turn::Nothing };
        let Copying { pages: Pages { chunk, run }, to } = &mut self.wanted[at];
        let pages = first_of(Pages { chunk: *chunk, run: *run });
        self.given.push(Copying { pages, to: to.clone() });
        let len = pages.run.len;
        match run.len > len {
            true => *run = Run { start: run.start + len as u8, len: run.len - len },
            false => drop(self.wanted.remove(at)),
        }
        Turn::Copy(pages)
    }

    /// Which of the copies that are wanted is made next: the first that need not wait for a read of others.
    fn next_copy(&mut self, paging: &Paging) -> Option<usize> {
        let can_begin = |copying: &Copying| {
            let Pages { chunk, run } = first_of(copying.pages);
            paging.machine().has_copy_room(chunk, PageSet::range(run.start, run.len))
        };
        let at = self.wanted.iter().take(AHEAD).position(can_begin);
        self.waits_for_reads = at.is_none() && !self.wanted.is_empty();
        at
    }

    /// Pages of a tier that is handed over are named, and not copied: those at the front of what is wanted, some at a time.
    fn name_handed_over(&mut self, paging: &Paging) {
        for _ in 0..NAMED_RUNS {
            let Some(Copying { pages: Pages { chunk, run }, .. }) = self.wanted.front() else { return };
            let (chunk, asked) = (*chunk, PageSet::range(run.start, run.len));
            let handed = paging.handed_over(chunk, asked);
            if handed.is_empty() {
                return;
            }
            let Some(Copying { to, .. }) = self.wanted.pop_front() else { return };
            for run in handed.runs() {
                // Whoever asked may have gone.
                let _ = to.send(Copied { pages: Pages { chunk, run }, content: Content::HandedOver });
            }
            for run in (asked - handed).runs() {
                self.wanted.push_front(Copying { pages: Pages { chunk, run }, to: to.clone() });
            }
        }
    }

    fn wait_to_look(&mut self, why: Refusal, waited: Duration) -> Turn {
        if (why == Refusal::Pinned || waited > READY_MAX)
            && let Some((asker, _)) = self.looking.take()
        {
            let _ = asker.send(Err(refusal_text(why).to_owned()));
        }
        Turn::Nothing
    }

    /// A VM that is halted answers nothing: its pages may be wrong.
    fn fail_halted(&mut self, paging: &Paging) {
        if !paging.is_halted() {
            return;
        }
        let why = || "the VM is halted".to_owned();
        if let Some((asker, _)) = self.looking.take() {
            let _ = asker.send(Err(why()));
        }
        let later = self.later.drain(..).map(|(_, copying)| copying);
        for Copying { pages, to } in self.wanted.drain(..).chain(later).chain(self.given.drain(..)) {
            let _ = to.send(Copied { pages, content: Content::Failed(why()) });
        }
    }

    /// How long the loop may wait before [`Mover::turn`].
    pub fn wait(&self, paging: &Paging) -> Duration {
        if !self.is_on || paging.is_halted() {
            return Duration::MAX;
        }
        let now = Instant::now();
        let later = self.later.front().map_or(Duration::MAX, |(until, _)| until.saturating_duration_since(now));
        let is_waiting = self.looking.is_some() && paging.machine().can_look().is_err();
        // The end of a read wakes the loop.
        let has_work = self.looking.is_some() || !self.wanted.is_empty() && !self.waits_for_reads;
        let wait = match () {
            () if is_waiting => LATER * 5,
            () if !has_work => Duration::MAX,
            () if self.hurries => Duration::ZERO,
            () => self.pace.wait(paging.has_page_faults(), now),
        };
        wait.min(later)
    }

    /// The step that [`Mover::turn`] asked for is done.
    pub fn note_step(&mut self, begun: Instant) {
        self.pace.note_step(begun);
    }

    /// The machine has done what follows from `Event::Look`. True: direct I/O is in flight, or may be.
    #[must_use]
    pub fn answer_look(&mut self, paging: &mut Paging) -> bool {
        let look = paging.end_look();
        let is_busy = look.oldest_io != u64::MAX;
        if let Some((asker, _)) = self.looking.take() {
            let _ = asker.send(Ok(look));
        }
        is_busy
    }

    /// Executes `CopyOut`.
    pub fn copy(&mut self, pages: Pages, from: Source, paging: &Paging, ring: &Ring) {
        let content = match from {
            Source::Zero => Ok(Content::Zeros),
            Source::Buffer(op) => {
                let content = paging.brought(ring, op, pages).ok_or("what was read for a move is in no buffer");
                content.map(|content| Content::Bytes(content.to_vec())).map_err(str::to_owned)
            }
            Source::Ram | Source::Frame => {
                let mut content = vec![0; usize::from(pages.run.len) * PAGE_SIZE as usize];
                let copied = match from {
                    Source::Frame => paging.copy_frames(pages, &mut content),
                    _ => paging.copy_ram(pages, &mut content),
                };
                copied.map(|()| Content::Bytes(content))
            }
            Source::Parent => Err("a move has no parent".to_owned()),
        };
        self.answer(pages, content.unwrap_or_else(Content::Failed));
    }

    /// Executes `CopyFailed`.
    pub fn fail(&mut self, pages: Pages, error: IoError, paging: &Paging) {
        let tiers = paging.tiers();
        self.answer(
            pages,
            Content::Failed(stall_text(Stall::Read(error), tiers.swap_path(), tiers.trouble().as_deref())),
        );
    }

    /// Executes `CopyLater`.
    pub fn put_off(&mut self, pages: Pages) {
        if let Some(to) = self.take_given(pages) {
            self.later.push_back((Instant::now() + LATER, Copying { pages, to }));
        }
    }

    fn answer(&mut self, pages: Pages, content: Content) {
        if let Some(to) = self.take_given(pages) {
            // Whoever asked may have gone.
            let _ = to.send(Copied { pages, content });
        }
    }

    /// Takes these pages out of what was given to the machine; nothing if the move is another one by now.
    fn take_given(&mut self, pages: Pages) -> Option<Sender<Copied>> {
        // What has ended may leave room for a read.
        self.waits_for_reads = false;
        let (start, end) = bounds(pages.run);
        let holds = |copying: &Copying| {
            let (first, last) = bounds(copying.pages.run);
            copying.pages.chunk == pages.chunk && first <= start && end <= last
        };
        let at = self.given.iter().position(holds)?;
        let Copying { pages: whole, to } = self.given.swap_remove(at);
        let (first, last) = bounds(whole.run);
        for (from, until) in [(first, start), (end, last)] {
            if from < until {
                let run = Run { start: from as u8, len: until - from };
                self.given.push(Copying { pages: Pages { chunk: whole.chunk, run }, to: to.clone() });
            }
        }
        Some(to)
    }
}

/// What of these pages is copied at once.
fn first_of(Pages { chunk, run }: Pages) -> Pages {
    Pages { chunk, run: Run { start: run.start, len: run.len.min(COPY_PAGES) } }
}

fn bounds(run: Run) -> (u16, u16) {
    (u16::from(run.start), u16::from(run.start) + run.len)
}
