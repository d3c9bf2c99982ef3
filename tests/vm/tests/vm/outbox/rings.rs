//! Rings stop while requests are on their way: the guest is reset, or stands still for a while.

use serde_json::json;

use super::survival::{kill_worker, wait_for_waiting_write, worker};
use super::*;

/// Writes that wait for room at the same time. The more, the more of the guest's memory they name.
const WRITERS: u64 = 40;
/// MiB of available memory that the guest's pattern leaves to all else.
const SPARED_MIB: u64 = 32;
/// What nobody sees of the host's memory: all of the VM's is in DRAM.
const DRAM: &str = "512M";

fn keeper(daemon: &Daemon) -> Result<u32> {
    wait_outbox(daemon, "its process", |outbox| outbox.pid.is_some())?.pid.context("no process")
}

fn available_mib(control: &mut Control) -> Result<u64> {
    let said = control.sh("grep MemAvailable /proc/meminfo")?;
    let kib: u64 = said.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).with_context(|| said.clone())?;
    Ok(kib / 1024)
}

/// Starts programs that write more than there is room for, and waits until they wait.
fn start_writers(daemon: &Daemon, control: &mut Control) -> Result<()> {
    control.sh(&format!("mkdir -p /tmp && dd if=/dev/urandom of={INPUT} bs=1M count=8 2>/dev/null"))?;
    control.sh(&format!(
        "i=0; while [ $i -lt {WRITERS} ]; do dd if={INPUT} of=/mnt/full$i bs=256k > /dev/null 2>&1 & i=$((i+1)); done"
    ))?;
    wait_outbox(daemon, "writes that wait", |outbox| {
        outbox.figures.is_some_and(|figures| figures.waiting_writes > WRITERS / 2)
    })
    .map(drop)
}

/// Writes wait for room, and another kernel begins. What it writes into its memory stays as it is: when the time of those writes is over,
/// and when another mount ends them.
fn reset(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-reset", 1, |lab| {
        let wait_seconds = 60;
        let (site, daemon, guest, mut control) = Site::start_with(lab, qemu, "4M", wait_seconds, DRAM)?;
        start_writers(&daemon, &mut control)?;
        guest.qmp()?.execute("system_reset", json!({}))?;
        let began = Instant::now();
        control.wait_ready()?;
        let mib = available_mib(&mut control)?.saturating_sub(SPARED_MIB);
        control.run(&format!("fill {mib}"))?;
        // Longer than any of them could wait.
        let left = Duration::from_secs(wait_seconds + 5).saturating_sub(began.elapsed());
        control.run(&format!("idle {}", left.as_secs() + 1))?;
        control.run("verify").context("after the time of the writes before")?;
        control.sh("mkdir -p /mnt && mount -t virtiofs outbox /mnt && ls /mnt")?;
        control.run("verify").context("after another mount")?;
        control.sh("rm -f /mnt/full* && echo anew > /mnt/anew")?;
        ensure!(site.get("anew", &[])? == (200, b"anew\n".to_vec()), "it serves nothing any more");

        // The same without a time: the mount is what ends them.
        control.run("drop")?;
        start_writers(&daemon, &mut control)?;
        guest.qmp()?.execute("system_reset", json!({}))?;
        control.wait_ready()?;
        let mib = available_mib(&mut control)?.saturating_sub(SPARED_MIB);
        control.run(&format!("fill {mib}"))?;
        control.sh("mkdir -p /mnt && mount -t virtiofs outbox /mnt && ls /mnt && rm -f /mnt/full*")?;
        control.run("verify").context("after the second reset")?;
        ensure!(control.sh("echo again > /mnt/again && cat /mnt/again")?.contains("again"));
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn another_kernel_has_its_memory_for_itself() -> Result<()> {
    reset(Qemu::System)
}

#[test]
fn another_kernel_has_its_memory_for_itself_qemu_10() -> Result<()> {
    reset(Qemu::Ten)
}

/// A VM stands still while a write waits for room, more often than processes may end over a request, and its process is killed
/// meanwhile. The program goes on by itself: nobody else uses the mount.
fn paused(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-paused", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, qemu, "4M", 100)?;
        let keeper = keeper(&daemon)?;
        let mut qmp = guest.qmp()?;
        // Without a request on its way no process is ended.
        control.sh("echo first > /mnt/first")?;
        let before = worker(keeper)?;
        qmp.execute("stop", json!({}))?;
        ensure!(site.get("first", &[])? == (200, b"first\n".to_vec()), "clients wait for the VM");
        qmp.execute("cont", json!({}))?;
        ensure!(control.sh("cat /mnt/first")?.contains("first"));
        ensure!(worker(keeper)? == before, "a process was ended for nothing");

        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count=8 2>/dev/null"))?;
        let expected = guest_digest(&mut control, INPUT)?;
        control.sh(&format!("(cat {INPUT} > /mnt/large; echo status $?) > /tmp/log 2>&1 &"))?;
        wait_for_waiting_write(&daemon)?;
        for round in 0..4 {
            let before = worker(keeper)?;
            qmp.execute("stop", json!({}))?;
            wait::until("another process", wait::HANG, || {
                Ok(worker(keeper)?.filter(|now| before.is_some_and(|before| before != *now)))
            })?;
            if round % 2 == 0 {
                kill_worker(keeper)?;
            }
            qmp.execute("cont", json!({}))?;
            wait_for_waiting_write(&daemon).with_context(|| format!("in round {round}"))?;
        }
        let large = lab.dir().join("large");
        ensure!(site.curl("large", &["--fail"]).arg("--output").arg(&large).status()?.success(), "curl failed");
        wait::until("the writer's end", wait::HANG, || {
            Ok(control.sh("cat /tmp/log")?.contains("status").then_some(()))
        })?;
        ensure!(control.sh("cat /tmp/log")?.contains("status 0"), "{}", control.sh("cat /tmp/log")?);
        ensure!(digest_of("cat", &large)? == expected, "wrong bytes arrived");
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn a_write_that_waits_goes_on_after_a_stop() -> Result<()> {
    paused(Qemu::System)
}

#[test]
fn a_write_that_waits_goes_on_after_a_stop_qemu_10() -> Result<()> {
    paused(Qemu::Ten)
}
