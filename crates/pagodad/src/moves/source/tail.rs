//! The tail of a post-copy, at its source: the VM runs at its destination, and pages that it lacks are still here.
//!
//! What a thread of the guest waits for goes first, by a stream of its own; then the rest, hot chunks first. QEMU needs pages already
//! when it loads its devices, so what is asked for goes as soon as the state does; the rest when the VM runs. Nobody writes these pages
//! any more, and the destination takes each of them in once. So their copies may go in any order, by any stream.
//!
//! Nothing is removed here before the destination has all of it: its engine and QEMU stay until it says so.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::Result;
use pagoda_api::in_full;
use pagoda_core::units::{ChunkIdx, PageCount};
use pagoda_move::arrival::add_part;
use pagoda_move::map::{PageMap, PageRun};
use pagoda_move::rounds::Pace;
use pagoda_move::tail::TailSource;
use pagoda_move::units::{ConnectionNo, Moment};
use pagoda_move::wire::control::MapPart;
use pagoda_pager::handle::{Command, Copied, Handle};

use super::copies::Copies;
use super::input::Input;
use super::line::Line;

/// Pages on their way beyond which nothing is sent that nobody waits for. What is asked for next waits behind them: 17 ms at 1 Gbit/s.
/// Less would not fill a faster link.
const PUSHED_MAX: PageCount = PageCount(512);
/// The same for what threads wait for. A guest has fewer threads.
const DEMANDED_MAX: PageCount = PageCount(1 << 14);

/// Until pages that could not be read are tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// What the destination lacks, and what of it is on its way.
#[derive(Debug)]
pub struct Tail {
    engine: Arc<Handle>,
    tail: TailSource,
    copies: Copies,
    /// What the destination lacks, as far as it has said so by this connection.
    map: PageMap,
    pace: Pace,
    /// Why pages could not be read, and when that is tried again.
    trouble: Option<(String, Moment)>,
    /// Bytes of pages that were given to a stream.
    sent: u64,
}

impl Tail {
    /// `missing`: what the destination lacks. None after a restart: it says so. `pace`: of what nobody waits for.
    pub fn new(
        engine: Arc<Handle>,
        pages: PageCount,
        missing: Option<PageMap>,
        hot_first: Vec<ChunkIdx>,
        pace: Pace,
        inputs: &Sender<Input>,
    ) -> Tail {
        // A daemon that was started again has an engine that knows of no move. Nobody but the tail has work for it.
        engine.send(Command::Move(true));
        engine.send(Command::HurryMove(true));
        let tail = match missing {
            Some(missing) => TailSource::new(missing, hot_first),
            None => TailSource::recover(pages, hot_first),
        };
        Tail {
            engine,
            tail,
            copies: Copies::new(pages, inputs),
            map: PageMap::empty(pages),
            pace,
            trouble: None,
            sent: 0,
        }
    }

    /// Pages that the destination does not have for good.
    pub fn left(&self) -> PageCount {
        self.tail.held().count()
    }

    /// Bytes of pages that were sent.
    pub const fn sent_bytes(&self) -> u64 {
        self.sent
    }

    pub fn lost_link(&mut self) {
        self.copies.lost_link();
        self.tail.lost_link();
        self.map.take();
    }

    /// Threads at the destination wait for these.
    pub fn demand(&mut self, runs: &[PageRun]) {
        runs.iter().for_each(|run| self.tail.demand(*run));
    }

    /// The destination has these for good.
    pub fn kept(&mut self, runs: &[PageRun]) {
        self.tail.kept(runs);
    }

    /// A part of the destination's map of what it lacks.
    ///
    /// # Errors
    /// It has pages that the VM does not have.
    pub fn missing(&mut self, part: &MapPart) -> Result<()> {
        add_part(&mut self.map, part)?;
        if part.last {
            let map = self.map.take();
            self.tail.receive_missing(&map);
        }
        Ok(())
    }

    /// A copy has come. It goes into its stream. What cannot be read is tried again: a thread may wait for it.
    pub fn copied(&mut self, connection: ConnectionNo, copied: Copied, is_demanded: bool, line: &Line, now: Moment) {
        let run = PageRun { chunk: copied.pages.chunk, run: copied.pages.run };
        match self.copies.has_come(connection, &copied, line) {
            Ok(true) => {
                self.sent += run.count().bytes().0;
                line.send_tail(copied, is_demanded);
            }
            Ok(false) => {}
            Err(error) => {
                self.tail.put_back(run);
                if is_demanded {
                    self.tail.demand(run);
                }
                self.note_trouble(&error, now);
            }
        }
    }

    fn note_trouble(&mut self, error: &anyhow::Error, now: Moment) {
        let why = in_full(error.as_ref());
        tracing::warn!("pages that a VM lacks at its destination, tried again: {why}");
        self.trouble = Some((why, now + AGAIN));
    }

    /// Why pages do not go that could, if that is so.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_ref().map(|(why, _)| why.as_str())
    }

    /// Asks for copies, as many as may be on their way. Before the VM runs there, only of what is asked for. When there is more to be
    /// done, if that is known.
    pub fn pump(&mut self, line: &Line, runs_there: bool, now: Moment) -> Option<Moment> {
        if let Some(until) = self.trouble.as_ref().map(|(_, until)| *until) {
            if now < until {
                return Some(until);
            }
            self.trouble = None;
        }
        while self.tail.on_the_way() < DEMANDED_MAX {
            // What a thread waits for waits for no cap.
            let demanded = self.tail.take_demanded();
            let is_urgent = demanded.is_some();
            if !is_urgent && (!runs_there || self.tail.on_the_way() >= PUSHED_MAX) {
                return None;
            }
            if let Some(until) = self.pace.wait_until(now).filter(|_| !is_urgent) {
                return Some(until);
            }
            let run = demanded.or_else(|| self.tail.take_pushed())?;
            self.pace.spend(now, run.count().bytes());
            if let Err(error) = self.copies.order(&self.engine, line, run, is_urgent) {
                self.tail.put_back(run);
                self.note_trouble(&error, now);
            }
        }
        None
    }
}
