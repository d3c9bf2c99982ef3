//! TCP is asked what it knows of a connection: how much of what was sent is not acknowledged yet.

use std::os::fd::{AsFd, AsRawFd};

use crate::{Errno, errno};

/// `SIOCOUTQ` of linux/sockios.h (tcp(7)): bytes in the send queue that the peer has not acknowledged.
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// Bytes that were written to a TCP socket and that its peer has not acknowledged. The end of the stream counts as one.
///
/// # Errors
/// It is no TCP socket.
pub fn unacknowledged(socket: impl AsFd) -> Result<u64, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is borrowed and so open; SIOCOUTQ writes one int, for which the pointer is valid.
    let done = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCOUTQ, &raw mut bytes) };
    if done < 0 {
        return Err(errno());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_a_peer_has_not_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        sender.set_nonblocking(true).unwrap();
        // Until both buffers are full: what the receiver's kernel has no room for stays unacknowledged.
        let (mut written, deadline) = (0, Instant::now() + Duration::from_secs(10));
        while let Ok(bytes) = sender.write(&[7; 65536]) {
            written += bytes;
        }
        assert!(unacknowledged(&sender).unwrap() > 0);
        let mut taken = vec![0; written];
        receiver.read_exact(&mut taken).unwrap();
        while unacknowledged(&sender).unwrap() > 0 {
            assert!(Instant::now() < deadline, "the kernel acknowledges what was read");
            std::thread::yield_now();
        }
        assert!(unacknowledged(std::io::pipe().unwrap().0).is_err());
    }
}
