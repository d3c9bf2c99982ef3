//! Sharing of equal pages: one to six identical guests (ESX figure 4), and two of them beside the kernel's KSM.
//!
//! What could be shared at all is measured too: at the end all guests' memory is read from outside and equal contents are
//! counted. Then they write hard, and each verifies every page.

use std::collections::HashSet;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testkit::accel;
use testkit::daemon::Daemon;
use testkit::image;
use testkit::results::report::{Bar, Report};
use testkit::undo::Guard;

use pagoda_sys::toy::process::read_memory;

use super::Setup;
use super::balloon::guest::{self, Guest, Shape, Start};
use super::svg;

const PAGE: usize = 4096;
const MIB_PAGES: f64 = 256.0;
/// A guest's memory, and what its program fills with the same contents in each guest.
const MEMORY_MIB: u64 = 192;
const FILL_MIB: u64 = 96;
/// As in figure 4.
const GUESTS: usize = 6;
/// The paper: "over 60 % of all VM memory" with ten guests; here all that was touched, with six.
const RECLAIMED_MIN: f64 = 0.6;
/// Of the pages that each guest has shared, how far that may be from what six have: "grows linearly".
const LINEAR_PERCENT_MAX: f64 = 10.0;
/// How long the guests write, in seconds.
const WRITE_SECONDS: f64 = 20.0;
/// One round takes minutes, so no more than these are made.
const ROUNDS_MAX: usize = 3;
const GROUP: &str = "bench";
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Nothing more is found when in so long less than a hundredth came to what was found.
const QUIET: Duration = Duration::from_secs(10);
/// KSM merges nothing before its second look at a page.
const NOTHING_MAX: Duration = Duration::from_secs(60);
const SETTLED_MAX: Duration = Duration::from_secs(120);
/// Of all that is found in the end: the time at which the two are compared.
const PART: f64 = 0.9;
const KSM: &str = "/sys/kernel/mm/ksm";

/// The same guests again and again.
struct Host<'a> {
    setup: &'a Setup,
    start: Start<'a>,
}

/// All guests of a daemon, in pages.
#[derive(Clone, Copy, Default)]
struct Pages {
    resident: f64,
    /// Pages that have a frame.
    shared: f64,
    /// Frames that hold the content of shared pages.
    frames: f64,
}

impl Pages {
    fn in_dram(self) -> f64 {
        self.resident + self.frames
    }
}

/// Two guests that do not share.
struct Alone {
    /// Pages that one of them has touched and not given back.
    touched: f64,
    looks: Vec<Look>,
}

/// What was saved by when, and for how much processor time.
struct Look {
    seconds: f64,
    saved: f64,
    cpu_s: f64,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// A guest cannot be started or is wrong.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = accel::find(guest::QEMU, &images, &setup.dir)?;
    let host = Host { setup, start: Start { images: &images, accelerator, disk: None } };
    let mut report = setup.report_of("share", accelerator.name());
    let (mut grown, mut compared, mut plot) = (Grown::default(), Compared::default(), String::new());
    for round in 0..setup.rounds.min(ROUNDS_MAX) {
        eprintln!("share: round {}, two guests that do not share", round + 1);
        let alone = host.alone()?;
        plot = host.grow(alone.touched, &mut grown)?;
        host.against_ksm(&alone, &mut compared)?;
    }
    grown.report(&mut report);
    compared.report(&mut report);
    Ok((report, plot))
}

/// Figure 4, by round.
#[derive(Default)]
struct Grown {
    reclaimed: Vec<f64>,
    equal: Vec<f64>,
    of_equal: Vec<f64>,
    /// How far it is off a straight line, in percent.
    off_line: Vec<f64>,
    bad_pages: Vec<f64>,
}

