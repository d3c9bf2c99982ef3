//! Damaged and hostile recordings. `pagodad` has the test of a whole hour.

use super::*;

const HEADER: &str = r#"{"pagoda_policy_recording":1,"seed":7,"host":{"pool":262144,"tax":750,"thresholds":[60,40,20,10,5],"rate_page_out":131072,"rate_balloon":65536}}"#;
const ROUND: &str = r#"{"now_ms":5,"memory":{"total":4294967296,"available":4294967296},"set":{"vms":[{"id":1,"memory":65536,"cap":65536,"min":0,"shares":1000,"sample_pages":100,"sample_period_s":30,"balloon_max":650,"reserve_swap":false,"overhead":0,"reserve":0}]},"vms":[{"id":1,"kind":"qemu","memory":65536,"min":0,"round":{"sent":65536,"overhead":0,"period":0},"engine":{"armed":true,"ram":0,"resident":1000,"swapped":0,"shared":0,"shared_part":0,"share_burst":0,"watched":0,"touched":0,"sample_period":0,"pinned":false},"process":0,"balloon":"absent","pinned":false}],"plan":{"state":"high","pool":262144,"used":1000,"free":261144,"budget":243793,"need":0,"shortfall":0,"restrained":false,"stuck":false,"vms":[]}}"#;

fn of(lines: &[&str]) -> Result<Comparison, Damage> {
    compare(lines.iter().map(|line| format!("{line}\n")).collect::<String>().as_bytes())
}

#[test]
fn a_plan_of_another_policy_is_named() {
    let found = of(&[HEADER, ROUND]).unwrap();
    assert_eq!((found.rounds, found.different_rounds, found.vm_plans), (1, 1, 1));
    assert_eq!(found.differences.len(), 1, "{:?}", found.differences);
    let Difference { line, vm, what, recorded, .. } = &found.differences[0];
    assert_eq!((*line, *vm, what.as_str(), recorded.as_str()), (2, Some(1), "plan", "nothing"));
}

#[test]
fn a_line_that_is_cut_off_is_left_out() {
    let text = format!("{HEADER}\n{}", &ROUND[..200]);
    let found = compare(text.as_bytes()).unwrap();
    assert_eq!((found.rounds, found.is_cut_off), (0, true));
    assert!(!of(&[HEADER]).unwrap().is_cut_off);
}

#[test]
fn damage_says_where_it_is() {
    let check = |lines: &[&str], expected: &str| {
        let message = of(lines).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    };
    check(&[], "it is empty");
    check(&["[host]"], "its first line is not that of a recording");
    check(&["{}"], "has no `pagoda_policy_recording`");
    check(&[&HEADER.replace("recording\":1", "recording\":2")], "it is of version 2; this program reads version 1");
    check(&[&HEADER.replace("\"tax\":750", "\"tax\":1000")], "line 1: an idle tax");
    check(&[&HEADER.replace("262144", "0")], "line 1: a pool of 0 B");
    check(&[&HEADER.replace("[60,", "[65535,")], "line 1: a threshold");
    let rounds = |from: &str, to: &str, expected: &str| {
        assert!(ROUND.contains(from), "{from}");
        check(&[HEADER, &ROUND.replace(from, to)], expected);
    };
    rounds("\"resident\":1000", "\"resident\":18446744073709551615", "line 2: VM 1: resident is 18446744073709551615");
    rounds("\"resident\":1000", "\"resident\":-1", "line 2: ");
    rounds("\"now_ms\":5", "\"now_ms\":18446744073709551615", "line 2: now_ms is");
    rounds("\"available\":4294967296", "\"available\":18446744073709551615", "line 2: available is");
    rounds("\"shares\":1000", "\"shares\":0", "line 2: VM 1: a VM without shares");
    rounds("\"memory\":65536,\"cap\"", "\"memory\":0,\"cap\"", "line 2: VM 1: a memory of 0 B");
    rounds("\"absent\"", "{\"size\":99999999999999}", "balloon is 99999999999999 pages");
    rounds("\"pinned\":false}]", "\"pinned\":false,\"more\":1}]", "unknown field `more`");
    check(&[HEADER, ROUND, &ROUND.replace("\"now_ms\":5", "\"now_ms\":4")], "line 3: its time of 4 ms is before");
    check(&[HEADER, "x"], "line 2: ");
    let long = "x".repeat(LINE_BYTES_MAX as usize + 1);
    check(&[HEADER, &long], "line 2 is longer than");
}

/// No number of a recording makes the policy overflow: each is set to the most that is read.
#[test]
fn extreme_numbers_are_no_panic() {
    let vm = &ROUND[ROUND.find("\"vms\":[{\"id\":1,\"kind\"").unwrap()..ROUND.find("\"plan\"").unwrap()];
    for key in [
        "memory",
        "min",
        "sent",
        "overhead",
        "period",
        "ram",
        "resident",
        "swapped",
        "shared",
        "shared_part",
        "share_burst",
        "sample_period",
        "process",
        "watched",
        "touched",
    ] {
        let at = vm.find(&format!("\"{key}\":")).unwrap() + key.len() + 3;
        let end = at + vm[at..].find(|c: char| !c.is_ascii_digit()).unwrap();
        let most =
            if key.ends_with("ed") && key.len() == 7 && key != "swapped" { u64::from(u32::MAX) } else { 1 << 36 };
        let changed = format!("{}{most}{}", &vm[..at], &vm[end..]);
        let line = ROUND.replace(vm, &changed);
        // The same VM twice, and one that nobody knows.
        let twice = line.replace("],\"plan\"", &format!(",{}],\"plan\"", changed[7..].trim_end_matches("],")));
        for line in [line, twice] {
            let later = line.replace("\"now_ms\":5", "\"now_ms\":9007199254740992");
            let _ = of(&[HEADER, &line, &later]).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
    }
}
