//! `pagoda pool serve`: lends memory of this machine, or room of a disk, to other machines.
//!
//! Options are checked and addresses taken before memory is. Memory is locked before a client can ask for it. Once it
//! serves, nothing but a signal, a drained server or a broken socket ends it: etcd, the list of admitted clients and the
//! host's memory may be unreadable for a while, which is said once and changes nothing.

mod admissions;
mod announce;
mod drain;
mod gauge;
mod lent;
mod member;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use pagoda_cli::exit::UsageError;
use pagoda_cli::options::Serve;
use pagoda_cli::output::{Format, print_json_line, print_text};
use pagoda_cli::units::format_size;
use pagoda_pool::role::lend;
use pagoda_pool::slab::{SLAB_BYTES, SLAB_CONTENT_BYTES};
use pagoda_pool::store;
use rmap::client::ServerInfo;
use rmap::crypto::Entropy;
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, SEAL_SIZE, SLAB_PAGES, ServerId, SlabSize, Time};
use rmap_io::SystemEntropy;
use rmap_io::net::{Port, Wait, serve_workers};
use serde::Serialize;

use self::admissions::Admissions;
use self::announce::Announcing;
use self::drain::{Drain, Signals};
use self::gauge::HostGauge;
use self::lent::{lock_memory, take_disk};
use self::member::InEtcd;
use crate::metrics::server::ServerNumbers;
use crate::metrics::{self, Published};

/// What of a slab on a disk is in memory all the same: versions and seals.
const SLAB_TABLE_BYTES: u64 = SLAB_PAGES as u64 * (SEAL_SIZE as u64 + 8);
/// Without `--workers`: the cores of a host are its VMs', and one worker fills 10 Gbit/s.
const CORES_A_WORKER: usize = 4;
const WORKERS_UNASKED_MAX: usize = 4;
/// How often numbers are left for those who ask.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize)]
struct Serving {
    listen: String,
    bytes: u64,
    public_key: String,
    /// For the file `servers` of the clients.
    line: String,
    /// Where Prometheus is answered.
    metrics: Option<SocketAddr>,
}

pub fn run(options: &Serve, format: Format) -> Result<()> {
    let pool_dir = options.pool_dir.read()?;
    let dir = &pool_dir.dir;
    let (keys, pool) = store::identity(dir)?;
    check_listen(options, pool_dir.etcd.is_some())?;
    let slab_bytes = if options.on_disk.is_some() { SLAB_CONTENT_BYTES } else { SLAB_BYTES };
    let slabs = slabs(options, slab_bytes)?;
    // Whether etcd answers is found out before memory is taken.
    pool_dir.connect()?;
    let mut admitted = Admissions::read(dir)?;
    let workers = workers(options)?;
    let bind = if options.tcp { Port::listen_workers } else { Port::bind_workers };
    let ports = bind(options.listen, workers).with_context(|| format!("listen on {}", options.listen))?;
    let addr = ports[0].local_addr().context("the socket's address")?;
    let (scraped, metrics) = options.metrics.map(metrics::listen).transpose()?.unzip();
    // A disk is nobody's memory: it is lent whatever the host does with that.
    let on_disk = options.on_disk.as_deref();
    let _role = if options.also_borrow || on_disk.is_some() { None } else { Some(lend(dir)?) };
    let mut gauge = on_disk.is_none().then(|| HostGauge::new(options.pressure_from.as_deref())).transpose()?;
    let medium = on_disk.map(|dir| take_disk(dir, slabs * slab_bytes)).transpose()?;
    // Before the slabs are made: what is lent is in memory and stays there, or is not lent.
    lock_memory(if on_disk.is_some() { slabs * SLAB_TABLE_BYTES } else { options.size })?;
    let public = keys.public();
    let announce = |to| Announcing::start(options.listen.ip(), to, &keys, pool.clone());
    let mut announcing = options.announce.map(announce).transpose()?;
    let config = ServerConfig {
        id: ServerId(options.id),
        keys,
        pool,
        admitted: admitted.keys(),
        slabs: slabs as usize,
        slab_size: SlabSize::default(),
        quota: quota(options, slab_bytes)?,
        epoch: BootEpoch(SystemEntropy::default().next_u64()),
        medium,
    };
    let servers = Server::with_workers(config, Box::new(SystemEntropy::default()), workers)?;
    let mut workers: Vec<(Server, Port)> = servers.into_iter().zip(ports).collect();
    let (server, _) = &mut workers[0];
    server.set_admins(admitted.admins());
    let signals = Signals::obeyed(options)?;
    let announcer = announcing.as_ref().map(Announcing::key);
    let info = ServerInfo { id: ServerId(options.id), addr, key: public, zone: options.zone, announcer };
    let mut member = pool_dir.etcd.map(|config| InEtcd::join(config, &info, server)).transpose()?;
    let serving = Serving {
        listen: addr.to_string(),
        bytes: slabs * slab_bytes,
        public_key: format!("{public:?}"),
        line: rmap::servers::line(&info),
        metrics,
    };
    say_ready(&serving, on_disk, member.as_ref().map(|_| info.id), format)?;
    let numbers = |listener| Published::start(listener, ServerNumbers::new(server));
    let published = scraped.map(numbers).transpose()?;
    let mut shown = Shown { published, published_at: Time::default(), broken: 0 };
    let wait = Wait { spin: Duration::from_micros(options.spin) };
    let mut drain = Drain::with_patience(Duration::from_secs(options.drain));
    serve_workers(&mut workers, wait, |server, now| {
        admitted.follow(server);
        if let Some(gauge) = &mut gauge {
            gauge.follow(server, now);
        }
        shown.follow(server, now);
        drain.follow(server, &admitted, &signals);
        if let Some(member) = &mut member {
            member.follow(server);
        }
        if let Some(announcing) = &mut announcing {
            announcing.follow(server, &info, slabs as u32, now);
        }
        signals.is_over()
    })
    .context("serve")?;
    if let Some(member) = member {
        member.leave();
    }
    Ok(())
}

