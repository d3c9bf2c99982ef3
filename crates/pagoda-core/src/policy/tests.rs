//! The policy as a whole: tables of plans, and random VMs and events with invariants after every plan.

mod plans;
mod random;
