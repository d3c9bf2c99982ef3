//! No VM runs unmanaged: whatever keeps the shim out of the program, or from attaching, the program has no RAM and ends.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use pagoda_api::VmState;
use vm_tests::daemon::command;
use vm_tests::{Daemon, DaemonOptions, Folios, Lab, programs, wait};

const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// The user and the group `nobody` and `nogroup`, as on every Debian.
const NOBODY: &str = "65534";
/// What QEMU says when nothing answers for its RAM.
const NO_RAM: &str = "can't open backing store /proc/pagoda-shim/ram0";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The program failed with this message, and no VM is left.
fn ended(daemon: &Daemon, what: &str, output: &Output, expected: &str) -> Result<()> {
    let said = said(output);
    ensure!(!output.status.success(), "{what}: it ended well: {said}");
    ensure!(said.contains(expected), "{what}: {expected:?} is not in: {said}");
    wait::until("no VM is left", wait::HANG, || Ok(daemon.client().vms()?.vms.is_empty().then_some(())))
        .context(what.to_owned())
}

/// A program that takes part in a test, started by this script.
fn script(dir: &Path, text: &str) -> Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let path = dir.join("qemu-system-x86_64");
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// `pagoda run` of this QEMU with 128 MiB in 64. One that runs after all is ended after a while, and then it was unmanaged
/// or not refused.
fn run(daemon: &Daemon, qemu: &Path, more: &[&str]) -> Result<Output> {
    let mut command = Command::new("timeout");
    command.arg("60").arg(programs::bin_dir()?.join("pagoda")).arg("--socket").arg(daemon.socket());
    command.args(["run", "--name", "web1", "--dram", "64M", "--"]).arg(qemu);
    command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "128M"]).args(more);
    command.stdin(Stdio::null()).output().context("run pagoda")
}

#[test]
fn a_qemu_that_lost_the_shim_has_no_ram() -> Result<()> {
    Lab::run("lost shims", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let wrappers = [
            ("an empty environment", format!("exec env -i {QEMU} \"$@\""), NO_RAM),
            ("no preload", format!("exec env -u LD_PRELOAD {QEMU} \"$@\""), NO_RAM),
            ("no token", format!("exec env -u PAGODA_TOKEN {QEMU} \"$@\""), NO_RAM),
            (
                "a wrong token",
                format!("PAGODA_TOKEN=00000000000000000000000000000000 exec {QEMU} \"$@\""),
                "no VM has this token",
            ),
            ("few descriptors", format!("ulimit -n 65; exec {QEMU} \"$@\""), "no free file descriptor"),
            ("another library", format!("LD_PRELOAD=libc.so.6 exec {QEMU} \"$@\""), NO_RAM),
        ];
        for (number, (what, text, expected)) in wrappers.iter().enumerate() {
            let qemu = script(&lab.dir().join(number.to_string()), &format!("#!/bin/sh\n{text}\n"))?;
            ended(&daemon, what, &run(&daemon, &qemu, &[])?, expected)?;
        }
        let mut command = Command::new("prlimit");
        command.arg("--nofile=100:100").arg(programs::bin_dir()?.join("pagoda")).arg("--socket").arg(daemon.socket());
        let output = command.args(["run", "--name", "web1", "--", QEMU, "-m", "128M"]).output()?;
        ended(&daemon, "a low limit", &output, "a VM needs 128")
    })
}

#[test]
fn memory_objects_that_are_not_managed_are_refused() -> Result<()> {
    Lab::run("unmanaged objects", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let objects = [
            ("-object memory-backend-ram,id=m1,size=128M -device pc-dimm,memdev=m1", "-device pc-dimm"),
            ("-object memory-backend-ram,id=m1,size=128M -device virtio-mem-pci,memdev=m1", "-device virtio-mem-pci"),
            ("-object memory-backend-ram,id=m1,size=128M", "no device uses it"),
            (
                "-object memory-backend-file,id=m1,size=16M,share=on,mem-path=/dev/shm/pagoda-test -device ivshmem-plain,memdev=m1",
                "put it on a disk",
            ),
        ];
        for (words, expected) in objects {
            let words: Vec<&str> = words.split(' ').collect();
            ended(&daemon, expected, &run(&daemon, Path::new(QEMU), &words)?, expected)?;
        }
        Ok(())
    })
}

#[test]
fn a_shim_that_the_linker_would_not_load_is_refused() -> Result<()> {
    Lab::run("a path with a blank", 1, |lab| {
        let dir = lab.dir().join("my pagoda");
        fs::create_dir(&dir)?;
        let shim = dir.join("libpagoda_shim.so");
        fs::copy(programs::bin_dir()?.join("libpagoda_shim.so"), &shim)?;
        let daemon = lab.daemon_with(DaemonOptions { shim: Some(shim), ..DaemonOptions::new(Folios::Small) })?;
        ended(&daemon, "a blank", &run(&daemon, Path::new(QEMU), &[])?, "without blanks")
    })
}

