//! `pagoda pool`: memory that machines lend each other. No daemon takes part; the servers are a program of their own.

mod drain;
mod keys;
pub mod list;
mod options;
mod top;

use anyhow::Result;

use self::options::Key;
pub use self::options::Pool;
use crate::output::Format;
use crate::server;

pub fn run(command: Pool, format: Format) -> Result<()> {
    match command {
        Pool::Try(_) | Pool::Serve(_) => server::become_server(),
        Pool::Ls { pool_dir } => list::run(&pool_dir, format),
        Pool::Top(options) => top::run(&options, format),
        Pool::Drain(options) => drain::run(&options, format),
        Pool::Key(Key::Init { dir }) => keys::init(&dir.dir, format),
        Pool::Key(Key::Add { dir, key, name, admin }) => keys::add(&dir.dir, &key, &name, admin),
        Pool::Key(Key::Rm { dir, key }) => keys::remove(&dir.dir, &key),
        Pool::Key(Key::Ls { dir }) => keys::list(&dir.dir, format),
    }
}
