//! What users read of a drain: its plan, and how it ended.

use pagoda_api::MoveStatus;

use super::types::{DrainPlan, Ended, Outcome, PlannedVm};
use crate::moves::text::{line, room, span};
use crate::output::{Side, Table};
use crate::units::format_size;

/// Moves that are named in the line of the progress.
const LINES_MAX: usize = 2;

/// Who goes where, and how full the hosts are then.
pub fn plan(plan: &DrainPlan) -> String {
    if plan.vms.is_empty() {
        return "no VM is here\n".to_owned();
    }
    let mut vms = Table::new(&[
        ("VM", Side::Left),
        ("TO", Side::Left),
        ("DRAM", Side::Right),
        ("SWAP", Side::Right),
        ("SENDS", Side::Right),
        ("TIME", Side::Right),
        ("STAYS BECAUSE", Side::Left),
    ]);
    for PlannedVm { vm, host, takes, sends_bytes, time_ms, why } in &plan.vms {
        let if_moved = |text: String| if host.is_some() { text } else { "-".to_owned() };
        vms.row(vec![
            vm.clone(),
            host.clone().unwrap_or_else(|| "nowhere".to_owned()),
            format_size(takes.dram_bytes),
            format_size(takes.swap_bytes),
            if_moved(format_size(*sends_bytes)),
            if_moved(time_ms.map_or_else(|| "for ever".to_owned(), span)),
            why.clone().unwrap_or_default(),
        ]);
    }
    let mut hosts =
        Table::new(&[("HOST", Side::Left), ("VMS", Side::Right), ("TAKES", Side::Left), ("OF FREE", Side::Left)]);
    for host in &plan.hosts {
        hosts.row(vec![host.host.clone(), host.vms.to_string(), room(host.takes), room(host.free)]);
    }
    format!("{}\n{}", vms.render(), hosts.render())
}

/// How far it is, for one line of a terminal.
pub fn progress<'a>(moving: impl Iterator<Item = &'a MoveStatus>, over: usize, all: usize) -> String {
    let mut text = format!("{over} of {all} over");
    let moving: Vec<&MoveStatus> = moving.collect();
    for status in moving.iter().take(LINES_MAX) {
        text += " | ";
        text += &line(status);
    }
    if moving.len() > LINES_MAX {
        text += &format!(" | and {} more", moving.len() - LINES_MAX);
    }
    text
}

/// How one move has ended, said as soon as it has.
pub fn end(ended: &Ended) -> String {
    let Ended { vm, host, outcome, why, status } = ended;
    match (outcome, status) {
        (Outcome::Moved, Some(status)) => crate::moves::text::moved(status),
        _ => {
            let why = why.as_ref().map_or(String::new(), |why| format!(": {why}"));
            format!("{vm} to {host}: {}{why}\n", outcome.word())
        }
    }
}

/// How many VMs the drain has moved, and what became of the others.
pub fn ended(moves: &[Ended], without_place: usize) -> String {
    let count = |wanted: Outcome| moves.iter().filter(|ended| ended.outcome == wanted).count();
    let mut text = format!("{} moved", count(Outcome::Moved));
    let others = [
        (count(Outcome::Stayed) + without_place, "stay here"),
        (count(Outcome::Crashed), "crashed"),
        (count(Outcome::Undecided), "undecided"),
    ];
    for (count, what) in others.iter().filter(|(count, _)| *count > 0) {
        text += &format!(", {count} {what}");
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use pagoda_api::MoveRoom;

    use super::super::types::PlannedHost;
    use super::*;
    use crate::moves::tests::sample;

    fn words(text: &str) -> Vec<&str> {
        text.split_whitespace().collect()
    }

    #[test]
    fn a_plan_as_a_table() {
        let takes = MoveRoom { dram_bytes: 512 << 20, swap_bytes: 4 << 30 };
        let stays = PlannedVm {
            vm: "db".into(),
            host: None,
            takes,
            sends_bytes: 0,
            time_ms: None,
            why: Some("there is no room beside the others".into()),
        };
        let goes = PlannedVm {
            vm: "web1".into(),
            host: Some("host2".into()),
            sends_bytes: 1 << 30,
            time_ms: Some(9000),
            why: None,
            ..stays.clone()
        };
        let host = PlannedHost {
            host: "host2".into(),
            vms: 1,
            free: MoveRoom { dram_bytes: 1 << 30, swap_bytes: 9 << 30 },
            takes,
        };
        let shown = plan(&DrainPlan { fits: false, vms: vec![stays, goes], hosts: vec![host] });
        let expected = "\
VM    TO       DRAM  SWAP  SENDS   TIME  STAYS BECAUSE
db    nowhere  512M    4G      -      -  there is no room beside the others
web1  host2    512M    4G     1G  9.0 s

HOST   VMS  TAKES                OF FREE
host2    1  512M DRAM + 4G swap  1G DRAM + 9G swap
";
        assert_eq!(words(&shown), words(expected), "{shown}");
        assert_eq!(plan(&DrainPlan { fits: true, vms: vec![], hosts: vec![] }), "no VM is here\n");
    }

    #[test]
    fn how_far_it_is_and_how_it_ended() {
        let three = [sample(), sample(), sample()];
        let said = progress(three.iter(), 4, 9);
        assert!(said.starts_with("4 of 9 over | web1 to host2: copying") && said.ends_with(" | and 1 more"), "{said}");
        let stays = Ended {
            vm: "a".into(),
            host: "host2".into(),
            outcome: Outcome::Stayed,
            why: Some("no room".into()),
            status: None,
        };
        assert_eq!(end(&stays), "a to host2: stays: no room\n");
        let moved = Ended { outcome: Outcome::Moved, why: None, status: Some(sample()), ..stays.clone() };
        assert!(end(&moved).starts_with("moved web1 to host2: "), "{}", end(&moved));
        assert_eq!(ended(&[moved.clone(), moved.clone(), stays], 1), "2 moved, 2 stay here\n");
        assert_eq!(ended(&[moved], 0), "1 moved\n");
    }
}
