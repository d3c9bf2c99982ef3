use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
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
    monitor.hold(Hold::Lasting);
    monitor.execute("query-balloon").expect("a guest that runs");
    monitor.execute("query-kvm").expect("the answer that was under way");
    let error = monitor.execute("query-balloon").expect_err("left alone");
    assert!(format!("{error:#}").contains("shut down"));
    drop(monitor);
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
    monitor.hold(Hold::Lasting);
    assert_eq!(monitor.execute("b").expect("answered"), 1);
    assert!(monitor.execute_with("c", json!({ "x": 1 })).is_err());
    // A refusal is no reason to hang up.
    assert_eq!(monitor.execute("d").expect("answered"), 3);
    assert_eq!(monitor.events(), Events { resets: 1, balloon_changes: 2, shutdown: None });
    monitor.hold(Hold::Short);
    monitor.execute("e").expect("answered");
    assert_eq!(monitor.events().resets, 1, "they outlive the connection");
    assert_eq!(thread.join().expect("server"), 3);
}

#[test]
fn a_lost_connection_is_made_anew() {
    let (_dir, monitor, thread) = serve(&[&[READY, READY], &[READY, &[r#"{"return": 2}"#]]]);
    monitor.hold(Hold::Lasting);
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
    monitor.hold(Hold::Lasting);
    monitor.execute("a").expect("answered");
    while monitor.events().resets == 0 {
        monitor.wait(&wake, LONG);
    }
    thread.join().expect("server");
}
