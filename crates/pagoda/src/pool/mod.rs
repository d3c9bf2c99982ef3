//! `pagoda pool`: memory that machines lend each other. No daemon takes part.

mod announce;
mod drain;
mod keys;
pub mod list;
mod member;
mod options;
mod serve;
pub mod slab;
mod top;
mod trial;

use anyhow::Result;

use self::options::Key;
pub use self::options::{Place, Pool, SPIN_US_MAX};
use crate::output::Format;

pub fn run(command: Pool, format: Format) -> Result<()> {
    match command {
        Pool::Try(options) => trial::run(&options, format),
        Pool::Serve(options) => serve::run(&options, format),
        Pool::Ls { place } => list::run(&place, format),
        Pool::Top(options) => top::run(&options, format),
        Pool::Drain(options) => drain::run(&options, format),
        Pool::Key(Key::Init { dir }) => keys::init(&dir.dir, format),
        Pool::Key(Key::Add { dir, key, name, admin }) => keys::add(&dir.dir, &key, &name, admin),
        Pool::Key(Key::Rm { dir, key }) => keys::remove(&dir.dir, &key),
        Pool::Key(Key::Ls { dir }) => keys::list(&dir.dir, format),
    }
}
