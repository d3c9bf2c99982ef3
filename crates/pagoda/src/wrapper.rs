//! `pagoda-qemu`: this program in QEMU's place, for libvirt's `<emulator>`.
//!
//! It takes QEMU's options and nothing else. Questions about QEMU itself, which libvirt asks when
//! it starts, go straight to QEMU. A guest is run as by `pagoda run`; its name is that of `-name`, its
//! DRAM cap comes from the first of
//!
//! 1. `-fw_cfg name=opt/org.pagoda/dram,string=1G`, in libvirt
//!    `<sysinfo type='fwcfg'><entry name='opt/org.pagoda/dram'>1G</entry></sysinfo>`,
//! 2. the environment variable `PAGODA_DRAM`, in libvirt `<qemu:env name='PAGODA_DRAM' value='1G'/>`,
//! 3. `dram = "1G"` in `/etc/pagoda/vm.d/NAME.toml`,
//!
//! else it may have all of its memory in DRAM. That file may also have `min = "1G"`, `shares = 2000`,
//! `share_group = "tenant1"` and `remote = "pool:"`, as the options of `pagoda run`. The real QEMU is `PAGODA_QEMU`, else
//! the one line of `/etc/pagoda/qemu`, else `/usr/bin/qemu-system-x86_64`.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use pagoda_api::{Client, PolicySettings, RemoteRequest, VmKind, VmSpec, check_vm_name, socket_path};
use serde::Deserialize;

use crate::exit::UsageError;
use crate::qemu_args;
use crate::run::{Request, program, start};
use crate::units::parse_size;

/// The name under which this program is `pagoda-qemu`.
pub const NAME: &str = "pagoda-qemu";

const CONFIG_DIR: &str = "/etc/pagoda";
const QEMU_ENV: &str = "PAGODA_QEMU";
const QEMU_DEFAULT: &str = "/usr/bin/qemu-system-x86_64";
const DRAM_ENV: &str = "PAGODA_DRAM";

/// The settings of a VM in `/etc/pagoda/vm.d/NAME.toml`.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct VmConfig {
    dram: Option<String>,
    min: Option<String>,
    shares: Option<u32>,
    share_group: Option<String>,
    reserve_swap: bool,
    #[serde(rename = "remote", alias = "far")]
    remote: Option<String>,
}

/// Never returns when all goes well.
pub fn run(words: Vec<String>) -> Result<()> {
    let config_dir = Path::new(CONFIG_DIR);
    let qemu = real_qemu(std::env::var_os(QEMU_ENV).map(PathBuf::from), config_dir)?;
    refuse_ourselves(&qemu)?;
    if qemu_args::is_probe(&words) {
        let error = Command::new(&qemu).args(&words).exec();
        return Err(error).with_context(|| format!("start {}", qemu.display()));
    }
    let name = qemu_args::guest_name(&words)
        .ok_or_else(|| UsageError("the VM has no name, by which Pagoda could know it: add -name".into()))?;
    let config = read_config(config_dir, &name)?;
    let in_options = qemu_args::dram_of(&words)?;
    let dram = match in_options {
        Some(bytes) => Some(bytes),
        None => dram_elsewhere(std::env::var(DRAM_ENV).ok(), &config)?,
    };
    let min = config.min.as_deref().map(parse_size).transpose();
    let min = min.map_err(|error| UsageError(format!("min in the VM's settings: {error}")))?;
    let remote = config.remote.as_deref().map(str::parse::<RemoteRequest>).transpose();
    let remote = remote.map_err(|error| UsageError(format!("remote in the VM's settings: {error}")))?;
    start(
        &Client::new(socket_path(None)),
        Request {
            name: Some(name),
            memory_bytes: None,
            spec: VmSpec {
                dram,
                policy: PolicySettings { min: min.unwrap_or(0), shares: config.shares, ..PolicySettings::default() },
                share_group: config.share_group,
                reserve_swap: config.reserve_swap,
                remote,
                ..VmSpec::default()
            },
            kind: VmKind::Qemu,
            program: program::find(&qemu.to_string_lossy())?,
            words,
            outbox: None,
        },
    )
}

