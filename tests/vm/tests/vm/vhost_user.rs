//! Real vhost-user back ends: processes that map a VM's RAM and write to it without a page fault that anybody sees.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use vm_tests::{Daemon, Folios, GuestOptions, Lab, Qemu, disk, wait};

/// A back end. Killed when dropped.
struct BackEnd(Child);

impl BackEnd {
    /// Started, and listening at `socket`.
    fn start(command: &mut Command, socket: &Path) -> Result<BackEnd> {
        command.stdin(Stdio::null());
        pagoda_sys::toy::process::die_with_parent(command);
        let back_end = BackEnd(command.spawn().with_context(|| format!("start {command:?}"))?);
        wait::until("the back end's socket", wait::HANG, || Ok(socket.exists().then_some(())))?;
        Ok(back_end)
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // It may have ended with its VM; either way it has to be reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The VM runs far above its cap, nothing of it has left DRAM, and it says why.
fn ensure_pinned(daemon: &Daemon, back_end: &str) -> Result<()> {
    let info = daemon.vm("web1")?;
    let reason = info.pinned.clone().context("the VM is not pinned")?;
    ensure!(reason.contains(back_end), "{reason}");
    ensure!(info.counters["evicted_chunks"] == 0, "chunks left DRAM although the VM is pinned: {info:#?}");
    Ok(())
}

/// The guest verifies each page that the back end puts into its memory, while the cap would have most of it paged out.
fn reads_a_disk(qemu: Qemu) -> Result<()> {
    Lab::run("vhost-user-blk", 1, |lab| {
        let (image, socket) = (disk::pattern_disk()?, lab.dir().join("blk.sock"));
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("driver=file,node-name=disk,read-only=on,filename={}", image.display()));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable=off,addr.type=unix,addr.path={}",
            socket.display()
        ));
        let _back_end = BackEnd::start(&mut command, &socket)?;
        let daemon = lab.daemon(Folios::Small)?;
        let device = format!("-chardev socket,id=c0,path={} -device vhost-user-blk-pci,chardev=c0", socket.display());
        let work = "pagoda.work=disk+random:seconds=3 pagoda.mib=200 pagoda.disk_mib=64";
        let guest = lab
            .guest(&daemon, &GuestOptions::new("web1", work).memory("-m 512M").dram("96M").more(&device).qemu(qemu))?;
        guest.wait_phase("random")?;
        ensure_pinned(&daemon, "vhost-user")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn qemu_storage_daemon() -> Result<()> {
    reads_a_disk(Qemu::System)
}

#[test]
fn qemu_storage_daemon_qemu_10() -> Result<()> {
    reads_a_disk(Qemu::Ten)
}

/// A file of the host that the guest reads, copies and compares.
#[test]
fn virtiofsd() -> Result<()> {
    Lab::run("virtiofs", 1, |lab| {
        let (shared, socket) = (lab.dir().join("shared"), lab.dir().join("fs.sock"));
        fs::create_dir(&shared)?;
        fs::copy(disk::pattern_disk()?, shared.join("pattern"))?;
        let mut command = Command::new("/usr/lib/qemu/virtiofsd");
        command.args(["-o", "sandbox=chroot", "-o"]).arg(format!("source={}", shared.display()));
        command.arg(format!("--socket-path={}", socket.display()));
        let _back_end = BackEnd::start(&mut command, &socket)?;
        let daemon = lab.daemon(Folios::Small)?;
        let device =
            format!("-chardev socket,id=c0,path={} -device vhost-user-fs-pci,chardev=c0,tag=shared", socket.display());
        let options = GuestOptions::new("web1", "").memory("-m 512M").dram("96M").client().control().more(&device);
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        control.sh("mkdir -p /mnt && mount -t virtiofs shared /mnt && cat /mnt/pattern > /mnt/copy")?;
        ensure_pinned(&daemon, "vhost-user")?;
        control.send("poweroff")?;
        guest.finish()?;
        ensure!(fs::read(shared.join("pattern"))? == fs::read(shared.join("copy"))?, "the copy differs");
        daemon.wait_gone("web1")
    })
}
