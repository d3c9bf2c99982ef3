//! Real QEMUs without the shim, so with a gate that is always open. Their guest is a boot sector that counts the timer's ticks.

use std::cell::Cell;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_core::units::Bytes;
use rustix::event::PollFlags;

use crate::qmp::Monitor;
use crate::qmp::poll::wait_until;
use crate::qmp::state::{
    Gate, RunState, Saved, check, check_same, load, machine, resume, run_state, save, save_after, undo,
};
use crate::qmp::tests::Dir;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the guest counts.
const COUNTER: usize = 0x7e00;
/// Sets the counter to 0; then for each tick of the timer: adds 1 and writes the counter to port 0xe9.
const BOOT_SECTOR: [u8; 22] = [
    0x31, 0xc0, 0x8e, 0xd8, 0xc6, 0x06, 0x00, 0x7e, 0x00, 0xfb, 0xf4, 0xfe, 0x06, 0x00, 0x7e, 0xa0, 0x00, 0x7e, 0xe6,
    0xe9, 0xeb, 0xf3,
];

/// No gate: whether it would be open now.
#[derive(Default)]
struct NoGate(Cell<bool>);

impl Gate for NoGate {
    fn open(&self) -> Result<()> {
        self.0.set(true);
        Ok(())
    }

    fn shut(&self) {
        self.0.set(false);
    }
}

