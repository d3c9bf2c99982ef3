//! States go from plain QEMU to Pagoda and back, by savevm and by migration, and what cannot be kept is refused before the
//! guest moves. `docs/qemu-options.md` has the table.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::VmState;
use serde_json::{Value, json};
use vm_tests::guest::Guest;
use vm_tests::qmp::Qmp;
use vm_tests::{Daemon, Folios, GuestOptions, Lab, MIB, Qemu, wait};

/// Who runs a guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum By {
    PlainQemu,
    Pagoda,
}

const WORK: &str = "pagoda.work=random:seconds=8,verify pagoda.mib=260";
/// The cap of a guest under Pagoda, which has 512 MiB.
const DRAM: &str = "160M";

pub fn start(lab: &Lab, daemon: &Daemon, by: By, qemu: Qemu, name: &str, more: &str) -> Result<Rc<Guest>> {
    let mut options = GuestOptions::new(name, WORK).qemu(qemu).more(more);
    // QEMU without Pagoda has no such device.
    options.run_options.push("--no-vmgenid".into());
    match by {
        By::PlainQemu => lab.guest_alone(&options),
        By::Pagoda => lab.guest(daemon, &options.dram(DRAM)),
    }
}

/// The state was saved or sent by one and is in the other: the guest verifies every page of it.
pub fn goes_on(daemon: &Daemon, by: By, guest: &Guest) -> Result<()> {
    guest.finish()?;
    if by == By::Pagoda {
        daemon.wait_gone(&guest.name)?;
    }
    Ok(())
}

pub fn was_paged(daemon: &Daemon, by: By, name: &str) -> Result<()> {
    if by == By::PlainQemu {
        return Ok(());
    }
    daemon.wait_vm(name, "more of it was touched than fits", wait::HANG, |vm| vm.swapped_bytes > 32 * MIB).map(drop)
}

fn hmp(qmp: &mut Qmp, line: &str) -> Result<String> {
    let said = qmp.execute("human-monitor-command", json!({ "command-line": line }))?;
    Ok(said.as_str().unwrap_or_default().replace('\r', ""))
}

pub fn quit(guest: &Guest, qmp: &mut Qmp) -> Result<()> {
    // QEMU may close the monitor before it answers.
    let _ = qmp.execute("quit", json!({}));
    guest.wait_exit(wait::HANG).map(drop)
}

fn saved_and_loaded(qemu: Qemu) -> Result<()> {
    Lab::run("savevm and loadvm", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for (from, to) in [(By::PlainQemu, By::Pagoda), (By::Pagoda, By::PlainQemu)] {
            let disk = lab.dir().join(format!("{from:?}.qcow2"));
            let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&disk).arg("16M").status()?;
            ensure!(made.success(), "qemu-img ended with {made}");
            let drive = format!("-drive file={},format=qcow2,if=none,id=s0", disk.display());
            let guest = start(lab, &daemon, from, qemu, "saved", &drive)?;
            guest.wait_phase("random")?;
            was_paged(&daemon, from, "saved")?;
            let mut qmp = guest.qmp()?;
            let said = hmp(&mut qmp, "savevm here")?;
            ensure!(said.is_empty(), "{from:?} does not save: {said}");
            quit(&guest, &mut qmp)?;
            if from == By::Pagoda {
                daemon.wait_gone("saved")?;
            }
            let guest = start(lab, &daemon, to, qemu, "loaded", &format!("{drive} -loadvm here"))?;
            goes_on(&daemon, to, &guest).with_context(|| format!("from {from:?} to {to:?}"))?;
        }
        Ok(())
    })
}

#[test]
fn savevm_of_one_loads_in_the_other() -> Result<()> {
    saved_and_loaded(Qemu::System)
}

#[test]
fn savevm_of_one_loads_in_the_other_qemu_10() -> Result<()> {
    saved_and_loaded(Qemu::Ten)
}

/// Migrates, and waits for the end on the source's side.
fn migrate(source: &mut Qmp, path: &Path) -> Result<()> {
    migrate_to(source, &format!("unix:{}", path.display()))
}

