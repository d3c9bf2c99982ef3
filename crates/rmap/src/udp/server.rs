//! A server on a socket.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::port::{Port, Wait};
use crate::server::Server;
use crate::units::Time;
use crate::wire::DATAGRAM_MAX;

/// How often it is looked whether to stop.
const STOP_LOOK: Duration = Duration::from_millis(100);

/// Serves until `stop` is set.
///
/// # Errors
/// The socket is broken.
pub fn serve(server: &mut Server, port: &mut Port, wait: Wait, stop: &AtomicBool) -> io::Result<()> {
    serve_and(server, port, wait, stop, |_| {})
}

/// As [`serve`]; does something else with the server ten times a second.
///
/// # Errors
/// The socket is broken.
pub fn serve_and(
    server: &mut Server,
    port: &mut Port,
    wait: Wait,
    stop: &AtomicBool,
    mut also: impl FnMut(&mut Server),
) -> io::Result<()> {
    let mut also_at = Instant::now();
    let start = Instant::now();
    let mut out = Vec::with_capacity(2 * DATAGRAM_MAX);
    let mut active_at = start;
    while !stop.load(Ordering::Relaxed) {
        let at = Instant::now();
        if at >= also_at {
            also(server);
            also_at = at + STOP_LOOK;
        }
        let now = Time((at - start).as_nanos() as u64);
        if port.receive(|from, datagram| server.on_datagram(now, from, datagram))? {
            active_at = at;
            port.send_all(&mut out, |out| server.poll_transmit(out));
        }
        // Without spinning there is no use in looking before sleeping: the next request takes a round trip.
        if at - active_at >= wait.spin {
            port.wait(Some(at + STOP_LOOK))?;
            active_at = Instant::now();
        }
    }
    Ok(())
}
