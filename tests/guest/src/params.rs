//! The kernel command line: `pagoda.KEY=VALUE`, and steps of work `NAME[:KEY=VALUE...]`. README.md lists the keys.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagoda_guest::DISK_SEED_DEFAULT;

use crate::boot;
use crate::phases::Phase;

const KEY_PREFIX: &str = "pagoda.";

/// Disk buffers (1 MiB each) in rotation when the command line does not say: enough that some lie idle for
/// seconds while others are in use.
const DISK_BUFFERS_DEFAULT: usize = 64;

/// More threads than any test machine has use for; each costs a stack.
const THREADS_MAX: usize = 256;

#[derive(Debug, Clone)]
pub struct Params {
    pub work: Vec<Step>,
    /// Memory that the phases use; without it a share of what is available.
    pub mib: Option<usize>,
    pub seed: u64,
    /// Pages have content of the image's own files, up to so many MiB of them; 0: none have.
    pub corpus_mib: usize,
    pub run: RunParams,
    pub disk: DiskParams,
    pub idle: Duration,
    pub reboots: u64,
    pub memtester: Vec<String>,
    pub stress: Vec<String>,
}

/// How a phase runs; a step may override each.
#[derive(Debug, Clone, Copy)]
pub struct RunParams {
    pub limit: Limit,
    pub write_percent: u32,
    pub threads: usize,
}

#[derive(Debug, Clone, Copy)]
pub enum Limit {
    /// As many operations as there are pages, so many times.
    Passes(u64),
    Time(Duration),
}

#[derive(Debug, Clone, Copy)]
pub struct DiskParams {
    pub seed: u64,
    pub buffers: usize,
    pub threads: usize,
    /// The longest time a filled buffer is left alone before it is verified again and reused.
    pub rest_max: Duration,
}

#[derive(Debug, Clone, Copy)]
pub enum Step {
    Phase(Phase, RunParams),
    /// Disk reads, with a phase running beside them if one is given.
    Disk(Option<Phase>, RunParams),
    /// Files read and rewritten through the page cache.
    Files(RunParams),
    /// Blocks of the disk written and compared with what memory remembers.
    Blocks(RunParams),
    Free,
    Sort,
    Idle,
    Memtester,
    Stress,
    Control,
}

impl Params {
    pub fn parse(command_line: &str) -> Result<Self> {
        let mut params = Self {
            work: Vec::new(),
            mib: None,
            seed: 1,
            corpus_mib: 0,
            run: RunParams { limit: Limit::Passes(1), write_percent: 50, threads: boot::cpus() },
            disk: DiskParams {
                seed: DISK_SEED_DEFAULT,
                buffers: DISK_BUFFERS_DEFAULT,
                threads: 2,
                rest_max: Duration::from_secs(4),
            },
            idle: Duration::from_secs(5),
            reboots: 0,
            memtester: Vec::new(),
            stress: Vec::new(),
        };
        let mut work = "seq,random,hot";
        for word in command_line.split_ascii_whitespace() {
            let Some(setting) = word.strip_prefix(KEY_PREFIX) else { continue };
            let (key, value) = setting.split_once('=').with_context(|| format!("{word}: no value"))?;
            if key == "work" {
                work = value;
            } else {
                params.set(key, value).with_context(|| format!("on the kernel command line, {word}"))?;
            }
        }
        // Last, because a step starts from the settings for all.
        params.work = work
            .split(',')
            .map(|step| {
                Step::parse(step.split(':'), params.run).with_context(|| format!("in {KEY_PREFIX}work, {step}"))
            })
            .collect::<Result<_>>()?;
        Ok(params)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "mib" => self.mib = Some(number(value)?),
            "seed" => self.seed = number(value)?,
            "corpus" => self.corpus_mib = number(value)?,
            "idle" => self.idle = Duration::from_secs(number(value)?),
            "reboot" => self.reboots = number(value)?,
            "memtester" => self.memtester = arguments(value),
            "stress" => self.stress = arguments(value),
            "disk_seed" => self.disk.seed = number(value)?,
            "disk_mib" => self.disk.buffers = number(value)?,
            "disk_threads" => self.disk.threads = number(value)?,
            "disk_rest_ms" => self.disk.rest_max = Duration::from_millis(number(value)?),
            _ => return self.run.set(key, value),
        }
        ensure!((1..=THREADS_MAX).contains(&self.disk.threads), "1 to {THREADS_MAX} disk threads");
        ensure!(self.disk.buffers >= self.disk.threads, "each disk thread needs a buffer of 1 MiB");
        Ok(())
    }
}

