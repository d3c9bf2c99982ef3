//! Writable disks that both hosts have: what the guest was told is written is there afterwards, and nobody else has written.
//!
//! The guest numbers what it writes to each block, and compares each block with what its memory says of it. A raw disk is in
//! `faults.rs`.

use std::fs;

use anyhow::{Context, Result, ensure};
use vm_tests::{GuestOptions, Lab, Qemu};

use super::hosts::{Hosts, text};
use super::{DOWNTIME, REFUSED, ensure_moved, options, power_off};
use crate::snapshots_disks::qemu_img;

fn disk_moves(qemu: Qemu, aio: &str) -> Result<()> {
    Lab::run("a guest that writes to its disk moves", 1, |lab| {
        let disk = lab.dir().join("web1.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", &disk.display().to_string(), "64M"])?;
        let drive = format!(
            "-drive file={},format=qcow2,if=none,id=d0,cache=none,aio={aio} -device virtio-blk-pci,drive=d0",
            lab.dir().join("vms/web1.qcow2").display()
        );
        let options = GuestOptions { append: options(qemu).append, ..options(qemu).more(&drive) };
        let hosts = Hosts::start(lab, &options)?;
        for host in [&hosts.one, &hosts.other] {
            fs::hard_link(&disk, host.files.join("web1.qcow2")).context("give a host the disk")?;
        }
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 60")?;
        let refused = hosts.try_move(&hosts.one, &hosts.other, &[])?;
        let said = text(&refused.stderr);
        ensure!(refused.status.code() == Some(REFUSED) && said.contains("--shared-disks"), "{}", said);

        control.send("run blocks seconds=900 write=70 threads=2")?;
        control.wait_progress()?;
        let mut here = control;
        for (from, to) in [(&hosts.one, &hosts.other), (&hosts.other, &hosts.one), (&hosts.one, &hosts.other)] {
            hosts.moves(from, to, &[&DOWNTIME[..], &["--shared-disks"]].concat())?;
            let mut there = to.control(&guest)?;
            ensure_moved(&hosts, from, to)?;
            there.wait_progress().context("it goes on with its disk")?;
            here = there;
        }
        here.enough()?;
        here.reply().context("each block had what was written last")?;
        here.run("verify")?;
        power_off(&hosts.other, here)?;
        qemu_img(&["check", "-q", &disk.display().to_string()])
    })
}

#[test]
fn a_qcow2_disk() -> Result<()> {
    disk_moves(Qemu::System, "native")
}

#[test]
fn a_qcow2_disk_qemu_10() -> Result<()> {
    disk_moves(Qemu::Ten, "threads")
}
