use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Dir {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pagoda-qmp-{}-{next}", std::process::id()));
        std::fs::create_dir(&path).expect("make directory");
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A monitor that answers each command of each of its clients by the next lines; `None`: that client is hung up on.
fn serve(clients: &'static [&'static [&'static [&'static str]]]) -> (Dir, Monitor, JoinHandle<usize>) {
    let dir = Dir::new();
    let path = dir.0.join("qmp");
    let listener = UnixListener::bind(&path).expect("bind");
    let thread = std::thread::spawn(move || {
        for answers in clients {
            let (mut stream, _) = listener.accept().expect("accept");
            let mut commands = BufReader::new(stream.try_clone().expect("clone")).lines();
            writeln!(stream, "{GREETING}").expect("write");
            for lines in *answers {
                commands.next().expect("a command").expect("read");
                for line in *lines {
                    writeln!(stream, "{line}").expect("write");
                }
            }
            if answers.len() > 2 {
                // Until the client goes.
                assert!(commands.next().is_none_or(|line| line.is_err()), "another command");
            }
        }
        clients.len()
    });
    let monitor = Monitor::new(&path);
    (dir, monitor, thread)
}

const READY: &[&str] = &[r#"{"return": {}}"#];

#[test]
fn events_between_are_passed_over() {
    let (_dir, monitor, thread) =
        serve(&[&[READY, &[r#"{"event": "STOP", "timestamp": {}}"#, r#"{"return": {"enabled": false}}"#]]]);
    assert_eq!(monitor.accelerator().as_deref(), Some("tcg"));
    thread.join().expect("server");
}

#[test]
fn a_guest_that_was_shut_down_is_left_alone() {
    const ENDS: &[&str] = &[r#"{"event": "SHUTDOWN", "data": {"guest": true}}"#, r#"{"return": {"enabled": false}}"#];
    let (_dir, monitor, thread) = serve(&[&[READY, READY, ENDS]]);
    let held = Held::new(&monitor);
    monitor.execute("query-balloon").expect("a guest that runs");
    monitor.execute("query-kvm").expect("the answer that was under way");
    let error = monitor.execute("query-balloon").expect_err("left alone");
    assert!(format!("{error:#}").contains("shut down"));
    drop(held);
    thread.join().expect("server");
}

#[test]
fn an_error_is_passed_on_and_a_stranger_refused() {
    let (_dir, monitor, thread) =
        serve(&[&[READY, &[r#"{"error": {"class": "DeviceNotActive", "desc": "no such thing"}}"#]]]);
    let error = monitor.execute("query-balloon").expect_err("refused");
    assert!(format!("{error:#}").contains("no such thing"));
    assert_eq!(error.downcast_ref::<Refused>().map(|refused| refused.class.as_str()), Some("DeviceNotActive"));
    thread.join().expect("server");

    let dir = Dir::new();
    let listener = UnixListener::bind(dir.0.join("qmp")).expect("bind");
    let thread = std::thread::spawn(move || writeln!(listener.accept().expect("accept").0, "HTTP/1.1 200 OK"));
    assert!(Monitor::new(&dir.0.join("qmp")).execute("stop").is_err());
    thread.join().expect("server").expect("write");
}

#[test]
fn a_held_connection_serves_all_and_collects_events() {
    const RESET: &str = r#"{"event": "RESET", "data": {"guest": true}}"#;
    const CHANGE: &str = r#"{"event": "BALLOON_CHANGE", "data": {"actual": 1}}"#;
    let (_dir, monitor, thread) = serve(&[
        &[READY, READY],
        &[
            READY,
            &[RESET, r#"{"return": 1}"#, CHANGE],
            &[CHANGE, r#"{"error": {"desc": "no"}}"#],
            &[r#"{"return": 3}"#],
        ],
        &[READY, READY],
    ]);
    // Short: a client for itself.
    monitor.execute("a").expect("answered");
    let (held, other) = (Held::new(&monitor), Held::new(&monitor));
    assert_eq!(monitor.execute("b").expect("answered"), 1);
    assert!(monitor.execute_with("c", json!({ "x": 1 })).is_err());
    // A refusal is no reason to hang up, nor that one of two lets go.
    drop(other);
    assert_eq!(monitor.execute("d").expect("answered"), 3);
    assert_eq!(monitor.events(), Events { resets: 1, balloon_changes: 2, ..Events::default() });
    drop(held);
    monitor.execute("e").expect("answered");
    assert_eq!(monitor.events().resets, 1, "they outlive the connection");
    assert_eq!(thread.join().expect("server"), 3);
}

#[test]
fn a_lost_connection_is_made_anew() {
    let (_dir, monitor, thread) = serve(&[&[READY, READY], &[READY, &[r#"{"return": 2}"#]]]);
    let _held = Held::new(&monitor);
    monitor.execute("a").expect("answered");
    // The first client was hung up on.
    assert!(monitor.execute("b").is_err());
    assert_eq!(monitor.execute("b").expect("answered"), 2);
    thread.join().expect("server");
}

#[test]
fn waiting_ends_by_word_of_qemu_or_by_a_wake() {
    let (_dir, monitor, thread) = serve(&[&[READY, &[r#"{"return": {}}"#, r#"{"event": "RESET"}"#]]]);
    let wake = Wake::new().expect("eventfd");
    const LONG: Duration = Duration::from_secs(3600);
    wake.wake();
    monitor.wait(&wake, LONG);
    let _held = Held::new(&monitor);
    monitor.execute("a").expect("answered");
    while monitor.events().resets == 0 {
        monitor.wait(&wake, LONG);
    }
    thread.join().expect("server");
}

#[test]
fn stops_and_migrations_are_noted_with_their_times() {
    let check = |line: &str, expected: Events| {
        let mut events = Events::default();
        events.note(&serde_json::from_str(line).expect("JSON"));
        assert_eq!(events, expected, "{line}");
    };
    let at =
        |event: &str| format!(r#"{{"event": "{event}", "timestamp": {{"seconds": 1700000000, "microseconds": 42}}}}"#);
    let time = Some(QemuTime(1_700_000_000_000_042));
    check(&at("STOP"), Events { stops: 1, last_stop: time, ..Events::default() });
    check(&at("RESUME"), Events { resumes: 1, last_resume: time, ..Events::default() });
    let unknown = r#"{"event": "STOP", "timestamp": {"seconds": -1, "microseconds": -1}}"#;
    check(unknown, Events { stops: 1, ..Events::default() });
    let huge = r#"{"event": "STOP", "timestamp": {"seconds": 18446744073709551615, "microseconds": 0}}"#;
    check(huge, Events { stops: 1, ..Events::default() });
    let words = [
        ("setup", MigrationStatus::UnderWay),
        ("pre-switchover", MigrationStatus::UnderWay),
        ("a newer word", MigrationStatus::UnderWay),
        ("cancelled", MigrationStatus::Cancelled),
        ("failed", MigrationStatus::Failed),
        ("completed", MigrationStatus::Completed),
    ];
    for (word, status) in words {
        let line = format!(r#"{{"event": "MIGRATION", "data": {{"status": "{word}"}}}}"#);
        check(&line, Events { migration_changes: 1, migration: Some(status), ..Events::default() });
    }
    assert_eq!(QemuTime(5).us_since(QemuTime(2)), 3);
    assert_eq!(QemuTime(2).us_since(QemuTime(5)), 0, "the clock was set back");
}

#[test]
fn events_are_waited_for_until_they_come_or_cannot() {
    const STOPS: &[&str] = &[r#"{"return": {}}"#, r#"{"event": "STOP"}"#];
    let (_dir, monitor, thread) = serve(&[&[READY, STOPS]]);
    let _held = Held::new(&monitor);
    let deadline = Instant::now() + Duration::from_secs(3600);
    monitor.execute("a").expect("answered");
    assert!(monitor.wait_for(deadline, |events| events.stops == 1));
    assert!(!monitor.wait_for(Instant::now(), |events| events.stops == 2), "the time is over");
    // The server has hung up.
    thread.join().expect("server");
    assert!(!monitor.wait_for(deadline, |events| events.stops == 2));
}
