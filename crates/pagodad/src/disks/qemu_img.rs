//! `qemu-img`, run as the user whose QEMU it is: it reads files that may be hostile.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use super::limits::{QEMU_IMG_MAX, QEMU_IMG_OUTPUT_MAX};
use super::user::User;

/// Where it is looked for before the directory of the VM's QEMU.
const DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/bin"];
/// Between two looks whether it has ended.
const LOOK: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Clone, Debug)]
pub struct QemuImg {
    program: PathBuf,
    user: User,
}

impl QemuImg {
    /// # Errors
    /// It is not installed.
    pub fn new(qemu: &str, user: User) -> Result<QemuImg> {
        let beside = Path::new(qemu).parent().filter(|dir| dir.is_absolute()).map(Path::to_owned);
        let directories = DIRECTORIES.iter().map(PathBuf::from).chain(beside);
        let program = directories.map(|dir| dir.join("qemu-img")).find(|program| program.is_file());
        let program = program.context(
            "there is no qemu-img, which makes overlays and says who has a disk open: install it (qemu-utils)",
        )?;
        Ok(QemuImg { program, user })
    }

    /// Makes an empty overlay of so many bytes. `backing` is its name in the same directory.
    pub fn create(&self, overlay: &Path, backing: &str, bytes: u64) -> Result<()> {
        let size = bytes.to_string();
        let words = ["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", backing, "--"].map(OsStr::new);
        let words = words.into_iter().chain([overlay.as_os_str(), OsStr::new(&size)]);
        self.run(words).map(drop)
    }

    /// What a file and all behind it are, the file first. It may be in use.
    pub fn chain(&self, file: &Path) -> Result<Vec<Value>> {
        let words = ["info", "-U", "--backing-chain", "--output=json", "--"].map(OsStr::new);
        let answer = self.run(words.into_iter().chain([file.as_os_str()]))?;
        match serde_json::from_slice(&answer).context("read what qemu-img says")? {
            Value::Array(files) => Ok(files),
            _ => bail!("qemu-img says something else than a list"),
        }
    }

    /// That no process has a qcow2 file open to write to it.
    ///
    /// # Errors
    /// One has, or it cannot be found out.
    pub fn check_unused(&self, file: &Path) -> Result<()> {
        let words = ["info", "-f", "qcow2", "--output=json", "--"].map(OsStr::new);
        self.run(words.into_iter().chain([file.as_os_str()])).map(drop)
    }

    /// Whether an overlay has no content of its own: all that it shows is in the file behind it.
    pub fn is_empty(&self, overlay: &Path) -> Result<bool> {
        let words = ["map", "-f", "qcow2", "--output=json", "--"].map(OsStr::new);
        let answer = self.run(words.into_iter().chain([overlay.as_os_str()]))?;
        let parts: Vec<Value> = serde_json::from_slice(&answer).context("read what qemu-img says")?;
        let is_its_own = |part: &Value| {
            let is_behind = part.get("depth").and_then(Value::as_u64).is_some_and(|depth| depth > 0);
            let is_nowhere = part.get("present").and_then(Value::as_bool) == Some(false);
            !is_behind && !is_nowhere
        };
        Ok(!parts.iter().any(is_its_own))
    }

    fn run<'a>(&self, words: impl Iterator<Item = &'a OsStr>) -> Result<Vec<u8>> {
        let words: Vec<&OsStr> = words.collect();
        // A child of a thread that acts for the user would have root's real id.
        self.user.leave(|| self.run_as_user(&words))
    }

    fn run_as_user(&self, words: &[&OsStr]) -> Result<Vec<u8>> {
        let mut command = Command::new(&self.program);
        command.args(words).env_clear().env("LC_ALL", "C").current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if !self.user.is_own() {
            // Other groups are given up with that.
            command.uid(self.user.uid).gid(self.user.gid);
        }
        let mut child = command.spawn().with_context(|| format!("start {}", self.program.display()))?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let reader = std::thread::spawn(move || read_bounded(output));
        let errors = std::thread::spawn(move || read_bounded(errors));
        // If it hangs, so do these two, and nobody waits for them.
        let has_succeeded = wait(&mut child)?;
        let panicked = |_| anyhow!("a thread of this daemon panicked");
        let (output, errors) = (reader.join().map_err(panicked)?, errors.join().map_err(panicked)?);
        if has_succeeded {
            return output;
        }
        let said = String::from_utf8_lossy(&errors?).trim().replace('\n', "; ");
        bail!("{}", said.strip_prefix("qemu-img: ").unwrap_or(&said));
    }
}

/// Whether it succeeded.
fn wait(child: &mut Child) -> Result<bool> {
    let deadline = Instant::now() + QEMU_IMG_MAX;
    loop {
        if let Some(status) = child.try_wait().context("wait for qemu-img")? {
            return Ok(status.success());
        }
        if Instant::now() > deadline {
            // It may hang in the kernel; its end is nobody's business then but the kernel's.
            let _ = child.kill();
            bail!("qemu-img has not ended within {} s", QEMU_IMG_MAX.as_secs());
        }
        std::thread::sleep(LOOK);
    }
}

fn read_bounded(stream: Option<impl Read>) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    let Some(stream) = stream else { return Ok(all) };
    stream.take(QEMU_IMG_OUTPUT_MAX as u64 + 1).read_to_end(&mut all).context("read what qemu-img says")?;
    ensure!(all.len() <= QEMU_IMG_OUTPUT_MAX, "qemu-img says more than {QEMU_IMG_OUTPUT_MAX} bytes");
    Ok(all)
}