/// The value of `security.capability` that gives CAP_NET_ADMIN: linux/capability.h, revision 2, effective.
const NET_ADMIN: [u8; 20] = [1, 0, 0, 2, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_qemu_with_capabilities_is_refused_or_has_no_ram() -> Result<()> {
    Lab::run("file capabilities", 1, |lab| {
        // Where everybody may look.
        let dir = Scratch(std::env::temp_dir().join(format!("pagoda-caps-{}", std::process::id())));
        fs::create_dir(&dir.0)?;
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o755))?;
        let file = |name: &str| dir.0.join(name);
        for name in ["pagoda", "libpagoda_shim.so"] {
            fs::copy(programs::bin_dir()?.join(name), file(name))?;
        }
        let qemu = file("qemu-system-x86_64");
        fs::copy(QEMU, &qemu)?;
        rustix::fs::setxattr(&qemu, "security.capability", &NET_ADMIN, rustix::fs::XattrFlags::empty())
            .context("give QEMU a capability")?;
        let wrapper = script(&file("w"), &format!("#!/bin/sh\nexec {} \"$@\"\n", qemu.display()))?;

        let options = DaemonOptions { shim: Some(file("libpagoda_shim.so")), ..DaemonOptions::new(Folios::Small) };
        let mut daemon = command(&programs::bin_dir()?.join("pagodad"), &lab.dir().join("d"), &options)?;
        daemon.arg("--group").arg(NOBODY);
        let sockets = [("--socket", "p.sock"), ("--attach-socket", "a.sock")];
        let words: Vec<OsString> = daemon.get_args().map(OsString::from).collect();
        let mut daemon = Command::new(daemon.get_program());
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            daemon.arg(&word);
            if let Some((_, name)) = sockets.iter().find(|(option, _)| word == *option) {
                words.next();
                daemon.arg(file(name));
            }
        }
        pagoda_sys::toy::process::die_with_parent(&mut daemon);
        let mut daemon = daemon.spawn().context("start the daemon")?;
        let outcome = (|| {
            let client = pagoda_api::Client::new(file("p.sock"));
            wait::until("the daemon answers", wait::HANG, || Ok(client.version().ok()))?;
            for (program, expected) in [(&qemu, "has file capabilities"), (&wrapper, NO_RAM)] {
                let mut command = Command::new("timeout");
                command.args(["60", "setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
                command.arg(file("pagoda")).arg("--socket").arg(file("p.sock")).args(["run", "--name", "web1", "--"]);
                command.arg(program).args(["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "128M"]);
                let output = command.stdin(Stdio::null()).output()?;
                let said = said(&output);
                ensure!(!output.status.success() && said.contains(expected), "{expected:?} is not in: {said}");
                wait::until("no VM is left", wait::HANG, || Ok(client.vms()?.vms.is_empty().then_some(())))?;
            }
            Ok(())
        })();
        daemon.kill()?;
        daemon.wait()?;
        outcome
    })
}

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A plain program in Perl, which every Debian has.
fn perl(daemon: &Daemon, text: &str) -> Result<Child> {
    let mut command = daemon.cli()?;
    command.args(["run", "--plain", "--name", "web1", "--memory", "64M", "--", "perl", "-e", text]);
    pagoda_sys::toy::process::die_with_parent(&mut command);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("start a program")
}

#[test]
fn who_opens_ram_and_does_not_attach_is_seen_and_ends() -> Result<()> {
    Lab::run("not attached", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let program = perl(&daemon, "open(F, '+<', $ENV{PAGODA_RAM}) or die; sleep 600")?;
        daemon.wait_made("web1")?;
        daemon.wait_vm("web1", "its RAM is taken", wait::HANG, |vm| matches!(vm.state, VmState::Unmanaged { .. }))?;
        for words in [&["ls"][..], &["vm", "show", "web1"], &["vm", "explain", "web1"]] {
            let output = daemon.run_cli(words)?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            ensure!(text.contains("UNMANAGED"), "{words:?}: {text}");
        }
        let problems = daemon.client().health()?.problems;
        ensure!(problems.iter().any(|problem| problem.contains("UNMANAGED")), "{problems:?}");
        let refused = daemon.client().delete("web1").err().context("a VM whose RAM a process has was given up")?;
        ensure!(refused.to_string().contains("has the memory"), "{refused}");
        // Nobody asked it to: the shim ends it.
        ended(&daemon, "not mapped", &program.wait_with_output()?, "did not map all of it")
    })
}

#[test]
fn ram_is_for_one_process() -> Result<()> {
    Lab::run("one process", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        // Its child has the same token, and a shim.
        let text = r#"open(F, '+<', $ENV{PAGODA_RAM}) or die;
                      system('perl', '-e', 'open(F, "+<", $ENV{PAGODA_RAM}) or die "refused: $!\n"') or print "given twice\n""#;
        let output = perl(&daemon, text)?.wait_with_output()?;
        let said = said(&output);
        ensure!(said.contains("another process has the RAM of web1") && said.contains("refused: "), "{said}");
        ensure!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
        daemon.wait_gone("web1")
    })
}
