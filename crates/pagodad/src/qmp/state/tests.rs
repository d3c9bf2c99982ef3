//! Saving, loading and undoing against a fake QEMU of a few lines that misbehaves, and against real ones.

pub mod fake;
mod real;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fake::{Fake, STATE, Way};
use pagoda_core::units::Bytes;
use serde_json::json;

use super::*;

const LONG: Duration = Duration::from_secs(3600);
const MAX: Bytes = Bytes::from_mib(1);

fn save_by(fake: &Fake, max: Bytes, within: Duration) -> Result<Saved<'_>, SaveError> {
    save(&fake.monitor, &fake.gate, max, Instant::now() + within)
}

/// The guest runs, every migration has RAM, and nobody else can change that.
fn is_as_before(fake: &Fake, status: &str) {
    assert_eq!(fake.model().status, status);
    assert_eq!(fake.capabilities(), ["events"], "the others are off");
    assert_ne!(fake.model().migration, "active");
    assert!(!fake.gate.is_open.load(Ordering::SeqCst));
}

#[test]
fn a_state_is_saved_and_the_guest_runs_again() {
    let fake = Fake::new(Way::Well);
    check(&fake.monitor).expect("nothing against it");
    let saved = save_by(&fake, MAX, LONG).expect("saved");
    assert_eq!(saved.state, STATE);
    assert!(saved.pause.was_running());
    is_as_before(&fake, "postmigrate");
    assert_eq!(fake.gate.opened.load(Ordering::SeqCst), 2, "for one command each time");
    saved.pause.check().expect("it stands still");
    assert_eq!(resume(saved.pause).expect("it runs"), Some(7000), "from its stop to its resume");
    is_as_before(&fake, "running");
    let commands = &fake.model().commands;
    assert!(!commands.iter().any(|command| command == "stop" || command == "migrate_cancel"), "{commands:?}");
}

#[test]
fn a_paused_guest_stays_paused() {
    let fake = Fake::new(Way::Well);
    fake.model().status = "paused".to_owned();
    let saved = save_by(&fake, MAX, LONG).expect("saved");
    assert!(!saved.pause.was_running());
    saved.pause.check().expect("it stands still");
    is_as_before(&fake, "postmigrate");

    let fake = Fake::new(Way::Nonsense);
    fake.model().status = "paused".to_owned();
    save_by(&fake, MAX, LONG).expect_err("no state");
    is_as_before(&fake, "postmigrate");
}

