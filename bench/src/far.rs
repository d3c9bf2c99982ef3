//! Quicksort of twice the DRAM, with the pool as the remote tier, with private swap on the disk and on a disk behind NBD, with the
//! kernel's swap on the disk, and with all of it in DRAM (table 2 of the MemX paper); then one to eight such VMs at a time
//! (figure 7).
//!
//! Servers, daemon and VMs are processes of one machine: its CPUs do the work of both ends.

mod guest;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use testkit::daemon::{Daemon, cpu_s_of};
use testkit::link::Ethernet;
use testkit::peers::cgroup::DiskCgroup;
use testkit::peers::nbd_disk::{Cache, NbdDisk};
use testkit::peers::swap::{LimitedToy, Swap};
use testkit::pool::{Lend, Pool, Server};
use testkit::results::report::{Bar, NO_VALUE, Report};
use testkit::stepped::{OomKilled, SteppedToy};

use super::{Setup, svg};

/// Issue 4: faster than paging to a disk.
const DISK_RATIO_MAX: f64 = 1.0;
/// Issue 4: against all of it in DRAM.
const LOCAL_RATIO_MAX: f64 = 2.0;
/// Issue 4: time grows at most linearly.
const GROWTH_MAX: f64 = 1.0;
/// Sorted by each VM of a fleet.
const FLEET_MIB: u64 = 128;
const FLEETS: [usize; 4] = [1, 2, 4, 8];
/// Of a disk behind NBD: journal, inodes, the daemon's own files.
const FILE_SYSTEM_MIB: u64 = 256;
/// Bytes a second that a usual SSD at SATA's 6 Gbit/s reads and writes. The disk of a machine that is a VM itself may be its
/// host's memory, and faster than any network of the paper's or today's racks.
const SATA: (u64, u64) = (550_000_000, 520_000_000);
const ON_SATA: &str = "private swap on the disk, held to SATA's 550 MB/s";
/// A VM that was told to end has.
const GONE_MAX: Duration = Duration::from_secs(60);

/// Where pages go that have no room in DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    Pool,
    /// Private swap, where the daemon has its files.
    Swap,
    /// They have room: all memory is in DRAM.
    Dram,
}

/// A daemon, and what its VMs' pages go to.
struct Bench {
    // Fields are dropped in this order: users go before what they use.
    daemon: Daemon,
    servers: Vec<Server>,
    _pool: Option<Pool>,
    _disk: Option<NbdDisk>,
    _slower: Option<DiskCgroup>,
    _link: Ethernet,
}

impl Bench {
    /// One that borrows from servers in a namespace of this machine, and has a disk.
    fn start(setup: &Setup, lent: &str) -> Result<Bench> {
        let link = Ethernet::new()?;
        let pool = Pool::new(&setup.dir)?;
        let servers = pool.serve_listed(1, &Lend::over_ethernet(lent))?;
        let dir = pool.dir().to_str().context("the directory's name is not UTF-8")?.to_owned();
        let daemon = Daemon::start_with(&setup.dir, "daemon", &["--pool-dir", &dir])?;
        Ok(Bench { daemon, servers, _pool: Some(pool), _disk: None, _slower: None, _link: link })
    }

    /// One whose disk is behind NBD. `swapped_mib` is what its VMs have.
    fn on_nbd(setup: &Setup, swapped_mib: u64, cache: Cache) -> Result<Bench> {
        let link = Ethernet::new()?;
        let disk = NbdDisk::start(&setup.dir, (swapped_mib + FILE_SYSTEM_MIB) << 20, cache)?;
        let daemon = Daemon::start_with(disk.dir(), "daemon", &[])?;
        Ok(Bench { daemon, servers: Vec::new(), _pool: None, _disk: Some(disk), _slower: None, _link: link })
    }

    /// One whose disk is held to SATA's speed; `None` where that cannot be done, which is said.
    fn on_sata(setup: &Setup) -> Result<Option<Bench>> {
        let name = format!("pagoda-bench-disk-{}", std::process::id());
        let slower = match DiskCgroup::new(&name, &setup.dir, SATA) {
            Ok(slower) => slower,
            Err(error) => {
                eprintln!("far: no disk at SATA's speed, its rows are left out: {error:#}");
                return Ok(None);
            }
        };
        let link = Ethernet::new()?;
        let daemon = Daemon::start_with(&setup.dir, "daemon", &[])?;
        slower.add(daemon.pid())?;
        let bench = Bench { daemon, servers: Vec::new(), _pool: None, _disk: None, _slower: Some(slower), _link: link };
        Ok(Some(bench))
    }

