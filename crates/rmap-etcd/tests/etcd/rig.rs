//! An etcd of a test's own.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rmap_etcd::{Etcd, EtcdConfig};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// A guard against a hang, on machines however slow.
pub const HANG: Duration = Duration::from_secs(300);
/// Somebody else may take a port between its choice and its use.
const PORT_TRIES: usize = 20;
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Waits for something to be so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < HANG, "{what}: not within {HANG:?}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// STOP has stopped all threads of the process when this returns: one of them takes the signal when it runs next, and the others
/// may answer until then.
pub fn send_signal(child: &Child, signal: Signal) {
    let pid = Pid::from_child(child);
    kill_process(pid, signal).expect("it is this process's child");
    if signal == Signal::STOP {
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).expect("its state").expect("a change of it");
        assert!(status.stopped(), "it has ended: {status:?}");
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Plain,
    /// With a certificate that etcd signs itself.
    Tls,
}

pub struct EtcdProcess {
    child: Child,
    dir: PathBuf,
    scheme: Scheme,
    port: u16,
    peer_port: u16,
}

impl EtcdProcess {
    pub fn start() -> EtcdProcess {
        EtcdProcess::start_with(Scheme::Plain)
    }

    pub fn start_with(scheme: Scheme) -> EtcdProcess {
        let dir = EtcdProcess::new_dir();
        for _ in 0..PORT_TRIES {
            if let Some(etcd) = EtcdProcess::at(&dir, scheme, free_port(), free_port()) {
                return etcd;
            }
        }
        panic!("etcd does not start: {}", std::fs::read_to_string(dir.join("log")).unwrap_or_default());
    }

    fn new_dir() -> PathBuf {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("rmap-etcd-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        dir
    }

    fn at(dir: &Path, scheme: Scheme, port: u16, peer_port: u16) -> Option<EtcdProcess> {
        let child = spawn(dir, scheme, port, peer_port);
        let mut etcd = EtcdProcess { child, dir: dir.to_owned(), scheme, port, peer_port };
        if etcd.comes_up() {
            return Some(etcd);
        }
        let _ = std::fs::remove_dir_all(dir.join("data"));
        // The directory is for the next one.
        etcd.dir = PathBuf::new();
        None
    }

    /// Whether another one could be at the same port.
    pub fn has_double(&self) -> bool {
        let dir = EtcdProcess::new_dir();
        let double = EtcdProcess::at(&dir, self.scheme, self.port, free_port());
        let _ = std::fs::remove_dir_all(dir);
        double.is_some()
    }

    /// `false` if it has ended instead.
    fn comes_up(&mut self) -> bool {
        let mut ended = false;
        until("etcd comes up", || {
            ended = self.child.try_wait().expect("its state").is_some();
            ended || self.serves() && self.answers()
        });
        !ended
    }

    /// By its own log. Another test's may answer at that port, if both have chosen the same one: this one is about to end then.
    fn serves(&self) -> bool {
        let log = std::fs::read(self.dir.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).contains("ready to serve client requests")
    }

    fn answers(&self) -> bool {
        if self.scheme == Scheme::Tls && !self.certificate().exists() {
            return false;
        }
        let mut config = self.config("probe");
        config.patience = Duration::ZERO;
        Etcd::connect(config).is_ok()
    }

    /// etcd's own certificate, made at its start.
    pub fn certificate(&self) -> PathBuf {
        self.dir.join("data/fixtures/client/cert.pem")
    }

    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn config(&self, host: &str) -> EtcdConfig {
        config(&self.endpoint(), self.scheme, host, Some(self.certificate()))
    }

    pub fn connect(&self, host: &str) -> Etcd {
        Etcd::connect(self.config(host)).expect("etcd")
    }

    pub fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it is this process's child");
        self.child.wait().expect("it is this process's child");
    }

    /// Again, with what is on its disk.
    pub fn restart(&mut self) {
        for _ in 0..PORT_TRIES {
            self.child = spawn(&self.dir, self.scheme, self.port, self.peer_port);
            if self.comes_up() {
                return;
            }
        }
        panic!("etcd does not start again");
    }

    /// What an operator, or somebody else with access, does.
    pub fn etcdctl(&self, args: &[&str]) -> String {
        let out = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints=http://{}", self.endpoint()))
            .args(args)
            .output()
            .expect("etcdctl: run scripts/install-deps.sh test");
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }
}

impl Drop for EtcdProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // None, of one that did not come up: this removes nothing then.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// For an etcd, or for what stands before it.
pub fn config(endpoint: &str, scheme: Scheme, host: &str, ca: Option<PathBuf>) -> EtcdConfig {
    let text = if scheme == Scheme::Tls { "etcds" } else { "etcd" };
    let mut config = EtcdConfig::parse(&format!("{text}://{endpoint}/test"), host).expect("an address");
    config.patience = HANG;
    if scheme == Scheme::Tls {
        config.tls = ca.map(|ca| rmap_etcd::TlsFiles { ca, identity: None });
    }
    config
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("its number").port()
}

fn spawn(dir: &Path, scheme: Scheme, port: u16, peer_port: u16) -> Child {
    let log = File::create(dir.join("log")).expect("a log");
    let http = if scheme == Scheme::Tls { "https" } else { "http" };
    let (client, peer) = (format!("{http}://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
    let mut command = Command::new("etcd");
    command.args(["--name", "test", "--data-dir"]).arg(dir.join("data"));
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.arg("--initial-cluster").arg(format!("test={peer}"));
    if scheme == Scheme::Tls {
        command.arg("--auto-tls");
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("etcd: run scripts/install-deps.sh test")
}
