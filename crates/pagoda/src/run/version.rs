//! The version of a QEMU that is about to be started.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_api::SnapshotLaunch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long QEMU may take to say its version: it is loaded for that, and starts no machine.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// More of its answer is not looked at: a line, and whose copyright it is.
const ANSWER_BYTES: usize = 4096;
/// What QEMU's version stands behind.
const BEFORE: &str = "version ";

/// Whether a program can start a snapshot: known, or asked for.
#[derive(Debug)]
pub struct Check(Option<Asked>);

/// Begins to look whether the version of a program can start a snapshot. What the daemon knows is believed if it can. Else the program
/// is asked, and answers while its caller does something else.
///
/// # Errors
/// It cannot be started.
pub fn check(program: &Path, snapshot: &SnapshotLaunch) -> Result<Check> {
    let is_it = program == Path::new(&snapshot.launch.program);
    match &snapshot.program_version {
        Some(version) if is_it && snapshot.qemu.check_loaded_by(version).is_ok() => Ok(Check(None)),
        _ => ask(program).map(Some).map(Check),
    }
}

impl Check {
    /// # Errors
    /// It cannot, or does not say its version in time.
    pub fn end(self, snapshot: &SnapshotLaunch) -> Result<()> {
        let Some(asked) = self.0 else { return Ok(()) };
        let found = asked.answer().context("ask QEMU for its version")?;
        snapshot.qemu.check_loaded_by(&found).map_err(|why| anyhow!(why))
    }
}

/// A QEMU that was asked for its version.
#[derive(Debug)]
pub struct Asked {
    child: Child,
    output: ChildStdout,
    deadline: Instant,
}

fn ask(program: &Path) -> Result<Asked> {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
    let output = child.stdout.take().context("QEMU's output")?;
    Ok(Asked { child, output, deadline: Instant::now() + ANSWER_MAX })
}

impl Asked {
    /// The version, such as `10.0.2`.
    ///
    /// # Errors
    /// QEMU does not say one in time.
    pub fn answer(mut self) -> Result<String> {
        let mut said = Vec::new();
        loop {
            if let Some(version) = version(&String::from_utf8_lossy(&said)) {
                return Ok(version);
            }
            ensure!(said.len() < ANSWER_BYTES, "QEMU does not say its version");
            let left = Timespec::try_from(self.deadline.saturating_duration_since(Instant::now())).context("a time")?;
            let ready = poll(&mut [PollFd::new(&self.output.as_fd(), PollFlags::IN)], Some(&left));
            ensure!(ready.context("wait for QEMU's version")? > 0, "QEMU does not say its version in time");
            let mut piece = [0; ANSWER_BYTES];
            match self.output.read(&mut piece).context("read QEMU's version")? {
                0 => bail!("QEMU does not say its version"),
                len => said.extend_from_slice(&piece[..len]),
            }
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The version in QEMU's first line, if all of that is there: `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)`.
fn version(said: &str) -> Option<String> {
    let (line, _) = said.split_once('\n')?;
    let (_, behind) = line.split_once(BEFORE)?;
    let version = behind.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    (!version.is_empty()).then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_stands_in_the_first_line() {
        let check = |said: &str, expected: Option<&str>| assert_eq!(version(said).as_deref(), expected, "{said:?}");
        check("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright", Some("10.0.2"));
        check("QEMU emulator version 9.1.50\n", Some("9.1.50"));
        check("QEMU emulator version 8.0.4-rc1\n", Some("8.0.4"));
        check("QEMU emulator version 10.0", None);
        check("a script\nQEMU emulator version 1.0.0\n", None);
        check("QEMU emulator version ?\n", None);
        check("", None);
    }

    #[test]
    fn qemu_says_its_version_and_others_are_refused() {
        let said = ask(Path::new("qemu-system-x86_64")).unwrap().answer().unwrap();
        assert_eq!(said.split('.').count(), 3, "{said}");
        let why = ask(Path::new("true")).unwrap().answer().unwrap_err().to_string();
        assert_eq!(why, "QEMU does not say its version");
        assert!(ask(Path::new("/no/such/qemu")).is_err());
    }
}
