//! The push of one file: attempts and pauses, until it is delivered, cannot be, or is not wanted any more.

use std::sync::Arc;
use std::time::Instant;

use tokio::select;
use tokio::sync::watch;
use tokio::time::sleep_until;

use crate::dial::{Dial, Direct, Trust};
use crate::failure::{Cause, Failure, Trouble};
use crate::http::Http;
use crate::limit::Limiter;
use crate::name::ObjectName;
use crate::pump::Way;
use crate::put::Put;
use crate::retry::{Backoff, Pauses};
use crate::s3::{Api, S3};
use crate::secret::{Header, S3Keys};
use crate::source::Source;
use crate::status::{Phase, Progress};
use crate::target::Target;
use crate::tcp::Tcp;

/// How often it is tried to remove an upload that will not be completed. Then it stays, and the outcome names it.
const ABORTS_MAX: u32 = 5;
/// A part has at most so many bytes unless the caller says otherwise.
const PART_BYTES_MAX: u64 = 64 << 20;

/// What all pushes to one target have in common.
#[derive(Debug, Clone)]
pub struct Settings {
    pub target: Target,
    /// Of each PUT, for targets of that kind.
    pub headers: Vec<Header>,
    /// Targets of S3 need them.
    pub keys: Option<S3Keys>,
    /// Targets that begin with `https://` need it.
    pub trust: Option<Trust>,
    pub dialer: Arc<dyn Dial>,
    pub pauses: Pauses,
    /// Rates that each push is subject to, in this order: its own before those that it shares.
    pub limiters: Vec<Limiter>,
    /// The most bytes of a part of an S3 upload, at least 5 MiB. As many of a growing file have to be in memory before they are sent.
    pub part_bytes_max: u64,
}

impl Settings {
    /// Connects by itself, at any rate.
    pub fn new(target: Target) -> Settings {
        Settings {
            target,
            headers: Vec::new(),
            keys: None,
            trust: None,
            dialer: Arc::new(Direct),
            pauses: Pauses::default(),
            limiters: Vec::new(),
            part_bytes_max: PART_BYTES_MAX,
        }
    }
}

/// Why a push is not wanted any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    Removed,
    /// Its age was reached.
    Expired,
    /// This process ends. What was begun at the server stays, for the next one.
    Ending,
}

impl From<Stop> for Cause {
    fn from(stop: Stop) -> Cause {
        match stop {
            Stop::Removed => Cause::Removed,
            Stop::Expired => Cause::Expired,
            Stop::Ending => Cause::Ending,
        }
    }
}

/// How a push ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The server has the whole file.
    Delivered { bytes: u64 },
    /// It does not, and nothing more is tried.
    GivenUp {
        cause: Cause,
        /// What is left at the server and could not be removed from there.
        left: Option<String>,
    },
}

enum Kind {
    Put(Put),
    S3(Box<S3>),
    Tcp(Tcp),
}

impl Kind {
    fn new(settings: &Settings, name: &ObjectName) -> Result<Kind, Cause> {
        let http = || Http::new(Arc::clone(&settings.dialer), settings.trust.clone());
        match &settings.target {
            Target::Put(put) => {
                let url = put.url(name).map_err(Cause::Address)?;
                let headers = settings.headers.iter().map(|header| (header.name.clone(), header.value.clone()));
                Ok(Kind::Put(Put::new(http(), url, headers.collect())))
            }
            Target::S3(s3) => {
                let key = name.key(&s3.prefix).map_err(Cause::Name)?;
                let keys = settings.keys.as_ref().ok_or(Cause::NoKeys)?;
                let api = Api::new(http(), s3.bucket.clone(), keys, key);
                Ok(Kind::S3(Box::new(S3::new(api, settings.part_bytes_max))))
            }
            Target::Tcp(tcp) => Ok(Kind::Tcp(Tcp::new(Arc::clone(&settings.dialer), tcp.address.clone()))),
        }
    }

