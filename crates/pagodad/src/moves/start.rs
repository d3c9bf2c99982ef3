//! Starts the QEMU of a VM that comes from another host.
//!
//! What may be started is held against the configuration ([`check`]). Then `pagoda vm start-arrived` is started, which gives up the daemon's
//! rights, looks at the VM's words and becomes its QEMU (the command's `run/moved.rs`). It has nothing of the daemon but
//! a pipe with what to start, which holds the VM's token, and its log. It outlives the daemon. If it ends early, its guest
//! has not run here, and [`Started::why_ended`] says what it wrote.

mod accounts;
mod check;

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_api::types::{CreatedVm, SnapshotLaunch};
use pagoda_api::vm_file_name;
use pagoda_sys::process::{pidfd_open, start_time};
use rustix::fs::OFlags;
use rustix::process::{Signal, pidfd_send_signal};
use serde::Serialize;

use self::accounts::Accounts;
pub use self::check::{check, check_dir};
use crate::config::Config;

/// The command line of Pagoda.
const PROGRAM: &str = "pagoda";
/// Where it is looked for unless it is beside the daemon, and where it finds QEMU's version and nothing else.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What guests print is for the daemon's user alone.
const LOG_MODE: u32 = 0o600;
/// How much of a log's end is shown.
const TAIL_BYTES: u64 = 2000;

/// What the process is told (the command's `run/moved.rs` reads it).
#[derive(Serialize)]
struct StartArrived<'a> {
    from: &'a SnapshotLaunch,
    created: &'a CreatedVm,
    socket: &'a Path,
    paths: &'a [PathBuf],
    groups: Vec<u32>,
}

/// A process that becomes QEMU, or is it. It is waited for by a thread, and goes on if this is dropped.
#[derive(Debug)]
pub struct Started {
    /// Its number may be another process's by the time that it is used.
    pidfd: OwnedFd,
    ended: Arc<OnceLock<String>>,
    log: PathBuf,
}

impl Started {
    /// Why it is no more, if it has ended: how, what it wrote last, and where all of that is.
    pub fn why_ended(&self) -> Option<String> {
        Some(format!("its QEMU ended with {}: {}", self.ended.get()?, said(&self.log)))
    }

    /// Ends it at once. One that has ended stays so.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

/// Starts the QEMU of a VM that was just made. `what` is from another host, and is [`check`]ed once more.
///
/// # Errors
/// It is not allowed, or the process cannot be started. A wrong word is not seen here: the process ends with the reason.
pub fn start(config: &Config, created: &CreatedVm, what: &SnapshotLaunch) -> Result<Started> {
    spawn(&program()?, config, created, what)
}

fn spawn(program: &Path, config: &Config, created: &CreatedVm, from: &SnapshotLaunch) -> Result<Started> {
    check(&config.moves, &from.launch).map_err(|reasons| anyhow!(reasons.join("; ")))?;
    let groups = Accounts::read()?.groups_of(from.launch.uid, from.launch.gid);
    let document = StartArrived { from, created, socket: &config.socket, paths: &config.moves.paths, groups };
    let document = serde_json::to_vec(&document).context("write down what to start")?;
    let log = log_path(&config.state_dir, &created.name);
    let output = open_log(&log).with_context(|| format!("open the log {}", log.display()))?;
    let mut command = Command::new(program);
    command.args(["vm", "start-arrived"]).env_clear().env("PATH", PATH).current_dir("/");
    command.stdin(Stdio::piped()).stdout(output.try_clone().context("open the log once more")?).stderr(output);
    let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
    // It reads all of it before it does anything else.
    let told = child.stdin.take().context("its input").and_then(|mut input| Ok(input.write_all(&document)?));
    if let Err(error) = told {
        let _ = child.kill();
        let status = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        return Err(error.context(format!("tell {} what to start ({status}): {}", program.display(), said(&log))));
    }
    let pidfd = pidfd_open(child.id()).context("watch the process that becomes QEMU").inspect_err(|_| {
        let _ = child.kill();
        let _ = child.wait();
    })?;
    let ended = Arc::new(OnceLock::new());
    let started = Started { pidfd, ended: Arc::clone(&ended), log };
    let wait = move || {
        let status = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        // Set by this thread alone.
        let _ = ended.set(status);
    };
    let reaper = std::thread::Builder::new().name("arrived".into()).spawn(wait);
    reaper.context("start the thread that waits for QEMU").inspect_err(|_| started.kill())?;
    Ok(started)
}

/// Ends a process at once, by its number and when it was started (proc(5) stat, field 22). The number may be another's by now.
pub fn kill(pid: u32, since: u64) {
    if let Ok(pidfd) = pidfd_open(pid)
        && start_time(pid).is_ok_and(|found| found == since)
    {
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
    }
}

/// Beside the daemon, else where programs are.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("find the path of this program")?;
    let beside = own.parent().map(|dir| dir.join(PROGRAM));
    let dirs = std::env::split_paths(PATH).map(|dir| dir.join(PROGRAM));
    beside
        .into_iter()
        .chain(dirs)
        .find(|path| path.is_file())
        .with_context(|| format!("{PROGRAM} is neither beside {} nor in {PATH}: install it there", own.display()))
}

