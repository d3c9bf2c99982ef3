//! The program `pagoda` as users run it.

mod cli;
mod clone;
mod daemon;
mod moved;
mod qemu;
mod server;
mod snapshot;
