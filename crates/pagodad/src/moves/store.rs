//! Pages that come from another host, and which of them count.
//!
//! Data streams bring pages, each in a thread of its own. A page is stored only while the gate is open, by a stream of the newest
//! connection: both are looked at under the lock that whoever shuts the gate waits for. So no page is stored any more once
//! [`Store::shut`] has returned, and none of an earlier connection once a later one is known.
//!
//! If the VM runs here without all its pages, those that it lacks come next, each of which counts once ([`Arrivals`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use anyhow::{Context, Result, bail};
use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Located, Pages};
use pagoda_core::units::{ChunkIdx, PageCount};
use pagoda_move::arrival::Arrival;
use pagoda_move::map::PageRun;
use pagoda_move::units::{AttemptId, ConnectionNo, RoundNo};
use pagoda_move::wire::{Codec, Data, RunKind};
use pagoda_pager::arriving::Arriving;
use pagoda_pager::tier::source::Arrivals;

/// Where the pages of one attempt go, and whether they still count.
#[derive(Debug)]
pub struct Store {
    /// Until the VM runs here.
    pages: Option<Arriving>,
    arrival: Mutex<Arrival>,
    gate: RwLock<Gate>,
}

#[derive(Debug)]
struct Gate {
    is_open: bool,
    /// The VM runs here, and lacks pages.
    tail: Option<Arc<Arrivals>>,
    newest: ConnectionNo,
}

/// A data stream, as it has said of itself.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    pub attempt: AttemptId,
    pub connection: ConnectionNo,
    pub stream: u16,
    pub round: RoundNo,
}

/// What became of what a stream has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    In,
    /// All pages of this round are in their places.
    Round(RoundNo),
    /// These pages of a VM that runs here are in their places for good.
    Stored(ChunkIdx, PageSet),
    /// There is a later connection: the stream is of no use any more.
    Outdated,
}

impl Store {
    /// The store of a VM that is made now.
    pub fn new(pages: Arriving, arrival: Arrival) -> Store {
        let gate = Gate { is_open: true, tail: None, newest: ConnectionNo(0) };
        Store { pages: Some(pages), arrival: Mutex::new(arrival), gate: RwLock::new(gate) }
    }

    /// The store of a VM that runs here already.
    pub fn of_tail(arrivals: Arc<Arrivals>, arrival: Arrival) -> Store {
        let gate = Gate { is_open: false, tail: Some(arrivals), newest: ConnectionNo(0) };
        Store { pages: None, arrival: Mutex::new(arrival), gate: RwLock::new(gate) }
    }

    /// What has arrived but pages.
    pub fn arrival(&self) -> MutexGuard<'_, Arrival> {
        self.arrival.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection is known. Of earlier ones nothing is taken in any more.
    pub fn connect(&self, connection: ConnectionNo) {
        let mut gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        if connection > gate.newest {
            gate.newest = connection;
            self.arrival().connect();
        }
    }

    /// No later connection is known.
    pub fn is_newest(&self, connection: ConnectionNo) -> bool {
        self.gate.read().unwrap_or_else(PoisonError::into_inner).newest == connection
    }

    /// A stream of a connection begins.
    ///
    /// # Errors
    /// There is no such stream, or a later connection is known.
    pub fn open(&self, opened: Opened) -> Result<()> {
        self.connect(opened.connection);
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if opened.connection < gate.newest {
            bail!("there is a later connection");
        }
        Ok(self.arrival().open(opened.attempt, opened.stream, opened.round)?)
    }

    /// Takes in what a stream has brought. Gives the round that is whole now.
    ///
    /// # Errors
    /// It is what no source sends; a page cannot be stored.
    pub fn take(&self, opened: Opened, data: Data<'_>) -> Result<Taken> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        // What was in the sockets' buffers when its connection was lost. The source sends it again.
        if opened.connection < gate.newest {
            return Ok(Taken::Outdated);
        }
        match data {
            Data::Open { .. } => bail!("a stream is opened twice"),
            Data::Run { pages, kind } if !gate.is_open => match &gate.tail {
                Some(arrivals) if self.arrival().is_open(opened.stream) => take_in_tail(arrivals, pages, kind),
                // The VM stands still at its source: what comes again is the same. What it lacks here comes when it runs.
                _ => Ok(Taken::In),
            },
            Data::Run { pages, kind } => {
                // Not under the lock of what has arrived: the disk may be slow.
                let counts = self.arrival().counts(opened.stream, pages)?;
                if counts {
                    self.store(pages, kind)?;
                }
                Ok(Taken::In)
            }
            Data::RoundEnd { round } => {
                let whole = self.arrival().end_round(opened.stream, round)?;
                Ok(whole.map_or(Taken::In, Taken::Round))
            }
        }
    }

    fn store(&self, pages: PageRun, kind: RunKind<'_>) -> Result<()> {
        let at = Pages { chunk: pages.chunk, run: pages.run };
        let places = self.pages.as_ref().context("pages of a VM that runs here already")?;
        match kind {
            RunKind::Content(Codec::Raw, content) => places.store(at, content)?,
            RunKind::Zero | RunKind::Freed => places.zero(at)?,
            RunKind::Content(Codec::Lz4 | Codec::Zstd, _) => {
                bail!("compressed pages, which whoever receives them unpacks")
            }
            RunKind::InImage { .. } => bail!("pages of an image, which was not agreed on"),
        }
        Ok(())
    }

    /// How many pages are here of a VM that is made now: in DRAM, and in swap. Zeros are in neither.
    pub fn counts(&self) -> (PageCount, PageCount) {
        self.pages.as_ref().map(Arriving::counts).unwrap_or_default()
    }

    /// Stores nothing any more.
    pub fn close(&self) {
        let mut gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        (gate.is_open, gate.tail) = (false, None);
    }

    /// Stores nothing any more, and says where every page is. Copies of pages that are missing do not count.
    ///
    /// # Errors
    /// The files cannot be brought in order.
    pub fn shut(&self, missing: &[(ChunkIdx, PageSet)]) -> Result<Vec<Located>> {
        self.close();
        let places = self.pages.as_ref().context("the VM runs here already")?;
        Ok(places.finish_without(missing)?)
    }

    /// The VM's engine serves it, without the pages that these are to have.
    pub fn begin_tail(&self, arrivals: Arc<Arrivals>) {
        self.gate.write().unwrap_or_else(PoisonError::into_inner).tail = Some(arrivals);
    }
}

/// Pages that a VM lacks which runs here. Those that it has got, or had already, are not taken in.
fn take_in_tail(arrivals: &Arrivals, pages: PageRun, kind: RunKind<'_>) -> Result<Taken> {
    let at = Pages { chunk: pages.chunk, run: pages.run };
    let stored = match kind {
        RunKind::Content(Codec::Raw, content) => arrivals.put(at, content)?,
        RunKind::Zero | RunKind::Freed => arrivals.put_zeros(at)?,
        RunKind::Content(Codec::Lz4 | Codec::Zstd, _) => bail!("compressed pages, which whoever receives them unpacks"),
        RunKind::InImage { .. } => bail!("pages of an image, which was not agreed on"),
    };
    Ok(Taken::Stored(pages.chunk, stored))
}
