//! A state on its way through a socket, whose other end QEMU has.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_core::units::Bytes;
use rustix::event::PollFlags;
use serde_json::json;

use crate::qmp::Monitor;
use crate::qmp::poll::wait_until;

/// The name by which QEMU knows its end.
const NAME: &str = "pagoda-state";
/// Read or written at once: a quarter of what the kernel keeps of a Unix socket.
const PIECE: usize = 64 << 10;

/// What QEMU calls its end in an address.
pub fn uri() -> String {
    format!("fd:{NAME}")
}

/// Gives QEMU one end of a new pair.
pub fn give_end(monitor: &Monitor) -> Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair().context("make a pair of sockets")?;
    ours.set_nonblocking(true).context("make a pair of sockets")?;
    monitor.execute_with_fd("getfd", json!({ "fdname": NAME }), theirs.as_fd())?;
    Ok(ours)
}

/// Takes QEMU's end back, if it has not been used.
pub fn take_end_back(monitor: &Monitor) {
    // A name that QEMU does not know is an error, and most often it does not.
    let _ = monitor.execute_with("closefd", json!({ "fdname": NAME }));
}

/// Reads until QEMU closes its end.
pub fn read_all(stream: &UnixStream, max: Bytes, deadline: Instant) -> Result<Vec<u8>> {
    let (mut all, mut piece) = (Vec::new(), vec![0; PIECE]);
    loop {
        wait_until(stream, PollFlags::IN, deadline)?;
        match (&*stream).read(&mut piece) {
            Ok(0) => return Ok(all),
            Ok(count) => {
                ensure!((all.len() + count) as u64 <= max.0, "it is longer than {max}");
                all.extend_from_slice(&piece[..count]);
            }
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes all of a state, and its end.
pub fn write_all(stream: &UnixStream, state: &mut dyn Read, max: Bytes, deadline: Instant) -> Result<()> {
    let (mut sent, mut piece) = (0, vec![0; PIECE]);
    loop {
        let count = match state.read(&mut piece) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            count => count.context("read the state")?,
        };
        if count == 0 {
            return stream.shutdown(Shutdown::Write).context("end the state");
        }
        sent += count as u64;
        ensure!(sent <= max.0, "it is longer than {max}");
        let mut rest = &piece[..count];
        while !rest.is_empty() {
            wait_until(stream, PollFlags::OUT, deadline)?;
            match (&*stream).write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
