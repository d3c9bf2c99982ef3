//! What users see of `pagoda pool try`, a pool of its own for one disk.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::pool::{Running, program, text};
use crate::qemu_io;
use crate::rig::until;

/// A directory for the socket, and the trial.
fn start(name: &str) -> (PathBuf, Running, String) {
    let dir = std::env::temp_dir().join(format!("pagoda-disk-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let socket = dir.join("nbd.sock");
    let trial = Running::start(&dir, &["pool", "try", "--size", "64M", "--nbd", socket.to_str().unwrap()]);
    until("a socket", || socket.exists());
    let uri = format!("nbd+unix:///try?socket={}", socket.display());
    (dir, trial, uri)
}

fn pids(trial: &Value) -> Vec<Pid> {
    let pid = |server: &Value| Pid::from_raw(server["pid"].as_i64().unwrap() as i32).unwrap();
    trial["servers"].as_array().unwrap().iter().map(pid).collect()
}

/// A process that has ended has no words, even if nobody has waited for it.
fn runs(pid: Pid) -> bool {
    std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).is_ok_and(|words| !words.is_empty())
}

#[test]
fn a_trial_survives_a_server_and_leaves_nothing() {
    let (dir, trial, uri) = start("trial");
    let trial_dir = trial.ready["dir"].as_str().unwrap().to_owned();
    let servers = pids(&trial.ready);
    assert_eq!(servers.len(), 2);
    qemu_io(&uri, &["write -P 0xa7 0 8M", "flush"]);
    rustix::process::kill_process(servers[0], Signal::KILL).unwrap();
    qemu_io(&uri, &["read -P 0xa7 0 8M", "write -P 0x5b 1M 1M", "read -P 0x5b 1M 1M"]);
    assert_eq!(trial.stop(), Some(0));
    assert!(!runs(servers[1]));
    assert!(!Path::new(&trial_dir).exists());
    std::fs::remove_dir_all(dir).unwrap();
}

/// Its servers, which nobody else would end, go when it is killed.
#[test]
fn a_trial_that_is_killed_leaves_no_process() {
    let (dir, trial, _) = start("killed-trial");
    let trial_dir = trial.ready["dir"].as_str().unwrap().to_owned();
    let servers = pids(&trial.ready);
    drop(trial);
    until("the end of its servers", || !servers.iter().any(|server| runs(*server)));
    std::fs::remove_dir_all(trial_dir).unwrap();
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_trial_that_cannot_start_says_why_and_leaves_nothing() {
    let tried = |words: &[&str]| {
        let dir = std::env::temp_dir().join(format!("pagoda-no-trial-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let output = Command::new(program()).args(["pool", "try"]).args(words).env("TMPDIR", &dir).output().unwrap();
        std::fs::remove_dir(&dir).expect("nothing is left in it");
        (output.status.code(), text(&output.stderr))
    };
    let (status, said) = tried(&["--size", "16T"]);
    assert!(status == Some(1) && said.contains("give less"), "{status:?} {said}");
    let (status, said) = tried(&["--size", "5000B"]);
    assert!(status == Some(2) && said.contains("4096"), "{status:?} {said}");
    let (status, said) = tried(&["--servers", "1"]);
    assert!(status == Some(2) && said.contains("2..=16"), "{status:?} {said}");
}
