//! Snapshots as files: of a guest that runs on, into a file and back under another name, and into a QEMU without Pagoda. Each
//! guest that comes of it verifies its memory.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::{SnapshotName, SnapshotStage};
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu, wait};

use super::snapshots::WORK;

const DRAM: &str = "160M";

/// A guest in the middle of its work, with two snapshots of it, of which the second refers to the first.
fn start_with_two(lab: &Lab, daemon: &Daemon, options: &GuestOptions) -> Result<Rc<Guest>> {
    let guest = lab.guest(daemon, options)?;
    guest.wait_phase("random")?;
    daemon.wait_vm(&options.name, "it was paged", wait::HANG, |vm| vm.swapped_bytes > 32 * MIB)?;
    for name in ["one", "two"] {
        succeeds(daemon, &["vm", "snapshot", &options.name, "--name", name, "--no-disks"])?;
        wait::until("the snapshot is durable", wait::HANG, || {
            let snapshot = daemon.client().snapshot(&SnapshotName::new(&*options.name, name))?;
            ensure!(snapshot.stage != SnapshotStage::Lost, "{snapshot:?}");
            Ok((snapshot.stage == SnapshotStage::Durable).then_some(()))
        })?;
    }
    Ok(guest)
}

fn succeeds(daemon: &Daemon, words: &[&str]) -> Result<String> {
    let Output { status, stdout, stderr } = daemon.run_cli(words)?;
    ensure!(status.success(), "{words:?}: {}", String::from_utf8_lossy(&stderr));
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// It is refused by status 6, in such words.
fn is_refused(daemon: &Daemon, words: &[&str], expected: &str) -> Result<()> {
    let Output { status, stderr, .. } = daemon.run_cli(words)?;
    let said = String::from_utf8_lossy(&stderr).into_owned();
    ensure!(status.code() == Some(6) && said.contains(expected), "{words:?}: {status}, {said}");
    Ok(())
}

fn images(daemon: &Daemon) -> Result<usize> {
    Ok(fs::read_dir(daemon.state_dir().join("images"))?.count())
}

fn out_and_in(qemu: Qemu, incoming: fn(&Path) -> String) -> Result<()> {
    Lab::run("a snapshot goes out and comes in", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let mut options = GuestOptions::new("web1", WORK).qemu(qemu).dram(DRAM);
        // The QEMU without Pagoda has no such device.
        options.run_options.push("--no-vmgenid".into());
        let guest = start_with_two(lab, &daemon, &options)?;
        let (file, stream) = (lab.dir().join("two.pagoda"), lab.dir().join("two.qemu"));
        let [file_word, stream_word] = [&file, &stream].map(|path| path.to_string_lossy().into_owned());
        println!("{}", succeeds(&daemon, &["snapshot", "export", "web1/two", &file_word])?);
        println!("{}", succeeds(&daemon, &["snapshot", "export", "web1/two", &stream_word, "--format", "qemu"])?);
        is_refused(&daemon, &["snapshot", "export", "web1/two", &file_word], "--force")?;
        guest.finish_soon().context("the guest goes on")?;
        daemon.wait_gone("web1")?;

        succeeds(&daemon, &["snapshot", "import", &file_word, "--name", "copy/first"])?;
        is_refused(&daemon, &["snapshot", "import", &file_word, "--name", "copy/first"], "has a snapshot of the name")?;
        succeeds(&daemon, &["snapshot", "verify", "copy/first"])?;
        let restore = ["vm", "restore", "web2", "--from", "copy/first", "--dram", "128M"];
        is_refused(&daemon, &restore, "pagoda snapshot accept copy/first")?;
        let shown = succeeds(&daemon, &["snapshot", "show", "copy/first"])?;
        ensure!(shown.contains("qemu-system-x86_64") && shown.contains("is not started"), "{shown}");
        succeeds(&daemon, &["snapshot", "accept", "copy/first"])?;
        for name in ["web1/two", "web1/one"] {
            succeeds(&daemon, &["snapshot", "rm", name])?;
        }
        let mut command = daemon.cli()?;
        command.args(restore);
        let restored =
            lab.keep_guest(Guest::spawn(command, lab.dir(), &GuestOptions { name: "web2".into(), ..options })?);
        restored.finish_soon().context("restored from what was imported")?;
        daemon.wait_gone("web2")?;

        let mut alone = GuestOptions::new("alone", WORK).qemu(qemu);
        alone.more = vec!["-incoming".into(), incoming(&stream)];
        let alone = lab.guest_alone(&alone)?;
        alone.finish_soon().context("a QEMU without Pagoda")
    })
}

#[test]
fn out_and_in_again() -> Result<()> {
    out_and_in(Qemu::System, |path| format!("exec:cat {}", path.display()))
}

#[test]
fn out_and_in_again_qemu_10() -> Result<()> {
    out_and_in(Qemu::Ten, |path| format!("file:{}", path.display()))
}

/// Files that are not right, clients that go away: nothing is left, and nothing stays held.
#[test]
fn what_is_broken_off_leaves_nothing() -> Result<()> {
    Lab::run("exports and imports that end early", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", WORK).qemu(Qemu::System).dram(DRAM);
        let guest = start_with_two(lab, &daemon, &options)?;
        let path = lab.dir().join("two.pagoda");
        let word = path.to_string_lossy().into_owned();
        succeeds(&daemon, &["snapshot", "export", "web1/two", &word])?;
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        let before = images(&daemon)?;

        let mut file = fs::read(&path)?;
        let middle = file.len() / 2;
        file[middle] ^= 1;
        fs::write(&path, &file)?;
        is_refused(&daemon, &["snapshot", "import", &word, "--name", "a/b"], "does not match its checksum")?;
        fs::write(&path, &file[..middle])?;
        is_refused(&daemon, &["snapshot", "import", &word, "--name", "a/b"], &format!("byte {middle}"))?;
        fs::write(
            &path,
            b"QEVM, which is something else, and long enough for a header. It is refused by its first byte.",
        )?;
        is_refused(&daemon, &["snapshot", "import", &word], "no exported snapshot")?;
        ensure!(images(&daemon)? == before, "something is left");

        let mut command = daemon.cli()?;
        command.args(["snapshot", "import", "-", "--name", "a/b"]).stdin(Stdio::piped());
        let mut importing = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("import")?;
        importing.stdin.take().context("its input")?.write_all(&file[..middle - MIB as usize])?;
        // Its input has ended, or this does: the file is cut either way.
        importing.kill().and_then(|()| importing.wait()).context("kill it")?;
        wait::until("nothing is left", wait::HANG, || Ok((images(&daemon)? == before).then_some(())))?;

        let mut command = daemon.cli()?;
        command.args(["snapshot", "export", "web1/one", "-", "--compress", "none"]).stdout(Stdio::piped());
        let mut exporting = command.stderr(Stdio::null()).spawn().context("export")?;
        exporting.stdout.as_mut().context("its output")?.read_exact(&mut [0; 8])?;
        is_refused(&daemon, &["snapshot", "rm", "web1/one"], "it is being exported")?;
        exporting.kill().and_then(|()| exporting.wait()).context("kill it")?;
        wait::until("it can be removed", wait::HANG, || {
            Ok(daemon.run_cli(&["snapshot", "rm", "web1/one"])?.status.success().then_some(()))
        })?;
        succeeds(&daemon, &["snapshot", "verify", "web1/two"]).map(drop)
    })
}
