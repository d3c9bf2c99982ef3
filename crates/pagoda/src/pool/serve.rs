//! `pagoda pool serve`.

use pagoda_api::in_full;
use std::fs::Metadata;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_pool::role::lend;
use pagoda_pool::store::{self, Admitted};
use rmap::client::ServerInfo;
use rmap::crypto::{Entropy, PublicKey, SystemEntropy};
use rmap::host::{self, HostError};
use rmap::medium::{FileMedium, Medium, MediumError};
use rmap::pressure::Gauge;
use rmap::server::{Server, ServerConfig};
use rmap::udp::{Port, Wait, serve_lanes};
use rmap::units::{BootEpoch, SEAL_SIZE, SLAB_PAGES, ServerId, SlabSize, Time};
use rmap::wire::message::Pressure;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::announce::Announcing;
use super::member::InEtcd;
use super::options::Serve;
use super::slab::{SLAB_BYTES, SLAB_CONTENT_BYTES};
use crate::exit::UsageError;
use crate::metrics::server::ServerNumbers;
use crate::metrics::{self, Published};
use crate::output::{Format, print_json_line, print_text};
use crate::units::format_size;

/// Who asked for a drain looks several times a second; an answer or two may get lost.
const SEEN_AFTER: Duration = Duration::from_secs(2);
/// What of a slab on a disk is in memory all the same: versions and seals.
const SLAB_TABLE_BYTES: u64 = SLAB_PAGES as u64 * (SEAL_SIZE as u64 + 8);
/// Without `--workers`: the cores of a host are its VMs', and one lane fills 10 Gbit/s.
const CORES_A_LANE: usize = 4;
const LANES_UNASKED_MAX: usize = 4;
/// How often it is looked whether the host's memory is short, and numbers are left for those who ask.
const LOOK_EVERY: Duration = Duration::from_secs(1);

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
    let place = options.place.read()?;
    let dir = &place.dir;
    let (keys, pool) = store::identity(dir)?;
    check_listen(options, place.etcd.is_some())?;
    let slab_bytes = if options.on_disk.is_some() { SLAB_CONTENT_BYTES } else { SLAB_BYTES };
    let slabs = slabs(options, slab_bytes)?;
    // Whether etcd answers is found out before memory is taken.
    place.connect()?;
    let mut admitted = Admissions::read(dir)?;
    let lanes = lanes(options)?;
    let bind = if options.tcp { Port::listen_lanes } else { Port::bind_lanes };
    let ports = bind(options.listen, lanes).with_context(|| format!("listen on {}", options.listen))?;
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
    let servers = Server::with_lanes(config, Box::new(SystemEntropy::default()), lanes)?;
    let mut lanes: Vec<(Server, Port)> = servers.into_iter().zip(ports).collect();
    let (server, _) = &mut lanes[0];
    server.set_admins(admitted.admins());
    let signals = Signals::obeyed(options)?;
    let announcer = announcing.as_ref().map(Announcing::key);
    let info = ServerInfo { id: ServerId(options.id), addr, key: public, zone: options.zone, announcer };
    let mut member = place.etcd.map(|config| InEtcd::join(config, &info, server)).transpose()?;
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
    let mut drain = Drain { patience: Duration::from_secs(options.drain), ..Drain::default() };
    serve_lanes(&mut lanes, wait, |server, now| {
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
        signals.stop.load(Ordering::Relaxed)
    })
    .context("serve")?;
    if let Some(member) = member {
        member.leave();
    }
    Ok(())
}

