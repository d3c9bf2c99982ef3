//! `pagodad`, the daemon. This file is wiring only: read it as a table of contents.

mod attach;
mod balloon;
mod boot;
mod compressed;
mod config;
mod control;
mod crashes;
mod disks;
mod hosts;
mod images;
mod mappers;
mod metrics;
mod moves;
mod notices;
mod outboxes;
mod parts;
mod policy;
mod programs;
mod qmp;
mod random;
mod record;
mod registry;
mod remote;
mod snapshots;
mod timetables;

use pagoda_api::in_full;
use std::io::IsTerminal;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use pagoda_sys::host::{FolioSize, ShmemHuge};
use pagoda_sys::process::{Limit, raise_limit};
use pagoda_sys::socket::Listener;

use config::{Args, Config, LargeFolios};
use registry::{HostFacts, Registry};

/// How long the previous daemon may take to end before this one gives up.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// It is looked at so often meanwhile.
const LOCK_LOOK: Duration = Duration::from_millis(2);
/// How often other mappers of RAM are looked for (reading all of /proc/*/maps takes some 10 ms), and VMs that read their
/// image no more.
const STRANGERS_PERIOD: u32 = 10;
/// How often VMs that never attached are looked for.
const REAP_PERIOD: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    abort_on_panic();
    pagoda_sys::process::ignore_file_size_signal();
    let args = Args::parse();
    if args.list_metrics {
        // A reader that has seen enough is no failure.
        let _ = std::io::Write::write_all(&mut std::io::stdout(), metrics::catalogue_table().as_bytes());
        return ExitCode::SUCCESS;
    }
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match Config::load(args).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagodad: {}", pagoda_api::in_full(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// A thread that panics takes the daemon with it, in every profile: the next one starts from what is known to be true.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

fn run(config: Config) -> Result<()> {
    for dir in [&config.state_dir, &config.state_dir.join("vms"), &outboxes::dir(&config.state_dir), &config.swap_dir] {
        make_private_dir(dir)?;
    }
    let _lock = lock(&config.state_dir)?;
    let host = check_host(&config)?;
    let attach = Listener::bind(&config.attach_socket)?;
    if let Some(gid) = config.group {
        control::open_to_group(&config.attach_socket, gid)?;
    }

    let (notices, heard) = channel();
    let registry = Arc::new(Registry::new(config, host, notices)?);
    registry.load().context("read the state directory")?;
    registry.load_outboxes().context("read the directory of outboxes")?;
    // Paging first. What VMs can do without may fail from here on, unless there are none yet that would wait.
    let (listening, attaching, reaping) = (Arc::clone(&registry), Arc::clone(&registry), Arc::clone(&registry));
    let (governing, counting) = (Arc::clone(&registry), Arc::clone(&registry));
    start("notices", move || notices::listen(&listening, &heard))?;
    start("attach", move || attach::serve(&attach, &attaching))?;
    start("policy", move || policy::governor::run(&governing))?;
    start("reaper", move || {
        for round in 0_u32.. {
            std::thread::sleep(REAP_PERIOD);
            reaping.reap();
            reaping.settle_groups();
            if round % STRANGERS_PERIOD == 0 {
                reaping.find_strangers();
                reaping.let_images_go();
            }
        }
    })?;
    registry.watch_outboxes();
    let sizing = Arc::clone(&registry);
    start("outbox-sizes", move || outboxes::sizes::run(&sizing))?;
    let settling = Arc::clone(&registry);
    start("disks", move || settling.settle_disks())?;
    start("images", move || counting.images.run(&|image| counting.image_is_filled(image)))?;
    let timing = Arc::clone(&registry);
    moves::arbiter::worker::start(&registry).context("start the thread of the arbiter")?;
    moves::recovery::go_on(&registry).context("go on with moves")?;
    start("timetables", move || snapshots::timetables::run(&timing))?;
    let welcoming = Arc::clone(&registry);
    start("hosts", move || hosts::serve(&welcoming))?;
    control::run(&registry, bind_control(&registry)?)?;
    registry.detach_all();
    Ok(())
}

/// The control socket. If it cannot be had while VMs wait for their pages, they are served without.
fn bind_control(registry: &Registry) -> Result<std::os::unix::net::UnixListener> {
    const PART: &str = "control socket";
    let config = &registry.config;
    for pause in parts::pauses() {
        let bound = control::bind_control(&config.socket).and_then(|socket| {
            config.group.map(|gid| control::open_to_group(&config.socket, gid)).transpose()?;
            Ok(socket)
        });
        match bound {
            Err(error) if !registry.lock().is_empty() => {
                registry.parts.failed(PART, &in_full(error.as_ref()));
                // systemd would end a daemon that never says this, and all VMs would wait.
                control::say_ready("serving VMs, without a control socket");
            }
            bound => {
                registry.parts.works(PART);
                return bound;
            }
        }
        std::thread::sleep(pause);
    }
    bail!("there is no control socket")
}

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).with_context(|| format!("start the {name} thread"))?;
    Ok(())
}

