//! The preloaded library in real processes: a toy VMM (this program, started again) and QEMU, under a small daemon.
//!
//! Needs root (userfaultfd), libaio1 and liburing2 (QEMU depends on both), and qemu-system-x86_64.
//! Arguments, if any, are parts of the names of the cases to run.

mod borrow;
mod daemon;
mod toy;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use daemon::{Daemon, REGION, TOKEN, Vm};
use pagoda_abi::attach::{ForeignReason, Packet, Range, Text};
use pagoda_abi::{PAGE_SIZE, RAM_PATH};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A case runs in a directory of its own.
type Case = fn(&Path);

const CASES: [(&str, Case); 12] = [
    ("a_vm_is_handed_over_whole", a_vm_is_handed_over_whole),
    ("zaps_are_checked_and_move_the_epoch", zaps_are_checked_and_move_the_epoch),
    ("ram_is_guarded", ram_is_guarded),
    ("what_is_borrowed_is_read_written_and_moved", borrow::what_is_borrowed_is_read_written_and_moved),
    ("discards_are_asked_for", discards_are_asked_for),
    ("the_vm_survives_its_daemon", the_vm_survives_its_daemon),
    ("io_in_flight_is_on_the_clock", io_in_flight_is_on_the_clock),
    ("foreign_access_is_reported_now_and_to_the_next_daemon", foreign_access_is_reported),
    ("without_a_daemon_or_refused_the_vm_does_not_start", the_vm_does_not_start_unmanaged),
    ("an_unmanaged_process_is_left_alone", an_unmanaged_process_is_left_alone),
    ("qemu_attaches_boots_and_reads_its_disks", qemu_attaches_boots_and_reads_its_disks),
    ("the_gate_is_open_by_word_of_the_daemon_alone", the_gate_is_open_by_word_of_the_daemon_alone),
];

fn main() {
    if std::env::var_os("TOY_VMM").is_some() {
        return toy::run();
    }
    let filters: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for (name, case) in CASES {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter)) {
            continue;
        }
        // A failing case panics and ends the run: the message is the panic's.
        println!("case {name} ...");
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("make the case's directory");
        case(&dir);
        std::fs::remove_dir_all(&dir).expect("remove the case's directory");
        println!("case {name} ok");
    }
}

/// The library, where cargo put it beside this program.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("this program's path");
    let beside = program.parent().expect("a directory");
    let found = [beside, beside.parent().expect("a directory")].map(|dir| dir.join("libpagoda_shim.so"));
    found.into_iter().find(|path| path.exists()).expect("libpagoda_shim.so beside the test")
}

/// Preloads the shim and tells it about the VM.
fn managed(command: &mut Command, daemon: &Daemon) {
    let paths: Vec<String> = (0..daemon.ram.len()).map(|region| format!("{RAM_PATH}{region}")).collect();
    command
        .env("LD_PRELOAD", format!("{} libaio.so.1 liburing.so.2", library().display()))
        .env("PAGODA_TOKEN", TOKEN.to_hex())
        .env("PAGODA_ATTACH", &daemon.socket)
        .env("PAGODA_RAM", paths.join(","));
}

/// A QEMU that does not outlive its case, even one that fails.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// A toy VMM and its lines.
struct Toy {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Toy {
    fn start(dir: &Path, daemon: &Daemon) -> Toy {
        let disk = dir.join("disk");
        std::fs::write(&disk, [0xd1; 4096]).expect("make the disk");
        let mut command = Command::new(std::env::current_exe().expect("this program's path"));
        managed(&mut command, daemon);
        command.env("TOY_VMM", "1").env("TOY_DISK", disk);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start the toy");
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Toy { child, input, output }
    }

    fn attached(dir: &Path, daemon: &Daemon, uffds: u32) -> (Toy, Vm) {
        let mut toy = Toy::start(dir, daemon);
        let vm = daemon.attach(uffds);
        assert_eq!(toy.line(), "attached");
        (toy, vm)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the toy's answer");
        line.trim_end().into()
    }

    fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").expect("tell the toy");
    }

    fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.line()
    }

    fn end(self) {
        let Toy { mut child, input, output } = self;
        drop((input, output));
        assert!(child.wait().expect("the toy's end").success());
    }
}

/// Whether the VMM has a page-table entry for this address (bit 63, Documentation/admin-guide/mm/pagemap.rst).
fn present(pid: u32, addr: u64) -> bool {
    let pagemap = std::fs::File::open(format!("/proc/{pid}/pagemap")).expect("pagemap");
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, addr / PAGE_SIZE as u64 * 8).expect("read pagemap");
    u64::from_le_bytes(entry) >> 63 == 1
}

fn same_file(one: &OwnedFd, other: &OwnedFd) -> bool {
    let name = |fd: &OwnedFd| {
        let stat = std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("fstat");
        (std::os::unix::fs::MetadataExt::dev(&stat), std::os::unix::fs::MetadataExt::ino(&stat))
    };
    name(one) == name(other)
}

fn a_vm_is_handed_over_whole(dir: &Path) {
    let daemon = Daemon::new(dir, &[REGION, REGION]);
    let (toy, vm) = Toy::attached(dir, &daemon, 4);
    assert_eq!(vm.pid, toy.child.id());
    assert_eq!(vm.regions.iter().map(|region| region.len).collect::<Vec<_>>(), [REGION, REGION]);
    assert!((2..=4).contains(&vm.shards.len()), "{:?}", vm.shards);
    assert!(same_file(&vm.fds[0], &daemon.ram[0]) && same_file(&vm.fds[1], &daemon.ram[1]));
    for (shard, uffd) in vm.shards.iter().zip(&vm.fds[2..]) {
        const UFFDIO_API: u64 = 0xc018_aa3f;
        const UFFDIO_REGISTER: u64 = 0xc020_aa00;
        let mut api = [0xaau64, 0, 0];
        // start, length, mode (missing), answered ioctls
        let mut register = [vm.regions[shard.region as usize].addr + shard.offset, shard.len, 1, 0];
        // SAFETY: the structures of linux/userfaultfd.h, 24 and 32 bytes; the kernel fills them. A userfaultfd of
        // another process would refuse the range.
        unsafe {
            daemon::checked(libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &mut api), "UFFDIO_API");
            daemon::checked(libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &mut register), "UFFDIO_REGISTER");
        }
    }
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid)).expect("smaps");
    let ours = smaps.split("\nVmFlags:").filter(|part| part.contains("memfd:test")).count();
    let flagged = smaps.lines().filter(|line| line.starts_with("VmFlags:") && line.contains(" dc")).count();
    assert!(flagged >= ours.saturating_sub(1) && flagged >= 2, "RAM is not inherited over fork");
    // An agent that answered has given itself its name.
    vm.link.clock();
    let threads = std::fs::read_dir(format!("/proc/{}/task", vm.pid)).expect("threads");
    let names = threads.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
    assert!(names.into_iter().any(|name| name.trim() == "pagoda-agent"));
    toy.end();
}

