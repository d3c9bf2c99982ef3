//! Two guests whose loads change all the time, and whose clients come, stall and die: every byte that comes is compared, and the
//! descriptors and the memory of the processes are watched.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testkit::cpu::tree_of;
use testkit::results::report::{Bar, Report, median};

use super::client::Manner;
use super::course::{MAX_MIB, MIN_MIB, SLO, Step, harsh, standard};
use super::drive::{self, Live, Plans, Track};
use super::lab::{Lab, PERIOD, Tenant};
use crate::Setup;
use crate::balloon::guest::Start;

/// How long it lasts.
const MINUTES: u64 = 60;
const MINUTES_QUICK: u64 = 3;
/// Between two changes of a guest's load, in periods.
const PERIODS: usize = 7;
/// Between two looks at the processes.
const LOOK: Duration = Duration::from_secs(10);
/// The last third against the second: the first is needed to come to what is usual.
const GROWTH_MAX: f64 = 1.05;
const SEED: u64 = 7100;
const NAMES: [&str; 2] = ["soak-1", "soak-2"];

/// What is watched of processes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Daemon,
    Keeper,
    Worker,
}

impl Kind {
    fn text(self) -> &'static str {
        match self {
            Self::Daemon => "pagodad",
            Self::Keeper => "keepers of pagoda-outbox",
            Self::Worker => "workers of pagoda-outbox",
        }
    }
}

/// Descriptors and memory of its own, of all processes of a kind together.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    descriptors: f64,
    anonymous_kib: f64,
}

type Looks = BTreeMap<Kind, Vec<Usage>>;

/// Adds the rows.
///
/// # Errors
/// A guest fails; wrong bytes were delivered.
pub fn run(setup: &Setup, start: &Start<'_>, report: &mut Report) -> Result<()> {
    let minutes = setup.minutes.unwrap_or(if setup.quick { MINUTES_QUICK } else { MINUTES });
    let lab = Lab::start(setup)?;
    let options = ["--outbox", "auto", "--outbox-slo", SLO].map(str::to_owned).to_vec();
    let wanted: Vec<(String, Vec<String>)> = NAMES.iter().map(|name| ((*name).to_owned(), options.clone())).collect();
    let mut tenants = lab.boot(&wanted, start)?;
    let [min, max] = [MIN_MIB, MAX_MIB].map(|mib| format!("{mib}M"));
    for name in NAMES {
        lab.pagoda(&["outbox", "set", name, "--space", "auto", "--min", &min, "--max", &max])?;
    }
    let count = (minutes * 60).div_ceil(PERIOD.as_secs() * PERIODS as u64) as usize;
    let steps = [steps(count, 0), steps(count, 3)];
    let plans = Plans { steps: &steps, label: "soak", seed: SEED, manner: Manner::Rough };
    let (mut looks, mut looked) = (Looks::new(), Instant::now());
    let began = Instant::now();
    let tracks = drive::run(&lab, &mut tenants, &plans, |lives| {
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            look(&lab, &mut looks)?;
            show(&looks, lives, began);
        }
        Ok(())
    })?;
    let refused = refused_writes(&lab)?;
    add(report, &tracks, &looks, began.elapsed(), refused);
    tenants.into_iter().try_for_each(|tenant: Tenant| lab.end(tenant))
}

/// The standard scenario's phases in turn, from one of them on, and a network that is too slow for what is written.
fn steps(count: usize, first: usize) -> Vec<Step> {
    let mut turn = standard(PERIODS);
    turn.push(harsh(PERIODS)[1]);
    turn.into_iter().cycle().skip(first).take(count).collect()
}

fn look(lab: &Lab, looks: &mut Looks) -> Result<()> {
    let mut now: BTreeMap<Kind, Usage> = BTreeMap::new();
    let mut add = |kind: Kind, pid: u32| -> Result<()> {
        let usage = usage(pid).with_context(|| format!("look at {} ({pid})", kind.text()))?;
        let sum = now.entry(kind).or_default();
        sum.descriptors += usage.descriptors;
        sum.anonymous_kib += usage.anonymous_kib;
        Ok(())
    };
    add(Kind::Daemon, lab.daemon.pid())?;
    for name in NAMES {
        let outbox = lab.daemon.client().outbox(name).context("look at an outbox")?;
        let keeper = outbox.pid.context("the outbox has no process")?;
        for pid in tree_of(keeper)? {
            add(if pid == keeper { Kind::Keeper } else { Kind::Worker }, pid)?;
        }
    }
    for (kind, usage) in now {
        looks.entry(kind).or_default().push(usage);
    }
    Ok(())
}