impl RunParams {
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "passes" => self.limit = Limit::Passes(number(value)?),
            "seconds" => self.limit = Limit::Time(Duration::from_secs(number(value)?)),
            "write" => self.write_percent = number(value)?,
            "threads" => self.threads = number(value)?,
            _ => bail!("unknown key {key:?}; tests/guest/README.md lists the keys"),
        }
        ensure!(self.write_percent <= 100, "write is a percentage, 0 to 100");
        ensure!((1..=THREADS_MAX).contains(&self.threads), "1 to {THREADS_MAX} threads");
        Ok(())
    }
}

impl Step {
    /// A name, and settings for this step only.
    pub fn parse<'a>(mut words: impl Iterator<Item = &'a str>, defaults: RunParams) -> Result<Self> {
        let name = words.next().unwrap_or_default();
        let mut run = defaults;
        for word in words {
            let (key, value) = word.split_once('=').with_context(|| format!("{word:?} is not KEY=VALUE"))?;
            run.set(key, value)?;
        }
        Ok(match name {
            "disk" => Self::Disk(None, run),
            "files" => Self::Files(run),
            "blocks" => Self::Blocks(run),
            "free" => Self::Free,
            "sort" => Self::Sort,
            "idle" => Self::Idle,
            "memtester" => Self::Memtester,
            "stress" => Self::Stress,
            "control" => Self::Control,
            _ => match name.strip_prefix("disk+") {
                Some(phase) => Self::Disk(Some(phase.parse()?), run),
                None => Self::Phase(name.parse()?, run),
            },
        })
    }
}

fn number<T: FromStr>(value: &str) -> Result<T> {
    value.parse().ok().with_context(|| format!("{value:?} is not a number in range"))
}

/// A tool's arguments: commas for the blanks that a kernel command line cannot hold.
fn arguments(value: &str) -> Vec<String> {
    value.split(',').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_apply_to_all_steps_and_steps_override_them() {
        let params = Params::parse(
            "console=ttyS0 pagoda.work=seq:passes=3,disk+hot pagoda.write=20 pagoda.seconds=9 pagoda.stress=--vm,2",
        )
        .expect("valid");
        let [Step::Phase(Phase::Seq, seq), Step::Disk(Some(Phase::Hot), disk)] = params.work[..] else {
            panic!("{:?}", params.work)
        };
        assert!(matches!(seq.limit, Limit::Passes(3)) && seq.write_percent == 20);
        assert!(matches!(disk.limit, Limit::Time(time) if time.as_secs() == 9));
        assert_eq!(params.stress, ["--vm", "2"]);
    }

    #[test]
    fn bad_settings_say_what_is_wrong() {
        for (line, reason) in [
            ("pagoda.mib=many", "not a number"),
            ("pagoda.write=101", "percentage"),
            ("pagoda.threads=0", "threads"),
            ("pagoda.disk_mib=1", "needs a buffer"),
            ("pagoda.colour=1", "unknown key"),
            ("pagoda.mib", "no value"),
            ("pagoda.work=seq,nap", "unknown work"),
            ("pagoda.work=seq:mib=1", "unknown key"),
        ] {
            let error = Params::parse(line).expect_err(line);
            assert!(format!("{error:#}").contains(reason), "{line}: {error:#}");
        }
    }
}