fn log_path(state_dir: &Path, name: &str) -> PathBuf {
    state_dir.join("logs").join(vm_file_name(name) + ".log")
}

/// What a process has written last, on one line and without control characters, for a guest may have written it; and where it is.
fn said(log: &Path) -> String {
    match tail(log) {
        said if said.is_empty() => format!("it said nothing in {}", log.display()),
        said => format!("{said} (log: {})", log.display()),
    }
}

fn tail(log: &Path) -> String {
    let read = || {
        let file = File::open(log)?;
        let len = file.metadata()?.len();
        let first = len.saturating_sub(TAIL_BYTES);
        let mut bytes = vec![0; (len - first) as usize];
        file.read_exact_at(&mut bytes, first)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let text = String::from_utf8_lossy(&read().unwrap_or_default()).trim().replace('\n', "; ");
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Only the newest start of a name has a log.
fn open_log(path: &Path) -> Result<File> {
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.append(true).create_new(true).mode(LOG_MODE).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let file = options.open(path)?;
    ensure!(file.metadata()?.is_file(), "it is no file");
    Ok(file)
}

#[cfg(test)]
mod tests {
    use pagoda_api::types::{Launch, SnapshotQemu, VmSpec};

    use super::*;
    use crate::config::MovesConfig;

    /// A process that says what it was told, to whom it belongs and what it has open.
    const SCRIPT: &str = "#!/bin/sh\necho \"$* $(env | grep -v ^PWD= | sort | tr '\\n' ' ')\"; ls -l /proc/$$/fd | tr '\\n' ' '; cat\n\
                          echo broken >&2; exit 3\n";

    #[test]
    fn a_process_gets_what_it_needs_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("pagodad-arrived-start-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("vms")).unwrap();
        let program = dir.join("pagoda");
        // By another process: a child of another test would inherit our descriptor, and nobody starts a file that is written to.
        let write = "printf %s \"$1\" > \"$2\" && chmod +x \"$2\"";
        assert!(Command::new("sh").args(["-c", write, "sh", SCRIPT]).arg(&program).status().unwrap().success());
        let mut config = crate::registry::tests::registry(&dir).config.clone();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let launch = Launch {
            program: "/usr/bin/qemu-system-x86_64".into(),
            words: vec!["-m".into()],
            cwd: dir.to_str().unwrap().into(),
            uid,
            gid,
            unstartable: vec![],
        };
        let qemu = SnapshotQemu { version: "10.0.2".into(), machine: "pc".into() };
        let what =
            SnapshotLaunch { launch, memory: vec![], spec: VmSpec::default(), qemu, shim: None, program_version: None };
        let created = CreatedVm {
            name: "a".into(),
            token: "t0ken".into(),
            attach_socket: "/a".into(),
            shim: "/s".into(),
            outbox_token: None,
        };
        let refused = spawn(&program, &config, &created, &what).unwrap_err().to_string();
        assert!(refused.contains("accept = true"), "{refused}");
        config.moves = MovesConfig { accept: true, users: vec![uid], paths: vec![dir.clone()], ..config.moves };
        let _open = File::create(dir.join("secret")).unwrap();
        let started = spawn(&program, &config, &created, &what).unwrap();
        let why = loop {
            match started.why_ended() {
                Some(why) => break why,
                None => std::thread::yield_now(),
            }
        };
        assert!(why.contains("ended with exit status: 3") && why.contains("broken (log: "), "{why}");
        started.kill();
        let all = std::fs::read_to_string(dir.join("logs/a.log")).unwrap();
        assert!(all.starts_with(&format!("vm start-arrived PATH={PATH} \n")), "{all}");
        assert!(!all.contains("secret"), "{all}");
        assert!(all.contains("\"token\":\"t0ken\"") && all.contains("\"groups\":["), "{all}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_end_of_a_log_is_one_line() {
        let dir = std::env::temp_dir().join(format!("pagodad-arrived-log-{}", std::process::id()));
        assert_eq!(tail(&log_path(&dir, "a/b")), "");
        let path = log_path(&dir, "a b");
        assert!(path.ends_with("logs/a%20b.log"), "{}", path.display());
        let mut file = open_log(&path).unwrap();
        file.write_all(&[b'x'; 3000]).unwrap();
        file.write_all(b"\none\x1b[31m\n two\n").unwrap();
        let said = tail(&path);
        assert!(said.ends_with("xx; one[31m;  two") && said.len() <= TAIL_BYTES as usize + 2, "{said}");
        open_log(&path).unwrap();
        assert_eq!(tail(&path), "", "that of the start before is gone");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
