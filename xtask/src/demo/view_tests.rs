use super::super::model::tests::{finished, plan, vm};
use super::super::model::{Model, Sample};
use super::super::verdict;
use super::*;

fn text(rows: &[Row]) -> Vec<String> {
    rows.iter().map(|row| row.0.iter().map(|(_, text)| text.as_str()).collect()).collect()
}

#[test]
fn a_frame_fits_a_small_terminal() {
    let causes = ["minor", "zero", "swap_page", "swap_chunk", "joined", "write_protect", "cancel", "waited"];
    let names: Vec<String> = causes.iter().map(|cause| format!("faults_{cause}")).collect();
    let mut counters: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 12_345_678)).collect();
    counters.extend([("pages_in", 0), ("pages_out", 0)]);
    let mut model = finished();
    for second in 40..70 {
        let at = Duration::from_secs(second);
        model.apply_sample(Sample { at, vm: vm(192, &counters), ram_bytes: None });
    }
    // Also while each of the phases runs.
    let running = (1..model.phases.len()).map(|index| (Some(index), UNICODE));
    for (running, glyphs) in running.chain([(None, UNICODE), (None, ASCII)]) {
        let ended: Vec<_> = model.phases.iter().map(|phase| phase.ended).collect();
        if let Some(index) = running {
            model.phases[index].ended = None;
        }
        let rows = text(&frame(&model, "TCG", Duration::from_secs(170), glyphs));
        for (phase, ended) in model.phases.iter_mut().zip(ended) {
            phase.ended = ended;
        }
        assert!(rows.len() <= 23, "{rows:#?}");
        for row in &rows {
            assert!(row.chars().count() <= 80, "{} columns: {row}", row.chars().count());
        }
    }
}

#[test]
fn a_line_for_a_log() {
    let mut model = Model::new(plan());
    assert_eq!(line(&model, Duration::from_secs(2)), "   2 s  boot    25 %");
    for (at, faults) in [(0, 0), (1, 500)] {
        let counters = [("faults_swap_page", faults), ("pages_in", faults), ("pages_out", 256)];
        model.apply_sample(Sample { at: Duration::from_secs(at), vm: vm(183, &counters), ram_bytes: None });
    }
    let expected = "   2 s  boot    25 %  resident 183 of 192 MiB, swapped 300, zero 285  in 2.0 out 0.0 MiB/s  wrong 0  \
                    faults/s 500: swap page 500 (-/- us)";
    assert_eq!(line(&model, Duration::from_secs(2)), expected);
}

#[test]
fn numbers() {
    for (number, expected) in [(0, "0"), (999, "999"), (1000, "1 000"), (1_234_567, "1 234 567")] {
        assert_eq!(grouped(number), expected);
    }
    assert_eq!((mib(0), mib(1), mib(MIB)), ("0".into(), "1".into(), "1".into()));
    assert_eq!((level(0.0, 8), level(0.5, 8), level(1.0, 8)), (0, 4, 7));
}

#[test]
fn what_must_hold() {
    let holds = |change: fn(&mut Model)| {
        let mut model = finished();
        model.ram_bytes_max = model.resident_bytes_max;
        change(&mut model);
        verdict::checks(&model).iter().map(|check| check.holds).collect::<Vec<_>>()
    };
    assert_eq!(holds(|_| ()), [true, true, true, true]);
    assert_eq!(holds(|model| model.verdict = None), [false, true, true, true]);
    assert_eq!(holds(|model| model.bad = 1), [false, true, true, true]);
    assert_eq!(holds(|model| model.resident_bytes_max = 192 * MIB + 1), [true, false, true, true]);
    assert_eq!(holds(|model| model.resident_bytes_max = 0), [true, false, true, true]);
    assert_eq!(holds(|model| model.ram_bytes_max = 201 * MIB), [true, true, false, true]);
    let unused = verdict::checks(&Model::new(plan()));
    assert!(unused.iter().all(|check| !check.holds), "{unused:?}");
}
