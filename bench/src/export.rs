//! A snapshot of 2 GiB becomes a file: how fast is that against its disk, zstd alone, and libvirt's own way?
//!
//! Two peers do what cannot be left out. One writes the very bytes of the file to the same disk, past the page cache. The other is
//! the program `zstd -1`, with as many threads as there are CPUs, on the content of the memory from the page cache, and
//! its output goes nowhere. The slower of the two is the limit. The third is `virsh save --bypass-cache` of the same guest without
//! Pagoda ([`virsh`]). All take turns.

mod virsh;

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_api::{CreateSnapshot, ExportReport};
use pagoda_sys::swapfile::DirectBuffer;
use testkit::accel;
use testkit::daemon::Daemon;
use testkit::image;
use testkit::results::report::{Bar, Report};

use super::balloon::guest::{self, Guest, Shape, Start};
use super::snapshot::{append, wait_durable};
use super::{Setup, svg};

const MEMORY_MIB: u64 = 2048;
/// Half of it has content.
const WORK_MIB: u64 = 1024;
const VM: &str = "bench-export";
const SNAPSHOT: &str = "here";
/// Bytes that the disk's peer writes at once.
const PIECE: usize = 1 << 20;
/// The bar: the rate against the slower of disk and zstd.
const OF_LIMIT_MIN: f64 = 0.9;
/// The same: how often an export is done in the time of one `virsh save`, as a ratio of times.
const OF_VIRSH_MAX: f64 = 0.5;

#[derive(Default)]
struct Measured {
    ours_s: Vec<f64>,
    disk_s: Vec<f64>,
    zstd_s: Vec<f64>,
    virsh_s: Vec<f64>,
    /// From the command that takes the snapshot to a file.
    whole_s: Vec<f64>,
    of_limit: Vec<f64>,
    /// Bytes of the file against those of the memory with content.
    size: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest does not boot; the snapshot or its export fails; there is no `zstd` or libvirt.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(guest::QEMU, &images, &setup.dir)?;
    let daemon = Daemon::start(&setup.dir)?;
    let append = append(WORK_MIB);
    let shape = Shape { name: VM, memory_mib: MEMORY_MIB, min_mib: 64, append: &append, ..Shape::default() };
    let mut guest = Guest::boot(&daemon, &shape, &Start { images: &images, accelerator, disk: None })?;
    guest.command(&format!("fill {WORK_MIB}"))?;
    let request = CreateSnapshot { name: Some(SNAPSHOT.to_owned()), disks: Some(false), wait_durable: false };
    let began = Instant::now();
    daemon.client().take_snapshot(VM, &request).context("take the snapshot")?;
    wait_durable(&daemon, VM, SNAPSHOT)?;
    let taken_s = began.elapsed().as_secs_f64();
    guest.power_off()?;
    let mut domain = virsh::Domain::start(&setup.dir.join("libvirt"), &images, accelerator)?;
    let mut measured = Measured::default();
    let raw = setup.dir.join("export.raw");
    export(&daemon, &raw, "none")?;
    for round in 0..setup.rounds {
        eprintln!("export: round {} of {}", round + 1, setup.rounds);
        measure(setup, &daemon, &raw, &mut measured)?;
        measured.whole_s.push(taken_s + measured.ours_s.last().copied().unwrap_or(f64::NAN));
        measured.virsh_s.push(domain.save_and_restore()?);
    }
    domain.end()?;
    fs::remove_file(&raw).context("remove the content")?;
    let mut report = setup.report_of("export", accelerator.name());
    let name = format!("{MEMORY_MIB} MiB, half of it content");
    report.pair(
        &format!("{name}, export: its file to the same disk"),
        "s",
        &measured.ours_s,
        &measured.disk_s,
        Bar::None,
    );
    report.pair(&format!("{name}, export: zstd -1 alone"), "s", &measured.ours_s, &measured.zstd_s, Bar::None);
    let limit = format!("{name}, rate against the slower of disk and zstd");
    report.single(&limit, "ratio", &measured.of_limit, Bar::AtLeast(OF_LIMIT_MIN));
    let (virsh, whole) =
        (format!("{name}, export: virsh save --bypass-cache"), format!("{name}, snapshot and export: the same"));
    report.pair(&virsh, "s", &measured.ours_s, &measured.virsh_s, Bar::AtMost(OF_VIRSH_MAX));
    report.pair(&whole, "s", &measured.whole_s, &measured.virsh_s, Bar::None);
    report.single(&format!("{name}, file against content"), "ratio", &measured.size, Bar::None);
    Ok((report, plot(&measured)))
}

