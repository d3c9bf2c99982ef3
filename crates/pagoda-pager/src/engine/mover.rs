//! What a move of the VM to another host asks of its engine: looks at what was written, and copies of pages.
//!
//! The order: the VM is armed, and what it borrows is its own -> most pages that may be written are protected, in steps -> the first
//! look, which gives all pages -> copies, as they are asked for, and further looks. Copies leave time for faults, unless the VM stands
//! still for its last pages.
//!
//! Copies that go by [`Way::Place`] are written into the tier that is handed over, as fast as it takes them, and pages that it has already
//! are named. What it does not take is copied anew, and sent.

mod placements;

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Event, IoError, Pages, Refusal, Source, Stall};
use pagoda_core::units::{PAGE_SIZE, PageCount};
use pagoda_sys::ring::Ring;

use self::placements::Placements;
use super::imager::{Pace, refusal_text};
use super::paging::Paging;
use super::slowing::Slowed;
use super::stall::stall_text;
use crate::handle::{Content, Copied, CopyOrder, Look, Way};
use crate::tier::{Placed, Places};

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
    way: Way,
}

impl Copying {
    /// The same order for other pages.
    fn of(&self, pages: Pages) -> Copying {
        Copying { pages, to: self.to.clone(), way: self.way }
    }
}

/// A move's looks and copies, from the moment they are asked for to their answers.
#[derive(Debug)]
pub struct Mover {
    is_on: bool,
    hurries: bool,
    pace: Pace,
    looking: Option<(Sender<Result<Look, String>>, Instant)>,
    /// Copies to be sent that were asked for, and are not given to the machine yet.
    wanted: VecDeque<Copying>,
    to_place: VecDeque<Copying>,
    /// What is next has to be read, or goes into the tier, and as much as may be of that is under way.
    is_blocked: bool,
    /// The last copy came out of `to_place`: the two queues take turns.
    has_placed: bool,
    /// Copies that the tier is writing.
    placements: Placements,
    /// Given to the machine, in this order: a run goes when all of its pages are copied or refused.
    given: Vec<Copying>,
    /// Copies that the machine put off, and when each is asked for again.
    later: VecDeque<(Instant, Copying)>,
    /// Its writers. What they have waited counts for all moves.
    slowed: Slowed,
}

impl Mover {
    /// The mover of a VM that does not move.
    pub fn new() -> Mover {
        Mover {
            is_on: false,
            hurries: false,
            pace: Pace::new(MOVE_PER_MILLE),
            looking: None,
            wanted: VecDeque::new(),
            is_blocked: false,
            to_place: VecDeque::new(),
            has_placed: false,
            placements: Placements::default(),
            given: Vec::new(),
            later: VecDeque::new(),
            slowed: Slowed::default(),
        }
    }

