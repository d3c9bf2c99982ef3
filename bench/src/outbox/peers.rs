//! The host's programs of the peers: virtiofsd with a tmpfs, and nginx, with its configuration, which the guest's has too.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pagoda_sys::toy::process;
use testkit::undo::{Guard, Undo, start_ticks_of};
use testkit::wait;

use super::client;
use super::network::{Network, port_of};

/// Of Debian's package qemu-system-common.
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";
pub const NGINX: &str = "nginx";
pub const NGINX_PORT: u16 = 80;
/// Room for what is measured, and more than that is never used.
const TMPFS: &str = "size=1g,mode=0755";

/// nginx's configuration, line by line. One process: then it has no user to change to, and nobody else has to be ended.
pub fn nginx_lines(root: &str, own: &str, address: Ipv4Addr) -> Vec<String> {
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let mut lines = vec![
        "user root;".to_owned(),
        "daemon off;".to_owned(),
        "master_process off;".to_owned(),
        format!("pid {own}/nginx.pid;"),
        "events {}".to_owned(),
        "http {".to_owned(),
        "access_log off; sendfile on; tcp_nopush on; default_type application/octet-stream;".to_owned(),
    ];
    lines.extend(temporary.map(|what| format!("{what}_temp_path {own}/{what};")));
    lines.push(format!("server {{ listen {address}:{NGINX_PORT}; root {root}; }}"));
    lines.push("}".to_owned());
    lines
}

/// A process that ends with this value.
struct Running {
    child: Child,
    _kill: Guard,
}

impl Running {
    fn start(command: &mut Command, what: &str) -> Result<Running> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        process::die_with_parent(command);
        let child =
            command.spawn().with_context(|| format!("start {what}: scripts/install-deps.sh test installs it"))?;
        let start_ticks = start_ticks_of(child.id()).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid: child.id(), start_ticks })?;
        Ok(Running { child, _kill: kill })
    }

    /// Waits until something is so of a process that runs.
    fn wait_for(&mut self, what: &str, look: impl Fn() -> bool) -> Result<()> {
        wait::until(what, wait::HANG, || {
            if let Some(status) = self.child.try_wait().context("look after a program")? {
                bail!("{what}: it ended with {status}");
            }
            Ok(look().then_some(()))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory in memory of the host that a guest has by virtiofsd. nginx serves it.
pub struct Shared {
    _nginx: Running,
    nginx_pid: u32,
    virtiofsd: Running,
    socket: PathBuf,
    pub directory: PathBuf,
    _mount: Guard,
    _files: Guard,
}

impl Shared {
    /// Starts both, with their files in `dir`.
    ///
    /// # Errors
    /// A program is missing, or does not start.
    pub fn start(dir: &Path, network: &Network, address: Ipv4Addr) -> Result<Shared> {
        let dir = dir.canonicalize().context("find the bench's directory")?.join(format!("out-{}", std::process::id()));
        let files = Guard::new(Undo::Directory { path: dir.clone() })?;
        let (directory, own) = (dir.join("shared"), dir.join("nginx"));
        for path in [&directory, &own] {
            fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
        }
        let mount = Guard::new(Undo::Mount { path: directory.clone() })?;
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", TMPFS, "pagoda-bench"]).arg(&directory).status();
        ensure!(mounted.context("run mount")?.success(), "mount a tmpfs on {}", directory.display());
        let socket = dir.join("virtiofsd.sock");
        let mut command = Command::new(VIRTIOFSD);
        // No second copy in the guest's page cache, which costs CPU time as well as memory.
        command.arg(format!("--socket-path={}", socket.display())).args(["-o", "cache=none,log_level=err", "-o"]);
        command.arg(format!("source={}", directory.display()));
        let mut virtiofsd = Running::start(&mut command, VIRTIOFSD)?;
        virtiofsd.wait_for("virtiofsd", || socket.exists())?;
        let nginx = nginx(&own, &directory, network, address)?;
        let nginx_pid = nginx.child.id();
        Ok(Shared { _nginx: nginx, nginx_pid, virtiofsd, socket, directory, _mount: mount, _files: files })
    }

    /// QEMU's words for it.
    pub fn qemu_words(&self, tag: &str, memory_mib: u64) -> Vec<String> {
        let words = [
            "-object",
            &format!("memory-backend-memfd,id=shared,size={memory_mib}M,share=on"),
            "-numa",
            "node,memdev=shared",
            "-chardev",
            &format!("socket,id=virtiofsd,path={}", self.socket.display()),
            "-device",
            &format!("vhost-user-fs-pci,chardev=virtiofsd,tag={tag},queue-size=1024"),
        ];
        words.map(str::to_owned).into()
    }

    /// Those whose CPU time counts, with their children.
    pub fn processes(&self) -> [u32; 2] {
        [self.virtiofsd.child.id(), self.nginx_pid]
    }
}

fn nginx(own: &Path, root: &Path, network: &Network, address: Ipv4Addr) -> Result<Running> {
    let file = own.join("nginx.conf");
    let lines = nginx_lines(&root.display().to_string(), &own.display().to_string(), address);
    fs::write(&file, lines.join("\n")).context("write nginx's configuration")?;
    let words = network.host_words();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args([NGINX, "-e", "stderr", "-p"]).arg(own).arg("-c").arg(&file);
    let mut nginx = Running::start(&mut command, NGINX)?;
    let server = port_of(address, NGINX_PORT);
    nginx.wait_for(NGINX, || network.at_client(|| client::open(server)).is_ok())?;
    Ok(nginx)
}
