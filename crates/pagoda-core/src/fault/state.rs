//! The parts of a machine's state, each with the methods that keep it right. None of them knows the machine; what the machine
//! does with each stands in the file of that name beside this one.

pub mod background;
pub mod borrow;
pub mod cold;
pub mod curve;
pub mod image;
pub mod predictor;
pub mod prefetch;
pub mod share;
pub mod watch;
