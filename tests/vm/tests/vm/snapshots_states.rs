//! Snapshots of VMs whose memory is in more places than DRAM and swap, or that are not paged. The VM that goes on is right, and so is
//! the VM that is put back, and the one that a new QEMU makes of the snapshot.
//!
//! `snapshots.rs` has VMs that are in DRAM and swap, `clones.rs` those that borrow.

mod booting;
pub mod led;
mod standing;

use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmInfo;
use pagoda_sys::toy::ram::{HugePages, Ram, RamSource};
use serde_json::json;
use vm_tests::{Folios, GuestOptions, Lab, MIB, Qemu, wait};

use self::led::Led;
use crate::guards::ram_file_of;
use crate::remote::count;
use crate::snapshots::command_of;

/// The guest's memory as the balloon device has it.
fn actual_bytes(led: &Led<'_>) -> Result<u64> {
    let answer = led.guest.qmp()?.execute("query-balloon", json!({}))?;
    answer["actual"].as_u64().with_context(|| format!("{answer}"))
}

/// The guest has so much, and the daemon says so.
fn wait_balloon(led: &Led<'_>, memory_mib: u64, keeps_mib: u64) -> Result<()> {
    // What the daemon says of a VM that is new to it may come before it has asked.
    wait::until(&format!("the guest has {keeps_mib} MiB"), wait::HANG, || {
        Ok((actual_bytes(led)? == keeps_mib * MIB).then_some(()))
    })?;
    let state = if keeps_mib == memory_mib { "off" } else { "reached" };
    led.wait_vm("its balloon as asked", |vm| {
        let given = (memory_mib - keeps_mib) * MIB;
        vm.balloon.as_ref().is_some_and(|balloon| balloon.state == state && balloon.ballooned_bytes == given)
    })?;
    Ok(())
}

/// What is in the balloon is nowhere, and has to be zero when the guest has it back. The rest is in DRAM and in swap.
fn ballooned(qemu: Qemu, folios: Folios) -> Result<()> {
    const MEMORY_MIB: u64 = 320;
    const KEEPS_MIB: u64 = 208;
    Lab::run("a snapshot of a ballooned VM", 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let options = GuestOptions::new("web1", "").qemu(qemu).memory(&format!("-m {MEMORY_MIB}M")).dram("96M");
        let mut led = Led::start(
            lab,
            &daemon,
            &options.control().more("-device virtio-balloon-pci,id=b0,free-page-reporting=off"),
        )?;
        let target = |target: &str| command_of(&daemon, &["vm", "set", "web1", "--balloon-target", target]);
        // The balloon takes pages that had content. The guest's kernel does not keep any aside to tell of them.
        led.control.run("fill 150")?;
        led.control.run("fill 80")?;
        target(&format!("{KEEPS_MIB}M"))?;
        wait_balloon(&led, MEMORY_MIB, KEEPS_MIB)?;
        led.wait_vm("some of it is in swap", |vm| vm.swapped_bytes > 8 * MIB)?;
        led.take_while_it_writes("ballooned")?;
        target("off")?;
        wait_balloon(&led, MEMORY_MIB, MEMORY_MIB)?;
        led.control.run("fill 160").context("what was in the balloon has content")?;

        // Of its snapshot it has the balloon, and of its user that there is to be none.
        led.roll_back("ballooned")?;
        led.end_writing()?;
        wait_balloon(&led, MEMORY_MIB, MEMORY_MIB)?;
        led.control.run("fill 161")?;
        led.control.run("verify")?;
        led.power_off()?;

        led.restore("ballooned", &[])?;
        led.end_writing()?;
        wait_balloon(&led, MEMORY_MIB, KEEPS_MIB)?;
        target("off")?;
        wait_balloon(&led, MEMORY_MIB, MEMORY_MIB)?;
        led.control.run("verify")?;
        led.control.run("fill 162")?;
        led.control.run("verify")?;
        led.power_off()
    })
}

