//! `pagoda disk export`: offers a disk of the pool to programs that speak NBD.
//!
//! Taking the disk over is the last step before serving, because it ends whatever another owner does. Before it, everything
//! that can fail has been tried: the lock, the listening socket, the servers. A write is answered when all copies have
//! it, so the exporter may be killed at any moment.

mod outage;

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagoda_cli::exit::UsageError;
use pagoda_cli::options::Export;
use pagoda_cli::output::{Format, print_json_line, print_text};
use pagoda_pool::aside::Control;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::Patience;
use pagoda_pool::news::Watch;
use pagoda_pool::plane::Plane;
use pagoda_pool::{connect, record, role};
use rmap::client::{Client, ServerInfo};
use rmap_io::net::{UdpClient, Wait};
use rmap_nbd::{self as nbd, Ended, Listener, Server};
use rustix::fs::{FlockOperation, flock};
use rustix::mm::{MlockAllFlags, mlockall};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use self::outage::Outage;
use crate::metrics::disk::DiskNumbers;
use crate::metrics::{self, Published};

#[derive(Debug, Serialize)]
struct Exported {
    name: String,
    uri: String,
    size_bytes: u64,
    read_only: bool,
    /// Nobody writes it, ever.
    sealed: bool,
    /// Where Prometheus is answered.
    metrics: Option<SocketAddr>,
}

pub fn run(options: &Export, format: Format) -> Result<()> {
    let pool = options.pool_dir.read()?;
    let (dir, name) = (&pool.dir, &options.name);
    let disk = record::read(dir, name)?;
    let mut plane = Plane::of(&pool, name, disk.cluster.as_deref())?;
    let servers = pool.servers()?;
    role::borrow(dir)?;
    let seen = plane.look(disk.space()?)?;
    let mut sealed = seen.today.sealed;
    let read_only = sealed || options.read_only;
    check_parity_after(options, read_only, disk.copies)?;
    let lock = record::lock_file(dir, name)?;
    let locked = match (sealed, read_only) {
        (true, _) => record::try_lock_shared(&lock)?,
        // Who writes has it, or will.
        (false, true) => false,
        (false, false) => record::try_lock(&lock)?,
    };
    check_lock(options, locked, sealed, read_only)?;
    if let Some(host) = plane.other_host(&seen).filter(|_| !read_only && !options.take_over) {
        bail!(
            "{host} was the last to export {name}, and may still do: stop it there, and say --take-over; --read-only reads \
             what it writes"
        );
    }
    let listener = listen(options)?;
    let uri = listener.uri(name);
    let wait = Wait { spin: Duration::from_micros(options.spin) };
    let (scraped, metrics) = options.metrics.map(metrics::listen).transpose()?.unzip();
    let published = scraped.map(|listener| Published::start(listener, DiskNumbers::new(name))).transpose()?;
    // Before other threads are started: they inherit it.
    keep_in_memory();
    let mut client = client(options, &pool, &servers, plane.control()?, wait)?;
    connect::greet(&mut client, &pool, &servers)?;
    let up = connect::up(&client);
    connect::stand_in(&mut client, &pool, name, &servers, &up, &seen.today.map)?;
    let watch = Watch::start(&pool, &servers)?;
    let space = if read_only {
        if !sealed {
            plane.expect(disk.space()?)?;
            // Whoever removes it takes this away before the map, and then it would be empty.
            ensure!(record::read(dir, name)?.space()? == disk.space()?, "{name} was removed");
        }
        let today = plane.look(disk.space()?)?.today;
        sealed = today.sealed;
        client.client.attach_reader(&disk.spec()?, &today)?
    } else {
        // The last thing that may be done before serving: it ends whatever another owner does.
        let (generation, map) = plane.take_over(disk.space()?)?;
        client.client.attach(&disk.spec()?, generation, &map)?
    };
    // Who reads beside a writer has none, and takes none from it or from whoever seals the disk.
    if locked || !read_only {
        hold(lock, locked);
    }
    let stop = stop_signals()?;
    let export = nbd::Export { name: name.clone(), space, size: disk.size_bytes, read_only };
    let mut server = Server::new(client, export, listener, wait)?;
    let size_bytes = disk.size_bytes;
    say_exported(Exported { name: name.clone(), uri, size_bytes, read_only, sealed, metrics }, format)?;
    let mut outage = Outage::none(name, read_only);
    let maintain = |client: &mut Client, now| {
        outage.look(client, now);
        if let Some(published) = &published {
            published.update(|numbers| numbers.look(client, space));
        }
        watch.inform(client, now);
    };
    match server.run(stop.as_fd(), maintain)? {
        Ended::Stopped => Ok(()),
        Ended::TakenOver if read_only => bail!("{name} was removed while it was exported"),
        Ended::TakenOver => bail!("another owner has taken {name} over: writes not answered by then are not there"),
    }
}

