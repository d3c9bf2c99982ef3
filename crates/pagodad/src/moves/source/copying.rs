//! Rounds of a move: what the engine is asked to look for and to copy, and what of that goes into the streams.
//!
//! A page is asked for at most once in a round, and a round ends only when every copy of it has gone into its stream. So no copy of
//! an earlier round comes behind a later one. When the link is lost, copies that were asked for before are dropped, since what is asked
//! for again may overtake them: they have the number of their connection.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_core::units::{Bytes, PAGE_SIZE, PageCount};
use pagoda_move::map::PageMap;
use pagoda_move::rounds::{IoEpoch, Next, Phase, Progress, Rounds, Settings, Step};
use pagoda_move::units::{ConnectionNo, Moment, RoundNo};
use pagoda_pager::handle::{Command, Content, Copied, CopyOrder, Handle, Look};

use super::input::Input;
use super::line::{Line, pages_of};

/// Copies that were asked for and have not gone into a stream, bytes: what a fast disk and a fast network hide of each other.
const ON_THE_WAY_MAX: u64 = 32 << 20;
/// How long direct I/O may take to end once the VM stands still. QEMU waits for it before it says so.
const DRAIN_MAX: Duration = Duration::from_millis(500);
const DRAIN_LOOK: Duration = Duration::from_millis(1);

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

/// See the module.
#[derive(Debug)]
pub struct Copying {
    engine: Arc<Handle>,
    inputs: Sender<Input>,
    rounds: Rounds,
    pages: PageCount,
    /// Where copies for a connection come from.
    copies: Option<(ConnectionNo, Sender<Copied>)>,
    /// Nothing was sent before this connection.
    first: ConnectionNo,
    /// Pages that were asked for and have not come.
    outstanding: u64,
    /// Bytes that were asked for and have not gone.
    on_the_way: u64,
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
        pages: PageCount,
        first: ConnectionNo,
        inputs: &Sender<Input>,
        now: Moment,
    ) -> Result<Copying> {
        engine.send(Command::Move(true));
        let look = look(engine)?;
        let protected_at = IoEpoch(look.protected_at);
        let in_order = pages.chunks_ceil().iter().collect();
        let mut rounds = Rounds::new(settings, pages, in_order, protected_at, None, now);
        rounds.set_oldest_io(IoEpoch(look.oldest_io));
        Ok(Copying {
            engine: Arc::clone(engine),
            inputs: inputs.clone(),
            rounds,
            pages,
            copies: None,
            first,
            outstanding: 0,
            on_the_way: 0,
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

    pub fn lost_link(&mut self) {
        self.copies = None;
        (self.outstanding, self.on_the_way, self.is_last_sent) = (0, 0, false);
        self.rounds.lost_link();
    }

    /// The destination has a round. Whether it has all.
    pub fn kept(&mut self, round: RoundNo) -> bool {
        self.rounds.kept(round);
        self.is_stopped && self.rounds.is_complete()
    }

    /// A copy has come. It goes into its stream.
    ///
    /// # Errors
    /// Pages cannot be read, and why.
    pub fn copied(&mut self, connection: ConnectionNo, copied: Copied, line: &Line) -> Result<()> {
        if self.copies.as_ref().is_none_or(|(current, _)| *current != connection) || line.no != connection {
            return Ok(());
        }
        let len = u64::from(copied.pages.run.len);
        let chunk = copied.pages.chunk;
        match &copied.content {
            Content::Failed(why) => bail!("pages of the VM cannot be read: {why}"),
            Content::Bytes(bytes) => ensure!(
                bytes.len() as u64 == len * PAGE_SIZE,
                "the engine has copied {} bytes of {len} pages",
                bytes.len()
            ),
            Content::Zeros => {}
        }
        ensure!(len <= self.outstanding, "the engine has copied pages twice");
        ensure!(chunk.0 < self.pages.chunks_ceil().0, "the engine has copied a chunk that the VM does not have");
        self.outstanding -= len;
        let is_fresh = connection == self.first && self.rounds.round() == RoundNo(0);
        line.send_pages(copied, is_fresh);
        Ok(())
    }

    /// Pages have gone into a stream.
    pub fn sent(&mut self, connection: ConnectionNo, bytes: u64, spared: u64) {
        if self.copies.as_ref().is_some_and(|(current, _)| *current == connection) {
            self.on_the_way = self.on_the_way.saturating_sub(bytes);
            self.rounds.spare(Bytes(spared));
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
            add(&mut written, &look)?;
            if IoEpoch(look.oldest_io) == IoEpoch::IDLE {
                break;
            }
            ensure!(Instant::now() < deadline, "direct I/O of the VM goes on although it stands still");
            thread::sleep(DRAIN_LOOK);
        }
        self.rounds.stopped(&written, now);
        self.is_stopped = true;
        Ok(())
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
            if self.on_the_way >= ON_THE_WAY_MAX {
                return Ok(Turn::Wait(None));
            }
            match self.rounds.next(now) {
                Next::Send(run) => {
                    let order = CopyOrder { pages: pages_of(run), to: self.copies_for(line)? };
                    self.outstanding += run.count().0;
                    self.on_the_way += run.count().bytes().0;
                    self.engine.send(Command::CopyOut(order));
                }
                Next::Wait(until) => self.wait_until = until,
                // What is on the way would come behind the stop: it is part of the round, for its rate too.
                Next::RoundEnd if self.outstanding > 0 || self.on_the_way > 0 => return Ok(Turn::Wait(None)),
                Next::RoundEnd => {
                    let round = self.rounds.end_round(now);
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

    /// After a fresh look. `None`: another round.
    fn decide(&mut self, now: Moment) -> Result<Option<Turn>> {
        let look = look(&self.engine)?;
        let protected_at = IoEpoch(look.protected_at);
        ensure!(protected_at >= self.protected_at, "the VM's clock of direct I/O goes backwards");
        self.protected_at = protected_at;
        let mut written = PageMap::empty(self.pages);
        add(&mut written, &look)?;
        self.rounds.written(&written, protected_at);
        self.rounds.set_oldest_io(IoEpoch(look.oldest_io));
        Ok(match self.rounds.decide(now) {
            // Writers are slowed by nobody yet.
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

    /// Where the engine puts copies for this connection. A thread hands them on.
    fn copies_for(&mut self, line: &Line) -> Result<Sender<Copied>> {
        if let Some((no, copies)) = &self.copies
            && *no == line.no
        {
            return Ok(copies.clone());
        }
        let (copies, copied) = channel();
        let (inputs, no) = (self.inputs.clone(), line.no);
        let hand_on = move || copied.into_iter().all(|copy| inputs.send(Input::Copied(no, copy)).is_ok());
        thread::Builder::new().name("move-copies".into()).spawn(hand_on).context("start a thread")?;
        self.copies = Some((no, copies.clone()));
        Ok(copies)
    }
}

fn look(engine: &Handle) -> Result<Look> {
    engine.look_for_writes().map_err(|why| anyhow!("it cannot be told what the VM writes: {why}"))
}

/// Adds what was written.
fn add(map: &mut PageMap, look: &Look) -> Result<()> {
    for (chunk, pages) in &look.written {
        let is_there = chunk.0 < map.pages().chunks_ceil().0 && map.valid(*chunk).contains_all(*pages);
        ensure!(is_there, "pages were written that the VM does not have");
        map.insert_in(*chunk, *pages);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
