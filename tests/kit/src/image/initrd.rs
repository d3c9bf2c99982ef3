//! The initramfs: process 1, the modules it loads, and on request programs of this machine with their libraries: Debian's
//! memory testers, or what a client of a pool runs.

use std::env;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cpio::Archive;
use super::debian::output;
use crate::workspace::repository;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The console's device number (Documentation/admin-guide/devices.txt): the kernel opens it for process 1 before
/// there is a devtmpfs.
const CONSOLE: (u32, u32) = (5, 1);

pub const TOOLS: [&str; 3] = ["memtester", "stress-ng", "swapon"];

/// What a client of a pool runs, as an administrator would by hand: a shell, and what makes disks, swap and file systems.
/// For outboxes also what computes and compares files.
pub const CLIENT_TOOLS: [&str; 22] = [
    "dash",
    "cat",
    "dd",
    "df",
    "gzip",
    "ls",
    "mv",
    "sha256sum",
    "touch",
    "grep",
    "mkfifo",
    "mkdir",
    "rm",
    "sleep",
    "ip",
    "nbd-client",
    "mkswap",
    "swapon",
    "swapoff",
    "mkfs.ext4",
    "mount",
    "umount",
];

/// What the kernel and programs call the shell.
const SHELL: (&str, &str) = ("dash", "/bin/sh");

/// Where Debian puts programs; root's may be missing in PATH.
const PROGRAM_DIRECTORIES: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// A file of this machine and where it goes in the guest.
#[derive(Debug)]
pub struct Extra {
    from: PathBuf,
    to: String,
}

/// Builds process 1, statically linked, so that it runs alone in an initramfs.
pub fn build_init(directory: &Path) -> Result<PathBuf> {
    let target_directory = directory.join("target");
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build
        .args(["build", "--quiet", "--release", "--package", "pagoda-guest", "--bin", "pagoda-guest"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target_directory)
        // The flags hold for the guest alone; what the caller set for its own build must not replace them.
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(repository());
    output(&mut build).context("build the guest program")?;
    Ok(target_directory.join(TARGET).join("release/pagoda-guest"))
}

/// Programs of this machine, and the libraries that they load. Debian's are named; ours are paths.
pub fn programs<P: AsRef<Path>>(wanted: &[P], directory: &Path) -> Result<Vec<Extra>> {
    let mut extras: Vec<Extra> = Vec::new();
    for wanted in wanted.iter().map(AsRef::as_ref) {
        let program = if wanted.is_absolute() { strip(wanted, directory)? } else { find(wanted)? };
        let listing = output(Command::new("ldd").arg(&program))?;
        for library in libraries(&listing)? {
            if extras.iter().all(|extra| extra.to != library) {
                extras.push(Extra { from: PathBuf::from(&library), to: library });
            }
        }
        let name = wanted.file_name().context("a program without a name")?.to_string_lossy();
        let to = if name == SHELL.0 { SHELL.1.to_owned() } else { format!("/bin/{name}") };
        extras.push(Extra { from: program, to });
    }
    Ok(extras)
}

/// A copy without the symbols for a debugger: they are most of a program, and the guest holds it in memory.
fn strip(program: &Path, directory: &Path) -> Result<PathBuf> {
    let stripped = directory.join("stripped").join(program.file_name().context("a program without a name")?);
    fs::create_dir_all(directory.join("stripped")).context("make a directory for stripped programs")?;
    output(Command::new("strip").arg("-o").arg(&stripped).arg(program))?;
    Ok(stripped)
}

fn find(name: &Path) -> Result<PathBuf> {
    let mut candidates = PROGRAM_DIRECTORIES.iter().map(|dir| Path::new(dir).join(name));
    let missing = || format!("{} is not installed: run scripts/install-deps.sh test", name.display());
    candidates.find(|path| path.is_file()).with_context(missing)
}

/// The paths in what ldd says: `name => /path (address)`, and the loader as `/path (address)`.
fn libraries(listing: &str) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for line in listing.lines() {
        if line.contains("not found") {
            bail!("a library is missing: {}", line.trim());
        }
        let path = line.split_ascii_whitespace().find(|word| word.starts_with('/'));
        paths.extend(path.map(str::to_owned));
    }
    Ok(paths)
}

/// Writes the archive to `path`, all at once, so that a guest that boots meanwhile sees the old or the new one.
pub fn write(path: &Path, init: &Path, modules: &[PathBuf], extras: &[Extra]) -> Result<()> {
    let partial = path.with_extension("partial");
    write_archive(&partial, init, modules, extras).with_context(|| format!("write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("rename to {}", path.display()))
}

fn write_archive(path: &Path, init: &Path, modules: &[PathBuf], extras: &[Extra]) -> Result<()> {
    let mut archive = Archive::new(BufWriter::new(File::create(path)?));
    archive.character_device("/dev/console", CONSOLE.0, CONSOLE.1)?;
    for directory in ["/proc", "/sys", "/tmp"] {
        archive.directory(directory)?;
    }
    archive.file("/init", &read(init)?)?;
    let mut order = String::new();
    for module in modules {
        let name = module.file_name().context("module without a name")?.to_string_lossy();
        archive.file(&format!("/modules/{name}"), &read(module)?)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("/modules/order", order.as_bytes())?;
    for extra in extras {
        archive.file(&extra.to, &read(&extra.from)?)?;
    }
    archive.finish()?;
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_is_understood() {
        let listing = "\tlinux-vdso.so.1 (0x00007fff)\n\
                       \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f11)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f22)\n";
        let paths = libraries(listing).expect("nothing missing");
        assert_eq!(paths, ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert!(libraries("\tlibjudy.so => not found\n").is_err());
    }
}
