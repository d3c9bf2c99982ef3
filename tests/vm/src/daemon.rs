//! A private pagodad: its own directories and sockets.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{
    Client, ClientError, ErrorCode, SampleInfo, SampleRequest, VmInfo, VmPatch, WhatIfRequest, counter, vm_file_name,
};
use pagoda_sys::toy::process;
use rustix::process::{Pid, Signal, kill_process};

use crate::{MIB, programs, wait};

/// A daemon that does not answer for so long is broken.
const START_MAX: Duration = wait::HANG;
/// It waits for its engines.
const STOP_MAX: Duration = wait::HANG;
const LOG_TAIL_BYTES: u64 = 6000;

/// Pages of which size RAM is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Folios {
    /// 1 MiB, by `--tune-host`.
    Large,
    /// 4 KiB, without large folios.
    Small,
}

/// How to start a daemon.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    pub folios: Folios,
    /// Instead of a directory of its own.
    pub swap_dir: Option<PathBuf>,
    /// Instead of the one under test.
    pub shim: Option<PathBuf>,
    /// Directory of the sockets and the log, instead of the state directory.
    pub run_dir: Option<PathBuf>,
    /// Where metrics are served; nowhere unless given.
    pub metrics: Option<String>,
    /// More of the command line.
    pub more: Vec<String>,
}

impl DaemonOptions {
    pub fn new(folios: Folios) -> Self {
        Self { folios, swap_dir: None, shim: None, run_dir: None, metrics: None, more: Vec::new() }
    }

    pub fn swap_dir(mut self, dir: &Path) -> Self {
        self.swap_dir = Some(dir.to_owned());
        self
    }
}

/// A daemon, running or not.
#[derive(Debug)]
pub struct Daemon {
    dir: PathBuf,
    options: DaemonOptions,
    /// The program; a test may replace it.
    program: Mutex<PathBuf>,
    child: Mutex<Child>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Daemon {
    /// Starts one with its files in `dir`, which must not exist.
    ///
    /// # Errors
    /// It does not start; the text has its log.
    pub fn start(dir: &Path, options: DaemonOptions) -> Result<Self> {
        fs::create_dir(dir).with_context(|| format!("make {}", dir.display()))?;
        let program = programs::bin_dir()?.join("pagodad");
        let child = spawn(&program, dir, &options)?;
        let daemon = Self { dir: dir.to_owned(), options, program: Mutex::new(program), child: Mutex::new(child) };
        daemon.wait_until_it_answers()?;
        Ok(daemon)
    }

    pub fn client(&self) -> Client {
        Client::new(self.socket())
    }

    pub fn socket(&self) -> PathBuf {
        run_dir(&self.dir, &self.options).join("pagoda.sock")
    }

    pub fn attach_socket(&self) -> PathBuf {
        run_dir(&self.dir, &self.options).join("attach.sock")
    }

    pub fn state_dir(&self) -> &Path {
        &self.dir
    }

    pub fn swap_dir(&self) -> PathBuf {
        self.options.swap_dir.clone().unwrap_or_else(|| self.dir.join("swap"))
    }

    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Kills it without warning, and waits until it is gone.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill9(&self) -> Result<()> {
        let mut child = lock(&self.child);
        child.kill().context("kill pagodad")?;
        child.wait().context("wait for pagodad")?;
        Ok(())
    }

    /// Asks it to end, as systemd does, and waits.
    ///
    /// # Errors
    /// It does not end, or with an error.
    pub fn stop(&self) -> Result<()> {
        let mut child = lock(&self.child);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("pid of pagodad")?;
        kill_process(pid, Signal::TERM).context("send SIGTERM to pagodad")?;
        let status = wait::until("pagodad ends after SIGTERM", STOP_MAX, || Ok(child.try_wait()?))?;
        ensure!(status.success(), "pagodad ended with {status} after SIGTERM");
        Ok(())
    }

    /// Starts it again; gives the time until it answered.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_again(&self) -> Result<Duration> {
        let start = Instant::now();
        *lock(&self.child) = spawn(&lock(&self.program), &self.dir, &self.options)?;
        self.wait_until_it_answers()?;
        Ok(start.elapsed())
    }

    /// Starts it again, and does not wait for its answer.
    ///
    /// # Errors
    /// No such program.
    pub fn start_unanswered(&self) -> Result<()> {
        *lock(&self.child) = spawn(&lock(&self.program), &self.dir, &self.options)?;
        Ok(())
    }

    /// From the next start on another program is the daemon.
    pub fn replace_program(&self, program: &Path) {
        *lock(&self.program) = program.to_owned();
    }

    /// What it says of a VM.
    ///
    /// # Errors
    /// No such VM, or no answer.
    pub fn vm(&self, name: &str) -> Result<VmInfo> {
        self.client().vm(name).with_context(|| format!("ask the daemon for {name}"))
    }

