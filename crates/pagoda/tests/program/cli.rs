//! The program as users run it, against a small daemon in a thread of the test.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use crate::daemon::FakeDaemon;
use pagoda_api::VmKind;

pub fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_plain_program_gets_its_memory() {
    let daemon = FakeDaemon::start("plain");
    let script = "echo $PAGODA_RAM $PAGODA_TOKEN $PAGODA_ATTACH; readlink /proc/self/fd/* | grep memfd; \
                  echo $LD_PRELOAD; exit 7";
    let words = [
        "run",
        "--plain",
        "--name",
        "toy",
        "--memory",
        "128M",
        "--dram",
        "64M",
        "--min",
        "32M",
        "--shares",
        "2000",
        "--share-group",
        "t1",
        "--",
        "sh",
        "-c",
        script,
    ];
    let output = daemon.pagoda(&words).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "the status is the program's: {}", err(&output));
    let text = out(&output);
    let lines: Vec<&str> = text.lines().collect();
    let words: Vec<&str> = lines[0].split(' ').collect();
    assert_eq!(words[0], "/proc/pagoda-shim/ram0");
    assert_eq!(words[1], "30313233343536373839616263646566");
    assert_eq!(words[2], daemon.dir.join("attach").to_str().unwrap());
    assert_eq!(lines[1], daemon.dir.join("shim.so").to_str().unwrap(), "it inherits no RAM");

    let vm = daemon.created().unwrap();
    assert_eq!((vm.name.as_str(), vm.kind, vm.spec.dram), ("toy", VmKind::Plain, Some(64 << 20)));
    assert_eq!(vm.memory, [128 << 20]);
    let settings = vm.spec.policy;
    let policy = (settings.min, settings.shares, settings.sampling, vm.spec.share_group.as_deref());
    assert_eq!(policy, (32 << 20, Some(2000), None, Some("t1")));
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("DELETE")));
}

/// A QEMU that prints its arguments.
pub fn fake_qemu(daemon: &FakeDaemon) -> String {
    fake_qemu_of(daemon, "10.0.2")
}

/// One that says this version, and else the words that it is given.
pub fn fake_qemu_of(daemon: &FakeDaemon, version: &str) -> String {
    let path = daemon.dir.join("qemu-system-x86_64");
    let say = format!("[ \"$1\" = --version ] && echo \"QEMU emulator version {version} (fake)\" && exit");
    std::fs::write(&path, format!("#!/bin/sh\n{say}\nfor word; do echo \"$word\"; done\n")).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path.to_str().unwrap().into()
}

#[test]
fn qemu_gets_its_options_rewritten() {
    let daemon = FakeDaemon::start("qemu");
    let qemu = fake_qemu(&daemon);
    let words = ["run", "--dram", "1G", "--", &qemu, "-name", "web1", "-m", "4G", "-device", "vfio-pci,host=01:00.0"];
    let output = daemon.pagoda(&words).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    assert!(err(&output).contains("stays in DRAM"), "{}", err(&output));
    let text = out(&output);
    assert!(text.contains("\n-object\nqom-type=memory-backend-file,id=pc.ram,"), "{text}");
    assert!(text.contains("mode=control"), "{text}");
    let vm = daemon.created().unwrap();
    assert_eq!((vm.name.as_str(), vm.memory), ("web1", vec![4 << 30]));
    // The user's own words, from which it can be started again.
    let launch = vm.launch.unwrap();
    assert_eq!(launch.program, qemu);
    assert_eq!(launch.words, [&words[5..], &["-device", "vmgenid,guid=auto"]].concat());
    assert_eq!(launch.cwd, std::env::current_dir().unwrap().to_str().unwrap());
    assert!(launch.unstartable.is_empty(), "{:?}", launch.unstartable);
    assert!(vm.spec.pinned.unwrap().contains("vfio-pci"));
}

