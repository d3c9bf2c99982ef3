//! `virsh save --bypass-cache`: what libvirt does to make a file of a VM. It ends the VM, and `virsh restore` starts it again.
//!
//! The guest is that of the bench, in a domain of a libvirtd of our own, without Pagoda. The image is not compressed, which is libvirt's
//! default and its fastest setting here.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use pagoda_guest::lines::Line;
use testkit::accel::Accelerator;
use testkit::console::{Console, Output};
use testkit::image::Images;
use testkit::peers::libvirt::Libvirt;
use testkit::wait;

use super::super::balloon::guest::QEMU;
use super::super::snapshot::append;
use super::{MEMORY_MIB, WORK_MIB};

const NAME: &str = "bench-export-peer";

/// A domain that runs, between two saves.
pub struct Domain {
    libvirt: Libvirt,
    dir: PathBuf,
    port: Port,
}

impl Domain {
    /// Boots it, and writes to half of its memory. `dir` must not exist.
    ///
    /// # Errors
    /// libvirt does not start, or the guest does not boot.
    pub fn start(dir: &Path, images: &Images, accelerator: Accelerator) -> Result<Domain> {
        let libvirt = Libvirt::start(dir)?;
        let file = dir.join("domain.xml");
        fs::write(&file, definition(dir, images, accelerator)?).context("write the domain")?;
        libvirt.virsh(&["define", &file.to_string_lossy()])?;
        libvirt.virsh(&["start", NAME])?;
        let mut port = Port::connect(dir)?;
        port.lines_until("ready")?;
        port.command(&format!("fill {WORK_MIB}"))?;
        Ok(Domain { libvirt, dir: dir.to_owned(), port })
    }

    /// Seconds of one save. The guest verifies its memory when it runs again.
    ///
    /// # Errors
    /// libvirt fails; a page is wrong.
    pub fn save_and_restore(&mut self) -> Result<f64> {
        let file = self.dir.join("saved");
        let file_word = file.to_string_lossy();
        let began = Instant::now();
        self.libvirt.virsh(&["save", "--bypass-cache", NAME, &file_word])?;
        let took = began.elapsed().as_secs_f64();
        self.libvirt.virsh(&["restore", &file_word])?;
        self.port = Port::connect(&self.dir)?;
        self.port.command("verify")?;
        fs::remove_file(&file).context("remove the image")?;
        Ok(took)
    }

    /// Ends the domain, and has libvirt forget it.
    ///
    /// # Errors
    /// libvirt does not.
    pub fn end(self) -> Result<()> {
        self.libvirt.virsh(&["destroy", NAME])?;
        self.libvirt.virsh(&["undefine", NAME]).map(drop)
    }
}

fn definition(dir: &Path, images: &Images, accelerator: Accelerator) -> Result<String> {
    let kind = if accelerator.name() == "kvm" { "kvm" } else { "qemu" };
    let qemu = std::env::var_os("PATH")
        .and_then(|path| std::env::split_paths(&path).map(|dir| dir.join(QEMU)).find(|file| file.is_file()));
    let (qemu, append) = (qemu.with_context(|| format!("find {QEMU}"))?, append(WORK_MIB));
    Ok(format!(
        "<domain type='{kind}'>
           <name>{NAME}</name>
           <memory unit='MiB'>{MEMORY_MIB}</memory>
           <vcpu>1</vcpu>
           <os>
             <type arch='x86_64' machine='q35'>hvm</type>
             <kernel>{}</kernel><initrd>{}</initrd>
             <cmdline>console=ttyS0 quiet panic=-1 pagoda.work=control {append}</cmdline>
           </os>
           <features><acpi/></features>
           <on_reboot>destroy</on_reboot>
           <devices>
             <emulator>{}</emulator>
             <serial type='file'><source path='{}'/><target port='0'/></serial>
             <serial type='unix'><source mode='bind' path='{}'/><target port='1'/></serial>
             <memballoon model='virtio'/>
           </devices>
         </domain>",
        images.kernel.display(),
        images.initrd.display(),
        qemu.display(),
        dir.join("console").display(),
        socket(dir).display(),
    ))
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("control")
}

/// The guest's second serial port.
struct Port {
    stream: UnixStream,
    replies: Console,
}

impl Port {
    fn connect(dir: &Path) -> Result<Port> {
        let stream = wait::until("the guest's port", wait::HANG, || Ok(UnixStream::connect(socket(dir)).ok()))?;
        let replies = Console::default();
        replies.collect(stream.try_clone().context("duplicate the port")?);
        Ok(Port { stream, replies })
    }

    fn command(&mut self, text: &str) -> Result<()> {
        writeln!(self.stream, "{text}").context("write to the guest")?;
        let reply = self.lines_until("reply")?;
        let reply = Line::parse(&reply).context("a reply")?;
        ensure!(reply.text().starts_with("ok ") && reply.number("bad") == Some(0), "{text}: {}", reply.text());
        Ok(())
    }

    /// The last of them.
    fn lines_until(&mut self, kind: &str) -> Result<String> {
        let deadline = Instant::now() + wait::HANG;
        loop {
            let Output::Line(line) = self.replies.next(deadline) else { bail!("no {kind} from the guest") };
            if Line::parse(&line).is_some_and(|line| line.kind == kind) {
                return Ok(line);
            }
        }
    }
}
