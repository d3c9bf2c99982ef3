//! Disks that are copied while their VM runs: what the guest was told is written is there afterwards, and a move that does not take place
//! leaves nothing of it at the destination.
//!
//! The guest numbers what it writes to each block, and compares each block with what its memory says of it.

mod final_stage;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagoda_api::{MoveOutcome, MovePhase, MovePlan};
use serde_json::json;
use vm_tests::control::Control;
use vm_tests::qmp::Qmp;
use vm_tests::{Guest, GuestOptions, Lab, MIB, Qemu, wait};

use super::hosts::{Host, Hosts, text};
use super::moving::{begin, end, settled, wait_phase};
use super::{DOWNTIME, FILL, GIVEN_UP, REFUSED, ensure_moved, ensure_stayed, options, power_off, wait_over};
use crate::snapshots_disks::qemu_img;

const DISK_MIB: u64 = 24;
/// What the guest writes of it.
const GUEST_MIB: u64 = 16;

/// Two disks, of which the guest writes one.
const NAMES: [(&str, &str); 2] = [("web1.qcow2", "qcow2"), ("web1.raw", "raw")];

/// A guest whose first disk is that of this format, which it writes to.
fn with_disks(lab: &Lab, qemu: Qemu, first: usize) -> GuestOptions {
    let order = [NAMES[first], NAMES[1 - first]];
    let drives = order.iter().enumerate().map(|(index, (name, format))| {
        let file = lab.dir().join("vms").join(name);
        format!(
            "-drive file={},format={format},if=none,id=d{index},cache=none,aio=threads -device virtio-blk-pci,drive=d{index}",
            file.display()
        )
    });
    let drives: Vec<String> = drives.collect();
    let monitor = format!("-qmp unix:{}/web1.user,server=on,wait=off", lab.dir().join("vms").display());
    options(qemu).more(&drives.join(" ")).more(&monitor)
}

/// Its QEMU has no job, serves no disk, and has no node of another host's.
fn ensure_nothing_left_in_qemu(host: &Host) -> Result<()> {
    let mut monitor = Qmp::connect(&host.files.join("web1.user"))?;
    for what in ["query-jobs", "query-block-exports"] {
        let left = monitor.execute(what, json!({}))?;
        ensure!(left.as_array().is_some_and(Vec::is_empty), "{what} on {}: {left}", host.name);
    }
    let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
    // What a job that copies puts over a disk is its own, and goes with it.
    let is_ours = |node: &serde_json::Value| {
        node["drv"] == "mirror_top" || node["node-name"].as_str().is_none_or(|name| name.contains("pagoda"))
    };
    ensure!(!nodes.as_array().context("nodes")?.iter().any(is_ours), "{nodes}");
    Ok(())
}

fn disk(host: &Host, index: usize) -> PathBuf {
    host.files.join(NAMES[index].0)
}

/// All zeros where the guest writes, and with content behind that.
fn make_disks(host: &Host) -> Result<()> {
    let mut content = vec![0; (GUEST_MIB * MIB) as usize];
    content.resize((DISK_MIB * MIB) as usize, 0xa7);
    fs::write(disk(host, 1), content).context("make a disk")?;
    let files = [1, 0].map(|index| disk(host, index).display().to_string());
    qemu_img(&["convert", "-q", "-f", "raw", "-O", "qcow2", &files[0], &files[1]])
}

fn ensure_no_disks(host: &Host) -> Result<()> {
    let disks = || -> Result<Vec<String>> {
        let names = fs::read_dir(&host.files)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Vec<String> = names.collect::<Result<_>>()?;
        Ok(names.into_iter().filter(|name| name.contains("web1.raw") || name.contains("web1.qcow2")).collect())
    };
    let mut left = Vec::new();
    let gone = wait::until("no disk is left", wait::HANG, || {
        left = disks()?;
        Ok(left.is_empty().then_some(()))
    });
    gone.with_context(|| format!("{} has {left:?}", host.name))?;
    host.ensure_nothing_left()
}

