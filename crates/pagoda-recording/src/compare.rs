//! Makes the rounds of a recording again, and compares the plans with the recorded ones to the page.

use std::io::{self, BufRead, Read};

use pagoda_core::simulate::replay::Replay;
use serde::Serialize;
use serde_json::Value;

use crate::wire::{Header, Planned, Round};
use crate::{LINE_BYTES_MAX, RECORDING_BYTES_MAX, VERSION};

/// So many differences are kept; the rest is counted. One difference makes more in each round after it.
pub const DIFFERENCES_MAX: usize = 100;

/// What a comparison found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// Rounds that were made again.
    pub rounds: u64,
    /// Rounds with a difference.
    pub different_rounds: u64,
    /// VMs' plans that were compared.
    pub vm_plans: u64,
    /// From the first round to the last one, on the recording's clock.
    pub covers_ms: u64,
    /// The last line is not whole and was left out: its writer ended in it.
    pub is_cut_off: bool,
    /// The first ones, at most [`DIFFERENCES_MAX`].
    pub differences: Vec<Difference>,
}

/// A value that came out otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The line of the recording, from 1 on.
    pub line: u64,
    /// When the round was made, in milliseconds on the recording's clock.
    pub now_ms: u64,
    /// The VM's number, where it is a VM's.
    pub vm: Option<u32>,
    /// Which value, such as `orders.target`.
    pub what: String,
    /// What the recording has.
    pub recorded: String,
    /// What the same input gives now.
    pub replayed: String,
}

/// Why a recording cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("it is empty; a recording begins with a line that says its version")]
    Empty,
    #[error("its first line is not that of a recording of policy rounds: {0}")]
    NoRecording(String),
    #[error("it is of version {version}; this program reads version {VERSION}, use the program that it was made with")]
    Version { version: u64 },
    #[error("line {line} is longer than {LINE_BYTES_MAX} bytes")]
    LineTooLong { line: u64 },
    #[error("it is longer than {RECORDING_BYTES_MAX} bytes")]
    TooLong,
    #[error("line {line}: {why}")]
    Line { line: u64, why: String },
}

/// Makes the rounds of a recording again.
///
/// # Errors
/// It is damaged, or no recording.
pub fn compare(recording: impl BufRead) -> Result<Comparison, Damage> {
    let mut lines = Lines { from: recording.take(RECORDING_BYTES_MAX + 1), line: 0, bytes: 0 };
    let header = header(&lines.next()?.ok_or(Damage::Empty)?.text)?;
    let host = header.host.read().map_err(|why| Damage::Line { line: 1, why })?;
    let mut replay =
        Replay::new(host, header.seed).map_err(|error| Damage::Line { line: 1, why: error.to_string() })?;
    let mut found = Comparison::default();
    let mut first_ms = None;
    while let Some(Line { number, text, is_whole }) = lines.next()? {
        if !is_whole {
            found.is_cut_off = true;
            break;
        }
        let damaged = |why: String| Damage::Line { line: number, why };
        let round: Round = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        let input = round.input().map_err(damaged)?;
        let last_ms = first_ms.map_or(round.now_ms, |first: u64| first + found.covers_ms);
        if round.now_ms < last_ms {
            return Err(damaged(format!("its time of {} ms is before that of the line above", round.now_ms)));
        }
        replay.change(&input.changes).map_err(|error| damaged(error.to_string()))?;
        let Some(made) = replay.make(&input.host, &input.vms) else {
            return Err(damaged("no plan came of it".to_owned()));
        };
        let replayed = Planned::new(&input.vms, made);
        found.rounds += 1;
        found.vm_plans += replayed.vms.len() as u64;
        found.covers_ms = round.now_ms - *first_ms.get_or_insert(round.now_ms);
        if replayed != round.plan {
            found.different_rounds += 1;
            note(&mut found.differences, number, round.now_ms, &round.plan, &replayed);
        }
    }
    Ok(found)
}

fn header(text: &str) -> Result<Header, Damage> {
    let no_recording = |error: serde_json::Error| Damage::NoRecording(error.to_string());
    let value: Value = serde_json::from_str(text).map_err(no_recording)?;
    // The version first: the rest of another version's line may look otherwise.
    match value.get("pagoda_policy_recording").and_then(Value::as_u64) {
        Some(version) if version != u64::from(VERSION) => Err(Damage::Version { version }),
        Some(_) => serde_json::from_value(value).map_err(no_recording),
        None => Err(Damage::NoRecording("it has no `pagoda_policy_recording`".to_owned())),
    }
}

struct Line {
    number: u64,
    text: String,
    /// It ends as lines do.
    is_whole: bool,
}

struct Lines<R> {
    from: io::Take<R>,
    line: u64,
    bytes: u64,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Result<Option<Line>, Damage> {
        let mut bytes = Vec::new();
        let read = (&mut self.from).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes)? as u64;
        if read == 0 {
            return Ok(None);
        }
        self.line += 1;
        self.bytes += read;
        let number = self.line;
        if read > LINE_BYTES_MAX {
            return Err(Damage::LineTooLong { line: number });
        }
        if self.bytes > RECORDING_BYTES_MAX {
            return Err(Damage::TooLong);
        }
        let is_whole = bytes.ends_with(b"\n");
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(Line { number, text, is_whole })),
            Err(_) if !is_whole => Ok(Some(Line { number, text: String::new(), is_whole })),
            Err(_) => Err(Damage::Line { line: number, why: "it is not text".to_owned() }),
        }
    }
}

fn note(differences: &mut Vec<Difference>, line: u64, now_ms: u64, recorded: &Planned, replayed: &Planned) {
    let both = [recorded, replayed].map(|planned| {
        let vms: Vec<(u32, Value)> = planned.vms.iter().map(|vm| (vm.id, value(vm))).collect();
        (value(&planned.without_vms()), vms)
    });
    let [(host, vms), (host_again, vms_again)] = both;
    let mut add = |vm: Option<u32>, what: String, recorded: &Value, replayed: &Value| {
        if differences.len() < DIFFERENCES_MAX {
            let (recorded, replayed) = (word(recorded), word(replayed));
            differences.push(Difference { line, now_ms, vm, what, recorded, replayed });
        }
    };
    walk("", &host, &host_again, &mut |what, a, b| add(None, what, a, b));
    for index in 0..vms.len().max(vms_again.len()) {
        let at = |all: &[(u32, Value)]| all.get(index).map_or(Value::Null, |(_, value)| value.clone());
        let vm = vms.get(index).or(vms_again.get(index)).map(|(id, _)| *id);
        walk("", &at(&vms), &at(&vms_again), &mut |what, a, b| add(vm, what, a, b));
    }
}

fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).unwrap_or(Value::Null)
}

fn word(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Calls `found` for each value that is not the same in both, with its path.
fn walk(path: &str, a: &Value, b: &Value, found: &mut dyn FnMut(String, &Value, &Value)) {
    match (a, b) {
        (Value::Object(left), Value::Object(right)) => {
            let mut keys: Vec<&String> = left.keys().chain(right.keys()).collect();
            keys.sort_unstable();
            keys.dedup();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                let null = Value::Null;
                walk(&path, left.get(key).unwrap_or(&null), right.get(key).unwrap_or(&null), found);
            }
        }
        (a, b) if a != b => found(if path.is_empty() { "plan".to_owned() } else { path.to_owned() }, a, b),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
