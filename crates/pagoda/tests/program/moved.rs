//! `pagoda vm start-arrived`, which the daemon starts for a VM of another host.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Output, Stdio};

use pagoda_api::{CreateVm, VmKind, VmSpec};
use rustix::process::{getegid, geteuid};
use serde_json::{Value, json};

use crate::cli::{err, out};
use crate::daemon::{FakeDaemon, TOKEN};

/// A QEMU that says its words, whose it is, and what its standard input is.
fn qemu(daemon: &FakeDaemon) {
    let path = daemon.dir.join("qemu-system-x86_64");
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 10.0.2 (fake)' && exit\n\
                  echo \"$*\"; id -u; id -G; readlink /proc/self/fd/0; grep NoNewPrivs /proc/self/status; echo \"$PAGODA_TOKEN\"\n";
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

fn document(daemon: &FakeDaemon, words: &[&str], uid: u32, gid: u32) -> Value {
    let launch = json!({ "program": daemon.dir.join("qemu-system-x86_64"), "words": words, "cwd": daemon.dir,
                         "uid": uid, "gid": gid });
    let from = json!({ "launch": launch, "memory": [1_u64 << 30], "spec": {},
                       "qemu": { "version": "10.0.2", "machine": "pc-q35-10.0" } });
    let created = json!({ "name": "web1", "token": TOKEN, "attach_socket": daemon.dir.join("attach"),
                          "shim": daemon.dir.join("shim.so") });
    json!({ "from": from, "created": created, "socket": daemon.socket(), "paths": [daemon.dir], "groups": [gid, 4242] })
}

fn start(daemon: &FakeDaemon, document: &str) -> Output {
    let mut command = daemon.pagoda(&["vm", "start-arrived"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(document.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

const WORDS: [&str; 6] = ["-M", "q35", "-m", "1G", "-serial", "stdio"];

#[test]
fn it_becomes_the_qemu_of_its_user() {
    let daemon = FakeDaemon::start("arrived");
    qemu(&daemon);
    let mut users = vec![(geteuid().as_raw(), getegid().as_raw())];
    if geteuid().is_root() {
        users.push((65534, 65534));
        std::fs::set_permissions(daemon.dir.join("attach"), PermissionsExt::from_mode(0o777)).unwrap();
    }
    for (uid, gid) in users {
        let vm = CreateVm {
            name: "web1".into(),
            memory: vec![1 << 30],
            kind: VmKind::Qemu,
            spec: VmSpec::default(),
            launch: None,
            outbox: None,
        };
        daemon.hand_over(vm);
        let output = start(&daemon, &document(&daemon, &WORDS, uid, gid).to_string());
        assert!(output.status.success(), "{}", err(&output));
        let said = out(&output);
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[0].contains("-serial stdio -display none -monitor none "), "{said}");
        assert!(lines[0].contains(" -S -incoming defer"), "{said}");
        assert_eq!(lines[1], uid.to_string());
        assert!(!geteuid().is_root() || lines[2] == format!("{gid} 4242"), "{said}");
        assert_eq!(&lines[3..], ["/dev/null", "NoNewPrivs:\t1", TOKEN]);
    }
    assert_eq!(daemon.asked(), [], "the daemon has made it already");
}

#[test]
fn what_is_not_safe_is_refused_before_anything_is_started() {
    let daemon = FakeDaemon::start("arrived-refused");
    qemu(&daemon);
    let own = (geteuid().as_raw(), getegid().as_raw());
    let check = |document: &str, status: i32, expected: &str| {
        let output = start(&daemon, document);
        assert_eq!(output.status.code(), Some(status), "{}", err(&output));
        assert!(err(&output).contains(expected) && out(&output).is_empty(), "{}", err(&output));
    };
    check("", 1, "which pagodad writes");
    check("{\"from\":1}", 1, "which pagodad writes");
    let of = |words: &[&str]| document(&daemon, &[&WORDS, words].concat(), own.0, own.1).to_string();
    check(&of(&["-hda", "/etc/shadow"]), 6, "web1 cannot be started here: -hda /etc/shadow: /etc/shadow is not below");
    check(&of(&["-monitor", "tcp::1,server=on,wait=off"]), 6, "can start programs");
    check(&of(&["-netdev", "tap,id=n", "-s"]), 6, "runs scripts of the host");
    let mut less: Value = serde_json::from_str(&of(&[])).unwrap();
    less["from"]["memory"] = json!([1_u64 << 29]);
    check(&less.to_string(), 6, "bytes of memory now");
    less["from"]["memory"] = json!([1_u64 << 30]);
    less["from"]["qemu"]["version"] = json!("99.0.0");
    check(&less.to_string(), 6, "99.0.0");
    if !geteuid().is_root() {
        check(&document(&daemon, &WORDS, own.0 + 7, own.1).to_string(), 6, "run this command as that user");
    }
}
