//! What guests of both sides have in common: how they boot, how they are led before and after a move, how they write meanwhile, and
//! what is measured of a move.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_guest::PAGES_PER_MIB;
use pagoda_guest::lines::Line;
use serde_json::Value;
use testkit::qmp::Qmp;

use super::network::Network;
use crate::Setup;
use crate::balloon::guest::{Guest, Port, Shape, Start};
use crate::snapshot::{append, time_us};

pub const VM: &str = "bench-migrate";
/// Each page of the guest's program is as likely to be hit by one of so many writes, in percent of all its pages: with 69 half of the
/// pages are written (1 - exp(-0.69)).
const WRITES_PERCENT: f64 = 69.0;
/// What a link of 1 Gbit/s carries of a move.
const LINK_BYTES_PER_S: f64 = 119e6;
/// Of the files of the image, whose content most of the guest's pages have.
const CORPUS_MIB: u64 = 8;

/// What both sides have in common.
#[derive(Clone, Copy)]
pub struct Common<'a> {
    pub setup: &'a Setup,
    pub network: &'a Network,
    pub start: &'a Start<'a>,
    /// The full path of QEMU's program.
    pub qemu: &'a Path,
    pub size: Size,
}

/// A guest of this size. Two thirds are filled by its program: three of four pages with what programs, libraries and text hold, the
/// fourth with what does not compress. Its kernel has most of the rest.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub memory_mib: u64,
}

impl Size {
    pub fn work_mib(self) -> u64 {
        self.memory_mib / 3 * 2
    }

    pub fn half_mib(self) -> u64 {
        self.memory_mib / 2
    }

    pub fn append(self) -> String {
        // Under TCG beside other work the kernel takes its timer for broken.
        format!("no_timer_check pagoda.corpus={CORPUS_MIB} {}", append(self.work_mib()))
    }
}

/// What was measured of a move.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// From the request until the guest runs at its destination.
    pub ms: f64,
    /// From the request until all its memory is there.
    pub whole_ms: f64,
    /// What half of the faults took at most there for which a page was fetched, in microseconds. 0: it is not known.
    pub fault_p50_us: f64,
    /// As `ms`, from when memory began to be sent.
    pub copied_ms: f64,
    /// When it ran there, microseconds since 1970.
    pub resumed_us: f64,
    /// From QEMU's event STOP at the source to RESUME at the destination, by one clock.
    pub downtime_ms: f64,
    /// What the source has put on the link for it.
    pub link_bytes: u64,
    /// Content of memory that was sent, as the source counts it.
    pub sent_bytes: u64,
    /// Pages that came from swap and went there at the source, as its engine counts them. Of a peer it is not known.
    pub paged: u64,
    /// The same at the destination, up to when the guest ran there.
    pub paged_there: u64,
    /// Bytes that the source had in swap when it began, and the destination when it ended.
    pub swapped_bytes: u64,
    pub swapped_there_bytes: u64,
    /// How fast the source read its swap, bytes a second. 0: it is not known.
    pub read_bytes_per_s: f64,
}

impl Moved {
    pub fn show(&self, what: &str) {
        let Moved { ms, copied_ms, downtime_ms, link_bytes, sent_bytes, paged, paged_there, .. } = self;
        let (link, sent) = (link_bytes >> 20, sent_bytes >> 20);
        eprintln!(
            "migrate: {what}: {ms:.0} ms ({copied_ms:.0} of copying), {downtime_ms:.1} ms still, {link} MiB on the link \
             ({sent} MiB sent), {paged} pages in and out, {paged_there} there"
        );
    }
}

/// Who leads a guest: its port at the host where it booted, or where it is now.
pub enum Control {
    Booted(Guest),
    Moved(Port),
}

impl Control {
    /// # Errors
    /// It refuses, found wrong content, or hangs.
    pub fn command(&mut self, text: &str) -> Result<Vec<String>> {
        match self {
            Control::Booted(guest) => guest.command(text),
            Control::Moved(port) => port.command(text),
        }
    }

