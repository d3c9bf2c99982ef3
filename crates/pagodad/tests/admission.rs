//! What was promised to VMs is looked at by whatever could break it, on the daemon as it is run. The VMs are larger than the
//! swap disk, and nobody attaches to them: promises are made when a VM is.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pagoda_api::{Client, ClientError, CreateVm, ErrorCode, HostPatch, VmKind, VmPatch, VmSpec};

const GIB: u64 = 1 << 30;
/// A machine that is busy with other builds.
const WAIT_MAX: Duration = Duration::from_secs(60);

struct Daemon {
    dir: PathBuf,
    child: Child,
}

impl Daemon {
    fn start(dir: &Path, pool: u64) -> Daemon {
        let at = |name: &str| dir.join(name);
        configure(dir, pool);
        let log = File::options().append(true).create(true).open(at("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_pagodad"))
            .arg("--config")
            .arg(at("pagoda.toml"))
            .arg("--state-dir")
            .arg(at("state"))
            .arg("--socket")
            .arg(at("s"))
            // No VMM starts here, so nobody loads the shim.
            .args(["--shim", "/proc/self/exe"])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let daemon = Daemon { dir: dir.to_owned(), child };
        until("the daemon answers", || daemon.client().version().is_ok());
        daemon
    }

    fn client(&self) -> Client {
        Client::new(self.dir.join("s"))
    }

    fn reload(&self, pool: u64) {
        configure(&self.dir, pool);
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap()
    }

    fn pool(&self) -> u64 {
        self.client().host().unwrap().policy.pool_bytes
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn configure(dir: &Path, pool: u64) {
    std::fs::write(dir.join("pagoda.toml"), format!("[policy]\npool = \"{pool}B\"\n")).unwrap();
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < WAIT_MAX, "not so after {WAIT_MAX:?}: {what}");
        std::thread::yield_now();
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) {
    let error = result.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::NoRoom), "{error}");
    let text = error.to_string();
    assert!(text.contains("of swap are missing") && text.contains("the swap directory is /"), "{text}");
}

#[test]
fn swap_that_nobody_reserved_is_promised_by_no_command() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("admission-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let stat = rustix::fs::statvfs(&dir).unwrap();
    // Far beyond what the disk has, as others use it meanwhile.
    let memory = (3 * stat.f_bavail * stat.f_frsize).next_multiple_of(GIB);
    let (large, small) = (4 * memory, memory / 2);
    let daemon = Daemon::start(&dir, large);
    let client = daemon.client();
    let vm = |name: &str, dram: Option<u64>| CreateVm {
        name: name.into(),
        memory: vec![memory],
        kind: VmKind::Plain,
        spec: VmSpec { dram, ..VmSpec::default() },
        launch: None,
        outbox: None,
    };
    // In a pool that holds it whole, it needs no swap; with a low cap it would.
    client.create(&vm("big", None)).unwrap();
    refused(client.create(&vm("low", Some(memory / 8))));

    refused(client.patch_host(&HostPatch { pool: Some(small), ..HostPatch::default() }));
    assert_eq!(daemon.pool(), large, "refused, and yet changed");
    refused(client.patch("big", &VmPatch { dram: Some(memory / 8), ..VmPatch::default() }));
    assert_eq!(client.vm("big").unwrap().dram_limit_bytes, memory, "refused, and yet changed");
    daemon.reload(small);
    until("the refusal of the configuration is in the log", || daemon.log().contains("of swap are missing"));
    assert_eq!(daemon.pool(), large, "refused, and yet changed");
    client.patch("big", &VmPatch { dram: Some(memory / 10 * 9), ..VmPatch::default() }).unwrap();
    let problems = client.health().unwrap().problems;
    assert!(!problems.iter().any(|problem| problem.contains("missing")), "{problems:?}");
    client.patch("big", &VmPatch { dram: Some(memory), ..VmPatch::default() }).unwrap();

    // Whoever is there when a daemon begins stays, and that it is short is said.
    drop(daemon);
    let daemon = Daemon::start(&dir, small);
    let client = daemon.client();
    assert_eq!(client.vm("big").unwrap().dram_limit_bytes, memory);
    assert!(daemon.log().contains("the VMs that run stay, but the guarantees are not kept"), "{}", daemon.log());
    let health = client.health().unwrap();
    assert!(health.problems.iter().any(|problem| problem.contains("of swap are missing")), "{health:?}");
    // What makes nothing worse goes on.
    client.patch("big", &VmPatch { shares: Some(7), ..VmPatch::default() }).unwrap();
    drop(daemon);
    std::fs::remove_dir_all(dir).unwrap();
}

/// `pagoda run` of a program that ends before it maps its memory, and the same command again.
#[test]
fn the_name_of_a_vm_that_did_not_start_is_free_at_once() {
    const MADE: &str = "ADMISSION_TEST_MADE";
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("same-name-{}", std::process::id()));
    if let Ok(made) = std::env::var(MADE) {
        // This is the program: it says that it becomes the program, as `pagoda run` does, and ends.
        return drop(pagoda_api::attach::fetch(&serde_json::from_str(&made).unwrap()).unwrap());
    }
    std::fs::create_dir_all(&dir).unwrap();
    let daemon = Daemon::start(&dir, GIB);
    let vm = CreateVm {
        name: "again".into(),
        memory: vec![64 << 20],
        kind: VmKind::Plain,
        spec: VmSpec::default(),
        launch: None,
        outbox: None,
    };
    for _ in 0..10 {
        let made = daemon.client().create(&vm).unwrap();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_name_of_a_vm_that_did_not_start_is_free_at_once"])
            .env(MADE, serde_json::to_string(&made).unwrap())
            .stdout(Stdio::null())
            .status();
        assert!(status.unwrap().success());
    }
    // One that may still come keeps its name.
    daemon.client().create(&vm).unwrap();
    assert_eq!(daemon.client().create(&vm).unwrap_err().code(), Some(ErrorCode::NameTaken));
    drop(daemon);
    std::fs::remove_dir_all(dir).unwrap();
}
