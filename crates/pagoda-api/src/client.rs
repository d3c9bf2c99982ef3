//! A blocking client: one connection per request, every wait bounded.
//!
//! When the daemon is away each call fails with [`ClientError::NotRunning`] at once; nothing is
//! retried, for the VMs themselves do not need this socket.

mod hosts;
mod moves;
mod outboxes;
mod snapshots;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::{self, HttpError, Response};
use crate::types::{
    AdmitReply, AdmitRequest, ApiError, CreateVm, CreatedVm, CurveInfo, CurveSwitch, ErrorCode, Explain, Health,
    HostInfo, HostPatch, Mrc, SOCKET_DEFAULT, SOCKET_ENV, SampleInfo, SampleRequest, Version, VmInfo, VmList, VmPatch,
    WhatIfReply, WhatIfRequest, check_vm_name, vm_file_name,
};

/// Longest wait for the daemon to go on with a request. Making a VM that reserves its swap is the
/// slowest one: allocating extents for hundreds of GiB takes seconds.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Longest wait for an answer that only reads: nothing it asks for takes the daemon a second.
const READ_WAIT_MAX: Duration = Duration::from_secs(15);
/// Longest wait for a snapshot to be removed or restored: others may take over what they have in it, which is a copy, and a
/// copy before it is waited for as well.
const LONG_WAIT_MAX: Duration = Duration::from_hours(1);
/// Later than this an answer is late.
const SLOW: Duration = Duration::from_secs(2);

/// Why a request failed. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(
        "no daemon listens on {}: start it with `pagodad` or `systemctl start pagodad`, \
         or say where it listens with --socket or {SOCKET_ENV}",
        socket.display()
    )]
    NotRunning { socket: PathBuf, source: io::Error },
    #[error(
        "not allowed to use {}: it belongs to the user who started the daemon; \
         run this command as that user (usually with sudo)",
        socket.display()
    )]
    NotAllowed { socket: PathBuf, source: io::Error },
    #[error("{} cannot be the path of a socket: it is longer than 107 bytes or has a NUL", socket.display())]
    BadPath { socket: PathBuf },
    #[error(
        "the daemon on {} took longer than {} s to answer: see its log (`journalctl -u pagodad`)",
        socket.display(), waited.as_secs()
    )]
    Timeout { socket: PathBuf, waited: Duration },
    #[error("talk to the daemon on {}: is it a pagodad of this version?", socket.display())]
    Protocol { socket: PathBuf, source: HttpError },
    #[error("the daemon's reply to {request} is not understood: are pagoda and pagodad of one version?")]
    Reply { request: String, source: serde_json::Error },
    #[error("{0}")]
    BadName(String),
    /// A file that is sent or received, on this side.
    #[error("the file: {}", crate::with_advice(.0.to_string()))]
    File(#[source] io::Error),
    #[error("{}", with_hint(.0))]
    Refused(ApiError),
}

impl ClientError {
    /// The daemon's own code when it answered at all.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(error) => Some(error.code),
            _ => None,
        }
    }

    /// Nobody could be asked: not running, no permission, no answer.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::NotRunning { .. }
                | Self::NotAllowed { .. }
                | Self::BadPath { .. }
                | Self::Timeout { .. }
                | Self::Protocol { .. }
        )
    }
}

fn with_hint(error: &ApiError) -> String {
    match &error.hint {
        Some(hint) => format!("{}\n{hint}", error.message),
        None => error.message.clone(),
    }
}

/// The socket to use: `flag`, else [`SOCKET_ENV`], else [`SOCKET_DEFAULT`].
#[must_use]
pub fn socket_path(flag: Option<&Path>) -> PathBuf {
    match flag {
        Some(path) => path.to_owned(),
        None => std::env::var_os(SOCKET_ENV)
            .filter(|path| !path.is_empty())
            .map_or_else(|| SOCKET_DEFAULT.into(), PathBuf::from),
    }
}

/// A client asks one daemon, over its control socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    say_slow: Option<fn(&Path)>,
}

