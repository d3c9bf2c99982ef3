//! Small file systems on loop devices, as swap directories.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::MIB;

/// The kind of file system that is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    Ext4,
    Xfs,
    /// In memory, without a device.
    Tmpfs,
}

/// A file system in a file, which is mounted until it is dropped.
#[derive(Debug)]
pub struct LoopFs {
    mount: PathBuf,
    image: PathBuf,
}

impl LoopFs {
    /// Makes and mounts one of `mib` MiB at `mount`, which must not exist.
    ///
    /// # Errors
    /// mkfs or mount refuse; root is needed.
    pub fn make(mount: &Path, kind: FileSystem, mib: u64) -> Result<Self> {
        let image = mount.with_extension("img");
        fs::create_dir(mount).with_context(|| format!("make {}", mount.display()))?;
        let mut command = Command::new("mount");
        match kind {
            FileSystem::Tmpfs => {
                command.args(["-t", "tmpfs", "-o", &format!("size={mib}m,mode=700"), "tmpfs"]);
            }
            FileSystem::Ext4 | FileSystem::Xfs => {
                let file = File::create(&image).context("make the image")?;
                file.set_len(mib * MIB).context("size the image")?;
                let mkfs = match kind {
                    FileSystem::Xfs => ["mkfs.xfs", "-q", "-f"],
                    _ => ["mkfs.ext4", "-q", "-m0"],
                };
                run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(&image))?;
                command.args(["-o", "loop"]).arg(&image);
            }
        }
        run(command.arg(mount))?;
        let made = Self { mount: mount.to_owned(), image };
        // As the daemon demands of its directories.
        run(Command::new("chmod").arg("700").arg(mount))?;
        Ok(made)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }
}

/// A file system to which nothing can be written, and on which nothing can be made, until this is dropped.
#[derive(Debug)]
pub struct Frozen<'a>(&'a LoopFs);

impl LoopFs {
    /// Has all writers wait, as a disk does that stands still.
    ///
    /// # Errors
    /// fsfreeze(8) refuses.
    pub fn freeze(&self) -> Result<Frozen<'_>> {
        run(Command::new("fsfreeze").arg("-f").arg(&self.mount))?;
        Ok(Frozen(self))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("fsfreeze").arg("-u").arg(&self.0.mount)) {
            eprintln!("{error:#}");
        }
    }
}

impl Drop for LoopFs {
    fn drop(&mut self) {
        // Lazily: what still has a file open there ends with the test.
        if let Err(error) = run(Command::new("umount").arg("-l").arg(&self.mount)) {
            eprintln!("{error:#}");
        }
        let _ = fs::remove_file(&self.image);
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
