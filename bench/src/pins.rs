//! What pins guest memory: first the proof that no page is lost, then the price.
//!
//! **The proof.** Programs and guests read a slow disk into RAM in every way there is, while everything else is paged out. Not
//! one page may be wrong.
//!
//! **The price.** Every transfer that names guest RAM is on the clock. So a guest's disk behind the host's page cache is
//! measured, all in DRAM, against plain QEMU. A second plain QEMU has its RAM in a shared memfd, as Pagoda needs it. It shows
//! what of the price is the clock's, and what is that memory's. All guests are up, and fio runs in one of them at a time.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagoda_guest::lines::Line;
use pagoda_sys::toy::process;
use serde_json::Value;
use testkit::accel::{self, Accelerator};
use testkit::daemon::Daemon;
use testkit::image::{self, ImageArgs, Images, KernelFlavour};
use testkit::programs;
use testkit::results::report::{Bar, Report};
use testkit::undo::{Guard, Undo, start_ticks_of};

use super::balloon::guest::{Guest, QEMU, Shape, Start};
use super::guest::run_to_end;
use super::{Setup, svg};

/// Every way of the victim, each alone: what is in flight would hold back page-out for all.
const WAYS: [&str; 20] = [
    "read",
    "readv",
    "pread",
    "pread-direct",
    "preadv",
    "preadv2",
    "fread",
    "syscall-read",
    "syscall-pread",
    "syscall-pread-direct",
    "syscall-preadv",
    "libaio",
    "libaio-direct",
    "uring-read",
    "uring-readv",
    "uring-direct",
    "posix-aio",
    "raw-uring",
    "stream-buffer",
    "vmsplice",
];
/// Longer than a pass over all of the victim's RAM takes.
const VICTIM_LATE_MS: u64 = 1200;
/// A guest's reads of 1 MiB come in several requests.
const GUEST_LATE_MS: u64 = 60;
const CACHES: [&str; 3] = ["writeback", "writethrough", "none"];
const GUEST_SECONDS: f64 = 16.0;
const GUEST_MAX: Duration = Duration::from_secs(300);

/// The guests whose disks are compared; fio and what it is linked with are in their memory.
const MEMORY_MIB: u64 = 768;
const DISK_MIB: u64 = 256;
const JOBS: [(&str, &str); 4] = [
    ("sequential read", "--rw=read --bs=256k --iodepth=8"),
    ("sequential write", "--rw=write --bs=256k --iodepth=8"),
    ("random read", "--rw=randread --bs=4k --iodepth=8"),
    ("random write", "--rw=randwrite --bs=4k --iodepth=8"),
];
const JOB_SECONDS: f64 = 6.0;
const RATIO_MIN: f64 = 0.97;

/// Who is compared, in the order of [`disk_speeds`].
const SYSTEMS: [&str; 3] = ["Pagoda", "plain QEMU", "plain QEMU with shared memory"];

/// MiB/s by job and round.
type Speeds = [Vec<f64>; JOBS.len()];

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A program is missing, a guest does not boot.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    if !setup.ours {
        bail!("this bench has no peers to measure alone");
    }
    let programs = programs::build()?;
    let wanted =
        ImageArgs { client: true, with: vec!["fio".into()], kernel: KernelFlavour::Full, ..ImageArgs::default() };
    let mut images = image::build(&wanted).context("make the guest's image")?;
    let accelerator = accel::find(QEMU, &images, &setup.dir)?;
    let mut report = setup.report_of("pins", accelerator.name());
    let daemon = Daemon::start(&setup.dir)?;

    let late = LateDisk::mount(setup, &programs, &programs.join(programs::VICTIM_IMAGE), VICTIM_LATE_MS)?;
    let mut wrong = 0.0;
    for way in WAYS {
        let pages = fall(&daemon, &programs, &late.file(), way)?;
        if pages > 0.0 {
            eprintln!("pins: {pages} wrong pages by {way}");
        }
        wrong += pages;
    }
    drop(late);
    let ways = WAYS.len();
    report.single(
        &format!("a program in {ways} ways of reading a slow disk: wrong pages"),
        "pages",
        &[wrong],
        Bar::AtMost(0.0),
    );
    let pattern = PatternDisk::make(setup)?;
    for cache in CACHES {
        let late = LateDisk::mount(setup, &programs, &pattern.path, GUEST_LATE_MS)?;
        let wrong = guest_on(setup, &daemon, accelerator, &images, &late.file(), cache)?;
        let name = format!("a guest reading a slow disk, cache={cache}: wrong pages");
        report.single(&name, "pages", &[wrong], Bar::AtMost(0.0));
    }

    images.initrd = images.client_initrd.clone().context("the client image")?;
    let speeds = disk_speeds(setup, &daemon, accelerator, &images)?;
    let [ours, plain, shared] = &speeds;
    for (index, (job, _)) in JOBS.iter().enumerate() {
        let name = format!("guest disk, cache=writeback, all in DRAM, {job}");
        let peers = [(SYSTEMS[1], plain, Bar::AtLeast(RATIO_MIN)), (SYSTEMS[2], shared, Bar::None)];
        for (peer_name, peer, bar) in peers {
            report.pair(&format!("{name}: {peer_name}"), "MiB/s", &ours[index], &peer[index], bar);
        }
    }
    let groups = JOBS.iter().enumerate().map(|(index, (job, _))| {
        ((*job).to_owned(), speeds.iter().map(|of_one| svg::Bar::of(&of_one[index])).collect())
    });
    let plot = svg::bar_chart(&svg::BarChart {
        title: format!("A guest's disk, cache=writeback, all in DRAM ({})", accelerator.name()),
        y_label: "MiB/s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: SYSTEMS.map(str::to_owned).into(),
        groups: groups.collect(),
    });
    Ok((report, plot))
}

