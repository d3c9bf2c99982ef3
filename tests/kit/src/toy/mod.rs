//! The toy VMM: a plain process that maps RAM, fills it and verifies every access at the
//! machine's own speed.
//!
//! Under `pagoda run --plain` its RAM is the file that `PAGODA_RAM` names; otherwise it is memory
//! of its own, which is how the peers are measured. A wrong page is counted and described, never
//! ignored: the exit status is 1 when there was one.
//!
//! With `--step` the bench leads: the toy prints `TOY start`, `TOY ready {json}` and
//! `TOY done {json}`, and waits for `fill`, `go [options of a run]` and `quit` on its input. Told
//! `map` instead of `fill` it leaves the RAM as it is and understands `touch` and `sort` instead of `go`.

pub mod histogram;
#[cfg(feature = "kvm")]
pub mod kvm;
mod pattern;
mod run;
pub mod sort;
pub mod touch;
pub mod workload;

use std::io::{BufRead, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, ValueEnum};
use pagoda_abi::attach::Packet;
use pagoda_abi::{PAGE_SIZE, Token};
use pagoda_sys::process::Affinity;
use pagoda_sys::socket::Connection;
use pagoda_sys::toy::process;
use pagoda_sys::toy::ram::{HugePages, PAGE_BYTES, Ram, RamSource};
use serde::{Deserialize, Serialize};

use self::histogram::LatencyHistogram;
use self::touch::{TouchArgs, touch};
pub use run::STEADY_SLICES;
pub use workload::Workload;

/// Name of the environment variable that holds the path of the RAM file.
const RAM_FILE_VARIABLE: &str = "PAGODA_RAM";
/// How long `flood` goes on: a daemon that takes no more will not take more later.
const FLOOD_MAX: Duration = Duration::from_secs(3);
const PAGES_PER_MIB: usize = (1 << 20) / PAGE_BYTES;
/// Above this the version array alone would be a gigabyte: a mistyped size.
const RAM_MIB_MAX: usize = 1 << 20;

/// Command line of `toy-vmm native`.
#[derive(Debug, Clone, Args)]
pub struct ToyArgs {
    /// MiB of RAM; with a RAM file, its size unless given
    #[arg(long)]
    mib: Option<usize>,
    /// Where the RAM comes from when PAGODA_RAM is not set
    #[arg(long, value_enum, default_value_t = RamKind::Anon)]
    ram: RamKind,
    /// Refuse huge pages for the RAM
    #[arg(long)]
    no_huge: bool,
    /// Seed of the pattern and of every random choice
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads, each over its own part of the RAM
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Stay on one CPU, the last that it may use, as a pinned vCPU does
    #[arg(long)]
    pin: bool,
    /// Have a name in /proc that is no text, and reads like a zombie's
    #[arg(long)]
    odd_name: bool,
    /// Wait for commands on the input
    #[arg(long)]
    step: bool,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// Options of one run; a later `go` inherits what it does not name.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// In which order pages are accessed
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// Read and verify, or also write anew
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Run for so many seconds
    #[arg(long, conflicts_with_all = ["passes", "ops"])]
    seconds: Option<f64>,
    /// Run for so many passes over the RAM (or as many accesses as that has pages)
    #[arg(long, conflicts_with = "ops")]
    passes: Option<u32>,
    /// Run for so many accesses
    #[arg(long)]
    ops: Option<u64>,
    /// Report accesses for each slice of so many milliseconds
    #[arg(long, value_name = "MS")]
    report_every: Option<u64>,
    /// End as soon as the last slices average so many accesses a second
    #[arg(long, value_name = "OPS", requires = "report_every")]
    stop_at: Option<f64>,
    /// Make no more than so many accesses a second, all threads together
    #[arg(long, value_name = "OPS")]
    pace: Option<f64>,
    /// Do not time single accesses (the clock costs as much as a hit)
    #[arg(long)]
    no_latency: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RamKind {
    Anon,
    Shmem,
}

/// What an access does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Verify the page that is accessed.
    Read,
    /// Verify, then write a new version.
    ReadWrite,
}

/// When a run ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// After so many seconds.
    Seconds(f64),
    /// After so many accesses, all threads together.
    Ops(u64),
}

/// One run, with nothing left to default.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    workload: Workload,
    mode: Mode,
    limit: Limit,
    slice_ms: Option<u64>,
    stop_at_ops_per_s: Option<f64>,
    pace_ops_per_s: Option<f64>,
    time_each: bool,
}

/// What the toy says when it has written every page once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    /// Size of the RAM.
    pub mib: usize,
    /// Time of the first write of every page.
    pub fill_s: f64,
    /// CPU time of the fill.
    pub cpu_s: f64,
}

