//! A simulator of the policy: the daemon's code over scripted VMs, under virtual time.
//!
//! [`run`] takes a [`Scenario`] and gives a [`Recording`]. Each virtual second, settings change, VMs come and go, the
//! policy plans as the daemon lets it, and guests follow: balloons move, pages leave, working sets grow ([`guest`]). Nothing
//! reads a clock; the same scenario gives the same recording on every machine.
//!
//! What it is for: to see a policy's behaviour over hours before it meets a VM, to draw the paper's figures, and to hold
//! its promises under random load ([`record::Violations`]). What it is not: a prediction of a guest's speed. Faults cost a
//! fixed time, disks do not queue, and guests use their working sets evenly.

pub mod guest;
pub mod record;
pub mod scenario;
#[cfg(test)]
mod tests;
mod world;

pub use record::Recording;
pub use scenario::{BalloonScript, Boot, Change, ChangeKind, Hardware, Phase, Scenario, ScenarioError, VmScript};

/// Runs a scenario to its end.
///
/// # Errors
/// It cannot be run, or a change in it is refused.
pub fn run(scenario: &Scenario) -> Result<Recording, ScenarioError> {
    scenario.check()?;
    world::World::new(scenario)?.run()
}
