//! Does the jobs of a [`Plan`], one after the other in the order in which they arrive: each computes, and writes a file meanwhile.
//!
//! Computing is waiting for time, so that many such guests fit on a machine with few CPUs. A write that lasts at most
//! [`WRITE_FREE`] is part of the computing time; what it lasts longer, the job waits for room and does not compute.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_guest::jobs::{Load, Plan, Planned, file_number};
use pagoda_guest::stream::Stream;

use crate::report::Report;

/// Bytes of one write.
const WRITE_BYTES: usize = 64 << 10;
/// A write of 64 KiB into an outbox takes less than 1 ms under TCG, if the host has CPUs for it.
const WRITE_FREE: Duration = Duration::from_millis(5);

/// What the command `jobs` was asked to do.
#[derive(Debug)]
pub struct Work {
    directory: PathBuf,
    name: String,
    seed: u64,
    length: Duration,
    load: Load,
}

impl Work {
    /// Of the command's words: `jobs DIRECTORY NAME SEED MILLISECONDS ARRIVALS_PER_1000_S COMPUTE_US OUTPUT_BYTES STAGES`.
    pub fn parse(directory: &str, name: &str, numbers: &[&str]) -> Result<Work> {
        let number = |text: &&str| text.parse::<u64>().with_context(|| format!("{text:?} is not a number"));
        let numbers = numbers.iter().map(number).collect::<Result<Vec<u64>>>()?;
        let [seed, length_ms, arrivals_per_ks, compute_us, output_bytes, stages] = numbers[..] else {
            bail!("give a seed, milliseconds, arrivals in 1000 s, microseconds of computing, bytes and stages");
        };
        let stages = u32::try_from(stages).context("stages")?;
        Ok(Work {
            directory: directory.into(),
            name: name.to_owned(),
            seed,
            length: Duration::from_millis(length_ms),
            load: Load { arrivals_per_ks, compute_us, output_bytes, stages },
        })
    }

    /// Does all jobs whose turn comes in time, and says of each when it arrived, began and ended. The last one is done to its end.
    pub fn run(&self, report: &Report) -> Result<()> {
        let mut stream = Stream::new();
        let start = Instant::now();
        report.line(format_args!("started"));
        let mut done = 0;
        for (nth, job) in (0_u64..).zip(Plan::new(self.load, self.seed)) {
            let arrives = Duration::from_micros(job.arrives_us);
            if arrives.max(start.elapsed()) >= self.length {
                break;
            }
            sleep(arrives.saturating_sub(start.elapsed()));
            let began = start.elapsed();
            stream.begin(file_number(self.seed, nth), 0);
            let path = self.directory.join(format!("{}.{nth}", self.name));
            one(&path, job, &mut stream).with_context(|| format!("write {}", path.display()))?;
            let (began, ended) = (began.as_micros(), start.elapsed().as_micros());
            let Planned { arrives_us, output_bytes, .. } = job;
            report.line(format_args!(
                "job n={nth} arrived={arrives_us} began={began} ended={ended} bytes={output_bytes}"
            ));
            done += 1;
        }
        let us = start.elapsed().as_micros();
        report.line(format_args!("done phase=jobs ops={done} bad=0 us={us}"));
        Ok(())
    }
}

fn one(path: &Path, job: Planned, stream: &mut Stream) -> Result<()> {
    let mut file = File::create(path)?;
    let compute = Duration::from_micros(job.compute_us);
    let (start, mut waited, mut written) = (Instant::now(), Duration::ZERO, 0);
    while written < job.output_bytes {
        let block = stream.next_block();
        let left = usize::try_from(job.output_bytes - written).unwrap_or(usize::MAX);
        for part in block[..left.min(block.len())].chunks(WRITE_BYTES) {
            written += part.len() as u64;
            // What a job writes is there when it has computed it.
            let due = compute.mul_f64(written as f64 / job.output_bytes as f64) + waited;
            sleep(due.saturating_sub(start.elapsed()));
            let before = Instant::now();
            file.write_all(part)?;
            waited += before.elapsed().saturating_sub(WRITE_FREE);
        }
    }
    Ok(())
}