/// What the toy says after a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Done {
    /// The workload of the run, by [`Workload::name`].
    pub workload: String,
    /// The name of the run's mode.
    pub mode: String,
    /// Size of the RAM.
    pub mib: usize,
    /// Number of threads that made accesses.
    pub threads: usize,
    /// Wall time of the run, in seconds.
    pub seconds: f64,
    /// Number of accesses of all threads together.
    pub ops: u64,
    /// Accesses that found a wrong page.
    pub bad_pages: u64,
    /// Accesses of all threads per second of wall time.
    pub ops_per_s: f64,
    /// Accesses as MiB of pages per second.
    pub mib_per_s: f64,
    /// User and system time of the whole process during the run.
    pub cpu_s: f64,
    /// Latency of single accesses; absent with `--no-latency`.
    pub latency: Option<Latency>,
    /// Length of a slice.
    pub slice_ms: Option<u64>,
    /// Accesses in each slice.
    pub slices: Vec<u64>,
    /// The longest access of each thread; empty with `--no-latency`.
    pub stalls: Vec<Stall>,
}

/// A thread's longest access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Stall {
    /// How long it took.
    pub us: f64,
    /// When it was over, by [`monotonic_ns`].
    pub ended_ns: u64,
}

/// CLOCK_MONOTONIC: the same in all processes of a machine.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Percentiles of single accesses, in microseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Latency {
    /// The median of all accesses.
    pub p50_us: f64,
    /// 75 %: where half of the accesses miss, the median miss.
    pub p75_us: f64,
    /// 99 % of the accesses are no slower.
    pub p99_us: f64,
    /// 99.9 % of the accesses are no slower.
    pub p999_us: f64,
    /// 99.99 % of the accesses are no slower.
    pub p9999_us: f64,
    /// The slowest access of all.
    pub max_us: f64,
}

impl Latency {
    fn of(histogram: &LatencyHistogram) -> Self {
        Self {
            p50_us: histogram.percentile_us(0.5),
            p75_us: histogram.percentile_us(0.75),
            p99_us: histogram.percentile_us(0.99),
            p999_us: histogram.percentile_us(0.999),
            p9999_us: histogram.percentile_us(0.9999),
            max_us: histogram.max_us(),
        }
    }
}

/// Words of a `touch` line.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct TouchLine {
    #[command(flatten)]
    touch: TouchArgs,
}

/// Words of a `go` line, read with the same parser as the command line.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct GoLine {
    #[command(flatten)]
    run: RunArgs,
}

impl RunArgs {
    fn or(self, base: &RunArgs) -> RunArgs {
        let own_limit = self.seconds.is_some() || self.passes.is_some() || self.ops.is_some();
        let limits = if own_limit { &self } else { base };
        RunArgs {
            seconds: limits.seconds,
            passes: limits.passes,
            ops: limits.ops,
            workload: self.workload.or(base.workload),
            mode: self.mode.or(base.mode),
            report_every: self.report_every.or(base.report_every),
            stop_at: self.stop_at.or(base.stop_at),
            pace: self.pace.or(base.pace),
            no_latency: self.no_latency || base.no_latency,
        }
    }

    fn plan(&self, pages: usize) -> Result<Plan> {
        let limit = match (self.seconds, self.passes, self.ops) {
            (Some(seconds), _, _) if seconds.is_finite() && seconds > 0.0 => Limit::Seconds(seconds),
            (Some(seconds), _, _) => bail!("--seconds {seconds}: give a number above zero"),
            (None, None, Some(ops)) => Limit::Ops(ops),
            (None, passes, _) => Limit::Ops(u64::from(passes.unwrap_or(1)) * pages as u64),
        };
        if self.report_every == Some(0) {
            bail!("--report-every 0: give milliseconds above zero");
        }
        if let Some(pace) = self.pace.filter(|pace| !(pace.is_finite() && *pace > 0.0)) {
            bail!("--pace {pace}: give a number above zero");
        }
        Ok(Plan {
            workload: self.workload.unwrap_or(Workload::Seq),
            mode: self.mode.unwrap_or(Mode::ReadWrite),
            limit,
            slice_ms: self.report_every,
            stop_at_ops_per_s: self.stop_at,
            pace_ops_per_s: self.pace,
            time_each: !self.no_latency,
        })
    }
}

