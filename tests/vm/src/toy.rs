//! The toy VMM (`toy-vmm native`) under `pagoda run --plain`: memory touched and verified at native speed.

use std::io::Write;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::console::Console;
use crate::daemon::Daemon;
use crate::programs;

/// How to start a toy.
#[derive(Debug, Clone)]
pub struct ToyOptions {
    pub name: String,
    pub memory_mib: u64,
    pub dram_mib: u64,
    pub threads: u32,
}

/// A toy VMM that does what it is told.
#[derive(Debug)]
pub struct Toy {
    pub name: String,
    child: Mutex<Child>,
    input: Mutex<ChildStdin>,
    output: Console,
    at: Mutex<usize>,
    deadline: Instant,
}

impl Toy {
    /// Starts one, up to its first barrier.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(daemon: &Daemon, options: &ToyOptions) -> Result<Self> {
        Self::start_with(daemon, options, &[])
    }

    /// The same with more options of `pagoda run`.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_with(daemon: &Daemon, options: &ToyOptions, run_options: &[&str]) -> Result<Self> {
        let mut command = daemon.cli()?;
        command.args(["run", "--plain", "--name", &options.name]);
        command.args(["--memory", &format!("{}M", options.memory_mib), "--dram", &format!("{}M", options.dram_mib)]);
        command.args(run_options).arg("--").arg(programs::bin_dir()?.join("toy-vmm")).args(["native", "--step"]);
        command.args(["--threads", &options.threads.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        pagoda_sys::toy::process::die_with_parent(&mut command);
        let mut child = command.spawn().context("start the toy")?;
        let output = Console::default();
        output.collect(child.stdout.take().context("the toy's output")?, "");
        output.collect(child.stderr.take().context("the toy's errors")?, "stderr: ");
        let toy = Self {
            name: options.name.clone(),
            input: Mutex::new(child.stdin.take().context("the toy's input")?),
            child: Mutex::new(child),
            output,
            at: Mutex::new(0),
            deadline: Instant::now() + crate::wait::LIFE,
        };
        toy.expect("TOY start")?;
        Ok(toy)
    }

    pub fn pid(&self) -> u32 {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    /// Has it write every page once.
    ///
    /// # Errors
    /// It ended.
    pub fn fill(&self) -> Result<()> {
        self.send_line("fill")?;
        self.expect("TOY ready ").map(drop)
    }

    /// Has it map its RAM and write nothing: then it is for `touch`.
    ///
    /// # Errors
    /// It ended.
    pub fn map(&self) -> Result<()> {
        self.send_line("map")?;
        self.expect("TOY ready ").map(drop)
    }

    /// Has it touch pages, each once.
    ///
    /// # Errors
    /// A page was wrong, or it ended.
    pub fn touch(&self, options: &str) -> Result<Value> {
        self.send_line(&format!("touch {options}"))?;
        self.end()
    }

    /// Has it ask so often for a discard, for some seconds at most, without reading an answer; how often it could. Instead of `fill`,
    /// after `map`.
    ///
    /// # Errors
    /// It ended.
    pub fn flood(&self, count: u64) -> Result<u64> {
        self.send_line(&format!("flood {count}"))?;
        self.end()?["sent"].as_u64().context("how often")
    }

    /// Has it run and verify; gives its report.
    ///
    /// # Errors
    /// A page was wrong, or it ended.
    pub fn go(&self, options: &str) -> Result<Value> {
        self.begin(options)?;
        self.end()
    }

    /// Has the toy begin a run; [`Toy::end`] waits for its end.
    ///
    /// # Errors
    /// It ended.
    pub fn begin(&self, options: &str) -> Result<()> {
        self.send_line(&format!("go --no-latency {options}"))
    }

    /// Waits for the end of a run.
    ///
    /// # Errors
    /// A page was wrong, or it ended.
    pub fn end(&self) -> Result<Value> {
        let text = self.expect("TOY done ")?;
        let done: Value = serde_json::from_str(&text).context("understand the toy")?;
        let bad = done["bad_pages"].as_u64().context("number of wrong pages")?;
        ensure!(bad == 0, "{bad} wrong pages: {done}");
        Ok(done)
    }

    /// Ends it in the regular way.
    ///
    /// # Errors
    /// It does not end with success.
    pub fn quit(&self) -> Result<()> {
        self.send_line("quit")?;
        let status = crate::wait::until("the end of the toy", crate::wait::HANG, || {
            self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait().context("look after the toy")
        })?;
        ensure!(status.success(), "the toy ended with {status}");
        Ok(())
    }

    /// The end of its output.
    pub fn output_tail(&self) -> String {
        self.output.tail()
    }

    fn send_line(&self, command: &str) -> Result<()> {
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(input, "{command}").context("write to the toy")
    }

    fn expect(&self, beginning: &str) -> Result<String> {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |line: &str| line.strip_prefix(beginning).map(str::to_owned);
        let found = self.output.wait(&format!("{beginning:?} of the toy"), *at, self.deadline, find);
        let (next, rest) = found.with_context(|| format!("it said:\n{}", self.output.tail()))?;
        *at = next;
        Ok(rest)
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It may be gone already; either way it has to be reaped.
        let _ = child.kill();
        let _ = child.wait();
    }
}
