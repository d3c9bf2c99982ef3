//! Where clients connect: a Unix socket, or TCP on the loopback.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use thiserror::Error;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// What is written as `%XX` in the query of a URI: all but the unreserved characters of RFC 3986 and the slash.
const OUTSIDE_QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Why nobody can connect.
#[derive(Debug, Error)]
pub enum ListenError {
    #[error("{path} is in use by another process: stop it, or give another path")]
    InUse { path: PathBuf },
    #[error("{path} exists and is not a socket: give another path, or move the file away")]
    NotASocket { path: PathBuf },
    #[error("socket {path}: {source}")]
    Unix { path: PathBuf, source: io::Error },
    #[error("{addr} is not on the loopback: NBD is not encrypted; give 127.0.0.1 or [::1], or a Unix socket")]
    NotLoopback { addr: SocketAddr },
    #[error("listen on {addr}: {source}")]
    Tcp { addr: SocketAddr, source: io::Error },
}

/// A socket that listens. A Unix socket's name goes with it.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// The path, and which file it was.
    path: Option<(PathBuf, (u64, u64))>,
    tcp: Option<SocketAddr>,
}

impl Listener {
    /// A Unix socket that only its owner may use. One that a dead process left is replaced.
    ///
    /// # Errors
    /// The path is taken, or cannot be used.
    pub fn unix(path: &Path) -> Result<Listener, ListenError> {
        let fail = |source: io::Error| ListenError::Unix { path: path.to_owned(), source };
        let addr = SocketAddrUnix::new(path).map_err(|error| fail(error.into()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|error| fail(error.into()))?;
        match rustix::net::bind(&fd, &addr) {
            Err(rustix::io::Errno::ADDRINUSE) => {
                remove_stale(path)?;
                rustix::net::bind(&fd, &addr).map_err(|error| fail(error.into()))?;
            }
            result => result.map_err(|error| fail(error.into()))?,
        }
        // Nobody can connect before the socket listens, so nobody gets in by the first, wider mode.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(|error| fail(error.into()))?;
        rustix::net::listen(&fd, BACKLOG).map_err(|error| fail(error.into()))?;
        let file = std::fs::symlink_metadata(path).map_err(fail)?;
        Ok(Listener { fd, path: Some((path.to_owned(), (file.dev(), file.ino()))), tcp: None })
    }

    /// TCP on the loopback; port 0 takes one that is free.
    ///
    /// # Errors
    /// The address is not on the loopback, or cannot be used.
    pub fn tcp(addr: SocketAddr) -> Result<Listener, ListenError> {
        if !addr.ip().is_loopback() {
            return Err(ListenError::NotLoopback { addr });
        }
        let fail = |source| ListenError::Tcp { addr, source };
        let listener = TcpListener::bind(addr).map_err(fail)?;
        listener.set_nonblocking(true).map_err(fail)?;
        let tcp = Some(listener.local_addr().map_err(fail)?);
        Ok(Listener { fd: listener.into(), path: None, tcp })
    }

    /// How clients name it, as libnbd and QEMU read it.
    pub fn uri(&self, export: &str) -> String {
        match (&self.path, self.tcp) {
            (Some((path, _)), _) => {
                let path = percent_encode(path.as_os_str().as_bytes(), OUTSIDE_QUERY);
                format!("nbd+unix:///{export}?socket={path}")
            }
            (None, Some(addr)) => format!("nbd://{addr}/{export}"),
            (None, None) => String::new(),
        }
    }

    /// The next client, if there is one.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(client) => {
                if self.tcp.is_some() {
                    // Answers are small and are wanted now.
                    let _ = sockopt::set_tcp_nodelay(&client, true);
                }
                Ok(Some(client))
            }
            // A client that has gone again is no reason to stop.
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    /// Takes the name away, unless somebody else has it by now.
    fn drop(&mut self) {
        if let Some((path, id)) = &self.path
            && std::fs::symlink_metadata(path).is_ok_and(|file| (file.dev(), file.ino()) == *id)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes a socket that nobody listens at.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let fail = |source| ListenError::Unix { path: path.to_owned(), source };
    if !std::fs::symlink_metadata(path).map_err(fail)?.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path).map_err(fail),
        _ => Err(ListenError::InUse { path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_path_is_refused_and_a_stale_socket_replaced() {
        let dir = std::env::temp_dir().join(format!("rmap-nbd-listen-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("disk.sock");
        std::fs::write(&path, "x").unwrap();
        assert!(matches!(Listener::unix(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"x");
        std::fs::remove_file(&path).unwrap();
        let first = Listener::unix(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(Listener::unix(&path), Err(ListenError::InUse { .. })));
        drop(first);
        assert!(!path.exists());
        // The socket of a process that was killed: std's listener leaves its name behind.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Listener::unix(&path).unwrap());
        let odd = dir.join("a b#50%&ü.sock");
        let uri = Listener::unix(&odd).unwrap().uri("d");
        assert!(uri.starts_with("nbd+unix:///d?socket=/") && uri.ends_with("/a%20b%2350%25%26%C3%BC.sock"), "{uri}");
        let tcp = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        assert!(tcp.uri("d").starts_with("nbd://127.0.0.1:"));
        let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
        assert!(matches!(Listener::tcp(everywhere), Err(ListenError::NotLoopback { .. })));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