fn zaps_are_checked_and_move_the_epoch(dir: &Path) {
    let daemon = Daemon::new(dir, &[REGION, REGION]);
    let (mut toy, vm) = Toy::attached(dir, &daemon, 1);
    assert_eq!(toy.ask("touch"), "ok");
    let addr = vm.regions[0].addr;
    assert!(present(vm.pid, addr));
    let before = daemon.shared.epoch.load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(vm.link.zap(&[Range { addr, len: REGION }]), (before + 1, 0));
    assert!(!present(vm.pid, addr));
    assert_eq!(toy.ask("verify"), "ok", "a zap keeps the content");

    let einval = libc::EINVAL as u32;
    let second = vm.regions[1].addr;
    let bad = [
        Range { addr: addr + 1, len: PAGE_SIZE as u64 },
        Range { addr, len: REGION + (64 << 20) },
        Range { addr: 4096, len: 4096 },
    ];
    for range in bad {
        let good = Range { addr, len: PAGE_SIZE as u64 };
        assert_eq!(vm.link.zap(&[good, range]).1, einval, "{range:?}");
        assert!(present(vm.pid, addr), "nothing is done if one range is bad");
    }
    assert_eq!(vm.link.zap(&[Range { addr: second, len: REGION }]).1, 0);
    assert_eq!(toy.ask("unmap second"), "ok");
    assert_eq!(vm.link.zap(&[Range { addr: second, len: REGION }]).1, einval, "unmapped RAM is not zapped");
    let mut ranges = pagoda_abi::attach::Ranges::default();
    assert!(ranges.push(Range { addr, len: REGION }));
    vm.link.send(&Packet::Collapse { seq: 3, ranges }, &[]);
    // Whether huge pages can be had depends on the machine; the answer must tell one or the other.
    match vm.link.receive().0 {
        Packet::Collapsed { seq: 3, errno, done } => assert_eq!(done == 1, errno == 0),
        other => panic!("not Collapsed: {other:?}"),
    }
    assert_eq!(toy.ask("verify"), "ok");
    toy.end();
}

fn ram_is_guarded(dir: &Path) {
    let daemon = Daemon::new(dir, &[REGION]);
    let (mut toy, _vm) = Toy::attached(dir, &daemon, 1);
    let table = [
        ("truncate", libc::EPERM),
        ("mremap", libc::ENOMEM),
        ("map again", libc::EINVAL),
        ("map private", libc::EINVAL),
    ];
    for (command, errno) in table {
        assert_eq!(toy.ask(command), errno.to_string(), "{command}");
    }
    assert_eq!(toy.ask("touch"), "ok");
    toy.end();
}

fn discards_are_asked_for(dir: &Path) {
    let mut daemon = Daemon::new(dir, &[REGION]);
    let (mut toy, vm) = Toy::attached(dir, &daemon, 1);
    assert_eq!(toy.ask("touch"), "ok");
    toy.send("punch");
    let calls = daemon.accept();
    assert_eq!(calls.receive().0, Packet::Calls { token: TOKEN });
    calls.send(&Packet::Welcome { flags: 0 }, &[]);
    // From 8182 on, 24576 bytes: whole pages from 8192 to 28672.
    assert_eq!(calls.receive().0, Packet::Discard { seq: 1, region: 0, offset: 8192, len: 28672 - 8192 });
    calls.send(&Packet::Discarded { seq: 1 }, &[]);
    assert_eq!(toy.line(), "ok");
    toy.send("remove");
    assert_eq!(calls.receive().0, Packet::Discard { seq: 2, region: 0, offset: 8192, len: 4096 });
    // The daemon dies with the question open.
    daemon.die();
    drop((calls, vm));
    assert_eq!(toy.line(), "ok");
    assert_eq!(toy.ask("punch"), "ok");
    assert_eq!(toy.ask("verify"), "ok", "without a daemon the pages keep their content");
    toy.end();
}

fn the_vm_survives_its_daemon(dir: &Path) {
    let mut daemon = Daemon::new(dir, &[REGION, REGION]);
    let (mut toy, mut vm) = Toy::attached(dir, &daemon, 3);
    assert_eq!(toy.ask("touch"), "ok");
    for round in 0..20 {
        let (regions, shards) = (vm.regions.clone(), vm.shards.clone());
        let killed = round % 2 == 0;
        if killed {
            daemon.die();
        }
        drop(vm);
        assert_eq!(toy.ask("verify"), "ok");
        if killed {
            daemon.revive();
        }
        vm = daemon.greet(daemon.accept());
        assert_eq!((vm.pid, &vm.regions, &vm.shards), (toy.child.id(), &regions, &shards), "round {round}");
        assert_eq!(vm.link.zap(&[Range { addr: regions[1].addr, len: REGION }]).1, 0, "round {round}");
    }
    // A daemon that refuses is asked again.
    drop(vm);
    let link = daemon.accept();
    assert!(matches!(link.receive().0, Packet::Hello { .. }));
    link.send(&Packet::Refused { text: Text::new("not now") }, &[]);
    let vm = daemon.greet(daemon.accept());
    vm.link.clock();
    toy.end();
}