pub fn migrate_to(source: &mut Qmp, uri: &str) -> Result<()> {
    // The guest writes faster than QEMU sends under TCG, so its last pages are sent while it stands still.
    source.execute("migrate-set-parameters", json!({ "downtime-limit": 60_000, "max-bandwidth": 1_u64 << 40 }))?;
    source.execute("migrate", json!({ "uri": uri }))?;
    wait::until("the end of the migration", wait::HANG, || {
        let state = source.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("completed") => Ok(Some(())),
            Some("failed" | "cancelled") => anyhow::bail!("{state}"),
            _ => Ok(None),
        }
    })
}

pub fn capability(name: &str) -> Value {
    json!({ "capabilities": [{ "capability": name, "state": true }] })
}

pub const WAYS: [(By, By); 3] = [(By::PlainQemu, By::Pagoda), (By::Pagoda, By::PlainQemu), (By::Pagoda, By::Pagoda)];

/// Each way, with both sides set up by `set`.
pub fn migrated(what: &str, qemu: Qemu, set: impl Fn(&mut Qmp) -> Result<()>) -> Result<()> {
    Lab::run(what, 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for (number, (from, to)) in WAYS.into_iter().enumerate() {
            let path = lab.dir().join(format!("migration{number}"));
            let guest = start(lab, &daemon, from, qemu, "source", "")?;
            let incoming = start(lab, &daemon, to, qemu, "target", "-incoming defer")?;
            let (mut source, mut target) = (guest.qmp()?, incoming.qmp()?);
            [&mut source, &mut target].into_iter().try_for_each(&set)?;
            target.execute("migrate-incoming", json!({ "uri": format!("unix:{}", path.display()) }))?;
            guest.wait_phase("random")?;
            was_paged(&daemon, from, "source")?;
            migrate(&mut source, &path).with_context(|| format!("from {from:?} to {to:?}"))?;
            quit(&guest, &mut source)?;
            goes_on(&daemon, to, &incoming).with_context(|| format!("from {from:?} to {to:?}"))?;
            if from == By::Pagoda {
                daemon.wait_gone("source")?;
            }
        }
        Ok(())
    })
}

#[test]
fn migration_between_plain_qemu_and_pagoda() -> Result<()> {
    migrated("migration", Qemu::System, |_| Ok(()))
}

#[test]
fn migration_between_plain_qemu_and_pagoda_qemu_10() -> Result<()> {
    migrated("migration", Qemu::Ten, |_| Ok(()))
}

/// QEMU refuses what needs a userfaultfd of its own, and the guest runs on.
fn refused_before_it_moves(qemu: Qemu) -> Result<()> {
    Lab::run("post-copy and background snapshots", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for by in [By::PlainQemu, By::Pagoda] {
            let target = start(lab, &daemon, by, qemu, "target", "-incoming defer")?;
            let mut qmp = target.qmp()?;
            let answer = qmp.execute("migrate-set-capabilities", capability("postcopy-ram"));
            ensure!(answer.is_ok() == (by == By::PlainQemu), "post-copy by {by:?}: {answer:?}");
            quit(&target, &mut qmp)?;
            if by == By::Pagoda {
                daemon.wait_gone("target")?;
            }
            let guest = start(lab, &daemon, by, qemu, "guest", "")?;
            let mut qmp = guest.qmp()?;
            let answer = qmp.execute("migrate-set-capabilities", capability("background-snapshot"));
            ensure!(answer.is_ok() == (by == By::PlainQemu), "background snapshot by {by:?}: {answer:?}");
            guest.finish()?;
            if by == By::Pagoda {
                guest.console.wait("the shim's reason", 0, guest.deadline(), |line| {
                    line.contains("userfaultfd is Pagoda's in this process").then_some(())
                })?;
            }
        }
        daemon.wait_gone("guest")
    })
}

#[test]
fn post_copy_and_background_snapshots_are_refused() -> Result<()> {
    refused_before_it_moves(Qemu::System)
}

#[test]
fn post_copy_and_background_snapshots_are_refused_qemu_10() -> Result<()> {
    refused_before_it_moves(Qemu::Ten)
}

