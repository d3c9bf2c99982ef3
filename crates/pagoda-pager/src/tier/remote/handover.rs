//! What the daemon and a VM's remote tier agree on while the VM moves between hosts that use the same pool.
//!
//! The daemon says how the VM stands to its space ([`Standing`]), and the tier follows at its next turn. The tier says when it is still:
//! it is held, and no write of it can land any more. `docs/decisions/2026-11-29-remote-tier-moves.md` has the order of a move.
//!
//! If nobody takes a tier over that is away, threads that need a page of it wait. Nothing is lost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pagoda_core::bits::PageSet;
use pagoda_core::units::ChunkIdx;

use super::opened::Opened;

/// How a VM stands to the space of its remote tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The VM owns the space, and may change it.
    Owner,
    /// The VM owns the space, and nothing in it changes: no page is written, no slab is given back.
    Held,
    /// Another host may own it. Nothing is asked of it: whoever needs a page waits.
    Away,
    /// Another host owns it, and changes nothing. It is read only.
    Reader,
}

/// Why a tier cannot be let go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotStill {
    /// What is in it may change.
    #[error("its remote tier is not held")]
    Free,
    /// A write may still land.
    #[error("writes to its remote tier have not ended")]
    Writes,
}

#[derive(Debug)]
struct State {
    standing: Standing,
    is_still: bool,
    /// Another host has been told what is there.
    is_named: bool,
    /// The space that was opened anew, as the owner, and that the tier has not taken yet.
    opened: Option<Opened>,
    /// Pages that the tier is to have, by chunk.
    pages: Option<Vec<(ChunkIdx, PageSet)>>,
    /// How often the space was given to another host.
    losses: u64,
}

/// How the tier has to stand from now on.
#[derive(Debug)]
pub(super) struct Followed {
    pub standing: Standing,
    /// The space as it was opened anew, which replaces the one before.
    pub opened: Option<Opened>,
    /// Another host has been told what is there.
    pub is_named: bool,
}

/// See the module. Clones are of the same tier.
#[derive(Clone, Debug)]
pub struct Handover(Arc<Mutex<State>>);

/// A [`Handover`] that does not keep its tier: see [`Handover::downgrade`].
#[derive(Clone, Debug)]
pub struct WeakHandover(Weak<Mutex<State>>);

impl WeakHandover {
    /// `None`: the tier's engine has ended.
    pub fn upgrade(&self) -> Option<Handover> {
        self.0.upgrade().map(Handover)
    }
}

