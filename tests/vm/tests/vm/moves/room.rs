//! A destination whose swap disk is full: before the move, and in the middle of it.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use vm_tests::loopfs::{FileSystem, LoopFs};
use vm_tests::{Lab, MIB, Qemu, wait};

use super::hosts::{Hosts, Place, text};
use super::moving::begin_and_send;
use super::{DOWNTIME, GIVEN_UP, REFUSED, ensure_moved, ensure_stayed, options, power_off};

const DISK_MIB: u64 = 300;
/// Of the VM's memory, 100 MiB and more have to be in swap there.
const INTO_LITTLE: [&str; 2] = ["--dram", "64M"];

/// Takes what is free, but for so much.
fn fill(disk: &LoopFs, but_mib: u64) -> Result<File> {
    let filler = File::create(disk.path().join("filler")).context("make a file that fills a disk")?;
    let mut mib = 0;
    while fallocate(&filler, FallocateFlags::empty(), 0, (mib + 1) * MIB).is_ok() {
        mib += 1;
    }
    filler.set_len(mib.saturating_sub(but_mib) * MIB).context("leave something")?;
    Ok(filler)
}

#[test]
fn the_swap_disk_is_full() -> Result<()> {
    Lab::run("the destination's swap disk is full", 1, |lab| {
        let disk = lab.loop_fs(FileSystem::Ext4, DISK_MIB)?;
        let swap = Place { swap: Some(disk.path().join("swap")), ..Place::default() };
        let options = options(Qemu::System);
        let hosts = Hosts::start_at(lab, &options, &[Place::default(), swap])?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 140")?;
        let how = [&["--bandwidth", "160M"], &DOWNTIME[..], &INTO_LITTLE[..]].concat();

        let filler = fill(&disk, 16)?;
        let done = hosts.try_move(&hosts.one, &hosts.other, &how)?;
        let said = text(&done.stderr);
        println!("full before: {}: {said}", done.status);
        ensure!(matches!(done.status.code(), Some(REFUSED | GIVEN_UP)), "{}: {said}", done.status);
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        filler.set_len(0)?;

        let mut moving = begin_and_send(&hosts.one, &hosts.other, &how, 8 * MIB)?;
        let filler = fill(&disk, 16)?;
        control.run("verify").context("it runs meanwhile")?;
        let status = wait::until("the move ends", wait::HANG, || Ok(moving.try_wait()?))?;
        let said = text(&moving.wait_with_output()?.stderr);
        println!("full meanwhile: {status}: {said}");
        ensure!(status.code() == Some(GIVEN_UP), "{status}: {said}");
        ensure_stayed(&hosts, &guest, &mut control)?;
        hosts.other.ensure_nothing_left()?;
        filler.set_len(0)?;

        hosts.moves(&hosts.one, &hosts.other, &[&DOWNTIME[..], &INTO_LITTLE[..]].concat()).context("with room")?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify")?;
        power_off(&hosts.other, control)
    })
}