    /// Whether the VM moves.
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
        paging.forget_placing();
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
        let copying = Copying { pages: order.pages, to: order.to, way: order.way };
        self.is_blocked = false;
        match self.is_on {
            true if order.is_urgent => self.queue(order.way).push_front(copying),
            true => self.queue(order.way).push_back(copying),
            false => {}
        }
    }

    fn queue(&mut self, way: Way) -> &mut VecDeque<Copying> {
        match way {
            Way::Send => &mut self.wanted,
            Way::Place => &mut self.to_place,
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
            self.queue(copying.way).push_front(copying);
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
        if !self.name_handed_over(Way::Send, paging) || !self.name_handed_over(Way::Place, paging) {
            return Turn::Nothing;
        }
        let Some(copying) = self.next_copy(paging) else { return Turn::Nothing };
        self.has_placed = copying.way == Way::Place;
        let pages = first_of(copying.pages);
        let (chunk, run, len) = (pages.chunk, copying.pages.run, pages.run.len);
        if run.len > len {
            let rest = Run { start: run.start + len as u8, len: run.len - len };
            self.queue(copying.way).push_front(copying.of(Pages { chunk, run: rest }));
        }
        self.given.push(Copying { pages, ..copying });
        Turn::Copy(pages)
    }

    /// The next copy that can be made. Those that are sent and those for the tier take turns.
    fn next_copy(&mut self, paging: &Paging) -> Option<Copying> {
        if paging.takes_copies() == Places::No {
            let sent = self.to_place.drain(..).map(|copying| Copying { way: Way::Send, ..copying });
            self.wanted.extend(sent);
        }
        let next = match self.has_placed {
            true => self.next_to_send(paging).or_else(|| self.next_to_place(paging)),
            false => self.next_to_place(paging).or_else(|| self.next_to_send(paging)),
        };
        self.is_blocked = next.is_none();
        next
    }

    /// The first that need not wait for reads of others.
    fn next_to_send(&mut self, paging: &Paging) -> Option<Copying> {
        let at = self.wanted.iter().take(AHEAD).position(|copying| has_room(copying, paging))?;
        self.wanted.remove(at)
    }

    /// The next copy for the tier, if the tier takes one.
    fn next_to_place(&mut self, paging: &Paging) -> Option<Copying> {
        if paging.takes_copies() != Places::Now || !has_room(self.to_place.front()?, paging) {
            return None;
        }
        let copying = self.to_place.pop_front()?;
        if self.placements.has_any(copying.pages) {
            // What it held before is on its way still.
            self.later.push_back((Instant::now() + LATER, copying));
            return None;
        }
        Some(copying)
    }

    /// Pages of a tier that is handed over are named, and not copied: those at the front of what is wanted, some at a time. Of what is to
    /// be placed there, pages that are in DRAM too. False: there are more.
    #[must_use]
    fn name_handed_over(&mut self, way: Way, paging: &Paging) -> bool {
        for _ in 0..NAMED_RUNS {
            let Some(Copying { pages: Pages { chunk, run }, .. }) = self.queue(way).front() else { return true };
            let (chunk, asked) = (*chunk, PageSet::range(run.start, run.len));
            let handed = match way {
                Way::Send => paging.handed_over(chunk, asked),
                Way::Place => paging.held_by_handed_over(chunk, asked),
            };
            if handed.is_empty() {
                return true;
            }
            let Some(copying) = self.queue(way).pop_front() else { return true };
            for run in handed.runs() {
                // Whoever asked may have gone.
                let _ = copying.to.send(Copied { pages: Pages { chunk, run }, content: Content::HandedOver });
            }
            for run in (asked - handed).runs() {
                self.queue(way).push_front(copying.of(Pages { chunk, run }));
            }
        }
        false
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
        let all = self.wanted.drain(..).chain(self.to_place.drain(..)).chain(later).chain(self.given.drain(..));
        for Copying { pages, to, .. } in all {
            let _ = to.send(Copied { pages, content: Content::Failed(why()) });
        }
        for placement in self.placements.take_all() {
            for run in placement.declined.runs() {
                let pages = Pages { chunk: placement.chunk, run };
                let _ = placement.to.send(Copied { pages, content: Content::Failed(why()) });
            }
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
        // Whatever ends wakes the loop.
        let can_copy = !self.is_blocked && (!self.wanted.is_empty() || !self.to_place.is_empty());
        let has_work = self.looking.is_some() || can_copy;
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

    /// Executes `CopyOut`: answers whoever asked with what the pages hold.
    pub fn copy(&mut self, pages: Pages, from: Source, paging: &mut Paging, ring: &Ring) {
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
        match content {
            Ok(Content::Bytes(bytes)) => self.hand_on(pages, bytes, paging),
            content => self.answer(pages, content.unwrap_or_else(Content::Failed)),
        }
    }

    /// A copy goes to whoever has asked for it, or into the tier.
    fn hand_on(&mut self, pages: Pages, bytes: Vec<u8>, paging: &mut Paging) {
        let Some(Copying { to, way, .. }) = self.take_given(pages) else { return };
        if way == Way::Send {
            // Whoever asked may have gone.
            let _ = to.send(Copied { pages, content: Content::Bytes(bytes) });
            return;
        }
        let each: Vec<&[u8]> = bytes.chunks(PAGE_SIZE as usize).collect();
        let mut at = 0;
        for same in each.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let run = Run { start: pages.run.start + at as u8, len: same.len() as u16 };
            let part = Pages { chunk: pages.chunk, run };
            at += same.len();
            if is_zero(same[0]) {
                let _ = to.send(Copied { pages: part, content: Content::Zeros });
            } else if paging.place(part, || same.concat()) {
                self.placements.add(part, to.clone());
            } else {
                let _ = to.send(Copied { pages: part, content: Content::Bytes(same.concat()) });
            }
        }
    }

    /// The tier says what became of a page.
    pub fn note_placed(&mut self, placed: Placed) {
        self.is_blocked = false;
        let Some(placement) = self.placements.note(placed) else { return };
        let chunk = placement.chunk;
        for run in placement.there.runs() {
            let _ = placement.to.send(Copied { pages: Pages { chunk, run }, content: Content::Placed });
        }
        for run in placement.declined.runs() {
            // They are sent with what they hold when the copy is made.
            let pages = Pages { chunk, run };
            self.wanted.push_back(Copying { pages, to: placement.to.clone(), way: Way::Send });
        }
    }

    /// Executes `CopyFailed`: tells whoever asked why the pages cannot be read.
    pub fn fail(&mut self, pages: Pages, error: IoError, paging: &Paging) {
        let tiers = paging.tiers();
        self.answer(
            pages,
            Content::Failed(stall_text(Stall::Read(error), tiers.swap_path(), tiers.trouble().as_deref())),
        );
    }

    /// Executes `CopyLater`: asks for the pages again after [`LATER`].
    pub fn put_off(&mut self, pages: Pages) {
        if let Some(copying) = self.take_given(pages) {
            self.later.push_back((Instant::now() + LATER, copying));
        }
    }

    fn answer(&mut self, pages: Pages, content: Content) {
        if let Some(Copying { to, .. }) = self.take_given(pages) {
            // Whoever asked may have gone.
            let _ = to.send(Copied { pages, content });
        }
    }

    /// Takes these pages out of what was given to the machine; nothing if the move is another one by now.
    fn take_given(&mut self, pages: Pages) -> Option<Copying> {
        // What has ended may leave room for a read.
        self.is_blocked = false;
        let (start, end) = bounds(pages.run);
        let holds = |copying: &Copying| {
            let (first, last) = bounds(copying.pages.run);
            copying.pages.chunk == pages.chunk && first <= start && end <= last
        };
        let at = self.given.iter().position(holds)?;
        let whole = self.given.swap_remove(at);
        let (first, last) = bounds(whole.pages.run);
        for (from, until) in [(first, start), (end, last)] {
            if from < until {
                let run = Run { start: from as u8, len: until - from };
                self.given.push(whole.of(Pages { chunk: pages.chunk, run }));
            }
        }
        Some(Copying { pages, ..whole })
    }
}

/// What of these pages is copied at once.
fn first_of(Pages { chunk, run }: Pages) -> Pages {
    Pages { chunk, run: Run { start: run.start, len: run.len.min(COPY_PAGES) } }
}

/// Its first part can be copied now.
fn has_room(copying: &Copying, paging: &Paging) -> bool {
    let Pages { chunk, run } = first_of(copying.pages);
    paging.machine().has_copy_room(chunk, PageSet::range(run.start, run.len))
}

fn bounds(run: Run) -> (u16, u16) {
    (u16::from(run.start), u16::from(run.start) + run.len)
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}
