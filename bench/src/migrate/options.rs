//! What is measured of moves, as the command line says it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use testkit::workspace::repository;

use super::guest::Size;
use crate::balloon::guest::QEMU;

const SIZES_MIB: [u64; 2] = [512, 2048];
/// Less has no room for the guest's kernel beside what is filled.
const MEMORY_MIB_MIN: u64 = 256;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// migrate, after-move: the QEMU of both sides (default: 10 if scripts/install-deps.sh has unpacked it; a full run of migrate has the
    /// smallest guest also with the installed one)
    #[arg(long, value_enum)]
    pub qemu: Option<Qemu>,
    /// migrate, after-move: the link between the hosts (default: 1 Gbit/s, and in a full run of migrate also unlimited)
    #[arg(long, value_enum)]
    pub link: Option<Speed>,
    /// migrate, after-move: memory of the guest in MiB (default: 512, and in a full run also 2048)
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
}

/// Which QEMU runs the VMs of both sides
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Qemu {
    /// The installed one: 7.2 in Debian 12
    #[value(name = "7.2", alias = "system")]
    System,
    /// The newer one that `scripts/install-deps.sh test` unpacks
    #[value(name = "10")]
    Ten,
}

/// How fast the link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Speed {
    #[value(name = "1gbit")]
    Gigabit,
    Unlimited,
}

/// One of the combinations that are measured.
#[derive(Debug, Clone)]
pub struct Setting {
    /// QEMU's full path, and its version.
    pub qemu: PathBuf,
    pub version: String,
    pub link: Speed,
    pub size: Size,
}

impl Options {
    /// Whether something else is asked for than what a result stands for.
    pub fn is_part(&self) -> bool {
        self.qemu.is_some() || self.link.is_some() || self.memory.is_some()
    }

    /// The combinations of a quick or a full run.
    ///
    /// # Errors
    /// A size that no guest can have; there is no such QEMU.
    pub fn settings(&self, quick: bool) -> Result<Vec<Setting>> {
        let newest = if Qemu::Ten.program().is_ok() { Qemu::Ten } else { Qemu::System };
        let (links, sizes) = (self.links(quick), self.sizes(quick)?);
        let setting = |qemu: Qemu, link: Speed, size: Size| {
            let program = qemu.program()?;
            Ok(Setting { version: version(&program)?, qemu: program, link, size })
        };
        let all = links.iter().flat_map(|link| sizes.iter().map(|size| (*link, *size)));
        let mut settings: Vec<Setting> =
            all.map(|(link, size)| setting(self.qemu.unwrap_or(newest), link, size)).collect::<Result<_>>()?;
        if self.qemu.is_none() && newest != Qemu::System && !quick {
            settings.push(setting(Qemu::System, links[0], sizes[0])?);
        }
        Ok(settings)
    }

    fn sizes(&self, quick: bool) -> Result<Vec<Size>> {
        let sizes_mib = match self.memory {
            Some(memory_mib) => vec![memory_mib],
            None if quick => SIZES_MIB[..1].to_vec(),
            None => SIZES_MIB.to_vec(),
        };
        let size = |memory_mib: u64| {
            ensure!(
                memory_mib >= MEMORY_MIB_MIN && memory_mib.is_multiple_of(16),
                "--memory {memory_mib}: give at least {MEMORY_MIB_MIN}, a multiple of 16"
            );
            Ok(Size { memory_mib })
        };
        sizes_mib.into_iter().map(size).collect()
    }

    fn links(&self, quick: bool) -> Vec<Speed> {
        match self.link {
            Some(link) => vec![link],
            None if quick => vec![Speed::Gigabit],
            None => vec![Speed::Gigabit, Speed::Unlimited],
        }
    }
}

impl Setting {
    /// What names of rows begin with.
    pub fn name(&self) -> String {
        format!("{} MiB, {}, QEMU {}", self.size.memory_mib, self.link.text(), self.version)
    }
}

impl Qemu {
    /// Its full path: the other host starts no other one.
    ///
    /// # Errors
    /// It is missing.
    fn program(self) -> Result<PathBuf> {
        if self == Self::Ten {
            let program = repository().join("out/qemu10/qemu-system-x86_64");
            ensure!(program.is_file(), "{} is missing: run scripts/install-deps.sh test", program.display());
            return Ok(program);
        }
        let paths = std::env::var_os("PATH").context("no PATH")?;
        let found = std::env::split_paths(&paths).map(|dir| dir.join(QEMU)).find(|file| file.is_file());
        found.with_context(|| format!("find {QEMU}"))
    }
}

/// As it says, such as `7.2.22`.
///
/// # Errors
/// It does not run.
pub fn version(program: &Path) -> Result<String> {
    let said = Command::new(program).arg("--version").output().context("ask QEMU for its version")?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let version = said.split_ascii_whitespace().skip_while(|word| *word != "version").nth(1);
    Ok(version.with_context(|| format!("read QEMU's version from {said:?}"))?.to_owned())
}

impl Speed {
    /// As rows name it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Gigabit => "1 Gbit/s",
            Self::Unlimited => "unlimited link",
        }
    }

    /// As `tc` understands it, in either direction. TCP has some 119 MB/s of a gigabit.
    pub fn rate(self) -> Option<&'static str> {
        match self {
            Self::Gigabit => Some("1gbit"),
            Self::Unlimited => None,
        }
    }
}
