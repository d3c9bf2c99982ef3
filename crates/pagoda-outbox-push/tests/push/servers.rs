//! Programs that are pushed to. Each is ended with its test.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pagoda_sys::toy::skip::skipped;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::rig::{Directory, free_port, name};

const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// A process that ends with what it belongs to.
#[derive(Debug)]
struct Process {
    child: Child,
}

impl Process {
    /// Starts a server and waits until it takes connections at `port`.
    fn start(command: &mut Command, port: u16) -> Process {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let process = Process { child: child.expect("run scripts/install-deps.sh test") };
        let pidfd = pidfd_open(Pid::from_child(&process.child), PidfdFlags::empty()).unwrap();
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            // Until it ends, or for a moment.
            let mut end = [PollFd::new(&pidfd, PollFlags::IN)];
            let ended = poll(&mut end, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 })).unwrap();
            assert!(ended == 0, "{command:?} ended");
            assert!(began.elapsed() < STARTS_WITHIN, "{command:?} does not listen");
        }
        process
    }
}

impl Drop for Process {
    /// Killed, as by the kernel that is short of memory.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// nginx with WebDAV, of a directory of its own.
#[derive(Debug)]
pub struct Nginx {
    directory: Directory,
    pub port: u16,
    process: Option<Process>,
}

impl Nginx {
    /// All that it needs, without the server itself.
    pub fn prepare(tls: Option<(&Path, &Path)>) -> Nginx {
        let (directory, port) = (Directory::new("nginx"), free_port());
        let own = directory.path().display();
        let (kind, files) = match tls {
            None => ("", String::new()),
            Some((certificate, key)) => {
                let files =
                    format!("ssl_certificate {}; ssl_certificate_key {};", certificate.display(), key.display());
                (" ssl", files)
            }
        };
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|what| format!("{what}_temp_path {own}/temporary;\n"))
            .collect();
        // One process: then nobody is left when it is killed.
        let text = format!(
            "daemon off; master_process off; pid {own}/pid; error_log {own}/error.log;\n\
             events {{}}\n\
             http {{\naccess_log {own}/access.log; client_max_body_size 0;\n{temporary}\
             server {{\nlisten 127.0.0.1:{port}{kind}; {files} root {own}/files;\n\
             location / {{ dav_methods PUT; create_full_put_path on; }}\n\
             location /closed/ {{ deny all; }}\n}}\n}}\n"
        );
        std::fs::write(directory.path().join("nginx.conf"), text).unwrap();
        std::fs::create_dir(directory.path().join("files")).unwrap();
        Nginx { directory, port, process: None }
    }

    pub fn start() -> Nginx {
        let mut nginx = Nginx::prepare(None);
        nginx.begin();
        nginx
    }

    pub fn begin(&mut self) {
        let own = self.directory.path();
        let mut command = Command::new("nginx");
        command.arg("-p").arg(own).arg("-c").arg(own.join("nginx.conf")).arg("-e").arg(own.join("error.log"));
        self.process = Some(Process::start(&mut command, self.port));
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn file(&self, path: &str) -> Option<Vec<u8>> {
        std::fs::read(self.directory.path().join("files").join(path)).ok()
    }
}

/// A certificate of its own for 127.0.0.1, with its key, by `openssl`.
pub fn certificate(directory: &Path) -> (PathBuf, PathBuf) {
    let (certificate, key) = (directory.join("certificate.pem"), directory.join("key.pem"));
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]);
    command.args(["-subj", "/CN=pagoda test", "-addext", "subjectAltName=IP:127.0.0.1"]);
    command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    command.arg("-out").arg(&certificate).arg("-keyout").arg(&key);
    let done = command.output().expect("run scripts/install-deps.sh test");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    (certificate, key)
}

/// A server of S3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Keeps everything in its memory, so it has nothing when it is started again. Looks at no signature.
    Moto,
    /// Versity's gateway keeps everything in files, and compares signatures and MD5s.
    Versity,
}

