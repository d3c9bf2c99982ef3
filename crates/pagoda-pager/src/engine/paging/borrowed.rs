//! What a VM borrows, and what waits to become its own.

use std::collections::VecDeque;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::OpId;
use pagoda_core::units::ChunkIdx;

use crate::loan::Loan;

/// A move under way.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    pub op: OpId,
    pub chunk: ChunkIdx,
    /// Pages that the RAM file has of it.
    pub kept: PageSet,
    pub order: u64,
}

/// What the VM borrows, and what is done about it.
#[derive(Debug)]
pub struct Borrow {
    pub loan: Loan,
    /// Chunks that wait for their move.
    pub waiting: VecDeque<(OpId, ChunkIdx)>,
    pub moving: Option<Move>,
}

impl Borrow {
    pub fn new(loan: Loan) -> Borrow {
        Borrow { loan, waiting: VecDeque::new(), moving: None }
    }
}
