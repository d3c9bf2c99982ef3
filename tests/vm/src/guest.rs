//! A QEMU guest under `pagoda run`, whose process 1 verifies its memory and reports on the console.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_guest::lines::Line;
use testkit::qmp::Qmp;

use crate::console::Console;
use crate::control::Control;
use crate::daemon::{Daemon, ram_name};
use crate::programs::{self, Qemu};
use crate::{accel, wait};

/// How long a guest may live unless a test says more: no measure of speed, but the end of a hang.
const DEADLINE_DEFAULT: Duration = wait::LIFE;
/// From the verdict to the end of the process.
const EXIT_MAX: Duration = wait::HANG;
/// Between two times that a guest is told that it is enough.
const WORD_EVERY: Duration = Duration::from_secs(1);

/// How to start a guest.
#[derive(Debug, Clone)]
pub struct GuestOptions {
    pub name: String,
    pub qemu: Qemu,
    /// QEMU's words for memory.
    pub memory: Vec<String>,
    /// The cap that `pagoda run --dram` gets, if any.
    pub dram: Option<String>,
    pub cpus: u32,
    /// Added to the kernel's command line.
    pub append: String,
    /// More of QEMU's command line.
    pub more: Vec<String>,
    /// More options of `pagoda run`.
    pub run_options: Vec<String>,
    pub tools: bool,
    pub boots: Boots,
    pub may_reboot: bool,
    pub control: bool,
    pub deadline: Duration,
}

/// What is in a guest's initramfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boots {
    /// The test program of `tests/guest`, with what it needs.
    Guest,
    /// What clients of a pool run.
    Client,
    /// What hosts of VMs run.
    Host,
    /// Databases, with what their administrator types.
    Databases,
}

impl GuestOptions {
    /// A guest that does `work` (`pagoda.` settings, see the guest's README).
    pub fn new(name: &str, work: &str) -> Self {
        Self {
            name: name.into(),
            qemu: Qemu::System,
            memory: words("-m 512M"),
            dram: None,
            cpus: 1,
            append: work.into(),
            more: Vec::new(),
            run_options: Vec::new(),
            tools: false,
            boots: Boots::Guest,
            may_reboot: false,
            control: false,
            deadline: DEADLINE_DEFAULT,
        }
    }

    /// QEMU's words for memory, separated by blanks.
    pub fn memory(mut self, text: &str) -> Self {
        self.memory = words(text);
        self
    }

    pub fn dram(mut self, size: &str) -> Self {
        self.dram = Some(size.into());
        self
    }

    pub fn qemu(mut self, qemu: Qemu) -> Self {
        self.qemu = qemu;
        self
    }

    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// More of QEMU's words, separated by blanks.
    pub fn more(mut self, text: &str) -> Self {
        self.more.extend(words(text));
        self
    }

    /// Gives it a second serial port, through which the test leads it.
    pub fn control(mut self) -> Self {
        self.control = true;
        self.append += " pagoda.work=control";
        self
    }

    pub fn may_reboot(mut self) -> Self {
        self.may_reboot = true;
        self
    }

    pub fn tools(mut self) -> Self {
        self.tools = true;
        self
    }

    /// A client of a pool: Debian's full kernel, and `pagoda` with what its users run beside it.
    pub fn client(mut self) -> Self {
        self.boots = Boots::Client;
        self
    }

    /// A host of VMs: Debian's full kernel, the daemon, and the toy VMM.
    pub fn host(mut self) -> Self {
        self.boots = Boots::Host;
        self
    }

    /// A guest with databases: Debian's full kernel, redis and SQLite.
    pub fn databases(mut self) -> Self {
        self.boots = Boots::Databases;
        self
    }

    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// QEMU's command line, without the program.
    ///
    /// # Errors
    /// No images.
    pub fn qemu_words(&self, dir: &Path) -> Result<Vec<String>> {
        let images = match self.boots {
            Boots::Guest => programs::images()?,
            Boots::Client => programs::client_images()?,
            Boots::Host => programs::host_images()?,
            Boots::Databases => programs::database_images()?,
        };
        let initrd = if self.tools { images.tools_initrd } else { images.initrd };
        let mut all = words("-M q35 -accel");
        all.push(accel::accelerator()?.into());
        all.extend(self.memory.iter().cloned());
        all.extend(words(&format!("-smp {} -nodefaults -no-user-config -display none", self.cpus)));
        all.extend(words("-serial stdio"));
        if self.control {
            all.extend(["-serial".into(), format!("unix:{},server=on,wait=off", self.control_path(dir).display())]);
        }
        all.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", self.qmp_path(dir).display())]);
        if !self.may_reboot {
            all.push("-no-reboot".into());
        }
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        all.extend(["-kernel".into(), path(images.kernel), "-initrd".into(), path(initrd)]);
        // Without a check of the timer, as under KVM: where the host is busy, a guest under TCG takes its timer for broken, and panics.
        let append = format!("console=ttyS0 quiet panic=-1 no_timer_check {}", self.append);
        all.extend(["-append".into(), append]);
        all.extend(self.more.iter().cloned());
        Ok(all)
    }

