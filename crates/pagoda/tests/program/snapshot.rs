//! Snapshots on the command line, against the small daemon.

use pagoda_api::RestoreRequest;

use crate::cli::{err, fake_qemu, fake_qemu_of, out};
use crate::daemon::FakeDaemon;

#[test]
fn a_snapshot_is_taken_and_waited_for() {
    let daemon = FakeDaemon::start("take");
    let take = |words: &[&str]| daemon.pagoda(&[&["vm", "snapshot", "web1"], words].concat()).output().unwrap();
    let output = take(&["--name", "one", "--no-disks"]);
    assert!(output.status.success(), "{}", err(&output));
    for part in [
        "snapshot       web1/one\n",
        "stage          volatile\n",
        "pause          12.3 ms\n",
        "size           768M of 1G",
    ] {
        assert!(out(&output).contains(part), "{part:?} in {}", out(&output));
    }
    assert_eq!(daemon.asked().last().unwrap().1, r#"{"name":"one","disks":false,"wait_durable":false}"#);
    let output = take(&["--no-disks", "--wait-durable"]);
    assert!(out(&output).contains("stage          durable\n"), "{}", out(&output));
    assert_eq!(err(&output), "", "progress is for terminals");
    let output = take(&["--no-disks", "--json"]);
    assert!(out(&output).contains("\"pause_us\": 12345"), "{}", out(&output));
    take(&["--disks"]);
    assert_eq!(daemon.asked().last().unwrap().1, r#"{"disks":true,"wait_durable":false}"#);
    let output = take(&[]);
    assert_eq!(output.status.code(), Some(6), "{}", err(&output));
    assert!(err(&output).contains("say --disks or --no-disks"), "{}", err(&output));
}

#[test]
fn snapshots_are_shown_verified_and_removed() {
    let daemon = FakeDaemon::start("snapshots");
    let check = |words: &[&str], status: i32, expected: &str| {
        let output = daemon.pagoda(&[&["snapshot"], words].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", err(&output));
        assert!(format!("{}{}", out(&output), err(&output)).contains(expected), "{words:?}: {}", out(&output));
    };
    check(&["ls"], 0, "web1  one   2026-11-28T16:00:00Z  volatile  768M       -     1G  12.3 ms         -  -\n");
    check(&["ls", "--json"], 0, "\"stage\": \"filled\"");
    check(&["tree"], 0, "web1  768M\n  one  2026-11-28T16:00:00Z  768M, volatile\n");
    check(&["show", "web1/one"], 0, "it outlives its VM, the daemon and a crash of the host");
    check(&["show", "web1/two"], 4, "no snapshot of that name");
    check(&["show", "web1"], 2, "write VM/NAME");
    check(&["verify", "web1/one"], 1, "damaged: pages, page 9, offset 4096: x\n");
    check(&["verify", "web1/one", "--json"], 1, "\"damaged\": 1");
    check(&["rm", "web1/one"], 0, "");
    assert_eq!(daemon.asked().last().unwrap().0, "DELETE /v1/snapshots/web1/one");
    check(&["rm", "0123456789abcdef0123456789abcdef"], 0, "");
    assert_eq!(daemon.asked().last().unwrap().0, "DELETE /v1/snapshots/0123456789abcdef0123456789abcdef");
}

fn restores(daemon: &FakeDaemon) -> Vec<RestoreRequest> {
    let of_restore =
        |(line, body): &(String, String)| (line == "POST /v1/restores").then(|| serde_json::from_str(body).unwrap());
    daemon.asked().iter().filter_map(of_restore).collect()
}

#[test]
fn a_restore_becomes_the_qemu_of_the_snapshot() {
    let daemon = FakeDaemon::start("restore");
    fake_qemu(&daemon);
    let output =
        daemon.pagoda(&["vm", "restore", "web2", "--from", "web1/one", "--dram", "256M", "--force"]).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let text = out(&output);
    assert!(
        text.starts_with("-M\ntype=pc-q35-10.0,memory-backend=pc.ram\n-m\n1G\n-name\nweb1\n-S\n-incoming\ndefer\n"),
        "{text}"
    );
    assert!(text.contains("\n-object\nqom-type=memory-backend-file,id=pc.ram,"), "{text}");
    let asked = restores(&daemon);
    assert_eq!((asked[0].from.to_string().as_str(), asked[0].vm_name()), ("web1/one", "web2"));
    assert_eq!((asked[0].dram, asked[0].force, asked[0].replace), (Some(256 << 20), true, false));

    // It goes to the directory of the snapshot's QEMU, and finds the daemon all the same.
    let mut rollback = daemon.pagoda(&["vm", "rollback", "web1", "--to", "one"]);
    let output = rollback.current_dir(&daemon.dir).env("PAGODA_SOCKET", "control").output().unwrap();
    assert!(output.status.success() && out(&output).contains("\n-incoming\ndefer\n"), "{}", err(&output));
    let last = restores(&daemon).pop().unwrap();
    assert_eq!((last.vm_name(), last.dram, last.force, last.replace), ("web1", None, false, true));
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("DELETE")));
}

#[test]
fn what_is_wrong_is_seen_before_a_vm_is_made_or_ended() {
    let daemon = FakeDaemon::start("unrestored");
    let check = |words: &[&str], status: i32, expected: &str| {
        let output = daemon.pagoda(&[&["vm"], words].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", err(&output));
        assert!(err(&output).contains(expected), "{words:?}: {}", err(&output));
    };
    check(&["rollback", "web1", "--to", "one"], 6, "qemu-system-x86_64 does not exist");
    for (version, expected) in [
        ("10.0.1", "this QEMU is 10.0.1, and its state needs 10.0.2 or a newer one"),
        ("7.2.22", "this QEMU is 7.2.22"),
        ("", "QEMU does not say its version"),
    ] {
        fake_qemu_of(&daemon, version);
        check(&["restore", "web1", "--from", "one"], 6, expected);
        check(&["rollback", "web1", "--to", "one"], 6, expected);
    }
    fake_qemu(&daemon);
    check(&["restore", "web1", "--from", "other"], 6, "run this command as that user");
    check(&["restore", "web1", "--from", "less"], 6, "gives [1073741824] bytes of memory now");
    check(&["restore", "web1", "--from", "one", "--dram", "2G"], 6, "more than the VM's memory");
    check(&["restore", "web1", "--from", "two"], 4, "no snapshot of that name");
    assert_eq!(restores(&daemon), []);
    check(&["restore", "changed", "--from", "web1/one"], 6, "disk0 has changed");
    check(&["restore", "broken", "--from", "web1/one"], 7, "QEMU does not answer");
    assert!(!daemon.asked().iter().any(|(line, _)| line.starts_with("DELETE")), "nothing was made");

    std::fs::write(daemon.dir.join("shim.so"), "another library").unwrap();
    check(&["restore", "web1", "--from", "one"], 2, "older than this command");
    assert_eq!(daemon.asked().last().unwrap().0, "DELETE /v1/vms/web1");
}
