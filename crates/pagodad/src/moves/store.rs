//! Pages that come from another host, and which of them count.
//!
//! Data streams bring pages, each in a thread of its own. A page is stored only while the gate is open, by a stream of the newest
//! connection: both are looked at under the lock that whoever shuts the gate waits for. So no page is stored any more once
//! [`Store::shut`] has returned, and none of an earlier connection once a later one is known.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use anyhow::{Result, bail};
use pagoda_core::fault::{Located, Pages};
use pagoda_move::arrival::Arrival;
use pagoda_move::map::PageRun;
use pagoda_move::units::{AttemptId, ConnectionNo, RoundNo};
use pagoda_move::wire::{Codec, Data, RunKind};
use pagoda_pager::arriving::Arriving;

/// See the module.
#[derive(Debug)]
pub struct Store {
    pages: Arriving,
    arrival: Mutex<Arrival>,
    gate: RwLock<Gate>,
}

#[derive(Debug)]
struct Gate {
    is_open: bool,
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
    /// There is a later connection: the stream is of no use any more.
    Outdated,
}

impl Store {
    pub fn new(pages: Arriving, arrival: Arrival) -> Store {
        let gate = Gate { is_open: true, newest: ConnectionNo(0) };
        Store { pages, arrival: Mutex::new(arrival), gate: RwLock::new(gate) }
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
            // The VM stands still at its source and has all pages: what comes again is the same.
            Data::Run { .. } if !gate.is_open => Ok(Taken::In),
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
        match kind {
            RunKind::Content(Codec::Raw, content) => self.pages.store(at, content)?,
            RunKind::Zero | RunKind::Freed => self.pages.zero(at)?,
            RunKind::Content(Codec::Lz4, _) => bail!("pages are compressed, which was not agreed on"),
            RunKind::InImage { .. } => bail!("pages of an image, which was not agreed on"),
        }
        Ok(())
    }

    /// Stores nothing any more.
    pub fn close(&self) {
        self.gate.write().unwrap_or_else(PoisonError::into_inner).is_open = false;
    }

    /// Stores nothing any more, and says where every page is.
    ///
    /// # Errors
    /// The files cannot be brought in order.
    pub fn shut(&self) -> Result<Vec<Located>> {
        self.close();
        Ok(self.pages.finish()?)
    }
}