impl Client {
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), say_slow: None }
    }

    /// The same, which calls `say` with the socket's path when an answer takes longer than 2 s.
    #[must_use]
    pub fn saying_when_slow(self, say: fn(&Path)) -> Self {
        Self { say_slow: Some(say), ..self }
    }

    /// The same, also after this process has gone to another directory.
    ///
    /// # Errors
    /// The directory in which it is cannot be found out.
    pub fn anchored(&self) -> io::Result<Self> {
        Ok(Self { socket: std::path::absolute(&self.socket)?, ..self.clone() })
    }

    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn version(&self) -> Result<Version, ClientError> {
        self.get("/v1/version")
    }

    pub fn health(&self) -> Result<Health, ClientError> {
        self.get("/v1/health")
    }

    pub fn host(&self) -> Result<HostInfo, ClientError> {
        self.get("/v1/host")
    }

    pub fn vms(&self) -> Result<VmList, ClientError> {
        self.get("/v1/vms")
    }

    pub fn vm(&self, name: &str) -> Result<VmInfo, ClientError> {
        self.get(&vm_path(name, "")?)
    }

    pub fn explain(&self, name: &str) -> Result<Explain, ClientError> {
        self.get(&vm_path(name, "/explain")?)
    }

    /// Makes a VM; fetch its RAM with [`crate::attach::fetch`], or give it up with
    /// [`Client::delete`].
    pub fn create(&self, vm: &CreateVm) -> Result<CreatedVm, ClientError> {
        self.send("POST", "/v1/vms", vm)
    }

    /// Changes the host's memory policy.
    pub fn patch_host(&self, patch: &HostPatch) -> Result<HostInfo, ClientError> {
        self.send("PATCH", "/v1/host", patch)
    }

    /// Whether such a VM would be kept.
    pub fn admit(&self, vm: &AdmitRequest) -> Result<AdmitReply, ClientError> {
        self.send("POST", "/v1/admit", vm)
    }

    pub fn mrc(&self, name: &str) -> Result<Mrc, ClientError> {
        self.get(&vm_path(name, "/mrc")?)
    }

    pub fn what_if(&self, name: &str, settings: &WhatIfRequest) -> Result<WhatIfReply, ClientError> {
        self.send("POST", &vm_path(name, "/whatif")?, settings)
    }

    pub fn patch(&self, name: &str, patch: &VmPatch) -> Result<VmInfo, ClientError> {
        self.send("PATCH", &vm_path(name, "")?, patch)
    }

    /// Lets a stalled VM go on.
    pub fn cont(&self, name: &str) -> Result<VmInfo, ClientError> {
        let path = vm_path(name, "/cont")?;
        let response = self.exchange("POST", &path, Some(b"{}"))?;
        parse(&path, &response)
    }

    /// Begins a sampling period.
    pub fn sample(&self, name: &str, request: &SampleRequest) -> Result<SampleInfo, ClientError> {
        self.send("POST", &vm_path(name, "/sample")?, request)
    }

    /// What became of the sampling period's pages.
    pub fn sampled(&self, name: &str) -> Result<SampleInfo, ClientError> {
        self.get(&vm_path(name, "/sample")?)
    }

    /// Switches the miss-ratio curve on or off.
    pub fn watch_curve(&self, name: &str, switch: CurveSwitch) -> Result<CurveInfo, ClientError> {
        self.send("POST", &vm_path(name, "/curve")?, &switch)
    }

    /// Gives the miss-ratio curve as it is now.
    pub fn curve(&self, name: &str) -> Result<CurveInfo, ClientError> {
        self.get(&vm_path(name, "/curve")?)
    }

    /// Gives up a VM that nothing has attached to.
    pub fn delete(&self, name: &str) -> Result<(), ClientError> {
        self.exchange("DELETE", &vm_path(name, "")?, None).map(drop)
    }

    /// The metrics as Prometheus text.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let response = self.exchange("GET", "/metrics", None)?;
        Ok(String::from_utf8_lossy(&response.body).into_owned())
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        parse(path, &self.exchange("GET", path, None)?)
    }

    fn send<T: DeserializeOwned>(&self, method: &str, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        self.send_within(WAIT_MAX, method, path, body)
    }

    fn send_within<T: DeserializeOwned>(
        &self,
        wait: Duration,
        method: &str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|source| ClientError::Reply { request: path.into(), source })?;
        parse(path, &self.exchange_within(wait, method, path, Some(&body))?)
    }

    fn exchange(&self, method: &str, path: &str, body: Option<&[u8]>) -> Result<Response, ClientError> {
        let wait = if method == "GET" { READ_WAIT_MAX } else { WAIT_MAX };
        self.exchange_within(wait, method, path, body)
    }

    fn exchange_within(
        &self,
        wait: Duration,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
    ) -> Result<Response, ClientError> {
        let _slow = self.say_slow.map(|say| Slow::watch(self.socket.clone(), say));
        let mut stream = self.connect(wait)?;
        let response = http::exchange(&mut stream, method, path, body).map_err(|source| self.failed(source, wait))?;
        if response.status < 300 {
            return Ok(response);
        }
        Err(ClientError::Refused(refusal(&format!("{method} {path}"), &response)))
    }

    fn failed(&self, source: HttpError, waited: Duration) -> ClientError {
        let socket = self.socket.clone();
        match source {
            HttpError::Io(error) if is_timeout(&error) => ClientError::Timeout { socket, waited },
            HttpError::File(source) => ClientError::File(source),
            source => ClientError::Protocol { socket, source },
        }
    }

    fn connect(&self, wait: Duration) -> Result<UnixStream, ClientError> {
        let socket = || self.socket.clone();
        let address = SocketAddrUnix::new(&self.socket).map_err(|_| ClientError::BadPath { socket: socket() })?;
        // By hand, for std offers no time-out for a connect that waits in a full backlog.
        let connected = (|| {
            let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_timeout(&fd, Timeout::Send, Some(wait))?;
            sockopt::set_socket_timeout(&fd, Timeout::Recv, Some(wait))?;
            rustix::net::connect(&fd, &address)?;
            Ok::<_, rustix::io::Errno>(UnixStream::from(fd))
        })();
        connected.map_err(|errno| connect_error(socket(), errno.into(), wait))
    }
}