#[test]
fn partly_ballooned() -> Result<()> {
    ballooned(Qemu::System, Folios::Large)
}

#[test]
fn partly_ballooned_qemu_10() -> Result<()> {
    ballooned(Qemu::Ten, Folios::Small)
}

/// The guest frees all that the snapshot has, and tells its host so, while that is copied.
#[test]
fn memory_that_is_given_back_while_it_is_copied() -> Result<()> {
    Lab::run("a snapshot of a VM that gives memory back", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", "").control().memory("-m 320M").dram("128M");
        let mut led = Led::start(lab, &daemon, &options.more("-device virtio-balloon-pci,id=b0"))?;
        led.control.run("fill 150")?;
        let before = count(&led.info()?, "pages_discarded");
        led.take("one")?;
        led.control.run("drop")?;
        command_of(&daemon, &["vm", "set", "web1", "--balloon-target", "160M"])?;
        wait_balloon(&led, 320, 160)?;
        led.wait_durable("one")?;
        let discarded = count(&led.info()?, "pages_discarded") - before;
        ensure!(discarded > 100 * 256, "{discarded} pages were given back");
        command_of(&daemon, &["vm", "set", "web1", "--balloon-target", "off"])?;
        wait_balloon(&led, 320, 320)?;
        led.control.run("fill 140")?;
        led.control.run("verify").context("the VM that went on")?;
        led.roll_back("one")?;
        led.control.run("verify")?;
        led.power_off()?;
        led.restore("one", &[])?;
        led.control.run("verify")?;
        led.power_off()
    })
}

/// Pages that both have in common are neither in the RAM file of the one nor in that of the other.
#[test]
fn partly_shared() -> Result<()> {
    const FILL: &str = "fill 48";
    const SHARED_MIN: u64 = 48 * 256 * 9 / 10;
    Lab::run("a snapshot of a VM that shares", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let start = |name: &str| {
            let mut options = GuestOptions::new(name, "").control().memory("-m 192M");
            options.run_options = ["--share-group", "tenant"].map(String::from).to_vec();
            Led::start(lab, &daemon, &options)
        };
        let (mut led, mut other) = (start("web1")?, start("web2")?);
        let shared = |led: &Led<'_>| {
            let most = |vm: &VmInfo| count(vm, "shared_pages") >= SHARED_MIN;
            led.wait_vm("what was filled is shared", most).map(drop)
        };
        for led in [&mut led, &mut other] {
            led.control.run(FILL)?;
        }
        shared(&led)?;
        shared(&other)?;
        led.take("shared")?;
        // Whoever writes to what is shared has it to itself from then on; the snapshot has what it was.
        other.begin_writing()?;
        led.begin_writing()?;
        led.wait_durable("shared")?;
        led.end_writing().context("the VM that went on")?;

        led.roll_back("shared")?;
        led.control.run("verify")?;
        other.end_writing().context("the other VM")?;
        // The VM that was put back is of the group: the two have pages in common again, once they have filled the same.
        for led in [&mut led, &mut other] {
            led.control.run(FILL)?;
        }
        shared(&led)?;
        shared(&other)?;
        led.control.run("run random passes=1 write=50")?;
        led.control.run("verify")?;
        led.power_off()?;
        other.control.run("verify").context("the other VM, which has lost who shares with it")?;
        other.power_off()?;

        led.restore("shared", &[]).context("when nobody has its frames any more")?;
        led.control.run("verify")?;
        led.control.run("run random passes=1 write=50")?;
        led.power_off()
    })
}

