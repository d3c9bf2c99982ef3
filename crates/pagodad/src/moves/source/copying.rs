//! Rounds of a move: what the engine is asked to look for and to copy, and what of that goes into the streams.
//!
//! A page is asked for at most once in a round, and a round ends only when every copy of it has gone into its stream. So no copy of
//! an earlier round comes behind a later one.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use pagoda_core::bits::PageSet;
use pagoda_core::fault::Pages;
use pagoda_core::units::{Bytes, ChunkIdx, PAGE_SIZE, PageCount};
use pagoda_move::map::{PageMap, PageRun};
use pagoda_move::rounds::{IoEpoch, Mode, Next, Phase, Progress, Rounds, Settings, Slowing, Step};
use pagoda_move::units::{ConnectionNo, Moment, RoundNo};
use pagoda_pager::handle::{Command, Content, Copied, Handle, Look};

use super::copies::Copies;
use super::input::Input;
use super::line::Line;
use super::pages::Gone;
use super::split::{Part, Split};

/// Copies that were asked for and have not gone into a stream, bytes: what a fast disk and a fast network hide of each other.
const ON_THE_WAY_MAX: u64 = 32 << 20;
/// How long direct I/O may take to end once the VM stands still. QEMU waits for it before it says so.
const DRAIN_MAX: Duration = Duration::from_millis(500);
const DRAIN_LOOK: Duration = Duration::from_millis(1);
/// How often the order of the first round follows what is learned of heat: some 25 MiB go meanwhile at 1 Gbit/s.
const LEARN_EVERY: Duration = Duration::from_millis(200);
/// Of the time, at most one part in so many goes into it.
const LEARN_PART: u32 = 20;

/// What is copied in rounds, and where it may go.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// The VM's pages, and how many of them may be in DRAM at its destination.
    pub pages: PageCount,
    pub dram: PageCount,
    /// What does not fit there goes into the remote tier, which is held.
    pub is_split: bool,
}

/// What the rounds want.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// To be asked again when something has happened, or at this moment.
    Wait(Option<Moment>),
    /// The VM is to be stopped.
    Switch,
    /// The last round has been given to the streams. The map and the state follow, which end with this round.
    SendState(RoundNo),
    GiveUp(String),
}

/// Nothing is known of the heat of a VM that has room for all of its memory. While its first round goes to where it has less, that is
/// learned.
#[derive(Clone, Copy, Debug)]
struct Learning {
    /// What the VM may have there.
    dram: PageCount,
    /// When the order is looked at again.
    next: Instant,
}

/// The rounds of one move, and what they have sent so far.
#[derive(Debug)]
pub struct Copying {
    engine: Arc<Handle>,
    rounds: Rounds,
    pages: PageCount,
    mode: Mode,
    copies: Copies,
    learning: Option<Learning>,
    /// Pages of a remote tier that is handed over, which are not sent.
    handed_over: PageMap,
    split: Option<Split>,
    /// Bytes that the remote tier was given for the destination.
    placed: Bytes,
    /// Nothing was sent before this connection.
    first: ConnectionNo,
    protected_at: IoEpoch,
    wait_until: Moment,
    /// A round's end has been sent, and what follows it is not decided.
    is_undecided: bool,
    is_stopped: bool,
    /// All that belongs to the last round has been sent by this connection.
    is_last_sent: bool,
}

impl Copying {
    /// Begins with all pages protected.
    ///
    /// # Errors
    /// The engine cannot tell what is written.
    pub fn begin(
        engine: &Arc<Handle>,
        settings: Settings,
        extent: Extent,
        first: ConnectionNo,
        inputs: &Sender<Input>,
        now: Moment,
    ) -> Result<Copying> {
        engine.send(Command::Move(true));
        let Extent { pages, dram, is_split } = extent;
        // What goes where is decided once for a VM that is split.
        let learning = (dram < pages && !is_split).then(|| Learning { dram, next: Instant::now() + LEARN_EVERY });
        if learning.is_some() {
            engine.send(Command::LearnHeat);
        }
        let look = look(engine)?;
        let protected_at = IoEpoch(look.protected_at);
        let split = if is_split { Some(split(engine, pages, dram)?) } else { None };
        let order = match &split {
            Some(split) => split.order().to_vec(),
            None => hot_first(engine, pages, dram)?,
        };
        let mut rounds = Rounds::new(settings, pages, order, protected_at, None, now);
        rounds.set_oldest_io(IoEpoch(look.oldest_io));
        Ok(Copying {
            engine: Arc::clone(engine),
            rounds,
            pages,
            mode: settings.mode,
            copies: Copies::new(pages, inputs),
            learning,
            handed_over: PageMap::empty(pages),
            split,
            placed: Bytes::ZERO,
            first,
            protected_at,
            wait_until: Moment::default(),
            is_undecided: false,
            is_stopped: false,
            is_last_sent: false,
        })
    }

    pub fn progress(&self, now: Moment) -> Progress {
        self.rounds.progress(now)
    }

    pub const fn round(&self) -> RoundNo {
        self.rounds.round()
    }