/// Clients are told the address, so it has to be one.
fn check_listen(options: &Serve, in_etcd: bool) -> Result<(), UsageError> {
    let is_told = in_etcd || options.announce.is_some();
    if is_told && options.listen.ip().is_unspecified() {
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
        if let Some(published) = self.published.as_ref().filter(|_| now.since(self.published_at) >= LOOK_EVERY) {
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
fn lanes(options: &Serve) -> Result<usize> {
    match options.lanes {
        Some(lanes) if lanes > 1 && options.on_disk.is_some() => {
            Err(UsageError(format!("--workers {lanes}: a disk is read by one thread; leave it out with --on-disk"))
                .into())
        }
        Some(lanes) => Ok(lanes as usize),
        None if options.on_disk.is_some() => Ok(1),
        None => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            Ok((cores / CORES_A_LANE).clamp(1, LANES_UNASKED_MAX))
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

/// Signals to end: the first asks, the second does.
struct Signals {
    asked: Arc<AtomicBool>,
    stop: AtomicBool,
}

impl Signals {
    /// What this server is to end by.
    fn obeyed(options: &Serve) -> Result<Signals> {
        let signals = Signals::new()?;
        if options.while_stdin {
            signals.obey_end_of_input();
        }
        Ok(signals)
    }

    fn new() -> Result<Signals> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order, so that the first signal finds the flag unset.
            signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&asked))
                .context("handle signals")?;
            signal_hook::flag::register(signal, Arc::clone(&asked)).context("handle signals")?;
        }
        Ok(Signals { asked, stop: AtomicBool::new(false) })
    }

    /// The end of standard input, or an error of it, asks like a signal.
    fn obey_end_of_input(&self) {
        let asked = Arc::clone(&self.asked);
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            asked.store(true, Ordering::Relaxed);
        });
    }
}

/// The wait for clients to move their pages away.
#[derive(Default)]
struct Drain {
    patience: Duration,
    /// Since a signal.
    since: Option<Instant>,
    asked_by: Option<PublicKey>,
    empty_since: Option<Instant>,
}

impl Drain {
    fn follow(&mut self, server: &mut Server, admitted: &Admissions, signals: &Signals) {
        if signals.asked.load(Ordering::Relaxed) {
            self.obey(server, signals);
        } else {
            self.oblige(server, admitted, signals);
        }
    }

    /// After a signal: what has not moved in time is gone.
    fn obey(&mut self, server: &mut Server, signals: &Signals) {
        let since = *self.since.get_or_insert_with(|| {
            server.begin_drain();
            if !server.is_drained() {
                eprintln!("pagoda: waiting up to {:?} for clients to move their pages away", self.patience);
            }
            Instant::now()
        });
        if server.is_drained() || since.elapsed() >= self.patience {
            signals.stop.store(true, Ordering::Relaxed);
        }
    }

    /// At a client's request: it ends when it is empty, and the client has seen that.
    fn oblige(&mut self, server: &Server, admitted: &Admissions, signals: &Signals) {
        let asked_by = server.drain_asked_by();
        if self.asked_by != asked_by {
            match asked_by {
                Some(key) => eprintln!("pagoda: {} asks this server to move everything away", admitted.name_of(key)),
                None => eprintln!("pagoda: this server is not asked to move anything away any more"),
            }
            self.asked_by = asked_by;
        }
        if asked_by.is_none() || !server.is_drained() {
            self.empty_since = None;
        } else if self.empty_since.get_or_insert_with(Instant::now).elapsed() >= SEEN_AFTER {
            eprintln!("pagoda: everything has moved away");
            signals.stop.store(true, Ordering::Relaxed);
        }
    }
}

/// The admitted clients, read again when their file changes.
struct Admissions {
    dir: PathBuf,
    clients: Vec<Admitted>,
    read: Option<Edition>,
}

/// When a file was written, how long it is, and which one it is: another list has another of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edition(SystemTime, u64, u64);

impl Admissions {
    fn read(dir: &Path) -> Result<Admissions> {
        let mut admissions = Admissions { dir: dir.to_owned(), clients: Vec::new(), read: None };
        admissions.refresh()?;
        Ok(admissions)
    }

    /// `true` if the list is another one than before. A list is replaced as a whole, never changed in place; one that is gone was
    /// not meant to be.
    fn refresh(&mut self) -> Result<bool> {
        let path = store::admitted_path(&self.dir);
        let edition = |file: Metadata| Ok(Edition(file.modified()?, file.len(), file.ino()));
        let edition = std::fs::metadata(&path).and_then(edition).ok();
        if edition == self.read {
            return Ok(false);
        }
        let had_one = std::mem::replace(&mut self.read, edition).is_some();
        ensure!(edition.is_some() || !had_one, "{} is gone", path.display());
        self.clients = store::admitted(&self.dir)?;
        Ok(true)
    }

