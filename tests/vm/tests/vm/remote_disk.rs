//! Disks in other machines' memory, as guests have them: exported by the host as a virtio disk (the MemX paper's DD), or by a
//! client inside the guest (DomU). What they hold is right while servers die and exporters are killed.

use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use vm_tests::control::Control;
use vm_tests::pool::{Exporter, Pool};
use vm_tests::{Guest, GuestOptions, Lab, Qemu, wait};

/// Of each disk; it takes 8 slabs of the pool, two copies.
const DISK_MIB: u64 = 256;
/// Of three servers each: two of them have room for everything.
const SLABS: [u64; 3] = [5; 3];
/// A busy machine stands still at times: a server is then not to be taken for dead. No test measures time.
const FAIL_AFTER: [&str; 2] = ["--fail-after", "500"];
/// The same where servers and exporter are as far apart as an emulated machine is slow.
const FAIL_AFTER_IN_A_GUEST: &str = "--fail-after 5000";
/// QEMU's own network: the host's loopback is 10.0.2.2. With virtio-net on it, QEMU 7.2 stops sending for good once in ten runs.
/// Without instructions for AES an emulated CPU has little time left.
const NETWORK: &str = "-cpu max -netdev user,id=n0 -device e1000,netdev=n0";
const ADDRESS: &str = "10.0.2.15/24";
const HOST: &str = "10.0.2.2";
const POOL_DIR: &str = "/var/lib/pagoda/pool";
/// What must have gone to the swap disk and come back, for the test to mean something.
const SWAPPED_PAGES_MIN: u64 = 2000;

/// While nobody exports the disk, requests wait: longer than any test does.
const RECONNECT_DELAY_S: u32 = 3600;

fn on_the_host(exporter: &Exporter) -> String {
    format!(
        "-drive driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},\
         file.reconnect-delay={RECONNECT_DELAY_S},if=none,id=d0,discard=unmap -device virtio-blk-pci,drive=d0",
        exporter.socket.display()
    )
}

fn boot(lab: &Lab, options: &GuestOptions) -> Result<(Rc<Guest>, Control)> {
    let guest = lab.guest_alone(options)?;
    let control = guest.control()?;
    Ok((guest, control))
}

fn power_off(guest: &Guest, control: &mut Control) -> Result<()> {
    control.send("poweroff")?;
    guest.finish()
}

/// Swap on a disk, in a guest that works on more than its memory.
fn swap(control: &mut Control, disk: &str, mib: u64, kill: impl FnOnce() -> Result<()>) -> Result<()> {
    control.sh(&format!("mkswap /dev/{disk} && swapon /dev/{disk}"))?;
    control.run(&format!("fill {mib}"))?;
    control.send("run random passes=1")?;
    control.wait_progress()?;
    kill()?;
    control.reply().context("while a server is killed")?;
    control.run("verify")?;
    let vmstat = control.sh("cat /proc/vmstat")?;
    for counter in ["pswpin", "pswpout"] {
        let count = vmstat.lines().find_map(|line| line.strip_prefix(counter)?.trim().parse::<u64>().ok());
        ensure!(count.is_some_and(|count| count >= SWAPPED_PAGES_MIN), "{counter}: {count:?}");
    }
    control.run("drop")?;
    control.sh(&format!("swapoff /dev/{disk}")).map(drop)
}

/// A file system on a disk: files of before and of while a server is killed.
fn files(control: &mut Control, disk: &str, mib: u64, kill: impl FnOnce() -> Result<()>) -> Result<()> {
    control.sh(&format!("mkfs.ext4 -q /dev/{disk} && mkdir -p /mnt && mount /dev/{disk} /mnt"))?;
    control.run(&format!("store /mnt/before {}", mib / 2))?;
    control.send(&format!("store /mnt/while {mib}"))?;
    control.wait_progress()?;
    kill()?;
    control.reply().context("while a server is killed")?;
    check_files(control)
}

fn check_files(control: &mut Control) -> Result<()> {
    control.run("check /mnt/before")?;
    control.run("check /mnt/while").map(drop)
}

fn start(lab: &Lab) -> Result<(Rc<Pool>, Exporter)> {
    let pool = lab.pool(&SLABS)?;
    pool.create_disk("disk", DISK_MIB)?;
    let exporter = pool.export("disk", &FAIL_AFTER)?;
    Ok((pool, exporter))
}