    /// How the guest's writers are to be slowed now.
    pub fn slowing(&self, now: Moment) -> Slowing {
        self.rounds.slowing(now)
    }

    pub fn lost_link(&mut self) {
        self.copies.lost_link();
        self.is_last_sent = false;
        self.rounds.lost_link();
    }

    /// The destination has a round. Whether it has all.
    pub fn kept(&mut self, round: RoundNo, now: Moment) -> bool {
        self.rounds.kept(round, now);
        if self.is_undecided {
            // The VM may have waited for this to be stopped.
            self.wait_until = Moment::default();
        }
        self.is_stopped && self.rounds.is_complete()
    }

    /// A copy has come. It goes into its stream.
    ///
    /// # Errors
    /// Pages cannot be read, and why.
    pub fn copied(&mut self, connection: ConnectionNo, copied: Copied, line: &Line) -> Result<()> {
        if !self.copies.has_come(connection, &copied, line)? {
            return Ok(());
        }
        // What was said of a page last counts: it is asked again whenever it was written.
        let Pages { chunk, run } = copied.pages;
        let pages = PageSet::range(run.start, run.len);
        self.handed_over.remove_in(chunk, pages);
        if matches!(copied.content, Content::HandedOver | Content::Placed) {
            let there = match (&copied.content, &mut self.split) {
                (Content::Placed, Some(split)) => split.placed(chunk, pages),
                (Content::Placed, None) => {
                    bail!("the engine has put pages into the remote tier that nobody wanted there")
                }
                _ => pages,
            };
            self.handed_over.insert_in(chunk, there);
            if matches!(copied.content, Content::Placed) {
                self.placed += Bytes(u64::from(run.len) * PAGE_SIZE);
            }
            let bytes = u64::from(run.len) * PAGE_SIZE;
            self.sent(connection, Gone { bytes, zeros: bytes, saved: 0 });
            return Ok(());
        }
        let is_fresh = connection == self.first && self.rounds.round() == RoundNo(0);
        line.send_pages(copied, is_fresh);
        Ok(())
    }

    /// Pages have gone into a stream.
    pub fn sent(&mut self, connection: ConnectionNo, gone: Gone) {
        if !self.copies.have_gone(connection, gone.bytes) {
            return;
        }
        self.rounds.spare(Bytes(gone.zeros));
        self.rounds.save(Bytes(gone.saved));
        if gone.zeros + gone.saved > 0 && !self.is_undecided {
            // What was not sent is not waited for.
            self.wait_until = Moment::default();
        }
    }

    /// The VM stands still since its device state was saved.
    ///
    /// # Errors
    /// It cannot be told which pages are the last.
    pub fn stopped(&mut self, now: Moment) -> Result<()> {
        let phase = self.rounds.progress(now).phase;
        ensure!(matches!(phase, Phase::Stopping(_)), "the VM was stopped, and nobody wanted it");
        self.engine.send(Command::HurryMove(true));
        let deadline = Instant::now() + DRAIN_MAX;
        let mut written = PageMap::empty(self.pages);
        loop {
            let look = look(&self.engine)?;
            add(&mut written, &look.written)?;
            if IoEpoch(look.oldest_io) == IoEpoch::IDLE {
                break;
            }
            ensure!(Instant::now() < deadline, "direct I/O of the VM goes on although it stands still");
            thread::sleep(DRAIN_LOOK);
        }
        self.forget_copies(&written);
        self.rounds.stopped(&written, now);
        if self.mode == Mode::Postcopy {
            // Nothing was sent, so the destination has zeros in every page.
            let content = self.engine.content().map_err(|why| anyhow!("it cannot be told what the VM holds: {why}"))?;
            let mut holding = PageMap::empty(self.pages);
            add(&mut holding, &content)?;
            self.rounds.leave_out_zeros(&holding);
        }
        self.is_stopped = true;
        Ok(())
    }

    /// What has gone into the remote tier for the destination; what was written later counts too.
    pub const fn placed(&self) -> Bytes {
        self.placed
    }

    /// Pages of a remote tier that is handed over. The destination finds them there.
    pub const fn handed_over(&self) -> &PageMap {
        &self.handed_over
    }

    /// Pages that the destination does not get before it runs: none, unless it goes over without them.
    pub fn missing(&self) -> &PageMap {
        self.rounds.missing()
    }

    /// Goes on as far as it can.
    pub fn pump(&mut self, line: &Line, now: Moment) -> Turn {
        match self.go_on(line, now) {
            Ok(turn) => turn,
            Err(error) => Turn::GiveUp(pagoda_api::in_full(error.as_ref())),
        }
    }

