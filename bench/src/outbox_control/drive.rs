//! Guests through their steps, with their clients, all at the same time, and what is seen of their outboxes meanwhile.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_guest::jobs::{Plan, file_number};
use pagoda_guest::lines::Line;

use super::client::{Client, Manner, Taken, Wanted};
use super::course::Step;
use super::lab::{Lab, OUT, PERIOD, Tenant};
use super::link::Link;
use crate::balloon::guest::Guest;

/// A job, in seconds after its step began, by the guest's clock.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub arrived_s: f64,
    pub began_s: f64,
    pub ended_s: f64,
    pub bytes: u64,
}

impl Job {
    /// What the SLO is about.
    pub fn took_s(&self) -> f64 {
        self.ended_s - self.began_s
    }
}

/// What has become of a step.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    pub begun: Option<Instant>,
    pub jobs: Vec<Job>,
    pub is_over: bool,
}

/// What the daemon said at a time.
#[derive(Debug, Clone)]
pub struct Sample {
    pub at: Instant,
    pub space: u64,
    /// The verdict of `explain`, and the mean that it predicts for the present size.
    pub verdict: Option<String>,
    pub predicted_s: Option<f64>,
}

/// All of one guest.
#[derive(Debug, Clone, Default)]
pub struct Track {
    pub steps: Vec<Progress>,
    pub samples: Vec<Sample>,
    pub taken: Taken,
}

/// How a course is driven.
#[derive(Debug, Clone, Copy)]
pub struct Plans<'a> {
    /// The steps of each tenant, in the tenants' order.
    pub steps: &'a [Vec<Step>],
    /// Names of files begin with it: those of an earlier course may still be there.
    pub label: &'a str,
    pub seed: u64,
    pub manner: Manner,
}

/// What is known of a guest while it runs.
#[derive(Debug)]
pub struct Live(Mutex<Vec<Progress>>);

impl Live {
    fn lock(&self) -> MutexGuard<'_, Vec<Progress>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this file will never be written.
    fn is_over(&self, step: usize, job: usize) -> bool {
        let progress = &self.lock()[step];
        progress.is_over && job >= progress.jobs.len()
    }

    /// Jobs that ended between two moments.
    pub fn ended_between(&self, from: Instant, to: Instant) -> Vec<Job> {
        let mut ended = Vec::new();
        for progress in self.lock().iter() {
            let Some(begun) = progress.begun else { continue };
            let moment = |job: &Job| begun + Duration::from_secs_f64(job.ended_s);
            ended.extend(progress.jobs.iter().filter(|job| from < moment(job) && moment(job) <= to));
        }
        ended
    }

    /// Jobs that have ended.
    pub fn jobs(&self) -> usize {
        self.lock().iter().map(|progress| progress.jobs.len()).sum()
    }

    fn end_all(&self) {
        self.lock().iter_mut().for_each(|progress| progress.is_over = true);
    }
}

/// Runs all guests through their steps. `meanwhile` is called once a period, with what each guest has done so far.
///
/// # Errors
/// A guest or its client fails; wrong bytes were delivered.
pub fn run(
    lab: &Lab,
    tenants: &mut [Tenant],
    plans: &Plans<'_>,
    mut meanwhile: impl FnMut(&[Live]) -> Result<()>,
) -> Result<Vec<Track>> {
    ensure!(tenants.len() == plans.steps.len(), "each guest has its steps");
    let lives: Vec<Live> =
        plans.steps.iter().map(|steps| Live(Mutex::new(vec![Progress::default(); steps.len()]))).collect();
    let names: Vec<String> = tenants.iter().map(|tenant| tenant.name.clone()).collect();
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); tenants.len()];
    let taken = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((tenant, live), steps) in tenants.iter_mut().zip(&lives).zip(plans.steps) {
            let Tenant { name, guest, link } = tenant;
            let (name, link): (&str, &Link) = (name, link);
            let client = scope.spawn(move || link.at_client(|| follow(name, steps, plans, live)));
            let driver = scope.spawn(move || {
                let led = steps.iter().enumerate().try_for_each(|(nth, step)| {
                    link.set_rate(step.rate)?;
                    lead(guest, nth, step, plans, live).with_context(|| format!("{name}: {}", step.name))
                });
                live.end_all();
                led
            });
            threads.push((driver, client));
        }
        let looked = look(
            lab,
            &names,
            &mut samples,
            || threads.iter().all(|(driver, _)| driver.is_finished()),
            || meanwhile(&lives),
        );
        let mut all = Vec::new();
        for (driver, client) in threads {
            let led = driver.join().map_err(|_| anyhow!("a thread has panicked"))?;
            let followed = client.join().map_err(|_| anyhow!("a client has panicked"))?;
            // A guest waits in vain for a client that has failed.
            all.push(match (led, followed) {
                (Err(guest), Err(client)) => Err(client.context(format!("{guest:#}"))),
                (Err(guest), Ok(_)) => Err(guest),
                (Ok(()), followed) => followed,
            });
        }
        looked?;
        all.into_iter().collect::<Result<Vec<Taken>>>()
    })?;
    let track = |((live, samples), taken): ((Live, _), _)| {
        let steps = live.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        Track { steps, samples, taken }
    };
    Ok(lives.into_iter().zip(samples).zip(taken).map(track).collect())
}

