//! Tests with real VMMs; `README.md` of this crate says what each needs and how to run one.

mod disk;
mod overcommit;
mod storm;
mod survival;
mod toy;
