//! What fio finds of a disk: how long reads of a page take, one at a time, and how much it moves in sequence.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use testkit::results::report::median;

use super::DISK;
use crate::Setup;

/// Requests under way in the sequential cases, and their size.
const SEQUENTIAL: [&str; 2] = ["--iodepth=8", "--bs=256k"];
const ONE_PAGE: [&str; 2] = ["--iodepth=1", "--bs=4k"];
/// Points of a distribution, in percent.
const PERCENTILES: &str = "0.1:1:5:10:20:30:40:50:60:70:80:90:99:99.9";
const MEDIAN: &str = "50.000000";

/// Where fio reads and writes.
#[derive(Debug)]
pub enum Engine<'a> {
    /// An export, by its URI.
    Nbd(&'a str),
    /// A file or device, past the page cache.
    File(&'a Path),
}

/// What was found, one value a round.
#[derive(Debug, Default)]
pub struct Runs {
    pub round_trip_us: Vec<f64>,
    pub write_mbit: Vec<f64>,
    pub read_mbit: Vec<f64>,
    pub random: Distribution,
    pub sequential: Distribution,
}

/// For each percentage of reads, the time that they take at most, by round.
#[derive(Debug, Default)]
pub struct Distribution {
    at: Vec<(f64, Vec<f64>)>,
}

impl Distribution {
    fn add(&mut self, percentiles: &Value) -> Result<()> {
        for (percent, ns) in percentiles.as_object().context("fio says no percentiles")? {
            let (percent, us) = (percent.parse::<f64>()?, ns.as_f64().context("a time")? / 1e3);
            match self.at.iter_mut().find(|(at, _)| *at == percent) {
                Some((_, times)) => times.push(us),
                None => self.at.push((percent, vec![us])),
            }
        }
        self.at.sort_by(|(left, _), (right, _)| left.total_cmp(right));
        Ok(())
    }

    /// The median of the rounds, as us and percent.
    pub fn points(&self) -> Vec<[f64; 2]> {
        self.at.iter().filter_map(|(percent, times)| Some([median(times)?, *percent])).collect()
    }
}

impl Runs {
    /// Writes all of the disk first, so that what is read is there. `fio` runs it with these words and gives what it says.
    pub fn measure(
        &mut self,
        setup: &Setup,
        fio: &mut dyn FnMut(&str) -> Result<String>,
        engine: &Engine<'_>,
    ) -> Result<()> {
        let target = match engine {
            Engine::Nbd(uri) => format!("--ioengine=nbd --uri={uri}"),
            Engine::File(path) => format!("--ioengine=libaio --direct=1 --filename={}", path.display()),
        };
        let mut job = |pattern: &str, shape: &[&str; 2], more: &str| -> Result<Value> {
            let words = format!(
                "--name=bench --output-format=json --size={DISK} {target} --rw={pattern} {} {more} \
                 --lat_percentiles=1 --clat_percentiles=0 --percentile_list={PERCENTILES}",
                shape.join(" ")
            );
            let said = fio(&words)?;
            let report: Value = serde_json::from_str(&said[said.find('{').context("fio says nothing")?..])
                .with_context(|| format!("read fio's report: {said}"))?;
            Ok(report["jobs"][0][if pattern == "write" { "write" } else { "read" }].clone())
        };
        let timed = format!("--time_based --runtime={}", setup.seconds(4.0));
        job("write", &SEQUENTIAL, "")?;
        self.write_mbit.push(mbit(&job("write", &SEQUENTIAL, &timed)?)?);
        self.read_mbit.push(mbit(&job("read", &SEQUENTIAL, &timed)?)?);
        let random = job("randread", &ONE_PAGE, &timed)?;
        let middle = random["lat_ns"]["percentile"][MEDIAN].as_f64().context("fio says no median")?;
        self.round_trip_us.push(middle / 1e3);
        self.random.add(&random["lat_ns"]["percentile"])?;
        self.sequential.add(&job("read", &ONE_PAGE, &timed)?["lat_ns"]["percentile"])
    }
}

fn mbit(side: &Value) -> Result<f64> {
    Ok(side["bw_bytes"].as_f64().context("fio says no bandwidth")? * 8.0 / 1e6)
}

/// Runs fio on this host, and returns what it wrote.
///
/// # Errors
/// It is missing or fails.
pub fn on_host(words: &str) -> Result<String> {
    let output = Command::new("fio").args(words.split_ascii_whitespace()).output();
    let output = output.context("run fio (scripts/install-deps.sh test installs it)")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("fio: {said}{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(said)
}
