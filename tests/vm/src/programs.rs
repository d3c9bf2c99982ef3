//! What is under test and what it runs with: our programs, the guest images, the QEMUs. Each is made once a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};

/// Names a directory with the [`PROGRAMS`] and `xtask` to test instead of building them.
const BIN_DIR_ENV: &str = "PAGODA_BIN_DIR";

/// What is under test, and the toy VMM. The command finds the program of the servers beside itself.
const PROGRAMS: [&str; 5] = ["pagodad", "pagoda", "pagoda-server", "libpagoda_shim.so", "toy-vmm"];

/// The root of the repository.
pub fn repository() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_owned()
}

/// Where tests put their files: on the disk that the repository is on, which takes direct I/O.
///
/// # Errors
/// It cannot be made.
pub fn work_dir() -> Result<PathBuf> {
    let dir = repository().join("out/vm");
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    Ok(dir)
}

/// Directory of the programs under test; builds them unless the environment names one.
///
/// # Errors
/// They cannot be built, or one is missing.
pub fn bin_dir() -> Result<&'static Path> {
    static DIR: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let dir = DIR.get_or_init(|| find_or_build().map_err(|error| format!("{error:#}")));
    dir.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn find_or_build() -> Result<PathBuf> {
    let dir = match std::env::var_os(BIN_DIR_ENV) {
        Some(dir) => PathBuf::from(dir),
        None => build()?,
    };
    for name in PROGRAMS.into_iter().chain(["xtask"]) {
        ensure!(dir.join(name).is_file(), "{} has no {name}", dir.display());
    }
    Ok(dir)
}

fn build() -> Result<PathBuf> {
    let arguments = ["build", "--profile", "ci", "--workspace"];
    let status = cargo().args(arguments).status().context("run cargo")?;
    ensure!(status.success(), "cargo {} failed", arguments.join(" "));
    // This test runs from TARGET/PROFILE/deps.
    let this = std::env::current_exe().context("find this program")?;
    let target = this.ancestors().nth(3).context("find the target directory")?;
    Ok(target.join("ci"))
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(repository());
    command
}

/// The files that guests boot from.
#[derive(Debug, Clone)]
pub struct Images {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// With memtester and stress-ng.
    pub tools_initrd: PathBuf,
}

/// The guest images; made when they are missing or older than the guest's sources.
///
/// # Errors
/// They cannot be made.
pub fn images() -> Result<Images> {
    static MADE: OnceLock<Result<(), String>> = OnceLock::new();
    let dir = repository().join("out/guest");
    let images = Images {
        kernel: dir.join("cloud.vmlinuz"),
        initrd: dir.join("cloud.initrd"),
        tools_initrd: dir.join("cloud-tools.initrd"),
    };
    let there = || [&images.kernel, &images.initrd, &images.tools_initrd].into_iter().all(|path| path.is_file());
    let made = MADE.get_or_init(|| {
        let sources = newest(&repository().join("tests/guest")).map_err(|error| format!("{error:#}"))?;
        let is_current = |path: &PathBuf| modified(path).is_ok_and(|at| at >= sources);
        if there() && is_current(&images.initrd) && is_current(&images.tools_initrd) {
            return Ok(());
        }
        // It replaces them by renaming: who boots the old ones at this moment is not disturbed.
        let xtask = bin_dir().map_err(|error| format!("{error:#}"))?.join("xtask");
        match Command::new(xtask).args(["image", "--tools"]).status() {
            Ok(status) if status.success() => Ok(()),
            other => Err(format!("xtask image --tools: {other:?}")),
        }
    });
    match made {
        Ok(()) if there() => Ok(images),
        Ok(()) => bail!("{} is not complete: run cargo xtask image --tools", dir.display()),
        Err(error) => bail!("{error}"),
    }
}

/// What clients of a pool boot: Debian's full kernel, and an initramfs with `pagoda` and what its users run beside it.
///
/// # Errors
/// They cannot be made.
pub fn client_images() -> Result<Images> {
    static MADE: OnceLock<Result<(), String>> = OnceLock::new();
    full_images("client", &["pagoda", "pagoda-server"], &[], &MADE)
}

/// What a host boots that is a guest here: the same with the daemon, the shim and the toy VMM.
///
/// # Errors
/// They cannot be made.
pub fn host_images() -> Result<Images> {
    static MADE: OnceLock<Result<(), String>> = OnceLock::new();
    full_images("host", &PROGRAMS, &[], &MADE)
}

/// What guests with databases boot: Debian's full kernel, and an initramfs with redis and SQLite.
///
/// # Errors
/// They cannot be made.
pub fn database_images() -> Result<Images> {
    static MADE: OnceLock<Result<(), String>> = OnceLock::new();
    full_images("databases", &[], &["redis-server", "redis-cli", "sqlite3"], &MADE)
}

/// With programs of ours, and of Debian's.
fn full_images(name: &str, ours: &[&str], debians: &[&str], made: &OnceLock<Result<(), String>>) -> Result<Images> {
    let made = made.get_or_init(|| {
        let bin_dir = bin_dir().map_err(|error| format!("{error:#}"))?;
        let mut command = Command::new(bin_dir.join("xtask"));
        command.args(["image", "--kernel", "full", "--client", "--initrd", name]);
        let ours = ours.iter().map(|program| bin_dir.join(program));
        for program in ours.chain(debians.iter().map(PathBuf::from)) {
            command.arg("--with").arg(program);
        }
        match command.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(format!("xtask image --initrd {name}: {}", String::from_utf8_lossy(&output.stderr))),
            Err(error) => Err(format!("xtask image --initrd {name}: {error}")),
        }
    });
    made.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
    let dir = repository().join("out/guest");
    let initrd = dir.join(format!("full-{name}.initrd"));
    Ok(Images { kernel: dir.join("full.vmlinuz"), initrd: initrd.clone(), tools_initrd: initrd })
}

fn modified(path: &Path) -> Result<SystemTime> {
    let meta = fs::metadata(path).with_context(|| format!("look at {}", path.display()))?;
    meta.modified().context("time of a file")
}

/// When anything in a directory was last changed, deletions included.
fn newest(dir: &Path) -> Result<SystemTime> {
    let mut newest = modified(dir)?;
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        newest = newest.max(if path.is_dir() { self::newest(&path)? } else { modified(&path)? });
    }
    Ok(newest)
}

/// Which of the two QEMUs runs a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qemu {
    /// The one that the distribution has installed.
    System,
    /// A newer one that `scripts/install-deps.sh` unpacked.
    Ten,
}

impl Qemu {
    /// The path of the program.
    pub fn program(self) -> PathBuf {
        match self {
            Self::System => "/usr/bin/qemu-system-x86_64".into(),
            Self::Ten => repository().join("out/qemu10/qemu-system-x86_64"),
        }
    }

    /// Checks that it is there.
    ///
    /// # Errors
    /// It is not; the text says how to get it.
    pub fn require(self) -> Result<PathBuf> {
        let program = self.program();
        ensure!(program.is_file(), "{} is missing: run scripts/install-deps.sh test", program.display());
        Ok(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_newest_file_of_a_tree() {
        let dir = std::env::temp_dir().join(format!("pagoda-newest-{}", std::process::id()));
        let deep = dir.join("a/b");
        fs::create_dir_all(&deep).unwrap();
        let file = fs::File::create(deep.join("c")).unwrap();
        let later = SystemTime::now() + Duration::from_secs(60);
        file.set_modified(later).unwrap();
        let found = newest(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert!(found.unwrap() >= later - Duration::from_secs(1));
        assert!(newest(&dir).is_err());
    }
}