    async fn attempt<S: Source>(&mut self, source: &mut S, way: Way<'_>) -> Result<u64, Trouble> {
        match self {
            Kind::Put(put) => put.attempt(source, way).await,
            Kind::S3(s3) => s3.attempt(source, way).await,
            Kind::Tcp(tcp) => tcp.attempt(source, way).await,
        }
    }
}

/// Sends the file `name` until the server has it. Stops when `stop` says so. `progress` says meanwhile what it is at.
pub async fn push<S: Source>(
    settings: &Settings,
    name: &ObjectName,
    source: &mut S,
    mut stop: watch::Receiver<Option<Stop>>,
    progress: &Progress,
) -> Outcome {
    let mut kind = match Kind::new(settings, name) {
        Ok(kind) => kind,
        Err(cause) => return Outcome::GivenUp { cause, left: None },
    };
    let outcome = match attempts(settings, &mut kind, source, &mut stop, progress).await {
        Ok(bytes) => Outcome::Delivered { bytes },
        Err(cause) => {
            let left = clean_up(settings, &mut kind, source, &cause, progress).await;
            Outcome::GivenUp { cause, left }
        }
    };
    progress.send_modify(|status| status.phase = Phase::Ended);
    outcome
}

async fn attempts<S: Source>(
    settings: &Settings,
    kind: &mut Kind,
    source: &mut S,
    stop: &mut watch::Receiver<Option<Stop>>,
    progress: &Progress,
) -> Result<u64, Cause> {
    let way = Way { limiters: &settings.limiters, progress };
    let mut backoff = Backoff::default();
    loop {
        progress.send_modify(|status| {
            status.phase = Phase::Sending;
            status.attempts += 1;
        });
        let before = progress.borrow().acknowledged;
        let failure = select! {
            biased;
            stop = stopped(stop) => return Err(stop.into()),
            done = kind.attempt(source, way) => match done {
                Ok(bytes) => return Ok(bytes),
                Err(Trouble::Never(cause)) => return Err(cause),
                Err(Trouble::Again(failure)) => failure,
            },
        };
        if progress.borrow().acknowledged > before {
            backoff.reset();
        }
        let until = next_attempt(&mut backoff, settings.pauses, &failure);
        progress.send_modify(|status| {
            status.phase = Phase::Pausing { until };
            status.last_failure = Some(failure);
        });
        select! {
            biased;
            stop = stopped(stop) => return Err(stop.into()),
            () = sleep_until(until.into()) => {}
        }
    }
}

fn next_attempt(backoff: &mut Backoff, pauses: Pauses, failure: &Failure) -> Instant {
    let mut chance = [0; 4];
    // Without chance there is the longest pause, which is as good.
    let chance = match aws_lc_rs::rand::fill(&mut chance) {
        Ok(()) => u32::from_ne_bytes(chance),
        Err(_) => u32::MAX,
    };
    let pause = backoff.pause(pauses, chance).max(failure.retry_after().unwrap_or_default());
    Instant::now() + pause
}

/// Until somebody says stop. If nobody is left who could, for ever.
async fn stopped(stop: &mut watch::Receiver<Option<Stop>>) -> Stop {
    let found = stop.wait_for(Option::is_some).await.map(|stop| *stop);
    match found {
        Ok(Some(stop)) => stop,
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

/// Removes what is at the server of a file that will never be whole there. Says what could not be removed.
async fn clean_up<S: Source>(
    settings: &Settings,
    kind: &mut Kind,
    source: &mut S,
    cause: &Cause,
    progress: &Progress,
) -> Option<String> {
    let Kind::S3(s3) = kind else { return None };
    if *cause == Cause::Ending {
        return None;
    }
    progress.send_modify(|status| status.phase = Phase::Cleaning);
    let mut backoff = Backoff::default();
    for _ in 0..ABORTS_MAX {
        match s3.abort(source).await {
            Ok(()) => return None,
            Err(failure) => {
                let until = next_attempt(&mut backoff, settings.pauses, &failure);
                progress.send_modify(|status| status.last_failure = Some(failure));
                sleep_until(until.into()).await;
            }
        }
    }
    s3.left(source)
}
