//! The oldest kernel that Pagoda supports, Linux 6.1: a host that is a guest here runs the daemon and the toy VMM. Pages cannot be
//! mapped write-protected in one step there (6.4), and RAM has no folios of 1 MiB (6.11).

use anyhow::{Context, Result, ensure};
use vm_tests::control::Control;
use vm_tests::{GuestOptions, Lab, MIB};

const OLDEST: &str = "6.1.";
const DISK_MIB: u64 = 1024;
const DAEMON: &str =
    "pagodad --state-dir /d/state --swap-dir /d/swap --socket /d/pagoda.sock --metrics off >> /d/log 2>&1 < /dev/null";
const PAGODA: &str = "PAGODA_SOCKET=/d/pagoda.sock pagoda";

/// Waits in the guest for what a line of shell finds.
fn wait_for(what: &str) -> String {
    format!("n=0; until {what} > /dev/null 2>&1; do n=$((n + 1)); [ $n -lt 3000 ] || exit 9; sleep 0.2; done")
}

#[test]
fn a_host_with_linux_6_1() -> Result<()> {
    Lab::run("oldest kernel", 1, |lab| {
        let disk = lab.dir().join("disk.img");
        std::fs::File::create(&disk)?.set_len(DISK_MIB * MIB)?;
        let drive = format!("-drive file={},format=raw,if=none,id=d0 -device virtio-blk-pci,drive=d0", disk.display());
        let options = GuestOptions::new("host", "").memory("-m 1G").cpus(2).host().control().more(&drive);
        let guest = lab.guest_alone(&options)?;
        let mut control = guest.control()?;
        let kernel = control.sh("cat /proc/sys/kernel/osrelease")?;
        if !kernel.starts_with(OLDEST) {
            pagoda_sys::toy::skip::skipped(&format!("Debian's kernel here is {}, not {OLDEST}x", kernel.trim()));
            return control.send("poweroff");
        }
        let ended = run(&mut control).with_context(|| format!("the daemon said:\n{}", log(&mut control)));
        control.send("poweroff")?;
        ended?;
        guest.finish()
    })
}

fn log(control: &mut Control) -> String {
    control.sh("cat /d/log").unwrap_or_else(|error| format!("{error:#}"))
}

fn run(control: &mut Control) -> Result<()> {
    control.sh("mkdir -p /d && mkfs.ext4 -q /dev/vda && mount /dev/vda /d")?;
    control.sh(&format!("{DAEMON} & echo $! > /d/pid; {}", wait_for(&format!("{PAGODA} ls"))))?;
    // The toy fills and verifies twice its DRAM, while the daemon is killed and replaced.
    let toy = "xtask toy --threads 2 --workload random --mode read-write --passes 1 --json";
    let start = format!("{PAGODA} run --plain --name toy --memory 128M --dram 64M -- {toy} > /d/toy 2>&1");
    control.sh(&format!("( {start}; echo $? > /d/status ) < /dev/null > /dev/null 2>&1 &"))?;
    // A thousand pages and more are out before the daemon dies.
    let paged =
        format!("(case $({PAGODA} vm show toy --json) in *'\"pages_out\": '[0-9][0-9][0-9][0-9]*) ;; *) false; esac)");
    control.sh(&wait_for(&paged))?;
    control
        .sh(&format!("kill -9 $(cat /d/pid); {DAEMON} & echo $! > /d/pid; {}", wait_for(&format!("{PAGODA} ls"))))?;
    control.sh(&wait_for("[ -s /d/status ]"))?;
    let (status, said) = (control.sh("cat /d/status")?, control.sh("cat /d/toy")?);
    ensure!(status.trim() == "0", "the toy ended with {status}: {said}");
    ensure!(said.contains("\"bad_pages\":0,"), "{said}");
    Ok(())
}