/// Names of the RAM blocks, by which a state is loaded.
fn blocks(mut command: Command, qemu: &Path, words: &str) -> Result<Vec<String>> {
    command.arg(qemu).args(words.split_whitespace());
    command.args(["-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.as_mut().context("QEMU's input")?.write_all(b"info ramblock\n").context("ask QEMU")?;
    let mut output = child.stdout.take().context("QEMU's output")?;
    let (mut said, mut piece) = (String::new(), [0; 4096]);
    // Its prompt comes behind the table.
    while said.find("Block Name").is_none_or(|from| !said[from..].contains("(qemu)")) {
        let len = output.read(&mut piece).context("read QEMU's output")?;
        if len == 0 {
            break;
        }
        said += &String::from_utf8_lossy(&piece[..len]).replace('\r', "");
    }
    // Killed, for QEMU 10 crashes now and then (in aio_co_wake) if a command comes by its other monitor while it quits.
    child.kill().context("end QEMU")?;
    let output = child.wait_with_output()?;
    ensure!(said.contains("Block Name"), "{words}: {said} {}", String::from_utf8_lossy(&output.stderr));
    let from = said.find("Block Name").with_context(|| format!("no blocks in {said}"))?;
    let lines = said[from..].lines().skip(1).take_while(|line| !line.starts_with("(qemu)"));
    Ok(lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

#[test]
fn ram_blocks_are_called_as_in_plain_qemu() -> Result<()> {
    Lab::run("names of RAM blocks", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let file = lab.dir().join("ram");
        let backend = |kind: &str| format!("-m 128M -object {kind},id=r,size=128M -machine memory-backend=r,type=");
        let ram = backend("memory-backend-ram");
        let memfd = backend("memory-backend-memfd");
        let file = backend(&format!("memory-backend-file,share=on,mem-path={}", file.display()));
        let nodes = "-m 128M -object memory-backend-ram,id=a,size=64M -object memory-backend-ram,id=b,size=64M \
                     -smp 2 -numa node,memdev=a -numa node,memdev=b";
        for qemu in [Qemu::System, Qemu::Ten] {
            // QEMU 10 knows no machine type as old as 3.1; both know one before the names changed where they have it.
            let old = if qemu == Qemu::System { "pc-i440fx-3.1" } else { "pc-i440fx-4.0" };
            let new = "pc-q35-7.2";
            let mut lines: Vec<String> =
                ["-m 128M", "", "-M q35 -m 128M", "-M microvm -m 128M", nodes].map(String::from).to_vec();
            lines.push(format!("-M {old} -m 128M"));
            for backend in [&ram, &memfd, &file] {
                lines.extend([format!("{backend}{old}"), format!("{backend}{new}")]);
            }
            for line in lines {
                let plain = blocks(Command::new("env"), &qemu.require()?, &line)?;
                // QEMU leaves its file behind, and with content it would be refused.
                let _ = std::fs::remove_file(lab.dir().join("ram"));
                let mut ours = daemon.cli()?;
                ours.args(["run", "--name", "web1", "--"]);
                let ours = blocks(ours, &qemu.require()?, &line)?;
                daemon.wait_gone("web1")?;
                ensure!(plain == ours, "{line}: {ours:?} instead of {plain:?}");
                ensure!(!plain.is_empty(), "{line}: no blocks");
            }
        }
        Ok(())
    })
}

#[test]
fn a_template_is_refused_and_an_empty_file_is_not() -> Result<()> {
    Lab::run("mem-path", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let run = |path: &Path| -> Result<(Option<i32>, String)> {
            let mut command = daemon.cli()?;
            command.args(["run", "--name", "web1", "--"]).arg(Qemu::System.require()?);
            let object = format!("memory-backend-file,id=r,size=128M,share=off,mem-path={}", path.display());
            command.args(["-m", "128M", "-machine", "memory-backend=r", "-object", &object]);
            command.args(["-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-monitor", "stdio"]);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
            let _ = child.stdin.take().context("QEMU's input")?.write_all(b"quit\n");
            let output = child.wait_with_output()?;
            Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
        };
        let template = lab.dir().join("template");
        std::fs::write(&template, [7; 4096])?;
        let (status, said) = run(&template)?;
        ensure!(status == Some(2) && said.contains("Pagoda's RAM begins empty"), "{status:?}: {said}");
        let empty = lab.dir().join("empty");
        std::fs::File::create(&empty)?.set_len(128 * MIB)?;
        for path in [&empty, &lab.dir().join("absent"), lab.dir()] {
            let (status, said) = run(path)?;
            ensure!(status == Some(0), "{}: {said}", path.display());
            daemon.wait_gone("web1")?;
        }
        Ok(())
    })
}

#[test]
fn qemu_is_asked_about_machines_that_are_not_known() -> Result<()> {
    Lab::run("unknown machines", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        // A target whose machine types are not on the list.
        let program = lab.dir().join("qemu-system-other");
        std::os::unix::fs::symlink(Qemu::System.require()?, &program)?;
        let run = |words: &str| {
            let mut command = daemon.cli()?;
            command.args(["run", "--name", "web1", "--"]);
            blocks(command, &program, words)
        };
        let found = run("-M pc -m 128M")?;
        ensure!(found.contains(&"pc.ram".to_owned()), "{found:?}");
        let error = run("-M pdp11 -m 128M").err().context("an unknown machine was accepted")?;
        ensure!(error.to_string().contains("QEMU does not know it"), "{error}");
        Ok(())
    })
}

#[test]
fn memory_that_has_another_userfaultfd_is_waited_for() -> Result<()> {
    Lab::run("another userfaultfd", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let mut command = daemon.cli()?;
        command.args(["run", "--plain", "--name", "web1", "--memory", "192M", "--"]);
        command.arg(vm_tests::late::c_programs()?.join("holder")).stdin(Stdio::piped()).stdout(Stdio::piped());
        pagoda_sys::toy::process::die_with_parent(&mut command);
        let mut holder = command.spawn().context("start the program")?;
        let mut input = holder.stdin.take().context("its input")?;
        let mut lines = BufReader::new(holder.stdout.take().context("its output")?).lines();
        let mut said = |word: &str| -> Result<()> {
            let line = lines.next().context("it ended")??;
            ensure!(line == word, "{line:?} instead of {word:?}");
            Ok(())
        };
        said("held")?;
        daemon.set_dram_mib("web1", 64)?;
        daemon.wait_vm("web1", "it says what it waits for", wait::HANG, |vm| {
            vm.state == VmState::Running && vm.waits.as_ref().is_some_and(|why| why.contains("userfaultfd of its own"))
        })?;
        writeln!(input)?;
        said("filled")?;
        let vm = daemon.wait_vm("web1", "it is paged", wait::HANG, |vm| vm.armed && vm.resident_bytes <= 64 * MIB)?;
        ensure!(vm.waits.is_none() && vm.swapped_bytes >= 100 * MIB, "{vm:#?}");
        writeln!(input)?;
        said("right")?;
        drop(input);
        ensure!(holder.wait()?.success(), "the program failed");
        daemon.wait_gone("web1")
    })
}