#[test]
fn a_shim_without_the_gate_gets_no_qemu() {
    let daemon = FakeDaemon::start("older");
    std::fs::write(daemon.dir.join("shim.so"), "another library").unwrap();
    let qemu = fake_qemu(&daemon);
    let output = daemon.pagoda(&["run", "--name", "web1", "--", &qemu, "-m", "1G"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    assert!(err(&output).contains("older than this command"), "{}", err(&output));
    assert_eq!(daemon.asked().last().unwrap().0, "DELETE /v1/vms/web1");
}

#[test]
fn libvirts_emulator() {
    let daemon = FakeDaemon::start("emulator");
    let qemu = fake_qemu(&daemon);
    let emulator = |words: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_pagoda"))
            .arg0("/usr/bin/pagoda-qemu")
            .args(words)
            .env("PAGODA_SOCKET", daemon.socket())
            .env("PAGODA_QEMU", &qemu)
            .output()
            .unwrap()
    };
    let probe = ["-S", "-no-user-config", "-nodefaults", "-nographic", "-machine", "none,accel=kvm:tcg", "-daemonize"];
    let output = emulator(&probe);
    assert_eq!(out(&output), probe.join("\n") + "\n", "{}", err(&output));
    assert!(daemon.asked().is_empty());

    let json = r#"{"qom-type":"memory-backend-ram","id":"pc.ram","size":805306368}"#;
    let output = emulator(&[
        "-name",
        "guest=web1,debug-threads=on",
        "-machine",
        "pc-q35-7.2,usb=off,memory-backend=pc.ram",
        "-m",
        "768",
        "-object",
        json,
        "-fw_cfg",
        "name=opt/org.pagoda/dram,string=192M",
    ]);
    assert!(output.status.success(), "{}", err(&output));
    assert!(out(&output).contains(r#""qom-type":"memory-backend-file""#), "{}", out(&output));
    assert!(!out(&output).contains("fw_cfg"));
    let vm = daemon.created().unwrap();
    assert_eq!((vm.name.as_str(), vm.spec.dram), ("web1", Some(192 << 20)));

    let output = emulator(&["-m", "768"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(err(&output).contains("add -name"));
}

#[test]
fn nothing_is_made_when_something_is_wrong() {
    let daemon = FakeDaemon::start("wrong");
    let qemu = fake_qemu(&daemon);
    let check = |words: &[&str], status: i32, expected: &str| {
        let output = daemon.pagoda(words).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", err(&output));
        assert!(err(&output).contains(expected), "{words:?}: {}", err(&output));
    };
    check(&["run", "--name", "a", "--", "/bin/true"], 2, "--plain");
    check(&["run", "--name", "a", "--", "/no/qemu-system-x86_64", "-m", "1G"], 1, "does not exist");
    check(&["run", "--name", "a", "--memory", "2G", "--", &qemu, "-m", "1G"], 2, "let them agree");
    check(&["run", "--name", "a", "--dram", "2G", "--", &qemu, "-m", "1G"], 2, "more than the VM's memory");
    check(&["run", "--name", "a", "--dram", "1M", "--", &qemu, "-m", "1G"], 2, "the least is 64 MiB");
    check(&["run", "--name", "a/b", "--", &qemu, "-m", "1G"], 2, "has '/'");
    check(&["run", "--", &qemu, "-m", "1G"], 2, "has no name");
    check(&["run", "--name", "a", "--", &qemu, "-mem-prealloc"], 2, "--reserve-swap");
    check(&["run", "--name", "a", "--", &qemu, "--version"], 2, "without pagoda");
    check(&["run", "--plain", "--name", "a", "--memory", "3M", "--", "true"], 2, "2 MiB");
    assert!(daemon.asked().is_empty(), "{:?}", daemon.asked());

    check(&["run", "--name", "taken", "--", &qemu, "-m", "1G"], 1, "choose another name");
}

#[test]
fn a_vm_whose_program_does_not_start_is_given_up() {
    let daemon = FakeDaemon::start("exec");
    let program = daemon.dir.join("broken");
    std::fs::write(&program, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let words = ["run", "--plain", "--name", "toy", "--memory", "64M", "--", program.to_str().unwrap()];
    let output = daemon.pagoda(&words).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", err(&output));
    assert!(err(&output).contains("start "), "{}", err(&output));
    assert_eq!(daemon.asked().last().unwrap().0, "DELETE /v1/vms/toy");

    std::fs::remove_file(daemon.dir.join("shim.so")).unwrap();
    let output = daemon.pagoda(&["run", "--plain", "--name", "b", "--memory", "64M", "--", "true"]).output().unwrap();
    assert!(err(&output).contains("as the shim"), "{}", err(&output));
    assert_eq!(daemon.asked().last().unwrap().0, "DELETE /v1/vms/b");
}

#[test]
fn tables_and_json() {
    let daemon = FakeDaemon::start("show");
    let check = |words: &[&str], expected: &str| {
        let output = daemon.pagoda(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", err(&output));
        assert!(out(&output).contains(expected), "{words:?}: {}", out(&output));
    };
    check(&["ls"], "web1  running     4G");
    check(&["host", "show"], "state          high for 7 s");
    check(&["vm", "mrc", "web1"], "| target 1G, where 0.750 would miss");
    check(&["vm", "mrc", "web1", "--json"], "\"miss_ratio\": 1.0");
    check(&["ls", "--json"], "\"resident_bytes\": 1073741824");
    check(&["vm", "show", "web1"], "resident       1G");
    check(&["vm", "explain", "web1"], "--dram 1G");
    check(&["vm", "set", "web1", "--dram", "2G", "--json"], "\"name\": \"web1\"");
    assert_eq!(daemon.asked().last().unwrap().1, r#"{"dram":2147483648}"#);
    check(&["vm", "set", "web1", "--dram", "all"], "web1");
    assert_eq!(daemon.asked().last().unwrap().1, r#"{"dram":4294967296}"#);
    check(&["vm", "set", "web1", "--shares", "4000", "--min", "1G", "--dram", "all", "--sample-pages", "50"], "web1");
    let body = r#"{"dram":4294967296,"min":1073741824,"shares":4000,"sampling":{"pages":50,"period_s":30}}"#;
    assert_eq!(daemon.asked().last().unwrap().1, body);
    check(&["host", "set", "--idle-tax", "50%", "--pool", "6G", "--thresholds", "6,4,2,0.5"], "host1");
    let set = daemon.asked().into_iter().find(|(line, _)| line == "PATCH /v1/host").unwrap();
    assert_eq!(set.1, r#"{"pool":6442450944,"idle_tax":500,"thresholds":[60,40,20,5]}"#);
    check(&["whatif", "web1", "--dram", "2G", "--shares", "3000"], "page-ins       12.5/s     3.0/s");
    assert_eq!(daemon.asked().last().unwrap().1, r#"{"dram":2147483648,"shares":3000}"#);
    check(&["admit", "--memory", "8G", "--min", "1G"], "admitted       yes");
    assert_eq!(daemon.asked().last().unwrap().1, r#"{"memory_bytes":8589934592,"dram":null,"min":1073741824}"#);
    check(&["top", "--batch", "1", "--interval", "0.1"], "state high for 7 s  pool 6G");
    check(&["top", "--batch", "1", "--interval", "0.1"], "web1  running     4G");
    check(&["top", "--batch", "2", "--interval", "0.1", "--json"], "\"faults_per_s\":0.0");
    check(&["top", "--interval", "0.1", "--svg", "-"], "faults of web1");
    check(&["completion", "bash"], "_pagoda()");
}

#[test]
fn a_scenario_is_simulated_and_drawn() {
    let daemon = FakeDaemon::start("simulate");
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios/idle-tax.toml");
    let plot = daemon.dir.join("out.svg");
    let output = daemon.pagoda(&["simulate", scenario, "--plot", plot.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    assert!(out(&output).contains("dbench") && out(&output).contains("high "), "{}", out(&output));
    assert!(std::fs::read_to_string(&plot).unwrap().ends_with("</svg>\n"));
    let output = daemon.pagoda(&["simulate", scenario, "--json"]).output().unwrap();
    assert!(out(&output).contains("\"pool_bytes\": 404750336"), "{}", out(&output));

    let check = |text: &str, expected: &str| {
        let bad = daemon.dir.join("bad.toml");
        std::fs::write(&bad, text).unwrap();
        let unmade = daemon.dir.join("unmade.svg");
        let words = ["simulate", bad.to_str().unwrap(), "--plot", unmade.to_str().unwrap()];
        let output = daemon.pagoda(&words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", err(&output));
        assert!(err(&output).contains(expected), "{}", err(&output));
        assert!(!unmade.exists());
    };
    check("title = 1", "invalid type");
    check("title = \"a\"\nduration = \"5m\"\n[host]\npool = \"1G\"\n", "add one");
    assert!(daemon.asked().is_empty(), "no daemon takes part");
}

#[test]
fn rounds_of_a_daemon_are_replayed() {
    const HEADER: &str = r#"{"pagoda_policy_recording":1,"seed":7,"host":{"pool":262144,"tax":750,"thresholds":[60,40,20,10,5],"rate_page_out":131072,"rate_balloon":65536}}"#;
    const ROUND: &str = r#"{"now_ms":5,"memory":{"total":4294967296,"available":4294967296},"vms":[],"plan":{"state":"high","pool":262144,"used":0,"free":262144,"budget":243793,"need":0,"shortfall":0,"restrained":false,"stuck":false,"vms":[]}}"#;
    let daemon = FakeDaemon::start("rounds");
    let file = daemon.dir.join("rounds.jsonl");
    let replay = |text: &str, words: &[&str]| {
        std::fs::write(&file, text).unwrap();
        daemon.pagoda(&[&["simulate", "--replay", file.to_str().unwrap()], words].concat()).output().unwrap()
    };
    let output = replay(&format!("{HEADER}\n{ROUND}\n"), &[]);
    assert!(output.status.success(), "{} {}", out(&output), err(&output));
    assert!(out(&output).contains("1 rounds in 0 s, 0 plans of VMs; 0 rounds differ"), "{}", out(&output));

    let other = format!("{HEADER}\n{}\n", ROUND.replace("\"budget\":243793", "\"budget\":243792"));
    let output = replay(&other, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("1 of 1 rounds of"), "{}", err(&output));
    assert!(out(&output).contains("\"what\": \"budget\""), "{}", out(&output));

    for (text, expected) in
        [("", "it is empty"), ("title = 1\n", "its first line"), (&other[..other.len() - 9], "0 rounds")]
    {
        let output = replay(text, &[]);
        let said = format!("{}{}", out(&output), err(&output));
        assert!(said.contains(expected), "{text:?}: {said}");
    }
    let output = daemon.pagoda(&["simulate", "--replay", daemon.dir.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let output = daemon.pagoda(&["simulate", "--replay", "x", "--points"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    assert!(daemon.asked().is_empty(), "no daemon takes part");
}

#[test]
fn a_recording_is_replayed() {
    let daemon = FakeDaemon::start("trace");
    let (trace, plot) = (daemon.dir.join("trace.toml"), daemon.dir.join("trace.svg"));
    let (trace, plot) = (trace.to_str().unwrap(), plot.to_str().unwrap());
    let check = |words: &[&str], expected: &str| {
        let output = daemon.pagoda(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", err(&output));
        assert!(out(&output).contains(expected), "{words:?}: {}", out(&output));
    };
    check(&["trace", "record", "--interval", "1", "--out", trace, "--for", "2s"], "1 VMs, 1 points in 2 s");
    check(&["trace", "replay", trace, "--plot", plot], "web1");
    assert!(std::fs::read_to_string(plot).unwrap().contains("Recorded on host1"));
    check(&["trace", "replay", trace, "--pool", "1G", "--idle-tax", "0%", "--json"], "\"pool_bytes\": 1073741824");
    check(&["simulate", trace], "Recorded on host1");

    let output =
        daemon.pagoda(&["--socket", "/nonexistent/socket", "trace", "record", "--out", trace]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
}

#[test]
fn exit_statuses() {
    let daemon = FakeDaemon::start("status");
    let check = |words: &[&str], status: i32, expected: &str| {
        let output = daemon.pagoda(words).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", err(&output));
        assert!(err(&output).contains(expected), "{words:?}: {}", err(&output));
    };
    check(&["vm", "show", "nobody"], 4, "see `pagoda ls`");
    check(&["vm", "set", "web1", "--dram", "5G"], 2, "more than the VM's memory");
    check(&["vm", "show", "a/b"], 2, "has '/'");
    check(&["--socket", "/nonexistent/socket", "ls"], 3, "systemctl start pagodad");
    check(&["admit", "--memory", "8G", "--min", "2G"], 5, "not admitted: 1 GiB of the pool");
    check(&["admit", "--memory", "8G", "--min", "9G"], 2, "lower --min or raise --dram");
    check(&["vm", "set", "web1", "--min", "2G", "--dram", "1G"], 2, "lower --min or raise --dram");
    check(&["vm", "set", "web1", "--dram", "2G", "--sample-pages", "5000"], 2, "1 to 4096 pages");
    check(&["whatif", "web1", "--dram", "1M"], 2, "the least is 64 MiB");
    check(&["run", "--plain", "--name", "large", "--memory", "64M", "--min", "64M", "--", "true"], 5, "lower --min");
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("PATCH")), "nothing was changed");
    check(&["frobnicate"], 2, "unrecognized");
    check(&["top"], 2, "--batch");
    check(&["top", "--svg", "-", "--batch", "1"], 2, "--batch");
}

#[test]
fn manual_pages() {
    let daemon = FakeDaemon::start("man");
    let dir = daemon.dir.join("man");
    let output = daemon.pagoda(&["man", dir.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let pages = ["pagoda.1", "pagoda-run.1", "pagoda-vm-set.1", "pagoda-trace-record.1", "pagoda-qemu.1"];
    let of_snapshots = ["pagoda-vm-snapshot.1", "pagoda-vm-restore.1", "pagoda-vm-rollback.1", "pagoda-snapshot-ls.1"];
    for page in
        [&pages[..], &of_snapshots, &["pagoda-pool-serve.1", "pagoda-pool-try.1", "pagoda-disk-export.1"]].concat()
    {
        let text = std::fs::read_to_string(dir.join(page)).unwrap();
        assert!(text.contains(".SH NAME"), "{page}");
    }
}

/// A listener that does with each connection what it is told, until the test ends.
fn listening(daemon: &FakeDaemon, act: impl Fn(UnixStream) + Send + 'static) -> Command {
    let path = daemon.dir.join("other");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(|stream| act(stream.unwrap())));
    let mut command = daemon.pagoda(&["ls"]);
    command.env("PAGODA_SOCKET", path);
    command
}

#[test]
fn a_daemon_that_goes_away_in_the_middle_is_an_error() {
    let daemon = FakeDaemon::start("gone");
    let output = listening(&daemon, drop).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    assert!(err(&output).starts_with("pagoda: talk to the daemon on"), "{}", err(&output));
}

#[test]
fn a_daemon_that_does_not_answer_is_said() {
    let daemon = FakeDaemon::start("hung");
    // Its connections stay open and silent.
    let mut hung = listening(&daemon, std::mem::forget).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(hung.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("does not answer yet; still waiting"), "{line}");
    hung.kill().unwrap();
    hung.wait().unwrap();
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let daemon = FakeDaemon::start("closed");
    for words in [&["ls"][..], &["--json", "ls"], &["vm", "show", "web1"], &["completion", "bash"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = daemon.pagoda(words).stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output();
        let output = output.unwrap();
        assert_eq!((output.status.code(), err(&output).as_str()), (Some(0), ""), "{words:?}");
    }
}

#[test]
fn an_argument_that_is_not_utf8_is_named() {
    let daemon = FakeDaemon::start("utf8");
    let mut command = daemon.pagoda(&["run", "--name", "a", "--", "qemu-system-x86_64", "-m", "1G"]);
    let output = command.arg(OsStr::from_bytes(b"m\xfcller.img")).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    assert!(err(&output).contains(r#"argument 3 of the program is not UTF-8: "m\xFCller.img""#), "{}", err(&output));
    assert!(daemon.asked().is_empty());
}
