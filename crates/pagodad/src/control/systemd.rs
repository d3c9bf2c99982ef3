//! Telling systemd how far the daemon is (sd_notify(3)): a datagram to the socket in `NOTIFY_SOCKET`.
//!
//! Without that variable nothing happens, and no failure here stops anything. The crate `sd-notify` (0.5) is not used: it takes
//! the socket's name for a path only, and sd_notify(3) also has abstract names, which begin with `@`.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

const VARIABLE: &str = "NOTIFY_SOCKET";

/// VMs are served from now on; `status` is what `systemctl status` shows.
pub(super) fn ready(status: &str) {
    notify(&format!("READY=1\nSTATUS={status}"));
}

/// The daemon is about to end.
pub(super) fn stopping() {
    notify("STOPPING=1");
}

fn notify(state: &str) {
    if let Some(path) = std::env::var_os(VARIABLE)
        && let Err(error) = send(&path, state)
    {
        tracing::warn!(%error, socket = %path.display(), "cannot tell systemd");
    }
}

fn send(path: &OsStr, state: &str) -> io::Result<()> {
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(path)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bound: &UnixDatagram, path: &OsStr) {
        send(path, "READY=1").unwrap();
        let mut bytes = [0; 64];
        let len = bound.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"READY=1");
    }

    #[test]
    fn both_kinds_of_socket() {
        let name = format!("pagodad-notify-{}", std::process::id());
        let abstract_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        check(&abstract_name, OsStr::new(&format!("@{name}")));

        let path = std::env::temp_dir().join(&name);
        let _ = std::fs::remove_file(&path);
        check(&UnixDatagram::bind(&path).unwrap(), path.as_os_str());
        std::fs::remove_file(path).unwrap();
        assert!(send(OsStr::new("/nonexistent/notify"), "READY=1").is_err());
    }
}