impl Program {
    fn path(self) -> PathBuf {
        let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out");
        match self {
            Program::Moto => out.join("moto/bin/moto_server"),
            Program::Versity => out.join("versitygw/versitygw"),
        }
    }

    /// Whether the test can run. The gateway is only there where Go is.
    pub fn is_there(self) -> bool {
        let is_there = self == Program::Moto || self.path().exists();
        if !is_there {
            skipped("there is no versitygw: scripts/install-deps.sh test builds it where Go is new enough");
        }
        is_there
    }
}

/// An S3 server that runs, with a bucket.
#[derive(Debug)]
pub struct S3Server {
    program: Program,
    directory: Directory,
    pub port: u16,
    process: Option<Process>,
}

impl S3Server {
    pub const BUCKET: &str = "bucket";
    pub const KEYS: &str = "aws_access_key_id = somebody\naws_secret_access_key = a/secret+of=40\n";

    pub fn start(program: Program) -> S3Server {
        let mut server = S3Server { program, directory: Directory::new("s3"), port: free_port(), process: None };
        server.begin();
        server.make_bucket(S3Server::BUCKET);
        server
    }

    pub fn begin(&mut self) {
        let mut command = Command::new(self.program.path());
        match self.program {
            Program::Moto => command.arg("-H").arg("127.0.0.1").arg("-p").arg(self.port.to_string()),
            Program::Versity => {
                command.env("ROOT_ACCESS_KEY", "somebody").env("ROOT_SECRET_KEY", "a/secret+of=40");
                let sidecar = self.directory.path().join("sidecar");
                std::fs::create_dir_all(&sidecar).unwrap();
                std::fs::create_dir_all(self.root()).unwrap();
                command.arg("--port").arg(format!("127.0.0.1:{}", self.port));
                command.arg("posix").arg("--sidecar").arg(sidecar).arg(self.root())
            }
        };
        self.process = Some(Process::start(&mut command, self.port));
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again after it was killed, without the parts that it had.
    pub fn begin_without_parts(&mut self) {
        match self.program {
            Program::Moto => {
                self.begin();
                self.make_bucket(S3Server::BUCKET);
            }
            Program::Versity => {
                std::fs::remove_dir_all(self.uploads_directory()).unwrap();
                self.begin();
            }
        }
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    fn uploads_directory(&self) -> PathBuf {
        self.root().join(S3Server::BUCKET).join(".sgwtmp/multipart")
    }

    pub fn make_bucket(&self, name: &str) {
        match self.program {
            Program::Moto => {
                let (status, body) = self.ask("PUT", &format!("/{name}"));
                assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
            }
            Program::Versity => std::fs::create_dir(self.root().join(name)).unwrap(),
        }
    }

    pub fn object(&self, key: &str) -> Option<Vec<u8>> {
        match self.program {
            Program::Moto => {
                let (status, body) = self.ask("GET", &format!("/{}/{}", S3Server::BUCKET, name(key).encoded()));
                (status == 200).then_some(body)
            }
            Program::Versity => std::fs::read(self.root().join(S3Server::BUCKET).join(key)).ok(),
        }
    }

    /// Uploads that were begun and neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        match self.program {
            Program::Moto => {
                let (status, body) = self.ask("GET", &format!("/{}?uploads", S3Server::BUCKET));
                assert_eq!(status, 200);
                String::from_utf8_lossy(&body).matches("<UploadId>").count()
            }
            // Of each key one directory, and in it one of each upload.
            Program::Versity => entries(&self.uploads_directory()).iter().map(|key| entries(key).len()).sum(),
        }
    }

    /// A request whose signature nobody looks at.
    fn ask(&self, method: &str, path: &str) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let who =
            "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{}\r\nAuthorization: {who}\r\nContent-Length: 0\r\n\r\n",
            self.port
        )
        .unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        let head = reply.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let status = String::from_utf8_lossy(&reply[9..12]).parse().unwrap();
        (status, reply.split_off(head + 4))
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).map_or(Vec::new(), |entries| entries.map(|entry| entry.unwrap().path()).collect())
}
