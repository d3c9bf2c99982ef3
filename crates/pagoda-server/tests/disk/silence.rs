//! All servers of a disk are silent for longer than its clients are to wait, and come back with all that they had.

use std::process::Command;

use crate::pool::{Pool, text};
use crate::qemu_io;
use crate::rig::until;

/// What a client is told.
pub fn asked(uri: &str, command: &str) -> String {
    let output = Command::new("qemu-io").args(["-f", "raw", uri, "-c", command]).output().unwrap();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn servers_that_were_silent_have_lost_nothing() {
    for copies in ["1", "2"] {
        let pool = Pool::start(&format!("silence{copies}"), 2);
        pool.run(&["disk", "create", "d", "--size", "128M", "--copies", copies]);
        let export = pool.export("d", &["--error-after", "1"]);
        qemu_io(&export.uri(), &["write -P 1 0 1M", "write -P 2 70M 1M", "write -P 3 80M 64k"]);
        (0..2).for_each(|index| pool.pause_server(index, true));
        // The first of these waits, the others know. What it was to write is no hole that could be trimmed without asking.
        for command in
            ["write -P 9 71M 64k", "discard 71M 64k", "write -z -u 71M 64k", "read 0 4k", "write -P 9 80M 4k"]
        {
            let said = asked(&export.uri(), command);
            assert!(said.contains("Input/output error"), "{command}: {said}");
        }
        until("it is said", || pool.has_said("nothing is lost by that"));
        (0..2).for_each(|index| pool.pause_server(index, false));
        until("it is said", || pool.has_said("all servers answer again"));
        qemu_io(&export.uri(), &["read -P 1 0 1M", "read -P 2 70M 1M", "read -P 3 81924K 8k"]);
        qemu_io(&export.uri(), &["discard 71M 64k", "read -P 0 71M 64k", "read -P 0 72M 64k"]);
        qemu_io(&export.uri(), &["write -P 4 80M 4k", "read -P 4 80M 4k"]);
        let shown = pool.json(&["disk", "show", "d"]);
        assert_eq!((shown["lost_bytes"].clone(), shown["used_bytes"].clone()), (0.into(), (128 << 20).into()));
        assert_eq!(export.stop(), Some(0));
    }
}

/// Also for a session that has begun; what was written is there again with the right to read it.
#[test]
fn a_key_that_is_removed_opens_nothing_any_more() {
    let pool = Pool::start("key-rm", 1);
    let key = pool.json(&["pool", "key", "ls"])[0]["public_key"].as_str().unwrap().to_owned();
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &["--error-after", "1"]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    for wrong in ["other", "-"] {
        pool.fails(&["pool", "key", "rm", wrong], 4, "not admitted here");
    }
    // Not by a file that is missing.
    let (list, aside) = (pool.file("admitted"), pool.file("admitted.aside"));
    std::fs::rename(&list, &aside).unwrap();
    until("it is said", || pool.has_said("admitted is gone"));
    qemu_io(&export.uri(), &["read -P 1 0 1M"]);
    std::fs::rename(&aside, &list).unwrap();
    pool.run(&["pool", "key", "rm", "self"]);
    pool.fails(&["pool", "key", "rm", &key], 4, "not admitted here");
    until("it is refused", || asked(&export.uri(), "read -P 1 0 1M").contains("Input/output error"));
    pool.run(&["pool", "key", "add", &key]);
    until("it is admitted again", || pool.has_said("all servers answer again"));
    qemu_io(&export.uri(), &["read -P 1 0 1M"]);
    pool.run(&["pool", "key", "rm", &key]);
    assert_eq!(export.stop(), Some(0));
}
