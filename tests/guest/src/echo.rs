//! What a datagram to another machine and the bytes of a page back take from here, with nothing else done: the least that a
//! page of a pool can take.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::report::Report;

/// A request for a page, as the pool's protocol has it.
const REQUEST_BYTES: usize = 80;
/// Larger than any datagram that comes back.
const DATAGRAM_MAX: usize = 9000;
/// One that takes longer is lost.
const LOST: Duration = Duration::from_secs(2);
/// On a network that loses more there is nothing to measure.
const LOST_PERCENT_MAX: usize = 10;

/// Asks `server` so many times, one at a time; an answer is so many bytes, in any number of datagrams.
pub fn measure(server: &str, count: usize, bytes: usize, report: &Report) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("bind a socket")?;
    socket.connect(server).with_context(|| format!("reach {server}"))?;
    socket.set_read_timeout(Some(LOST)).context("set a timeout")?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        socket.send(&[0; REQUEST_BYTES]).context("send a request")?;
        if answered(&socket, bytes)? {
            times.push(start.elapsed());
        }
    }
    times.sort_unstable();
    let lost = count - times.len();
    ensure!(
        !times.is_empty() && lost * 100 <= count * LOST_PERCENT_MAX,
        "{lost} of {count} echoes of {server} were lost"
    );
    let ns = times[times.len() / 2].as_nanos();
    report.line(format_args!("done phase=echo ops={count} lost={lost} p50_ns={ns} bad=0"));
    Ok(())
}

/// Whether all of an answer came. Of one that was late the rest is taken for the next: that one then seems to take less, which the
/// median does not show while few are lost.
fn answered(socket: &UdpSocket, bytes: usize) -> Result<bool> {
    let mut datagram = [0; DATAGRAM_MAX];
    let mut came = 0;
    while came < bytes {
        match socket.recv(&mut datagram) {
            Ok(bytes) => came += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => bail!("receive an echo: {error}"),
        }
    }
    Ok(true)
}
