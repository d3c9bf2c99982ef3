//! Clones of guests that verify their memory: each goes on from the same moment, and what one writes no other one has.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{CloneRequest, ErrorCode, HostPatch, NewClone, SnapshotName};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vm_tests::control::Control;
use vm_tests::qmp::Qmp;
use vm_tests::{Daemon, DaemonOptions, Folios, Guest, GuestOptions, Lab, Qemu, wait};

use crate::snapshots::{become_guest, take, wait_durable};
use crate::snapshots_disks::{Disk, qemu_img};

/// Of each VM. What the guest fills does not fit into the DRAM of a clone.
const MEMORY: &str = "-m 192M";
const FILL: &str = "fill 100";
const DRAM: &str = "96M";
/// Guaranteed to each, where there is no room for all: most of what each needs.
const MIN: &str = "176M";

fn options(qemu: Qemu) -> GuestOptions {
    GuestOptions::new("web1", "").qemu(qemu).memory(MEMORY).control()
}

/// Clones that run in the background. Dropped, they are killed.
#[derive(Debug)]
struct Clones {
    dir: PathBuf,
    of: Vec<(String, Pid)>,
    /// By what their sockets' names end with. A connection lasts as long as QEMU.
    controls: BTreeMap<String, Control>,
}

impl Drop for Clones {
    fn drop(&mut self) {
        for (_, pid) in &self.of {
            let _ = kill_process(*pid, Signal::KILL);
        }
    }
}

impl Clones {
    /// A socket that the QEMU of a clone has in the place of one of its source's.
    fn socket(&self, clone: &str, of: &str) -> PathBuf {
        self.dir.join(format!("web1.{of}.{clone}"))
    }

    /// The control port of a clone.
    fn control(&mut self, clone: &str, source: &Guest) -> Result<&mut Control> {
        if !self.controls.contains_key(clone) {
            let control = Control::of_restored(&self.socket(clone, "control"), source.deadline())?;
            self.controls.insert(clone.to_owned(), control);
        }
        self.controls.get_mut(clone).context("it was put there")
    }

    fn generation_id(&self, clone: &str) -> Result<String> {
        generation_id(&mut Qmp::connect(&self.socket(clone, "test-qmp"))?)
    }

    /// All guests end, with a good verdict of their own.
    fn power_off(mut self, daemon: &Daemon, source: &Guest) -> Result<()> {
        let names: Vec<String> = self.of.iter().map(|(name, _)| name.clone()).collect();
        for name in names {
            self.control(&name, source)?.send("poweroff")?;
            daemon.wait_gone(&name)?;
            let log = fs::read_to_string(log_of(&self.dir, &name)).context("read its log")?;
            ensure!(log.contains("PAGODA result ok"), "{name}: {log}");
        }
        self.of.clear();
        Ok(())
    }
}

fn generation_id(qmp: &mut Qmp) -> Result<String> {
    let answer = qmp.execute("query-vm-generation-id", json!({}))?;
    Ok(answer["guid"].as_str().context("QEMU names no generation id")?.to_owned())
}

fn log_of(dir: &Path, clone: &str) -> PathBuf {
    dir.join("logs").join(format!("{clone}.log"))
}

fn run(lab: &Lab, daemon: &Daemon, words: &[&str]) -> Result<Output> {
    let mut command = daemon.cli()?;
    command.args(["vm", "clone"]).args(words).arg("--log-dir").arg(lab.dir().join("logs"));
    command.output().context("run pagoda vm clone")
}