fn connect_error(socket: PathBuf, source: io::Error, waited: Duration) -> ClientError {
    match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::NotAllowed { socket, source },
        _ if is_timeout(&source) => ClientError::Timeout { socket, waited },
        _ => ClientError::NotRunning { socket, source },
    }
}

/// Says that an answer is late, unless it comes before.
struct Slow {
    answered: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    fn watch(socket: PathBuf, say: fn(&Path)) -> Slow {
        let (answered, waiting) = channel();
        let watch = move || {
            if waiting.recv_timeout(SLOW) == Err(RecvTimeoutError::Timeout) {
                say(&socket);
            }
        };
        // Without the thread nothing is said, and the answer is waited for all the same.
        let thread = std::thread::Builder::new().name("slow".into()).spawn(watch).ok();
        Slow { answered: Some(answered), thread }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        drop(self.answered.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn vm_path(name: &str, tail: &str) -> Result<String, ClientError> {
    check_vm_name(name).map_err(ClientError::BadName)?;
    Ok(format!("/v1/vms/{}{tail}", vm_file_name(name)))
}

fn parse<T: DeserializeOwned>(path: &str, response: &Response) -> Result<T, ClientError> {
    serde_json::from_slice(&response.body).map_err(|source| ClientError::Reply { request: path.into(), source })
}

/// The daemon's error, or what a reply without one comes to.
fn refusal(request: &str, response: &Response) -> ApiError {
    serde_json::from_slice(&response.body).unwrap_or_else(|_| ApiError {
        code: if response.status == 404 { ErrorCode::NoSuchRoute } else { ErrorCode::Unknown },
        message: format!("{request} failed with HTTP status {}", response.status),
        hint: Some("are pagoda and pagodad of one version?".into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_failed_connect_means() {
        let check = |kind: io::ErrorKind, expected: &str| {
            let said = connect_error("/s".into(), kind.into(), READ_WAIT_MAX).to_string();
            assert!(said.contains(expected), "{said}");
        };
        check(io::ErrorKind::NotFound, "start it with `pagodad`");
        check(io::ErrorKind::ConnectionRefused, "systemctl start pagodad");
        check(io::ErrorKind::PermissionDenied, "run this command as that user");
        check(io::ErrorKind::WouldBlock, "took longer than");
    }
}