impl Handover {
    /// The handover of a tier that stands so.
    pub fn new(standing: Standing) -> Handover {
        let state = State { standing, is_still: false, is_named: false, opened: None, pages: None, losses: 0 };
        Handover(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that does not keep it: as long as the tier lives, it can be had again.
    pub fn downgrade(&self) -> WeakHandover {
        WeakHandover(Arc::downgrade(&self.0))
    }

    /// How the VM stands to its space.
    pub fn standing(&self) -> Standing {
        self.state().standing
    }

    /// From now on nothing in the space changes. `false`: the space is not the VM's.
    pub fn hold(&self) -> bool {
        let mut state = self.state();
        if state.standing == Standing::Owner {
            (state.standing, state.is_still) = (Standing::Held, false);
        }
        state.standing == Standing::Held
    }

    /// Pages come and go again, if the tier was only held. `false`: it stays as it is, and has to be taken over. So does one of which another
    /// host knows what was there: that host must not take it for its own any more before something changes.
    pub fn end_hold(&self) -> bool {
        let mut state = self.state();
        if state.standing == Standing::Held && !state.is_named {
            (state.standing, state.is_still) = (Standing::Owner, false);
        }
        state.standing == Standing::Owner
    }

    /// Another host is told now which pages are there.
    pub fn name_pages(&self) {
        self.state().is_named = true;
    }

    /// It is held, and no write can land any more.
    pub fn is_still(&self) -> bool {
        self.state().is_still
    }

    /// Lets go of the space, before another host may get it. It stays so until somebody takes it over.
    ///
    /// # Errors
    /// Something in it may still change: nobody else may get it.
    pub fn let_go(&self) -> Result<(), NotStill> {
        let mut state = self.state();
        match state.standing {
            Standing::Away => Ok(()),
            Standing::Held if state.is_still => {
                (state.standing, state.is_still) = (Standing::Away, false);
                state.losses += 1;
                Ok(())
            }
            Standing::Held => Err(NotStill::Writes),
            Standing::Owner | Standing::Reader => Err(NotStill::Free),
        }
    }

    /// Another host has taken the space over. A reader reads on.
    pub fn lose(&self) {
        let mut state = self.state();
        state.losses += 1;
        if state.standing != Standing::Reader {
            (state.standing, state.is_still, state.opened) = (Standing::Away, false, None);
        }
    }

    /// It is about to be taken over: nothing is read any more that another host may have changed.
    pub fn read_no_more(&self) {
        let mut state = self.state();
        if state.standing == Standing::Reader {
            state.standing = Standing::Away;
        }
    }

    /// How often the space was given to another host. Whoever takes it over asks before it looks whether it may.
    pub fn losses(&self) -> u64 {
        self.state().losses
    }

    /// It was opened as the owner, by a take-over that began after so many losses: what was opened before is of no use any more. False if
    /// the space was given away since.
    #[must_use]
    pub fn take_over(&self, opened: Opened, losses: u64) -> bool {
        let mut state = self.state();
        if state.losses != losses {
            return false;
        }
        (state.standing, state.opened) = (Standing::Owner, Some(opened));
        (state.is_still, state.is_named) = (false, false);
        true
    }

    /// The pages that a tier that comes from another host has, by chunk. It takes them in when it is asked next where pages are.
    pub fn set_pages(&self, pages: Vec<(ChunkIdx, PageSet)>) {
        self.state().pages = Some(pages);
    }

    /// For the tier, which says whether a write of it can land.
    pub(super) fn follow(&self, has_writes: bool) -> Followed {
        let mut state = self.state();
        // One that is opened anew has no write under way, and is not held.
        state.is_still = state.standing == Standing::Held && !has_writes && state.opened.is_none();
        Followed { standing: state.standing, opened: state.opened.take(), is_named: state.is_named }
    }

    /// For the tier: see [`Handover::set_pages`]. Given once.
    pub(super) fn take_pages(&self) -> Option<Vec<(ChunkIdx, PageSet)>> {
        self.state().pages.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_lets_go_of_what_may_change() {
        let handover = Handover::new(Standing::Owner);
        assert_eq!(handover.let_go(), Err(NotStill::Free));
        assert!(handover.hold() && !handover.is_still());
        assert_eq!(handover.let_go(), Err(NotStill::Writes), "the tier has said nothing yet");
        assert_eq!(handover.follow(true).standing, Standing::Held);
        assert_eq!(handover.let_go(), Err(NotStill::Writes));
        handover.follow(false);
        assert!(handover.is_still());
        assert!(handover.end_hold() && !handover.is_still());
        assert_eq!(handover.let_go(), Err(NotStill::Free));
        // Held again: what was said before does not count.
        assert!(handover.hold());
        assert_eq!(handover.let_go(), Err(NotStill::Writes));
        handover.follow(false);
        // Another host knows what is there: nothing changes before that host cannot have it any more.
        handover.name_pages();
        assert!(!handover.end_hold() && handover.standing() == Standing::Held && handover.is_still());
        assert_eq!((handover.let_go(), handover.standing()), (Ok(()), Standing::Away));
        // It does not come back by itself.
        assert!(!handover.end_hold() && !handover.hold());
        assert_eq!((handover.let_go(), handover.follow(false).standing), (Ok(()), Standing::Away));
        let taken = Handover::new(Standing::Owner);
        taken.lose();
        assert_eq!(taken.standing(), Standing::Away);
        // A take-over that began before counts for nothing.
        assert_eq!((handover.losses(), taken.losses()), (1, 1));
    }

    #[test]
    fn a_reader_holds_nothing_and_gives_nothing_away() {
        let handover = Handover::new(Standing::Reader);
        assert!(!handover.hold());
        handover.follow(false);
        assert_eq!((handover.let_go(), handover.standing()), (Err(NotStill::Free), Standing::Reader));
        handover.lose();
        assert_eq!(handover.standing(), Standing::Reader);
        handover.read_no_more();
        assert_eq!(handover.standing(), Standing::Away);
        handover.set_pages(vec![(ChunkIdx(1), PageSet::FULL)]);
        assert_eq!(handover.take_pages(), Some(vec![(ChunkIdx(1), PageSet::FULL)]));
        assert_eq!(handover.take_pages(), None);
    }
}
