//! Tables of decisions, and a simulation that compares with both fixed choices.

mod decisions;
mod simulation;