/// Sets a capability or a mode by each way that QEMU has, and expects that QEMU does not know the name.
fn is_unknown_to(qmp: &mut Qmp, qemu: Qemu, name: &str) -> Result<()> {
    let is_capability = name.starts_with("x-");
    let answer = if is_capability {
        qmp.execute("migrate-set-capabilities", capability(name))
    } else {
        qmp.execute("migrate-set-parameters", json!({ "mode": name }))
    };
    let error = answer.err().with_context(|| format!("{name} was set"))?.to_string();
    // QEMU 7.2 has no modes at all.
    let expected =
        if is_capability || qemu == Qemu::Ten { format!("does not accept value '{name}'") } else { "'mode'".into() };
    ensure!(error.contains(&expected), "{name}: {error}");
    let line = if is_capability {
        format!("migrate_set_capability {name} on")
    } else {
        format!("migrate_set_parameter mode {name}")
    };
    let said = hmp(qmp, &line)?;
    ensure!(said.starts_with("Error:"), "{line}: {said:?}");
    Ok(())
}

/// RAM is shared, so that QEMU can leave it out: it must not know how.
fn ram_is_never_left_out(qemu: Qemu) -> Result<()> {
    Lab::run("states without RAM", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let guest = start(lab, &daemon, By::Pagoda, qemu, "guest", "")?;
        let mut qmp = guest.qmp()?;
        let found = qmp.execute("query-memdev", json!({}))?;
        ensure!(found[0]["share"] == true, "QEMU cannot save its state without RAM: {found}");
        for name in ["x-ignore-shared", "cpr-transfer", "cpr-exec"] {
            is_unknown_to(&mut qmp, qemu, name)?;
        }
        let capabilities = qmp.execute("query-migrate-capabilities", json!({}))?;
        let is_off = |one: &Value| one["capability"] == "x-ignore-shared" && one["state"] == false;
        ensure!(capabilities.as_array().is_some_and(|all| all.iter().any(is_off)), "{capabilities}");
        // Capabilities that keep RAM are still known to QEMU.
        qmp.execute("migrate-set-capabilities", capability("xbzrle"))?;
        if qemu == Qemu::Ten {
            qmp.execute("migrate-set-parameters", json!({ "mode": "cpr-reboot" }))?;
        }
        goes_on(&daemon, By::Pagoda, &guest)
    })
}