/// Whether parity in the place of second copies can be had.
fn check_parity_after(options: &Export, read_only: bool, copies: usize) -> Result<(), UsageError> {
    let name = &options.name;
    let Some(after) = options.parity_after else { return Ok(()) };
    if after == 0 {
        return Err(UsageError(
            "--parity-after 0s would make parity of what is being written: give a time such as 10m".into(),
        ));
    }
    if read_only {
        return Err(UsageError(format!(
            "{name} is read-only: `pagoda disk share {name} --read-only --parity` gives all of it parity"
        )));
    }
    if copies != 2 {
        return Err(UsageError(format!(
            "{name} has one copy, and parity stands for second ones: leave --parity-after out"
        )));
    }
    Ok(())
}

/// Who did not get the lock that its kind of export needs is told why.
fn check_lock(options: &Export, locked: bool, sealed: bool, read_only: bool) -> Result<()> {
    let name = &options.name;
    if !locked && sealed {
        bail!("{name} is being removed by another process");
    }
    if !locked && !read_only && !options.take_over {
        bail!(
            "{name} is exported by another process: stop that one, or say --take-over; --read-only reads what it writes"
        );
    }
    Ok(())
}

fn listen(options: &Export) -> Result<Listener> {
    match (&options.nbd, options.tcp) {
        (Some(path), _) => Ok(Listener::unix(path)?),
        (None, Some(addr)) => Ok(Listener::tcp(addr)?),
        (None, None) => bail!("give --nbd or --tcp"),
    }
}

/// A client of the pool that keeps the disk as the options say.
fn client(
    options: &Export,
    pool: &PoolConfig,
    servers: &[ServerInfo],
    control: Control,
    wait: Wait,
) -> Result<UdpClient<Control>> {
    let error_after = (options.error_after > 0).then(|| Duration::from_secs(options.error_after));
    let patience = Patience { error_after, ..Patience::of_disks(Duration::from_millis(options.fail_after)) };
    let mut client = connect::client(pool, servers, control, wait, patience)?;
    client.client.set_scrub_pass((options.scrub > 0).then(|| Duration::from_secs(options.scrub * 3600)));
    client.client.set_keep_after(Duration::from_secs(options.keep_after));
    client.client.set_parity_after(options.parity_after.map(Duration::from_secs));
    Ok(client)
}

/// Readable once a signal asks for the end.
fn stop_signals() -> Result<UnixStream> {
    let (stop, stopper) = UnixStream::pair().context("make a socket")?;
    for signal in [SIGTERM, SIGINT] {
        let stopper = stopper.try_clone().context("handle signals")?;
        signal_hook::low_level::pipe::register(signal, stopper).context("handle signals")?;
    }
    Ok(stop)
}

fn say_exported(exported: Exported, format: Format) -> Result<()> {
    let Exported { name, uri, read_only, sealed, .. } = &exported;
    match format {
        Format::Json => print_json_line(&exported)?,
        Format::Text if *read_only && !sealed => {
            print_text(&format!("Exporting {name} at {uri}, read-only, as others write it\n"))?;
        }
        Format::Text if *read_only => print_text(&format!("Exporting {name} at {uri}, read-only\n"))?,
        Format::Text => print_text(&format!("Exporting {name} at {uri}\n"))?,
    }
    Ok(())
}

/// Of this thread's stack: far more than serving takes. It grows page by page, and each would be new memory.
const STACK_READY: usize = 512 << 10;

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
    touch_stack();
}

#[inline(never)]
fn touch_stack() {
    std::hint::black_box([1_u8; STACK_READY]);
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
