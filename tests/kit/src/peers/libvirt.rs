//! A real libvirtd of our own: in a mount namespace in which its directories are ours, so that it sees and leaves
//! nothing of the system's libvirt.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::wait;

/// It asks each QEMU on the machine what it can do before it answers.
const START_MAX: Duration = crate::wait::HANG;
/// Directories of a libvirtd, which are replaced by ours.
const DIRECTORIES: [(&str, &str); 5] = [
    ("etc", "/etc/libvirt"),
    ("lib", "/var/lib/libvirt"),
    ("cache", "/var/cache/libvirt"),
    ("log", "/var/log/libvirt"),
    ("run", "/run/libvirt"),
];
/// QEMU as root, no security driver, no cgroups, no helper daemons: what is tested is how QEMU is started.
const QEMU_CONF: &str = "\
user = \"root\"
group = \"root\"
dynamic_ownership = 0
remember_owner = 0
security_driver = \"none\"
namespaces = []
cgroup_controllers = []
stdio_handler = \"file\"
";

/// A libvirtd that runs.
#[derive(Debug)]
pub struct Libvirt {
    dir: PathBuf,
    child: Child,
}

impl Libvirt {
    /// Starts one with its files in `dir`, which must not exist.
    ///
    /// # Errors
    /// Not installed, not root, or it does not answer.
    pub fn start(dir: &Path) -> Result<Self> {
        let mut script = String::from("set -e; mount --make-rprivate /; ");
        for (name, target) in DIRECTORIES {
            let ours = dir.join(name);
            fs::create_dir_all(&ours).with_context(|| format!("make {}", ours.display()))?;
            // Made by libvirt's package, except those in /run, which may not be there yet.
            fs::create_dir_all(target).with_context(|| format!("make {target}"))?;
            script += &format!("mount --bind '{}' {target}; ", ours.display());
        }
        fs::write(dir.join("etc/qemu.conf"), QEMU_CONF).context("write qemu.conf")?;
        let conf = dir.join("libvirtd.conf");
        let settings = format!("unix_sock_dir = \"{}\"\nauth_unix_rw = \"none\"\n", dir.display());
        fs::write(&conf, settings).context("write libvirtd.conf")?;
        script += &format!("exec libvirtd -f '{}' -p '{}'", conf.display(), dir.join("libvirtd.pid").display());
        let log = File::create(dir.join("libvirtd.log")).context("make the log of libvirtd")?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).stdin(Stdio::null());
        command.stdout(log.try_clone().context("share the log")?).stderr(log);
        pagoda_sys::toy::process::die_with_parent(&mut command);
        let child = command.spawn().context("start libvirtd")?;
        let mut libvirt = Self { dir: dir.to_owned(), child };
        libvirt.wait_until_it_answers()?;
        Ok(libvirt)
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("libvirt-sock")
    }

    fn wait_until_it_answers(&mut self) -> Result<()> {
        wait::until("libvirtd answers", START_MAX, || {
            if let Some(status) = self.child.try_wait().context("look after libvirtd")? {
                bail!("libvirtd ended with {status}: {}", self.log());
            }
            Ok(UnixStream::connect(self.socket()).ok())
        })?;
        self.virsh(&["uri"]).map(drop)
    }

    /// What libvirtd and its QEMU wrote.
    pub fn log(&self) -> String {
        let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
        let mut text = read(self.dir.join("libvirtd.log"));
        for entry in fs::read_dir(self.dir.join("log/qemu")).into_iter().flatten().flatten() {
            text += &read(entry.path());
        }
        text
    }

    /// Runs virsh to its end.
    ///
    /// # Errors
    /// It fails; the text has what it and libvirtd say.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run_virsh(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "virsh {}: {said}\n{}", arguments.join(" "), self.log());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn run_virsh(&self, arguments: &[&str]) -> Result<Output> {
        let uri = format!("qemu:///system?socket={}", self.socket().display());
        Command::new("virsh").args(["-c", &uri]).args(arguments).output().context("run virsh")
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // Its QEMUs would outlive it.
        for entry in fs::read_dir(self.dir.join("run/qemu")).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "pid") {
                let pid =
                    fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()).and_then(Pid::from_raw);
                if let Some(pid) = pid {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