fn file_name(plans: &Plans<'_>, step: usize) -> String {
    format!("{}-{step}", plans.label)
}

fn seed_of(plans: &Plans<'_>, step: usize) -> u64 {
    plans.seed + step as u64
}

/// Has a guest do the jobs of a step.
fn lead(guest: &mut Guest, nth: usize, step: &Step, plans: &Plans<'_>, live: &Live) -> Result<()> {
    let Step { load, periods, .. } = step;
    let ms = PERIOD.as_millis() * *periods as u128;
    let (name, seed) = (file_name(plans, nth), seed_of(plans, nth));
    let numbers = format!("{} {} {} {}", load.arrivals_per_ks, load.compute_us, load.output_bytes, load.stages);
    guest.begin(&format!("jobs {OUT} {name} {seed} {ms} {numbers}"))?;
    guest.line("started")?;
    live.lock()[nth].begun = Some(Instant::now());
    loop {
        let text = guest.line_of(&["job", "reply"])?;
        let line = Line::parse(&text).context("a line")?;
        if line.kind == "reply" {
            ensure!(line.text().starts_with("ok "), "{text}");
            live.lock()[nth].is_over = true;
            return Ok(());
        }
        let seconds = |key: &str| line.number(key).map(|us| us as f64 / 1e6).with_context(|| text.clone());
        let bytes = line.number("bytes").with_context(|| text.clone())?;
        let job = Job { arrived_s: seconds("arrived")?, began_s: seconds("began")?, ended_s: seconds("ended")?, bytes };
        live.lock()[nth].jobs.push(job);
    }
}

/// Takes all files of all steps.
fn follow(name: &str, steps: &[Step], plans: &Plans<'_>, live: &Live) -> Result<Taken> {
    let mut client = Client::new(plans.manner, plans.seed);
    for (nth, step) in steps.iter().enumerate() {
        let seed = seed_of(plans, nth);
        for (index, job) in Plan::new(step.load, seed).enumerate() {
            let wanted = Wanted {
                path: format!("/{name}/{}.{index}", file_name(plans, nth)),
                number: file_number(seed, index as u64),
                bytes: job.output_bytes,
            };
            let is_there = client.take(&wanted, || live.is_over(nth, index));
            if !is_there.with_context(|| format!("the client of {name}"))? {
                break;
            }
        }
    }
    let jobs = live.jobs();
    ensure!(client.taken.files == jobs as u64, "{} of {jobs} files of {name} came", client.taken.files);
    Ok(client.taken)
}

/// Looks at all outboxes once a period until the guests are done.
fn look(
    lab: &Lab,
    names: &[String],
    samples: &mut [Vec<Sample>],
    is_done: impl Fn() -> bool,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<()> {
    /// How often it looks whether they are done.
    const LOOK: Duration = Duration::from_millis(50);
    let mut due = Instant::now() + PERIOD;
    while !is_done() {
        if Instant::now() < due {
            std::thread::sleep(LOOK);
            continue;
        }
        due += PERIOD;
        for (name, samples) in names.iter().zip(samples.iter_mut()) {
            samples.push(sample(lab, name)?);
        }
        meanwhile()?;
    }
    Ok(())
}

fn sample(lab: &Lab, name: &str) -> Result<Sample> {
    let space = lab.daemon.client().outbox(name).with_context(|| format!("look at the outbox of {name}"))?.space_bytes;
    let said = lab.pagoda(&["outbox", "explain", name])?;
    let terms = said["terms"].as_array().context("the terms of explain")?;
    let text = |term: &str| terms.iter().find(|said| said["term"] == term).and_then(|said| said["text"].as_str());
    Ok(Sample {
        at: Instant::now(),
        space,
        verdict: text("verdict").and_then(|text| text.split(':').next()).map(str::to_owned),
        predicted_s: text("prediction").map(predicted_mean_s).transpose()?.flatten(),
    })
}

/// Of the term `prediction`: `mean 132 ms, ...`.
fn predicted_mean_s(text: &str) -> Result<Option<f64>> {
    let mut words = text.split([' ', ',']);
    if words.next() != Some("mean") {
        return Ok(None);
    }
    let (number, unit) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if number == "without" {
        return Ok(None);
    }
    let number: f64 = number.parse().with_context(|| format!("read the prediction {text:?}"))?;
    match unit {
        "ms" => Ok(Some(number / 1e3)),
        "s" => Ok(Some(number)),
        _ => bail!("read the prediction {text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_are_read() {
        let check = |text: &str, expected: Option<f64>| assert_eq!(predicted_mean_s(text).unwrap(), expected, "{text}");
        check("mean 132 ms, mean 132 ms, mean of nine windows in ten at most 150 ms", Some(0.132));
        check("mean 4.20 s, p90 6.00 s, p90 of nine windows in ten at most 7.00 s", Some(4.2));
        check("mean without end, p90 without end", None);
        check("none yet: too few jobs have ended, or nothing was sent", None);
        assert!(predicted_mean_s("mean fast").is_err());
    }
}
