//! `pagoda disk`: disks in the memory of other machines. No daemon takes part; exporters are a program of their own.

mod options;
mod remove;
mod reserve;
mod share;
mod show;

use anyhow::{Context, Result};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::{record, store};
use rmap::units::Generation;
use rmap_etcd::NewSpace;

pub use self::options::Disk;
use crate::exit::UsageError;
use crate::output::{Format, print_json};
use crate::server;

pub fn run(command: Disk, format: Format) -> Result<()> {
    match command {
        Disk::Create { pool_dir, name, size, copies, reserve } => {
            create(&pool_dir.read()?, &name, record::Disk::new(size, copies.into())?.reserving(reserve)?, format)
        }
        Disk::Ls { pool_dir } => show::list(&pool_dir.read()?, format),
        Disk::Show { pool_dir, name } => show::run(&pool_dir.read()?, &name, format),
        Disk::Rm { pool_dir, name, force } => remove::run(&pool_dir.read()?, &name, force),
        Disk::Share { pool_dir, name, read_only: _, parity, take_over } => {
            share::run(&pool_dir.read()?, &name, share::How { take_over, parity }, format)
        }
        Disk::Export(_) => server::become_server(),
    }
}

fn create(pool: &PoolConfig, name: &str, mut disk: record::Disk, format: Format) -> Result<()> {
    store::identity(&pool.dir)?;
    let copies = disk.copies;
    let servers = pool.servers()?.len();
    if servers < copies {
        return Err(UsageError(format!(
            "{copies} copies need {copies} servers, and there are {servers}: add one, or say --copies {servers}"
        ))
        .into());
    }
    record::check_free(&pool.dir, name)?;
    match pool.connect()? {
        None => record::create(&pool.dir, name, &disk)?,
        Some(mut etcd) => {
            // The name first: it is the cluster's. Without the record nobody could use the disk, so both or none.
            let space = etcd.create_space(&NewSpace {
                name: name.to_owned(),
                pages: disk.pages(),
                copies,
                reserve: disk.reserve() as u32,
            })?;
            disk.keep_in(pool.etcd.as_ref().map(|config| config.pool.clone()), space.id);
            if let Err(error) = record::create(&pool.dir, name, &disk) {
                etcd.remove_space(&space, Generation(0)).context("give the name back")?;
                return Err(error);
            }
        }
    }
    if disk.reserve_bytes > 0 {
        reserve::run(pool, name, &disk)?;
    }
    if format == Format::Json {
        print_json(&show::Info::read(pool, name)?)?;
    }
    Ok(())
}