    fn toy(&self, name: &str, memory_mib: u64, tier: Tier) -> Result<SteppedToy> {
        let dram = if tier == Tier::Dram { memory_mib } else { memory_mib / 2 };
        let far: &[&str] = if tier == Tier::Pool { &["--remote", "pool:"] } else { &[] };
        let mut toy = self.daemon.start_toy_with(name, memory_mib, dram, far, &[])?;
        toy.map()?;
        Ok(toy)
    }

    /// CPU time of the daemon and of the servers, in seconds: both ends of the pool.
    fn cpu_s(&self) -> Result<f64> {
        let pids = std::iter::once(self.daemon.pid()).chain(self.servers.iter().map(|server| server.process.pid()));
        pids.map(cpu_s_of).sum()
    }

    /// Seconds that each of `count` VMs takes to sort its memory, all at the same time.
    fn sort(&self, count: usize, memory_mib: u64, tier: Tier) -> Result<f64> {
        let names: Vec<String> = (0..count).map(|number| format!("sort-{number}")).collect();
        let toys = names.iter().map(|name| self.toy(name, memory_mib, tier)).collect::<Result<Vec<_>>>();
        let mut toys = toys?;
        let seconds = sort_all(&mut toys)?;
        for (name, toy) in names.iter().zip(toys) {
            let info = self.daemon.vm(name)?;
            let from_pool = info.counters.get("remote_in_pages").copied().unwrap_or(0);
            if (tier == Tier::Pool) != (from_pool > 0) {
                bail!("{from_pool} pages came from the pool, with {tier:?}: {info:#?}");
            }
            toy.quit()?;
            self.daemon.wait_gone(name, GONE_MAX)?;
        }
        Ok(seconds)
    }
}

/// Has all of them sort, and says how long the slowest took.
fn sort_all(toys: &mut [SteppedToy]) -> Result<f64> {
    for toy in toys.iter_mut() {
        toy.start_sort()?;
    }
    let mut slowest: f64 = 0.0;
    for toy in toys {
        slowest = slowest.max(toy.finish_sort()?.seconds);
    }
    Ok(slowest)
}

/// Runs the bench `far`.
///
/// # Errors
/// A side cannot be set up, or sorts wrongly.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let memory_mib = if setup.quick { 256 } else { 512 };
    let [mut pool, mut swap, mut sata, mut nbd, mut cached, mut dram, mut kernel] = [const { Vec::new() }; 7];
    let [mut pool_cpu, mut swap_cpu] = [const { Vec::new() }; 2];
    for round in 1..=setup.rounds {
        eprintln!("far: round {round} of {}", setup.rounds);
        if setup.ours {
            let bench = Bench::start(setup, "800M")?;
            for (tier, seconds, cpu) in [
                (Tier::Pool, &mut pool, Some(&mut pool_cpu)),
                (Tier::Swap, &mut swap, Some(&mut swap_cpu)),
                (Tier::Dram, &mut dram, None),
            ] {
                let before = bench.cpu_s()?;
                seconds.push(bench.sort(1, memory_mib, tier)?);
                let used = bench.cpu_s()? - before;
                cpu.into_iter().for_each(|cpu| cpu.push(used));
            }
            drop(bench);
            if let Some(bench) = Bench::on_sata(setup)? {
                sata.push(bench.sort(1, memory_mib, Tier::Swap)?);
            }
            for (cache, seconds) in [(Cache::Nothing, &mut nbd), (Cache::PageCache, &mut cached)] {
                seconds.push(Bench::on_nbd(setup, memory_mib, cache)?.sort(1, memory_mib, Tier::Swap)?);
            }
        }
        let _on = Swap::on_file(&setup.dir, (memory_mib << 20) * 2)?;
        let mut limited = LimitedToy::start(&["--mib", &memory_mib.to_string()], memory_mib / 2)?;
        limited.toy.map()?;
        // It has no bar. Under a limit the kernel may find nothing to write out, and kill it.
        match sort_all(std::slice::from_mut(&mut limited.toy)) {
            Ok(seconds) => kernel.push(seconds),
            Err(error) if error.is::<OomKilled>() => kernel.push(NO_VALUE),
            Err(error) => return Err(error),
        }
    }
    let mut guests = guest::Guests::new(setup)?;
    for round in 1..=setup.rounds.min(guest::ROUNDS_MAX) {
        if setup.ours {
            eprintln!("far: guests, round {round}");
            guests.round(setup)?;
        }
    }
    let mut report = setup.report("far");
    let of = |peer: &str| format!("quicksort of {memory_mib} MiB in half the DRAM, far tier pool: {peer}");
    report.pair(&of("private swap on the disk"), "s", &pool, &swap, Bar::AtMost(DISK_RATIO_MAX));
    if !sata.is_empty() {
        report.pair(&of(ON_SATA), "s", &pool, &sata, Bar::AtMost(DISK_RATIO_MAX));
    }
    report.pair(&of("private swap on an NBD disk"), "s", &pool, &nbd, Bar::AtMost(DISK_RATIO_MAX));
    report.pair(&of("the same with its server's page cache"), "s", &pool, &cached, Bar::None);
    report.pair(&of("all of it in DRAM"), "s", &pool, &dram, Bar::AtMost(LOCAL_RATIO_MAX));
    report.pair(&of("the kernel's swap on the disk"), "s", &pool, &kernel, Bar::None);
    let killed = kernel.iter().filter(|seconds| seconds.is_nan()).count();
    if killed > 0 {
        report.note(format!("peer out of memory and killed in {killed} of {} rounds", kernel.len()));
    }
    // What the sort's CPU and one more have to bear, where the server is the same machine; the disk takes none of it.
    report.pair(&of("CPU time of daemon and server, private swap"), "s", &pool_cpu, &swap_cpu, Bar::None);
    guests.report(&mut report);
    let disks = [("at SATA's speed", &sata), ("on an NBD disk", &nbd), ("on a cached NBD disk", &cached)];
    let swaps = [&[("private swap", &swap)][..], &disks, &[("kernel's swap", &kernel)]].concat();
    let sides = [&[("pool", &pool)][..], &swaps, &[("all in DRAM", &dram)]].concat();
    let chart = svg::BarChart {
        title: format!("Quicksort of {memory_mib} MiB with half of it in DRAM"),
        y_label: "seconds".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["seconds".to_owned()],
        groups: sides.iter().map(|(name, seconds)| ((*name).to_owned(), vec![svg::Bar::of(seconds)])).collect(),
    };
    Ok((report, svg::bar_chart(&chart)))
}

