//! The stream of a disk that is copied: behind its first record, each record is a piece of what the two QEMUs say to each other, which is
//! NBD. Nobody here looks at it: each QEMU bounds what the other one says.
//!
//! | bytes of the first record | |
//! |---|---|
//! | 0 | 7 |
//! | 1..9 | attempt |
//! | 9..11 | number of the disk in the specification |

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use pagoda_link::{Cutter, Link, LinkError, RECORD_MAX, Receiver, Sender};
use pagoda_move::units::AttemptId;

/// How long a wait for a stream that brings nothing lasts at a time.
const IDLE: Duration = Duration::from_secs(3600);

/// The attempt and the disk that a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskOf {
    pub attempt: AttemptId,
    pub disk: u16,
}

impl DiskOf {
    pub fn encode(self) -> [u8; 10] {
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&self.attempt.0.to_le_bytes());
        bytes[8..].copy_from_slice(&self.disk.to_le_bytes());
        bytes
    }

    /// None: no version writes it.
    pub fn decode(bytes: &[u8]) -> Option<DiskOf> {
        let bytes: [u8; 10] = bytes.try_into().ok()?;
        let (attempt, disk) = bytes.split_at(8);
        let attempt = u64::from_le_bytes(attempt.try_into().ok()?);
        let disk = u16::from_le_bytes(disk.try_into().ok()?);
        (attempt != 0).then_some(DiskOf { attempt: AttemptId(attempt), disk })
    }
}

/// A stream that is being carried. When this is dropped, it ends at both ends, and QEMU's socket is closed by all who have it here: a QEMU
/// that waits for room in it would not be woken by less.
#[derive(Debug)]
pub struct Carried {
    link: Cutter,
    qemu: UnixStream,
}

impl Carried {
    /// Carries bytes between QEMU and the other host until one of them ends: by a thread of its own in one direction.
    ///
    /// # Errors
    /// The stream has ended already; no thread can be had.
    pub fn begin(link: Link, qemu: UnixStream) -> Result<Carried, LinkError> {
        let (cutter, ends) = (link.cutter()?, [qemu.try_clone()?, qemu.try_clone()?]);
        let carried = Carried { link: cutter, qemu };
        let [to, from] = ends;
        let Link { sender, receiver, .. } = link;
        thread::Builder::new().name("disk-in".into()).spawn(move || bring(receiver, &to))?;
        thread::Builder::new().name("disk-out".into()).spawn(move || send(sender, &from))?;
        Ok(carried)
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        self.link.cut();
        let _ = self.qemu.shutdown(Shutdown::Both);
    }
}

/// Carries bytes in both directions until one of them ends, on this thread and another one.
///
/// # Errors
/// The stream has ended already; no thread can be had.
pub fn carry(link: Link, qemu: &UnixStream) -> Result<(), LinkError> {
    let (to, Link { sender, receiver, .. }) = (qemu.try_clone()?, link);
    thread::Builder::new().name("disk-in".into()).spawn(move || bring(receiver, &to))?;
    send(sender, qemu);
    Ok(())
}

/// Gives QEMU what the stream brings. What has ended is heard of at the other end of each.
fn bring(mut receiver: Receiver, mut qemu: &UnixStream) {
    let mut bring = || -> Result<(), LinkError> {
        loop {
            while !receiver.wait(IDLE)? {}
            qemu.write_all(receiver.receive()?)?;
        }
    };
    if let Err(error) = bring() {
        tracing::debug!("the stream of a disk has ended: {error}");
    }
    let _ = qemu.shutdown(Shutdown::Both);
}

/// Gives the stream what QEMU says, until one of the two ends.
fn send(mut sender: Sender, mut qemu: &UnixStream) {
    let mut piece = vec![0; RECORD_MAX];
    loop {
        let sent = match qemu.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => sender.send(&[&piece[..count]]),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        if sent.is_err() {
            break;
        }
    }
    sender.cut();
    let _ = qemu.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_record() {
        let of = DiskOf { attempt: AttemptId(0x0102_0304_0506_0708), disk: 0x0a09 };
        assert_eq!(of.encode(), [8, 7, 6, 5, 4, 3, 2, 1, 9, 10]);
        assert_eq!(DiskOf::decode(&of.encode()), Some(of));
        for wrong in [&[0; 10][..], &[1; 9], &[1; 11], &[]] {
            assert_eq!(DiskOf::decode(wrong), None, "{wrong:?}");
        }
    }
}
