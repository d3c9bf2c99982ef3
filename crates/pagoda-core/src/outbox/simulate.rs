//! A simulator of outboxes: the daemon's profiler, estimator, controllers and orchestrator, and a model of
//! back-pressure, over simulated jobs and networks, under virtual time, from a seed.
//!
//! The VM of [`plant`] does not know the model: its jobs compute in small steps, write in pieces, wait by
//! [`super::backpressure`], and its network drains in small steps. [`scenario`] has the standard scenario and a harsher
//! one; [`run()`] drives VMs through phases, and [`judge`] says how the promises were kept.
//!
//! What it is not: a measurement. Guests compute at constant speed but for the interference of the scenario, networks
//! have one speed in a phase, and readers acknowledge at once.

pub mod judge;
pub mod plant;
pub mod run;
pub mod scenario;
#[cfg(test)]
mod tests;

pub use run::{PeriodRecord, PoolRun, Tenant, run, run_pool};
pub use scenario::{Phase, Scenario};
