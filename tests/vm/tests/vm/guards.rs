//! What cannot work is refused before QEMU starts, with a message that says what to do; what is private stays private.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{CreateVm, VmKind, VmSpec};
use pagoda_sys::toy::ram::{HugePages, Ram, RamSource};
use vm_tests::daemon::{command, ram_name};
use vm_tests::toy::ToyOptions;
use vm_tests::{DaemonOptions, Folios, GuestOptions, Lab, MIB, programs, wait};

/// The user `nobody`, as on every Debian.
const NOBODY: &str = "65534";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn refused(output: &Output, status: i32, expected: &[&str]) -> Result<()> {
    let said = said(output);
    ensure!(output.status.code() == Some(status), "{} instead of {status}: {said}", output.status);
    for word in expected {
        ensure!(said.contains(word), "{word:?} is not in: {said}");
    }
    ensure!(!said.contains("panicked"), "{said}");
    Ok(())
}

#[test]
fn command_lines_that_cannot_work() -> Result<()> {
    Lab::run("wrong command lines", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = ToyOptions { name: "taken".into(), memory_mib: 128, dram_mib: 64, threads: 1 };
        let toy = lab.toy(&daemon, &options)?;
        let cases: &[(&str, i32, &[&str])] = &[
            ("--name a -- /usr/bin/qemu-system-x86_64 -m 511M", 2, &["2 MiB"]),
            ("--name a -- /usr/bin/qemu-system-x86_64 -m much", 2, &["much"]),
            ("--name a --memory 1G -- /usr/bin/qemu-system-x86_64 -m 512M", 2, &["512"]),
            ("--name a --dram 1G -- /usr/bin/qemu-system-x86_64 -m 512M", 2, &["more than the VM's memory"]),
            ("--name a --dram 32M -- /usr/bin/qemu-system-x86_64 -m 512M", 2, &["the least is 64 MiB"]),
            ("--name taken --dram 64M -- /usr/bin/qemu-system-x86_64 -m 128M", 1, &["taken", "another name"]),
            ("--name a/b -- /usr/bin/qemu-system-x86_64 -m 128M", 2, &["letters, digits"]),
            ("-- /usr/bin/qemu-system-x86_64 -m 128M", 2, &["--name"]),
            ("--name a -- /usr/bin/qemu-system-x86_64 -m 128M -mem-prealloc", 2, &["leave it out"]),
            (
                "--name a -- /usr/bin/qemu-system-x86_64 -m 128M -machine memory-backend=r \
                 -object memory-backend-ram,id=r,size=128M,prealloc=on",
                2,
                &["prealloc"],
            ),
            ("--name a -- /usr/bin/qemu-system-x86_64 -m 128M -overcommit mem-lock=on", 2, &["leave it out"]),
            ("--name a -- /nonexistent/qemu-system-x86_64 -m 128M", 1, &["does not exist"]),
            ("--name a --frobnicate -- /usr/bin/qemu-system-x86_64 -m 128M", 2, &["--frobnicate"]),
            ("--name a", 2, &["COMMAND"]),
        ];
        for (line, status, expected) in cases {
            let mut words = vec!["run"];
            words.extend(line.split_ascii_whitespace());
            let output = daemon.run_cli(&words)?;
            refused(&output, *status, expected).with_context(|| format!("pagoda run {line}"))?;
            let vms = daemon.client().vms()?.vms;
            ensure!(vms.len() == 1 && vms[0].name == "taken", "half done after `{line}`: {vms:#?}");
        }
        refused(&daemon.run_cli(&["vm", "show", "nobody"])?, 4, &["no VM named nobody"])?;
        refused(&daemon.run_cli(&["vm", "set", "taken", "--dram", "1G"])?, 2, &["more than the VM's memory"])?;
        refused(&daemon.run_cli(&["vm", "cont", "taken"])?, 1, &["taken"])?;
        refused(&daemon.run_cli(&["frobnicate"])?, 2, &["frobnicate"])?;
        toy.fill()?;
        toy.go("--workload random --mode read-write --passes 1")?;
        toy.quit()
    })
}

