//! The demo's VM: QEMU under `pagoda run`, what it prints, and what the kernel says of its RAM.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_sys::toy::process;

use super::VM_NAME;
use super::accel::Accelerator;
use super::model::Plan;
use crate::bench::this_program;
use crate::bench::undo::{Guard, Undo, start_ticks_of};
use crate::image::Images;

/// Between two looks whether a process has ended.
const POLL_EVERY: Duration = Duration::from_millis(10);

/// What a console had next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Line(String),
    /// Not before the deadline.
    Nothing,
    /// All streams have ended.
    Ended,
}

#[derive(Debug, Default)]
struct Lines {
    all: Vec<String>,
    unread: VecDeque<String>,
    open_streams: usize,
}

/// Lines of one or more streams, in the order in which they came.
#[derive(Debug, Clone, Default)]
pub struct Console {
    shared: Arc<(Mutex<Lines>, Condvar)>,
}

impl Console {
    /// Collects a stream's lines on a thread of its own, until it ends.
    pub fn collect(&self, stream: impl Read + Send + 'static) {
        self.lock().open_streams += 1;
        let console = self.clone();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut bytes = Vec::new();
            // Firmware prints what is not UTF-8.
            while reader.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
                let line = printable(&String::from_utf8_lossy(&bytes));
                bytes.clear();
                let mut lines = console.lock();
                lines.all.push(line.clone());
                lines.unread.push_back(line);
                console.shared.1.notify_all();
            }
            console.lock().open_streams -= 1;
            console.shared.1.notify_all();
        });
    }

    /// The next line.
    pub fn next(&self, deadline: Instant) -> Output {
        let mut lines = self.lock();
        loop {
            if let Some(line) = lines.unread.pop_front() {
                return Output::Line(line);
            }
            if lines.open_streams == 0 {
                return Output::Ended;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Output::Nothing;
            }
            lines = self.shared.1.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All lines so far.
    pub fn text(&self) -> String {
        self.lock().all.join("\n")
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line without control characters and colours: firmware and logs would play with our terminal.
pub fn printable(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line.trim_end().chars();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' {
            // A sequence that begins with a bracket ends with a letter; others have one character.
            if rest.next() == Some('[') {
                let _ = rest.find(|c| c.is_ascii_alphabetic());
            }
        } else if !c.is_control() {
            text.push(c);
        }
    }
    text
}

/// The running VM. Killed when dropped.
#[derive(Debug)]
pub struct Vm {
    pub console: Console,
    child: Child,
    _kill: Guard,
}

impl Vm {
    /// Starts QEMU under the daemon that listens on `socket`.
    ///
    /// # Errors
    /// It cannot be started; what `pagoda run` refuses shows on the console.
    pub fn start(
        socket: &Path,
        qemu: &str,
        accelerator: Accelerator,
        images: &Images,
        plan: &Plan,
        vcpus: usize,
    ) -> Result<Self> {
        let pagoda = this_program()?.with_file_name("pagoda");
        let mut command = Command::new(&pagoda);
        let memory = format!("{}M", plan.memory_mib);
        command.arg("--socket").arg(socket).args(["run", "--name", VM_NAME, "--memory", &memory]);
        command.args(["--dram", &format!("{}M", plan.dram_mib), "--", qemu]);
        command.args(["-M", "q35", "-accel", accelerator.name(), "-m", &memory, "-smp", &vcpus.to_string()]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&images.kernel).arg("-initrd").arg(&images.initrd);
        command.arg("-append").arg(format!("console=ttyS0 quiet panic=-1 {}", plan.guest_words()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is for the demo, which ends the VM itself.
        command.process_group(0);
        process::die_with_parent(&mut command);
        let mut child = command.spawn().with_context(|| format!("start {}", pagoda.display()))?;
        let pid = child.id();
        let start_ticks = start_ticks_of(pid).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid, start_ticks })?;
        let console = Console::default();
        console.collect(child.stdout.take().context("take the VM's output")?);
        console.collect(child.stderr.take().context("take the VM's errors")?);
        Ok(Self { console, child, _kill: kill })
    }

    /// DRAM in the VM's RAM file by the kernel's own account; `None` before QEMU has it and after it ended.
    pub fn ram_bytes(&self) -> Option<u64> {
        /// Unit of `st_blocks`, whatever the file system (stat(2)).
        const BLOCK_BYTES: u64 = 512;
        let entries = fs::read_dir(format!("/proc/{}/fd", self.child.id())).ok()?;
        let file = entries.flatten().map(|entry| entry.path()).find(|path| {
            let name = format!("/memfd:{VM_NAME} ");
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with(&name))
        })?;
        Some(fs::metadata(file).ok()?.blocks() * BLOCK_BYTES)
    }

    /// Waits for the end of QEMU; `None` when it goes on after `max`.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn wait(&mut self, max: Duration) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().context("look after QEMU")?;
            if status.is_some() || start.elapsed() > max {
                return Ok(status);
            }
            std::thread::sleep(POLL_EVERY);
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // It may be gone already; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_taken_out() {
        for (line, expected) in [
            ("plain é\r\n", "plain é"),
            ("\u{1b}[2J\u{1b}[1;31mred\u{1b}[0m\r\n", "red"),
            ("\u{1b}cab\u{7}\n", "ab"),
            ("cut \u{1b}[", "cut "),
        ] {
            assert_eq!(printable(line), expected, "{line:?}");
        }
    }

    #[test]
    fn a_console_gives_each_line_once_and_its_end() {
        let console = Console::default();
        console.collect(&b"a\r\nb\n"[..]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut lines = Vec::new();
        while let Output::Line(line) = console.next(deadline) {
            lines.push(line);
        }
        assert_eq!((lines.join(","), console.next(deadline)), ("a,b".to_owned(), Output::Ended));
        assert_eq!(console.text(), "a\nb");
    }
}
