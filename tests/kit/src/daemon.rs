//! A private pagodad: its own directories and sockets, nothing of the system's touched.
//!
//! What `--tune-host` changes is put back when this is dropped, and so are the directories.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::tuned::TUNED_BY_DAEMON;
use anyhow::{Context, Result, bail};
use pagoda_api::{
    Client, CurveInfo, CurveSwitch, HostPatch, HostPolicy, SampleInfo, SampleRequest, VmInfo, VmPatch, WhatIfReply,
    WhatIfRequest,
};
use pagoda_sys::toy::process;

use crate::stepped::{SteppedToy, toy_command};
use crate::toy::monotonic_ns;
use crate::undo::{Guard, Undo, start_ticks_of};
use crate::workspace::programs_dir;

/// A daemon that does not answer for so long is broken.
const START_MAX: Duration = Duration::from_secs(20);
const POLL_EVERY: Duration = Duration::from_millis(1);

/// A private daemon that runs, in a directory of its own.
#[derive(Debug)]
pub struct Daemon {
    dir: PathBuf,
    programs: PathBuf,
    options: Vec<String>,
    /// What the daemon is started by, such as `prlimit`; nothing unless a fault is put in its way.
    wrapper: Vec<String>,
    child: Child,
    started: Instant,
    /// The same moment, by the clock that the toy reports in.
    started_ns: u64,
    // Dropped in order after `Drop::drop` has stopped the daemon.
    _kill: Guard,
    _settings: Vec<Guard>,
    _directory: Guard,
}

impl Daemon {
    /// Starts one with its files in a new directory under `parent`.
    ///
    /// # Errors
    /// Not built, or it does not answer.
    pub fn start(parent: &Path) -> Result<Self> {
        Self::start_with(parent, "daemon", &[])
    }

    /// The same with more of the command line; `label` tells it from others under `parent`. Of several, the last started
    /// must be dropped first: each puts the host's settings back as it found them.
    ///
    /// # Errors
    /// Not built, or it does not answer.
    pub fn start_with(parent: &Path, label: &str, options: &[&str]) -> Result<Self> {
        let dir = parent.join(format!("{label}-{}", std::process::id()));
        let options: Vec<String> = options.iter().map(|word| (*word).to_owned()).collect();
        let directory = Guard::new(Undo::Directory { path: dir.clone() })?;
        fs::create_dir_all(dir.join("swap")).with_context(|| format!("make {}", dir.display()))?;
        let settings = TUNED_BY_DAEMON
            .iter()
            .map(Path::new)
            .filter(|path| path.exists())
            .map(Guard::keep_setting)
            .collect::<Result<Vec<_>>>()?;
        let programs = programs_dir()?;
        let (started, started_ns) = (Instant::now(), monotonic_ns());
        let (child, kill) = spawn(&programs, &dir, &options, &[])?;
        let mut daemon = Self {
            dir,
            programs,
            options,
            wrapper: Vec::new(),
            child,
            started,
            started_ns,
            _kill: kill,
            _settings: settings,
            _directory: directory,
        };
        daemon.wait_until_it_answers()?;
        Ok(daemon)
    }

