//! A guest that was restored before has what it needed first when it asks for it the next time.

use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::{SnapshotName, VmInfo};
use vm_tests::control::Control;
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, wait};

use crate::snapshots::{Seen, become_guest, command_of, take, wait_durable};

/// Faults for which something was read.
const READS: [&str; 2] = ["faults_swap_page", "faults_swap_chunk"];
/// The guest answers at once.
const REPLY: &str = "idle 0";

/// A snapshot of a guest that waits for commands, and has ended.
fn snapshot(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<()> {
    let guest = lab.guest(daemon, options)?;
    guest.control()?.run("fill 200")?;
    take(daemon, &options.name, "one")?;
    wait_durable(daemon, &options.name, "one")?;
    end(daemon, &guest)
}

fn end(daemon: &Daemon, guest: &Guest) -> Result<()> {
    guest.kill9()?;
    daemon.wait_gone("web1")
}

fn restore(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<(Rc<Guest>, Control)> {
    let words = ["vm", "restore", "web1", "--from", "one", "--dram", "192M"];
    let guest = become_guest(lab, daemon, options, &words)?;
    // What is written to the port before QEMU has its state is lost.
    Seen::Over.wait(daemon)?;
    let control = guest.restored_control()?;
    Ok((guest, control))
}

fn count(vm: &VmInfo, counters: &[&str]) -> u64 {
    counters.iter().filter_map(|name| vm.counters.get(*name)).sum()
}

fn wait_record(daemon: &Daemon) -> Result<u64> {
    wait::until("there is a record", wait::HANG, || {
        Ok(daemon.client().snapshot(&SnapshotName::new("web1", "one"))?.prefetch_bytes)
    })
}

fn needs_less(folios: Folios) -> Result<()> {
    Lab::run("restored twice", 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let options = GuestOptions::new("web1", "").control().dram("256M");
        snapshot(lab, &daemon, &options)?;
        let mut reads = Vec::new();
        for is_recorded in [false, true] {
            let (guest, mut control) = restore(lab, &daemon, &options)?;
            control.run(REPLY)?;
            let vm = daemon.vm("web1")?;
            let prefetched = count(&vm, &["prefetched_pages"]);
            reads.push(count(&vm, &READS));
            println!("{reads:?} reads, {prefetched} pages prefetched, {} joined", count(&vm, &["faults_joined"]));
            ensure!((prefetched > 0) == is_recorded, "{prefetched} pages were prefetched");
            control.run("verify")?;
            end(&daemon, &guest)?;
            let bytes = wait_record(&daemon)?;
            ensure!(bytes > 0, "{bytes}");
        }
        ensure!(reads[0] >= 10 && reads[1] * 10 <= reads[0], "{reads:?}: faults that read up to the first reply");
        let shown = daemon.run_cli(&["snapshot", "show", "web1/one"])?;
        ensure!(String::from_utf8_lossy(&shown.stdout).contains("\nprefetch "), "{shown:?}");
        command_of(&daemon, &["snapshot", "verify", "web1/one"])?;
        command_of(&daemon, &["snapshot", "rm", "web1/one"])
    })
}

#[test]
fn a_guest_that_was_restored_before_reads_less() -> Result<()> {
    needs_less(Folios::Small)
}

#[test]
fn a_guest_that_was_restored_before_reads_less_large_folios() -> Result<()> {
    needs_less(Folios::Large)
}

/// The daemon dies while it notes what a guest needs, and while the guest gets that: no page is wrong.
#[test]
fn the_daemon_is_killed_while_it_records_and_while_it_prefetches() -> Result<()> {
    Lab::run("daemon killed while it prefetches", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", "").control().dram("256M");
        snapshot(lab, &daemon, &options)?;
        let (guest, mut control) = restore(lab, &daemon, &options)?;
        control.run(REPLY)?;
        daemon.kill9()?;
        daemon.start_again()?;
        control.run("verify").context("killed while it records")?;
        end(&daemon, &guest)?;
        // One that nobody disturbs.
        let (guest, mut control) = restore(lab, &daemon, &options)?;
        control.run("verify")?;
        end(&daemon, &guest)?;
        wait_record(&daemon)?;
        let (guest, mut control) = restore(lab, &daemon, &options)?;
        daemon.wait_vm("web1", "it gets pages", wait::HANG, |vm| count(vm, &["prefetched_pages"]) > 0)?;
        daemon.kill9()?;
        daemon.start_again()?;
        control.run("verify").context("killed while it prefetches")?;
        end(&daemon, &guest)
    })
}
