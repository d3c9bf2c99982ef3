//! Disks that one export writes and others read at the same time.

use std::process::Command;

use rustix::process::Signal;

use crate::cluster::{copy_record, settings};
use crate::pool::{Pool, Running, text, tool};
use crate::qemu_io;
use crate::rig::{EtcdProcess, until};

fn reader(pool: &Pool, socket: &str, more: &[&str]) -> Running {
    let words = [&["--read-only", "--error-after", "2"], more].concat();
    pool.export_at("d", &pool.socket(socket), &words)
}

/// Each page of so many is of the round, at all readers, as soon as the writer has been answered.
fn assert_round(writer: &Running, readers: &[&Running], round: u64, pages: u64) {
    for page in 0..pages {
        qemu_io(&writer.uri(), &[&format!("write {}", of_round(round, page))]);
        readers.iter().for_each(|reader| assert_read(reader, round, page));
    }
}

/// In one of two parts of the disk.
fn of_round(round: u64, page: u64) -> String {
    format!("-P {} {}k 4k", 1 + (round + page) % 250, page * 97 % 512 * 4 + page % 2 * 70 * 1024)
}

fn assert_read(reader: &Running, round: u64, page: u64) {
    let read = format!("read {}", of_round(round, page));
    let said = tool("qemu-io", &["-r", "-f", "raw", &reader.uri(), "-c", &read]);
    assert!(!said.contains("Pattern verification failed"), "round {round}, page {page}: {said}");
}

fn fails(reader: &Running, command: &str) {
    let output = Command::new("qemu-io").args(["-r", "-f", "raw", &reader.uri(), "-c", command]).output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(!output.status.success() || said.contains("failed"), "{command}: {said}");
}

/// Without etcd: copies that a dead server had are made again at one whose line comes later, and who reads finds them there.
#[test]
fn a_server_that_is_listed_later_is_used() {
    let mut pool = Pool::start("listed", 2);
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    let writer = pool.export("d", &[]);
    let early = reader(&pool, "early", &[]);
    assert_round(&writer, &[&early], 0, 4);
    pool.kill_server(0);
    assert_round(&writer, &[&early], 20, 4);
    pool.add_server();
    // What makes no sense is said, and what was there goes on.
    let list = std::fs::read_to_string(pool.file("servers")).unwrap();
    std::fs::write(pool.file("servers"), list + "3 nowhere\n").unwrap();
    until("the list is found wrong", || pool.has_said("line 3"));
    assert_round(&writer, &[&early], 40, 4);
    pool.list_servers();
    until("there are copies again", || pool.is_whole_without("d", 0));
    assert!(pool.has_said("server 3 has come"));
    until("the reader knows it, too", || pool.times_said("server 3 has come") == 2);
    pool.kill_server(1);
    assert_round(&writer, &[&early], 60, 4);
    assert_eq!((early.stop(), writer.stop()), (Some(0), Some(0)));
}

#[test]
fn readers_see_what_the_writer_was_answered() {
    let mut pool = Pool::start("follow", 3);
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    // Before anybody writes there are zeros, and nobody has to.
    let early = reader(&pool, "early", &[]);
    assert_eq!((&early.ready["read_only"], &early.ready["sealed"]), (&true.into(), &false.into()));
    tool("qemu-io", &["-r", "-f", "raw", &early.uri(), "-c", "read -P 0 0 1M"]);
    let writer = pool.export("d", &[]);
    let late = reader(&pool, "late", &[]);
    assert!(tool("nbdinfo", &[&late.uri()]).contains("is_read_only: true"));
    assert_round(&writer, &[&early, &late], 0, 12);
    let write = Command::new("qemu-io").args(["-f", "raw", &late.uri(), "-c", "write 0 4k"]).output().unwrap();
    assert!(!write.status.success() || text(&write.stdout).contains("failed"), "{write:?}");
    // A server goes, and its copies are made anew at another; one is drained.
    pool.kill_server(0);
    assert_round(&writer, &[&early, &late], 20, 6);
    until("there are copies again", || pool.is_whole_without("d", 0));
    assert_round(&writer, &[&early, &late], 40, 6);
    qemu_io(&writer.uri(), &["discard 0 64M"]);
    tool("qemu-io", &["-r", "-f", "raw", &late.uri(), "-c", "read -P 0 0 64M"]);
    assert_round(&writer, &[&early, &late], 60, 6);
    // What readers say of holes is not taken from an old map.
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &writer.uri(), &late.uri()]);
    // Another writer, and then none.
    assert_eq!(writer.stop(), Some(0));
    let writer = pool.export("d", &[]);
    assert_round(&writer, &[&early, &late], 80, 4);
    assert_eq!(writer.stop(), Some(0));
    pool.run(&["disk", "share", "d", "--read-only"]);
    for reader in [&early, &late] {
        (0..4).for_each(|page| assert_read(reader, 80, page));
        (4..6).for_each(|page| assert_read(reader, 60, page));
    }
    assert_eq!((early.stop(), late.stop()), (Some(0), Some(0)));
}

#[test]
fn readers_of_other_machines_need_etcd() {
    let etcd = EtcdProcess::start();
    let pool = Pool::start_with("followed", 2, &settings(&etcd));
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    let writer = pool.export("d", &[]);
    let beside = pool.beside("b");
    copy_record(&pool, &beside, "d");
    beside.fails(&["disk", "export", "d", "--nbd", &beside.socket("x")], 1, "--read-only reads what it writes");
    let mut other = reader(&beside, "other", &[]);
    assert_round(&writer, &[&other], 0, 12);
    etcd.signal(Signal::STOP);
    qemu_io(&writer.uri(), &["write -P 9 0 4k"]);
    fails(&other, "read 0 4k");
    until("it is said", || beside.has_said("reads fail, as nobody says where the parts of the disk are"));
    etcd.signal(Signal::CONT);
    until("it is said", || beside.has_said("the map is there again"));
    tool("qemu-io", &["-r", "-f", "raw", &other.uri(), "-c", "read -P 9 0 4k"]);
    // The disk's next owner is the reader's own machine.
    let taken = beside.export_at("d", &beside.socket("taken"), &["--take-over"]);
    assert_round(&taken, &[&other], 30, 6);
    assert_eq!(taken.stop(), Some(0));
    drop(writer);
    beside.run(&["disk", "rm", "d"]);
    fails(&other, "read 0 4k");
    assert_eq!(other.wait(), Some(1));
    assert!(beside.has_said("d was removed while it was exported"));
}

#[test]
fn who_only_reads_gives_nothing_away() {
    let pool = Pool::start("follow-words", 1);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let words = ["disk", "export", "d", "--nbd", &pool.socket("d"), "--read-only"];
    pool.fails(&[&words[..], &["--take-over"]].concat(), 2, "cannot be used with");
    pool.fails(&[&words[..], &["--parity-after", "10m"]].concat(), 2, "cannot be used with");
}
