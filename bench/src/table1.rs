//! A disk in another process's memory in the three ways of the MemX paper, its table 1 and figure 5: as a program of the host
//! has it (Linux), as a guest has it that the host exports it to (DD), and as a client inside a guest has it (DomU); and
//! disks. fio measures all of them, at one request at a time and with a queue of sequential ones.
//!
//! All ends are processes of this machine. Servers, ours and the peers', are in a network namespace of their own, at the other
//! end of a veth link with an MTU of 1500: exporter, host and QEMU reach them by it, and what a guest sends leaves QEMU's
//! user network there. Where the accelerator is TCG the guest's CPU is emulated, what it does for a request included: the
//! same guest on a disk that is nothing but memory, and datagrams that are only echoed, say how much of it that is.

mod fio;
mod guest;

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testkit::accel;
use testkit::image::{self, ImageArgs, KernelFlavour};
use testkit::link::Ethernet;
use testkit::pool::{Lend, Pool};
use testkit::results::report::{Bar, Report};
use testkit::undo::{Guard, Undo};
use testkit::workspace::repository;

use super::balloon::guest::QEMU;
use super::nbd::Nbdkit;
use super::rmap::echo::{Echo, REPLY};

use super::{Setup, svg};

use fio::{Engine, Runs};
use guest::Inside;

/// Of each disk: what is measured is written first, and takes a while in an emulated guest.
const DISK: &str = "64M";
const DISK_BYTES: u64 = 64 << 20;
/// Two disks, of a slab each.
const SERVER: &str = "200M";
const ECHOES: usize = 500;

/// Issue 4, of what a host's program has.
const DD_MAX: f64 = 1.5;
const DOMU_MAX: f64 = 2.5;

/// All that is measured, one value a round.
#[derive(Default)]
struct Table {
    linux: Runs,
    dd: Runs,
    domu: Runs,
    disk: Runs,
    guest_disk: Runs,
    guest_memory: Runs,
    echo_us: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root, no room, a program is missing, or a guest hangs.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let built = repository().join("target/release");
    let with = vec![built.join("pagoda"), built.join("pagoda-server"), PathBuf::from("fio")];
    let wanted = ImageArgs { client: true, with, kernel: KernelFlavour::Full, ..ImageArgs::default() };
    let mut images = image::build(&wanted).context("make the guest's image")?;
    images.initrd = images.client_initrd.clone().context("the client image")?;
    let accelerator = accel::find(QEMU, &images, &setup.dir)?;
    let file = DiskFile::new(&setup.dir)?;
    let link = Ethernet::new()?;
    let mut table = Table::default();
    for round in 1..=setup.rounds {
        eprintln!("table1: round {round} of {}", setup.rounds);
        table.disk.measure(setup, &mut |words| fio::on_host(words), &Engine::File(&file.path))?;
        let pool = Pool::new(&setup.dir)?;
        let servers = pool.serve_listed(1, &Lend::over_ethernet(SERVER))?;
        pool.create("host", DISK_BYTES, 1)?;
        let exporter = pool.export("host", "host.sock", None, &[])?;
        table.linux.measure(setup, &mut |words| fio::on_host(words), &Engine::Nbd(&exporter.uri))?;
        let memory = Nbdkit::over_ethernet(DISK)?;
        let disks = [
            format!("file=nbd:unix:{},format=raw", exporter.socket.display()),
            format!("file={},format=raw,cache=none,aio=native", file.path.display()),
            format!("file={},format=raw", memory.uri),
        ];
        let mut inside = Inside::boot(setup, &images, accelerator, &disks)?;
        for (runs, device) in [(&mut table.dd, "vda"), (&mut table.guest_disk, "vdb"), (&mut table.guest_memory, "vdc")]
        {
            inside.measure(setup, runs, device)?;
        }
        let echo = Echo::start(&link, false, false)?;
        table.echo_us.push(inside.echo_us(echo.addr(), ECHOES, REPLY)?);
        inside.become_client(&pool, &servers, DISK_BYTES)?;
        inside.measure(setup, &mut table.domu, "nbd0")?;
        inside.power_off()?;
        let us = [&table.linux, &table.dd, &table.domu, &table.disk].map(|runs| runs.round_trip_us[round - 1]);
        eprintln!("table1: round trip of Linux, DD, DomU, disk: {us:.1?} us");
    }
    let mut report = setup.report_of("table1", accelerator.name());
    table.figures(&mut report);
    Ok((report, table.plot()))
}

impl Table {
    fn figures(&self, report: &mut Report) {
        let Table { linux, dd, domu, disk, guest_disk, guest_memory, echo_us } = self;
        let pairs = [
            ("DD against Linux", dd, linux, Some(DD_MAX)),
            ("DomU against Linux", domu, linux, Some(DOMU_MAX)),
            ("Linux against the host's disk", linux, disk, None),
            ("DD against the same guest's virtio disk", dd, guest_disk, None),
            ("DomU against the same guest's virtio disk", domu, guest_disk, None),
            ("DD against memory behind the same guest's NBD (nbdkit)", dd, guest_memory, None),
        ];
        for (sides, ours, peer, most) in pairs {
            let name = format!("random read of 4 KiB, p50: {sides}");
            report.pair(&name, "us", &ours.round_trip_us, &peer.round_trip_us, most.map_or(Bar::None, Bar::AtMost));
            let least = most.map_or(Bar::None, |most| Bar::AtLeast(1.0 / most));
            report.pair(&format!("sequential write: {sides}"), "Mbit/s", &ours.write_mbit, &peer.write_mbit, least);
            report.pair(&format!("sequential read: {sides}"), "Mbit/s", &ours.read_mbit, &peer.read_mbit, least);
        }
        let name = "random read of 4 KiB, p50: DomU against a datagram and a page back, echoed, from the same guest";
        report.pair(name, "us", &domu.round_trip_us, echo_us, Bar::None);
    }

    /// Figure 5: how reads are distributed, random and sequential.
    fn plot(&self) -> String {
        let sides = [
            ("Linux", &self.linux),
            ("DD", &self.dd),
            ("DomU", &self.domu),
            ("disk of the host", &self.disk),
            ("virtio disk of the guest", &self.guest_disk),
        ];
        let chart = |title: &str, points: fn(&Runs) -> Vec<[f64; 2]>| {
            svg::line_chart(&svg::LineChart {
                title: title.to_owned(),
                x_label: "us".to_owned(),
                y_label: "% of reads that take no longer".to_owned(),
                x_scale: svg::Scale::Log,
                y_scale: svg::Scale::Linear,
                series: sides.map(|(name, runs)| (name.to_owned(), points(runs))).into(),
            })
        };
        svg::stack(&[
            chart("Random reads of 4 KiB, one at a time", |runs| runs.random.points()),
            chart("Sequential reads of 4 KiB, one at a time", |runs| runs.sequential.points()),
        ])
    }
}

/// The disk: a file, read and written past the page cache; deleted when dropped.
struct DiskFile {
    path: PathBuf,
    _remove: Guard,
}

impl DiskFile {
    fn new(dir: &Path) -> Result<DiskFile> {
        let path = dir.join("table1.direct");
        let remove = Guard::new(Undo::File { path: path.clone() })?;
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        file.set_len(DISK_BYTES).context("make it as long as the disk")?;
        Ok(DiskFile { path, _remove: remove })
    }
}