struct Qemu {
    child: Child,
    monitor: Monitor,
    counts: ChildStdout,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

impl Qemu {
    /// With RAM in the file `name`.
    fn start(program: &Path, dir: &Path, name: &str, more: &[&str]) -> Result<Qemu> {
        let boot = dir.join("boot");
        // The firmware takes no disk that is smaller than a cylinder.
        let mut sector = vec![0; 1 << 20];
        sector[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
        sector[510..512].copy_from_slice(&[0x55, 0xaa]);
        fs::write(&boot, sector)?;
        let socket = dir.join(format!("{name}.qmp"));
        let ram = format!("memory-backend-file,id=pc.ram,size=64M,share=on,mem-path={}", dir.join(name).display());
        let mut command = Command::new(program);
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-vga", "std"])
            .args(["-M", "q35,memory-backend=pc.ram", "-m", "64M", "-object", &ram])
            .args(["-drive", &format!("file={},format=raw,if=virtio,readonly=on", boot.display())])
            .args(["-debugcon", "stdio", "-global", "isa-debugcon.iobase=0xe9"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(more);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let counts = child.stdout.take().context("QEMU's output")?;
        let qemu = Qemu { child, monitor: Monitor::new(&socket), counts };
        let deadline = Instant::now() + PATIENCE;
        while run_state(&qemu.monitor).is_err() {
            ensure!(Instant::now() < deadline, "QEMU does not answer");
            std::thread::yield_now();
        }
        Ok(qemu)
    }

    /// The guest's counter when it has counted once more.
    fn next_count(&mut self) -> Result<u8> {
        let mut count = [0];
        wait_until(&self.counts, PollFlags::IN, Instant::now() + PATIENCE).context("wait for the guest to count")?;
        self.counts.read_exact(&mut count).context("QEMU ended")?;
        Ok(count[0])
    }

    fn capabilities(&self) -> Result<Vec<String>> {
        let all = self.monitor.execute("query-migrate-capabilities")?;
        let on = all.as_array().context("capabilities")?.iter().filter(|one| one["state"] == true);
        Ok(on.map(|one| one["capability"].as_str().unwrap_or_default().to_owned()).collect())
    }
}

fn saved_and_loaded(program: &Path) -> Result<()> {
    let dir = Dir::new();
    let (mut source, gate) = (Qemu::start(program, &dir.0, "source", &[])?, NoGate::default());
    check(&source.monitor).map_err(anyhow::Error::msg)?;
    let qemu = machine(&source.monitor)?;
    ensure!(qemu.machine.starts_with("pc-q35-") && qemu.version.split('.').count() == 3, "{qemu:?}");
    ensure!(qemu.cpu.as_ref().is_some_and(|cpu| !cpu.features.is_empty()), "{qemu:?}");
    while source.next_count()? < 2 {}

    // What goes wrong costs nothing.
    let error = save(&source.monitor, &gate, Bytes(4096), Instant::now() + PATIENCE).err().context("it fits")?;
    ensure!(error.left.is_none() && error.to_string().contains("longer"), "{error}");
    ensure!(run_state(&source.monitor)? == RunState::Running && source.capabilities()? == ["events"]);
    source.next_count()?;

    let Saved { state, pause } = save(&source.monitor, &gate, Bytes::from_mib(64), Instant::now() + PATIENCE)?;
    ensure!(!gate.0.get() && source.capabilities()? == ["events"]);
    ensure!(state.len() < 4 << 20, "{} bytes: RAM is in it", state.len());
    fs::copy(dir.0.join("source"), dir.0.join("target"))?;
    let stood_us = resume(pause)?.context("QEMU tells the time")?;
    ensure!(Duration::from_micros(stood_us) < PATIENCE, "{stood_us}");
    source.next_count()?;

    let counted = fs::read(dir.0.join("target"))?[COUNTER];
    let mut target = Qemu::start(program, &dir.0, "target", &["-S", "-incoming", "defer"])?;
    load(&target.monitor, &gate, &mut &state[..], Instant::now() + PATIENCE)?;
    ensure!(!gate.0.get() && target.capabilities()? == ["events"]);
    target.monitor.execute("cont")?;
    let next = target.next_count()?;
    ensure!(next.wrapping_sub(counted) <= 1, "it counted to {counted} and goes on with {next}");

    // One that its user paused stays paused, and has to run before it can be saved again.
    target.monitor.execute("stop")?;
    let paused = save(&target.monitor, &gate, Bytes::from_mib(64), Instant::now() + PATIENCE)?;
    ensure!(!paused.pause.was_running());
    paused.pause.check()?;
    drop(paused);
    ensure!(check(&target.monitor).is_err_and(|why| why.contains("cont")));
    drop(target);

    // A part of a state is no state.
    let broken = Qemu::start(program, &dir.0, "target", &["-S", "-incoming", "defer"])?;
    let half = &state[..state.len() / 2];
    ensure!(load(&broken.monitor, &gate, &mut &half[..], Instant::now() + PATIENCE).is_err());
    ensure!(!gate.0.get());
    Ok(())
}

/// What a guest has seen of its CPU is there in a QEMU that goes on with it, or is missed by name.
fn cpus_compared(program: &Path) -> Result<()> {
    let dir = Dir::new();
    let cpu = |name, model: &str| -> Result<_> {
        machine(&Qemu::start(program, &dir.0, name, &["-smp", "2", "-cpu", model])?.monitor)
    };
    let rich = cpu("rich", "qemu64,+avx2,+rdrand,+xsave")?;
    let poor = cpu("poor", "qemu64")?;
    check_same(&rich, &rich)?;
    check_same(&poor, &rich).context("more than it has seen")?;
    let why = check_same(&rich, &poor).err().context("it would miss them")?.to_string();
    ensure!(["avx2", "rdrand", "xsave"].iter().all(|name| why.contains(name)), "{why}");
    let intel = cpu("intel", "qemu64,vendor=GenuineIntel")?;
    ensure!(check_same(&poor, &intel).is_err_and(|why| why.to_string().contains("AuthenticAMD")), "another vendor");
    Ok(())
}

/// What is done while the guest stands still is over before its state is saved; if it fails, the guest runs again.
fn something_is_done_before(program: &Path) -> Result<()> {
    let dir = Dir::new();
    let (mut source, gate) = (Qemu::start(program, &dir.0, "source", &[])?, NoGate::default());
    source.next_count()?;
    let deadline = || Instant::now() + PATIENCE;
    let mut stood = false;
    let mut fail = || -> Result<()> {
        stood = run_state(&source.monitor)? == RunState::FinishMigrate;
        anyhow::bail!("it cannot be done")
    };
    let saved = save_after(&source.monitor, &gate, Bytes::from_mib(64), deadline(), Some(&mut fail));
    let error = saved.err().context("it cannot be done, and the state is saved")?;
    ensure!(stood && error.left.is_none() && error.to_string().contains("cannot be done"), "{stood} {error}");
    ensure!(run_state(&source.monitor)? == RunState::Running && source.capabilities()? == ["events"]);
    source.next_count()?;

    // As a daemon finds it that starts when the one before has died meanwhile.
    let mut undone = || -> Result<()> {
        undo(&source.monitor, &gate, &[RunState::PostMigrate])?;
        ensure!(run_state(&source.monitor)? == RunState::Running && source.capabilities()? == ["events"]);
        anyhow::bail!("it is undone")
    };
    let saved = save_after(&source.monitor, &gate, Bytes::from_mib(64), deadline(), Some(&mut undone));
    let error = saved.err().context("it is undone, and the state is saved")?;
    ensure!(error.to_string().contains("it is undone"), "{error}");
    source.next_count()?;

    let mut calls = 0;
    let mut count = || -> Result<()> {
        calls += 1;
        Ok(())
    };
    let Saved { state, pause } = save_after(&source.monitor, &gate, Bytes::from_mib(64), deadline(), Some(&mut count))?;
    ensure!(calls == 1 && !state.is_empty() && pause.was_running() && source.capabilities()? == ["events"]);
    resume(pause)?;
    source.next_count()?;
    Ok(())
}

fn of(program: PathBuf) -> Result<()> {
    ensure!(program.is_file(), "{} is missing: run scripts/install-deps.sh test", program.display());
    saved_and_loaded(&program)?;
    cpus_compared(&program)?;
    something_is_done_before(&program)
}

#[test]
fn a_state_is_loaded_by_another_qemu() -> Result<()> {
    of("/usr/bin/qemu-system-x86_64".into())
}

#[test]
fn a_state_is_loaded_by_another_qemu_10() -> Result<()> {
    of(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/qemu10/qemu-system-x86_64"))
}
