//! The scenarios of the repository, held to what the paper shows, and mistakes in scenarios.

use pagoda_core::policy::ReclaimState;
use pagoda_core::simulate::{Recording, run};

use super::{file, plot, report};

const SAMPLING: &str = include_str!("../../../../scenarios/sampling.toml");
const IDLE_TAX: &str = include_str!("../../../../scenarios/idle-tax.toml");
const REALLOCATION: &str = include_str!("../../../../scenarios/reallocation.toml");
const DAY: &str = include_str!("../../../../scenarios/day.toml");

fn simulated(text: &str) -> Recording {
    let recording = run(&file::parse(text).unwrap()).unwrap();
    assert_eq!(recording.violations, Default::default());
    assert_eq!(recording.refused, [""; 0]);
    recording
}

fn mib(pages: pagoda_core::units::PageCount) -> f64 {
    pages.bytes().0 as f64 / f64::from(1 << 20)
}

#[test]
fn sampling_follows_up_at_once_and_down_slowly() {
    let recording = simulated(SAMPLING);
    let estimate =
        |from_s: u64, until_s: u64| recording.vms[0].mean(from_s, until_s, |point| mib(point.working_set)).unwrap();
    // Two periods after the step to 265 MiB, and until its end.
    let up = estimate(8 * 60 + 60, 15 * 60);
    assert!((up - 265.0).abs() < 26.5, "{up} MiB estimated, 265 touched");
    // A minute after the step down most of it is still held to be active; before its end it is not.
    let (soon, late) = (estimate(16 * 60, 16 * 60 + 30), estimate(22 * 60, 24 * 60));
    assert!(soon > 190.0 && late < 165.0, "{soon} then {late} MiB estimated, 115 touched");
}

#[test]
fn the_idle_tax_moves_what_the_formula_says() {
    let recording = simulated(IDLE_TAX);
    let resident = |vm: usize, from_s: u64, until_s: u64| {
        recording.vms[vm].mean(from_s, until_s, |point| mib(point.resident)).unwrap()
    };
    // What a guest has is its memory without its balloon; of it the idle one leaves in swap what it does not touch.
    let has = |vm: usize, from_s: u64, until_s: u64| {
        let memory = mib(recording.vms[vm].memory);
        recording.vms[vm].mean(from_s, until_s, |point| memory - mib(point.balloon)).unwrap()
    };
    let (idle, dbench) = (has(0, 900, 1200), has(1, 900, 1200));
    assert!((idle / dbench - 1.0).abs() < 0.02, "{idle} and {dbench} MiB without a tax");
    // 25 + 4 * (P - 25) = 359 - P gives 87 MiB, but the other VM uses no more than 256: about 104 remain.
    let (idle, after) = (has(0, 1800, 2400), resident(1, 1260, 1320));
    assert!((after / 245.0 - 1.0).abs() < 0.05, "{after} MiB a minute after the change");
    assert!((idle / 104.0 - 1.0).abs() < 0.05, "{idle} MiB are left to the idle VM");
    let speed = |from_s: u64, until_s: u64| recording.vms[1].mean(from_s, until_s, |point| point.speed).unwrap();
    let gain = speed(25 * 60, 40 * 60) / speed(10 * 60, 20 * 60);
    assert!(gain > 1.3, "throughput rises by a factor of {gain}");
}

#[test]
fn five_vms_live_on_too_little_memory() {
    let recording = simulated(REALLOCATION);
    let calm = recording.state_ratio(ReclaimState::High) + recording.state_ratio(ReclaimState::Soft);
    assert!(calm > 0.9, "{calm} of the time in high and soft");
    let totals = |pick: fn(&pagoda_core::simulate::guest::Totals) -> u64| -> u64 {
        recording.vms.iter().map(|vm| pick(&vm.totals)).sum()
    };
    let (dropped, written) = (totals(|totals| totals.zero_dropped), totals(|totals| totals.pages_out));
    assert!(dropped > written, "{dropped} zero pages dropped, {written} pages written");
    // The database falls to its min of 160 MiB when it idles, and gets memory back for its query.
    let sql = &recording.vms[1];
    let resident = |from_s: u64, until_s: u64| sql.mean(from_s, until_s, |point| mib(point.resident)).unwrap();
    let (busy, idle, query) = (resident(900, 1200), resident(2700, 3000), resident(3300, 4800));
    assert!(busy > 200.0 && (160.0..168.0).contains(&idle) && query > 1.2 * idle, "{busy}, {idle}, {query} MiB");
}

#[test]
fn a_day_of_a_hundred_vms() {
    let recording = simulated(DAY);
    assert_eq!(recording.vms.len(), 100);
    assert!(recording.state_ratio(ReclaimState::Low) < 0.01);
    let text = report::text(&recording);
    assert!(text.contains("A day of 100 VMs") && text.contains("desktop-30"), "{text}");
}

#[test]
fn plots_and_reports_are_whole() {
    let recording = simulated(IDLE_TAX);
    let svg = plot::draw(&recording);
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<polyline").count(), 18, "three panels of six lines");
    let json = serde_json::to_value(report::Report::new(&recording, true)).unwrap();
    assert_eq!(json["vms"][1]["points"].as_array().unwrap().len(), recording.vms[1].points.len());
    assert_eq!(json["violations"]["below_min"], 0);
    let json = serde_json::to_value(report::Report::new(&recording, false)).unwrap();
    assert!(json["host"].is_null() && json["vms"][0]["points"].is_null());
}

#[test]
fn mistakes_say_what_to_do() {
    let check = |from: &str, to: &str, expected: &str| {
        assert!(IDLE_TAX.contains(from), "{from}");
        let message = match file::parse(&IDLE_TAX.replace(from, to)) {
            Ok(scenario) => run(&scenario).map(|_| ()).unwrap_err().to_string(),
            Err(error) => format!("{error:#}"),
        };
        assert!(message.contains(expected), "{to}: {message}");
    };
    check("\"386M\"", "\"386\"", "has no unit; write 386M");
    check("\"386M\"", "\"386X\"", "is not a size");
    check("idle_tax = \"0%\"", "idle_tax = \"100%\"", "give less than 100 %");
    check("idle_tax = \"0%\"", "idle_task = \"0%\"", "unknown field `idle_task`");
    check("duration = \"40m\"", "duration = \"40\"", "is not a time");
    check("duration = \"40m\"", "duration = \"400d\"", "give 1 to 604800");
    check("start = \"3m\"", "shares = 0", "VM \"dbench\": a VM without shares");
    check("start = \"3m\"", "min = \"300M\"", "more than the VM may have");
    check("start = \"3m\"", "count = 0", "give 1 to 4096");
    check("name = \"dbench\"", "name = \"idle\"", "two VMs are named");
    check("idle_tax = \"75%\"", "shares = 5", "name it with vm");
    check("idle_tax = \"75%\"", "vm = \"idle\"", "give shares, min or dram");
    check("idle_tax = \"75%\"", "vm = \"nobody\"\nshares = 5", "there is no VM \"nobody\"");
    check("idle_tax = \"75%\"", "", "nothing is changed");
    check("active = \"245M\"", "active = \"300M\"", "a working set of more than its memory");
}