fn usage(pid: u32) -> Result<Usage> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).context("list its descriptors")?.count() as f64;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("read its status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("no RssAnon")?;
    let kib = line.split_ascii_whitespace().next().and_then(|kib| kib.parse().ok()).context("no RssAnon")?;
    Ok(Usage { descriptors, anonymous_kib: kib })
}

fn show(looks: &Looks, lives: &[Live], began: Instant) {
    let last = |(kind, usages): (&Kind, &Vec<Usage>)| {
        let usage = usages.last().copied().unwrap_or_default();
        format!("{} {} descriptors, {} KiB", kind.text(), usage.descriptors, usage.anonymous_kib)
    };
    let all: Vec<String> = looks.iter().map(last).collect();
    let jobs: usize = lives.iter().map(Live::jobs).sum();
    eprintln!("outbox-control: soak: {:.0} s, {jobs} jobs; {}", began.elapsed().as_secs_f64(), all.join("; "));
}

fn refused_writes(lab: &Lab) -> Result<u64> {
    let of = |name: &str| {
        let outbox = lab.daemon.client().outbox(name).context("look at an outbox")?;
        Ok(outbox.profile.map_or(0, |profile| profile.refused_writes))
    };
    NAMES.into_iter().map(of).sum()
}

fn add(report: &mut Report, tracks: &[Track], looks: &Looks, length: Duration, refused: u64) {
    let sum = |of: fn(&Track) -> u64| tracks.iter().map(of).sum::<u64>();
    let written: usize = tracks.iter().flat_map(|track| &track.steps).map(|progress| progress.jobs.len()).sum();
    let files = sum(|track| track.taken.files);
    let row = format!("guests: soak of {:.0} min, of files written: delivered and right", length.as_secs_f64() / 60.0);
    report.single(&row, "", &[files as f64 / written.max(1) as f64], Bar::AtLeast(1.0));
    report.note(format!(
        "{files} files, {:.1} GB, each byte compared; {} stalls and {} deaths of clients, which took {:.1} MB with them that \
         their host had acknowledged; {refused} writes refused",
        sum(|track| track.taken.bytes) as f64 / 1e9,
        sum(|track| track.taken.stalls),
        sum(|track| track.taken.deaths),
        sum(|track| track.taken.lost_bytes) as f64 / 1e6,
    ));
    for (kind, usages) in looks {
        let third = |nth: usize, of: fn(&Usage) -> f64| {
            let part = usages.len() / 3;
            let values: Vec<f64> = usages[nth * part..(nth + 1) * part].iter().map(of).collect();
            median(&values).unwrap_or(f64::NAN)
        };
        let mut row = |what: &str, unit: &str, of: fn(&Usage) -> f64| {
            let name = format!("guests: soak: {what} of {}, last third against the second", kind.text());
            report.pair(&name, unit, &[third(2, of)], &[third(1, of)], Bar::AtMost(GROWTH_MAX));
            let most = usages.iter().map(of).fold(0.0, f64::max);
            report.note(format!("at most {most:.0}; {:.0} in the first third", third(0, of)));
        };
        row("descriptors", "", |usage| usage.descriptors);
        row("memory", "KiB", |usage| usage.anonymous_kib);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_change_and_the_guests_differ() {
        let [one, other] = [steps(12, 0), steps(12, 3)];
        assert_eq!((one.len(), other.len()), (12, 12));
        assert!(one.iter().zip(&other).all(|(one, other)| one.name != other.name));
        assert!(one.iter().any(|step| step.rate == 4_000_000));
    }

    #[test]
    fn this_process_has_descriptors_and_memory() {
        let usage = usage(std::process::id()).unwrap();
        assert!(usage.descriptors >= 3.0 && usage.anonymous_kib > 0.0, "{usage:?}");
    }
}
