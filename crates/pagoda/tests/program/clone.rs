//! Clones on the command line, against the small daemon.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use pagoda_api::CloneRequest;
use rustix::process::{Pid, Signal, getpgid, getsid, kill_process};

use crate::cli::{err, fake_qemu, out};
use crate::daemon::FakeDaemon;

/// A QEMU that runs, and writes down its number under its VM's name, unless that is `job-slow`.
fn lasting_qemu(daemon: &FakeDaemon) {
    let path = daemon.dir.join("qemu-system-x86_64");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 10.0.2 (fake)' && exit\n\
         for word; do [ \"$last\" = -name ] && name=${{word#guest=}}; last=$word; done\n\
         echo \"$*\"\n[ $name = job-slow ] || echo $$ > {0}/$name.new && mv {0}/$name.new {0}/$name.pid 2>/dev/null\n\
         exec sleep 600\n",
        daemon.dir.display()
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

fn pid_of(daemon: &FakeDaemon, vm: &str) -> Option<Pid> {
    let text = std::fs::read_to_string(daemon.dir.join(format!("{vm}.pid"))).ok()?;
    Pid::from_raw(text.trim().parse().unwrap())
}

fn requests(daemon: &FakeDaemon) -> Vec<CloneRequest> {
    let of_clone =
        |(line, body): &(String, String)| (line == "POST /v1/clones").then(|| serde_json::from_str(body).unwrap());
    daemon.asked().iter().filter_map(of_clone).collect()
}

fn clone(daemon: &FakeDaemon, words: &[&str]) -> Command {
    let mut command = daemon.pagoda(&[&["vm", "clone"], words].concat());
    command.arg("--log-dir").arg(daemon.dir.join("logs"));
    command
}

fn logs(daemon: &FakeDaemon) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(daemon.dir.join("logs")) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn clones_run_in_the_background() {
    let daemon = FakeDaemon::start("clones");
    lasting_qemu(&daemon);
    let hook = r#"echo "hook $PAGODA_VM $PAGODA_INDEX $PAGODA_SOURCE $PAGODA_QEMU_PID"; test $PAGODA_INDEX != 8"#;
    let words = ["web1/bare", "--count", "2", "--name", "job-%02d", "--first", "7", "--dram", "256M", "--run", hook];
    let output = clone(&daemon, &words).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let (said, table) = (err(&output), out(&output));
    let mut lines = table.lines();
    assert_eq!(lines.next().unwrap().split_whitespace().collect::<Vec<_>>(), ["NAME", "PID", "RUNS", "AFTER"]);
    assert!(said.contains("no vmgenid device"), "{said}");
    assert!(said.contains("warning: the hook of job-08 ended with exit status: 1"), "{said}");
    assert!(!said.contains("the hook of job-07"), "{said}");
    for name in ["job-07", "job-08"] {
        let pid = pid_of(&daemon, name).unwrap();
        let number = pid.as_raw_nonzero();
        assert!(lines.next().unwrap().starts_with(&format!("{name}  ")), "{table}");
        assert!(said.contains(&format!("hook {name} {} web1/bare {number}\n", &name[5..])), "{said}");
        assert_eq!((getsid(Some(pid)), getpgid(Some(pid))), (Ok(pid), Ok(pid)), "it has a session of its own");
        let log = std::fs::read_to_string(daemon.dir.join(format!("logs/{name}.log"))).unwrap();
        let expected =
            format!("-name guest={name} -nodefaults -serial unix:/run/web1.serial.{name},server=on,wait=off");
        assert!(log.contains(&expected) && log.contains(" -S -incoming defer "), "{log}");
        kill_process(pid, Signal::KILL).unwrap();
    }
    let request = requests(&daemon).pop().unwrap();
    assert_eq!((request.from.to_string().as_str(), request.dram), ("web1/bare", Some(256 << 20)));
    let words = request.clones[1].words.join(" ");
    assert_eq!(
        words, "-M q35 -m 1G -name guest=job-08 -nodefaults -serial unix:/run/web1.serial.job-08,server=on,wait=off",
        "what starts it anew"
    );
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("DELETE")), "they stay");
}

