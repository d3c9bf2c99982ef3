//! An hour of simulated VMs is recorded as the daemon records its own, and replayed.

use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;

use pagoda_core::policy::{Overhead, PerMille, Shares, TaxRate, VmSettings};
use pagoda_core::simulate::{BalloonScript, Boot, Change, ChangeKind, Hardware, Phase, Scenario, VmScript, run_seen};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_recording::{Comparison, compare};

use super::*;

fn mib(mib: u64) -> PageCount {
    Bytes::from_mib(mib).pages_floor()
}

fn vm(name: &str, memory: u64, actives: &[u64]) -> VmScript {
    let phase = |(nth, active): (usize, &u64)| Phase {
        at_s: nth as u64 * 600,
        active: mib(*active),
        rate: mib(100),
        touched: None,
    };
    VmScript {
        name: name.to_owned(),
        settings: VmSettings { min: mib(memory / 4), ..VmSettings::new(mib(memory)) },
        overhead: Overhead { overhead: mib(16), reserve: PageCount::ZERO },
        start_s: 0,
        stop_s: None,
        boot: Boot { touches: mib(memory / 2), rate: mib(50) },
        balloon: Some(BalloonScript { after_s: 30, rate: mib(20) }),
        phases: actives.iter().enumerate().map(phase).collect(),
        repeat_s: None,
        reports_free: false,
    }
}

/// An hour of VMs that have too little memory, whose settings change, and of which one comes and goes.
fn hour() -> Scenario {
    let steady = vm("steady", 512, &[300, 100, 400, 50, 350, 200]);
    let mut plain = vm("plain", 384, &[200, 250, 100, 300, 50, 300]);
    plain.balloon = None;
    let mut guest = vm("guest", 256, &[200, 30, 200]);
    (guest.start_s, guest.stop_s) = (900, Some(2700));
    let dearer = VmSettings { shares: Shares::new(3000).unwrap(), min: mib(64), ..steady.settings.clone() };
    let capped = VmSettings { cap: mib(300), ..plain.settings.clone() };
    let change = |at_s, what| Change { at_s, what };
    Scenario {
        title: "an hour".into(),
        duration_s: 3600,
        seed: 3,
        host: HostSettings::new(mib(700)),
        hardware: Hardware::default(),
        changes: vec![
            change(400, ChangeKind::Tax(TaxRate::new(PerMille(250)).unwrap())),
            change(1300, ChangeKind::Vm(0, dearer)),
            change(1900, ChangeKind::Pool(mib(600))),
            change(2200, ChangeKind::Vm(1, capped)),
            change(2500, ChangeKind::Pool(mib(700))),
        ],
        vms: vec![steady, plain, guest],
        record_s: 60,
    }
}

/// A directory of a test's own.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("pagodad-recording-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn file(&self) -> PathBuf {
        self.0.join("rounds.jsonl")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Records as [`super::super::rounds::make`] does: what comes is written after each round.
struct Recorded<'a> {
    recording: Recording,
    parts: &'a Parts,
}

impl Observer for Recorded<'_> {
    fn begin(&mut self, host: &HostSettings, seed: u64) {
        self.recording.open(self.parts);
        self.recording.begin(host, seed);
    }

    fn before(&mut self, policy: &Policy) {
        self.recording.before(policy);
    }

    fn after(&mut self, policy: &Policy, host: &HostReport, vms: &[VmReport], made: Made<'_>) {
        self.recording.after(policy, host, vms, made);
        self.recording.flush(self.parts);
    }
}

fn record(recording: Recording) -> Vec<String> {
    let parts = Parts::default();
    let recorded = run_seen(&hour(), &mut Recorded { recording, parts: &parts }).unwrap();
    assert_eq!(recorded.violations, Default::default());
    parts.problems()
}

fn replayed(path: &Path) -> Comparison {
    compare(BufReader::new(File::open(path).unwrap())).unwrap()
}

#[test]
fn an_hour_gives_the_same_plans_to_the_page() {
    let dir = Dir::new("hour");
    assert_eq!(record(Recording::new(Some(dir.file()))), [""; 0]);
    let mode = std::fs::metadata(dir.file()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "for the daemon's user alone");
    let found = replayed(&dir.file());
    assert_eq!((found.different_rounds, found.differences, found.is_cut_off), (0, vec![], false));
    assert!(found.rounds > 1000 && found.vm_plans > 2 * found.rounds, "{} {}", found.rounds, found.vm_plans);
    assert!(found.covers_ms > 3_590_000, "{}", found.covers_ms);

    // One page in one plan, and one page in what was measured.
    let text = std::fs::read_to_string(dir.file()).unwrap();
    let tampered = |key: &str, line: usize| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let at = lines[line].rfind(&format!("\"{key}\":")).unwrap() + key.len() + 3;
        let digits = lines[line][at..].find(|c: char| !c.is_ascii_digit()).unwrap();
        let value: u64 = lines[line][at..at + digits].parse().unwrap();
        lines[line].replace_range(at..at + digits, &(value + 1).to_string());
        compare(format!("{}\n", lines.join("\n")).as_bytes()).unwrap()
    };
    let found = tampered("target", 700);
    assert_eq!((found.different_rounds, found.differences.len()), (1, 1));
    let difference = &found.differences[0];
    assert_eq!((difference.line, difference.what.as_str()), (701, "orders.target"));
    assert_eq!(difference.recorded.parse::<u64>().unwrap(), difference.replayed.parse::<u64>().unwrap() + 1);
    assert!(tampered("resident", 700).different_rounds > 0);
    // A line that is missing, too: what was measured goes on, but the policy has not seen all of it.
    let without: Vec<&str> = text.lines().enumerate().filter(|(nth, _)| *nth != 1).map(|(_, line)| line).collect();
    assert!(compare(without.join("\n").as_bytes()).unwrap().different_rounds > 0);
}

#[test]
fn a_recording_before_is_kept_and_other_files_are_left_alone() {
    let dir = Dir::new("before");
    let parts = Parts::default();
    let begin = || {
        let mut recording = Recording::new(Some(dir.file()));
        recording.open(&parts);
        recording.begin(&HostSettings::new(mib(100)), 1);
        recording.flush(&parts);
    };
    begin();
    begin();
    assert_eq!(parts.problems(), [""; 0]);
    assert!(dir.0.join("rounds.jsonl.old").is_file());
    std::fs::write(dir.file(), "precious").unwrap();
    begin();
    assert!(parts.problems()[0].contains("policy recording: make"), "{:?}", parts.problems());
    assert_eq!(std::fs::read_to_string(dir.file()).unwrap(), "precious");
}

#[test]
fn a_recording_that_cannot_go_on_ends_and_is_said() {
    let dir = Dir::new("full");
    let problems = record(Recording { bytes_max: 100_000, ..Recording::new(Some(dir.file())) });
    assert!(problems[0].contains("policy recording: its file is full"), "{problems:?}");
    let found = replayed(&dir.file());
    assert!(found.rounds > 10 && found.different_rounds == 0, "what was written is whole: {found:?}");
    // A disk that takes nothing.
    let parts = Parts::default();
    let mut recording = Recording::new(None);
    recording.file = Some(OpenOptions::new().write(true).open("/dev/full").unwrap());
    recording.begin(&HostSettings::new(mib(100)), 1);
    recording.flush(&parts);
    assert!(parts.problems()[0].contains("write to its file"), "{:?}", parts.problems());
    assert!(recording.file.is_none());
    assert_eq!(record(Recording::new(None)), [""; 0], "nothing is recorded unless it is configured");
}