fn disks_move(qemu: Qemu, first: usize) -> Result<()> {
    Lab::run("a guest moves with its disks", 1, |lab| {
        let options = with_disks(lab, qemu, first);
        let hosts = Hosts::start(lab, &options)?;
        make_disks(&hosts.one)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run("fill 30")?;
        what_is_there_is_not_replaced(&hosts)?;

        let plan = hosts.try_move(&hosts.one, &hosts.other, &["--copy-disks", "--dry-run", "--json"])?;
        ensure!(plan.status.success(), "{}", text(&plan.stderr));
        let plan: MovePlan = serde_json::from_slice(&plan.stdout)?;
        ensure!(plan.fits && plan.disk_bytes > 0, "{plan:?}");
        ensure_no_disks(&hosts.other)?;

        control.send("run blocks seconds=900 write=70 threads=2")?;
        control.wait_progress()?;
        let said = hosts.moves(&hosts.one, &hosts.other, &[&DOWNTIME[..], &["--copy-disks"]].concat())?;
        ensure!(said.contains(" of disks in ") && said.contains("its disk here is used no more: /"), "{said}");
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        ensure_nothing_left_in_qemu(&hosts.other)?;
        let ended = hosts.one.daemon.client().move_of("web1")?;
        ensure!(ended.disk_total_bytes > 0 && ended.disk_copied_bytes == ended.disk_total_bytes, "{ended:?}");
        let mut there = hosts.other.control(&guest)?;
        there.wait_progress().context("it goes on with its disk")?;
        there.enough()?;
        there.reply().context("each block had what was written last")?;
        there.run("verify")?;
        for index in [0, 1] {
            ensure!(disk(&hosts.one, index).is_file(), "the source keeps its files");
        }

        // Back: where its disks were they are still.
        let refused = hosts.try_move(&hosts.other, &hosts.one, &["--copy-disks"])?;
        let said = text(&refused.stderr);
        ensure!(refused.status.code() == Some(REFUSED) && said.contains("is there already"), "{said}");
        for index in [0, 1] {
            fs::remove_file(disk(&hosts.one, index))?;
        }
        hosts.moves(&hosts.other, &hosts.one, &[&DOWNTIME[..], &["--copy-disks"]].concat())?;
        ensure_moved(&hosts, &hosts.other, &hosts.one)?;
        let mut here = hosts.one.control(&guest)?;
        here.run("verify")?;
        power_off(&hosts.one, here)?;
        // Nobody has written since it moved back but what the guest did at its end.
        for (index, (_, format)) in NAMES.iter().enumerate() {
            let files = [&hosts.one, &hosts.other].map(|host| disk(host, index).display().to_string());
            qemu_img(&["compare", "-q", "-f", format, "-F", format, &files[0], &files[1]])?;
        }
        qemu_img(&["check", "-q", &disk(&hosts.one, 0).display().to_string()])
    })
}

/// A disk's path is taken at the destination: it is refused, before and when the VM moves, and nothing is made there.
fn what_is_there_is_not_replaced(hosts: &Hosts) -> Result<()> {
    let taken = disk(&hosts.other, 1);
    fs::write(&taken, "somebody's").context("take a path")?;
    for how in [&["--copy-disks", "--dry-run"][..], &["--copy-disks"]] {
        let refused = hosts.try_move(&hosts.one, &hosts.other, how)?;
        let said = text(&refused.stderr);
        ensure!(
            refused.status.code() == Some(REFUSED) && said.contains("web1.raw is there already"),
            "{how:?}: {said}"
        );
        hosts.other.ensure_nothing_left()?;
        ensure!(!disk(&hosts.other, 0).exists(), "the other one was made");
        ensure!(fs::read_to_string(&taken)? == "somebody's", "it was replaced");
    }
    let refused = hosts.try_move(&hosts.one, &hosts.other, &[])?;
    ensure!(text(&refused.stderr).contains("--copy-disks"), "{}", text(&refused.stderr));
    Ok(fs::remove_file(&taken)?)
}

/// The guest writes to the qcow2 one.
#[test]
fn disks_are_copied() -> Result<()> {
    disks_move(Qemu::System, 0)
}

/// The guest writes to the raw one.
#[test]
fn disks_are_copied_qemu_10() -> Result<()> {
    disks_move(Qemu::Ten, 1)
}