fn clone(lab: &Lab, daemon: &Daemon, words: &[&str]) -> Result<Clones> {
    let done = run(lab, daemon, &[words, &["--json"]].concat())?;
    ensure!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    let printed: Value = serde_json::from_slice(&done.stdout)?;
    println!("{printed}");
    let started = |clone: &Value| {
        let pid = clone["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        Some((clone["name"].as_str()?.to_owned(), pid?))
    };
    let of = printed["clones"].as_array().context("clones")?.iter().map(started);
    let of = of.collect::<Option<_>>().context("names and processes")?;
    Ok(Clones { dir: lab.dir().to_owned(), of, controls: BTreeMap::new() })
}

/// There is the source and nothing else: no VM, no file, nobody who reads the snapshot.
fn ensure_source_alone(lab: &Lab, daemon: &Daemon) -> Result<()> {
    let vms: Vec<String> = daemon.client().vms()?.vms.into_iter().map(|vm| vm.name).collect();
    ensure!(vms == ["web1"], "{vms:?}");
    for dir in [daemon.state_dir().join("vms"), daemon.swap_dir(), lab.dir().join("logs")] {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries {
            let name = entry?.file_name().to_string_lossy().into_owned();
            ensure!(name.starts_with("web1.") || name == "lost+found", "{} has {name}", dir.display());
        }
    }
    let snapshots = daemon.client().snapshots()?.snapshots;
    ensure!(snapshots.iter().all(|of| of.readers.is_empty()), "{snapshots:?}");
    Ok(())
}

/// Whether clones share the memory that they only read.
#[derive(Clone, Copy, PartialEq)]
enum Sharing {
    No,
    Yes,
}

impl Sharing {
    fn daemon(self, lab: &Lab) -> Result<Rc<Daemon>> {
        let more = if self == Sharing::No { vec!["--clone-sharing=false".to_owned()] } else { Vec::new() };
        lab.daemon_with(DaemonOptions { more, ..DaemonOptions::new(Folios::Small) })
    }

    /// The clone borrows, or has all of its memory to itself.
    fn check(self, daemon: &Daemon, clone: &str) -> Result<()> {
        let counters = daemon.vm(clone)?.counters;
        println!("{clone}: {} borrowed, {} private", counters["borrowed_pages"], counters["private_pages"]);
        ensure!((counters["borrowed_chunks"] > 0) == (self == Sharing::Yes), "{clone}: {counters:#?}");
        Ok(())
    }
}

fn go_on(qemu: Qemu, sharing: Sharing) -> Result<()> {
    Lab::run("three clones go on", 4, |lab| {
        let daemon = sharing.daemon(lab)?;
        let guest = lab.guest(&daemon, &options(qemu))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        let mut clones = clone(lab, &daemon, &["web1", "--count", "3", "--name", "job-%d", "--dram", DRAM])?;
        let names = ["job-1", "job-2", "job-3"];
        ensure!(clones.of.iter().map(|(name, _)| name.as_str()).eq(names), "{clones:?}");
        names.iter().try_for_each(|name| sharing.check(&daemon, name))?;
        // Each verifies what the source filled, and then has content of its own.
        names.iter().try_for_each(|name| clones.control(name, &guest)?.send("verify"))?;
        source.run("run random passes=1 write=100")?;
        for name in names {
            let control = clones.control(name, &guest)?;
            control.reply().with_context(|| format!("{name} has what its source had"))?;
            control.send("run random passes=1 write=100")?;
        }
        source.run("verify").context("the source goes on")?;
        for name in names {
            let control = clones.control(name, &guest)?;
            control.reply()?;
            control.run("verify").with_context(|| format!("{name} goes on"))?;
        }
        let of_clones = names.map(|name| clones.generation_id(name)).into_iter().collect::<Result<BTreeSet<_>>>()?;
        let of_source = generation_id(&mut guest.qmp()?)?;
        ensure!(of_clones.len() == 3 && !of_clones.contains(&of_source), "{of_clones:?} {of_source}");
        clones.power_off(&daemon, &guest)?;
        source.send("poweroff")?;
        guest.finish()
    })
}

#[test]
fn three_clones_go_on() -> Result<()> {
    go_on(Qemu::System, Sharing::No)
}

#[test]
fn three_clones_go_on_qemu_10() -> Result<()> {
    go_on(Qemu::Ten, Sharing::No)
}

/// Their caps are below what each writes, so what they have written becomes their own and leaves.
#[test]
fn three_clones_that_share_go_on() -> Result<()> {
    go_on(Qemu::System, Sharing::Yes)
}

#[test]
fn three_clones_that_share_go_on_qemu_10() -> Result<()> {
    go_on(Qemu::Ten, Sharing::Yes)
}

/// Lets time pass, in which guests do what they do.
fn pass(time: Duration) -> Result<()> {
    let began = Instant::now();
    wait::until("time passes", wait::HANG, || Ok((began.elapsed() >= time).then_some(())))
}

/// What an idle clone has of its own is what it has written.
#[test]
fn clones_that_do_nothing_have_little_of_their_own() -> Result<()> {
    const IDLE: Duration = Duration::from_secs(10);
    /// Of each, when it has done nothing for so long.
    const PRIVATE_MAX: u64 = 2 << 20;
    Lab::run("idle clones", 4, |lab| {
        let daemon = Sharing::Yes.daemon(lab)?;
        let guest = lab.guest(&daemon, &options(Qemu::System))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        let mut clones = clone(lab, &daemon, &["web1", "--count", "3", "--name", "job-%d"])?;
        pass(IDLE)?;
        for (name, _) in clones.of.clone() {
            Sharing::Yes.check(&daemon, &name)?;
            let info = daemon.vm(&name)?;
            println!("{name}: {} bytes in DRAM", info.resident_bytes);
            ensure!(info.resident_bytes <= PRIVATE_MAX, "{name}: {:#?}", info.counters);
            clones.control(&name, &guest)?.run("verify")?;
            // What it reads costs it nothing.
            let read = daemon.vm(&name)?;
            println!("{name}: {} bytes in DRAM after it has read all", read.resident_bytes);
        }
        clones.power_off(&daemon, &guest)?;
        source.send("poweroff")?;
        guest.finish()
    })
}

/// Before its guest runs, QEMU has written what it resets and loads, and that is all that a clone has to itself.
#[test]
fn clones_whose_guest_has_not_run_have_next_to_nothing() -> Result<()> {
    const PRIVATE_MAX: u64 = 64 << 10;
    Lab::run("paused clones", 3, |lab| {
        let daemon = Sharing::Yes.daemon(lab)?;
        let guest = lab.guest(&daemon, &options(Qemu::System))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        guest.qmp()?.execute("stop", json!({}))?;
        let clones = clone(lab, &daemon, &["web1", "--count", "2", "--name", "job-%d"])?;
        for (name, _) in &clones.of {
            Sharing::Yes.check(&daemon, name)?;
            let info = daemon.vm(name)?;
            println!("{name}: {} bytes in DRAM", info.resident_bytes);
            ensure!(info.resident_bytes <= PRIVATE_MAX, "{name}: {:#?}", info.counters);
        }
        drop(clones);
        ["job-1", "job-2"].into_iter().try_for_each(|name| daemon.wait_gone(name))?;
        guest.qmp()?.execute("cont", json!({}))?;
        source.run("verify")?;
        source.send("poweroff")?;
        guest.finish()
    })
}

/// The daemon dies again and again while clones write, and while what they have written becomes their own.
#[test]
fn clones_that_share_survive_their_daemon() -> Result<()> {
    const KILLS: u32 = 6;
    Lab::run("clones that share survive", 3, |lab| {
        let daemon = Sharing::Yes.daemon(lab)?;
        let guest = lab.guest(&daemon, &options(Qemu::System))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        let mut clones = clone(lab, &daemon, &["web1", "--count", "2", "--name", "job-%d"])?;
        let names = ["job-1", "job-2"];
        for round in 0..KILLS {
            names.iter().try_for_each(|name| clones.control(name, &guest)?.send("run random passes=1 write=100"))?;
            // The first is squeezed, and so its chunks become its own; the second borrows on.
            daemon.set_dram_mib("job-1", u64::from(84 - round * 4))?;
            pass(Duration::from_millis(200 + 130 * u64::from(round)))?;
            daemon.kill9()?;
            pass(Duration::from_millis(100))?;
            daemon.start_again()?;
            for name in names {
                clones.control(name, &guest)?.reply().with_context(|| format!("{name}, round {round}"))?;
            }
        }
        Sharing::Yes.check(&daemon, "job-2")?;
        // What counts since its start would say nothing of what earlier daemons did.
        let [squeezed, other] = names.map(|name| daemon.vm(name).map(|vm| vm.counters["borrowed_chunks"]));
        let (squeezed, other) = (squeezed?, other?);
        ensure!(squeezed < other, "{squeezed} chunks are borrowed still, and {other} of a clone that was not squeezed");
        for name in names {
            clones.control(name, &guest)?.run("verify")?;
        }
        clones.power_off(&daemon, &guest)?;
        source.send("poweroff")?;
        guest.finish()
    })
}

/// A clone is a VM: it has snapshots, and clones of its own.
fn of_a_clone(sharing: Sharing) -> Result<()> {
    Lab::run("a clone of a clone", 3, |lab| {
        let daemon = sharing.daemon(lab)?;
        let guest = lab.guest(&daemon, &options(Qemu::System))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        // One that is made alone borrows nothing.
        let mut first = clone(lab, &daemon, &["web1", "--count", "2", "--name", "first-%d"])?;
        sharing.check(&daemon, "first-1")?;
        first.control("first-1", &guest)?.run("run random passes=1 write=100")?;
        let mut second = clone(lab, &daemon, &["first-1", "--name", "second", "--dram", DRAM])?;
        second.control("first-1.second", &guest)?.run("verify")?;
        first.control("first-1", &guest)?.run("verify")?;
        drop((first, second));
        ["first-1", "first-2", "second"].into_iter().try_for_each(|name| daemon.wait_gone(name))?;
        source.run("verify")?;
        source.send("poweroff")?;
        guest.finish()
    })
}

#[test]
fn a_clone_of_a_clone() -> Result<()> {
    of_a_clone(Sharing::No)
}

/// A snapshot of a clone is taken when all of its memory is its own.
#[test]
fn a_clone_of_a_clone_that_shares() -> Result<()> {
    of_a_clone(Sharing::Yes)
}

/// The first clone of a snapshot does not wait for the template, which is made when its guest runs. Those after it borrow. The
/// template's memory is the pool's, and goes first when that is short, but never while a clone borrows it.
#[test]
fn the_first_clone_has_a_template_made_for_others() -> Result<()> {
    Lab::run("the first of several clones", 4, |lab| {
        let daemon = Sharing::Yes.daemon(lab)?;
        let guest = lab.guest(&daemon, &options(Qemu::System))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        take(&daemon, "web1", "one")?;
        wait_durable(&daemon, "web1", "one")?;
        let snapshot = SnapshotName::new("web1", "one");
        let template = || Ok::<_, anyhow::Error>(daemon.client().snapshot(&snapshot)?.template_bytes);
        let charged = || Ok::<_, anyhow::Error>(daemon.client().host()?.policy.template_bytes);
        let squeeze = |pool: u64| daemon.client().patch_host(&HostPatch { pool: Some(pool), ..HostPatch::default() });
        let pool = daemon.client().host()?.policy.pool_bytes;

        let mut first = clone(lab, &daemon, &["web1/one", "--name", "first"])?;
        Sharing::No.check(&daemon, "first")?;
        let bytes = wait::until("the template", wait::HANG, || Ok(Some(template()?).filter(|bytes| *bytes > 0)))?;
        ensure!(bytes >= 100 << 20 && charged()? == bytes, "{bytes} bytes, and {} are charged", charged()?);
        let mut second = clone(lab, &daemon, &["web1/one", "--name", "second"])?;
        Sharing::Yes.check(&daemon, "second")?;
        for (clones, name) in [(&mut first, "first"), (&mut second, "second")] {
            clones.control(name, &guest)?.run("verify")?;
        }
        first.power_off(&daemon, &guest)?;

        // The pool is short, and the template is borrowed of.
        squeeze(bytes + (256 << 20))?;
        wait::until("pressure", wait::HANG, || Ok((daemon.client().host()?.policy.state != "high").then_some(())))?;
        second.control("second", &guest)?.run("verify")?;
        ensure!(template()? == bytes, "{} bytes of a template of {bytes} are left", template()?);
        second.power_off(&daemon, &guest)?;
        wait::until("it goes", wait::HANG, || Ok((template()? == 0 && charged()? == 0).then_some(())))?;

        squeeze(pool)?;
        source.run("verify")?;
        source.send("poweroff")?;
        guest.finish()
    })
}

/// Makes the pool so small that two clones fit, and not a third.
fn leave_room_for_two(lab: &Lab, daemon: &Daemon) -> Result<()> {
    /// A part of the pool is kept free, so that a step is not quite as far as it should be.
    const STEPS: u32 = 10;
    for _ in 0..STEPS {
        let done = run(lab, daemon, &["web1/one", "--name", "job", "--dry-run", "--json"])?;
        let room: Value = serde_json::from_slice(&done.stdout)?;
        let of = |key: &str| room[key].as_u64().with_context(|| format!("{key} in {room}"));
        let (needed, free) = (of("memory_needed_bytes")?, of("memory_free_bytes")?);
        if (2 * needed..3 * needed).contains(&free) {
            return Ok(());
        }
        let pool = (daemon.client().host()?.policy.pool_bytes + 5 * needed / 2).saturating_sub(free);
        daemon.client().patch_host(&HostPatch { pool: Some(pool), ..HostPatch::default() })?;
    }
    bail!("the pool leaves no room for two clones")
}

/// Where one cannot be made or started, none is there.
#[test]
fn all_or_none() -> Result<()> {
    Lab::run("all clones or none", 4, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let pids = lab.dir().join("pids");
        fs::create_dir(&pids)?;
        let guest = lab.guest(&daemon, &options(Qemu::System).more(&format!("-pidfile {}/web1", pids.display())))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        // What a VM takes beside that is measured, and changes a little all the time.
        let set = daemon.run_cli(&["vm", "set", "web1", "--min", MIN])?;
        ensure!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
        take(&daemon, "web1", "one")?;
        wait_durable(&daemon, "web1", "one")?;
        let refused = |words: &[&str], status: i32, expected: &str| {
            let done = run(lab, &daemon, words)?;
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            ensure!(done.status.code() == Some(status) && said.contains(expected), "{words:?}: {} {said}", done.status);
            ensure_source_alone(lab, &daemon).with_context(|| format!("{words:?}"))
        };
        refused(&["web1/one", "--count", "2", "--name", "web%d"], 6, "a VM named web1 exists")?;
        let pool = daemon.client().host()?.policy.pool_bytes;
        leave_room_for_two(lab, &daemon)?;
        refused(&["web1/one", "--count", "3", "--name", "job-%d"], 5, "none of 3 clones was made: job-3: ")?;
        refused(&["web1", "--count", "3", "--name", "job-%d"], 5, "none of 3 clones was made: job-3: ")?;
        refused(&["web1/one", "--count", "3", "--name", "job-%d", "--dry-run"], 5, "no room for 3 clones")?;
        daemon.client().patch_host(&HostPatch { pool: Some(pool), ..HostPatch::default() })?;

        // The daemon itself looks at the names, of which one is taken in the middle.
        let words = daemon.client().vm_launch("web1")?.launch.words;
        let new = |name: &str| NewClone { name: name.to_owned(), words: words.clone() };
        let request =
            CloneRequest { from: SnapshotName::new("web1", "one"), clones: vec![new("a"), new("web1")], dram: None };
        let error = daemon.client().clone_vms(&request).err().context("web1 exists")?;
        ensure!(error.code() == Some(ErrorCode::Refused), "{error}");
        ensure_source_alone(lab, &daemon)?;

        // The second QEMU cannot write down its number, and ends.
        fs::create_dir(pids.join("web1.job-2"))?;
        refused(&["web1/one", "--count", "2", "--name", "job-%d"], 7, "the QEMU of job-2 ended with")?;
        refused(&["web1", "--count", "2", "--name", "job-%d"], 7, "web1.job-2")?;
        let snapshots = daemon.client().snapshots()?.snapshots;
        ensure!(snapshots.len() == 1, "those that were taken for clones are gone: {snapshots:?}");
        fs::remove_dir(pids.join("web1.job-2"))?;
        let mut clones = clone(lab, &daemon, &["web1/one", "--count", "2", "--name", "job-%d"])?;
        for name in ["job-1", "job-2"] {
            clones.control(name, &guest)?.run("verify")?;
        }
        clones.power_off(&daemon, &guest)?;
        source.run("verify")?;
        source.send("poweroff")?;
        guest.finish()
    })
}

