//! The tail of a post-copy, at its destination: the VM runs here, and pages that it lacks are at its source.
//!
//! [`Arrivals`] has their content once it is here, and knows what threads wait for. [`TailDestination`] knows what the source was told of
//! that by this connection.

use std::sync::Arc;

use anyhow::Result;
use pagoda_core::bits::PageSet;
use pagoda_core::fault::Pages;
use pagoda_core::units::{ChunkIdx, PageCount};
use pagoda_move::arrival::{add_part, map_parts};
use pagoda_move::map::{PageMap, PageRun};
use pagoda_move::tail::TailDestination;
use pagoda_move::units::AttemptId;
use pagoda_move::wire::Control;
use pagoda_move::wire::control::MapPart;
use pagoda_pager::tier::source::Arrivals;

use crate::moves::sessions::LinkNo;

/// What a VM lacks that runs here, and what its source was told of that.
#[derive(Debug)]
pub struct Tail {
    attempt: AttemptId,
    tail: TailDestination,
    arrivals: Arc<Arrivals>,
    /// The link by which the source has this map of what is missing.
    greeted: Option<LinkNo>,
}

impl Tail {
    /// Of a VM with so many pages, whose engine serves it without those that are missing.
    ///
    /// # Errors
    /// The VM has not as many pages.
    pub fn new(attempt: AttemptId, pages: PageCount, arrivals: &Arc<Arrivals>) -> Result<Tail> {
        let mut missing = PageMap::empty(pages);
        add_part(&mut missing, &MapPart { chunks: arrivals.missing(), last: true })?;
        Ok(Tail { attempt, tail: TailDestination::new(missing), arrivals: Arc::clone(arrivals), greeted: None })
    }

    /// How many pages have not come yet.
    pub fn left(&self) -> PageCount {
        self.tail.missing().count()
    }

    /// Every page is here for good.
    pub fn is_whole(&self) -> bool {
        self.tail.is_whole() && self.arrivals.is_whole()
    }

    /// Pages are in their places for good.
    pub fn stored(&mut self, chunk: ChunkIdx, pages: PageSet) {
        pages.runs().for_each(|run| self.tail.stored(PageRun { chunk, run }));
    }

    /// What the source is to be told by this link now, in order: first what is missing, once; then what threads wait for, and what it
    /// may forget.
    pub fn messages(&mut self, link: LinkNo) -> Vec<Control> {
        let attempt = self.attempt;
        let mut messages = Vec::new();
        for Pages { chunk, run } in self.arrivals.take_dropped() {
            self.tail.discarded(PageRun { chunk, run });
        }
        if self.greeted != Some(link) {
            self.greeted = Some(link);
            self.arrivals.forget_demands();
            let parts = map_parts(self.tail.resume());
            messages.extend(parts.into_iter().map(|part| Control::Missing { attempt, part }));
        }
        for Pages { chunk, run } in self.arrivals.take_demands() {
            for page in (PageRun { chunk, run }).iter() {
                self.tail.fault(page);
            }
        }
        let demands = std::iter::from_fn(|| Some(self.tail.take_demand()).filter(|runs| !runs.is_empty()));
        messages.extend(demands.map(|runs| Control::Demand { attempt, runs }));
        let kept = std::iter::from_fn(|| Some(self.tail.take_kept()).filter(|runs| !runs.is_empty()));
        messages.extend(kept.map(|runs| Control::Kept { attempt, runs }));
        messages
    }
}
