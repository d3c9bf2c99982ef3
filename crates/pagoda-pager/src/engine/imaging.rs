//! What the loop does for the VM's image: it gives the machine events when the imager says that it is time, and reports.

use std::time::Instant;

use pagoda_core::fault::Event;

use super::Engine;
use super::imager::Turn;
use super::parts::EngineError;
use crate::handle::Notice;

impl Engine {
    /// Goes on with the image, one step at a time.
    pub(super) fn turn_image(&mut self) {
        if self.imager.is_idle() {
            return;
        }
        let begun = Instant::now();
        let turn = self.imager.turn(&mut self.paging);
        match turn {
            Turn::Nothing => {}
            Turn::AskClock => self.ask_clocks(),
            Turn::Freeze { has_parent } => {
                self.step(Event::Freeze { has_parent });
                self.imager.end_beginning(&mut self.paging);
            }
            Turn::Prepare => {
                self.step(Event::Prepare { on: true });
                self.imager.note_step(turn, begun, &self.paging);
            }
            Turn::Fill => {
                self.step(Event::Fill);
                self.imager.note_step(turn, begun, &self.paging);
            }
        }
        self.settle();
        let notice = self.imager.settle(&mut self.paging);
        self.report_image(notice);
        self.settle();
    }

    /// Executes `Action::LoseImages`: the image that lacks pages is lost.
    pub(super) fn lose_image(&mut self) {
        let why = match self.reporter.is_pinned() {
            true => "others may write the VM's memory unseen",
            false => "pages of the VM could not be read from swap",
        };
        let notice = self.imager.lose(why, &mut self.paging);
        self.report_image(notice);
    }

    /// Registers the memory of a VM that an earlier daemon served, and that may hold pages for an image.
    pub(super) fn arm_with_image(&mut self) -> Result<(), EngineError> {
        let Engine { paging, ring, imager, .. } = self;
        paging.arm(ring, |chunk| imager.missing_of(chunk))
    }

    /// Registers the memory of a VM that was unarmed. It held no page for an image: if one lacks pages, they may have changed.
    pub(super) fn arm_without_image(&mut self) -> Result<(), EngineError> {
        let notice = self.imager.lose("the VM's memory was written unseen", &mut self.paging);
        self.report_image(notice);
        self.arm_with_image()
    }

    /// The VM has ended: its image gets what it lacks before that goes. It waits for the tiers.
    pub(super) fn end_image(&mut self) {
        let notice = self.imager.end(&mut self.paging);
        self.report_image(notice);
    }

    pub(super) fn report_image(&self, notice: Option<Notice>) {
        match &notice {
            Some(Notice::ImageFilled(image)) => tracing::info!(vm = %self.name, %image, "the image has all pages"),
            Some(Notice::ImageLost(image, why)) => tracing::error!(vm = %self.name, %image, "the image is lost: {why}"),
            _ => {}
        }
        if let Some(notice) = notice {
            self.reporter.notify(notice);
        }
    }
}
