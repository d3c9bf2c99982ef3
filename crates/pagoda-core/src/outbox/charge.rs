//! What an outbox costs the pool, while its space changes and whatever its process says.
//!
//! A process that a hostile guest may have taken over says how much it uses. So an answer never raises the charge: what was
//! admitted bounds it. It falls only to what the process says it has let go of, once it keeps to the space that it is to have.

use crate::units::Bytes;

/// The space that an outbox is to have, and what the pool keeps for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    space: Bytes,
    charged: Bytes,
}

/// An outbox's process says this of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// The space that it keeps to.
    pub space: Bytes,
    pub used: Bytes,
    /// Of what is used, what goes when there is need.
    pub disposable: Bytes,
}

/// What no outbox that keeps to what it was given would say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    #[error("it says that its space is {said}, and it was never given more than {charged}")]
    Space { said: Bytes, charged: Bytes },
    #[error("it says that it uses {said}, and it was never given more than {charged}")]
    Used { said: Bytes, charged: Bytes },
    #[error("it says that {said} of the {used} that it uses were delivered")]
    Disposable { said: Bytes, used: Bytes },
}

impl Charge {
    /// Of an outbox that is made.
    pub fn new(space: Bytes) -> Charge {
        Charge { space, charged: space }
    }

    /// As it was written down; `None` if that contradicts itself.
    pub fn restored(space: Bytes, charged: Bytes) -> Option<Charge> {
        (space <= charged).then_some(Charge { space, charged })
    }

    /// What it is to have.
    pub fn space(&self) -> Bytes {
        self.space
    }

    /// What the pool keeps for it: never less than its space.
    pub fn charged(&self) -> Bytes {
        self.charged
    }

    /// While it is asked to have another space: the larger of both is charged.
    #[must_use]
    pub fn begin(self, space: Bytes) -> Charge {
        Charge { space, charged: self.charged.max(space) }
    }

    /// The change that made this of `before` was not written down, so its process was never asked.
    #[must_use]
    pub fn withdrawn(self, before: Charge) -> Charge {
        debug_assert!(before.charged <= self.charged);
        before
    }

    /// The process did not say that it keeps to the space that made this of `before`. It is to have what it had before, and may
    /// have taken the other one all the same: the larger of both stays charged until it says more.
    #[must_use]
    pub fn taken_back(self, before: Charge) -> Charge {
        debug_assert!(before.space <= self.charged);
        Charge { space: before.space, charged: self.charged }
    }

    /// After an answer of its process. One that still keeps to another space changes nothing.
    ///
    /// # Errors
    /// It says what cannot be; nothing of the answer is to be used.
    pub fn after(self, said: &Said) -> Result<Charge, Impossible> {
        let Charge { space, charged } = self;
        if said.space > charged {
            return Err(Impossible::Space { said: said.space, charged });
        }
        if said.used > charged {
            return Err(Impossible::Used { said: said.used, charged });
        }
        if said.disposable > said.used {
            return Err(Impossible::Disposable { said: said.disposable, used: said.used });
        }
        let keeps_to_it = said.space == space;
        Ok(if keeps_to_it { Charge { space, charged: space.max(said.used) } } else { self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    fn said(space: u64, used: u64) -> Said {
        Said { space: mib(space), used: mib(used), disposable: Bytes::ZERO }
    }

    #[test]
    fn memory_comes_back_as_it_is_let_go() {
        let shrinks = Charge::new(mib(64)).begin(mib(16));
        assert_eq!((shrinks.space(), shrinks.charged()), (mib(16), mib(64)));
        assert_eq!(
            shrinks.after(&said(64, 0)),
            Ok(shrinks),
            "it does not keep to the new space yet, and may fill the old one"
        );
        let drains = shrinks.after(&said(16, 40)).unwrap();
        assert_eq!(drains.charged(), mib(40));
        assert_eq!(drains.after(&said(16, 3)).unwrap().charged(), mib(16), "its space stays its own");
        assert_eq!(drains.begin(mib(32)).charged(), mib(40), "what it still holds is enough for that");
    }

    #[test]
    fn growth_is_charged_at_once() {
        let grows = Charge::new(mib(16)).begin(mib(64));
        assert_eq!(grows.charged(), mib(64));
        assert_eq!(grows.after(&said(16, 16)).unwrap().charged(), mib(64));
        assert_eq!(grows.withdrawn(Charge::new(mib(16))), Charge::new(mib(16)));
        let taken_back = grows.taken_back(Charge::new(mib(16)));
        assert_eq!((taken_back.space(), taken_back.charged()), (mib(16), mib(64)), "it may have heard of it");
        assert_eq!(taken_back.after(&said(64, 64)).unwrap().charged(), mib(64));
        assert_eq!(taken_back.after(&said(16, 20)).unwrap().charged(), mib(20));
    }

    #[test]
    fn what_cannot_be_is_not_used() {
        let charge = Charge::new(mib(64));
        let check = |said: Said, part: &str| {
            let problem = charge.after(&said).unwrap_err().to_string();
            assert!(problem.contains(part), "{problem}");
        };
        check(said(65, 0), "its space is 65 MiB");
        check(said(64, 65), "it uses 65 MiB");
        check(Said { space: Bytes(u64::MAX), used: Bytes(u64::MAX), disposable: Bytes(u64::MAX) }, "its space");
        check(Said { disposable: mib(2), ..said(64, 1) }, "were delivered");
        assert_eq!(Charge::restored(mib(2), mib(1)), None);
        assert_eq!(Charge::restored(mib(1), mib(2)).unwrap().begin(mib(4)), Charge::new(mib(4)));
    }

    /// Whatever it says, between what it is to have and what was admitted.
    #[test]
    fn no_answer_raises_a_charge_or_takes_it_below_the_space() {
        let mut chance = Chance::new(17);
        let mut charge = Charge::new(mib(8));
        let mut admitted = charge.charged();
        for _ in 0..100_000 {
            let size = |chance: &mut Chance| mib(chance.below(24));
            if chance.below(8) == 0 {
                let before = charge;
                charge = charge.begin(size(&mut chance));
                admitted = admitted.max(charge.space());
                if chance.below(4) == 0 {
                    charge = charge.taken_back(before);
                }
            }
            let said = Said { space: size(&mut chance), used: size(&mut chance), disposable: size(&mut chance) };
            let Ok(next) = charge.after(&said) else { continue };
            assert!(
                next.charged() <= charge.charged() && next.charged() >= next.space() && next.space() == charge.space()
            );
            assert!(next == charge || next.charged() >= said.used, "{said:?}");
            assert!(next.charged() <= admitted);
            charge = next;
        }
    }
}
