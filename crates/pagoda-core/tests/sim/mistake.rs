//! What a pager does that breaks a rule of images.

use pagoda_core::fault::{Action, OpId};

use crate::image::{Change, Mistake};
use crate::pager::{Pager, range};
use crate::world::World;

impl Pager {
    /// A mistaken pager does not see that pages change in one way.
    pub fn mistake_change(&mut self, action: Action) {
        let Some(Mistake::KeepsSame(mistaken)) = self.weather.mistake else { return };
        let (change, pages) = match action {
            Action::Unprotect { pages } => (Change::Unprotect, pages),
            Action::Map { pages, protect: false } => (Change::Map, pages),
            Action::Copy { pages, protect: false, .. } => (Change::Copy, pages),
            Action::Zero { pages } => (Change::Zero, pages),
            Action::CopyBack { pages } => (Change::CopyBack, pages),
            Action::RamPunch { pages } | Action::SwapPunch { pages } => (Change::Discard, pages),
            _ => return,
        };
        if change == mistaken {
            self.mistaken.extend(range(pages));
        }
    }

    /// A pager that takes what was read for an image without asking the machine.
    pub fn mistake_keep(&self, op: OpId, pages: &[usize], begun: usize, world: &mut World) {
        let is_newest = begun == world.begun;
        for page in pages {
            let Some(&content) = self.buffers[&op.0].get(page) else { continue };
            match self.weather.mistake {
                Some(Mistake::UsesChangedKeep) if is_newest => world.mistake_copy(*page, content),
                Some(Mistake::UsesOldKeep) if !is_newest && world.is_frozen(*page) => {
                    world.preserve(*page, content, false);
                }
                _ => {}
            }
        }
    }
}
