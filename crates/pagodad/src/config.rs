//! What the daemon is told: the command line, then the configuration file, then defaults.
//!
//! Nothing is made or changed here. Every setting is checked before the daemon acts on any, so a
//! wrong one leaves running VMs with the daemon they have.

mod file;
mod hosts;
mod moves;
mod outbox;
mod policy;
mod snapshots;
mod values;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use clap::builder::BoolishValueParser;
use pagoda_api::{METRICS_ADDR_DEFAULT, SOCKET_DEFAULT};
use pagoda_pager::poll::{BUSY_POLL_DEFAULT, BUSY_POLL_MAX};

use self::file::File;
pub use self::hosts::HostsConfig;
pub use self::moves::MovesConfig;
pub use self::policy::PolicyConfig;
pub(crate) use self::policy::size;
pub use self::snapshots::SnapshotsConfig;
use self::values::GROUPS;
pub use self::values::{Group, LargeFolios, Metrics, PageIn, Replacement};
use crate::compressed::{Compressed, CompressedFile};

const CONFIG_DEFAULT: &str = "/etc/pagoda/pagoda.toml";
const STATE_DIR_DEFAULT: &str = "/var/lib/pagoda";
const SHIM_NAME: &str = "libpagoda_shim.so";
const SHIM_DIR_INSTALLED: &str = "/usr/lib/pagoda";

/// `sun_path` has 108 bytes, the last of which is the NUL (unix(7)).
const SOCKET_PATH_LEN_MAX: usize = 107;

const EXAMPLES: &str = "\
Examples:
  pagodad                                  the system's instance, as the systemd unit starts it
  pagodad --tune-host --swap-dir /nvme/pagoda
  pagodad --state-dir D --swap-dir D/swap --socket D/pagoda.sock
                                           a private instance that touches nothing of the system's;
                                           then PAGODA_SOCKET=D/pagoda.sock pagoda run ...

Stopping or replacing the daemon loses nothing: VMs wait for the next one that is started with the
same --state-dir, --swap-dir and --attach-socket.";

/// Pagoda's daemon: serves the memory of VMs from DRAM and their private swap files.
///
/// Every option may also stand in the configuration file, as `state_dir = "/var/lib/pagoda"`; the
/// command line wins.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "pagodad", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Args {
    /// Configuration file [default: /etc/pagoda/pagoda.toml if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Directory of what a restarted daemon needs to know about each VM [default: /var/lib/pagoda]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// Directory of the VMs' swap files: on ext4 or XFS, best on an NVMe disk of its own
    /// [default: STATE_DIR/swap]
    #[arg(long, value_name = "DIR")]
    pub swap_dir: Option<PathBuf>,

    /// Directory of the pool that VMs with --remote borrow memory from: keys, servers, registry, address of etcd
    /// [default: /var/lib/pagoda/pool, as `pagoda pool`]
    #[arg(long, value_name = "DIR")]
    pub pool_dir: Option<PathBuf>,

    /// Control socket, which the `pagoda` command uses [default: /run/pagoda/pagoda.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Socket on which VMs attach [default: attach.sock beside the control socket]
    #[arg(long, value_name = "PATH")]
    pub attach_socket: Option<PathBuf>,

    /// Members of this group may start VMs, such as libvirt's QEMU user; only the daemon's own user
    /// and root may do more [default: nobody else may do anything]
    #[arg(long, value_name = "NAME|GID")]
    pub group: Option<Group>,

    /// Where Prometheus finds the metrics over TCP, without authentication [default: 127.0.0.1:9464;
    /// off if --socket is not the default, for two daemons cannot share the port]
    #[arg(long, value_name = "ADDR:PORT|off")]
    pub metrics: Option<Metrics>,

    /// Library that is preloaded into VMs [default: libpagoda_shim.so beside this program, in
    /// ../lib/pagoda from there, or in /usr/lib/pagoda]
    #[arg(long, value_name = "FILE")]
    pub shim: Option<PathBuf>,

    /// Set what Pagoda wants of the host at start: large folios for memfds that ask for them, and
    /// vm.max_map_count [default: leave the host alone, and say in `pagoda doctor` what is missing]
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new()
    )]
    pub tune_host: Option<bool>,

    /// Whether RAM is made of folios of 1 MiB where the host has them [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub large_folios: Option<LargeFolios>,

    /// Whether VMs share equal pages, those of one --share-group with one another [default: true]
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new()
    )]
    pub page_sharing: Option<bool>,

    /// Whether clones of a snapshot share the memory that they only read [default: true]
    #[arg(
        long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new()
    )]
    pub clone_sharing: Option<bool>,

    /// How much comes in for a fault on a page in swap [default: adaptive]
    #[arg(long, value_name = "HOW")]
    pub page_in: Option<PageIn>,

    /// Which part of a VM leaves DRAM next [default: queues]
    #[arg(long, value_name = "HOW")]
    pub replacement: Option<Replacement>,

    /// How long the end of a page-in is polled for before the CPU may sleep, in microseconds; 0: not at all. Only for
    /// vCPUs that are pinned to one CPU, where page-ins are that quick and nothing else wants the CPU
    /// [default: 200, as kvm.halt_poll_ns]
    #[arg(long, value_name = "US")]
    pub busy_poll_us: Option<u64>,

    /// Record the rounds of the memory policy there, for `pagoda simulate --replay`: what was measured and what was planned.
    /// At most 256 MiB, for the daemon's user alone; a recording that is there is kept as FILE.old
    /// [default: nothing is recorded]
    #[arg(long, value_name = "FILE")]
    pub policy_recording: Option<PathBuf>,

    /// Print every metric as a Markdown table, and exit
    #[arg(long)]
    pub list_metrics: bool,
}