fn real_qemu(env: Option<PathBuf>, config_dir: &Path) -> Result<PathBuf> {
    if let Some(path) = env.filter(|path| !path.as_os_str().is_empty()) {
        return Ok(path);
    }
    let file = config_dir.join("qemu");
    let Some(text) = read_if_there(&file)? else { return Ok(QEMU_DEFAULT.into()) };
    let path = PathBuf::from(text.trim());
    if !path.is_absolute() || text.trim().lines().count() != 1 {
        bail!("{} has to be one line, the full path of QEMU", file.display());
    }
    Ok(path)
}

/// A `PAGODA_QEMU` that names this program would start itself for ever.
fn refuse_ourselves(qemu: &Path) -> Result<()> {
    let (Ok(qemu_file), Ok(own)) = (qemu.canonicalize(), std::env::current_exe()) else {
        return Ok(());
    };
    if own.canonicalize().is_ok_and(|own| own == qemu_file) {
        bail!("{} is Pagoda itself: name the real QEMU in {QEMU_ENV} or {CONFIG_DIR}/qemu", qemu.display());
    }
    Ok(())
}

fn read_config(config_dir: &Path, name: &str) -> Result<VmConfig> {
    check_vm_name(name).map_err(UsageError)?;
    let file = config_dir.join("vm.d").join(format!("{name}.toml"));
    match read_if_there(&file)? {
        None => Ok(VmConfig::default()),
        Some(text) => toml::from_str(&text).with_context(|| format!("read settings of {}", file.display())),
    }
}

fn dram_elsewhere(env: Option<String>, config: &VmConfig) -> Result<Option<u64>> {
    let (from, text) = match (env.filter(|text| !text.is_empty()), &config.dram) {
        (Some(text), _) => (DRAM_ENV, text),
        (None, Some(text)) => ("dram in the VM's settings", text.clone()),
        (None, None) => return Ok(None),
    };
    let bytes = parse_size(&text).map_err(|error| UsageError(format!("{from}: {error}")))?;
    Ok(Some(bytes))
}

fn read_if_there(file: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pagoda-wrapper-{}-{name}", std::process::id()));
        std::fs::create_dir_all(dir.join("vm.d")).unwrap();
        for (file, text) in files {
            std::fs::write(dir.join(file), text).unwrap();
        }
        dir
    }

    #[test]
    fn which_qemu() {
        let dir = scratch("qemu", &[("qemu", "/opt/qemu/bin/qemu-system-x86_64\n")]);
        let check = |env: Option<&str>, dir: &Path, expected: &str| {
            assert_eq!(real_qemu(env.map(Into::into), dir).unwrap(), PathBuf::from(expected));
        };
        check(Some("/q"), &dir, "/q");
        check(None, &dir, "/opt/qemu/bin/qemu-system-x86_64");
        check(Some(""), Path::new("/nonexistent"), QEMU_DEFAULT);
        std::fs::write(dir.join("qemu"), "a\nb\n").unwrap();
        assert!(real_qemu(None, &dir).is_err());
        assert!(refuse_ourselves(&std::env::current_exe().unwrap()).is_err());
        assert!(refuse_ourselves(Path::new("/bin/sh")).is_ok());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn settings() {
        let dir = scratch(
            "settings",
            &[
                ("vm.d/a.toml", "dram = \"1G\"\nshares = 2000\nreserve_swap = true\nremote = \"pool:\"\n"),
                ("vm.d/old.toml", "far = \"pool:\"\n"),
                ("vm.d/b.toml", "drma = 1"),
            ],
        );
        let a = read_config(&dir, "a").unwrap();
        let expected = VmConfig {
            dram: Some("1G".into()),
            shares: Some(2000),
            reserve_swap: true,
            remote: Some("pool:".into()),
            ..VmConfig::default()
        };
        assert_eq!(a, expected);
        assert_eq!(read_config(&dir, "old").unwrap().remote, expected.remote, "the key's old name");
        assert!(format!("{:#}", read_config(&dir, "b").unwrap_err()).contains("drma"));
        assert_eq!(read_config(&dir, "c").unwrap(), VmConfig::default());
        assert!(read_config(&dir, "../a").is_err());

        assert_eq!(dram_elsewhere(None, &a).unwrap(), Some(1 << 30));
        assert_eq!(dram_elsewhere(Some("2G".into()), &a).unwrap(), Some(2 << 30));
        assert_eq!(dram_elsewhere(None, &VmConfig::default()).unwrap(), None);
        assert!(dram_elsewhere(Some("2".into()), &a).is_err());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