/// Makes a directory for its owner alone, or checks that it is one.
///
/// VMs may wait for this daemon. So it asks first: mkdir(2) of a directory that is there waits for the lock of the
/// directory above, which a rename by somebody else can hold until the disk has answered (410 ms were seen).
fn make_private_dir(path: &Path) -> Result<()> {
    if !path.is_dir() {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.with_context(|| format!("make directory {}", path.display()))?;
    }
    let stat = rustix::fs::stat(path).with_context(|| format!("look at {}", path.display()))?;
    if stat.st_mode & 0o022 != 0 {
        bail!("{} can be written by others: VM memory goes there; run `chmod 700 {0}`", path.display());
    }
    Ok(())
}

/// One daemon a state directory. The previous one may still be ending.
fn lock(dir: &Path) -> Result<std::fs::File> {
    let path = dir.join("lock");
    let made = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    // On a file system that has become read-only it is there, and VMs wait.
    let file = match made {
        Err(error) if error.kind() == std::io::ErrorKind::ReadOnlyFilesystem => std::fs::File::open(&path),
        made => made,
    };
    let file = file.with_context(|| format!("open {}", path.display()))?;
    let start = std::time::Instant::now();
    while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        if start.elapsed() > LOCK_WAIT {
            bail!("another pagodad uses the state directory {}", dir.display());
        }
        std::thread::sleep(LOCK_LOOK);
    }
    Ok(file)
}

/// Tries on this kernel what everything rests on.
fn check_host(config: &Config) -> Result<HostFacts> {
    if config.tune_host {
        tune_host();
    }
    let report = pagoda_sys::host::selftest().context("this host cannot page VMs from user space")?;
    for limit in [Limit::OpenFiles, Limit::LockedMemory] {
        if let Err(error) = raise_limit(limit, u64::MAX) {
            tracing::debug!("raise {limit:?}: {error}");
        }
    }
    let mut limits: Vec<String> =
        [Limit::FileSize, Limit::AddressSpace, Limit::Data].into_iter().filter_map(still_limited).collect();
    limits.extend(lock_memory());
    Ok(HostFacts {
        limits,
        direct: config.large_folios == LargeFolios::Auto && FolioSize::Chunk.on_advice(),
        protect: report.continue_protected,
        permission: format!("{:?}", report.permission).to_lowercase(),
    })
}

/// Keeps the daemon's own memory from being swapped out; why that cannot be, if so. Never under a limit: then a VM's memory,
/// which counts at the moment it is mapped, could not be mapped any more.
fn lock_memory() -> Option<String> {
    let advice = "the host may swap out the daemon's own memory, and guests would wait: start pagodad with LimitMEMLOCK=infinity";
    match raise_limit(Limit::LockedMemory, u64::MAX) {
        // The limit does not count for who has the privilege.
        _ if pagoda_sys::process::may_lock_memory() => {
            pagoda_sys::process::lock_memory().err().map(|error| format!("{error}: {advice}"))
        }
        Ok(u64::MAX) => pagoda_sys::process::lock_memory().err().map(|error| format!("{error}: {advice}")),
        Ok(bytes) => Some(format!("RLIMIT_MEMLOCK is {bytes} bytes: {advice}")),
        Err(error) => Some(format!("RLIMIT_MEMLOCK cannot be raised ({error}): {advice}")),
    }
}

/// A limit that would stop the daemon in the middle of something, and cannot be lifted.
fn still_limited(limit: Limit) -> Option<String> {
    let (name, unit) = limit.names();
    match raise_limit(limit, u64::MAX) {
        Ok(u64::MAX) => None,
        Ok(bytes) => Some(format!("{name} is {bytes} bytes and cannot be raised: start pagodad with {unit}=infinity")),
        Err(error) => Some(format!("{name} cannot be raised ({error}): start pagodad with {unit}=infinity")),
    }
}

/// What `--tune-host` stands for: settings of the whole system that make VMs faster and harm nobody else.
fn tune_host() {
    for size in [FolioSize::Chunk, FolioSize::Huge] {
        if !size.on_advice()
            && let Err(error) = size.set(ShmemHuge::Advise)
        {
            tracing::warn!("allow {size:?} folios for shared memory: {error}");
        }
    }
    if let Err(error) = pagoda_sys::host::raise_max_map_count() {
        tracing::warn!("raise vm.max_map_count: {error}");
    }
}