#[test]
fn swap_on_the_hosts_export() -> Result<()> {
    Lab::run("remote disk, host's export, swap", 1, |lab| {
        let (pool, exporter) = start(lab)?;
        let options = GuestOptions::new("web1", "").memory("-m 320M").client().control().more(&on_the_host(&exporter));
        let (guest, mut control) = boot(lab, &options)?;
        swap(&mut control, "vda", 320, || pool.kill9(0))?;
        power_off(&guest, &mut control)
    })
}

/// Both servers of the first copies die, one after the other; then the exporter under a guest that writes, and once more
/// under none.
#[test]
fn files_on_the_hosts_export() -> Result<()> {
    Lab::run("remote disk, host's export, files", 1, |lab| {
        let (pool, exporter) = start(lab)?;
        let options = |exporter: &Exporter| {
            GuestOptions::new("web1", "").memory("-m 256M").client().control().more(&on_the_host(exporter))
        };
        let (guest, mut control) = boot(lab, &options(&exporter))?;
        files(&mut control, "vda", 96, || pool.kill9(0))?;
        pool.wait_two_copies("disk")?;
        pool.kill9(1)?;
        check_files(&mut control)?;
        control.send("store /mnt/after 32")?;
        control.wait_progress()?;
        drop(exporter);
        let exporter = pool.export("disk", &FAIL_AFTER)?;
        control.reply().context("while the exporter is replaced")?;
        control.run("check /mnt/after")?;
        control.sh("umount /mnt")?;
        power_off(&guest, &mut control)?;
        drop(exporter);
        let exporter = pool.export("disk", &FAIL_AFTER)?;
        let (guest, mut control) = boot(lab, &options(&exporter))?;
        control.sh("mkdir -p /mnt && mount /dev/vda /mnt")?;
        check_files(&mut control)?;
        control.sh("umount /mnt")?;
        power_off(&guest, &mut control)
    })
}

/// What one guest has written, sealed: two guests read it at the same time, each by an export of its own, while a server dies
/// and one of the exporters makes the copies anew.
#[test]
fn guests_share_what_was_sealed() -> Result<()> {
    Lab::run("remote disk, host's exports, sealed", 1, |lab| {
        let (pool, exporter) = start(lab)?;
        let options =
            |name: &str, disk: &str| GuestOptions::new(name, "").memory("-m 192M").client().control().more(disk);
        let (guest, mut control) = boot(lab, &options("web1", &on_the_host(&exporter)))?;
        control.sh("mkfs.ext4 -q /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt")?;
        control.run("store /mnt/before 64")?;
        control.sh("umount /mnt")?;
        power_off(&guest, &mut control)?;
        drop(exporter);
        let exporters = pool.share("disk", &["one", "other"], &[&FAIL_AFTER[..], &["--keep-after", "1"]].concat())?;
        let mut guests = Vec::new();
        for (name, exporter) in ["web2", "web3"].into_iter().zip(&exporters) {
            let disk = on_the_host(exporter).replace("discard=unmap", "readonly=on");
            let (guest, mut control) = boot(lab, &options(name, &disk))?;
            control.sh("mkdir -p /mnt && mount -o ro,noload /dev/vda /mnt")?;
            ensure!(control.sh("dd if=/dev/zero of=/dev/vda count=1").is_err(), "a guest writes to a sealed disk");
            guests.push((guest, control));
        }
        let check = |guests: &mut Vec<(Rc<Guest>, Control)>| {
            guests.iter_mut().try_for_each(|(_, control)| control.run("check /mnt/before").map(drop))
        };
        check(&mut guests)?;
        pool.kill9(0)?;
        let forget =
            |(_, control): &mut (Rc<Guest>, Control)| control.sh("echo 3 > /proc/sys/vm/drop_caches").map(drop);
        guests.iter_mut().try_for_each(forget)?;
        check(&mut guests)?;
        pool.wait_two_copies("disk")?;
        pool.kill9(1)?;
        guests.iter_mut().try_for_each(forget)?;
        check(&mut guests)?;
        guests.iter_mut().try_for_each(|(guest, control)| power_off(guest, control))
    })
}