    /// # Errors
    /// It has gone.
    pub fn begin(&mut self, text: &str) -> Result<()> {
        match self {
            Control::Booted(guest) => guest.begin(text),
            Control::Moved(port) => port.begin(text),
        }
    }

    /// Its QEMU has ended. Waits at both ends for what the guest has begun at this one. Gives what it says of that at the destination.
    ///
    /// # Errors
    /// It found wrong content, or hangs.
    pub fn end_at(&mut self, destination: &mut Port, text: &str) -> Result<Vec<String>> {
        // The reply has come where the guest was then.
        let ended = match self {
            Control::Booted(guest) => guest.end(text),
            Control::Moved(port) => port.end(text),
        };
        let (lines, bad_pages) = ended.or_else(|_| destination.end(text))?;
        ensure!(bad_pages == 0, "{text}: {lines:#?}");
        Ok(lines)
    }
}

/// Boots a guest by these words and QEMU's, with its files in `dir`, and has it fill its memory.
///
/// # Errors
/// It does not boot.
pub fn boot(words: &[String], dir: &Path, common: Common<'_>) -> Result<(Control, Qmp)> {
    let Common { size, start, .. } = common;
    let monitor = monitor_of(dir);
    let _ = std::fs::remove_file(&monitor);
    let more = ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", monitor.display())];
    let append = size.append();
    let shape = Shape { name: VM, memory_mib: size.memory_mib, append: &append, more: &more, ..Shape::default() };
    let mut guest = Guest::boot_by(words, dir, &shape, start)?;
    guest.command(&format!("fill {}", size.work_mib()))?;
    Ok((Control::Booted(guest), Qmp::connect(&monitor)?))
}

/// Where QEMU has the bench's monitor.
pub fn monitor_of(dir: &Path) -> PathBuf {
    dir.join(format!("{VM}.monitor"))
}

/// A command that rewrites half of the pages in about the time that they need on the link.
///
/// On a faster link it is the same: what is written in a shorter time is less.
///
/// The guest knows no pace. But it reads pages between writes, and how many is a setting: this measures how fast it is, and takes the
/// setting by which the time is right. It can write no slower than once in a hundred pages.
///
/// # Errors
/// It does not say how fast it is.
pub fn writer(control: &mut Control, size: Size) -> Result<String> {
    let lines = control.command("run random seconds=1 write=1")?;
    let done = lines.iter().filter_map(|line| Line::parse(line)).find(|line| line.kind == "done");
    let (ops, us) = done.and_then(|line| line.number("ops").zip(line.number("us"))).context("what the guest did")?;
    let pages = (size.work_mib() * PAGES_PER_MIB as u64) as f64;
    let ops_per_s = ops as f64 * 1e6 / us.max(1) as f64;
    let wanted_s = (size.work_mib() << 20) as f64 / LINK_BYTES_PER_S;
    let write = (WRITES_PERCENT * pages / (ops_per_s * wanted_s)).round().clamp(1.0, WRITES_PERCENT);
    let passes = (WRITES_PERCENT / write).round();
    let expected_s = passes * pages / ops_per_s;
    eprintln!("migrate: the guest writes once in {:.0} reads, {expected_s:.1} s for {wanted_s:.1} s", 100.0 / write);
    Ok(format!("run random passes={passes:.0} write={write:.0}"))
}

/// The monitor has said nothing of a stop that is still to be read.
///
/// # Errors
/// QEMU does not answer.
pub fn forget_stops(monitor: &mut Qmp) -> Result<()> {
    monitor.status()?;
    while monitor.seen(is_event("STOP")).is_some() {}
    Ok(())
}

/// When QEMU says that something happened, microseconds since 1970. It is waited for.
///
/// # Errors
/// It does not happen for a long time.
pub fn when(monitor: &mut Qmp, event: &'static str) -> Result<f64> {
    let found = monitor.wait_event(is_event(event)).with_context(|| format!("wait for {event}"))?;
    time_us(&found)
}

fn is_event(name: &'static str) -> impl Fn(&Value) -> bool {
    move |event| event["event"] == name
}