#[test]
fn no_daemon() -> Result<()> {
    Lab::run("no daemon", 0, |lab| {
        let mut command = Command::new(programs::bin_dir()?.join("pagoda"));
        command.arg("--socket").arg(lab.dir().join("none.sock"));
        command.args(["run", "--name", "a", "--", "/usr/bin/qemu-system-x86_64", "-m", "128M"]);
        refused(&command.output()?, 3, &["no daemon listens", "none.sock", "pagodad"])
    })
}

#[test]
fn daemons_that_cannot_start() -> Result<()> {
    Lab::run("wrong daemons", 0, |lab| {
        let program = programs::bin_dir()?.join("pagodad");
        let output = Command::new(&program).arg("--frobnicate").output()?;
        refused(&output, 2, &["--frobnicate"])?;
        let daemon = lab.daemon(Folios::Small)?;
        // The same directory twice, and the same socket twice.
        let output = command(&program, daemon.state_dir(), &DaemonOptions::new(Folios::Small))?.output()?;
        refused(&output, 1, &["another pagodad"])?;
        let elsewhere = lab.dir().join("elsewhere");
        let mut twice = Command::new(&program);
        twice.arg("--state-dir").arg(&elsewhere).arg("--socket").arg(daemon.socket());
        twice.arg("--attach-socket").arg(lab.dir().join("other.sock")).args(["--metrics", "off"]);
        refused(&twice.output()?, 1, &["another pagodad is running on the socket"])?;
        // A swap directory that others can write.
        let open = lab.dir().join("open");
        fs::create_dir(&open)?;
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777))?;
        let options = DaemonOptions::new(Folios::Small).swap_dir(&open);
        let output = command(&program, &lab.dir().join("third"), &options)?.output()?;
        refused(&output, 1, &["written by others", "chmod 700"])?;
        daemon.client().version().context("the first daemon goes on")?;
        Ok(())
    })
}

#[test]
fn a_vfio_device_pins_before_qemu_opens_it() -> Result<()> {
    Lab::run("VFIO", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        // There is no such device, so QEMU ends; what Pagoda makes of it is said before. Others that reach RAM, and are there:
        // `vhost_user` and `a_second_mapper_pins`.
        let options = GuestOptions::new("web1", "").memory("-m 256M").dram("128M");
        let guest = lab.guest(&daemon, &options.more("-device vfio-pci,host=ff:1f.7"))?;
        let status = guest.wait_exit(Duration::from_secs(300))?;
        let said = guest.console.tail();
        ensure!(!status.success() && said.contains("all of web1 stays in DRAM") && said.contains("vfio"), "{said}");
        daemon.wait_gone("web1")
    })
}

#[test]
fn a_second_mapper_pins() -> Result<()> {
    Lab::run("second mapper", 1, |lab| {
        const PINNED_MAX: Duration = Duration::from_secs(300);
        let daemon = lab.daemon(Folios::Large)?;
        let options = ToyOptions { name: "toy".into(), memory_mib: 256, dram_mib: 128, threads: 1 };
        let toy = lab.toy(&daemon, &options)?;
        toy.fill()?;
        let file = ram_file_of(toy.pid(), "toy")?;
        let mapping = Ram::map(RamSource::File(file.as_fd()), HugePages::Refuse).context("map the RAM of the toy")?;
        let info = daemon.wait_vm("toy", "pinned", PINNED_MAX, |info| info.pinned.is_some())?;
        let reason = info.pinned.context("a reason")?;
        ensure!(reason.contains(&std::process::id().to_string()), "{reason}");
        let explained = daemon.client().explain("toy")?;
        let row = explained.lines.iter().find(|line| line.term == "pinned").context("explain says pinned")?;
        ensure!(row.reason.contains("maps its memory"), "{row:?}");
        let before = daemon.vm("toy")?.counters;
        toy.go("--workload seq --mode read --passes 2").context("after it was pinned")?;
        let after = daemon.vm("toy")?.counters;
        let evicted = |counters: &std::collections::BTreeMap<String, u64>| counters["evicted_chunks"];
        ensure!(evicted(&after) == evicted(&before), "chunks left DRAM although the VM is pinned");
        drop(mapping);
        toy.quit()
    })
}

