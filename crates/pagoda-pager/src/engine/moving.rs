//! What the loop does for a move of the VM: away from here, and to here.

use std::sync::mpsc::Sender;
use std::time::Instant;

use pagoda_core::fault::{Event, Located};
use pagoda_core::units::PageCount;

use super::Engine;
use super::mover::{Awaited, Turn};
use super::parts::EngineError;

impl Engine {
    /// The VM begins to move away, or does no more.
    pub(super) fn set_moving(&mut self, on: bool) {
        if on && !self.imager.is_idle() {
            // Whoever asks for a look is told that the VM does not move.
            return tracing::error!(vm = %self.name, "it does not move while it holds memory for a snapshot");
        }
        if on {
            // What is known to be the same as in it is not any more.
            self.imager.follow(false, &mut self.paging);
        }
        self.mover.switch(on, &mut self.paging);
        self.settle();
    }

    /// Goes on with a move away, one step at a time.
    pub(super) fn turn_move(&mut self) {
        if !self.mover.is_on() {
            return;
        }
        let begun = Instant::now();
        match self.mover.turn(&self.paging) {
            Turn::Nothing => return,
            Turn::Protect => {
                self.step(Event::Prepare { on: true });
                self.mover.note_step(begun);
            }
            Turn::Look => {
                self.step(Event::Look);
                if self.mover.answer_look(&mut self.paging) {
                    // What has ended counts until the agent has looked.
                    self.ask_clocks();
                }
            }
            Turn::Copy(pages) => {
                self.step(Event::CopyOut { pages });
                self.mover.note_step(begun);
            }
        }
        self.settle();
    }

    pub(super) fn set_limit(&mut self, limit: PageCount) {
        match &mut self.arrival {
            Some(awaited) => awaited.limit = limit,
            None => self.apply(Event::SetLimit { limit }),
        }
    }

    /// All pages of the VM are in their places, except for those that the tier of its source gets later.
    pub(super) fn arrive(&mut self, found: Vec<Located>, asker: Sender<Result<(), String>>) {
        let Some(Awaited { limit }) = self.arrival.take() else {
            let _ = asker.send(Err("no pages of this VM are awaited".to_owned()));
            return;
        };
        let begun = self.begin_with(found, limit).map_err(|error| error.to_string());
        if begun.is_err() {
            self.arrival = Some(Awaited { limit });
        }
        let _ = asker.send(begun);
    }

    fn begin_with(&mut self, mut found: Vec<Located>, limit: PageCount) -> Result<(), EngineError> {
        self.paging.expect_missing(&mut found)?;
        let is_home = found.iter().all(|located| located.swap.is_empty());
        // All of it is in DRAM and may stay there: the kernel can go on to serve it.
        if !is_home || limit < self.paging.space().chunks().pages() {
            self.paging.expect_pages(found);
            self.arm_with_image()?;
            let restarted = self.restart_sample();
            self.or_halt(restarted);
        }
        // Before anything is planned: with a cap of the whole VM it would be disarmed again.
        self.apply(Event::SetLimit { limit });
        self.paging.await_pages(false);
        self.paging.begin_to_page();
        self.settle();
        Ok(())
    }
}