impl Grown {
    fn report(&self, report: &mut Report) {
        let name = format!("{GUESTS} identical guests: reclaimed, of all that they touched");
        report.single(&name, "", &self.reclaimed, Bar::AtLeast(RECLAIMED_MIN));
        report.single(
            "what could have been: zero or equal to another page, of all touched",
            "",
            &self.equal,
            Bar::None,
        );
        report.single("reclaimed, of what could have been", "", &self.of_equal, Bar::None);
        let name = format!("pages shared a guest, 2 to {GUESTS} guests: farthest from that of {GUESTS}");
        report.single(&name, "%", &self.off_line, Bar::AtMost(LINEAR_PERCENT_MAX));
        report.single("wrong pages after all wrote and verified", "", &self.bad_pages, Bar::AtMost(0.0));
    }
}

/// Microseconds of processor time for a page reclaimed, and seconds, by round.
#[derive(Default)]
struct Compared {
    ours: [Vec<f64>; 2],
    ksm: [Vec<f64>; 2],
}

impl Compared {
    fn report(&self, report: &mut Report) {
        let name = "processor time a page reclaimed, until 90 % of all: Pagoda against KSM";
        report.pair(name, "us", &self.ours[0], &self.ksm[0], Bar::AtMost(1.0));
        let name = "time to 90 % of what it finds: Pagoda against KSM";
        report.pair(name, "s", &self.ours[1], &self.ksm[1], Bar::None);
    }
}