pub fn ram_file_of(pid: u32, vm: &str) -> Result<File> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|target| target.to_string_lossy().contains(&ram_name(vm))) {
            return File::options().read(true).write(true).open(&path).context("open the RAM file");
        }
    }
    anyhow::bail!("process {pid} has no RAM file of {vm} open")
}

#[test]
fn a_token_is_needed_to_attach() -> Result<()> {
    Lab::run("tokens", 0, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let vm = CreateVm {
            name: "web1".into(),
            memory: vec![128 * MIB],
            kind: VmKind::Plain,
            spec: VmSpec::default(),
            launch: None,
            outbox: None,
        };
        let created = daemon.client().create(&vm)?;
        let mut forged = created.clone();
        forged.token = "0".repeat(created.token.len());
        let error = pagoda_api::attach::fetch(&forged).err().context("a wrong token was accepted")?;
        ensure!(error.to_string().contains("no VM has this token"), "{error}");
        ensure!(pagoda_api::attach::fetch(&created)?.is_none(), "a plain program has no monitor");
        let error = pagoda_api::attach::fetch(&created).err().context("the VM was started twice")?;
        ensure!(error.to_string().contains("started before"), "{error}");
        let shown = format!("{created:?}");
        ensure!(!shown.contains(&created.token), "the token is in: {shown}");
        daemon.client().delete("web1")?;
        Ok(())
    })
}

#[test]
fn other_users_are_refused() -> Result<()> {
    Lab::run("another user", 0, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        // Nobody may not read the repository, perhaps, so the tool is copied to where everybody may.
        let dir = Scratch(std::env::temp_dir().join(format!("pagoda-nobody-{}", std::process::id())));
        fs::create_dir(&dir.0)?;
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o755))?;
        let tool = dir.0.join("pagoda");
        fs::copy(programs::bin_dir()?.join("pagoda"), &tool)?;
        let as_nobody = |socket: &Path| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]).arg(&tool);
            command.arg("--socket").arg(socket).arg("ls").output().context("run setpriv")
        };
        refused(&as_nobody(&daemon.socket())?, 3, &["not allowed"])?;
        // Even where directories and modes let everybody in, the daemon looks at who connects.
        let mut child = Command::new(programs::bin_dir()?.join("pagodad"));
        child.arg("--state-dir").arg(lab.dir().join("open")).args(["--metrics", "off"]);
        child.arg("--socket").arg(dir.0.join("p.sock")).arg("--attach-socket").arg(dir.0.join("a.sock"));
        pagoda_sys::toy::process::die_with_parent(&mut child);
        let mut child = child.spawn().context("start the second daemon")?;
        let outcome = (|| {
            let socket = dir.0.join("p.sock");
            wait::until("the second daemon answers", Duration::from_secs(300), || {
                Ok(pagoda_api::Client::new(&socket).version().ok())
            })?;
            fs::set_permissions(&socket, fs::Permissions::from_mode(0o666))?;
            let output = as_nobody(&socket)?;
            ensure!(!output.status.success(), "nobody was served: {output:?}");
            Ok(())
        })();
        child.kill()?;
        child.wait()?;
        outcome
    })
}

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn files_are_for_their_owner_alone() -> Result<()> {
    Lab::run("modes", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = ToyOptions { name: "toy".into(), memory_mib: 128, dram_mib: 64, threads: 1 };
        let toy = lab.toy(&daemon, &options)?;
        toy.fill()?;
        let mode = |path: &Path| -> Result<u32> {
            Ok(fs::symlink_metadata(path).with_context(|| format!("look at {}", path.display()))?.mode() & 0o777)
        };
        for (path, expected) in [
            (daemon.socket(), 0o600),
            (daemon.attach_socket(), 0o600),
            (daemon.state_dir().join("vms"), 0o700),
            (daemon.swap_dir(), 0o700),
            (daemon.files_of("toy")[0].clone(), 0o600),
            (daemon.files_of("toy")[2].clone(), 0o600),
        ] {
            let found = mode(&path)?;
            ensure!(found == expected, "{} has mode {found:o} instead of {expected:o}", path.display());
        }
        let ram = fs::metadata(format!("/proc/{}/fd/{}", toy.pid(), ram_fd(toy.pid())?))?.mode() & 0o777;
        ensure!(ram == 0o600, "the RAM file has mode {ram:o}");
        toy.quit()
    })
}

