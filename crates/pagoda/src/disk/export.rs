//! `pagoda disk export`.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rmap::client::{Reach, SpaceSpec};
use rmap::nbd::{self, Ended, Listener, Server};
use rmap::udp::Wait;
use rmap::units::PAGE_SIZE;
use rustix::fs::{FlockOperation, flock};
use rustix::mm::{MlockAllFlags, mlockall};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{Export, record};
use crate::output::{print_json_line, print_text};
use crate::pool::{connect, store};
use crate::show::Format;

/// Servers that have not answered by then are gone on without, if any has.
const SERVERS_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
struct Exported {
    name: String,
    uri: String,
    size_bytes: u64,
}

pub fn run(options: &Export, format: Format) -> Result<()> {
    let (dir, name) = (&options.dir.dir, &options.name);
    let disk = record::read(dir, name)?;
    let servers = store::servers(dir)?;
    let lock = record::lock_file(dir, name)?;
    let locked = record::try_lock(&lock)?;
    if !locked && !options.take_over {
        bail!("{name} is exported by another process: stop that one, or say --take-over");
    }
    let listener = match (&options.nbd, options.tcp) {
        (Some(path), _) => Listener::unix(path)?,
        (None, Some(addr)) => Listener::tcp(addr)?,
        (None, None) => bail!("give --nbd or --tcp"),
    };
    let uri = listener.uri(name);
    let wait = Wait { spin: Duration::from_micros(options.spin) };
    let mut registry = store::registry(dir)?;
    let fail_after = Duration::from_millis(options.fail_after);
    let mut client = connect::client(dir, &servers, store::registry(dir)?, wait, fail_after)?;
    let all = connect::converse(&mut client, SERVERS_PATIENCE, |client| connect::all_up(client))?;
    if !all {
        let silent: Vec<String> =
            client.client.reach().filter(|(_, reach)| *reach != Reach::Up).map(|(id, _)| id.0.to_string()).collect();
        if silent.len() == servers.len() {
            bail!(
                "no server answers: are they up (`pagoda pool ls`), do they have the same pool.key, and do they admit \
                 this machine (`pagoda pool key add` there, with the key of `pagoda pool key ls` here)?"
            );
        }
        eprintln!("pagoda: these servers do not answer: {}", silent.join(", "));
    }
    keep_in_memory();
    // The last thing that may be done before serving: it ends whatever another owner does.
    let (generation, map) = registry.take_over(disk.space()?)?;
    let spec = SpaceSpec {
        id: disk.space()?,
        pages: disk.size_bytes / PAGE_SIZE as u64,
        copies: disk.copies,
        key: disk.key()?,
    };
    let space = client.client.attach(&spec, generation, &map)?;
    hold(lock, locked);
    let (stop, stopper) = UnixStream::pair().context("make a socket")?;
    for signal in [SIGTERM, SIGINT] {
        let stopper = stopper.try_clone().context("handle signals")?;
        signal_hook::low_level::pipe::register(signal, stopper).context("handle signals")?;
    }
    let export = nbd::Export { name: name.clone(), space, size: disk.size_bytes };
    let mut server = Server::new(client, export, listener, wait)?;
    match format {
        Format::Json => print_json_line(&Exported { name: name.clone(), uri, size_bytes: disk.size_bytes })?,
        Format::Text => print_text(&format!("Exporting {name} at {uri}\n"))?,
    }
    match server.run(stop.as_fd())? {
        Ended::Stopped => Ok(()),
        Ended::TakenOver => bail!("another owner has taken {name} over: writes not answered by then are not there"),
    }
}

/// A disk that the machine swaps to must be served without memory that would have to be swapped for it.
fn keep_in_memory() {
    let steps = [
        ("memory is not locked", mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE)),
        ("the kernel does not count this as serving I/O", rustix::process::configure_io_flusher_behavior(true)),
    ];
    for (what, result) in steps {
        if let Err(error) = result {
            eprintln!(
                "pagoda: {what} ({error}): do not swap to this disk; to do that, run as root with all capabilities"
            );
        }
    }
}

/// Keeps the lock until the process ends. Who took the disk over gets it when the one before has ended.
fn hold(lock: File, locked: bool) {
    std::thread::spawn(move || {
        if !locked {
            // Should it fail, the next exporter is not told of this one, which loses the disk as by --take-over.
            let _ = flock(&lock, FlockOperation::LockExclusive);
        }
        loop {
            std::thread::park();
        }
    });
}
