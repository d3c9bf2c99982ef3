//! The results of moves of one kind, round by round, with those that failed. A row says how many failed, and why.

use testkit::results::report::{Bar, NO_VALUE, Report};

use super::guest::Moved;

/// A row says the reason of a failure, up to so many characters: the rest was printed when it happened.
const REASON_CHARS: usize = 160;

/// What came of each round.
#[derive(Debug)]
pub struct Case<T = Moved> {
    rounds: Vec<Result<T, String>>,
    /// Failures after which the same round was tried again.
    again: usize,
}

/// What is asked of a case.
pub type Of<T = Moved> = fn(&T) -> f64;

impl<T> Default for Case<T> {
    fn default() -> Self {
        Self { rounds: Vec::new(), again: 0 }
    }
}

impl<T> Case<T> {
    pub fn add(&mut self, measured: T) {
        self.rounds.push(Ok(measured));
    }

    pub fn fail(&mut self, name: &str, error: &anyhow::Error) {
        eprintln!("{name}: failed: {error:#}");
        let reason = format!("{error:#}");
        let line = reason.lines().next().unwrap_or_default();
        self.rounds.push(Err(line.chars().take(REASON_CHARS).collect()));
    }

    /// It failed, and the round goes on.
    pub fn again(&mut self) {
        self.again += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.rounds.is_empty()
    }

    /// Of the last round that came to its end.
    pub fn last(&self) -> Option<&T> {
        self.rounds.iter().rev().find_map(|round| round.as_ref().ok())
    }

    /// The same rounds, of which only a part counts.
    pub fn map<U>(&self, of: impl Fn(&T) -> U) -> Case<U> {
        let rounds = self.rounds.iter().map(|round| round.as_ref().map(&of).map_err(Clone::clone));
        Case { rounds: rounds.collect(), again: self.again }
    }

    /// One value for each round.
    pub fn values(&self, of: Of<T>) -> Vec<f64> {
        self.rounds.iter().map(|round| round.as_ref().map_or(NO_VALUE, of)).collect()
    }

    /// How often it failed, and why at last.
    fn failure(&self) -> Option<String> {
        let failed = self.rounds.iter().filter(|round| round.is_err()).count();
        match self.rounds.iter().rev().find_map(|round| round.as_ref().err()) {
            Some(reason) => Some(format!("failed in {failed} of {} rounds: {reason}", self.rounds.len())),
            None if self.again > 0 => Some(format!("failed {} times before it came to its end", self.again)),
            None => None,
        }
    }
}

/// Rows whose names begin alike.
pub struct Rows<'a> {
    pub report: &'a mut Report,
    /// What the names of its rows begin with.
    pub name: String,
}

impl Rows<'_> {
    /// A case of ours against another one, which may be ours too.
    pub fn pair<T>(&mut self, what: &str, unit: &str, ours: (&Case<T>, Of<T>), peer: (&Case<T>, Of<T>), bar: Bar) {
        self.against(what, unit, ours, &peer.0.values(peer.1), bar);
        self.note_failures(ours.0, Some(peer.0));
    }

    /// A case of ours against what was measured in the same rounds.
    pub fn against<T>(&mut self, what: &str, unit: &str, ours: (&Case<T>, Of<T>), peer: &[f64], bar: Bar) {
        let name = format!("{}, {what}", self.name);
        self.report.pair(&name, unit, &ours.0.values(ours.1), peer, bar);
        self.note_failures(ours.0, None);
    }

    pub fn single<T>(&mut self, what: &str, unit: &str, ours: (&Case<T>, Of<T>), bar: Bar) {
        self.report.single(&format!("{}, {what}", self.name), unit, &ours.0.values(ours.1), bar);
        self.note_failures(ours.0, None);
    }

    /// How much more it is than in another case of the same round.
    pub fn above(&mut self, what: &str, unit: &str, of: Of, (ours, other): (&Case, &Case), max: f64) {
        let above: Vec<f64> = ours.values(of).iter().zip(other.values(of)).map(|(ours, other)| ours - other).collect();
        self.report.single(&format!("{}, {what}", self.name), unit, &above, Bar::AtMost(max));
        self.note_failures(ours, Some(other));
    }

    /// Of the last row. A move of ours that failed is no good one, however fast the others were.
    fn note_failures<T>(&mut self, ours: &Case<T>, peer: Option<&Case<T>>) {
        let Some(figure) = self.report.figures.last_mut() else { return };
        let ours = ours.failure();
        if ours.is_some() && figure.bar.is_some() {
            figure.holds = Some(false);
        }
        let peer = peer.and_then(Case::failure).map(|failure| format!("the other side {failure}"));
        let notes: Vec<String> = ours.into_iter().chain(peer).collect();
        if !notes.is_empty() {
            figure.note = Some(notes.join("; "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::results::machine::Machine;

    const MS: Of = |moved| moved.ms;

    fn case(rounds: &[Option<f64>]) -> Case {
        let mut case = Case::default();
        for round in rounds {
            match round {
                Some(ms) => case.add(Moved { ms: *ms, ..Moved::default() }),
                None => case.fail("test", &anyhow::anyhow!("the guest hangs\nits console")),
            }
        }
        case
    }

    #[test]
    fn failures_are_in_their_rows_and_in_no_other() {
        let mut report = Report::new("test", Machine::default(), "tcg");
        let mut rows = Rows { report: &mut report, name: "512 MiB".to_owned() };
        let (good, once, never) = (case(&[Some(1.0), Some(1.0)]), case(&[Some(1.0), None]), case(&[None, None]));
        for (ours, peer) in [(&good, &good), (&good, &once), (&good, &never), (&once, &good), (&never, &good)] {
            rows.pair("time", "ms", (ours, MS), (peer, MS), Bar::AtMost(1.0));
        }
        let got: Vec<_> = report.figures.iter().map(|figure| figure.holds).collect();
        assert_eq!(got, [Some(true), Some(true), None, Some(false), Some(false)]);
        let notes: Vec<_> = report.figures.iter().map(|figure| figure.note.as_deref().unwrap_or("")).collect();
        assert_eq!(notes[0], "");
        assert_eq!(notes[1], "the other side failed in 1 of 2 rounds: the guest hangs");
        assert_eq!(notes[4], "failed in 2 of 2 rounds: the guest hangs");
    }
}