fn ram_fd(pid: u32) -> Result<String> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        if fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains(&ram_name("toy"))) {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    anyhow::bail!("process {pid} has no RAM file open")
}

#[test]
fn silent_connections_do_not_shut_the_attach_socket() -> Result<()> {
    Lab::run("silent connections", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let silent = || -> Result<Vec<_>> {
            let connect = |_| pagoda_sys::socket::Connection::connect(&daemon.attach_socket()).context("connect");
            (0..200).map(connect).collect()
        };
        let first = silent()?;
        let toy = lab.toy(&daemon, &ToyOptions { name: "web1".into(), memory_mib: 128, dram_mib: 64, threads: 1 })?;
        toy.fill()?;
        daemon.kill9()?;
        drop(first);
        daemon.start_unanswered()?;
        let second = wait::until("the attach socket", wait::HANG, || Ok(silent().ok()))?;
        // Its agent comes back all the same.
        toy.go("--workload seq --mode read --passes 1")?;
        drop(second);
        toy.quit()?;
        daemon.wait_gone("web1")
    })
}

/// A VMM that sends discards and reads no answer fills its own socket, not the daemon's memory.
#[test]
fn discards_that_are_not_waited_for_cost_the_daemon_nothing() -> Result<()> {
    Lab::run("discards not waited for", 1, |lab| {
        const DISCARDS: u64 = 500_000;
        const GROWTH_KIB_MAX: u64 = 8 << 10;
        let daemon = lab.daemon(Folios::Small)?;
        let toy = lab.toy(&daemon, &ToyOptions { name: "web1".into(), memory_mib: 128, dram_mib: 64, threads: 1 })?;
        toy.map()?;
        let before = rss_kib(daemon.pid())?;
        let sent = toy.flood(DISCARDS)?;
        let after = rss_kib(daemon.pid())?;
        ensure!(sent > 0, "no discard could be sent");
        ensure!(after < before + GROWTH_KIB_MAX, "{before} KiB before, {after} KiB after {sent} discards");
        eprintln!("{sent} discards, {before} KiB before, {after} KiB after");
        let other = lab.toy(&daemon, &ToyOptions { name: "web2".into(), memory_mib: 128, dram_mib: 64, threads: 1 })?;
        other.fill()?;
        other.go("--workload seq --mode read --passes 1").context("another VM, after that")?;
        other.quit()?;
        toy.quit()
    })
}