#[test]
fn what_leaves_ram_out_is_unknown_to_qemu() -> Result<()> {
    ram_is_never_left_out(Qemu::System)
}

#[test]
fn what_leaves_ram_out_is_unknown_to_qemu_10() -> Result<()> {
    ram_is_never_left_out(Qemu::Ten)
}

/// A stream that plain QEMU sends without RAM is not taken for a whole one, and its guest runs on where it was.
fn a_stream_without_ram(qemu: Qemu) -> Result<()> {
    Lab::run("a stream without RAM", 2, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let file =
            format!("memory-backend-file,id=pc.ram,size=512M,share=on,mem-path={}", lab.dir().join("ram").display());
        let shared = format!("-object {file} -machine memory-backend=pc.ram");
        let guest = start(lab, &daemon, By::PlainQemu, qemu, "source", &shared)?;
        let target = start(lab, &daemon, By::Pagoda, qemu, "target", "-incoming defer")?;
        let (mut source, mut incoming) = (guest.qmp()?, target.qmp()?);
        let path = lab.dir().join("migration");
        incoming.execute("migrate-incoming", json!({ "uri": format!("unix:{}", path.display()) }))?;
        guest.wait_phase("random")?;
        source.execute("migrate-set-capabilities", capability("x-ignore-shared"))?;
        // QEMU without a way back cannot tell whether all it has sent was liked.
        let _ = migrate(&mut source, &path);
        let status = target.wait_exit(wait::HANG)?;
        ensure!(!status.success(), "the target ended with {status}");
        target.console.wait("the target's reason", 0, target.deadline(), |line| {
            line.contains("unknown capability x-ignore-shared").then_some(())
        })?;
        daemon.wait_gone("target")?;
        source.execute("cont", json!({}))?;
        goes_on(&daemon, By::PlainQemu, &guest)
    })
}

#[test]
fn a_stream_without_ram_is_refused() -> Result<()> {
    a_stream_without_ram(Qemu::System)
}

#[test]
fn a_stream_without_ram_is_refused_qemu_10() -> Result<()> {
    a_stream_without_ram(Qemu::Ten)
}

#[test]
fn a_state_is_not_taken_over_by_cpr() -> Result<()> {
    Lab::run("CPR", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let channel = |kind: &str| {
            let path = lab.dir().join("nobody-listens");
            json!({ "channel-type": kind, "addr": { "transport": "socket", "type": "unix", "path": path } })
        };
        let more = "-machine aux-ram-share=on,memory-backend=r -object memory-backend-memfd,share=on,id=r,size=512M";
        let guest = start(lab, &daemon, By::PlainQemu, Qemu::Ten, "guest", more)?;
        let mut qmp = guest.qmp()?;
        qmp.execute("migrate-set-parameters", json!({ "mode": "cpr-transfer" }))?;
        let answer = qmp.execute("migrate", json!({ "channels": [channel("main"), channel("cpr")] }));
        let error = answer.err().context("it began")?.to_string();
        ensure!(error.contains("Failed to connect"), "{error}");
        goes_on(&daemon, By::PlainQemu, &guest)?;
        // The same guest on Pagoda does not know the mode, on the command line either.
        let guest = start(lab, &daemon, By::Pagoda, Qemu::Ten, "guest", more)?;
        is_unknown_to(&mut guest.qmp()?, Qemu::Ten, "cpr-transfer")?;
        goes_on(&daemon, By::Pagoda, &guest)?;
        let global = format!("{more} -global migration.mode=cpr-transfer");
        let guest = start(lab, &daemon, By::Pagoda, Qemu::Ten, "guest", &global)?;
        ensure!(!guest.wait_exit(wait::HANG)?.success(), "QEMU knows the mode");
        guest.console.wait("QEMU's reason", 0, guest.deadline(), |line| {
            line.contains("does not accept value 'cpr-transfer'").then_some(())
        })?;
        daemon.wait_gone("guest")
    })
}
