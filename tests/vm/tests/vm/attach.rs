//! The ways in which QEMU is told how much memory there is: each attaches, pages, and leaves nothing behind.

use anyhow::{Context, Result, ensure};
use vm_tests::toy::ToyOptions;
use vm_tests::{Folios, GuestOptions, Lab, MIB, Qemu, Watch};

const DRAM_MIB: u64 = 96;
const WORK: &str = "pagoda.work=random pagoda.mib=140";

/// A guest of 256 MiB with these words for memory, under pressure.
fn form(name: &str, qemu: Qemu, memory: &str, cpus: u32, more: &str) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let memory = memory.replace("DIR", &lab.dir().to_string_lossy());
        let options =
            GuestOptions::new("web1", WORK).memory(&memory).dram(&format!("{DRAM_MIB}M")).qemu(qemu).cpus(cpus);
        let guest = lab.guest(&daemon, &options.more(more))?;
        guest.wait_ready()?;
        let watch = Watch::start(&daemon, "web1");
        guest.finish()?;
        let seen = watch.stop()?;
        seen.ensure_capped()?;
        seen.ensure_paged(2000)?;
        let info = seen.last.context("the VM was seen")?;
        ensure!(info.memory_bytes == 256 * MIB && info.pinned.is_none(), "{info:#?}");
        daemon.wait_gone("web1")
    })
}

#[test]
fn m_alone() -> Result<()> {
    form("-m", Qemu::Ten, "-m 256", 2, "")
}

#[test]
fn backend_ram() -> Result<()> {
    let memory = "-m 256M -object memory-backend-ram,id=r,size=256M -machine memory-backend=r";
    form("memory-backend-ram", Qemu::System, memory, 1, "")
}

#[test]
fn backend_memfd() -> Result<()> {
    let memory = "-m 256M -object memory-backend-memfd,id=r,size=256M,share=on -machine memory-backend=r";
    form("memory-backend-memfd", Qemu::Ten, memory, 1, "")
}

#[test]
fn backend_file() -> Result<()> {
    let memory =
        "-m 256M -object memory-backend-file,id=r,size=256M,mem-path=DIR/ram,share=on -machine memory-backend=r";
    form("memory-backend-file", Qemu::System, memory, 1, "")
}

#[test]
fn two_numa_nodes() -> Result<()> {
    let memory = "-m 256M -object memory-backend-ram,id=a,size=128M -object memory-backend-ram,id=b,size=128M \
                  -numa node,nodeid=0,cpus=0,memdev=a -numa node,nodeid=1,cpus=1,memdev=b";
    form("two NUMA nodes", Qemu::System, memory, 2, "")
}

#[test]
fn sandbox() -> Result<()> {
    let all = "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    form("-sandbox on", Qemu::System, "-m 256M", 1, all)
}

#[test]
fn sandbox_qemu_10() -> Result<()> {
    form("-sandbox on, QEMU 10", Qemu::Ten, "-m 256M", 1, "-sandbox on,spawn=deny")
}

#[test]
fn memory_on_both_sides_of_the_pci_hole() -> Result<()> {
    Lab::run("5 GiB", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let options = GuestOptions::new("big", "pagoda.work=random pagoda.mib=400").memory("-m 5G").dram("192M");
        let guest = lab.guest(&daemon, &options)?;
        guest.wait_ready()?;
        let watch = Watch::start(&daemon, "big");
        guest.finish()?;
        let seen = watch.stop()?;
        seen.ensure_capped()?;
        seen.ensure_paged(20_000)?;
        daemon.wait_gone("big")
    })
}

#[test]
fn several_at_once() -> Result<()> {
    Lab::run("two guests and two toys", 2, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let options = |name: &str| GuestOptions::new(name, WORK).memory("-m 256M").dram("96M");
        let guests = [lab.guest(&daemon, &options("guest1"))?, lab.guest(&daemon, &options("guest2").qemu(Qemu::Ten))?];
        let toy = |name: &str| {
            let options = ToyOptions { name: name.into(), memory_mib: 256, dram_mib: 96, threads: 2 };
            lab.toy(&daemon, &options)
        };
        let toys = [toy("toy1")?, toy("toy2")?];
        for toy in &toys {
            toy.fill()?;
            toy.begin("--workload zipf --mode read-write --passes 4")?;
        }
        let names: Vec<String> = daemon.client().vms()?.vms.into_iter().map(|vm| vm.name).collect();
        ensure!(names == ["guest1", "guest2", "toy1", "toy2"], "{names:?}");
        for toy in &toys {
            toy.end()?;
            toy.quit()?;
        }
        for guest in &guests {
            guest.finish()?;
        }
        for name in names {
            daemon.wait_gone(&name)?;
        }
        for dir in [daemon.swap_dir(), daemon.state_dir().join("vms")] {
            let left = std::fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))?.count();
            ensure!(left == 0, "{left} files are left in {}", dir.display());
        }
        Ok(())
    })
}
