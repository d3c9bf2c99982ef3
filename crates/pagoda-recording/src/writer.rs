//! Writes a recording, line by line.

use pagoda_core::policy::changes::{Changes, Known};
use pagoda_core::policy::round::{HostReport, VmReport};
use pagoda_core::policy::{HostSettings, Policy};
use pagoda_core::simulate::replay::Made;
use serde::Serialize;

use crate::wire::{Header, Round};

/// Makes the lines of a recording, and remembers which settings it has written. Where the lines go is left to its owner.
#[derive(Debug)]
pub struct Writer {
    known: Known,
    changes: Changes,
}

impl Writer {
    /// The first line, before the first round: what rounds remember is not recorded, and could not be made again. `seed`: that
    /// of the rounds.
    pub fn begin(host: &HostSettings, seed: u64) -> (Writer, String) {
        let writer = Writer { known: Known::without_vms(host.clone()), changes: Changes::default() };
        (writer, line(&Header::new(seed, host)))
    }

    /// Looks at what was set since the last round. Just before a round.
    pub fn before(&mut self, policy: &Policy) {
        self.changes = self.known.changes(policy);
    }

    /// A round's line. Just after it.
    pub fn after(&mut self, policy: &Policy, host: &HostReport, vms: &[VmReport], made: Made<'_>) -> String {
        self.known = Known::of(policy);
        line(&Round::new(&self.changes, host, vms, made))
    }
}

fn line(value: &impl Serialize) -> String {
    // Keys are texts and no number is a fraction: there is nothing that JSON cannot say.
    let mut line = serde_json::to_string(value).unwrap_or_default();
    line.push('\n');
    line
}
