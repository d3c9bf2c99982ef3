//! The oldest kernel that Pagoda supports, Linux 6.1: a host that is a guest here runs the daemon and the toy VMM. Pages cannot be
//! mapped write-protected in one step there (6.4), RAM has no folios of 1 MiB (6.11), and khugepaged fills holes that a userfaultfd
//! waits for (until 6.4). And a host that swaps by itself, whose kernel takes pages that Pagoda counts as resident.

use anyhow::{Context, Result, ensure};
use vm_tests::control::Control;
use vm_tests::{GuestOptions, Lab, MIB};

const OLDEST: &str = "6.1.";
const DISK_MIB: u64 = 1024;
/// The host's own swap, `/dev/vdb`.
const SWAP_MIB: u64 = 256;
const DAEMON: &str =
    "pagodad --state-dir /d/state --swap-dir /d/swap --socket /d/pagoda.sock --metrics off >> /d/log 2>&1 < /dev/null";
const PAGODA: &str = "PAGODA_SOCKET=/d/pagoda.sock pagoda";

/// Waits in the guest for what a line of shell finds.
fn wait_for(what: &str) -> String {
    format!("n=0; until {what} > /dev/null 2>&1; do n=$((n + 1)); [ $n -lt 3000 ] || exit 9; sleep 0.2; done")
}

#[test]
fn a_host_with_linux_6_1() -> Result<()> {
    on_a_host("oldest kernel", run)
}

#[test]
fn a_host_that_swaps_by_itself() -> Result<()> {
    on_a_host("host that swaps", run_beside_swap)
}

/// Runs a test in a guest that is a host of VMs, with an empty disk.
fn on_a_host(name: &str, test: fn(&mut Control) -> Result<()>) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let mut drives = String::new();
        for (name, mib) in [("disk", DISK_MIB), ("swap", SWAP_MIB)] {
            let disk = lab.dir().join(format!("{name}.img"));
            std::fs::File::create(&disk)?.set_len(mib * MIB)?;
            let path = disk.display();
            drives += &format!("-drive file={path},format=raw,if=none,id={name} -device virtio-blk-pci,drive={name} ");
        }
        let options = GuestOptions::new("host", "").memory("-m 1G").cpus(2).host().control().more(drives.trim_end());
        let guest = lab.guest_alone(&options)?;
        let mut control = guest.control()?;
        let kernel = control.sh("cat /proc/sys/kernel/osrelease")?;
        if !kernel.starts_with(OLDEST) {
            pagoda_sys::toy::skip::skipped(&format!("Debian's kernel here is {}, not {OLDEST}x", kernel.trim()));
            return control.send("poweroff");
        }
        let ended = test(&mut control).with_context(|| format!("the daemon said:\n{}", log(&mut control)));
        control.send("poweroff")?;
        ended?;
        guest.finish()
    })
}

fn log(control: &mut Control) -> String {
    control.sh("cat /d/log").unwrap_or_else(|error| format!("{error:#}"))
}

fn start_daemon(control: &mut Control) -> Result<()> {
    control.sh("mkdir -p /d && mkfs.ext4 -q /dev/vda && mount /dev/vda /d")?;
    control.sh(&format!("{DAEMON} & echo $! > /d/pid; {}", wait_for(&format!("{PAGODA} ls")))).map(drop)
}

fn run(control: &mut Control) -> Result<()> {
    // The toy asks for huge pages, as QEMU does, and khugepaged has nothing else to do.
    control.sh(
        "cd /sys/kernel/mm/transparent_hugepage && echo advise > shmem_enabled && cd khugepaged && echo 0 > scan_sleep_millisecs && \
         echo 0 > alloc_sleep_millisecs && echo 100000 > pages_to_scan",
    )?;
    start_daemon(control)?;
    // The toy fills and verifies twice its DRAM, while the daemon is killed and replaced.
    let toy = "toy-vmm native --threads 2 --workload random --mode read-write --passes 1 --json";
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

/// Half of the toy's RAM is written, and half was only ever read. The kernel swaps out or drops pages before the VM is armed and
/// after it: all of them have to be what they were.
fn run_beside_swap(control: &mut Control) -> Result<()> {
    start_daemon(control)?;
    control.sh(
        "mkswap /dev/vdb && swapon /dev/vdb && mkdir -p /cg && mount -t cgroup2 none /cg && echo +memory > /cg/cgroup.subtree_control && \
         mkdir /cg/vm && mkfifo /d/in",
    )?;
    // Somebody has the toy's input open all the time, or it would end with the first word.
    control.sh("(sleep 100000 > /d/in) < /dev/null > /dev/null 2>&1 &")?;
    let toy = format!(
        "echo $$ > /cg/vm/cgroup.procs; {PAGODA} run --plain --name toy --memory 128M -- toy-vmm native --step < /d/in > /d/toy 2>&1"
    );
    control.sh(&format!("(sh -c '{toy}'; echo $? > /d/status) > /dev/null 2>&1 &"))?;
    let send_line = |control: &mut Control, line: &str, answer: &str, count: usize| {
        control.sh(&format!("echo {line} > /d/in"))?;
        control.sh(&wait_for(&format!("[ $(grep -c \"{answer}\" /d/toy) = {count} ]")))
    };
    // As much as can be had: the rest is an error.
    let reclaim = "echo 90M > /cg/vm/memory.reclaim 2> /dev/null; grep -q \"^pswpout [1-9]\" /proc/vmstat";
    send_line(control, "map", "^TOY ready", 1)?;
    send_line(control, "touch --mib 64", "^TOY done", 1)?;
    send_line(control, "touch --from-mib 64 --mib 64 --access load", "^TOY done", 2)?;
    control.sh(reclaim)?;
    send_line(control, "touch --from-mib 64 --mib 32 --access load", "^TOY done", 3)?;
    control.sh(&format!("{PAGODA} vm set toy --dram 112M"))?;
    let armed = format!("({PAGODA} vm show toy --json | grep -q '\"armed\": true')");
    control.sh(&wait_for(&armed))?;
    for count in 4..7 {
        control.sh(reclaim)?;
        send_line(control, "touch --mib 128 --access load", "^TOY done", count)?;
    }
    send_line(control, "quit", "^TOY done", 6)?;
    control.sh(&wait_for("[ -s /d/status ]"))?;
    let (status, said) = (control.sh("cat /d/status")?, control.sh("cat /d/toy")?);
    ensure!(status.trim() == "0", "the toy ended with {status}: {said}");
    ensure!(said.matches("\"bad_pages\":0,").count() == 6, "{said}");
    let log = log(control);
    ensure!(!log.contains("frozen"), "{log}");
    Ok(())
}