#[test]
fn whoever_lets_the_guest_run_in_the_pause_is_noticed() {
    let fake = Fake::new(Way::Well);
    let saved = save_by(&fake, MAX, LONG).expect("saved");
    fake.say(r#"{"event": "RESUME"}"#);
    assert!(saved.pause.check().is_err(), "and was stopped again at once");
    assert!(resume(saved.pause).is_err());

    let saved = {
        fake.model().status = "running".to_owned();
        save_by(&fake, MAX, LONG).expect("saved")
    };
    fake.model().status = "running".to_owned();
    let error = resume(saved.pause).expect_err("it runs");
    assert!(format!("{error:#}").contains("let it run"), "{error:#}");
}

#[test]
fn what_goes_wrong_leaves_the_guest_running() {
    let table: [(Way, Bytes, Duration, &str); 12] = [
        (Way::Fails, MAX, LONG, "failed"),
        (Way::FailsLate, MAX, LONG, "failed"),
        (Way::Endless, MAX, LONG, "longer than 1 MiB"),
        (Way::Endless, Bytes::from_gib(64), Duration::from_millis(50), "too long"),
        (Way::Nothing, MAX, Duration::from_millis(200), "too long"),
        (Way::Nonsense, MAX, LONG, "something else"),
        (Way::Well, Bytes(10), LONG, "longer than 10 B"),
        (Way::Refuses("getfd"), MAX, LONG, "getfd"),
        (Way::Refuses("migrate"), MAX, LONG, "migrate"),
        (Way::Well, MAX, Duration::ZERO, "too long"),
        (Way::Silent("getfd"), MAX, LONG, "getfd"),
        (Way::Silent("migrate"), MAX, LONG, "migrate"),
    ];
    // Those who are silent take seconds.
    std::thread::scope(|scope| {
        for (way, max, within, text) in table {
            scope.spawn(move || {
                let fake = Fake::new(way);
                let error = save_by(&fake, max, within).expect_err("not saved");
                assert!(error.to_string().contains(text), "{way:?}: {error}");
                assert!(error.left.is_none(), "{way:?}: {:?}", error.left);
                is_as_before(&fake, "running");
            });
        }
    });
}

#[test]
fn what_cannot_be_undone_is_said_and_undone_later() {
    let fake = Fake::new(Way::Nothing);
    let error = std::thread::scope(|scope| {
        let saving = scope.spawn(|| save_by(&fake, MAX, Duration::from_millis(500)).expect_err("not saved"));
        while !fake.model().commands.iter().any(|command| command == "migrate") {
            std::thread::yield_now();
        }
        fake.gate.is_stuck.store(true, Ordering::SeqCst);
        saving.join().expect("saving")
    });
    let left = error.left.expect("the capability");
    assert!(format!("{left:#}").contains("the agent is away"), "{left:#}");
    assert_eq!(fake.capabilities(), ["events", "x-ignore-shared"]);
    fake.gate.is_stuck.store(false, Ordering::SeqCst);
    undo(&fake.monitor, &fake.gate, &[RunState::PostMigrate]).expect("undone");
    is_as_before(&fake, "running");
    // Again, for nothing: the gate stays shut.
    let opened = fake.gate.opened.load(Ordering::SeqCst);
    undo(&fake.monitor, &fake.gate, &[RunState::PostMigrate]).expect("nothing to undo");
    assert_eq!(fake.gate.opened.load(Ordering::SeqCst), opened);
}

#[test]
fn only_what_an_operation_paused_is_let_run() {
    let table: [(&str, &[RunState], &str); 5] = [
        ("postmigrate", &[RunState::PostMigrate], "running"),
        ("postmigrate", &[], "postmigrate"),
        ("paused", &[RunState::PostMigrate], "paused"),
        ("paused", &[RunState::PostMigrate, RunState::Paused], "running"),
        ("shutdown", &[RunState::PostMigrate, RunState::Paused], "shutdown"),
    ];
    for (status, paused, expected) in table {
        let fake = Fake::new(Way::Well);
        fake.model().status = status.to_owned();
        undo(&fake.monitor, &fake.gate, paused).expect("undone");
        assert_eq!(fake.model().status, expected, "{status} {paused:?}");
    }
}

#[test]
fn a_migration_of_somebody_elses_is_left_alone_unless_it_lacks_ram() {
    let fake = Fake::new(Way::Well);
    fake.model().migration = "active";
    undo(&fake.monitor, &fake.gate, &[RunState::PostMigrate]).expect("nothing to undo");
    assert_eq!(fake.model().migration, "active", "it has RAM");
    fake.model().on = ["x-ignore-shared".to_owned()].into();
    undo(&fake.monitor, &fake.gate, &[RunState::PostMigrate]).expect("undone");
    assert_eq!(fake.model().migration, "cancelled");
    // A guest that runs elsewhere by now is left alone, too.
    let fake = Fake::new(Way::Well);
    fake.model().migration = "completed";
    fake.model().status = "postmigrate".to_owned();
    fake.model().sent_pages = 95;
    undo(&fake.monitor, &fake.gate, &[RunState::PostMigrate]).expect("nothing to undo");
    assert_eq!(fake.model().status, "postmigrate");
}

#[test]
fn a_guest_that_its_user_has_paused_is_known_as_such_after_its_state_was_saved() {
    let table = [
        ("running", "none", 0, PauseKind::None),
        ("paused", "none", 0, PauseKind::Paused),
        ("paused", "completed", 95, PauseKind::Paused),
        ("postmigrate", "completed", 20, PauseKind::Saved),
        ("postmigrate", "cancelled", 20, PauseKind::Saved),
        ("postmigrate", "active", 20, PauseKind::Elsewhere),
        ("postmigrate", "completed", 95, PauseKind::Elsewhere),
        ("inmigrate", "none", 0, PauseKind::None),
        ("finish-migrate", "active", 20, PauseKind::None),
        ("shutdown", "none", 0, PauseKind::None),
    ];
    for (status, migration, sent_pages, expected) in table {
        let fake = Fake::new(Way::Well);
        (fake.model().status, fake.model().migration) = (status.to_owned(), migration);
        fake.model().sent_pages = sent_pages;
        assert_eq!(pause_of(&fake.monitor).expect("an answer"), expected, "{status} {migration} {sent_pages}");
        let is_pause = matches!(expected, PauseKind::Paused | PauseKind::Saved);
        assert_eq!(is_paused(&fake.monitor), is_pause, "{status} {migration} {sent_pages}");
    }
}

#[test]
fn a_gate_that_does_not_open_changes_nothing() {
    let fake = Fake::new(Way::Well);
    fake.gate.is_stuck.store(true, Ordering::SeqCst);
    let error = save_by(&fake, MAX, LONG).expect_err("not saved");
    assert!(error.to_string().contains("the agent is away"), "{error}");
    assert!(error.left.is_none());
    is_as_before(&fake, "running");
}

#[test]
fn what_speaks_against_a_snapshot_is_said() {
    let refusal = |change: &dyn Fn(&mut fake::Model)| {
        let fake = Fake::new(Way::Well);
        change(&mut fake.model());
        check(&fake.monitor).expect_err("refused")
    };
    let contains = |refusal: String, text: &str| assert!(refusal.contains(text), "{refusal}");
    contains(refusal(&|qemu| qemu.status = "postmigrate".into()), "cont");
    contains(refusal(&|qemu| qemu.status = "prelaunch".into()), "prelaunch");
    contains(refusal(&|qemu| qemu.shared = false), "start the VM anew");
    contains(refusal(&|qemu| qemu.migration = "active"), "under way");
    contains(refusal(&|qemu| qemu.more = json!({ "blocked-reasons": ["vfio", "nvme"] })), "vfio; nvme");
    contains(refusal(&|qemu| qemu.on = ["xbzrle".to_owned()].into()), "xbzrle");
    contains(refusal(&|qemu| qemu.more = json!({ "mode": "cpr-reboot" })), "cpr-reboot");
    // QEMU before 10.0 would abort: it has not taken its disks yet.
    contains(
        refusal(&|qemu| {
            qemu.on.insert("late-block-activate".into());
            qemu.status = "paused".into();
        }),
        "has not run since it came",
    );
    contains(refusal(&|qemu| qemu.more = json!({ "tls-creds": "tls0" })), "tls-creds");
    let fake = Fake::new(Way::Well);
    fake.model().on.insert("events".into());
    fake.model().on.insert("late-block-activate".into());
    check(&fake.monitor).expect("it has run since it came");
    disks_are_taken(&fake.monitor).expect("switched off");
    assert_eq!(fake.capabilities(), ["events"]);
    fake.model().migration = "completed";
    fake.model().status = "paused".into();
    check(&fake.monitor).expect("nothing of that is against it");
}
