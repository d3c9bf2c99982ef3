//! What parity saves where a disk is cold, and what the first write to such a part costs: it waits until four parts of 64 MiB have
//! their second copies again. Servers and exporter share the machine's cores, and copies go over its loopback.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use testkit::pool::{Lend, Pool};

use crate::load::{Connection, PAGE, ms};
use crate::nbd::{Target, fio};

const DISK: &str = "256M";
const DISK_BYTES: u64 = 256 << 20;
/// Five for a group, and one more.
const SERVERS: u32 = 6;
const SERVER: &str = "200M";
/// Four parts, their parity, and a list of versions with two copies.
const COLD_BYTES: u64 = (4 + 1 + 2) * (64 << 20);
/// To be cold, and for parity to be made: a slab takes some tenths of a second.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A write that found its part cold, and the next one there.
pub struct Writes {
    pub first_ms: f64,
    pub next_ms: f64,
}

/// # Errors
/// A program cannot be started; no parity is made.
pub fn measure(dir: &Path) -> Result<Writes> {
    let pool = Pool::new(dir)?;
    let _servers = pool.serve_listed(SERVERS, &Lend::on_loopback(SERVER))?;
    pool.create("cold", DISK_BYTES, 2)?;
    let exporter = pool.export("cold", "cold.sock", None, &["--parity-after", "1s"])?;
    fio(&Target::Nbd(&exporter.uri), DISK, "write", 8, &["--bs=256k"])?;
    let began = Instant::now();
    while pool.held_bytes("cold")? != COLD_BYTES {
        if began.elapsed() > PATIENCE {
            bail!("no parity after {PATIENCE:?}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let mut connection = Connection::open(&exporter.socket)?;
    let mut write = || -> Result<f64> {
        let began = Instant::now();
        connection.ask(1, 0, PAGE as u32, Some(&[7; PAGE]))?;
        ensure!(connection.answer().context("an answer")?.error == 0, "a write fails");
        Ok(ms(began.elapsed()))
    };
    Ok(Writes { first_ms: write()?, next_ms: write()? })
}