fn measure(setup: &Setup, daemon: &Daemon, raw: &Path, measured: &mut Measured) -> Result<()> {
    let file = setup.dir.join("export.pagoda");
    let (ours, report) = export(daemon, &file, "1")?;
    let (disk, zstd) = (write_again(&file)?, compress(raw)?);
    measured.ours_s.push(ours);
    measured.disk_s.push(disk);
    measured.zstd_s.push(zstd);
    measured.of_limit.push(disk.max(zstd) / ours);
    measured.size.push(report.bytes as f64 / report.content_bytes as f64);
    fs::remove_file(&file).context("remove the file")
}

/// Seconds of the command.
fn export(daemon: &Daemon, file: &Path, level: &str) -> Result<(f64, ExportReport)> {
    let words = daemon.cli_words()?;
    let (program, words) = words.split_first().context("the command")?;
    let mut command = Command::new(program);
    command.args(words).args(["snapshot", "export", &format!("{VM}/{SNAPSHOT}")]).arg(file);
    command.args(["--force", "--json", "--compress", level]);
    let began = Instant::now();
    let output = command.output().context("export")?;
    let took = began.elapsed().as_secs_f64();
    ensure!(output.status.success(), "export: {}", String::from_utf8_lossy(&output.stderr));
    Ok((took, serde_json::from_slice(&output.stdout).context("read its report")?))
}

/// Seconds of writing the same bytes to the same disk. They are read before.
fn write_again(file: &Path) -> Result<f64> {
    let mut bytes = Vec::new();
    File::open(file)?.read_to_end(&mut bytes).context("read the file")?;
    let peer = file.with_extension("peer");
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let out =
        OpenOptions::new().write(true).create_new(true).custom_flags(direct).open(&peer).context("make a file")?;
    let mut piece = DirectBuffer::new(PIECE);
    let began = Instant::now();
    for (at, part) in (0..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
        piece[..part.len()].copy_from_slice(part);
        out.write_all_at(&piece, at).context("write a piece")?;
    }
    out.sync_all().context("write it to the disk")?;
    let took = began.elapsed().as_secs_f64();
    fs::remove_file(&peer).context("remove it")?;
    Ok(took)
}

/// Seconds of `zstd -1` on the content.
fn compress(raw: &Path) -> Result<f64> {
    // Into the page cache.
    std::io::copy(&mut File::open(raw)?, &mut std::io::sink())?;
    let mut command = Command::new("zstd");
    command.args(["-1", "-q", "-f", "-T0", "-o", "/dev/null"]).arg(raw);
    let began = Instant::now();
    let status = command.status().context("start zstd")?;
    ensure!(status.success(), "zstd: {status}");
    Ok(began.elapsed().as_secs_f64())
}

fn plot(measured: &Measured) -> String {
    let sides = [&measured.ours_s, &measured.disk_s, &measured.zstd_s, &measured.virsh_s];
    svg::bar_chart(&svg::BarChart {
        title: "A snapshot becomes a file".to_owned(),
        y_label: "s".to_owned(),
        y_scale: svg::Scale::Linear,
        series: ["export", "its bytes to the disk", "zstd alone", "virsh save"].map(str::to_owned).to_vec(),
        groups: vec![(format!("{MEMORY_MIB} MiB"), sides.map(|side| svg::Bar::of(side)).to_vec())],
    })
}