/// One slab holds a part of what is not in DRAM; the rest is in swap.
#[test]
fn partly_in_the_remote_tier() -> Result<()> {
    const SLABS: u64 = 1;
    Lab::run("a snapshot of a VM with a remote tier", 1, |lab| {
        let pool = lab.pool(&[SLABS])?;
        let daemon = lab.daemon_with(pool.daemon_options(Folios::Small))?;
        let mut options = GuestOptions::new("web1", "").control().memory("-m 256M").dram("96M");
        options.run_options.extend(["--far".into(), "pool:".into()]);
        let mut led = Led::start(lab, &daemon, &options)?;
        led.control.run("fill 160")?;
        led.begin_writing()?;
        led.wait_vm("it is in the pool and in swap", |vm| {
            count(vm, "remote_pages") > 8000 && vm.swap_used_bytes > 16 * MIB
        })?;
        led.end_writing()?;
        led.take_while_it_writes("remote")?;

        led.roll_back("remote")?;
        led.end_writing()?;
        ensure!(led.info()?.remote.is_some(), "it has a remote tier: {:#?}", led.info()?);
        led.power_off()?;
        pool.wait_free_slabs(SLABS)?;

        led.restore("remote", &[])?;
        led.wait_vm("it uses the pool", |vm| count(vm, "remote_pages") > 1000)?;
        led.end_writing()?;
        led.power_off()?;
        pool.wait_free_slabs(SLABS)
    })
}

/// Each node has a RAM file of its own.
fn numa(qemu: Qemu) -> Result<()> {
    let memory = "-m 256M -object memory-backend-ram,id=a,size=128M -object memory-backend-ram,id=b,size=128M \
                  -numa node,nodeid=0,cpus=0,memdev=a -numa node,nodeid=1,cpus=1,memdev=b";
    Lab::run("a snapshot of a VM with two NUMA nodes", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", "").qemu(qemu).memory(memory).cpus(2).dram("112M").control();
        let mut led = Led::start(lab, &daemon, &options)?;
        // More than one of them has.
        led.control.run("fill 150")?;
        led.wait_vm("some of it is in swap", |vm| vm.swapped_bytes > 32 * MIB)?;
        led.take_while_it_writes("two")?;
        led.roll_back("two")?;
        led.end_writing()?;
        led.power_off()?;
        led.restore("two", &["--dram", "96M"])?;
        led.end_writing()?;
        led.power_off()
    })
}

#[test]
fn with_two_numa_nodes() -> Result<()> {
    numa(Qemu::System)
}

#[test]
fn with_two_numa_nodes_qemu_10() -> Result<()> {
    numa(Qemu::Ten)
}

/// Another process maps the memory, and could change what a snapshot has. The VM that is put back has memory of its own, which nobody
/// else maps: it is paged.
#[test]
fn pinned() -> Result<()> {
    Lab::run("a snapshot of a pinned VM", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", "").control().memory("-m 256M").dram("112M");
        let mut led = Led::start(lab, &daemon, &options)?;
        led.control.run("fill 150")?;
        led.take_while_it_writes("before")?;
        let file = ram_file_of(led.guest.pid(), "web1")?;
        let mapping = Ram::map(RamSource::File(file.as_fd()), HugePages::Refuse).context("map the RAM of web1")?;
        led.wait_vm("it is pinned", |vm| vm.pinned.is_some())?;
        let take = ["vm", "snapshot", "web1", "--name", "none", "--no-disks"];
        led.refused(&take, "its memory is written by others, unseen")?;
        led.control.run("run random passes=1 write=100")?;
        led.control.run("verify")?;

        led.roll_back("before")?;
        drop(mapping);
        led.end_writing()?;
        let vm = led.info()?;
        ensure!(vm.pinned.is_none(), "nobody maps the memory of the new VM: {:?}", vm.pinned);
        ensure!(vm.resident_bytes <= vm.dram_limit_bytes, "{vm:#?}");
        led.take("after").context("a snapshot of it")?;
        led.wait_durable("after")?;
        led.power_off()?;
        for name in ["after", "before"] {
            led.restore(name, &[])?;
            if name == "before" {
                led.end_writing()?;
            }
            led.control.run("verify").with_context(|| format!("restored from {name}"))?;
            led.power_off()?;
        }
        Ok(())
    })
}