    fn qmp_path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.test-qmp", self.name))
    }

    fn control_path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.control", self.name))
    }
}

/// Splits a command line at its blanks.
pub fn words(text: &str) -> Vec<String> {
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

/// A guest that runs, or has run.
#[derive(Debug)]
pub struct Guest {
    pub name: String,
    pub console: Console,
    child: Mutex<Child>,
    pid: u32,
    deadline: Instant,
    qmp_path: PathBuf,
    control_path: PathBuf,
}

impl Guest {
    /// Starts a guest; its sockets go into `dir`.
    ///
    /// # Errors
    /// No such program. A refusal by `pagoda run` shows in the console and the exit status.
    pub fn start(daemon: &Daemon, dir: &Path, options: &GuestOptions) -> Result<Self> {
        let mut command = daemon.cli()?;
        command.args(["run", "--name", &options.name]).args(&options.run_options);
        if let Some(dram) = &options.dram {
            command.args(["--dram", dram]);
        }
        command.arg("--").arg(options.qemu.require()?).args(options.qemu_words(dir)?);
        Self::spawn(command, dir, options)
    }

    /// Starts a guest of which Pagoda's daemon knows nothing.
    ///
    /// # Errors
    /// No such program.
    pub fn start_alone(dir: &Path, options: &GuestOptions) -> Result<Self> {
        let mut command = Command::new(options.qemu.require()?);
        command.args(options.qemu_words(dir)?);
        Self::spawn(command, dir, options)
    }

    /// Starts `command`, which becomes the QEMU of `options`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(mut command: Command, dir: &Path, options: &GuestOptions) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        pagoda_sys::toy::process::die_with_parent(&mut command);
        let mut child = command.spawn().context("start the guest")?;
        let console = Console::default();
        console.collect(child.stdout.take().context("the guest's output")?, "");
        console.collect(child.stderr.take().context("the guest's errors")?, "stderr: ");
        Ok(Self {
            name: options.name.clone(),
            console,
            pid: child.id(),
            child: Mutex::new(child),
            deadline: Instant::now() + options.deadline,
            qmp_path: options.qmp_path(dir),
            control_path: options.control_path(dir),
        })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits for a line of the guest from line `from` on, such as `wait("done", ..)`; a verdict before it is an error.
    ///
    /// # Errors
    /// The deadline is over, or the guest ended.
    pub fn wait<T>(&self, what: &str, from: usize, mut find: impl FnMut(&Line<'_>) -> Option<T>) -> Result<(usize, T)> {
        let find = |text: &str| {
            let line = Line::parse(text)?;
            find(&line).map(Ok).or_else(|| line.result().map(|verdict| Err(verdict.to_owned())))
        };
        let found = self.console.wait(&format!("{what} of {}", self.name), from, self.deadline, find)?;
        match found {
            (at, Ok(found)) => Ok((at, found)),
            (_, Err(verdict)) => bail!("{} ended with {verdict:?} before {what}", self.name),
        }
    }

    /// Waits until the guest's program runs.
    ///
    /// # Errors
    /// As `wait`.
    pub fn wait_ready(&self) -> Result<()> {
        self.wait("ready", 0, |line| (line.kind == "ready").then_some(())).map(drop)
    }

    /// Waits until the guest is in this phase and at work on its memory.
    ///
    /// # Errors
    /// As `wait`.
    pub fn wait_phase(&self, phase: &str) -> Result<()> {
        self.wait(phase, 0, |line| (line.kind == "progress" && line.get("phase") == Some(phase)).then_some(()))
            .map(drop)
    }

    /// Waits for the verdict `ok` and the end of QEMU.
    ///
    /// # Errors
    /// Any other verdict, or none.
    pub fn finish(&self) -> Result<()> {
        let find = |text: &str| Line::parse(text)?.result().map(str::to_owned);
        let (_, verdict) = self.console.wait(&format!("the verdict of {}", self.name), 0, self.deadline, find)?;
        ensure!(verdict == "ok", "{}: result {verdict}", self.name);
        let status = self.wait_exit(EXIT_MAX)?;
        ensure!(status.success(), "{}: QEMU ended with {status}", self.name);
        Ok(())
    }

    /// As [`Guest::finish`], and tells the guest that it is enough: a step that has a time does a part of a pass more, and ends.
    ///
    /// # Errors
    /// As `finish`.
    pub fn finish_soon(&self) -> Result<()> {
        let is_verdict = |text: &str| Line::parse(text).is_some_and(|line| line.result().is_some());
        self.say_enough("its verdict", || Ok(self.console.is_over(is_verdict).then_some(())))?;
        self.finish()
    }

    /// As [`Guest::wait_exit`], and tells the guest that it is enough.
    ///
    /// # Errors
    /// As `wait_exit`.
    pub fn wait_exit_soon(&self) -> Result<ExitStatus> {
        self.say_enough("its end", || self.try_wait())?;
        self.wait_exit(EXIT_MAX)
    }

    fn try_wait(&self) -> Result<Option<ExitStatus>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait().context("look after the guest")
    }

    /// Again and again: a QEMU that still loads the state of a VM drops what it hears.
    fn say_enough<T>(&self, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let mut input = self.child.lock().unwrap_or_else(PoisonError::into_inner).stdin.take().context("its input")?;
        let mut said: Option<Instant> = None;
        wait::until(what, self.deadline.saturating_duration_since(Instant::now()), || {
            if said.is_none_or(|said| said.elapsed() >= WORD_EVERY) {
                said = Some(Instant::now());
                // One whose work is over may have ended.
                let _ = writeln!(input, "enough");
            }
            look()
        })
    }

    /// Waits for the end of the process.
    ///
    /// # Errors
    /// It does not end.
    pub fn wait_exit(&self, max: Duration) -> Result<ExitStatus> {
        let status = wait::until(&format!("the end of {}", self.name), max, || self.try_wait())?;
        // Its last words, too.
        self.console.wait_end();
        Ok(status)
    }

    /// Kills QEMU and waits until it is gone.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill9(&self) -> Result<()> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        child.kill().context("kill QEMU")?;
        child.wait().context("wait for QEMU")?;
        Ok(())
    }

    /// The test's own monitor.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn qmp(&self) -> Result<Qmp> {
        Qmp::connect(&self.qmp_path)
    }

    /// The second serial port.
    ///
    /// # Errors
    /// It cannot be connected, or the guest is not there.
    pub fn control(&self) -> Result<Control> {
        Control::connect(&self.control_path, self.deadline)
    }

    /// The same of a guest that was made of a snapshot.
    ///
    /// # Errors
    /// It cannot be connected.
    pub fn restored_control(&self) -> Result<Control> {
        Control::of_restored(&self.control_path, self.deadline)
    }

    /// Memory that the VM's RAM files take, by the kernel's own account.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn ram_bytes(&self) -> Result<u64> {
        ram_bytes_of(self.pid, &self.name)
    }
}

/// Memory in the RAM files that a process has open.
///
/// # Errors
/// The process is gone.
pub fn ram_bytes_of(pid: u32, vm: &str) -> Result<u64> {
    /// Unit of `st_blocks`, whatever the file system (stat(2)).
    const BLOCK_BYTES: u64 = 512;
    let mut seen = Vec::new();
    let mut bytes = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).context("list the fds of the VMM")? {
        let path = entry?.path();
        // Fds come and go meanwhile.
        let Ok(target) = fs::read_link(&path) else { continue };
        if !target.to_string_lossy().contains(&ram_name(vm)) {
            continue;
        }
        let meta = fs::metadata(&path).context("look at the RAM file")?;
        if !seen.contains(&(meta.dev(), meta.ino())) {
            seen.push((meta.dev(), meta.ino()));
            bytes += meta.blocks() * BLOCK_BYTES;
        }
    }
    Ok(bytes)
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // It may be gone already; either way it has to be reaped.
        let _ = child.kill();
        let _ = child.wait();
    }
}