/// Runs the toy VMM; `Ok(true)` when every page was right.
///
/// # Errors
/// Bad options, no memory, a closed output.
pub fn main(args: &ToyArgs) -> Result<bool> {
    if args.pin {
        let mine = Affinity::of_this_thread().context("look which CPUs there are")?;
        let last = mine.last().and_then(|cpu| mine.only(cpu)).context("find a CPU to stay on")?;
        last.apply().context("stay on a CPU")?;
    }
    if args.odd_name {
        std::fs::write("/proc/self/comm", b"\xff\xfe) Z 1 (").context("take a name")?;
    }
    let fills = if args.step {
        say("TOY start")?;
        is_fill(&next_command()?)?
    } else {
        true
    };
    let mut ram = map_ram(args)?;
    if args.threads == 0 || args.threads > ram.pages() {
        bail!("--threads {}: give 1 to {}", args.threads, ram.pages());
    }
    let first_plan = args.run.plan(ram.pages())?;
    let mut state = run::State::new(ram.pages(), args.seed)?;

    let (start, cpu) = (Instant::now(), process::cpu_time());
    if fills {
        state.fill(&mut ram, args.threads);
    }
    let ready = Ready {
        mib: ram.pages() / PAGES_PER_MIB,
        fill_s: start.elapsed().as_secs_f64(),
        cpu_s: (process::cpu_time() - cpu).as_secs_f64(),
    };
    if !args.step {
        let done = state.run(&mut ram, args.threads, first_plan);
        report(args.json, &ready, &done, &state)?;
        return Ok(done.bad_pages == 0);
    }
    say(&format!("TOY ready {}", serde_json::to_string(&ready)?))?;
    if fills { step(args, ram, state) } else { step_touches(args, ram) }
}

fn step(args: &ToyArgs, mut ram: Ram, mut state: run::State) -> Result<bool> {
    let mut all_right = true;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("read a command")?;
        let mut words = line.split_whitespace();
        match words.next() {
            None => {}
            Some("quit") => break,
            Some("go") => {
                let go = GoLine::try_parse_from(words).context("understand the `go` line")?;
                let plan = go.run.or(&args.run).plan(ram.pages())?;
                let done = state.run(&mut ram, args.threads, plan);
                all_right &= done.bad_pages == 0;
                for wrong in state.wrong_pages() {
                    eprintln!("toy: {wrong}");
                }
                say(&format!("TOY done {}", serde_json::to_string(&done)?))?;
            }
            Some(other) => bail!("command {other:?} is not one of go, quit"),
        }
    }
    Ok(all_right)
}

/// As `step`, for RAM that was not filled.
fn step_touches(args: &ToyArgs, mut ram: Ram) -> Result<bool> {
    let mut stored = vec![0; ram.pages()];
    let mut bad_pages = 0;
    loop {
        let line = next_command()?;
        match line.split_once(' ') {
            None if matches!(line.as_str(), "quit" | "") => return Ok(bad_pages == 0),
            None if line == "sort" => {
                let sorted = sort::sort(&mut ram, args.seed).context("sort a RAM without a page")?;
                bad_pages += sorted.bad_words;
                say(&format!("TOY done {}", serde_json::to_string(&sorted)?))?;
            }
            Some(("touch", words)) => {
                let line =
                    TouchLine::try_parse_from(words.split_whitespace()).context("understand the `touch` line")?;
                let touched = touch(&mut ram, args.threads, &mut stored, &line.touch)?;
                bad_pages += touched.bad_pages;
                say(&format!("TOY done {}", serde_json::to_string(&touched)?))?;
            }
            Some(("flood", count)) => {
                let sent = flood(ram.pages(), count.parse().context("the number of `flood`")?)?;
                say(&format!("TOY done {}", serde_json::json!({ "bad_pages": 0, "sent": sent })))?;
            }
            _ => bail!("command {line:?} is not one of touch, sort, flood, quit"),
        }
    }
}

/// Asks the daemon to discard the last page, again and again, and reads no answer, as no VMM should. How often it took it.
fn flood(pages: usize, count: u64) -> Result<u64> {
    let variable =
        |name: &str| std::env::var(name).with_context(|| format!("{name}: run this under `pagoda run --plain`"));
    let token = Token::from_hex(&variable("PAGODA_TOKEN")?).context("PAGODA_TOKEN")?;
    let daemon = Connection::connect(Path::new(&variable("PAGODA_ATTACH")?))?;
    daemon.send(&Packet::Calls { token }, &[])?;
    daemon.recv()?;
    daemon.set_nonblocking(true)?;
    let offset = (pages as u64 - 1) * PAGE_SIZE as u64;
    let began = Instant::now();
    for seq in 0..count {
        let discard = Packet::Discard { seq, region: 0, offset, len: PAGE_SIZE as u64 };
        while daemon.send(&discard, &[]).is_err() {
            if began.elapsed() > FLOOD_MAX {
                return Ok(seq);
            }
            std::thread::yield_now();
        }
    }
    Ok(count)
}

