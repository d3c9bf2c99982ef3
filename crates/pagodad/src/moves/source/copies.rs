//! Copies that the engine makes for a connection, on their way into its streams.
//!
//! Copies that were asked for before a connection was lost are dropped, since what is asked for again may overtake them: each has the
//! number of its connection.

use std::sync::mpsc::{Sender, channel};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use pagoda_core::units::{PAGE_SIZE, PageCount};
use pagoda_move::map::PageRun;
use pagoda_move::units::ConnectionNo;
use pagoda_pager::handle::{Command, Content, Copied, CopyOrder, Handle, Way};

use super::input::Input;
use super::line::{Line, pages_of};

/// The copies that one move has asked its engine for.
#[derive(Debug)]
pub struct Copies {
    inputs: Sender<Input>,
    pages: PageCount,
    /// Where the engine puts copies for a connection: those that nobody waits for, and those that are urgent. Threads hand them on.
    to: Option<(ConnectionNo, [Sender<Copied>; 2])>,
    /// Pages that were asked for and have not come.
    outstanding: u64,
    /// Bytes that were asked for and have not gone.
    on_the_way: u64,
}

impl Copies {
    /// Of a VM with so many pages. Each copy becomes an input.
    pub fn new(pages: PageCount, inputs: &Sender<Input>) -> Copies {
        Copies { inputs: inputs.clone(), pages, to: None, outstanding: 0, on_the_way: 0 }
    }

    /// Pages that were asked for have not come, or have not gone into a stream.
    pub const fn is_busy(&self) -> bool {
        self.outstanding > 0 || self.on_the_way > 0
    }

    /// Bytes that were asked for and have not gone into a stream.
    pub const fn on_the_way(&self) -> u64 {
        self.on_the_way
    }

    pub fn lost_link(&mut self) {
        self.to = None;
        (self.outstanding, self.on_the_way) = (0, 0);
    }

    /// Asks for a copy, before those that were asked for earlier if it is urgent.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn order(&mut self, engine: &Handle, line: &Line, run: PageRun, is_urgent: bool) -> Result<()> {
        self.order_by(engine, line, run, (Way::Send, is_urgent))
    }

    /// Has a copy made into the tier that is handed over. It becomes an input all the same, with content if the tier does not take it.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn order_into_tier(&mut self, engine: &Handle, line: &Line, run: PageRun) -> Result<()> {
        self.order_by(engine, line, run, (Way::Place, false))
    }

    fn order_by(&mut self, engine: &Handle, line: &Line, run: PageRun, (way, is_urgent): (Way, bool)) -> Result<()> {
        let order = CopyOrder { pages: pages_of(run), to: self.to(line, is_urgent)?, is_urgent, way };
        self.outstanding += run.count().0;
        self.on_the_way += run.count().bytes().0;
        engine.send(Command::CopyOut(order));
        Ok(())
    }

    /// Whether a copy that has come was asked for by this connection. If so, it counts as come.
    ///
    /// # Errors
    /// Pages cannot be read, and why.
    pub fn has_come(&mut self, connection: ConnectionNo, copied: &Copied, line: &Line) -> Result<bool> {
        if self.to.as_ref().is_none_or(|(current, _)| *current != connection) || line.no != connection {
            return Ok(false);
        }
        let len = u64::from(copied.pages.run.len);
        ensure!(len <= self.outstanding, "the engine has copied pages twice");
        self.outstanding -= len;
        match &copied.content {
            Content::Failed(why) => bail!("pages of the VM cannot be read: {why}"),
            Content::Bytes(bytes) => {
                let has = bytes.len() as u64;
                ensure!(has == len * PAGE_SIZE, "the engine has copied {has} bytes of {len} pages");
            }
            Content::Zeros | Content::HandedOver | Content::Placed => {}
        }
        let is_there = copied.pages.chunk.0 < self.pages.chunks_ceil().0;
        ensure!(is_there, "the engine has copied a chunk that the VM does not have");
        Ok(true)
    }

    /// Whether pages that have gone into a stream were asked for by this connection. If so, they count as gone.
    pub fn have_gone(&mut self, connection: ConnectionNo, bytes: u64) -> bool {
        let is_current = self.to.as_ref().is_some_and(|(current, _)| *current == connection);
        if is_current {
            self.on_the_way = self.on_the_way.saturating_sub(bytes);
        }
        is_current
    }

    fn to(&mut self, line: &Line, is_urgent: bool) -> Result<Sender<Copied>> {
        if self.to.as_ref().is_none_or(|(no, _)| *no != line.no) {
            let ways = [self.hand_on(line.no, Input::Copied)?, self.hand_on(line.no, Input::Demanded)?];
            self.to = Some((line.no, ways));
        }
        let (_, ways) = self.to.as_ref().expect("just made");
        Ok(ways[usize::from(is_urgent)].clone())
    }

    fn hand_on(&self, no: ConnectionNo, input: fn(ConnectionNo, Copied) -> Input) -> Result<Sender<Copied>> {
        let (to, copied) = channel();
        let inputs = self.inputs.clone();
        let hand_on = move || copied.into_iter().all(|copy| inputs.send(input(no, copy)).is_ok());
        thread::Builder::new().name("move-copies".into()).spawn(hand_on).context("start a thread")?;
        Ok(to)
    }
}
