//! `pagoda pool drain`: asks a server to hand its pages to others, and follows that.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pagoda_pool::aside::Control;
use pagoda_pool::connect;
use rmap::client::{Client, Drain as Request};
use rmap::units::ServerId;
use rmap::wire::message::Status;
use rmap::wire::report::Report;
use rmap_io::net::{UdpClient, Wait};
use serde::Serialize;

use super::options::Drain;
use crate::exit::NoSuchServer;
use crate::output::{Format, print_json_line, print_text};
use crate::units::format_size;
use pagoda_pool::slab::SLAB_CONTENT_BYTES;

/// A server that does not answer for so long is not there.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How far a drain is.
#[derive(Debug, Serialize)]
struct Progress {
    server: u32,
    left_bytes: u64,
    draining: bool,
}

pub fn run(options: &Drain, format: Format) -> Result<()> {
    let pool = options.pool_dir.read()?;
    let listed = pool.servers()?.into_iter().find(|server| server.id.0 == options.server);
    let server = listed.ok_or(NoSuchServer(options.server))?;
    let (id, wait) = (server.id, Wait::BLOCK);
    let mut client = connect::client(&pool, &[server], connect::no_control(), wait, connect::UNHURRIED)?;
    if !connect::converse(&mut client, PATIENCE, |client| connect::all_up(client))? {
        bail!("server {} does not answer, see `pagoda pool ls`", id.0);
    }
    let request = if options.cancel { Request::CallOff } else { Request::Begin };
    ask(&mut client, id, request)?;
    if options.cancel {
        let Some(report) = look(&mut client)? else { bail!("server {} does not answer any more", id.0) };
        if report.draining {
            bail!("server {} was told to end at its own machine: that is not called off from here", id.0);
        }
        return say(id, &report, format);
    }
    follow(&mut client, id, Duration::from_secs(options.timeout), format)
}

/// Asks for it until there is an answer.
fn ask(client: &mut UdpClient<Control>, id: ServerId, request: Request) -> Result<()> {
    let answer = |client: &Client| client.servers().next().and_then(|view| view.drain);
    connect::insist(client, PATIENCE, |client| client.ask_drain(id, request), |client| answer(client).is_some())?;
    match answer(&client.client) {
        Some(Status::Ok) => Ok(()),
        Some(Status::Denied) => bail!(
            "server {} does not do that for this machine: at the server, run `pagoda pool key add --admin` with the \
             key that `pagoda pool key ls` shows here",
            id.0
        ),
        Some(status) => bail!("server {} refuses: {status:?}", id.0),
        None => bail!("server {} does not answer the request: its version may be an older one", id.0),
    }
}

/// Says what moves, until all has.
fn follow(client: &mut UdpClient<Control>, id: ServerId, timeout: Duration, format: Format) -> Result<()> {
    let (mut last, mut moved_at) = (None, Instant::now());
    loop {
        let Some(report) = look(client)? else {
            let left = last.map_or(0, |held| u64::from(held) * SLAB_CONTENT_BYTES);
            bail!("server {} does not answer any more; {} was there when it last did", id.0, format_size(left));
        };
        if last.replace(report.held) != Some(report.held) {
            moved_at = Instant::now();
            say(id, &report, format)?;
        }
        let left = format_size(u64::from(report.held) * SLAB_CONTENT_BYTES);
        if report.held == 0 {
            return Ok(());
        }
        if !report.draining {
            bail!("server {} was asked to go on lending: {left} is still there", id.0);
        }
        if moved_at.elapsed() >= timeout {
            bail!(
                "nothing has moved for {timeout:?}, and {left} is still at server {}: do others have room (`pagoda \
                 pool ls`), and are the disks exported? It goes on trying; --cancel ends that",
                id.0
            );
        }
        connect::converse(client, LOOK_EVERY, |_| false)?;
    }
}

/// How the server is; `None` if it does not say.
fn look(client: &mut UdpClient<Control>) -> Result<Option<Report>> {
    let report = |client: &Client| client.servers().next().and_then(|view| view.report);
    connect::insist(client, PATIENCE, Client::ask_reports, |client| report(client).is_some())?;
    Ok(report(&client.client))
}

fn say(id: ServerId, report: &Report, format: Format) -> Result<()> {
    let (server, left_bytes, draining) = (id.0, u64::from(report.held) * SLAB_CONTENT_BYTES, report.draining);
    match format {
        Format::Json => print_json_line(&Progress { server, left_bytes, draining })?,
        Format::Text if !draining => print_text(&format!("server {server} goes on lending\n"))?,
        Format::Text if left_bytes == 0 => print_text(&format!("server {server} has nothing left, and ends\n"))?,
        Format::Text => print_text(&format!("server {server}: {} to move\n", format_size(left_bytes)))?,
    }
    Ok(())
}