/// QEMUs in network namespaces of their own: all listen on the same port, and none of them is the host's.
#[test]
fn isolated_clones_have_networks_of_their_own() -> Result<()> {
    Lab::run("isolated clones", 3, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let card = "-netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22 -device virtio-net-pci,netdev=n";
        let guest = lab.guest(&daemon, &options(Qemu::System).more(card))?;
        let mut source = guest.control()?;
        source.run(FILL)?;
        let done = run(lab, &daemon, &["web1", "--name", "job"])?;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        ensure!(done.status.code() == Some(6) && said.contains("--net isolated"), "{said}");
        ensure_source_alone(lab, &daemon)?;
        let mut clones = clone(lab, &daemon, &["web1", "--count", "2", "--name", "job-%d", "--net", "isolated"])?;
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net"));
        let mut namespaces = BTreeSet::from([namespace(guest.pid())?]);
        for (name, pid) in &clones.of {
            ensure!(namespaces.insert(namespace(pid.as_raw_nonzero().get().unsigned_abs())?), "{name} shares one");
        }
        for name in ["job-1", "job-2"] {
            clones.control(name, &guest)?.run("verify")?;
        }
        clones.power_off(&daemon, &guest)?;
        source.send("poweroff")?;
        guest.finish()?;
        wait::until("the source is gone", wait::HANG, || Ok(daemon.client().vms()?.vms.is_empty().then_some(())))
    })
}

