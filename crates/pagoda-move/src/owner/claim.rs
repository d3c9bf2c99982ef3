//! The register that an arbiter keeps of an attempt, and the four questions that change it. The rules are in
//! `docs/protocol/move-arbiter.md`.

use crate::note::Offered;
use crate::units::{AttemptId, Generation, HostKey, RegisterId};

/// What a register holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    pub generation: Generation,
    pub owner: HostKey,
}

/// Which question is asked, and by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The source, before its grant. Only this makes a register that is not there.
    Begin,
    /// The destination, which has accepted.
    Run,
    /// The source, whose grant is not answered.
    TakeBack,
    /// The destination, which has refused.
    Refuse,
}

/// A question to the arbiter. It is answered with what the register has then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub register: RegisterId,
    pub attempt: AttemptId,
    pub source: HostKey,
    pub destination: HostKey,
    /// What the grant offers.
    pub offered: Generation,
    pub step: Step,
}

impl Claim {
    /// The question of the source, whose offer this is. None if the hosts have no arbiter.
    pub(super) fn of_source(me: HostKey, offered: Offered, step: Step) -> Option<Claim> {
        let Offered { attempt, peer, generation, register } = offered;
        let register = register?;
        Some(Claim { register, attempt, source: me, destination: peer, offered: generation, step })
    }

    /// The question of the destination.
    pub(super) fn of_destination(me: HostKey, offered: Offered, step: Step) -> Option<Claim> {
        let Offered { attempt, peer, generation, register } = offered;
        let register = register?;
        Some(Claim { register, attempt, source: peer, destination: me, offered: generation, step })
    }

    /// What the register has from now on, in one step, if it had this before. None: there is none, and none is made.
    #[must_use]
    pub fn apply(&self, before: Option<Registered>) -> Option<Registered> {
        match before {
            None => (self.step == Step::Begin).then(|| self.value()),
            Some(before) if before.generation < self.below() => Some(self.value()),
            Some(before) => Some(before),
        }
    }

    /// Whether a register of this attempt can hold that. Nobody who keeps to the protocol writes anything else.
    pub fn is_possible(&self, registered: Registered) -> bool {
        self.all().contains(&registered)
    }

    /// The three owners, in their order: the source, its destination, and the source again.
    fn all(&self) -> [Registered; 3] {
        let before = Generation(self.offered.0.saturating_sub(1));
        [
            Registered { generation: before, owner: self.source },
            Registered { generation: self.offered, owner: self.destination },
            Registered { generation: self.offered.next(), owner: self.source },
        ]
    }

    fn value(&self) -> Registered {
        let [begun, given, back] = self.all();
        match self.step {
            Step::Begin => begun,
            Step::Run => given,
            Step::TakeBack | Step::Refuse => back,
        }
    }

    /// The register changes if it has a generation below this one.
    fn below(&self) -> Generation {
        match self.step {
            Step::Begin => Generation(self.offered.0.saturating_sub(1)),
            Step::Run | Step::TakeBack => self.offered,
            Step::Refuse => self.offered.next(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: HostKey = HostKey([1; 32]);
    const DESTINATION: HostKey = HostKey([2; 32]);

    fn claim(step: Step) -> Claim {
        let register = RegisterId::of(9).unwrap();
        let (attempt, offered) = (AttemptId(7), Generation(5));
        Claim { register, attempt, source: SOURCE, destination: DESTINATION, offered, step }
    }

    fn registered(generation: u64, owner: HostKey) -> Option<Registered> {
        Some(Registered { generation: Generation(generation), owner })
    }

    #[test]
    fn whoever_is_first_has_the_vm() {
        let (begun, given, back) = (registered(4, SOURCE), registered(5, DESTINATION), registered(6, SOURCE));
        for (step, before, expected) in [
            (Step::Begin, None, begun),
            (Step::Begin, begun, begun),
            (Step::Begin, given, given),
            (Step::Run, begun, given),
            (Step::Run, given, given),
            (Step::Run, back, back),
            (Step::TakeBack, begun, back),
            (Step::TakeBack, given, given),
            (Step::TakeBack, back, back),
            (Step::Refuse, begun, back),
            (Step::Refuse, given, back),
            (Step::Refuse, back, back),
            // What was removed is not made again: nobody is named.
            (Step::Run, None, None),
            (Step::TakeBack, None, None),
            (Step::Refuse, None, None),
        ] {
            assert_eq!(claim(step).apply(before), expected, "{step:?} {before:?}");
        }
    }

    #[test]
    fn only_the_three_owners_are_possible() {
        let run = claim(Step::Run);
        for (generation, owner, is_possible) in [
            (4, SOURCE, true),
            (5, DESTINATION, true),
            (6, SOURCE, true),
            (4, DESTINATION, false),
            (5, SOURCE, false),
            (6, DESTINATION, false),
            (3, SOURCE, false),
            (7, SOURCE, false),
            (5, HostKey([3; 32]), false),
        ] {
            let registered = Registered { generation: Generation(generation), owner };
            assert_eq!(run.is_possible(registered), is_possible, "{registered:?}");
        }
    }
}
