//! Binding the sockets of the control plane.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Clients that wait for `accept`; a further one only waits longer.
const BACKLOG: i32 = 128;

/// Listens at `path`, for its owner alone from the first moment. Its directory is made if it is
/// not there, for its owner alone too; a socket that a dead daemon left is replaced.
///
/// # Errors
/// Another daemon answers there, or the path cannot be used.
pub fn bind_control(path: &Path) -> Result<UnixListener> {
    make_dir(path)?;
    let address = SocketAddrUnix::new(path).with_context(|| format!("use {} as a socket's path", path.display()))?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .context("make the control socket")?;
    // On Linux the file takes the mode of the socket (unix_bind), so it is never open to others.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).context("set the mode of the control socket")?;
    let bound = match rustix::net::bind(&socket, &address) {
        Err(Errno::ADDRINUSE) => {
            remove_stale(path)?;
            rustix::net::bind(&socket, &address)
        }
        bound => bound,
    };
    bound.with_context(|| format!("bind the control socket {}", path.display()))?;
    rustix::net::listen(&socket, BACKLOG).context("listen on the control socket")?;
    Ok(UnixListener::from(socket))
}

fn make_dir(path: &Path) -> Result<()> {
    let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return Ok(()) };
    if dir.is_dir() {
        return Ok(());
    }
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(|| format!("make the directory {} of the control socket", dir.display()))
}

fn remove_stale(path: &Path) -> Result<()> {
    match UnixStream::connect(path) {
        Ok(_) => bail!(
            "another pagodad is running on the socket {}: stop it first, or start this one with \
             its own --state-dir, --swap-dir and --socket",
            path.display()
        ),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        Err(error) => return Err(error).with_context(|| format!("ask who listens on {}", path.display())),
    }
    let meta = path.symlink_metadata().with_context(|| format!("look at {}", path.display()))?;
    if !meta.file_type().is_socket() {
        bail!("{} is there and is no socket: remove it, or use another --socket", path.display());
    }
    std::fs::remove_file(path).with_context(|| format!("remove the socket {} of a dead daemon", path.display()))
}

/// Lets the members of group `gid` use the socket at `path`, for `--group`. Its directory is not
/// changed: they must be able to enter it.
///
/// # Errors
/// Not the owner of the socket, or not a member of the group and not root.
pub fn open_to_group(path: &Path, gid: u32) -> Result<()> {
    chown(path, None, Some(gid)).with_context(|| format!("give {} to group {gid}", path.display()))?;
    std::fs::set_permissions(path, Permissions::from_mode(0o660))
        .with_context(|| format!("open {} to group {gid}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pagodad-socket-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        dir
    }

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn only_the_owner_gets_in() {
        let dir = scratch("owner");
        let path = dir.join("run/pagoda.sock");
        let _listener = bind_control(&path).unwrap();
        assert_eq!((mode(&dir.join("run")), mode(&path)), (0o700, 0o600));
        open_to_group(&path, rustix::process::getegid().as_raw()).unwrap();
        assert_eq!(mode(&path), 0o660);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_live_daemon_keeps_its_socket_and_a_dead_ones_is_replaced() {
        let dir = scratch("stale");
        let path = dir.join("pagoda.sock");
        let first = bind_control(&path).unwrap();
        let said = format!("{:#}", bind_control(&path).unwrap_err());
        assert!(said.contains("another pagodad is running"), "{said}");
        drop(first);
        assert!(path.exists());
        drop(bind_control(&path).unwrap());

        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "kept").unwrap();
        assert!(format!("{:#}", bind_control(&path).unwrap_err()).contains("is no socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