impl Host<'_> {
    /// Figure 4; its plot. `each`: pages that a guest touches.
    fn grow(&self, each: f64, grown: &mut Grown) -> Result<String> {
        let daemon = Daemon::start(&self.setup.dir)?;
        let (mut guests, mut steps) = (Vec::new(), Vec::new());
        let reclaimed = |pages: &Pages, nth: usize| each * nth as f64 - pages.in_dram();
        for nth in 1..=GUESTS {
            guests.push(self.boot(&daemon, nth, Some(GROUP))?);
            let mut found = Pages::default();
            settle(|| look(&daemon, nth), |pages| reclaimed(pages, nth), |pages| found = pages)?;
            eprintln!("share: {nth} guests: {:.0} of {:.0} pages reclaimed", reclaimed(&found, nth), each * nth as f64);
            steps.push(found);
        }
        let (touched, taken) = (each * GUESTS as f64, reclaimed(&steps[GUESTS - 1], GUESTS));
        grown.reclaimed.push(taken / touched);
        let shared = |nth: usize| steps[nth - 1].shared / nth as f64;
        let off = |nth: usize| (shared(nth) / shared(GUESTS) - 1.0).abs() * 100.0;
        grown.off_line.push((2..=GUESTS).map(off).fold(0.0, f64::max));
        let most = touched - distinct_pages(&guests)?;
        grown.equal.push(most / touched);
        grown.of_equal.push(taken / most);
        grown.bad_pages.push(write_hard(self.setup, guests)?);
        let line = |name: &str, of: &dyn Fn(&Pages, usize) -> f64| {
            let points = steps.iter().zip(1..).map(|(pages, nth)| [nth as f64, of(pages, nth) / MIB_PAGES]);
            (name.to_owned(), points.collect())
        };
        Ok(svg::line_chart(&svg::LineChart {
            title: "Identical guests: memory shared and reclaimed (ESX figure 4)".to_owned(),
            x_label: "guests".to_owned(),
            y_label: "MiB".to_owned(),
            x_scale: svg::Scale::Linear,
            y_scale: svg::Scale::Linear,
            series: vec![
                line("touched", &|_, nth| each * nth as f64),
                line("shared", &|pages, _| pages.shared),
                line("reclaimed", &reclaimed),
                line("zero pages", &|pages, nth| reclaimed(pages, nth) - (pages.shared - pages.frames)),
            ],
        }))
    }

    /// Two guests with Pagoda and with KSM at its defaults.
    fn against_ksm(&self, alone: &Alone, compared: &mut Compared) -> Result<()> {
        eprintln!("share: two guests that share, and with KSM");
        let looks = self.two(Some(GROUP), 2.0 * alone.touched)?;
        let ours = at_part(&looks)?;
        let at_rest = alone.looks.iter().rfind(|look| look.seconds <= ours.seconds).context("looked at once")?;
        // All that the daemon does more because it shares: zaps and copies back too.
        compared.ours[0].push((ours.cpu_s - at_rest.cpu_s).max(0.0) * 1e6 / ours.saved);
        compared.ours[1].push(ours.seconds);
        let looks = self.ksm()?;
        let merged = at_part(&looks)?;
        compared.ksm[0].push(merged.cpu_s * 1e6 / merged.saved);
        compared.ksm[1].push(merged.seconds);
        Ok(())
    }

    /// Each shares with itself alone, which looks for nothing without pressure.
    fn alone(&self) -> Result<Alone> {
        let looks = self.two(None, 0.0)?;
        // Of what was touched, 0, less what is in DRAM. The last look: what the guest gives back takes it seconds.
        let touched = -looks.last().context("looked at least once")?.saved / 2.0;
        Ok(Alone { touched, looks })
    }

    fn boot(&self, daemon: &Daemon, nth: usize, group: Option<&str>) -> Result<Guest> {
        let shape = Shape { name: &vm(nth), memory_mib: MEMORY_MIB, group, ..Shape::default() };
        let mut guest = Guest::boot(daemon, &shape, &self.start)?;
        guest.command(&fill())?;
        Ok(guest)
    }

    /// `touched`: pages, of both.
    fn two(&self, group: Option<&str>, touched: f64) -> Result<Vec<Look>> {
        let daemon = Daemon::start(&self.setup.dir)?;
        let guests = [self.boot(&daemon, 1, group)?, self.boot(&daemon, 2, group)?];
        let begun = Instant::now();
        let mut looks = Vec::new();
        let one = || {
            let look = Look {
                seconds: begun.elapsed().as_secs_f64(),
                saved: touched - look(&daemon, 2)?.in_dram(),
                cpu_s: daemon.cpu_s()?,
            };
            Ok(look)
        };
        settle(one, |look| look.saved, |look| looks.push(look))?;
        guests.into_iter().try_for_each(Guest::power_off)?;
        Ok(looks)
    }

    fn ksm(&self) -> Result<Vec<Look>> {
        let dir = self.setup.dir.join(format!("ksm-{}", std::process::id()));
        let _remove = Guard::new(testkit::undo::Undo::Directory { path: dir.clone() })?;
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let thread = ksm_thread()?;
        let _run = Guard::setting(&Path::new(KSM).join("run"), "1")?;
        let cpu = cpu_of(thread)?;
        let boot = |nth: usize| -> Result<Guest> {
            let shape = Shape { name: &vm(nth), memory_mib: MEMORY_MIB, ..Shape::default() };
            let mut guest = Guest::boot_alone(&dir, &shape, &self.start)?;
            guest.command(&fill())?;
            Ok(guest)
        };
        let guests = [boot(1)?, boot(2)?];
        let begun = Instant::now();
        let mut looks = Vec::new();
        let one = || {
            let look = Look {
                seconds: begun.elapsed().as_secs_f64(),
                saved: ksm_count("pages_sharing")?,
                cpu_s: cpu_of(thread)? - cpu,
            };
            Ok(look)
        };
        settle(one, |look| look.saved, |look| looks.push(look))?;
        guests.into_iter().try_for_each(Guest::power_off)?;
        Ok(looks)
    }
}

/// Looks until nothing more is found.
fn settle<T>(mut one: impl FnMut() -> Result<T>, value: impl Fn(&T) -> f64, mut seen: impl FnMut(T)) -> Result<()> {
    let begun = Instant::now();
    let (mut highest, mut since) = (0.0, begun);
    loop {
        let look = one()?;
        let found = value(&look);
        seen(look);
        if found > highest * 1.01 {
            (highest, since) = (found, Instant::now());
        }
        if (highest > 0.0 || begun.elapsed() > NOTHING_MAX) && since.elapsed() > QUIET {
            return Ok(());
        }
        ensure!(begun.elapsed() < SETTLED_MAX, "still more is found after {} s", SETTLED_MAX.as_secs());
        std::thread::sleep(LOOK_EVERY);
    }
}

