//! Leads a toy VMM in another process through its steps.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use pagoda_sys::toy::process;

use crate::toy::sort::Sorted;
use crate::toy::touch::Touched;
use crate::toy::{Done, Ready};
use crate::undo::{Guard, Undo, start_ticks_of};
use crate::workspace::programs_dir;

const SIGKILL: i32 = 9;

/// The kernel killed a toy. Nobody else does while it is led through its steps: it ran out of memory in its cgroup.
#[derive(Debug, thiserror::Error)]
#[error("the toy was killed by the kernel: its cgroup was out of memory")]
pub struct OomKilled;

/// A toy VMM that does what it is told. Killed when dropped.
#[derive(Debug)]
pub struct SteppedToy {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _kill: Guard,
}

/// The program of the toy VMM.
///
/// # Errors
/// The system does not say which program runs.
pub fn toy_program() -> Result<PathBuf> {
    Ok(programs_dir()?.join("toy-vmm"))
}

/// Words of the command that starts a toy VMM.
///
/// # Errors
/// Its path is not UTF-8.
pub fn toy_command(options: &[&str]) -> Result<Vec<String>> {
    let program = toy_program()?.to_str().context("path of the toy VMM")?.to_owned();
    let words = ["native", "--step"].iter().chain(options).map(|word| (*word).to_owned());
    Ok(std::iter::once(program).chain(words).collect())
}

impl SteppedToy {
    /// Starts a command whose last words are a toy VMM's, up to its first barrier.
    ///
    /// # Errors
    /// It does not start, or stops before the barrier.
    pub fn start(words: &[String]) -> Result<Self> {
        let (program, arguments) = words.split_first().context("an empty command")?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        process::die_with_parent(&mut command);
        let mut child = command.spawn().with_context(|| format!("start {program}"))?;
        let pid = child.id();
        let start_ticks = start_ticks_of(pid).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid, start_ticks })?;
        let input = child.stdin.take().context("take the toy's input")?;
        let output = BufReader::new(child.stdout.take().context("take the toy's output")?);
        let mut toy = Self { child, input, output, _kill: kill };
        toy.expect("TOY start")?;
        Ok(toy)
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it write every page once.
    ///
    /// # Errors
    /// It stopped.
    pub fn fill(&mut self) -> Result<Ready> {
        self.tell("fill")?;
        Ok(serde_json::from_str(&self.expect("TOY ready ")?)?)
    }

    /// Has it map its RAM and write nothing: then it is for `touch`.
    ///
    /// # Errors
    /// It stopped.
    pub fn map(&mut self) -> Result<Ready> {
        self.tell("map")?;
        Ok(serde_json::from_str(&self.expect("TOY ready ")?)?)
    }

    /// Has it touch pages, each once.
    ///
    /// # Errors
    /// It stopped, or found a wrong page.
    pub fn touch(&mut self, options: &str) -> Result<Touched> {
        self.tell(&format!("touch {options}"))?;
        let touched: Touched = serde_json::from_str(&self.expect("TOY done ")?)?;
        if touched.bad_pages > 0 {
            bail!("{} wrong pages in: touch {options}", touched.bad_pages);
        }
        Ok(touched)
    }

    /// Has it sort its RAM; `finish_sort` waits for the end. It was told to map and not to fill.
    ///
    /// # Errors
    /// It stopped.
    pub fn start_sort(&mut self) -> Result<()> {
        self.tell("sort")
    }

    /// Waits for the end of a sort.
    ///
    /// # Errors
    /// It stopped, or the order is wrong.
    pub fn finish_sort(&mut self) -> Result<Sorted> {
        let sorted: Sorted = serde_json::from_str(&self.expect("TOY done ")?)?;
        if sorted.bad_words > 0 {
            bail!("{} wrong words in a sort", sorted.bad_words);
        }
        Ok(sorted)
    }

    /// Has it run and waits for the end.
    ///
    /// # Errors
    /// It stopped, or found a wrong page.
    pub fn go(&mut self, options: &str) -> Result<Done> {
        let done = self.go_unverified(options)?;
        if done.bad_pages > 0 {
            bail!("{} wrong pages in: go {options}", done.bad_pages);
        }
        Ok(done)
    }

    /// As `go`, but wrong pages are only counted.
    ///
    /// # Errors
    /// It stopped.
    pub fn go_unverified(&mut self, options: &str) -> Result<Done> {
        self.start_run(options)?;
        self.finish_run()
    }

    /// Starts a run; `finish_run` waits for its end.
    ///
    /// # Errors
    /// It stopped.
    pub fn start_run(&mut self, options: &str) -> Result<()> {
        self.tell(&format!("go {options}"))
    }

    /// Waits for the end of a run.
    ///
    /// # Errors
    /// It stopped.
    pub fn finish_run(&mut self) -> Result<Done> {
        Ok(serde_json::from_str(&self.expect("TOY done ")?)?)
    }

    /// Ends it in the regular way.
    ///
    /// # Errors
    /// It does not end with success.
    pub fn quit(mut self) -> Result<()> {
        self.tell("quit")?;
        let status = self.child.wait().context("wait for the toy")?;
        if status.success() { Ok(()) } else { Err(anyhow!("the toy ended with {status}")) }
    }

    fn tell(&mut self, command: &str) -> Result<()> {
        match writeln!(self.input, "{command}") {
            // It ended: why is seen when its answer is waited for.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            told => told.context("write to the toy"),
        }
    }

    /// The rest of the next line, which must begin so. Other lines are passed on: they are
    /// messages of what runs the toy.
    fn expect(&mut self, beginning: &str) -> Result<String> {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).context("read from the toy")? == 0 {
                let status = self.child.wait().context("wait for the toy")?;
                if status.signal() == Some(SIGKILL) {
                    return Err(OomKilled.into());
                }
                bail!("the toy ended with {status} before it said {beginning:?}");
            }
            if let Some(rest) = line.trim_end().strip_prefix(beginning) {
                return Ok(rest.to_owned());
            }
            eprint!("{line}");
        }
    }
}

impl Drop for SteppedToy {
    fn drop(&mut self) {
        // Gone already is as good; the wait reaps it and lets its cgroup be removed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