/// Each compares its disk with what its memory remembers of it, block by block, while it writes.
fn with_disks(qemu: Qemu, sharing: Sharing) -> Result<()> {
    const WORK: &str = "pagoda.work=blocks:seconds=15:threads=2:write=70";
    Lab::run("clones with disks", 3, |lab| {
        let daemon = sharing.daemon(lab)?;
        let disk = Disk::make(lab)?;
        let options = GuestOptions::new("web1", WORK).memory(MEMORY).qemu(qemu).more(&disk.drive("threads"));
        let guest = lab.guest(&daemon, &options)?;
        guest.wait_phase("blocks")?;
        let refused = |words: &[&str], expected: &str| {
            let done = run(lab, &daemon, words)?;
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            ensure!(done.status.code() == Some(6) && said.contains(expected), "{words:?}: {} {said}", done.status);
            Ok(())
        };
        refused(&["web1", "--name", "job-1"], "is a disk that the guest may write to")?;
        ensure_source_alone(lab, &daemon)?;
        let clones = clone(lab, &daemon, &["web1", "--count", "2", "--name", "job-%d", "--disks"])?;
        let snapshot = daemon.client().snapshots()?.snapshots.pop().context("it was taken")?;
        let layer = snapshot.disks[0].layer.clone().context("it has the disk")?;
        let layer_content = || fs::read(disk.dir.join(&layer)).context("read the layer");
        let before = layer_content()?;
        guest.finish().context("the source goes on")?;
        for (name, _) in &clones.of {
            daemon.wait_gone(name)?;
            let log = fs::read_to_string(log_of(lab.dir(), name)).context("read its log")?;
            ensure!(log.contains("PAGODA result ok"), "{name}: {log}");
            qemu_img(&["check", "-q", &format!("{}.pagoda-clone-{name}", disk.path())])?;
        }
        ensure!(disk.beside("pagoda-clone-")?.len() == 2, "the overlays are the user's");
        ensure!(layer_content()? == before, "nobody writes to the layer");
        let of_clone = |name: &str| fs::read(format!("{}.pagoda-clone-{name}", disk.path()));
        ensure!(of_clone("job-1")? != of_clone("job-2")?, "each has written what it had to write");
        daemon.wait_gone("web1")?;
        disk.check_ended()?;
        let from = snapshot.full_name().to_string();
        refused(&[&from, "--name", "job-1"], "the disk of an earlier clone")?;
        let restored = become_guest(lab, &daemon, &options, &["vm", "restore", "web1", "--from", &from, "--force"])?;
        restored.finish().context("the snapshot is what it was")?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn clones_have_disks_of_their_own() -> Result<()> {
    with_disks(Qemu::System, Sharing::No)
}

/// Direct I/O into what is borrowed.
#[test]
fn clones_that_share_have_disks_of_their_own() -> Result<()> {
    with_disks(Qemu::System, Sharing::Yes)
}

#[test]
fn clones_have_disks_of_their_own_qemu_10() -> Result<()> {
    with_disks(Qemu::Ten, Sharing::No)
}