/// So slow that something can happen while disks are copied: some 2 MB/s each.
const SLOW: [&str; 3] = ["--copy-disks", "--bandwidth", "32M"];

/// It has content, and is in the middle of being copied.
fn begin_slowly(hosts: &Hosts) -> Result<std::process::Child> {
    let moving = begin(&hosts.one, &hosts.other, &SLOW)?;
    wait_phase(&hosts.one, MovePhase::Disks)?;
    wait::until("disks are copied", wait::HANG, || {
        let of = hosts.one.daemon.client().move_of("web1")?;
        ensure!(!of.is_over(), "{of:?}");
        Ok((of.disk_copied_bytes >= MIB && of.disk_copied_bytes < of.disk_total_bytes).then_some(()))
    })?;
    for index in [0, 1] {
        ensure!(disk(&hosts.other, index).is_file(), "it is made");
    }
    Ok(moving)
}

/// One whose disks hold something, so that copying takes long.
fn with_content(lab: &Lab, qemu: Qemu) -> Result<(GuestOptions, Hosts)> {
    let options = with_disks(lab, qemu, 0);
    let hosts = Hosts::start(lab, &options)?;
    make_disks(&hosts.one)?;
    let content = vec![0xa7; (DISK_MIB * MIB) as usize];
    fs::write(disk(&hosts.one, 1), content).context("fill a disk")?;
    Ok((options, hosts))
}

/// It runs where it was, and nothing of a move is left on either host.
fn ensure_no_trace(hosts: &Hosts, guest: &Guest, control: &mut Control) -> Result<()> {
    ensure_stayed(hosts, guest, control)?;
    ensure_nothing_left_in_qemu(&hosts.one)?;
    ensure_no_disks(&hosts.other)
}

fn given_up_in_between(qemu: Qemu) -> Result<()> {
    Lab::run("moves that are given up while disks are copied", 2, |lab| {
        let (options, hosts) = with_content(lab, qemu)?;
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;

        let moving = begin_slowly(&hosts)?;
        let cancelled = hosts.one.daemon.run_cli(&["moves", "cancel", "web1"])?;
        ensure!(cancelled.status.success(), "{}", text(&cancelled.stderr));
        println!("cancelled: {}", end(moving, &[GIVEN_UP])?);
        let ended = wait_over(&hosts.one)?;
        ensure!(ended.outcome == MoveOutcome::GivenUp, "{ended:?}");
        ensure_no_trace(&hosts, &guest, &mut control)?;

        let moving = begin_slowly(&hosts)?;
        hosts.other.daemon.kill9()?;
        control.run("verify").context("it runs meanwhile")?;
        hosts.other.daemon.start_again()?;
        println!("killed there: {}", end(moving, &[GIVEN_UP])?);
        ensure_no_trace(&hosts, &guest, &mut control)?;
        hosts.wait_connected()?;

        let moving = begin_slowly(&hosts)?;
        hosts.one.daemon.kill9()?;
        hosts.one.daemon.start_again()?;
        println!("killed here: {}", end(moving, &[GIVEN_UP])?);
        ensure!(settled(&hosts)?.index == hosts.one.index, "it runs at the other host");
        ensure_no_trace(&hosts, &guest, &mut control)?;
        hosts.wait_connected()?;

        hosts.moves(&hosts.one, &hosts.other, &[&DOWNTIME[..], &["--copy-disks"]].concat()).context("then it moves")?;
        ensure_moved(&hosts, &hosts.one, &hosts.other)?;
        let mut control = hosts.other.control(&guest)?;
        control.run("verify")?;
        power_off(&hosts.other, control)?;
        let files = [&hosts.one, &hosts.other].map(|host| disk(host, 1).display().to_string());
        qemu_img(&["compare", "-q", "-f", "raw", "-F", "raw", &files[0], &files[1]])
    })
}

#[test]
fn what_is_given_up_leaves_no_disks() -> Result<()> {
    given_up_in_between(Qemu::System)
}

#[test]
fn what_is_given_up_leaves_no_disks_qemu_10() -> Result<()> {
    given_up_in_between(Qemu::Ten)
}