/// A guest that is itself a client of the pool, with a disk at /dev/nbd0: what its administrator types, and what the pool's.
fn boot_client(lab: &Lab, pool: &Pool, qemu: Qemu) -> Result<(Rc<Guest>, Control)> {
    let options = GuestOptions::new("web1", "").qemu(qemu).memory("-m 320M").client().control().more(NETWORK);
    let options = options.deadline(2 * wait::LIFE);
    let (guest, mut control) = boot(lab, &options)?;
    control.sh(&format!("ip link set lo up; ip link set eth0 up; ip addr add {ADDRESS} dev eth0"))?;
    let key = pool.key()?;
    control.sh(&format!("umask 077; mkdir -p /run /mnt {POOL_DIR}; echo {} > {POOL_DIR}/pool.key", key.trim()))?;
    let made: serde_json::Value = serde_json::from_str(&control.sh("pagoda pool key init --json 2>/dev/null")?)?;
    pool.admit(made["public_key"].as_str().context("the guest's public key")?)?;
    for line in pool.list()?.lines() {
        control.sh(&format!("echo {} >> {POOL_DIR}/servers", line.replace("127.0.0.1", HOST)))?;
    }
    control.sh(&format!("pagoda disk create disk --size {DISK_MIB}M"))?;
    export_inside(&mut control)?;
    Ok((guest, control))
}

fn export_inside(control: &mut Control) -> Result<()> {
    let export = format!("pagoda disk export disk --nbd /run/disk.sock {FAIL_AFTER_IN_A_GUEST}");
    control.sh(&format!(
        "rm -f /run/disk.sock; {export} >/run/export.log 2>&1 & echo $! >/run/export.pid; \
         while ! [ -S /run/disk.sock ] && kill -0 $!; do sleep 0.1; done"
    ))?;
    control.sh("nbd-client -unix /run/disk.sock /dev/nbd0 -b 4096").context("the exporter inside the guest").map(drop)
}

/// What the client inside the guest knows of its disk, where something went wrong.
fn with_report_of<T>(control: &mut Control, done: Result<T>) -> Result<T> {
    done.map_err(|error| {
        let report = control
            .sh("cat /run/export.log; pagoda disk show disk; pagoda pool ls; ip -s link show eth0; cat /proc/net/snmp");
        error.context(report.unwrap_or_else(|error| format!("the guest says no more: {error:#}")))
    })
}

/// What works on more than its memory is limited by a cgroup: the guest's exporter needs memory to make any free.
#[test]
fn swap_on_the_guests_own_export() -> Result<()> {
    Lab::run("remote disk, guest's export, swap", 1, |lab| {
        let pool = lab.pool(&SLABS)?;
        let (guest, mut control) = boot_client(lab, &pool, Qemu::System)?;
        control
            .sh("mkdir /cgroup; mount -t cgroup2 none /cgroup && echo +memory > /cgroup/cgroup.subtree_control; \
             mkdir /cgroup/work; echo 64M > /cgroup/work/memory.max; echo 1 > /cgroup/work/cgroup.procs")?;
        let done = swap(&mut control, "nbd0", 72, || pool.kill9(0));
        with_report_of(&mut control, done)?;
        power_off(&guest, &mut control)
    })
}

/// A server dies while the disk is written to; then the exporter, with all that it knew.
#[test]
fn files_on_the_guests_own_export() -> Result<()> {
    Lab::run("remote disk, guest's export, files, QEMU 10", 1, |lab| {
        let pool = lab.pool(&SLABS)?;
        let (guest, mut control) = boot_client(lab, &pool, Qemu::Ten)?;
        let done = files(&mut control, "nbd0", 16, || pool.kill9(0));
        with_report_of(&mut control, done)?;
        control.sh("umount /mnt; nbd-client -d /dev/nbd0; read pid </run/export.pid; kill -9 $pid")?;
        export_inside(&mut control)?;
        control.sh("mount /dev/nbd0 /mnt")?;
        let done = check_files(&mut control);
        with_report_of(&mut control, done)?;
        control.sh("umount /mnt; nbd-client -d /dev/nbd0; read pid </run/export.pid; kill $pid")?;
        power_off(&guest, &mut control)
    })
}
