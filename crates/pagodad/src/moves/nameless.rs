//! Sockets that are listened on and have no name: whoever has a descriptor of one reaches it, and nobody else.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, Mode, OFlags};

/// Makes one, with a descriptor by which it is connected to ([`path_of`]). `dir` is one that nobody else reaches, and `name` new in it. If
/// this daemon dies in between, a name that ends so is removed by the next one.
pub fn listen(dir: &Path, name: &str) -> Result<(UnixListener, OwnedFd)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty()).with_context(|| format!("open {}", dir.display()))?;
    let name = format!("{name}.new");
    // The path of a socket is a short one.
    let path = path_of(dir.as_raw_fd()).join(&name);
    let listener = UnixListener::bind(&path).with_context(|| format!("make the socket {name}"))?;
    // Who has the descriptor may be another user.
    let opened = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).and_then(|()| {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&dir, &name, flags, Mode::empty())?)
    });
    rustix::fs::unlinkat(&dir, &name, AtFlags::empty()).with_context(|| format!("take its name from {name}"))?;
    Ok((listener, opened.with_context(|| format!("open the socket {name}"))?))
}

/// Where a process finds what its own descriptor stands for.
pub fn path_of(fd: i32) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{fd}"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn one_is_reached_by_its_descriptor_alone() {
        let dir = std::env::temp_dir().join(format!("pagodad-nameless-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (listener, socket) = listen(&dir, "a").unwrap();
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        let mut stream = UnixStream::connect(path_of(socket.as_raw_fd())).unwrap();
        stream.write_all(b"a").unwrap();
        let mut byte = [0];
        listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"a");
        drop(listener);
        assert!(UnixStream::connect(path_of(socket.as_raw_fd())).is_err(), "nobody listens any more");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