    /// Sets a VM's cap.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn set_dram_mib(&self, name: &str, mib: u64) -> Result<()> {
        let patch = VmPatch { dram: Some(mib * MIB), ..VmPatch::default() };
        self.client().patch(name, &patch).with_context(|| format!("set the cap of {name}"))?;
        Ok(())
    }

    /// Begins a sampling period with these pages, and waits until all of them are watched.
    ///
    /// # Errors
    /// They are not before long.
    pub fn sample(&self, name: &str, pages: &[u64]) -> Result<SampleInfo> {
        const WATCHED_MAX: Duration = Duration::from_secs(120);
        let client = self.client();
        let began = client.sample(name, &SampleRequest { pages: pages.to_vec() })?;
        wait::until(&format!("{name}: all sampled pages are watched"), WATCHED_MAX, || {
            let info = client.sampled(name)?;
            ensure!(info.period == began.period, "another period began: {info:?} after {began:?}");
            Ok((info.watched as usize == pages.len()).then_some(info))
        })
    }

    /// What became of the sampling period's pages so far.
    ///
    /// # Errors
    /// No such VM.
    pub fn sampled(&self, name: &str) -> Result<SampleInfo> {
        self.client().sampled(name).with_context(|| format!("look at the sample of {name}"))
    }

    /// Pages a second from swap that are predicted for another cap; `None` while nothing is known.
    ///
    /// # Errors
    /// No such VM.
    pub fn page_ins_with_dram_mib(&self, name: &str, mib: u64) -> Result<Option<f64>> {
        let request = WhatIfRequest { dram: Some(mib * MIB), ..WhatIfRequest::default() };
        match self.client().what_if(name, &request) {
            Ok(reply) => Ok(reply.page_ins_per_s_then),
            // No plan was made with it yet.
            Err(error) if error.code() == Some(ErrorCode::WrongState) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("ask what {mib} MiB would mean for {name}")),
        }
    }

    /// Waits until there is a VM of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn wait_made(&self, name: &str) -> Result<()> {
        wait::until(&format!("{name} is made"), wait::HANG, || Ok(self.client().vm(name).ok().map(drop)))
    }

    /// Waits until a VM is as wanted; `what` names that.
    ///
    /// # Errors
    /// It is not after `max`; the text has what it is instead.
    pub fn wait_vm(&self, name: &str, what: &str, max: Duration, wanted: impl Fn(&VmInfo) -> bool) -> Result<VmInfo> {
        let mut last = None;
        let found = wait::until(&format!("{name}: {what}"), max, || {
            let info = self.vm(name)?;
            let good = wanted(&info);
            last = Some(info.clone());
            Ok(good.then_some(info))
        });
        found.with_context(|| format!("it is {last:#?}"))
    }

    /// Waits until so many more pages of a VM came in, and as many went out. How long that takes is the disk's matter: only
    /// a standstill is a failure. The counters start anew with each daemon.
    ///
    /// # Errors
    /// Nothing moved for a while.
    pub fn wait_paged(&self, name: &str, pages: u64) -> Result<()> {
        /// Longer than any single request waits on a busy disk.
        const STANDSTILL_MAX: Duration = Duration::from_secs(120);
        /// Against a daemon that counts without end and never gets there.
        const PAGED_MAX: Duration = Duration::from_secs(1800);
        let moved = || -> Result<[u64; 2]> {
            let info = self.vm(name)?;
            Ok([counter::PAGES_IN, counter::PAGES_OUT].map(|name| info.counters.get(name).copied().unwrap_or(0)))
        };
        let before = moved()?;
        let (mut last, mut since) = (before, Instant::now());
        wait::until(&format!("{name}: {pages} pages in and out"), PAGED_MAX, || {
            let now = moved()?;
            if now != last {
                (last, since) = (now, Instant::now());
            }
            ensure!(
                since.elapsed() < STANDSTILL_MAX,
                "{name}: paging stands still at {now:?}, of {before:?} + {pages}"
            );
            Ok(now.iter().zip(before).all(|(now, before)| *now >= before + pages).then_some(()))
        })
    }

    /// Waits until a VM that ended is forgotten, and checks that nothing of it is left on disk.
    ///
    /// # Errors
    /// Something is left.
    pub fn wait_gone(&self, name: &str) -> Result<()> {
        wait::until(&format!("{name} is forgotten"), wait::HANG, || match self.client().vm(name) {
            Ok(_) => Ok(None),
            Err(error) if error.code() == Some(pagoda_api::ErrorCode::NoSuchVm) => Ok(Some(())),
            Err(error) => Err(error.into()),
        })?;
        // The name is free now, so the files of the next VM of that name may be made at once.
        for path in self.files_of(name) {
            ensure!(!path.exists(), "{} is left", path.display());
        }
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).context("read the daemon's maps")?;
        let mapped = maps.lines().find(|line| line.contains(&ram_name(name)));
        ensure!(mapped.is_none(), "the daemon still maps the RAM of {name}: {mapped:?}");
        Ok(())
    }

    /// Files of a VM on disk: record, monitor, swap, and which pages are in the image that it was made of.
    pub fn files_of(&self, name: &str) -> [PathBuf; 4] {
        let (vms, file) = (self.dir.join("vms"), vm_file_name(name));
        let swap = self.swap_dir().join(format!("{file}.swap"));
        [vms.join(format!("{file}.vm")), vms.join(format!("{file}.qmp")), swap, vms.join(format!("{file}.image"))]
    }

    /// The command line tool, pointed at this daemon.
    ///
    /// # Errors
    /// It is not built.
    pub fn cli(&self) -> Result<Command> {
        let mut command = Command::new(programs::bin_dir()?.join("pagoda"));
        command.arg("--socket").arg(self.socket()).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs the tool to its end.
    ///
    /// # Errors
    /// It cannot be started; how it ended is in the output.
    pub fn run_cli(&self, arguments: &[&str]) -> Result<Output> {
        self.cli()?.args(arguments).output().context("run pagoda")
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let read = || -> std::io::Result<String> {
            let mut file = File::open(run_dir(&self.dir, &self.options).join("pagodad.log"))?;
            let len = file.metadata()?.len();
            file.seek(SeekFrom::Start(len.saturating_sub(LOG_TAIL_BYTES)))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        read().unwrap_or_else(|error| format!("no log: {error}"))
    }

    /// Everything it can tell about what went wrong.
    pub fn post_mortem(&self) -> String {
        let mut text = format!("--- log of {}\n{}", self.dir.display(), self.log_tail());
        let vms = match self.client().vms() {
            Ok(list) => list.vms,
            Err(error) => return format!("{text}--- it does not answer: {error}\n"),
        };
        for vm in vms {
            let explained = self.client().explain(&vm.name);
            text += &format!("--- {} {:#?}\n--- explain: {explained:#?}\n", vm.name, vm);
        }
        text
    }

    fn wait_until_it_answers(&self) -> Result<()> {
        let client = self.client();
        wait::until("pagodad answers", START_MAX, || {
            if let Some(status) = lock(&self.child).try_wait().context("look after pagodad")? {
                bail!("pagodad ended with {status}:\n{}", self.log_tail());
            }
            match client.version() {
                Ok(_) => Ok(Some(())),
                Err(ClientError::NotRunning { .. }) => Ok(None),
                Err(error) => Err(error.into()),
            }
        })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let mut child = lock(&self.child);
        // It may be gone already; either way it has to be reaped.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// What the name of a VM's RAM file contains.
pub fn ram_name(vm: &str) -> String {
    format!("/memfd:{vm} ")
}

fn run_dir<'a>(dir: &'a Path, options: &'a DaemonOptions) -> &'a Path {
    options.run_dir.as_deref().unwrap_or(dir)
}

fn spawn(program: &Path, dir: &Path, options: &DaemonOptions) -> Result<Child> {
    let mut command = command(program, dir, options)?;
    let log = File::options()
        .create(true)
        .append(true)
        .open(run_dir(dir, options).join("pagodad.log"))
        .context("open the log")?;
    command.stdout(log.try_clone().context("open the log")?).stderr(log);
    process::die_with_parent(&mut command);
    command.spawn().with_context(|| format!("start {}", program.display()))
}

/// The command that starts a daemon; its output goes where the caller says.
///
/// # Errors
/// The programs are not built.
pub fn command(program: &Path, dir: &Path, options: &DaemonOptions) -> Result<Command> {
    let mut command = Command::new(program);
    command.arg("--state-dir").arg(dir).arg("--socket").arg(run_dir(dir, options).join("pagoda.sock"));
    command.arg("--swap-dir").arg(options.swap_dir.clone().unwrap_or_else(|| dir.join("swap")));
    command.arg("--attach-socket").arg(run_dir(dir, options).join("attach.sock"));
    // A copied program does not have the shim beside it.
    let shim = programs::bin_dir()?.join("libpagoda_shim.so");
    command.arg("--shim").arg(options.shim.as_ref().unwrap_or(&shim));
    command.arg("--metrics").arg(options.metrics.as_deref().unwrap_or("off"));
    match options.folios {
        Folios::Large => command.arg("--tune-host"),
        Folios::Small => command.args(["--large-folios", "off"]),
    };
    command.args(&options.more).stdin(Stdio::null());
    Ok(command)
}