/// Has the victim read the disk in one way; gives the number of wrong pages.
fn fall(daemon: &Daemon, programs: &Path, disk: &Path, way: &str) -> Result<f64> {
    let words = daemon.cli_words()?;
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(["run", "--plain", "--name", "victim", "--memory", "192M", "--dram", "64M", "--"]);
    command.arg(programs.join(programs::VICTIM)).arg(disk).arg(way).stdin(Stdio::null()).stdout(Stdio::piped());
    process::die_with_parent(&mut command);
    let output = command.output().with_context(|| format!("run the victim by {way}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let found: Value = serde_json::from_str(said.trim()).with_context(|| format!("{way}: {said}"))?;
    ensure!(found["bytes_read"].as_u64() == Some(512 << 10), "{way} reads nothing: {said}");
    let count = |name: &str| found[name].as_f64().with_context(|| format!("{way}: {said}"));
    daemon.wait_gone("victim", Duration::from_secs(20))?;
    Ok(count("wrong_at_once")?.max(count("wrong_later")?))
}

/// A guest that reads the pattern from this disk while its memory is paged; gives the number of wrong pages.
fn guest_on(
    setup: &Setup,
    daemon: &Daemon,
    accelerator: Accelerator,
    images: &Images,
    disk: &Path,
    cache: &str,
) -> Result<f64> {
    let words = daemon.cli_words()?;
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(["run", "--name", "late", "--memory", "512M", "--dram", "96M", "--", QEMU]);
    command.args(["-M", "q35", "-accel", accelerator.name(), "-m", "512M", "-smp", "1", "-nodefaults"]);
    command.args(["-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot", "-drive"]);
    command.arg(format!("file={},format=raw,if=none,id=d0,cache={cache},aio=threads,readonly=on", disk.display()));
    command.args(["-device", "virtio-blk-pci,drive=d0"]);
    let seconds = setup.seconds(GUEST_SECONDS);
    command.arg("-kernel").arg(&images.kernel).arg("-initrd").arg(&images.initrd).arg("-append").arg(format!(
        "console=ttyS0 quiet panic=-1 pagoda.work=disk+random:seconds={seconds:.0} pagoda.mib=200 pagoda.disk_mib=64 \
         pagoda.disk_rest_ms=1500"
    ));
    let (mut wrong, mut evicted) = (0u64, 0u64);
    let ended = run_to_end(command, GUEST_MAX, |line, _| {
        wrong = wrong.max(line.number("bad").unwrap_or(0));
        evicted = daemon.counter("late", "evicted_chunks").unwrap_or(evicted);
        Ok(())
    });
    // A guest that found wrong pages says so, and ends without "ok": that is the figure, not a failure of the bench.
    if wrong == 0 {
        ended?;
    }
    ensure!(evicted > 0, "nothing was paged out of the guest");
    daemon.wait_gone("late", Duration::from_secs(20))?;
    Ok(wrong as f64)
}

/// fio in turns in one guest of each of [`SYSTEMS`], each with a disk of its own.
fn disk_speeds(setup: &Setup, daemon: &Daemon, accelerator: Accelerator, images: &Images) -> Result<[Speeds; 3]> {
    let names = ["pins-ours", "pins-plain", "pins-shared"];
    let disks = names.iter().map(|name| BlankDisk::make(setup, name)).collect::<Result<Vec<_>>>()?;
    let mut words: Vec<_> = disks.iter().map(BlankDisk::words).collect();
    let memory = format!("memory-backend-memfd,id=m0,size={MEMORY_MIB}M,share=on");
    words[2].extend(["-object", &memory, "-machine", "memory-backend=m0"].map(str::to_owned));
    let start = Start { images, accelerator, disk: None };
    let shape =
        |index: usize| Shape { name: names[index], memory_mib: MEMORY_MIB, more: &words[index], ..Shape::default() };
    let mut guests = [
        Guest::boot(daemon, &shape(0), &start)?,
        Guest::boot_alone(&setup.dir, &shape(1), &start)?,
        Guest::boot_alone(&setup.dir, &shape(2), &start)?,
    ];
    let mut speeds: [Speeds; 3] = Default::default();
    for guest in &mut guests {
        // What is read was written, and is in the host's page cache.
        fio(guest, "--rw=write --bs=1M --iodepth=1 --end_fsync=0")?;
    }
    for round in 0..setup.rounds {
        eprintln!("pins: disks, round {} of {}", round + 1, setup.rounds);
        for (index, (_, words)) in JOBS.iter().enumerate() {
            let words = format!("{words} --time_based --runtime={:.0}", setup.seconds(JOB_SECONDS));
            // Who is first changes, so that a drift of the machine meets all.
            for turn in 0..guests.len() {
                let system = (round + index + turn) % guests.len();
                speeds[system][index].push(fio(&mut guests[system], &words)?);
            }
        }
    }
    let info = daemon.vm(names[0])?;
    ensure!(info.pinned.is_none(), "a plain disk must not pin the guest: {:?}", info.pinned);
    for guest in guests {
        guest.power_off()?;
    }
    Ok(speeds)
}

/// Runs fio on the guest's disk; gives MiB/s.
fn fio(guest: &mut Guest, words: &str) -> Result<f64> {
    let command = format!(
        "sh fio --name=bench --output-format=json --ioengine=libaio --direct=1 --filename=/dev/vda --size={DISK_MIB}M {words}"
    );
    let lines = guest.command(&command)?;
    let said: String = lines
        .iter()
        .filter_map(|line| Line::parse(line))
        .filter(|line| line.kind == "output")
        .map(|line| line.text().to_owned() + "\n")
        .collect();
    let report: Value = serde_json::from_str(&said[said.find('{').context("fio says nothing")?..])
        .with_context(|| format!("read fio's report: {said}"))?;
    let job = &report["jobs"][0];
    let bytes = |side: &str| job[side]["bw_bytes"].as_f64().context("fio says no bandwidth");
    Ok((bytes("read")? + bytes("write")?) / f64::from(1 << 20))
}

/// A disk of zeros, removed when dropped.
struct BlankDisk {
    path: PathBuf,
    _file: Guard,
}

impl BlankDisk {
    fn make(setup: &Setup, name: &str) -> Result<Self> {
        let path = setup.dir.join(format!("{name}.img"));
        let guard = Guard::new(Undo::File { path: path.clone() })?;
        fs::File::create(&path).and_then(|file| file.set_len(DISK_MIB << 20)).context("make a disk")?;
        Ok(Self { path, _file: guard })
    }

    fn words(&self) -> Vec<String> {
        let drive = format!("file={},format=raw,if=none,id=d0,cache=writeback,aio=threads", self.path.display());
        ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"].map(str::to_owned).into()
    }
}

/// The disk that guests verify, removed when dropped.
struct PatternDisk {
    path: PathBuf,
    _file: Guard,
}

impl PatternDisk {
    fn make(setup: &Setup) -> Result<Self> {
        let path = setup.dir.join("pins-pattern.img");
        let guard = Guard::new(Undo::File { path: path.clone() })?;
        let file = fs::File::create(&path).context("make the pattern disk")?;
        let mut writer = std::io::BufWriter::with_capacity(1 << 20, file);
        pagoda_guest::pattern::write_disk_pattern(&mut writer, DISK_MIB << 20, pagoda_guest::DISK_SEED_DEFAULT)
            .context("write the pattern disk")?;
        Ok(Self { path, _file: guard })
    }
}

/// A slow disk by FUSE, unmounted when dropped.
struct LateDisk {
    mount: PathBuf,
    server: std::process::Child,
    _undo: [Guard; 2],
}

impl LateDisk {
    fn mount(setup: &Setup, programs: &Path, image: &Path, delay_ms: u64) -> Result<Self> {
        let mount = setup.dir.join("pins-late");
        fs::create_dir_all(&mount).context("make a directory to mount at")?;
        let unmount = Guard::new(Undo::Mount { path: mount.clone() })?;
        let mut command = Command::new(programs.join(programs::LATE_DISK));
        command.arg(&mount).arg(image).args([&delay_ms.to_string(), "direct"]).stdout(Stdio::piped());
        process::die_with_parent(&mut command);
        let mut server = command.spawn().context("start the late disk")?;
        let start_ticks = start_ticks_of(server.id()).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid: server.id(), start_ticks })?;
        let mut line = String::new();
        let said = server.stdout.take().context("what the late disk says")?;
        BufReader::new(said).read_line(&mut line).context("wait for the late disk")?;
        ensure!(line == "mounted\n", "the late disk is not mounted: {line:?}");
        Ok(Self { mount, server, _undo: [unmount, kill] })
    }

    fn file(&self) -> PathBuf {
        self.mount.join("disk")
    }
}

impl Drop for LateDisk {
    fn drop(&mut self) {
        if let Err(error) = (Undo::Mount { path: self.mount.clone() }).perform() {
            eprintln!("unmount {}: {error}", self.mount.display());
        }
        // It ends when it is unmounted.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
