//! What a drain has planned and done, for people and programs, and its exit status.

use anyhow::Result;
use serde::Serialize;

use super::text;
use super::types::{DrainPlan, Ended, Outcome};
use crate::exit::{GivenUp, Undecided};
use crate::output::{Format, print_json, print_text};

/// What `--json` prints when it is over.
#[derive(Debug, Serialize)]
struct Drained {
    plan: DrainPlan,
    moves: Vec<Ended>,
    /// VMs that are here and were not when it was planned.
    came: Vec<String>,
}

pub fn print_plan(plan: &DrainPlan, format: Format) -> Result<()> {
    match format {
        Format::Json => Ok(print_json(plan)?),
        Format::Text => Ok(print_text(&text::plan(plan))?),
    }
}

/// What came of it all.
///
/// # Errors
/// VMs are here still, have crashed, or nobody knows.
pub fn finish(plan: DrainPlan, mut moves: Vec<Ended>, came: Vec<String>, format: Format) -> Result<()> {
    let without_place = plan.vms.iter().filter(|vm| vm.host.is_none()).count() + came.len();
    moves.sort_by(|a, b| b.outcome.cmp(&a.outcome).then_with(|| a.vm.cmp(&b.vm)));
    let said = text::ended(&moves, without_place);
    let ends: Vec<Outcome> = moves.iter().map(|ended| ended.outcome).collect();
    match format {
        Format::Json => print_json(&Drained { plan, moves, came })?,
        Format::Text => print_text(&said)?,
    }
    status(&ends, without_place)
}

fn status(ends: &[Outcome], without_place: usize) -> Result<()> {
    let count = |wanted| ends.iter().filter(|outcome| **outcome == wanted).count();
    let (undecided, crashed, stayed) =
        (count(Outcome::Undecided), count(Outcome::Crashed), count(Outcome::Stayed) + without_place);
    match () {
        () if undecided > 0 => Err(Undecided(format!(
            "of {undecided} VMs nobody knows here which host runs them: `pagoda moves`, and `pagoda ls` on both hosts, say more"
        ))
        .into()),
        () if crashed > 0 => anyhow::bail!("{crashed} VMs have crashed meanwhile"),
        () if stayed > 0 => Err(GivenUp(format!("{stayed} VMs are here still")).into()),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_end_is_the_exit_status() {
        use Outcome::{Crashed, Moved, Stayed, Undecided};
        let check = |ends: &[Outcome], without_place, expected: &str| {
            let error = status(ends, without_place).err();
            let kind = error.as_ref().map_or("done", |error| match error {
                error if error.is::<crate::exit::Undecided>() => "undecided",
                error if error.is::<GivenUp>() => "given up",
                _ => "failed",
            });
            assert_eq!(kind, expected, "{ends:?} {without_place}");
        };
        check(&[], 0, "done");
        check(&[Moved, Moved], 0, "done");
        check(&[Moved], 1, "given up");
        check(&[Moved, Stayed], 0, "given up");
        check(&[Stayed, Crashed], 1, "failed");
        check(&[Crashed, Undecided, Stayed], 0, "undecided");
    }
}