/// Memory of a process that is in DRAM; proc_pid_status(5).
fn rss_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("RssAnon")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// A daemon with so few descriptors that something in an attachment fails, whatever it is: the VM runs or says why not.
#[test]
fn a_vm_that_cannot_be_served_ends_with_a_message() -> Result<()> {
    Lab::run("few descriptors", 1, |lab| {
        let (mut refused, mut ran, mut last) = (0, 0, String::new());
        for limit in (24..64).step_by(4).chain((64..600).step_by(40)) {
            let dir = lab.dir().join(format!("few{limit}"));
            fs::create_dir(&dir)?;
            let ours = command(&programs::bin_dir()?.join("pagodad"), &dir, &DaemonOptions::new(Folios::Small))?;
            // Without the right to raise the limit again.
            let mut daemon = Command::new("setpriv");
            daemon.args(["--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", "prlimit"]);
            daemon.arg(format!("--nofile={limit}:{limit}")).arg(ours.get_program()).args(ours.get_args());
            daemon.stderr(File::create(dir.join("log"))?);
            pagoda_sys::toy::process::die_with_parent(&mut daemon);
            let mut daemon = daemon.spawn().context("start the daemon")?;
            let client = pagoda_api::Client::new(dir.join("pagoda.sock"));
            let answers = wait::until("the daemon answers or ends", wait::HANG, || {
                Ok(match (daemon.try_wait()?, client.version()) {
                    (Some(_), _) => Some(false),
                    (None, Ok(_)) => Some(true),
                    (None, Err(_)) => None,
                })
            })?;
            if answers {
                let mut vm = Command::new("timeout");
                vm.arg("60").arg(programs::bin_dir()?.join("pagoda")).arg("--socket").arg(dir.join("pagoda.sock"));
                vm.args([
                    "run",
                    "--name",
                    "web1",
                    "--dram",
                    "64M",
                    "--",
                    "/usr/bin/qemu-system-x86_64",
                    "-accel",
                    "tcg",
                ]);
                vm.args(["-m", "128M", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio"]);
                let mut vm = vm.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
                let _ = std::io::Write::write_all(&mut vm.stdin.take().context("QEMU's input")?, b"quit\n");
                let output = vm.wait_with_output()?;
                let said = said(&output);
                match output.status.code() {
                    Some(0) => ran += 1,
                    Some(124) => anyhow::bail!("with {limit} descriptors the VM hangs: {said}\n{}", log_of(&dir)),
                    _ => {
                        refused += 1;
                        ensure!(said.contains("pagoda: "), "with {limit} descriptors it says only: {said}");
                        last = said;
                    }
                }
            }
            daemon.kill()?;
            daemon.wait()?;
        }
        ensure!(
            refused > 3 && ran > 3,
            "{refused} refused, {ran} ran: the limits were not between; the last said: {last}"
        );
        Ok(())
    })
}

fn log_of(dir: &Path) -> String {
    fs::read_to_string(dir.join("log")).unwrap_or_default()
}

#[test]
fn the_daemons_memory_is_locked_and_guests_is_not() -> Result<()> {
    Lab::run("locked memory", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let status = |field: &str| -> Result<u64> {
            let text = fs::read_to_string(format!("/proc/{}/status", daemon.pid()))?;
            let line = text.lines().find(|line| line.starts_with(field)).context("a line of /proc/PID/status")?;
            Ok(line.split_whitespace().nth(1).context("a number")?.parse::<u64>()? << 10)
        };
        let before = status("VmLck:")?;
        ensure!(before >= 4 * MIB, "only {before} bytes are locked");
        let options = ToyOptions { name: "web1".into(), memory_mib: 256, dram_mib: 64, threads: 1 };
        let toy = lab.toy(&daemon, &options)?;
        toy.fill()?;
        let vm = daemon.vm("web1")?;
        ensure!(vm.resident_bytes <= 64 * MIB && vm.swapped_bytes >= 150 * MIB, "{vm:#?}");
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", daemon.pid()))?;
        let mappings: Vec<&str> = smaps.split_inclusive("\nVmFlags:").collect();
        let of_ram = mappings.windows(2).filter(|pair| pair[0].contains(&ram_name("web1")));
        let flags: Vec<&str> = of_ram.map(|pair| pair[1].lines().next().unwrap_or_default()).collect();
        ensure!(
            !flags.is_empty() && flags.iter().all(|flags| !flags.contains(" lo")),
            "views of RAM are locked: {flags:?}"
        );
        toy.go("--workload random --mode read-write --passes 1")?;
        toy.quit()
    })
}
