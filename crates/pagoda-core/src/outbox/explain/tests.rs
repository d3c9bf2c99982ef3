//! The explanations as an operator reads them, for known situations.

use super::*;
use crate::outbox::control::{SelfTuning, Sizer};
use crate::outbox::profile::Profiler;
use crate::outbox::simulate::run;
use crate::outbox::simulate::scenario::{BASE, Load, Phase, Scenario, mean_slo, settings, standard};
use crate::outbox::units::Rate;
use crate::policy::VmId;
use crate::policy::explain::render;

fn text(load: Load, cause: Cause, host: &Yielded) -> String {
    struct Last(SelfTuning, Option<Decision>);
    impl Sizer for Last {
        fn size(&mut self, profile: &Profiler, space: Bytes) -> Decision {
            let decision = self.0.size(profile, space);
            self.1 = Some(decision.clone());
            decision
        }
    }
    let scenario = Scenario { phases: vec![Phase { name: "one", periods: 15, load }], ..standard(mean_slo(), 1) };
    let mut last = Last(SelfTuning::new(scenario.settings), None);
    run(&scenario, 1, &mut last);
    let allotment = Allotment { id: VmId(1), space: Bytes::from_mib(100), cause, draining: Bytes::from_mib(7) };
    render(&explain(&settings(mean_slo()), &last.1.unwrap(), &allotment, host))
}

const CALM: Yielded = Yielded { pool: Bytes::from_gib(1), withheld: Bytes::ZERO, left: Bytes::ZERO, is_stuck: false };

#[test]
fn every_reason_is_said() {
    let check = |text: &str, parts: &[&str]| {
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    };
    check(
        &text(BASE, Cause::Wanted, &CALM),
        &["100 MiB  all it wants", "7 MiB  held beyond", "mean 4.6s", "feasible:", "memory helps", "off by"],
    );
    let short = Yielded { withheld: Bytes::from_mib(50), left: Bytes::from_mib(3), is_stuck: true, ..CALM };
    let slow = Load { drain: Rate(16_000_000), ..BASE };
    check(
        &text(slow, Cause::Shared { excess: 0.25 }, &short),
        &[
            "25 % above",
            "infeasible: no size keeps mean 4.6s",
            "faster than they can be done",
            "a bandwidth of",
            "3 MiB still lacking",
            "stand still",
        ],
    );
    let busy = Load { interference: 1.8, ..BASE };
    check(
        &text(busy, Cause::WaitsForDrain, &CALM),
        &["computing 1.", "times as fast would", "when the outboxes of others have drained"],
    );
    let idle = Load { arrivals_per_s: 0.001, ..BASE };
    check(
        &text(idle, Cause::PartOfMin, &CALM),
        &["kept as it is until more is known", "too few jobs", "its part of them"],
    );
}
