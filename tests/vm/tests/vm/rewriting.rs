//! The rewritten command line against the QEMU of this machine: does it accept it, and is guest RAM where it should be? No
//! guest runs; QEMU's own monitor answers.

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use vm_tests::{Daemon, Folios, Lab};

/// Starts QEMU with `words`, types `commands` on its standard input, and returns what it printed.
fn qemu(daemon: &Daemon, words: &[&str], commands: &str) -> Result<String> {
    let mut command = daemon.cli()?;
    command.args(["run", "--name", "web1", "--", "qemu-system-x86_64", "-accel", "tcg", "-S"]).args(words);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // QEMU may have refused its options and be gone.
    let _ = child.stdin.take().context("QEMU's input")?.write_all(commands.as_bytes());
    let output = child.wait_with_output()?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{words:?}: {text}");
    daemon.wait_gone("web1")?;
    Ok(text.replace('\r', ""))
}

/// The lines that `info memdev` has for a back end of ours.
fn has_memdev(text: &str, id: &str, mib: u64) -> Result<()> {
    let from = text.find(&format!("memory backend: {id}\n")).with_context(|| format!("no {id} in {text}"))?;
    let size = text[from..].lines().nth(1).map(str::trim);
    ensure!(size == Some(&format!("size:  {}", mib << 20)), "{text}");
    ensure!(text[from..].contains("share: true"), "{text}");
    Ok(())
}

const ASK: &str = "info memdev\nquit\n";
const LIBVIRT: [&str; 13] = [
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
];
const NODES: &str = "-nodefaults -display none -m 192M -smp 2 \
    -object memory-backend-memfd,id=a,size=64M,share=on,host-nodes=0,policy=preferred \
    -object memory-backend-ram,id=b,size=128M,prealloc=off -numa node,cpus=0,memdev=a -numa node,cpus=1,memdev=b \
    -monitor stdio";

#[test]
fn qemu_accepts_what_its_options_become() -> Result<()> {
    Lab::run("rewritten options", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let plain = ["-nodefaults", "-display", "none", "-m", "256M", "-monitor", "stdio"];
        has_memdev(&qemu(&daemon, &plain, ASK)?, "pc.ram", 256).context("a back end is added")?;
        let text = qemu(&daemon, &plain, "info chardev\nquit\n")?;
        ensure!(
            text.contains("pagoda-qmp: filename=unix:") || text.contains("pagoda-qmp: filename=disconnected:unix:"),
            "{text}"
        );

        let mut libvirt = LIBVIRT.to_vec();
        libvirt.extend(["-monitor", "stdio"]);
        for switch in ["free-page-reporting", "deflate-on-oom"] {
            let text = qemu(&daemon, &libvirt, &format!("info memdev\nqom-get balloon0 {switch}\nquit\n"))?;
            has_memdev(&text, "pc.ram", 256).context("libvirt's is replaced")?;
            ensure!(text.rsplit(switch).next().is_some_and(|answer| answer.contains("true")), "{text}");
        }

        let nodes: Vec<&str> = NODES.split_whitespace().collect();
        let text = qemu(&daemon, &nodes, ASK)?;
        has_memdev(&text, "a", 64).and_then(|()| has_memdev(&text, "b", 128)).context("two nodes")?;

        // Ctrl-A c goes from the serial port to the monitor.
        let text = qemu(&daemon, &["-nographic", "-m", "128M"], "\u{1}cinfo memdev\nquit\n")?;
        has_memdev(&text, "pc.ram", 128).context("the terminal still has its monitor")
    })
}
