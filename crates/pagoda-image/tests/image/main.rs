//! Images as the daemon, the engine and a restore see them, on a real file system.

mod chain;
mod crash;
mod disk;
mod export;
mod files;
mod golden;
mod hostile;
mod touched;
mod vm;
