//! What [`rmap`] needs of a Linux machine, and does not do itself: sockets, threads, locked memory, a disk, random numbers.
//!
//! [`net`] drives a client or a server over UDP or TCP. [`aside`] is a driver's end of a control plane that takes its time.
//! [`host`] and [`medium`] are for a server: memory that stays, the host's memory pressure, pages on a disk.

pub mod aside;
mod entropy;
pub mod host;
pub mod medium;
pub mod net;

pub use entropy::SystemEntropy;