fn at_part(looks: &[Look]) -> Result<&Look> {
    let most = looks.iter().map(|look| look.saved).fold(0.0, f64::max);
    ensure!(most > 0.0, "nothing was found");
    looks.iter().find(|look| look.saved >= most * PART).context("the most is among them")
}

fn vm(nth: usize) -> String {
    format!("bench-share-{nth}")
}

fn fill() -> String {
    format!("fill {FILL_MIB}")
}

fn look(daemon: &Daemon, guests: usize) -> Result<Pages> {
    let mut all = Pages::default();
    for nth in 1..=guests {
        let info = daemon.vm(&vm(nth))?;
        let count = |name: &str| info.counters.get(name).map_or(0.0, |count| *count as f64);
        all.resident += info.resident_bytes as f64 / PAGE as f64;
        all.shared += count("shared_pages");
        all.frames += count("shared_part_pages");
    }
    Ok(all)
}

/// Contents that are not zero, each counted once.
fn distinct_pages(guests: &[Guest]) -> Result<f64> {
    let state = RandomState::new();
    let mut found = HashSet::new();
    let mut buffer = vec![0; 1 << 20];
    for guest in guests {
        for (start, end) in ram_of(guest.pid())? {
            for at in (start..end).step_by(buffer.len()) {
                read_memory(guest.pid(), at, &mut buffer).with_context(|| format!("read the guest at {at:#x}"))?;
                let pages = buffer.chunks_exact(PAGE).filter(|page| page.iter().any(|byte| *byte != 0));
                found.extend(pages.map(|page| state.hash_one(page)));
            }
        }
    }
    Ok(found.len() as f64)
}

/// Where the RAM of a VM is mapped: its file has the VM's name.
fn ram_of(pid: u32) -> Result<Vec<(u64, u64)>> {
    let path = format!("/proc/{pid}/maps");
    let maps = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let ram: Vec<(u64, u64)> = maps
        .lines()
        .filter(|line| line.contains("/memfd:bench-share-"))
        .filter_map(|line| line.split_once(' ')?.0.split_once('-'))
        .filter_map(|(start, end)| Some((number(start)?, number(end)?)))
        .collect();
    let mapped: u64 = ram.iter().map(|(start, end)| end - start).sum();
    ensure!(mapped == MEMORY_MIB << 20, "process {pid} has {mapped} bytes of RAM mapped, not {MEMORY_MIB} MiB");
    Ok(ram)
}

/// All at once, then all of what each has is verified; wrong pages.
fn write_hard(setup: &Setup, mut guests: Vec<Guest>) -> Result<f64> {
    let work = format!("run random seconds={:.0} threads=1 write=50", setup.seconds(WRITE_SECONDS));
    guests.iter_mut().try_for_each(|guest| guest.begin(&work))?;
    let mut bad_pages = 0;
    for guest in &mut guests {
        guest.end(&work)?;
    }
    for guest in &mut guests {
        bad_pages += guest.command_unverified("verify")?.1;
    }
    guests.into_iter().try_for_each(Guest::power_off)?;
    Ok(bad_pages as f64)
}

fn ksm_count(name: &str) -> Result<f64> {
    let path = Path::new(KSM).join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    text.trim().parse().with_context(|| format!("{} says {}", path.display(), text.trim()))
}

/// The pid of the kernel's thread `ksmd`, which merges pages.
fn ksm_thread() -> Result<u32> {
    let processes = fs::read_dir("/proc").context("read /proc")?;
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .find(|pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "ksmd"))
        .context("this kernel has no KSM")
}

/// Time on a processor of a thread of the kernel, in seconds, from /proc/PID/schedstat (nanoseconds come first).
fn cpu_of(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let ns: f64 = text.split_whitespace().next().and_then(|word| word.parse().ok()).context("a number")?;
    Ok(ns / 1e9)
}