/// Runs the bench `fleet`.
///
/// # Errors
/// A side cannot be set up, or sorts wrongly.
pub fn run_fleet(setup: &Setup) -> Result<(Report, String)> {
    let [mut pool, mut swap, mut nbd] = [const { [const { Vec::new() }; FLEETS.len()] }; 3];
    for round in 1..=setup.rounds {
        eprintln!("fleet: round {round} of {}", setup.rounds);
        let bench = Bench::start(setup, "1200M")?;
        for (index, count) in FLEETS.into_iter().enumerate() {
            pool[index].push(bench.sort(count, FLEET_MIB, Tier::Pool)?);
            swap[index].push(bench.sort(count, FLEET_MIB, Tier::Swap)?);
        }
        drop(bench);
        let bench = Bench::on_nbd(setup, FLEET_MIB * FLEETS[FLEETS.len() - 1] as u64, Cache::Nothing)?;
        for (index, count) in FLEETS.into_iter().enumerate() {
            nbd[index].push(bench.sort(count, FLEET_MIB, Tier::Swap)?);
        }
    }
    let mut report = setup.report("fleet");
    for (index, count) in FLEETS.into_iter().enumerate() {
        let name = format!("{count} VMs sort {FLEET_MIB} MiB each in half the DRAM: pool, and private swap");
        report.pair(&name, "s", &pool[index], &swap[index], Bar::None);
        let name = format!("{count} VMs sort {FLEET_MIB} MiB each in half the DRAM: pool, and swap on an NBD disk");
        report.pair(&name, "s", &pool[index], &nbd[index], Bar::None);
    }
    let last = FLEETS.len() - 1;
    let growth = |seconds: &[Vec<f64>; FLEETS.len()]| -> Vec<f64> {
        let pairs = seconds[last].iter().zip(&seconds[0]);
        pairs.map(|(many, one)| many / one / FLEETS[last] as f64).collect()
    };
    let name = format!("time of {} VMs against {0} times that of one", FLEETS[last]);
    report.single(&name, "ratio", &growth(&pool), Bar::AtMost(GROWTH_MAX));
    let series = |name: &str, seconds: &[Vec<f64>]| {
        let median = |of: &Vec<f64>| testkit::results::report::median(of).unwrap_or(0.0);
        let points = FLEETS.iter().zip(seconds).map(|(count, of)| [*count as f64, median(of)]).collect();
        (name.to_owned(), points)
    };
    let chart = svg::LineChart {
        title: format!("VMs that sort {FLEET_MIB} MiB each with half of it in DRAM"),
        x_label: "VMs".to_owned(),
        y_label: "seconds".to_owned(),
        x_scale: svg::Scale::Linear,
        y_scale: svg::Scale::Linear,
        series: vec![series("pool", &pool), series("private swap", &swap), series("on an NBD disk", &nbd)],
    };
    Ok((report, svg::line_chart(&chart)))
}
