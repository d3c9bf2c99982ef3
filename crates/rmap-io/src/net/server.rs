//! Drives a server by a socket.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use super::port::{Port, Wait};
use rmap::server::{Server, SpaceUse};
use rmap::units::Time;
use rmap::wire::DATAGRAM_MAX;
use rmap::wire::message::Pressure;

/// How often it is looked whether to stop.
const STOP_LOOK: Duration = Duration::from_millis(100);

/// What became of a server's slabs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Nobody has anything here any more: the process may end.
    Everything,
    /// Nothing moved for as long as was waited. Ending now loses what is the only copy.
    Left(Vec<SpaceUse>),
}

/// Serves until `stop` is set.
///
/// # Errors
/// The socket is broken.
pub fn serve(server: &mut Server, port: &mut Port, wait: Wait, stop: &AtomicBool) -> io::Result<()> {
    serve_until(server, port, wait, |_, _| stop.load(Ordering::Relaxed))
}

/// Serves until `look` says so, which is called ten times a second with the time since the start: there the pressure is
/// set, and the load is told to others.
///
/// # Errors
/// The socket is broken.
pub fn serve_until(
    server: &mut Server,
    port: &mut Port,
    wait: Wait,
    mut look: impl FnMut(&mut Server, Time) -> bool,
) -> io::Result<()> {
    let look = |server: &mut Server, now: Time| {
        let ends = look(server, now);
        if !ends {
            server.adjust_memory();
        }
        ends
    };
    serve_since(Instant::now(), server, port, wait, look)
}

/// The same with a thread for each worker but the first, which is served, and looked at, by the calling one. The ports
/// are those of [`Port::bind_workers`].
///
/// # Errors
/// A socket is broken, or there are no threads to be had: nothing is served any more.
///
/// # Panics
/// If a worker panics.
pub fn serve_workers(
    workers: &mut [(Server, Port)],
    wait: Wait,
    mut look: impl FnMut(&mut Server, Time) -> bool,
) -> io::Result<()> {
    let Some(((first, port), others)) = workers.split_first_mut() else { return Ok(()) };
    let (start, stop) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(others.len());
        let begun = others.iter_mut().try_for_each(|(server, port)| {
            let stop = &stop;
            let serve = move || serve_since(start, server, port, wait, |_, _| stop.load(Ordering::Relaxed));
            let name = format!("worker-{}", threads.len() + 1);
            threads.push(std::thread::Builder::new().name(name).spawn_scoped(scope, serve)?);
            Ok(())
        });
        let look = |server: &mut Server, now: Time| {
            // One that ended has failed: its clients are not served any more.
            let ends = threads.iter().any(ScopedJoinHandle::is_finished) || look(server, now);
            if !ends {
                server.adjust_memory();
            }
            ends
        };
        let served = begun.and_then(|()| serve_since(start, first, port, wait, look));
        stop.store(true, Ordering::Relaxed);
        let join = |thread: ScopedJoinHandle<'_, io::Result<()>>| thread.join().expect("no worker panics");
        threads.into_iter().map(join).fold(served, io::Result::and)
    })
}

fn serve_since(
    start: Instant,
    server: &mut Server,
    port: &mut Port,
    wait: Wait,
    mut look: impl FnMut(&mut Server, Time) -> bool,
) -> io::Result<()> {
    let mut out = Vec::with_capacity(2 * DATAGRAM_MAX);
    let (mut active_at, mut look_at) = (start, start);
    loop {
        let at = Instant::now();
        let now = Time((at - start).as_nanos() as u64);
        if at >= look_at {
            if look(server, now) {
                return Ok(());
            }
            look_at = at + STOP_LOOK;
        }
        if port.receive(|from, datagram| server.on_datagram(now, from, datagram))? {
            active_at = at;
            port.send_all(&mut out, |out| server.poll_transmit(out));
        } else if at - active_at < wait.spin {
            // Where cores are few, others wait for this one while nothing comes.
            std::thread::yield_now();
        }
        if server.poll_timeout().is_some_and(|due| due <= now) {
            server.on_timeout(now);
            port.send_all(&mut out, |out| server.poll_transmit(out));
        }
        // Without spinning there is no use in looking before sleeping: the next request takes a round trip.
        if at - active_at >= wait.spin {
            let due = server.poll_timeout().map(|due| start + Duration::from_nanos(due.0));
            port.wait(Some(due.map_or(look_at, |due| due.min(look_at))))?;
            active_at = Instant::now();
        }
    }
}

/// Serves until everything has moved elsewhere, as after SIGTERM. First the owners are asked to move their slabs; when
/// nothing has moved for `patience`, those with another copy in sync to drop this one; when again nothing has moved for
/// as long, what is left is said. `patience` is longer than a slab takes to be copied. `stop` ends it at once.
///
/// # Errors
/// The socket is broken.
pub fn drain(
    server: &mut Server,
    port: &mut Port,
    wait: Wait,
    patience: Duration,
    stop: &AtomicBool,
) -> io::Result<Drained> {
    server.begin_drain();
    let mut held = server.held_slabs();
    let mut moved_at = Time(0);
    serve_until(server, port, wait, |server, now| {
        if server.held_slabs() < held {
            (held, moved_at) = (server.held_slabs(), now);
        }
        let stuck = now.since(moved_at) >= patience;
        if stuck && server.pressure() < Pressure::Red {
            server.set_pressure(Pressure::Red);
            moved_at = now;
            return false;
        }
        held == 0 || stuck || stop.load(Ordering::Relaxed)
    })?;
    // Who is told that it is drained has had its answers: a release is answered before the next look.
    let left: Vec<SpaceUse> = server.spaces().into_iter().filter(|space| space.slabs > 0).collect();
    Ok(if left.is_empty() { Drained::Everything } else { Drained::Left(left) })
}
