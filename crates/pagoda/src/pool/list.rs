//! `pagoda pool ls`: asks each server of the pool once, and shows what it says.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::{connect, store};
use rmap::client::{Reach, ServerInfo, ServerView};
use rmap::wire::message::Pressure;
use rmap_io::net::Wait;
use serde::Serialize;

use crate::exit;
use crate::output::{Format, Side, Table, print_json};
use crate::units::format_size;
use pagoda_cli::options::PoolDir;
use pagoda_pool::slab::SLAB_CONTENT_BYTES;

/// A server that has not answered by then is shown as silent.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// After the handshake, what the server has free comes with its next answers.
const LOAD_AFTER: Duration = Duration::from_millis(50);

#[derive(Debug, Serialize)]
struct Row {
    id: u32,
    address: String,
    zone: u32,
    /// Whether it answers: `up` or `silent`.
    state: &'static str,
    /// Where it keeps pages: `memory` or `disk`; `None` if it is silent.
    medium: Option<&'static str>,
    pressure: Option<&'static str>,
    free_bytes: Option<u64>,
    round_trip_us: Option<f64>,
}

pub fn run(pool_dir: &PoolDir, format: Format) -> Result<()> {
    let pool = pool_dir.read()?;
    let (servers, trouble) = match pool.servers() {
        // The servers of the static list are there all the same.
        Err(error) if exit::is_unreachable(&error) => (store::servers(&pool.dir)?, Some(error)),
        servers => (servers?, None),
    };
    if !servers.is_empty() {
        show(&pool, &servers, format)?;
    }
    trouble.map_or(Ok(()), |error| Err(error).context("nothing can be placed anew or taken over"))
}

fn show(pool: &PoolConfig, servers: &[ServerInfo], format: Format) -> Result<()> {
    let mut client = connect::client(pool, servers, connect::no_control(), Wait::BLOCK, connect::UNHURRIED)?;
    let mut up_at = None;
    connect::converse(&mut client, PATIENCE, |client| {
        let now = Instant::now();
        connect::all_up(client) && now - *up_at.get_or_insert(now) >= LOAD_AFTER
    })?;
    let rows: Vec<Row> = servers
        .iter()
        .zip(client.client.servers())
        .map(|(server, view)| {
            let up = view.reach == Reach::Up;
            Row {
                id: server.id.0,
                address: server.addr.to_string(),
                zone: server.zone,
                state: if up { "up" } else { "silent" },
                medium: up.then(|| medium(&view)),
                pressure: up.then(|| pressure(view.pressure)),
                free_bytes: up.then(|| u64::from(view.free_slabs) * SLAB_CONTENT_BYTES),
                round_trip_us: up.then_some(view.round_trip.as_secs_f64() * 1e6),
            }
        })
        .collect();
    if format == Format::Json {
        return Ok(print_json(&rows)?);
    }
    let mut table = Table::new(&[
        ("SERVER", Side::Right),
        ("ADDRESS", Side::Left),
        ("ZONE", Side::Right),
        ("STATE", Side::Left),
        ("MEDIUM", Side::Left),
        ("PRESSURE", Side::Left),
        ("FREE", Side::Right),
        ("RTT us", Side::Right),
    ]);
    for row in rows {
        table.row(vec![
            row.id.to_string(),
            row.address,
            row.zone.to_string(),
            row.state.into(),
            row.medium.unwrap_or("-").into(),
            row.pressure.unwrap_or("-").into(),
            row.free_bytes.map_or("-".into(), format_size),
            row.round_trip_us.map_or("-".into(), |us| format!("{us:.0}")),
        ]);
    }
    Ok(table.print()?)
}

/// Where a server keeps what it is given.
pub fn medium(view: &ServerView) -> &'static str {
    if view.overflow_disk { "disk" } else { "memory" }
}

pub fn pressure(pressure: Pressure) -> &'static str {
    match pressure {
        Pressure::None => "none",
        Pressure::Yellow => "yellow",
        Pressure::Orange => "orange",
        Pressure::Red => "red",
    }
}