fn io_in_flight_is_on_the_clock(dir: &Path) {
    let daemon = Daemon::new(dir, &[REGION]);
    let (mut toy, vm) = Toy::attached(dir, &daemon, 1);
    let range = [Range { addr: vm.regions[0].addr, len: REGION }];
    for way in ["sync", "libaio", "io_uring"] {
        for round in 0..50 {
            assert_eq!(toy.ask(&format!("disk {way}")), "ok", "{way} {round}");
        }
        vm.link.clock();
        assert_eq!(daemon.shared.oldest_io(), u64::MAX, "{way}: all are over");
    }
    let ways = ["read", "readv", "preadv2", "fread", "syscall read", "syscall readv", "libaio", "io_uring"];
    for way in ways {
        assert_eq!(toy.ask(&format!("wait {way}")), "ok");
        // The toy's thread starts its read in its own time.
        let deadline = Instant::now() + PATIENCE;
        while daemon.shared.oldest_io() == u64::MAX {
            assert!(Instant::now() < deadline, "{way}: the I/O in flight is not on the clock");
            std::thread::yield_now();
        }
        let (zap, errno) = vm.link.zap(&range);
        assert_eq!(errno, 0);
        vm.link.clock();
        assert!(daemon.shared.oldest_io() < zap, "{way}: a read that began before the zap is in flight");
        assert_eq!(toy.ask("feed"), "ok");
        vm.link.clock();
        assert_eq!(daemon.shared.oldest_io(), u64::MAX, "{way}: it is over");
    }
    assert_eq!(toy.ask("wait pipe"), "ok");
    vm.link.clock();
    assert_eq!(daemon.shared.oldest_io(), u64::MAX, "what copies is not on the clock");
    assert_eq!(toy.ask("feed"), "ok");
    toy.end();
}

fn foreign_access_is_reported(dir: &Path) {
    let daemon = Daemon::new(dir, &[REGION]);
    let (mut toy, vm) = Toy::attached(dir, &daemon, 1);
    toy.send("send fd");
    assert_eq!(vm.link.receive().0, Packet::Foreign { reason: ForeignReason::RamFdSent });
    // The fd leaves only when the daemon says that all of RAM is there: whoever gets it has no userfaultfd.
    let calls = daemon.accept();
    assert_eq!(calls.receive().0, Packet::Calls { token: TOKEN });
    calls.send(&Packet::Welcome { flags: 0 }, &[]);
    assert_eq!(calls.receive().0, Packet::Foreign { reason: ForeignReason::RamFdSent });
    calls.send(&Packet::Welcome { flags: 0 }, &[]);
    assert_eq!(toy.line(), "ok");
    assert_eq!(toy.ask("raw ring"), "ok");
    assert_eq!(vm.link.receive().0, Packet::Foreign { reason: ForeignReason::UntrackedIo });
    drop(vm);
    let vm = daemon.greet(daemon.accept());
    assert_eq!(vm.link.receive().0, Packet::Foreign { reason: ForeignReason::RamFdSent });
    assert_eq!(vm.link.receive().0, Packet::Foreign { reason: ForeignReason::UntrackedIo });
    toy.end();
}