#[test]
fn of_a_vm_a_snapshot_is_taken() {
    let daemon = FakeDaemon::start("clone-vm");
    lasting_qemu(&daemon);
    let output = clone(&daemon, &["web1", "--name", "job-one", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    kill_process(pid_of(&daemon, "job-one").unwrap(), Signal::KILL).unwrap();
    let from = requests(&daemon).pop().unwrap().from;
    assert!(from.vm == "web1" && from.name.starts_with("clone-2"), "{from}");
    let said = format!("the clones begin with the snapshot {from}, which stays\n");
    assert!(err(&output).contains(&said), "{}", err(&output));
    let printed: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!((&printed["from"], &printed["clones"][0]["name"]), (&from.to_string().into(), &"job-one".into()));
    assert!(printed["clones"][0]["started_ms"].as_u64().is_some(), "{printed}");
}

#[test]
fn nothing_is_left_of_clones_that_do_not_start() {
    let daemon = FakeDaemon::start("clone-fails");
    // It prints its words and ends.
    fake_qemu(&daemon);
    let output = clone(&daemon, &["web1", "--count", "2", "--name", "job-%d"]).output().unwrap();
    let said = err(&output);
    assert_eq!(output.status.code(), Some(7), "{said}");
    for part in ["no clone is left", "the QEMU of job-", "ended with exit status: 0", "-incoming\ndefer"] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    let asked = daemon.asked();
    let deleted = |what: &str| asked.iter().any(|(line, _)| line.starts_with("DELETE ") && line.contains(what));
    assert!(deleted("/v1/vms/job-1") && deleted("/v1/vms/job-2"), "{asked:?}");
    assert!(deleted("/v1/snapshots/web1/clone-"), "the snapshot was taken for them: {asked:?}");
    assert_eq!(logs(&daemon), [""; 0]);
}

#[test]
fn an_interrupted_command_ends_its_clones() {
    let daemon = FakeDaemon::start("clone-interrupted");
    lasting_qemu(&daemon);
    let mut command = clone(&daemon, &["web1/bare", "--name", "job-slow"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let log = daemon.dir.join("logs/job-slow.log");
    while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains("-incoming")) {
        assert!(child.try_wait().unwrap().is_none(), "it waits for its clone");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", err(&output));
    assert!(err(&output).contains("interrupted"), "{}", err(&output));
    let asked: Vec<String> = daemon.asked().into_iter().map(|(line, _)| line).collect();
    // It has not attached, so there is no note of a crash that would be its own.
    assert!(asked.ends_with(&["DELETE /v1/vms/job-slow".into()]), "{asked:?}");
    assert_eq!(logs(&daemon), [""; 0]);
}

#[test]
fn what_is_wrong_is_seen_before_anything_is_made() {
    let daemon = FakeDaemon::start("unclonable");
    let check = |words: &[&str], status: i32, expected: &str| {
        let output = clone(&daemon, words).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", err(&output));
        let said = format!("{}{}", err(&output), out(&output));
        assert!(said.contains(expected), "{words:?}: {said}");
    };
    check(&["web1/bare", "--name", "job"], 6, "qemu-system-x86_64 does not exist");
    fake_qemu(&daemon);
    check(&["web1/bare", "--name", "%s"], 2, "is no pattern of names");
    check(&["web1/bare", "--name", "job", "--count", "2"], 2, "2 clones cannot all be called job");
    check(&["web1/bare", "--name", "job", "--count", "0"], 2, "--count");
    check(&["web1/bare", "--name", "web%d"], 6, "a VM named web1 exists");
    check(&["web1/one", "--name", "job"], 6, "MAC address");
    check(&["web1/other", "--name", "job"], 6, "run this command as that user");
    check(&["web1/bare", "--name", "job", "--dram", "2G"], 6, "more than the VM's memory");
    check(&["web1/two", "--name", "job"], 4, "no snapshot of that name");
    check(&["web2", "--name", "job"], 4, "no VM of that name");
    check(&["web1/bare", "--name", "job-%d", "--count", "3", "--dry-run"], 0, "clones         3: job-1 job-2 job-3\n");
    check(&["web1", "--name", "job", "--dry-run", "--json"], 0, "\"fits\": true");
    assert_eq!(requests(&daemon), []);
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("POST /v1/vms")), "nothing was taken or made");
    check(&["web1/bare", "--name", "large-%d", "--count", "2"], 5, "large-2: 1 GiB is missing");
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("DELETE")));
    assert_eq!(logs(&daemon), [""; 0]);
}