/// All settings, checked; every path is absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub state_dir: PathBuf,
    pub swap_dir: PathBuf,
    /// The pool from which VMs with a remote tier borrow.
    pub pool_dir: PathBuf,
    pub socket: PathBuf,
    pub attach_socket: PathBuf,
    /// Group id whose members may start VMs.
    pub group: Option<u32>,
    pub metrics: Option<SocketAddr>,
    pub shim: PathBuf,
    pub tune_host: bool,
    pub large_folios: LargeFolios,
    pub page_sharing: bool,
    pub clone_sharing: bool,
    pub page_in: PageIn,
    pub replacement: Replacement,
    pub busy_poll: Duration,
    /// The compressed memory of new VMs.
    pub compressed: Option<Compressed>,
    pub snapshots: SnapshotsConfig,
    pub hosts: HostsConfig,
    pub moves: MovesConfig,
    /// How often the sizes of outboxes that follow an SLO are looked at.
    pub outbox_period: Duration,
    /// Where the memory policy is configured; `None`: in the file of the system, if it is there.
    pub file: Option<PathBuf>,
    pub policy: PolicyConfig,
}

impl Config {
    /// Reads the configuration file and puts everything together.
    ///
    /// # Errors
    /// A text that names the file, line and key, or the option, and says what would be right.
    pub fn load(args: Args) -> Result<Self> {
        let file = read(args.config.as_deref())?;
        let exe = std::env::current_exe().context("find the path of this program")?;
        let exe_dir = exe.parent().context("find the directory of this program")?;
        Self::resolve(args, file, exe_dir)
    }

    /// Reads what the configuration file says of the memory policy now.
    ///
    /// # Errors
    /// As [`Config::load`]: anything wrong in the file.
    pub fn reload_policy(&self) -> Result<PolicyConfig> {
        PolicyConfig::resolve(read(self.file.as_deref())?.policy)
    }