fn the_vm_does_not_start_unmanaged(dir: &Path) {
    let mut daemon = Daemon::new(dir, &[REGION]);
    let mut ends = |serve: &mut dyn FnMut(&mut Daemon), message: &str| {
        let mut command = Command::new(std::env::current_exe().expect("this program's path"));
        managed(&mut command, &daemon);
        let mut child = command.env("TOY_VMM", "1").stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        serve(&mut daemon);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(said.contains(message), "{said}");
    };
    ends(
        &mut |daemon| {
            let link = daemon.accept();
            link.receive();
            link.send(&Packet::Refused { text: Text::new("no VM has this token") }, &[]);
        },
        "no VM has this token",
    );
    ends(&mut Daemon::die, "start pagodad");
}

fn an_unmanaged_process_is_left_alone(dir: &Path) {
    // A helper inherits the variables, and does not open RAM.
    let daemon = Daemon::new(dir, &[REGION]);
    let mut command = Command::new("sh");
    managed(&mut command, &daemon);
    let output = command.args(["-c", "cat </dev/null; echo fine"]).output().unwrap();
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"fine\n"[..], &b""[..]));
}

const BOOT_TEXT: &str = "read by the boot sector\n";

/// A disk whose boot sector reads the second 4 KiB of it, straight into RAM, and prints the text there to the firmware's log.
/// (Reads smaller than QEMU's alignment for the file would go through a buffer of its own.)
fn boot_disk() -> Vec<u8> {
    const DAP: usize = 0x40;
    const CODE: [u8; 33] = [
        0x31, 0xc0, 0x8e, 0xd8, // ds = 0
        0xbe, 0x40, 0x7c, // si = 0x7c00 + DAP
        0xb4, 0x42, 0xcd, 0x13, // extended read (int 13h, 42h) from the boot drive
        0xb8, 0x00, 0x10, 0x8e, 0xc0, // es = 0x1000
        0x31, 0xdb, // bx = 0
        0x26, 0x8a, 0x07, // next: al = es:[bx]
        0xba, 0x02, 0x04, 0xee, // out 0x402, al
        0x43, // bx += 1
        0x3c, 0x0a, 0x75, 0xf4, // until the line ends
        0xf4, 0xeb, 0xfd, // halt
    ];
    // Size 16, 8 sectors, to 1000:0000, from sector 8.
    const PACKET: [u8; 16] = [16, 0, 8, 0, 0, 0, 0x00, 0x10, 8, 0, 0, 0, 0, 0, 0, 0];
    let mut disk = vec![0; 1 << 20];
    disk[..CODE.len()].copy_from_slice(&CODE);
    disk[DAP..DAP + PACKET.len()].copy_from_slice(&PACKET);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk[4096..4096 + BOOT_TEXT.len()].copy_from_slice(BOOT_TEXT.as_bytes());
    disk
}