fn map_ram(args: &ToyArgs) -> Result<Ram> {
    let huge = if args.no_huge { HugePages::Refuse } else { HugePages::Advise };
    if let Some(ram) = map_ram_file(args.mib, huge)? {
        return Ok(ram);
    }
    let Some(mib) = args.mib else {
        bail!("give --mib, or run under `pagoda run --plain`, which sets {RAM_FILE_VARIABLE}");
    };
    if mib == 0 || mib > RAM_MIB_MAX {
        bail!("--mib {mib}: give 1 to {RAM_MIB_MAX}");
    }
    let bytes = mib << 20;
    let source = match args.ram {
        RamKind::Anon => RamSource::Anonymous(bytes),
        RamKind::Shmem => RamSource::Shmem(bytes),
    };
    Ram::map(source, huge).with_context(|| format!("map {mib} MiB"))
}

/// The RAM that Pagoda made; `None` when this process does not run under `pagoda run --plain`.
///
/// # Errors
/// It cannot be mapped, or is not of the size asked for.
pub fn map_ram_file(mib: Option<usize>, huge: HugePages) -> Result<Option<Ram>> {
    let Some(path) = std::env::var_os(RAM_FILE_VARIABLE).map(PathBuf::from) else { return Ok(None) };
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("open the RAM file {}", path.display()))?;
    let ram = Ram::map(RamSource::File(file.as_fd()), huge)
        .with_context(|| format!("map the RAM file {}", path.display()))?;
    match mib {
        Some(mib) if mib * PAGES_PER_MIB != ram.pages() => {
            bail!("--mib {mib}, but the RAM file has {} MiB: leave --mib out", ram.pages() / PAGES_PER_MIB)
        }
        _ => Ok(Some(ram)),
    }
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("write to the bench")
}

/// The next line of the input; empty at its end.
fn next_command() -> Result<String> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("read a command")?;
    Ok(line.trim().to_owned())
}

fn is_fill(command: &str) -> Result<bool> {
    match command {
        "fill" => Ok(true),
        "map" => Ok(false),
        other => bail!("expected the command `fill` or `map`, got {other:?}"),
    }
}

fn report(json: bool, ready: &Ready, done: &Done, state: &run::State) -> Result<()> {
    for wrong in state.wrong_pages() {
        eprintln!("toy: {wrong}");
    }
    if json {
        return say(&serde_json::json!({ "ready": ready, "done": done }).to_string());
    }
    say(&format!("filled {} MiB in {:.2} s", ready.mib, ready.fill_s))?;
    say(&format!(
        "{} {}: {} accesses in {:.2} s, {:.0} a second ({:.0} MiB/s), CPU {:.2} s, {} wrong",
        done.workload, done.mode, done.ops, done.seconds, done.ops_per_s, done.mib_per_s, done.cpu_s, done.bad_pages
    ))?;
    if let Some(latency) = &done.latency {
        say(&format!(
            "latency us: p50 {:.1}  p99 {:.1}  p99.9 {:.1}  p99.99 {:.1}  max {:.1}",
            latency.p50_us, latency.p99_us, latency.p999_us, latency.p9999_us, latency.max_us
        ))?;
    }
    if let Some(slice_ms) = done.slice_ms {
        for (index, ops) in done.slices.iter().enumerate() {
            say(&format!("{:>8} ms {ops:>10} accesses", index as u64 * slice_ms))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> RunArgs {
        GoLine::try_parse_from(line.split_whitespace()).unwrap().run
    }

    #[test]
    fn a_go_line_overrides_what_it_names() {
        let base = args("--workload zipf --mode read --seconds 5 --report-every 10");
        let merged = args("--passes 2").or(&base);
        let plan = merged.plan(100).unwrap();
        assert_eq!(plan.limit, Limit::Ops(200));
        assert_eq!(plan.workload, Workload::Zipf);
        assert_eq!(plan.mode, Mode::Read);
        assert_eq!(plan.slice_ms, Some(10));
        assert_eq!(args("").or(&base).plan(100).unwrap().limit, Limit::Seconds(5.0));
    }

    #[test]
    fn nonsense_is_refused() {
        for line in ["--seconds 0", "--seconds -1", "--seconds inf", "--report-every 0", "--pace 0", "--pace nan"] {
            let parsed = GoLine::try_parse_from(line.split_whitespace());
            assert!(parsed.is_err() || parsed.unwrap().run.plan(10).is_err(), "{line}");
        }
    }
}
