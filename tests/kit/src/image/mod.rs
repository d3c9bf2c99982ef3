//! Images that test guests boot: Debian's own kernel, unmodified, and initramfs files with our process 1.
//! Everything lands under `out/guest`; nothing is installed on this machine.

mod cpio;
mod debian;
mod disk;
mod initrd;
mod modules;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use rustix::fs::{FlockOperation, flock};

use crate::workspace::repository;

#[derive(Debug, Clone, Default, Args)]
pub struct ImageArgs {
    /// Also build the initramfs with memtester, stress-ng and swapon
    #[arg(long)]
    pub tools: bool,
    /// Also build the initramfs of a client of a pool: nbd-client, mkswap, mkfs.ext4, ip and what --with names; best with the
    /// full kernel, which has nbd
    #[arg(long)]
    pub client: bool,
    /// A program of this machine to put into it, with its libraries: a path for ours, a name for Debian's
    #[arg(long, value_name = "PROGRAM", requires = "client")]
    pub with: Vec<PathBuf>,
    /// What to call that initramfs, after the kernel's name [default: client]
    #[arg(long, value_name = "NAME", requires = "client")]
    pub initrd: Option<String>,
    /// Which of Debian's kernels to boot
    #[arg(long, value_enum, default_value_t)]
    pub kernel: KernelFlavour,
    /// Look for a newer kernel package instead of keeping the one that is unpacked
    #[arg(long)]
    pub refresh: bool,
    #[command(subcommand)]
    pub command: Option<ImageCommand>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum KernelFlavour {
    /// linux-image-cloud-amd64: small, virtio only
    #[default]
    Cloud,
    /// linux-image-amd64: all drivers and file systems
    Full,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ImageCommand {
    /// Write a disk image with the pattern that guests verify (pagoda.work=disk)
    Disk(disk::DiskArgs),
}

/// The files that `build` has made for guests to boot.
#[derive(Debug, Clone)]
pub struct Images {
    pub kernel: PathBuf,
    /// The test program and the virtio modules.
    pub initrd: PathBuf,
    /// The same with memtester, stress-ng and swapon, if asked for.
    pub tools_initrd: Option<PathBuf>,
    /// What a client of a pool needs, if asked for.
    pub client_initrd: Option<PathBuf>,
}

pub fn run(args: &ImageArgs) -> Result<()> {
    if let Some(ImageCommand::Disk(disk)) = &args.command {
        return disk::write(disk);
    }
    let images = build(args)?;
    println!("kernel        {}", images.kernel.display());
    println!("initrd        {}", images.initrd.display());
    if let Some(tools) = &images.tools_initrd {
        println!("tools initrd  {}", tools.display());
    }
    if let Some(client) = &images.client_initrd {
        println!("client initrd {}", client.display());
    }
    Ok(())
}

/// Builds what `args` ask for. What is up to date is not made again; several processes may call it at once.
pub fn build(args: &ImageArgs) -> Result<Images> {
    let directory = repository().join("out/guest");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let _exclusive = lock(&directory)?;
    let kernel = debian::unpack_kernel(args.kernel, args.refresh, &directory)?;
    let init = initrd::build_init(&directory)?;
    let modules = modules::in_load_order(&modules::WANTED, &kernel.modules)?;
    let name = match args.kernel {
        KernelFlavour::Cloud => "cloud",
        KernelFlavour::Full => "full",
    };
    let initrd = directory.join(format!("{name}.initrd"));
    initrd::write(&initrd, &init, &modules, &[])?;
    let tools_initrd = if args.tools {
        let path = directory.join(format!("{name}-tools.initrd"));
        initrd::write(&path, &init, &modules, &initrd::programs(&initrd::TOOLS, &directory)?)?;
        Some(path)
    } else {
        None
    };
    let client_initrd = if args.client {
        let path = directory.join(format!("{name}-{}.initrd", args.initrd.as_deref().unwrap_or("client")));
        let modules = modules::in_load_order(&modules::CLIENT_WANTED, &kernel.modules)?;
        let wanted: Vec<&Path> =
            initrd::CLIENT_TOOLS.iter().map(Path::new).chain(args.with.iter().map(PathBuf::as_path)).collect();
        initrd::write(&path, &init, &modules, &initrd::programs(&wanted, &directory)?)?;
        Some(path)
    } else {
        None
    };
    let image = directory.join(format!("{name}.vmlinuz"));
    // Relative, so that the repository can be moved.
    link(kernel.image.strip_prefix(&directory)?, &image)?;
    Ok(Images { kernel: image, initrd, tools_initrd, client_initrd })
}

/// A path that stays the same when the kernel's version does not.
fn link(target: &Path, path: &Path) -> Result<()> {
    if fs::read_link(path).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let partial = path.with_extension("partial");
    // Left behind if an earlier run was interrupted here.
    let _ = fs::remove_file(&partial);
    symlink(target, &partial).with_context(|| format!("create {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("rename to {}", path.display()))
}

/// Held until dropped: tests that run at once must not unpack over each other.
fn lock(directory: &Path) -> Result<File> {
    let path = directory.join(".lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive).with_context(|| format!("lock {}", path.display()))?;
    Ok(file)
}