fn qemu_attaches_boots_and_reads_its_disks(dir: &Path) {
    const RAM: u64 = 512 << 20;
    let disk = dir.join("disk.raw");
    std::fs::write(&disk, boot_disk()).expect("make the disk");
    // `PAGODA_TEST_QEMU` names another build to try.
    let program = std::env::var("PAGODA_TEST_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into());
    for aio in ["threads", "native", "io_uring"] {
        let daemon = Daemon::new(dir, &[RAM]);
        let mut command = Command::new(&program);
        managed(&mut command, &daemon);
        let drive = format!("file={},format=raw,if=virtio,cache=none,aio={aio}", disk.display());
        let backend = format!("memory-backend-file,id=ram,size=512M,mem-path={RAM_PATH}0,share=on,align=2M");
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-sandbox", "on"])
            .args(["-m", "512M", "-machine", "pc,memory-backend=ram", "-object", &backend, "-drive", &drive])
            // SeaBIOS writes its log to this port.
            .args(["-debugcon", "stdio", "-global", "isa-debugcon.iobase=0x402"]);
        let qemu = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start qemu-system-x86_64 (apt-get install qemu-system-x86)");
        let mut qemu = Qemu(qemu);
        let vm = daemon.attach(4);
        assert_eq!(vm.pid, qemu.0.id());
        assert_eq!(vm.regions.iter().map(|region| region.len).collect::<Vec<_>>(), [RAM]);
        assert_eq!(vm.regions[0].addr % pagoda_abi::REGION_ALIGN, 0);
        assert_eq!(vm.shards.len(), 4);
        let log = BufReader::new(qemu.0.stdout.take().unwrap());
        let read = log.lines().map(|line| line.expect("firmware log")).find(|line| line.contains(BOOT_TEXT.trim_end()));
        assert!(read.is_some(), "{aio}: the boot sector read its text");
        // The next answer would be Foreign if the shim had lost track.
        vm.link.clock();
        assert_eq!(daemon.shared.oldest_io(), u64::MAX, "{aio}");
        let used = daemon.shared.slots_used.load(std::sync::atomic::Ordering::SeqCst);
        assert!(used > 0, "{aio}: that read was on the clock");
        assert_eq!(vm.link.zap(&[Range { addr: vm.regions[0].addr, len: RAM }]).1, 0, "{aio}");
    }
}

/// A monitor of QEMU's.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(path: &Path) -> Monitor {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "QEMU's monitor: {error}"),
            }
            std::thread::yield_now();
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("set a time-out");
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.line();
        monitor.execute(r#"{"execute": "qmp_capabilities"}"#);
        monitor
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("QEMU's answer");
        line
    }

    fn execute(&mut self, command: &str) -> String {
        writeln!(self.0.get_mut(), "{command}").expect("tell QEMU");
        loop {
            let line = self.line();
            if !line.contains("\"event\"") {
                return line;
            }
        }
    }

    /// Whether QEMU finds this capability. It is switched off, which changes nothing.
    fn knows(&mut self, name: &str) -> bool {
        let one = format!(r#"{{"capability": "{name}", "state": false}}"#);
        let set = format!(r#"{{"execute": "migrate-set-capabilities", "arguments": {{"capabilities": [{one}]}}}}"#);
        let answer = self.execute(&set);
        let is_known = answer.contains("return");
        assert!(is_known || answer.contains(&format!("does not accept value '{name}'")), "{answer}");
        is_known
    }
}

fn the_gate_is_open_by_word_of_the_daemon_alone(dir: &Path) {
    const RAM: u64 = 64 << 20;
    const NAME: &str = "x-ignore-shared";
    let daemon = Daemon::new(dir, &[RAM]);
    let socket = dir.join("qmp");
    let mut command = Command::new(std::env::var("PAGODA_TEST_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into()));
    managed(&mut command, &daemon);
    let backend = format!("memory-backend-file,id=ram,size=64M,mem-path={RAM_PATH}0,share=on,align=2M");
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-S"])
        .args(["-m", "64M", "-machine", "pc,memory-backend=ram", "-object", &backend])
        .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
    let qemu = command.stdin(Stdio::null()).spawn().expect("start qemu-system-x86_64");
    let _qemu = Qemu(qemu);
    let vm = daemon.attach(1);
    let mut monitor = Monitor::connect(&socket);
    assert!(monitor.knows("xbzrle") && !monitor.knows(NAME));
    let gate = |link: &daemon::Link, open| {
        link.send(&Packet::Gate { seq: 5, open }, &[]);
        assert_eq!(link.receive().0, Packet::Gated { seq: 5, open });
    };
    gate(&vm.link, true);
    assert!(monitor.knows(NAME));
    gate(&vm.link, false);
    assert!(!monitor.knows(NAME));
    gate(&vm.link, false);
    assert!(!monitor.knows(NAME), "shut twice");
    // The daemon dies with the gate open.
    gate(&vm.link, true);
    drop(vm);
    let vm = daemon.greet(daemon.accept());
    vm.link.clock();
    assert!(!monitor.knows(NAME), "nobody has it open any more");
    gate(&vm.link, true);
    assert!(monitor.knows(NAME));
}
