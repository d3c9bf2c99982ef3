//! A simulator of the policy: the daemon's code over scripted VMs, under virtual time.
//!
//! [`run`] takes a [`Scenario`] and gives a [`Recording`]. Settings change and VMs come and go by the second. Rounds are those
//! of the daemon ([`crate::policy::round`]), as often as the daemon makes them, and guests follow in steps of a tenth of a
//! second: balloons move, pages leave, working sets grow ([`guest`]). Nothing reads a clock; the same scenario gives the same
//! recording on every machine. [`replay`] makes rounds whose input was recorded elsewhere.
//!
//! What it is for: to see a policy's behaviour over hours before it meets a VM, to draw the paper's figures, and to hold
//! its promises under random load ([`record::Violations`]). What it is not: a prediction of a guest's speed. Faults cost a
//! fixed time, disks do not queue, and guests use their working sets evenly.

pub mod guest;
mod host;
pub mod record;
pub mod replay;
pub mod scenario;
#[cfg(test)]
mod tests;
mod vm;
mod world;

pub use record::Recording;
pub use scenario::{BalloonScript, Boot, Change, ChangeKind, Hardware, Phase, Scenario, ScenarioError, VmScript};

/// Runs a scenario to its end.
///
/// # Errors
/// It cannot be run, or a change in it is refused.
pub fn run(scenario: &Scenario) -> Result<Recording, ScenarioError> {
    scenario.check()?;
    world::World::new(scenario, None)?.run()
}

/// As [`run`], and shows each round to an observer.
///
/// # Errors
/// As [`run`].
pub fn run_seen(scenario: &Scenario, observer: &mut dyn replay::Observer) -> Result<Recording, ScenarioError> {
    scenario.check()?;
    world::World::new(scenario, Some(observer))?.run()
}
