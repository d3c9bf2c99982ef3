//! libvirt starts guests by `pagoda-qemu` in place of QEMU.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{VmState, counter};
use pagoda_guest::lines::Line;
use testkit::peers::libvirt::Libvirt;
use vm_tests::control::Control;
use vm_tests::{Daemon, Folios, Lab, MIB, Qemu, accel, programs, wait};

/// As people call their domains.
const NAME: &str = "Büro 1 (alt)";
const MEMORY_MIB: u64 = 384;
const DRAM_MIB: u64 = 128;
const GUEST_MAX: Duration = Duration::from_secs(900);

fn domain(emulator: &Path, daemon: &Daemon, console: &Path, work: &str) -> Result<String> {
    let images = programs::images()?;
    let kind = if accel::accelerator()? == "kvm" { "kvm" } else { "qemu" };
    Ok(format!(
        "<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
           <name>{NAME}</name>
           <memory unit='MiB'>{MEMORY_MIB}</memory>
           <vcpu>1</vcpu>
           <sysinfo type='fwcfg'><entry name='opt/org.pagoda/dram'>{DRAM_MIB}M</entry></sysinfo>
           <os>
             <type arch='x86_64' machine='q35'>hvm</type>
             <kernel>{}</kernel><initrd>{}</initrd>
             <cmdline>console=ttyS0 quiet panic=-1 {work}</cmdline>
           </os>
           <features><acpi/></features>
           <on_reboot>destroy</on_reboot>
           <devices>
             <emulator>{}</emulator>
             <serial type='file'><source path='{}'/><target port='0'/></serial>
             <serial type='unix'><source mode='bind' path='{}'/><target port='1'/></serial>
             <memballoon model='virtio'/>
           </devices>
           <qemu:commandline>
             <qemu:env name='PAGODA_SOCKET' value='{}'/>
             <qemu:env name='PAGODA_QEMU' value='{}'/>
           </qemu:commandline>
         </domain>",
        images.kernel.display(),
        images.initrd.display(),
        emulator.display(),
        console.display(),
        console.with_extension("control").display(),
        daemon.socket().display(),
        Qemu::System.require()?.display(),
    ))
}

fn verdict(console: &Path) -> Option<String> {
    let text = fs::read(console).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.lines().find_map(|line| Line::parse(line)?.result().map(str::to_owned))
}

#[test]
fn define_start_destroy() -> Result<()> {
    Lab::run("libvirt", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let emulator = lab.dir().join("pagoda-qemu");
        symlink(programs::bin_dir()?.join("pagoda"), &emulator).context("make pagoda-qemu")?;
        let libvirt = Libvirt::start(&lab.dir().join("lv"))?;
        let console = lab.dir().join("console");
        let define = |work: &str| -> Result<()> {
            let file = lab.dir().join("domain.xml");
            fs::write(&file, domain(&emulator, &daemon, &console, work)?).context("write the domain")?;
            libvirt.virsh(&["define", &file.to_string_lossy()]).map(drop)
        };
        let paged = |info: &pagoda_api::VmInfo| {
            info.state == VmState::Running && info.counters.get(counter::PAGES_IN).is_some_and(|pages| *pages > 500)
        };

        // A guest that ends by itself, with the right verdict.
        define("pagoda.work=seq,random pagoda.mib=220")?;
        libvirt.virsh(&["start", NAME])?;
        let info = daemon.wait_vm(NAME, "paging", GUEST_MAX, paged)?;
        ensure!(info.memory_bytes == MEMORY_MIB * MIB && info.dram_limit_bytes == DRAM_MIB * MIB, "{info:#?}");
        ensure!(info.resident_bytes <= DRAM_MIB * MIB && info.pinned.is_none(), "{info:#?}");
        let ended = wait::until("the guest's verdict", GUEST_MAX, || Ok(verdict(&console)))?;
        ensure!(ended == "ok", "the guest says {ended}");
        daemon.wait_gone(NAME)?;
        wait::until("libvirt knows that it is off", GUEST_MAX, || {
            Ok((libvirt.virsh(&["domstate", NAME])?.trim() == "shut off").then_some(()))
        })?;

        // Paused, continued and destroyed by libvirt in the middle of paging.
        libvirt.virsh(&["undefine", NAME])?;
        fs::remove_file(&console).context("remove the old console")?;
        define("pagoda.work=random:seconds=120 pagoda.mib=220")?;
        libvirt.virsh(&["start", NAME])?;
        daemon.wait_vm(NAME, "paging", GUEST_MAX, paged)?;
        daemon.kill9()?;
        daemon.start_again()?;
        daemon.wait_vm(NAME, "running again", GUEST_MAX, |info| info.state == VmState::Running)?;
        libvirt.virsh(&["suspend", NAME])?;
        libvirt.virsh(&["resume", NAME])?;
        libvirt.virsh(&["dommemstat", NAME])?;
        libvirt.virsh(&["destroy", NAME])?;
        daemon.wait_gone(NAME)?;
        libvirt.virsh(&["undefine", NAME])?;
        Ok(())
    })
}

/// The guest verifies itself each time it is back, and the daemon knows of no VM while it is away.
#[test]
fn what_libvirt_saves_it_restores() -> Result<()> {
    Lab::run("libvirt saves", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let emulator = lab.dir().join("pagoda-qemu");
        symlink(programs::bin_dir()?.join("pagoda"), &emulator).context("make pagoda-qemu")?;
        let libvirt = Libvirt::start(&lab.dir().join("lv"))?;
        let console = lab.dir().join("console");
        let file = lab.dir().join("domain.xml");
        fs::write(&file, domain(&emulator, &daemon, &console, "pagoda.work=control")?).context("write the domain")?;
        libvirt.virsh(&["define", &file.to_string_lossy()])?;
        libvirt.virsh(&["start", NAME])?;
        let deadline = Instant::now() + GUEST_MAX;
        let port = console.with_extension("control");
        let mut control = Control::connect(&port, deadline)?;
        control.run("fill 220")?;
        control.run("run random")?;
        let swapped = |info: &pagoda_api::VmInfo| info.swapped_bytes > 64 * MIB;
        let saved = lab.dir().join("saved");
        let saved = saved.to_string_lossy();
        let ways: [(&[&str], &[&str]); 2] =
            [(&["save", NAME, &saved], &["restore", &saved]), (&["managedsave", NAME], &["start", NAME])];
        for (save, restore) in ways {
            daemon.wait_vm(NAME, "more of it was touched than fits", GUEST_MAX, swapped)?;
            libvirt.virsh(save)?;
            daemon.wait_gone(NAME)?;
            libvirt.virsh(restore)?;
            let info = daemon.wait_vm(NAME, "it runs again", GUEST_MAX, |info| info.state == VmState::Running)?;
            ensure!(info.dram_limit_bytes == DRAM_MIB * MIB && info.resident_bytes <= DRAM_MIB * MIB, "{info:#?}");
            control = Control::of_restored(&port, deadline)?;
            control.run("verify").with_context(|| format!("after {}", save[0]))?;
        }
        control.send("poweroff")?;
        let ended = wait::until("the guest's verdict", GUEST_MAX, || Ok(verdict(&console)))?;
        ensure!(ended == "ok", "the guest says {ended}");
        daemon.wait_gone(NAME)
    })
}
