//! The rewritten command line against the QEMU of this machine: does it accept it, and is guest RAM
//! where it should be? No guest runs; QEMU's own monitor answers. Needs qemu-system-x86_64.

use std::io::Write;
use std::process::Stdio;

use crate::daemon::FakeDaemon;

/// Starts QEMU with `words`, types `commands` on its standard input, and returns what it printed.
fn qemu(test: &str, words: &[&str], commands: &str) -> String {
    let daemon = FakeDaemon::start(test);
    let mut all = vec!["run", "--name", "web1", "--", "qemu-system-x86_64", "-accel", "tcg", "-S"];
    all.extend(words);
    let mut child =
        daemon.pagoda(&all).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // QEMU may have refused its options and be gone.
    let _ = child.stdin.take().unwrap().write_all(commands.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{words:?}: {text}");
    text
}

/// The lines `info memdev` has for a back end of ours.
fn assert_memdev(text: &str, id: &str, mib: u64) {
    let text = text.replace('\r', "");
    let from = text.find(&format!("memory backend: {id}\n")).unwrap_or_else(|| panic!("no {id} in {text}"));
    let lines: Vec<&str> = text[from..].lines().take(4).map(str::trim).collect();
    assert_eq!(lines[1], format!("size:  {}", mib << 20), "{text}");
    assert!(text[from..].contains("share: true"), "{text}");
}

const ASK: &str = "info memdev\nquit\n";

#[test]
fn a_back_end_is_added() {
    let text = qemu("added", &["-nodefaults", "-display", "none", "-m", "256M", "-monitor", "stdio"], ASK);
    assert_memdev(&text, "pagoda-ram", 256);
}

#[test]
fn libvirts_back_end_is_replaced() {
    let words = [
        "-nodefaults",
        "-display",
        "none",
        "-machine",
        "pc-q35-7.2,usb=off,memory-backend=pc.ram",
        "-m",
        "size=262144k",
        "-object",
        r#"{"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456}"#,
        "-device",
        r#"{"driver":"virtio-balloon-pci","id":"balloon0"}"#,
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-monitor",
        "stdio",
    ];
    for switch in ["free-page-reporting", "deflate-on-oom"] {
        let text = qemu("libvirt", &words, &format!("info memdev\nqom-get balloon0 {switch}\nquit\n"));
        assert_memdev(&text, "pc.ram", 256);
        let answer = text.rsplit(switch).next().unwrap();
        assert!(answer.contains("true"), "{text}");
    }
}

#[test]
fn two_nodes() {
    let words = [
        "-nodefaults",
        "-display",
        "none",
        "-m",
        "192M",
        "-smp",
        "2",
        "-object",
        "memory-backend-memfd,id=a,size=64M,share=on,host-nodes=0,policy=preferred",
        "-object",
        "memory-backend-ram,id=b,size=128M,prealloc=off",
        "-numa",
        "node,cpus=0,memdev=a",
        "-numa",
        "node,cpus=1,memdev=b",
        "-monitor",
        "stdio",
    ];
    let text = qemu("nodes", &words, ASK);
    assert_memdev(&text, "a", 64);
    assert_memdev(&text, "b", 128);
}

#[test]
fn the_terminal_still_has_its_monitor() {
    // Ctrl-A c goes from the serial port to the monitor.
    let text = qemu("console", &["-nographic", "-m", "128M"], "\u{1}cinfo memdev\nquit\n");
    assert_memdev(&text, "pagoda-ram", 128);
}

#[test]
fn the_private_monitor_listens() {
    let words = ["-nodefaults", "-display", "none", "-m", "128M", "-monitor", "stdio"];
    let text = qemu("monitor", &words, "info chardev\nquit\n");
    assert!(text.contains("pagoda-qmp: filename=disconnected:unix:"), "{text}");
}
