//! Pagers that break a rule of images or of what is borrowed: the simulation has to notice each of them.

use pagoda_core::fault::{Action, OpId};

use crate::Sim;
use crate::image::{Change, Mistake};
use crate::pager::{Pager, range};
use crate::world::World;

/// Runs in which a mistake has to show.
const MISTAKE_SEEDS: u64 = 400;

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

/// The simulation notices a mover that breaks a rule.
#[test]
fn mistakes_with_moves_are_noticed() {
    for mistake in [Mistake::CopiesUnderIo, Mistake::ForgetsCopies, Mistake::ProtectsNothing, Mistake::WrongSource] {
        let noticed = (0..MISTAKE_SEEDS).find(|seed| {
            let seed = *seed;
            let run = std::panic::catch_unwind(|| {
                let mut sim = Sim::new(seed, seed % 2 == 0);
                sim.prepare_to_move();
                sim.weather.mistake = Some(mistake);
                let weather = sim.weather.clone();
                sim.pager.iter_mut().for_each(|pager| pager.weather = weather.clone());
                sim.run();
                sim.finish_move();
            });
            run.is_err()
        });
        assert!(noticed.is_some(), "{mistake:?} goes unnoticed");
    }
}

/// The simulation notices a pager that breaks a rule of images.
#[test]
fn mistakes_with_images_are_noticed() {
    for mistake in [
        Mistake::WritesInPlace,
        Mistake::FreesBlocks,
        Mistake::WrongSource,
        Mistake::ForgetsFrozen,
        Mistake::UsesChangedKeep,
        Mistake::UsesOldKeep,
        Mistake::FillsPunched,
        Mistake::PreservesLate,
        Mistake::ProtectsNothing,
        Mistake::MissesDirectIo,
        Mistake::KeepsSame(Change::Unprotect),
        Mistake::KeepsSame(Change::Map),
        Mistake::KeepsSame(Change::Copy),
        Mistake::KeepsSame(Change::Zero),
        Mistake::KeepsSame(Change::CopyBack),
        Mistake::KeepsSame(Change::Discard),
    ] {
        let noticed = (0..MISTAKE_SEEDS).find(|seed| {
            let seed = *seed;
            let run = std::panic::catch_unwind(|| {
                let mut sim = Sim::new(seed, seed % 2 == 0);
                sim.images = 1000;
                sim.pace.chaos = 5;
                sim.weather.mistake = Some(mistake);
                if matches!(mistake, Mistake::WritesInPlace | Mistake::FreesBlocks) {
                    // What is copied at once is not harmed by what becomes of the block.
                    (sim.weather.refers, sim.weather.moves) = (true, 0);
                }
                if matches!(mistake, Mistake::UsesChangedKeep | Mistake::UsesOldKeep | Mistake::KeepsSame(_)) {
                    sim.weather.fills = 1000;
                }
                if matches!(mistake, Mistake::KeepsSame(_)) {
                    (sim.weather.parents, sim.discards) = (1000, 300);
                }
                let weather = sim.weather.clone();
                sim.pager.iter_mut().for_each(|pager| pager.weather = weather.clone());
                sim.run();
            });
            run.is_err()
        });
        eprintln!("{mistake:?}: noticed by seed {noticed:?}");
        assert!(noticed.is_some(), "{mistake:?}");
    }
}

/// The simulation notices a pager that breaks a rule of borrowed chunks.
#[test]
fn mistakes_with_what_is_borrowed_are_noticed() {
    for mistake in [
        Mistake::MovesUnderIo,
        Mistake::FencesNothing,
        Mistake::CopiesBeforeFence,
        Mistake::OpensBeforeCharge,
        Mistake::LeavesOpen,
        Mistake::ForgetsPrivate,
        Mistake::LeavesCopies,
        Mistake::MovesLate,
    ] {
        let noticed = (0..MISTAKE_SEEDS).find(|seed| {
            let seed = *seed;
            let run = std::panic::catch_unwind(|| {
                let mut sim = Sim::new(seed, seed % 2 == 0);
                (sim.images, sim.recalls, sim.pace.chaos) = (100, 10, 5);
                sim.weather.mistake = Some(mistake);
                sim.weather.crash = sim.weather.crash.max(1);
                let weather = sim.weather.clone();
                sim.pager.iter_mut().for_each(|pager| pager.weather = weather.clone());
                sim.run();
            });
            run.is_err()
        });
        eprintln!("{mistake:?}: noticed by seed {noticed:?}");
        assert!(noticed.is_some(), "{mistake:?}");
    }
}
