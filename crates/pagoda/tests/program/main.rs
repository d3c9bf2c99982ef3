//! The program `pagoda` as users run it.

mod cli;
mod daemon;
mod qemu;
mod server;
mod snapshot;
