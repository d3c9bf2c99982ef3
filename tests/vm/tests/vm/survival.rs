//! The daemon and VMMs may die: nothing is lost, nothing is left.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmState;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu, programs, wait};

const SERVICE_MAX: Duration = Duration::from_secs(300);

fn verifying(name: &str) -> GuestOptions {
    // Until the test has had enough; ends with a check of every word.
    GuestOptions::new(name, "pagoda.work=random:seconds=900 pagoda.mib=260").memory("-m 512M").dram("128M")
}

/// Between kills: enough that each meets it in the middle of paging.
const PAGES: u64 = 200;

fn running(daemon: &Daemon, vm: &str) -> Result<()> {
    daemon.wait_vm(vm, "running", SERVICE_MAX, |info| info.state == VmState::Running).map(drop)
}

fn start(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<std::rc::Rc<Guest>> {
    let guest = lab.guest(daemon, options)?;
    guest.wait_phase("random")?;
    daemon.wait_paged(&options.name, PAGES)?;
    Ok(guest)
}

fn killed(name: &str, qemu: Qemu, folios: Folios) -> Result<()> {
    const KILLS: usize = 15;
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let guest = start(lab, &daemon, &verifying("web1").qemu(qemu))?;
        for kill in 0..KILLS {
            daemon.kill9()?;
            daemon.start_again().with_context(|| format!("after kill {kill}"))?;
            running(&daemon, "web1").with_context(|| format!("after kill {kill}"))?;
            daemon.wait_paged("web1", PAGES).with_context(|| format!("after kill {kill}"))?;
        }
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn daemon_killed_large_folios() -> Result<()> {
    killed("daemon killed, large folios", Qemu::System, Folios::Large)
}

#[test]
fn daemon_killed_small_folios() -> Result<()> {
    killed("daemon killed, 4 KiB, QEMU 10", Qemu::Ten, Folios::Small)
}

#[test]
fn daemon_stopped_and_replaced() -> Result<()> {
    Lab::run("daemon stopped and replaced", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let guest = start(lab, &daemon, &verifying("web1"))?;
        daemon.stop().context("stop the daemon")?;
        daemon.start_again()?;
        running(&daemon, "web1").context("after a stop")?;
        daemon.wait_paged("web1", PAGES).context("after a stop")?;
        // A newer binary, elsewhere.
        let newer = lab.dir().join("pagodad-newer");
        std::fs::copy(programs::bin_dir()?.join("pagodad"), &newer).context("copy the daemon")?;
        daemon.replace_program(&newer);
        daemon.stop().context("stop the daemon")?;
        daemon.start_again()?;
        running(&daemon, "web1").context("after the replacement")?;
        daemon.wait_paged("web1", PAGES).context("after the replacement")?;
        let exe = std::fs::read_link(format!("/proc/{}/exe", daemon.pid())).context("look at the daemon")?;
        ensure!(exe == newer, "the daemon is {}", exe.display());
        guest.finish_soon()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn a_vm_that_ends_while_no_daemon_runs_is_forgotten() -> Result<()> {
    Lab::run("VM ends without a daemon", 1, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let guest = start(lab, &daemon, &verifying("web1"))?;
        daemon.kill9()?;
        guest.kill9()?;
        daemon.start_again()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn qemu_killed_frees_all_and_leaves_others_alone() -> Result<()> {
    Lab::run("QEMU killed", 2, |lab| {
        let daemon = lab.daemon(Folios::Large)?;
        let other = lab.guest(&daemon, &verifying("other"))?;
        let victim = start(lab, &daemon, &verifying("victim"))?;
        other.wait_phase("random")?;
        let before = swap_bytes(&daemon)?;
        victim.kill9()?;
        daemon.wait_gone("victim")?;
        let after = swap_bytes(&daemon)?;
        ensure!(after < before, "{before} bytes of swap before, {after} after");
        let info = daemon.vm("other")?;
        ensure!(info.state == VmState::Running && info.resident_bytes <= 128 * MIB, "{info:#?}");
        other.finish_soon()?;
        daemon.wait_gone("other")?;
        let left = std::fs::read_dir(daemon.swap_dir())?.count();
        ensure!(left == 0, "{left} files are left in the swap directory");
        Ok(())
    })
}

fn swap_bytes(daemon: &Daemon) -> Result<u64> {
    Ok(daemon.client().vms()?.vms.iter().map(|vm| vm.swap_used_bytes).sum())
}

/// A VM that is started again under its name at once keeps its own files.
#[test]
fn the_same_name_again_and_again() -> Result<()> {
    Lab::run("same name again", 1, |lab| {
        const TIMES: u32 = 20;
        let daemon = lab.daemon(Folios::Small)?;
        let options = ToyOptions { name: "toy".into(), memory_mib: 128, dram_mib: 64, threads: 1 };
        for _ in 0..TIMES {
            let toy = lab.toy(&daemon, &options)?;
            toy.fill()?;
            toy.quit()?;
            // No file of the old one may go once the name is free.
            wait::until("the name is free", SERVICE_MAX, || Ok(daemon.client().vm("toy").is_err().then_some(())))?;
        }
        let toy = lab.toy(&daemon, &options)?;
        toy.fill()?;
        for path in [&daemon.files_of("toy")[0], &daemon.files_of("toy")[2]] {
            ensure!(path.exists(), "{} is gone", path.display());
        }
        daemon.kill9()?;
        daemon.start_again()?;
        running(&daemon, "toy")?;
        toy.go("--workload seq --mode read --passes 1")?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// A record that cannot be read tells nothing: neither it nor what belongs to it is touched, nor its name given to another VM.
#[test]
fn a_record_that_cannot_be_read_keeps_its_vm() -> Result<()> {
    Lab::run("damaged record", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let toy = lab.toy(&daemon, &ToyOptions { name: "toy".into(), memory_mib: 128, dram_mib: 64, threads: 1 })?;
        toy.fill()?;
        let [record, _, swap, _] = daemon.files_of("toy");
        let text = std::fs::read(&record)?;
        daemon.kill9()?;
        for damaged in [&b""[..], &text[..text.len() / 2], b"\xff\xfe"] {
            std::fs::write(&record, damaged)?;
            daemon.start_unanswered()?;
            wait::until("the daemon answers", wait::HANG, || Ok(daemon.client().version().ok()))?;
            let again = daemon.run_cli(&["run", "--plain", "--name", "toy", "--memory", "128M", "--", "true"])?;
            ensure!(!again.status.success(), "another VM was given the name of one that runs");
            // The reaper goes its round: a VM is forgotten whose program has ended and had no use for its RAM.
            daemon.run_cli(&["run", "--plain", "--name", "other", "--memory", "64M", "--", "true"])?;
            daemon.wait_gone("other")?;
            daemon.kill9()?;
            ensure!(std::fs::read(&record)? == damaged && swap.exists(), "a file of a VM that runs was touched");
        }
        std::fs::write(&record, &text)?;
        daemon.start_again()?;
        running(&daemon, "toy")?;
        toy.go("--workload seq --mode read --passes 1")?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

#[test]
fn settings_changed_while_a_vm_is_taken_up_are_kept() -> Result<()> {
    Lab::run("settings of a VM that is taken up", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let toy = lab.toy(&daemon, &ToyOptions { name: "toy".into(), memory_mib: 128, dram_mib: 64, threads: 1 })?;
        toy.fill()?;
        let [_, _, swap, _] = daemon.files_of("toy");
        daemon.kill9()?;
        // As if the last I/O of the daemon before were still on its way: the next one waits for the lock.
        let held = std::fs::File::open(&swap).context("open the swap file")?;
        wait::until("the lock of the swap file is free", wait::HANG, || {
            Ok(rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive).ok())
        })?;
        daemon.start_unanswered()?;
        wait::until("the daemon waits for the swap file", wait::HANG, || {
            Ok(is_open(daemon.pid(), &swap)?.then_some(()))
        })?;
        let set = daemon.run_cli(&["vm", "set", "toy", "--min", "16M", "--shares", "77"])?;
        ensure!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
        drop(held);
        running(&daemon, "toy")?;
        let settings = |info: &pagoda_api::VmInfo| (info.policy.min_bytes, info.policy.shares);
        let wanted = (16 * MIB, 77);
        ensure!(settings(&daemon.vm("toy")?) == wanted, "as taken up: {:?}", settings(&daemon.vm("toy")?));
        daemon.kill9()?;
        daemon.start_again()?;
        running(&daemon, "toy")?;
        ensure!(settings(&daemon.vm("toy")?) == wanted, "of the record: {:?}", settings(&daemon.vm("toy")?));
        toy.go("--workload seq --mode read --passes 1")?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// Whether a process has the file open.
fn is_open(pid: u32, file: &std::path::Path) -> Result<bool> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).context("look at the daemon's descriptors")?;
    Ok(entries.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == file)))
}
