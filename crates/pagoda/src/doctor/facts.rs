//! What there is on this host. Files of /proc and /sys are read below a root that tests replace.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagoda_api::{Client, Health, HostInfo, Version, in_full};
use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::process::Resource;

/// Where a daemon keeps swap files unless told otherwise.
const SWAP_DIR_DEFAULT: &str = "/var/lib/pagoda/swap";

/// Block of the trial file: the largest logical block that direct I/O to common disks asks for.
const BLOCK_BYTES: usize = 4096;

/// Sizes of large folios that Pagoda has a use for, in KiB.
pub const FOLIO_KIB_HUGE: u32 = 2048;
pub const FOLIO_KIB_CHUNK: u32 = 1024;

/// Whether a device can be opened for reading and writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    Usable,
    Missing,
    NoPermission,
    Broken(String),
}

/// A program and what it says of its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub path: PathBuf,
    pub version: String,
}

/// What a trial of the swap directory showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwapTrial {
    Works { free_bytes: u64, file_system: String },
    NoDirectIo,
    NoHoles,
    Failed { step: &'static str, error: String },
}

/// What the running daemon says.
#[derive(Debug, Clone, PartialEq)]
pub struct Daemon {
    pub version: Version,
    pub health: Health,
}

/// All that the checks judge. `None`: this kernel has no such setting.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    pub kernel: String,
    pub uffd_device: Device,
    pub has_cap_sys_ptrace: bool,
    pub unprivileged_userfaultfd: Option<u64>,
    pub is_root: bool,
    pub folios_top: Option<String>,
    pub folios_huge: Option<String>,
    pub folios_chunk: Option<String>,
    /// Whether the host itself swaps; `None`: it cannot be told.
    pub host_swap: Option<bool>,
    pub max_map_count: Option<u64>,
    pub io_uring_disabled: Option<u64>,
    /// How much memory a process may lock, in bytes; `None`: no limit.
    pub memlock_bytes: Option<u64>,
    pub kvm: Device,
    pub qemu: Result<Program, String>,
    pub swap_dir: PathBuf,
    pub swap: SwapTrial,
    pub daemon: Result<Daemon, String>,
}

pub fn gather(client: &Client, swap_dir: Option<PathBuf>, qemu: &str) -> Facts {
    let root = Root(PathBuf::from("/"));
    let daemon = ask(client);
    let swap_dir = swap_dir
        .or_else(|| daemon.as_ref().ok().map(|(_, host)| host.swap_dir.clone()))
        .unwrap_or_else(|| SWAP_DIR_DEFAULT.into());
    Facts {
        kernel: root.line("proc/sys/kernel/osrelease").unwrap_or_default(),
        uffd_device: device("/dev/userfaultfd"),
        has_cap_sys_ptrace: root.has_cap_sys_ptrace(),
        unprivileged_userfaultfd: root.number("proc/sys/vm/unprivileged_userfaultfd"),
        is_root: rustix::process::geteuid().is_root(),
        folios_top: root.choice("sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        folios_huge: root.folios(FOLIO_KIB_HUGE),
        folios_chunk: root.folios(FOLIO_KIB_CHUNK),
        host_swap: root.line("proc/swaps").map(|text| text.lines().count() > 1),
        max_map_count: root.number("proc/sys/vm/max_map_count"),
        io_uring_disabled: root.number("proc/sys/kernel/io_uring_disabled"),
        memlock_bytes: rustix::process::getrlimit(Resource::Memlock).current,
        kvm: device("/dev/kvm"),
        qemu: find_qemu(qemu),
        swap: try_swap(&swap_dir),
        swap_dir,
        daemon: daemon.map(|(daemon, _)| daemon),
    }
}

fn ask(client: &Client) -> Result<(Daemon, HostInfo), String> {
    let answers = || {
        let daemon = Daemon { version: client.version()?, health: client.health()? };
        Ok::<_, pagoda_api::ClientError>((daemon, client.host()?))
    };
    answers().map_err(|error| error.to_string())
}

/// The directory below which `proc` and `sys` are.
struct Root(PathBuf);

impl Root {
    fn line(&self, path: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.0.join(path)).ok()?;
        Some(text.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.line(path)?.parse().ok()
    }

    /// The word in brackets of a text such as `always [advise] never`.
    fn choice(&self, path: &str) -> Option<String> {
        let line = self.line(path)?;
        let word = line.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']'))?;
        Some(word.to_owned())
    }

    fn folios(&self, kib: u32) -> Option<String> {
        self.choice(&format!("sys/kernel/mm/transparent_hugepage/hugepages-{kib}kB/shmem_enabled"))
    }

    fn has_cap_sys_ptrace(&self) -> bool {
        /// Number of the capability in linux/capability.h.
        const CAP_SYS_PTRACE: u32 = 19;
        let status = self.line("proc/self/status").unwrap_or_default();
        status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .is_some_and(|caps| caps & (1 << CAP_SYS_PTRACE) != 0)
    }
}