    fn go_on(&mut self, line: &Line, now: Moment) -> Result<Turn> {
        loop {
            let phase = self.rounds.progress(now).phase;
            let is_sending = match phase {
                Phase::Rounds => true,
                Phase::Last(_) | Phase::Done => self.is_stopped && !self.is_last_sent,
                Phase::Stopping(_) => false,
            };
            if !is_sending {
                return Ok(Turn::Wait(None));
            }
            if phase == Phase::Rounds && now < self.wait_until {
                return Ok(Turn::Wait(Some(self.wait_until)));
            }
            if phase == Phase::Rounds && self.is_undecided {
                match self.decide(now)? {
                    Some(turn) => return Ok(turn),
                    None => continue,
                }
            }
            if self.copies.on_the_way() >= ON_THE_WAY_MAX {
                return Ok(Turn::Wait(None));
            }
            self.learn()?;
            match self.rounds.next(now) {
                Next::Send(run) => self.order(run, line)?,
                Next::Wait(until) => self.wait_until = until,
                // What is on the way would come behind the stop: it is part of the round, for its rate too.
                Next::RoundEnd if self.copies.is_busy() => return Ok(Turn::Wait(None)),
                Next::RoundEnd => {
                    let round = self.rounds.end_round();
                    line.end_round(round);
                    if phase != Phase::Rounds {
                        self.is_last_sent = true;
                        return Ok(Turn::SendState(round));
                    }
                    self.is_undecided = true;
                }
            }
        }
    }

    /// What has turned out to be hot in the first round goes before what has not: it gets the DRAM there.
    fn learn(&mut self) -> Result<()> {
        let Some(learning) = self.learning.as_mut().filter(|learning| learning.next <= Instant::now()) else {
            return Ok(());
        };
        let began = Instant::now();
        if self.is_stopped || self.rounds.round() > RoundNo(0) {
            self.learning = None;
            return Ok(());
        }
        self.rounds.reorder(hot_first(&self.engine, self.pages, learning.dram)?);
        learning.next = Instant::now() + LEARN_EVERY.max(began.elapsed() * LEARN_PART);
        Ok(())
    }

    /// Has copies made, each by its way.
    fn order(&mut self, run: PageRun, line: &Line) -> Result<()> {
        let Some(split) = &self.split else { return self.copies.order(&self.engine, line, run, false) };
        for part in split.parts(run, self.is_stopped) {
            match part {
                Part::Link(run) => self.copies.order(&self.engine, line, run, false)?,
                Part::Tier(run) => self.copies.order_into_tier(&self.engine, line, run)?,
                // The tier has them since an earlier connection.
                Part::There(run) => self.rounds.spare(run.count().bytes()),
            }
        }
        Ok(())
    }

    /// What was copied of these pages is not what they hold any more.
    fn forget_copies(&mut self, written: &PageMap) {
        self.handed_over.remove_all(written);
        if let Some(split) = &mut self.split {
            split.written(written);
        }
    }

    /// Decides after a fresh look. `None`: another round follows.
    fn decide(&mut self, now: Moment) -> Result<Option<Turn>> {
        let look = look(&self.engine)?;
        let protected_at = IoEpoch(look.protected_at);
        ensure!(protected_at >= self.protected_at, "the VM's clock of direct I/O goes backwards");
        self.protected_at = protected_at;
        let mut written = PageMap::empty(self.pages);
        add(&mut written, &look.written)?;
        self.forget_copies(&written);
        self.rounds.written(&written, protected_at);
        self.rounds.set_oldest_io(IoEpoch(look.oldest_io));
        Ok(match self.rounds.decide(now) {
            Step::Round(_) => {
                self.is_undecided = false;
                None
            }
            Step::Wait(until) => {
                self.wait_until = until;
                Some(Turn::Wait(Some(until)))
            }
            Step::Stop(_) => Some(Turn::Switch),
            Step::GiveUp(why) => Some(Turn::GiveUp(why.to_string())),
        })
    }
}

/// What goes into the DRAM at the destination, and what does not fit there.
///
/// # Errors
/// The engine does not say what is hot, or what is there.
fn split(engine: &Handle, pages: PageCount, dram: PageCount) -> Result<Split> {
    let order = hot_first(engine, pages, dram)?;
    let content = engine.content().map_err(|why| anyhow!("it cannot be told what the VM holds: {why}"))?;
    let mut holding = PageMap::empty(pages);
    add(&mut holding, &content)?;
    Ok(Split::new(&order, &holding, dram))
}

/// The chunks of the VM such that the hottest get the DRAM of the destination, which what comes first gets.
///
/// # Errors
/// The engine does not say.
pub fn hot_first(engine: &Handle, pages: PageCount, dram: PageCount) -> Result<Vec<ChunkIdx>> {
    let order = engine.chunk_order().map_err(|why| anyhow!("it cannot be told what is hot: {why}"))?;
    let order = order.into_dram(dram.chunks_floor());
    let mut all = order.clone();
    all.sort_unstable();
    ensure!(all.into_iter().eq(pages.chunks_ceil().iter()), "the engine knows of other chunks than the VM has");
    Ok(order)
}

fn look(engine: &Handle) -> Result<Look> {
    engine.look_for_writes().map_err(|why| anyhow!("it cannot be told what the VM writes: {why}"))
}

/// Adds what the engine says of pages.
fn add(map: &mut PageMap, found: &[(ChunkIdx, PageSet)]) -> Result<()> {
    for (chunk, pages) in found {
        let is_there = chunk.0 < map.pages().chunks_ceil().0 && map.valid(*chunk).contains_all(*pages);
        ensure!(is_there, "the engine knows of pages that the VM does not have");
        map.insert_in(*chunk, *pages);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