    /// Where its files are.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of the control socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("pagoda.sock")
    }

    /// Process of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it without warning and waits until it is gone.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill9(&mut self) -> Result<()> {
        self.child.kill().context("kill pagodad")?;
        self.child.wait().context("wait for pagodad")?;
        Ok(())
    }

    /// Starts it again after `kill9`; gives the time from exec to the first answer.
    ///
    /// # Errors
    /// It does not answer.
    pub fn restart(&mut self) -> Result<Duration> {
        self.restart_unanswered()?;
        self.wait_until_it_answers()?;
        Ok(self.since_start())
    }

    /// The same, without waiting for its answer, which may never come.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn restart_unanswered(&mut self) -> Result<()> {
        (self.started, self.started_ns) = (Instant::now(), monotonic_ns());
        let (child, kill) = spawn(&self.programs, &self.dir, &self.options, &self.wrapper)?;
        self.child = child;
        self._kill = kill;
        Ok(())
    }

    /// What the daemon is started with and by from the next restart on.
    pub fn change_start(&mut self, options: &[&str], wrapper: &[&str]) {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        (self.options, self.wrapper) = (owned(options), owned(wrapper));
    }

    /// Time since the running daemon was started.
    pub fn since_start(&self) -> Duration {
        self.started.elapsed()
    }

    /// When the running daemon was started, by [`monotonic_ns`].
    pub fn started_ns(&self) -> u64 {
        self.started_ns
    }

    /// CPU time of the daemon so far, in seconds.
    ///
    /// # Errors
    /// It is gone.
    pub fn cpu_s(&self) -> Result<f64> {
        cpu_s_of(self.pid())
    }

    /// Starts a toy VMM as a VM of this daemon, up to its first barrier.
    ///
    /// # Errors
    /// The daemon or the toy refuses.
    pub fn start_toy(&self, name: &str, memory_mib: u64, dram_mib: u64, options: &[&str]) -> Result<SteppedToy> {
        self.start_toy_with(name, memory_mib, dram_mib, &[], options)
    }

    /// The same with more options of `pagoda run`.
    ///
    /// # Errors
    /// The daemon or the toy refuses.
    pub fn start_toy_with(
        &self,
        name: &str,
        memory_mib: u64,
        dram_mib: u64,
        run_options: &[&str],
        options: &[&str],
    ) -> Result<SteppedToy> {
        let mut words = self.cli_words()?;
        let (memory, dram) = (format!("{memory_mib}M"), format!("{dram_mib}M"));
        let run = ["run", "--name", name, "--memory", &memory, "--dram", &dram, "--plain"];
        words.extend(run.iter().chain(run_options).chain(&["--"]).map(|word| (*word).to_owned()));
        words.extend(toy_command(options)?);
        SteppedToy::start(&words)
    }

    /// What the daemon says of a VM.
    ///
    /// # Errors
    /// No such VM.
    pub fn vm(&self, name: &str) -> Result<VmInfo> {
        self.client().vm(name).with_context(|| format!("ask the daemon for {name}"))
    }

    /// What the daemon says of all VMs.
    ///
    /// # Errors
    /// It does not answer.
    pub fn vms(&self) -> Result<Vec<VmInfo>> {
        Ok(self.client().vms().context("ask the daemon for its VMs")?.vms)
    }

    /// The host's memory policy.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn host(&self) -> Result<HostPolicy> {
        Ok(self.client().host().context("ask the daemon for the host")?.policy)
    }

    /// Sets a VM's DRAM limit.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn set_dram(&self, name: &str, dram_mib: u64) -> Result<()> {
        let patch = VmPatch { dram: Some(dram_mib << 20), ..VmPatch::default() };
        self.client().patch(name, &patch).with_context(|| format!("set the cap of {name}"))?;
        Ok(())
    }

    /// Changes the host's memory policy.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn set_host(&self, patch: &HostPatch) -> Result<()> {
        self.client().patch_host(patch).context("set the host's policy")?;
        Ok(())
    }

    /// Sets the memory that a VM's guest should keep.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn set_balloon(&self, name: &str, target_mib: u64) -> Result<()> {
        let patch = VmPatch { balloon_target: Some(target_mib << 20), ..VmPatch::default() };
        self.client().patch(name, &patch).with_context(|| format!("set the balloon target of {name}"))?;
        Ok(())
    }

    /// Begins a sampling period of a VM.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn sample(&self, name: &str, pages: Vec<u64>) -> Result<SampleInfo> {
        self.client().sample(name, &SampleRequest { pages }).with_context(|| format!("sample {name}"))
    }

    /// What became of the period's pages so far.
    ///
    /// # Errors
    /// No such VM.
    pub fn sampled(&self, name: &str) -> Result<SampleInfo> {
        self.client().sampled(name).with_context(|| format!("look at the sample of {name}"))
    }

    /// Switches a VM's miss-ratio curve on, anew, or off.
    ///
    /// # Errors
    /// No such VM.
    pub fn watch_curve(&self, name: &str, switch: CurveSwitch) -> Result<()> {
        self.client().watch_curve(name, switch).map(drop).with_context(|| format!("watch the curve of {name}"))
    }

    /// A VM's miss-ratio curve.
    ///
    /// # Errors
    /// No such VM.
    pub fn curve(&self, name: &str) -> Result<CurveInfo> {
        self.client().curve(name).with_context(|| format!("ask for the curve of {name}"))
    }

    /// What another cap would mean for a VM.
    ///
    /// # Errors
    /// No such VM, or no plan was made with it yet.
    pub fn what_if(&self, name: &str, dram_mib: u64) -> Result<WhatIfReply> {
        let request = WhatIfRequest { dram: Some(dram_mib << 20), ..WhatIfRequest::default() };
        self.client().what_if(name, &request).with_context(|| format!("ask what {dram_mib} MiB would mean for {name}"))
    }

    /// One counter of a VM.
    ///
    /// # Errors
    /// No such VM or counter.
    pub fn counter(&self, name: &str, counter: &str) -> Result<u64> {
        let info = self.vm(name)?;
        info.counters.get(counter).copied().with_context(|| format!("the daemon has no counter {counter}"))
    }

    /// Waits until a VM that has ended is forgotten, so that its name is free.
    ///
    /// # Errors
    /// It is not after `max`.
    pub fn wait_gone(&self, name: &str, max: Duration) -> Result<()> {
        let start = Instant::now();
        while self.client().vm(name).is_ok() {
            if start.elapsed() > max {
                bail!("{name} is still there after {} s", max.as_secs());
            }
            std::thread::sleep(POLL_EVERY);
        }
        Ok(())
    }

    /// Waits until a VM is as `wanted` says.
    ///
    /// # Errors
    /// It is not after `max`.
    pub fn wait_for_vm(&self, name: &str, max: Duration, wanted: impl Fn(&VmInfo) -> bool) -> Result<VmInfo> {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let start = Instant::now();
        loop {
            let info = self.vm(name)?;
            if wanted(&info) {
                return Ok(info);
            }
            if start.elapsed() > max {
                bail!("{name} is not as expected after {} s: {info:?}", max.as_secs());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Words of the command line tool, pointed at this daemon.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub fn cli_words(&self) -> Result<Vec<String>> {
        let text = |path: PathBuf| path.to_str().map(str::to_owned).context("a path in UTF-8");
        Ok(vec![text(self.programs.join("pagoda"))?, "--socket".into(), text(self.socket())?])
    }

    /// A client of its control API.
    pub fn client(&self) -> Client {
        Client::new(self.socket())
    }

    fn wait_until_it_answers(&mut self) -> Result<()> {
        let start = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            if let Some(status) = self.child.try_wait().context("look after pagodad")? {
                bail!("pagodad ended with {status}; see {}", self.log().display());
            }
            if start.elapsed() > START_MAX {
                bail!("pagodad does not answer after {} s", START_MAX.as_secs());
            }
            std::thread::sleep(POLL_EVERY);
        }
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.dir.join("pagodad.log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may be gone already; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(programs: &Path, dir: &Path, options: &[String], wrapper: &[String]) -> Result<(Child, Guard)> {
    let program = programs.join("pagodad");
    let log =
        fs::File::options().create(true).append(true).open(dir.join("pagodad.log")).context("open the daemon's log")?;
    let mut command = match wrapper.split_first() {
        None => Command::new(&program),
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(&program);
            command
        }
    };
    if !options.iter().any(|option| option == "--metrics") {
        command.args(["--metrics", "off"]);
    }
    command
        .arg("--state-dir")
        .arg(dir)
        .arg("--swap-dir")
        .arg(dir.join("swap"))
        .arg("--socket")
        .arg(dir.join("pagoda.sock"))
        .arg("--attach-socket")
        .arg(dir.join("attach.sock"))
        .arg("--tune-host")
        .args(options)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("open the daemon's log")?)
        .stderr(log);
    process::die_with_parent(&mut command);
    let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
    let pid = child.id();
    let start_ticks = start_ticks_of(pid).unwrap_or(0);
    Ok((child, Guard::new(Undo::Process { pid, start_ticks })?))
}

/// User and system time of a process, in seconds.
///
/// # Errors
/// It is gone.
pub fn cpu_s_of(pid: u32) -> Result<f64> {
    let time = pagoda_sys::process::cpu_time(pid).with_context(|| format!("read the CPU time of process {pid}"))?;
    Ok(time.as_secs_f64())
}
