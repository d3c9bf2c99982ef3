//! A guest that its test leads through snapshots, roll-backs and restores. Its own word is what counts: it verifies all its memory.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmInfo;
use vm_tests::control::Control;
use vm_tests::{Daemon, Guest, GuestOptions, Lab, wait};

use crate::snapshots::{become_guest, command_of, take, wait_durable};

/// Until the test has had enough.
const WRITE: &str = "run random seconds=900 write=100";
/// The exit status of what was refused, as `pagoda --help` has it.
const REFUSED: i32 = 6;

/// A guest, as the module says, with its daemon and its control port.
pub struct Led<'a> {
    lab: &'a Lab,
    pub daemon: Rc<Daemon>,
    options: GuestOptions,
    pub guest: Rc<Guest>,
    pub control: Control,
}

impl<'a> Led<'a> {
    /// Starts a guest, and waits until it obeys.
    pub fn start(lab: &'a Lab, daemon: &Rc<Daemon>, options: &GuestOptions) -> Result<Led<'a>> {
        let guest = lab.guest(daemon, options)?;
        let control = guest.control()?;
        Ok(Led { lab, daemon: Rc::clone(daemon), options: options.clone(), guest, control })
    }

    /// Starts a guest, and does not wait for it. It says that it is ready to who listens by now.
    pub fn boot(lab: &'a Lab, daemon: &Rc<Daemon>, options: &GuestOptions) -> Result<Led<'a>> {
        let guest = lab.guest(daemon, options)?;
        let control = guest.restored_control()?;
        Ok(Led { lab, daemon: Rc::clone(daemon), options: options.clone(), guest, control })
    }

    pub fn name(&self) -> &str {
        &self.options.name
    }

    pub fn info(&self) -> Result<VmInfo> {
        self.daemon.vm(self.name())
    }

    pub fn wait_vm(&self, what: &str, wanted: impl Fn(&VmInfo) -> bool) -> Result<VmInfo> {
        self.daemon.wait_vm(self.name(), what, wait::HANG, wanted)
    }

    /// From now on it writes to all its memory, again and again.
    pub fn begin_writing(&mut self) -> Result<()> {
        self.control.send(WRITE)?;
        self.control.wait_progress()
    }

    /// Ends that. Each page had what was written to it last, and so has all of the memory.
    pub fn end_writing(&mut self) -> Result<()> {
        self.control.enough()?;
        self.control.reply()?;
        self.control.run("verify").map(drop)
    }

    pub fn take(&self, name: &str) -> Result<()> {
        take(&self.daemon, self.name(), name)
    }

    /// The snapshot is whole, on the disk too.
    pub fn wait_durable(&self, name: &str) -> Result<()> {
        wait_durable(&self.daemon, self.name(), name)?;
        command_of(&self.daemon, &["snapshot", "verify", &format!("{}/{name}", self.name())])
    }

    /// A snapshot of a guest that writes before, while and after it is taken. The guest goes on with it after a roll-back too.
    pub fn take_while_it_writes(&mut self, name: &str) -> Result<()> {
        self.begin_writing()?;
        self.take(name)?;
        self.wait_durable(name)?;
        self.end_writing().context("the VM that went on")
    }

    /// A command about the VM is refused, and says this. Its snapshots are what they were.
    pub fn refused(&self, words: &[&str], says: &str) -> Result<()> {
        let before = self.daemon.client().snapshots()?;
        let done = self.daemon.run_cli(words)?;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        println!("{words:?}: {}: {}", done.status, said.trim());
        ensure!(done.status.code() == Some(REFUSED) && said.contains(says), "{words:?}: {}: {said}", done.status);
        let after = self.daemon.client().snapshots()?;
        ensure!(after == before, "{words:?}: {before:?} {after:?}");
        Ok(())
    }

    /// Neither a snapshot nor a roll-back is to be had, for this reason.
    pub fn is_left_alone(&self, to: &str, says: &str) -> Result<()> {
        self.refused(&["vm", "snapshot", self.name(), "--name", "none", "--no-disks"], says)?;
        self.refused(&["vm", "rollback", self.name(), "--to", to], says)
    }

    /// The VM is put back. What its guest did at that moment it goes on with.
    pub fn roll_back(&mut self, to: &str) -> Result<()> {
        let guest = become_guest(self.lab, &self.daemon, &self.options, &["vm", "rollback", self.name(), "--to", to])?;
        self.attached(&guest).with_context(|| format!("roll back to {to}"))?;
        self.guest.wait_exit(wait::HANG).context("the VM of before ends")?;
        self.go_on(guest).with_context(|| format!("rolled back to {to}"))
    }

    /// A new QEMU begins with a snapshot; the VM of before has ended.
    pub fn restore(&mut self, from: &str, more: &[&str]) -> Result<()> {
        let words = ["vm", "restore", self.name(), "--from", from];
        let guest = become_guest(self.lab, &self.daemon, &self.options, &[&words[..], more].concat())?;
        self.attached(&guest).with_context(|| format!("restore from {from}"))?;
        self.go_on(guest).with_context(|| format!("restored from {from}"))
    }

    fn attached(&self, guest: &Guest) -> Result<()> {
        wait::until("the new QEMU is attached", wait::HANG, || {
            let is_attached = self.daemon.client().vm(self.name()).is_ok_and(|vm| vm.pid == Some(guest.pid()));
            ensure!(is_attached || guest.wait_exit(Duration::ZERO).is_err(), "it ended: {}", guest.console.tail());
            Ok(is_attached.then_some(()))
        })
    }

    fn go_on(&mut self, guest: Rc<Guest>) -> Result<()> {
        // Before its guest runs: nothing is lost of what it says. It is spoken to when QEMU has all of its state.
        self.control = guest.restored_control()?;
        self.guest = guest;
        self.wait_vm("its guest runs", |vm| !vm.loading).map(drop)
    }

    /// The guest verifies all its memory once more and ends, and so does its VM.
    pub fn power_off(&mut self) -> Result<()> {
        self.control.send("poweroff")?;
        self.guest.finish()?;
        self.daemon.wait_gone(self.name())
    }
}