/// Clients are told the address, so it has to be one.
fn check_listen(options: &Serve, in_etcd: bool) -> Result<(), UsageError> {
    let is_announced = in_etcd || options.announce.is_some();
    if is_announced && options.listen.ip().is_unspecified() {
        return Err(UsageError(format!("--listen {}: give the address that clients reach", options.listen.ip())));
    }
    Ok(())
}

/// Slabs that are lent.
fn slabs(options: &Serve, slab_bytes: u64) -> Result<u64, UsageError> {
    match options.size / slab_bytes {
        0 => {
            let least = format_size(slab_bytes.next_multiple_of(1 << 20));
            Err(UsageError(format!("--size {}: at least {least}", format_size(options.size))))
        }
        slabs => Ok(slabs),
    }
}

/// What operators are shown of the server.
#[derive(Debug)]
struct Shown {
    published: Option<Published<ServerNumbers>>,
    published_at: Time,
    /// Slabs that a failing disk had lost.
    broken: usize,
}

impl Shown {
    fn follow(&mut self, server: &Server, now: Time) {
        if let Some(published) = self.published.as_ref().filter(|_| now.since(self.published_at) >= PUBLISH_EVERY) {
            published.update(|numbers| numbers.look(server));
            self.published_at = now;
        }
        if std::mem::replace(&mut self.broken, server.broken_slabs()) != server.broken_slabs() {
            let lost = format_size(self.broken as u64 * SLAB_CONTENT_BYTES);
            eprintln!(
                "pagoda: the disk fails: {lost} of what was there is gone, and is lent no more (see the kernel's log)"
            );
        }
    }
}

/// The most slabs of one space.
fn quota(options: &Serve, slab_bytes: u64) -> Result<u32> {
    match options.quota.map(|quota| (quota, quota / slab_bytes)) {
        None => Ok(u32::MAX),
        Some((quota, 0)) => {
            let least = format_size(slab_bytes.next_multiple_of(1 << 20));
            Err(UsageError(format!("--quota {}: at least {least}", format_size(quota))).into())
        }
        Some((_, slabs)) => Ok(u32::try_from(slabs).unwrap_or(u32::MAX)),
    }
}

/// How many threads serve.
fn workers(options: &Serve) -> Result<usize> {
    match options.workers {
        Some(workers) if workers > 1 && options.on_disk.is_some() => {
            Err(UsageError(format!("--workers {workers}: a disk is read by one thread; leave it out with --on-disk"))
                .into())
        }
        Some(workers) => Ok(workers as usize),
        None if options.on_disk.is_some() => Ok(1),
        None => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            Ok((cores / CORES_A_WORKER).clamp(1, WORKERS_UNASKED_MAX))
        }
    }
}

fn say_ready(serving: &Serving, on_disk: Option<&Path>, number: Option<ServerId>, format: Format) -> Result<()> {
    let of = on_disk.map_or(String::new(), |dir| format!(" of the disk of {}", dir.display()));
    let lending = format!("Lending {}{of} on {}", format_size(serving.bytes), serving.listen);
    match (format, number) {
        (Format::Json, _) => print_json_line(serving)?,
        (Format::Text, Some(number)) => print_text(&format!("{lending}, as server {}\n", number.0))?,
        (Format::Text, None) => print_text(&format!(
            "{lending}. For the file `servers` of each client (the number after the key is the zone):\n{}\n",
            serving.line
        ))?,
    }
    Ok(())
}
