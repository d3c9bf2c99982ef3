//! Debian's kernel package, downloaded and unpacked, not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::KernelFlavour;

#[derive(Debug)]
pub struct Kernel {
    pub image: PathBuf,
    /// The directory with `modules.dep`.
    pub modules: PathBuf,
}

/// The kernel unpacked before, or else the newest one that apt offers.
pub fn unpack_kernel(flavour: KernelFlavour, refresh: bool, directory: &Path) -> Result<Kernel> {
    let (name, meta_package) = match flavour {
        KernelFlavour::Cloud => ("kernel-cloud", "linux-image-cloud-amd64"),
        KernelFlavour::Full => ("kernel-full", "linux-image-amd64"),
    };
    let unpacked = directory.join(name);
    if !refresh && let Ok(kernel) = find(&unpacked) {
        return Ok(kernel);
    }
    // Unpacked beside and renamed, so that an interrupted run leaves no half kernel.
    let fresh = directory.join(format!("{name}.new"));
    remove(&fresh)?;
    download_and_unpack(meta_package, &fresh)?;
    find(&fresh)?;
    remove(&unpacked)?;
    fs::rename(&fresh, &unpacked).with_context(|| format!("rename to {}", unpacked.display()))?;
    find(&unpacked)
}

fn download_and_unpack(meta_package: &str, target: &Path) -> Result<()> {
    let downloads = target.join("download");
    fs::create_dir_all(&downloads).with_context(|| format!("create {}", downloads.display()))?;
    if let Err(error) = download(meta_package, &downloads) {
        // Lists that are absent or older than the server's packages: the usual reason on a fresh machine.
        eprintln!("image: {error:#}; updating apt's package lists and trying again");
        output(Command::new("apt-get").args(["update", "-qq"]))?;
        download(meta_package, &downloads)?;
    }
    let packages = files_in(&downloads)?;
    let [package] = &packages[..] else { bail!("apt-get downloaded {} files instead of one", packages.len()) };
    output(Command::new("dpkg-deb").arg("-x").arg(package).arg(target))?;
    remove(&downloads)
}

fn download(meta_package: &str, directory: &Path) -> Result<()> {
    let package = kernel_package(meta_package)?;
    eprintln!("image: downloading {package}");
    let mut apt_get = Command::new("apt-get");
    // As root, apt would drop to its own user, which cannot write here.
    apt_get.args(["-qq", "-o", "APT::Sandbox::User=root", "download", &package]).current_dir(directory);
    output(&mut apt_get).map(drop)
}

/// The package with the kernel itself: the meta package depends on it by its full version.
fn kernel_package(meta_package: &str) -> Result<String> {
    let text = output(Command::new("apt-cache").args(["depends", "--important", meta_package]))?;
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_owned)
        .with_context(|| format!("apt knows no package {meta_package}: a Debian mirror is needed in apt's sources"))
}

fn find(unpacked: &Path) -> Result<Kernel> {
    let image = files_in(&unpacked.join("boot"))?
        .into_iter()
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
        .with_context(|| format!("no kernel in {}", unpacked.display()))?;
    // Debian 12 has lib, Debian 13 usr/lib.
    for parent in ["lib/modules", "usr/lib/modules"] {
        if let Some(modules) = files_in(&unpacked.join(parent)).ok().and_then(|found| found.into_iter().next()) {
            ensure_modules_dep(&modules)?;
            return Ok(Kernel { image, modules });
        }
    }
    bail!("no modules in {}", unpacked.display())
}

/// The package ships no `modules.dep`; its installation script makes it, and that is not run.
fn ensure_modules_dep(modules: &Path) -> Result<()> {
    if modules.join("modules.dep").exists() {
        return Ok(());
    }
    let version = modules.file_name().context("module directory without a name")?;
    let base = modules.ancestors().find(|path| path.ends_with("lib")).and_then(Path::parent);
    let base = base.with_context(|| format!("{} is not below lib", modules.display()))?;
    output(Command::new("depmod").arg("-b").arg(base).arg(version))?;
    ensure!(modules.join("modules.dep").exists(), "depmod wrote no modules.dep for {}", modules.display());
    Ok(())
}

fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .with_context(|| format!("list {}", directory.display()))
}

fn remove(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// Runs a command to its end; what it said is the result, or part of the error.
pub fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let result = command
        .output()
        .with_context(|| format!("start {program}; scripts/install-deps.sh installs what is needed"))?;
    if !result.status.success() {
        bail!("{program}: {}: {}", result.status, String::from_utf8_lossy(&result.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}