fn device(path: &str) -> Device {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Device::Usable,
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound => Device::Missing,
            io::ErrorKind::PermissionDenied => Device::NoPermission,
            _ => Device::Broken(error.to_string()),
        },
    }
}

fn find_qemu(program: &str) -> Result<Program, String> {
    let path = crate::run::program::find(program).map_err(|error| in_full(error.as_ref()))?;
    let output =
        Command::new(&path).arg("--version").output().map_err(|error| format!("start {}: {error}", path.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next() {
        Some(line) if output.status.success() => Ok(Program { path, version: line.to_owned() }),
        _ => Err(format!("{} --version failed: {}", path.display(), output.status)),
    }
}

/// Writes a block past the page cache into a file without a name, punches it, and looks for the
/// hole.
fn try_swap(dir: &Path) -> SwapTrial {
    let failed = |step: &'static str| {
        move |errno: rustix::io::Errno| SwapTrial::Failed { step, error: io::Error::from(errno).to_string() }
    };
    swap_trial(dir, failed).unwrap_or_else(|trial| trial)
}

fn swap_trial<F>(dir: &Path, failed: impl Fn(&'static str) -> F) -> Result<SwapTrial, SwapTrial>
where
    F: FnOnce(rustix::io::Errno) -> SwapTrial,
{
    let unnamed = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let fs = rustix::fs::statfs(dir).map_err(failed("look at the directory"))?;
    // First without, to tell a directory that cannot be written from one without direct I/O.
    rustix::fs::open(dir, unnamed, mode).map_err(failed("make a file without a name"))?;
    let file = rustix::fs::open(dir, unnamed | OFlags::DIRECT, mode).map_err(|_| SwapTrial::NoDirectIo)?;
    let buffer = vec![0xa5_u8; 2 * BLOCK_BYTES];
    let start = buffer.as_ptr().align_offset(BLOCK_BYTES);
    let block = &buffer[start..start + BLOCK_BYTES];
    match rustix::io::pwrite(&file, block, 0) {
        Ok(BLOCK_BYTES) => {}
        Ok(_) => return Err(failed("write a block")(rustix::io::Errno::NOSPC)),
        Err(rustix::io::Errno::INVAL) => return Err(SwapTrial::NoDirectIo),
        Err(errno) => return Err(failed("write a block")(errno)),
    }
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, BLOCK_BYTES as u64)
        .map_err(|_| SwapTrial::NoHoles)?;
    // A file system that only pretends would still find data here.
    if rustix::fs::seek(&file, SeekFrom::Data(0)) != Err(rustix::io::Errno::NXIO) {
        return Err(SwapTrial::NoHoles);
    }
    Ok(SwapTrial::Works {
        free_bytes: fs.f_bavail.saturating_mul(u64::try_from(fs.f_bsize).unwrap_or(0)),
        file_system: file_system_name(fs.f_type),
    })
}

/// Magic numbers of statfs(2).
fn file_system_name(magic: i64) -> String {
    match magic {
        0xef53 => "ext4".into(),
        0x5846_5342 => "xfs".into(),
        0x9123_683e => "btrfs".into(),
        0x0102_1994 => "tmpfs".into(),
        0x794c_7630 => "overlayfs".into(),
        0x6969 => "nfs".into(),
        other => format!("file system {other:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_below_a_root() {
        let dir = std::env::temp_dir().join(format!("pagoda-doctor-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = dir.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/sys/vm/max_map_count", "65530\n");
        write("proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n");
        write(
            "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled",
            "always [inherit] within_size advise never\n",
        );
        let root = Root(dir.clone());
        assert_eq!(root.number("proc/sys/vm/max_map_count"), Some(65530));
        assert_eq!(root.number("proc/sys/vm/absent"), None);
        assert_eq!(root.folios(2048).as_deref(), Some("inherit"));
        assert_eq!(root.folios(64), None);
        assert!(root.has_cap_sys_ptrace());
        write("proc/self/status", "CapEff:\t0000000000000000\n");
        assert!(!root.has_cap_sys_ptrace());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn devices() {
        assert_eq!(device("/dev/null"), Device::Usable);
        assert_eq!(device("/dev/no-such-device"), Device::Missing);
        assert!(matches!(device("/dev"), Device::Broken(_)));
    }

    #[test]
    fn swap_directories() {
        let trial = try_swap(Path::new("/nonexistent"));
        assert!(matches!(trial, SwapTrial::Failed { step: "look at the directory", .. }), "{trial:?}");
        let trial = try_swap(Path::new("/proc"));
        assert!(!matches!(trial, SwapTrial::Works { .. }), "{trial:?}");
        // Of the build directory's file system we know no more than that it is writable.
        let trial = try_swap(&std::env::temp_dir());
        assert!(!matches!(trial, SwapTrial::Failed { .. }), "{trial:?}");
    }
}