    fn resolve(args: Args, file: File, exe_dir: &Path) -> Result<Self> {
        let state_dir = path(args.state_dir.or(file.state_dir), || STATE_DIR_DEFAULT.into())?;
        let swap_dir = path(args.swap_dir.or(file.swap_dir), || state_dir.join("swap"))?;
        let pool_dir = path(args.pool_dir.or(file.pool_dir), || pagoda_pool::store::DIR_DEFAULT.into())?;
        let socket = path(args.socket.or(file.socket), || SOCKET_DEFAULT.into())?;
        let attach_socket = path(args.attach_socket.or(file.attach_socket), || socket.with_file_name("attach.sock"))?;
        check_sockets(&socket, &attach_socket)?;
        let group = match args.group.or(file.group) {
            Some(group) => {
                let groups = std::fs::read_to_string(GROUPS).with_context(|| format!("read {GROUPS}"))?;
                Some(group.gid(&groups)?)
            }
            None => None,
        };
        let recording = args.policy_recording.or(file.policy_recording);
        let recording = recording.map(|file| path(Some(file), PathBuf::new)).transpose()?;
        let is_private = socket != Path::new(SOCKET_DEFAULT);
        let metrics = match args.metrics.or(file.metrics) {
            Some(Metrics::On(addr)) => Some(addr),
            Some(Metrics::Off) => None,
            None if is_private => None,
            None => Some(METRICS_ADDR_DEFAULT.parse().context("default address of the metrics")?),
        };
        Ok(Self {
            shim: find_shim(args.shim.or(file.shim), exe_dir)?,
            snapshots: SnapshotsConfig::resolve(file.snapshots, &state_dir)?,
            hosts: HostsConfig::resolve(file.hosts, &state_dir)?,
            moves: MovesConfig::resolve(file.moves)?,
            outbox_period: outbox::period(&file.outbox)?,
            state_dir,
            swap_dir,
            pool_dir,
            socket,
            attach_socket,
            group,
            metrics,
            tune_host: args.tune_host.or(file.tune_host).unwrap_or(false),
            large_folios: args.large_folios.or(file.large_folios).unwrap_or_default(),
            page_sharing: args.page_sharing.or(file.page_sharing).unwrap_or(true),
            clone_sharing: args.clone_sharing.or(file.clone_sharing).unwrap_or(true),
            page_in: args.page_in.or(file.page_in).unwrap_or_default(),
            replacement: args.replacement.or(file.replacement).unwrap_or_default(),
            busy_poll: busy_poll(args.busy_poll_us.or(file.busy_poll_us))?,
            compressed: file.compressed.map(CompressedFile::resolve).transpose()?,
            file: args.config.map(|file| path(Some(file), PathBuf::new)).transpose()?,
            policy: PolicyConfig { recording, ..PolicyConfig::resolve(file.policy)? },
        })
    }
}

fn read(given: Option<&Path>) -> Result<File> {
    match given {
        Some(path) => file::read(path),
        None => file::read_if_there(Path::new(CONFIG_DEFAULT)),
    }
}

fn busy_poll(us: Option<u64>) -> Result<Duration> {
    let busy_poll = us.map_or(BUSY_POLL_DEFAULT, Duration::from_micros);
    if busy_poll > BUSY_POLL_MAX {
        bail!("busy_poll_us is {}: it can be at most {}", busy_poll.as_micros(), BUSY_POLL_MAX.as_micros());
    }
    Ok(busy_poll)
}

/// VMs are told these paths, and they have other working directories.
fn path(given: Option<PathBuf>, default: impl FnOnce() -> PathBuf) -> Result<PathBuf> {
    let path = given.unwrap_or_else(default);
    std::path::absolute(&path).with_context(|| format!("make the path {path:?} absolute"))
}

fn check_sockets(socket: &Path, attach_socket: &Path) -> Result<()> {
    if socket == attach_socket {
        bail!("the control socket and the attach socket are both {}: give two paths", socket.display());
    }
    for path in [socket, attach_socket] {
        let len = path.as_os_str().len();
        if len > SOCKET_PATH_LEN_MAX {
            bail!(
                "the path of a socket has at most {SOCKET_PATH_LEN_MAX} bytes, this one has {len}: {}; use a \
                 shorter one with --socket or --attach-socket",
                path.display()
            );
        }
    }
    Ok(())
}

fn find_shim(given: Option<PathBuf>, exe_dir: &Path) -> Result<PathBuf> {
    if let Some(shim) = given {
        if !shim.is_file() {
            bail!("the shim {} is not there: give the path of {SHIM_NAME} with --shim", shim.display());
        }
        return path(Some(shim), PathBuf::new);
    }
    let prefix = exe_dir.parent().unwrap_or(exe_dir);
    let dirs = [exe_dir.to_owned(), prefix.join("lib/pagoda"), SHIM_DIR_INSTALLED.into()];
    match dirs.iter().map(|dir| dir.join(SHIM_NAME)).find(|shim| shim.is_file()) {
        Some(shim) => Ok(shim),
        None => {
            let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
            bail!("{SHIM_NAME} is in none of {}: install it there, or name it with --shim", dirs.join(", "))
        }
    }
}

#[cfg(test)]
mod tests;