    fn keys(&self) -> Vec<PublicKey> {
        self.clients.iter().map(|client| client.key).collect()
    }

    fn admins(&self) -> Vec<PublicKey> {
        self.clients.iter().filter(|client| client.admin).map(|client| client.key).collect()
    }

    /// For people.
    fn name_of(&self, key: PublicKey) -> String {
        let named = self.clients.iter().find(|client| client.key == key && client.name != "-");
        named.map_or_else(|| format!("{key:?}"), |client| client.name.clone())
    }

    fn follow(&mut self, server: &mut Server) {
        let result = self.refresh().and_then(|is_new| {
            if is_new {
                server.admit(self.keys())?;
                server.set_admins(self.admins());
            }
            Ok(())
        });
        if let Err(error) = result {
            eprintln!("pagoda: {error}; the clients admitted before stay", error = in_full(error.as_ref()));
        }
    }
}

/// Memory that is lent stays in DRAM, or is not lent.
fn lock_memory(size: u64) -> Result<()> {
    host::lock_memory(size).map_err(|error| match error {
        HostError::TooLittle { needed, available, .. } => anyhow!(
            "--size {}: this machine has {} available, and needs {} of that itself; give less",
            format_size(size),
            format_size(available),
            format_size(needed - size)
        ),
        other => other.into(),
    })
}

/// Room of a disk that is there before it is promised.
fn take_disk(dir: &Path, bytes: u64) -> Result<Box<dyn Medium>> {
    match FileMedium::create(dir, bytes) {
        Ok(medium) => {
            if let Err(error) = host::serve_io() {
                eprintln!(
                    "pagoda: the kernel does not count this as serving I/O ({error}): no host should swap to what depends on \
                     it; run as root with all capabilities for that"
                );
            }
            Ok(Box::new(medium))
        }
        Err(MediumError::TooLittle { dir, wanted, available }) => Err(anyhow!(
            "--size {}: the file system of {} has {} available; give less",
            format_size(wanted),
            dir.display(),
            format_size(available)
        )),
        Err(other) => Err(other.into()),
    }
}

/// What the host's memory says, once a second.
struct HostGauge {
    meminfo: PathBuf,
    stalls: PathBuf,
    gauge: Gauge,
    looked_at: Option<Time>,
    is_blind: bool,
}

impl HostGauge {
    /// `dir`: where the files are, if not where the kernel has them.
    fn new(dir: Option<&Path>) -> Result<HostGauge> {
        let (meminfo, stalls) = match dir {
            Some(dir) => (dir.join("meminfo"), dir.join("pressure")),
            None => (PathBuf::from("/proc/meminfo"), PathBuf::from("/proc/pressure/memory")),
        };
        host::sample_of(&meminfo, &stalls)?;
        Ok(HostGauge { meminfo, stalls, gauge: Gauge::default(), looked_at: None, is_blind: false })
    }

    fn follow(&mut self, server: &mut Server, now: Time) {
        if self.looked_at.is_some_and(|at| now.since(at) < LOOK_EVERY) {
            return;
        }
        self.looked_at = Some(now);
        let before = self.gauge.level();
        let result = host::sample_of(&self.meminfo, &self.stalls).map(|sample| self.gauge.apply(now, &sample));
        match &result {
            Ok(level) => {
                let level = *level;
                server.set_pressure(level);
                if level != before {
                    eprintln!("pagoda: {}", said_of(level));
                }
            }
            // The level stays as it was.
            Err(error) if !self.is_blind => eprintln!("pagoda: {error}: whether memory is short is not known"),
            Err(_) => {}
        }
        self.is_blind = result.is_err();
    }
}

fn said_of(level: Pressure) -> &'static str {
    match level {
        Pressure::None => "memory is not short any more",
        Pressure::Yellow => "memory is getting short (yellow): no new slabs are lent",
        Pressure::Orange => "memory is short (orange): clients are asked to move their pages away",
        Pressure::Red => "memory is very short (red): clients drop what they have at another server, too",
    }
}
