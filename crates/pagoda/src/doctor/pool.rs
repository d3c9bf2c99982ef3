//! `pagoda doctor pool`: can this machine use the servers of its pool, and how fast do they answer?
//!
//! Everything but reaching the servers is judged from facts, without I/O, as in `checks`.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_pool::config::Transport;
use pagoda_pool::{connect, store};
use rmap::client::{Reach, ServerInfo, ServerView};
use rmap::udp::{UdpClient, Wait};
use rmap::wire::DATAGRAM_MIN_MAX;
use rmap::wire::message::Pressure;

use super::checks::{Check, Verdict};
use crate::pool::Place;

/// What the pool's sockets ask for (`Port`).
const SOCKET_BUFFER: u64 = 4 << 20;
/// A server that has not answered by then is shown as silent.
const PATIENCE: Duration = Duration::from_secs(3);
/// Questions to each server, whose answers are timed.
const PROBES: usize = 100;
/// A lost one is given up after this long.
const PROBE_PATIENCE: Duration = Duration::from_millis(100);

/// What there is to judge about the host.
#[derive(Debug, Default)]
struct Facts {
    rmem_max: Option<u64>,
    wmem_max: Option<u64>,
    /// What timedatectl says of the clock.
    synchronized: Option<bool>,
}

impl Facts {
    fn gather() -> Facts {
        let limit =
            |name: &str| std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok();
        let said = Command::new("timedatectl").args(["show", "--property=NTPSynchronized", "--value"]).output();
        let synchronized = said.ok().and_then(|said| match said.stdout.trim_ascii() {
            b"yes" => Some(true),
            b"no" => Some(false),
            _ => None,
        });
        Facts { rmem_max: limit("rmem_max"), wmem_max: limit("wmem_max"), synchronized }
    }

    fn checks(&self) -> Vec<Check> {
        vec![
            buffers("receive buffers", "net.core.rmem_max", self.rmem_max),
            buffers("send buffers", "net.core.wmem_max", self.wmem_max),
            self.clock(),
        ]
    }

    fn clock(&self) -> Check {
        match self.synchronized {
            Some(true) => Check::ok("clock", "synchronised"),
            Some(false) => Check::new(
                Verdict::Warn,
                "clock",
                "not synchronised",
                "announcements of servers are believed within 60 s of this clock only, and etcd's certificates have dates: \
                 run chrony or systemd-timesyncd",
            ),
            None => Check::ok("clock", "not known: timedatectl does not say"),
        }
    }
}

fn buffers(name: &'static str, setting: &str, limit: Option<u64>) -> Check {
    match limit {
        Some(limit) if limit < SOCKET_BUFFER => Check::new(
            Verdict::Warn,
            name,
            format!("{setting} is {limit}"),
            format!("bursts of pages get lost and are sent again: sysctl -w {setting}={SOCKET_BUFFER}"),
        ),
        Some(limit) => Check::ok(name, format!("{setting} is {limit}")),
        None => Check::ok(name, format!("{setting} is not to be had here")),
    }
}

/// A server, as it was found.
#[derive(Debug)]
struct Found {
    info: ServerInfo,
    view: ServerView,
    /// Of answers that came, in order of length.
    trips: Vec<Duration>,
}

impl Found {
    fn check(&self, transport: Transport) -> Check {
        const NAME: &str = "server";
        let place = format!("{} at {}", self.info.id.0, self.info.addr);
        if self.view.reach != Reach::Up {
            let way = match transport {
                Transport::Udp => "is UDP let through to that address?",
                Transport::Tcp => "was it started with --tcp, and is TCP let through to that address?",
            };
            let advice = format!(
                "does `pagoda pool serve` run there; {way} Has it the same pool.key, and does it admit this machine \
                 (`pagoda pool key add` there, with the key of `pagoda pool key ls` here)?"
            );
            return Check::new(Verdict::Fail, NAME, format!("{place} does not answer"), advice);
        }
        let us = |part: usize| self.trips.get((self.trips.len() * part / 100).min(self.trips.len().saturating_sub(1)));
        let us = |part| us(part).map_or(0, Duration::as_micros);
        let lost = PROBES - self.trips.len();
        let found = format!(
            "{place} answers in {} us, p50 {}, p99 {}; datagrams of {} bytes",
            us(0),
            us(50),
            us(99),
            self.view.datagram
        );
        if lost > 0 {
            let advice = format!(
                "{lost} of {PROBES} questions had no answer within {} ms: look at the network, and at the load of both \
                 machines",
                PROBE_PATIENCE.as_millis()
            );
            return Check::new(Verdict::Warn, NAME, found, advice);
        }
        if self.view.datagram <= DATAGRAM_MIN_MAX {
            let advice = "only the smallest datagrams get through: the path's MTU is below 1450, or something on it drops \
                          what is larger; a page takes four of them instead of three";
            return Check::new(Verdict::Warn, NAME, found, advice);
        }
        if self.view.pressure != Pressure::None {
            let advice = "its host is short of memory: it lends nothing more, and may want its pages moved";
            return Check::new(Verdict::Warn, NAME, format!("{found}; pressure"), advice);
        }
        Check::ok(NAME, found)
    }
}

pub fn check_all(place: &Place) -> Vec<Check> {
    let mut checks = Facts::gather().checks();
    match pool(place, &mut checks) {
        Ok(()) => {}
        Err(error) => checks.push(Check::new(
            Verdict::Fail,
            "pool",
            format!("{error:#}"),
            "`pagoda pool key init` makes keys, the file `servers` has the lines that `pagoda pool serve` prints: \
             docs/disks.md",
        )),
    }
    checks
}

fn pool(place: &Place, checks: &mut Vec<Check>) -> Result<()> {
    let pool = place.read()?;
    let dir: &Path = &pool.dir;
    store::identity(dir)?;
    checks.push(Check::ok("keys", format!("in {}", dir.display())));
    let transport = Transport::read(dir)?;
    let servers = pool.servers()?;
    let source = if pool.etcd.is_some() { "etcd answers" } else { "no etcd" };
    checks.push(Check::ok("servers", format!("{} listed; {source}; {transport:?}", servers.len())));
    checks.extend(look(dir, &servers)?.iter().map(|found| found.check(transport)));
    Ok(())
}

fn look(dir: &Path, servers: &[ServerInfo]) -> Result<Vec<Found>> {
    let mut client = connect::client(dir, servers, connect::no_control(), Wait::BLOCK, connect::UNHURRIED)?;
    connect::converse(&mut client, PATIENCE, |client| connect::all_up(client))?;
    let mut trips: Vec<Vec<Duration>> = vec![Vec::with_capacity(PROBES); servers.len()];
    for _ in 0..PROBES {
        client.client.ask_reports();
        let (asked, mut answered) = (Instant::now(), vec![false; servers.len()]);
        connect::converse(&mut client, PROBE_PATIENCE, |client| {
            note(client, asked, &mut answered, &mut trips);
            let up = client.client.reach().map(|(_, reach)| reach == Reach::Up);
            up.zip(&answered).all(|(up, answered)| !up || *answered)
        })
        .context("ask the servers")?;
    }
    trips.iter_mut().for_each(|trips| trips.sort_unstable());
    let views = client.client.servers();
    let found = servers.iter().cloned().zip(views).zip(trips);
    Ok(found.map(|((info, view), trips)| Found { info, view, trips }).collect())
}

/// How long those took who have answered since the last look.
fn note<C>(client: &UdpClient<C>, asked: Instant, answered: &mut [bool], trips: &mut [Vec<Duration>]) {
    for (at, view) in client.client.servers().enumerate() {
        if view.report.is_some() && !std::mem::replace(&mut answered[at], true) {
            trips[at].push(asked.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use rmap::crypto::PublicKey;
    use rmap::units::ServerId;
    use rmap::wire::DATAGRAM_SIZES;

    use super::*;

    fn found(reach: Reach, datagram: usize, answers: u64) -> Check {
        let info =
            ServerInfo { id: ServerId(3), addr: "10.0.0.5:7070".parse().unwrap(), key: PublicKey([1; 32]), zone: 0 };
        let view = ServerView {
            id: info.id,
            reach,
            round_trip: Duration::ZERO,
            free_slabs: 1,
            pressure: Pressure::None,
            datagram,
            report: None,
            drain: None,
        };
        let trips = (1..=answers).map(Duration::from_micros).collect();
        Found { info, view, trips }.check(Transport::Udp)
    }

    #[test]
    fn servers_are_judged_by_what_they_say() {
        let largest = DATAGRAM_SIZES[DATAGRAM_SIZES.len() - 1];
        let good = found(Reach::Up, largest, PROBES as u64);
        assert_eq!(
            good,
            Check::ok("server", "3 at 10.0.0.5:7070 answers in 1 us, p50 51, p99 100; datagrams of 4192 bytes")
        );
        assert_eq!(found(Reach::Up, DATAGRAM_MIN_MAX, PROBES as u64).verdict, Verdict::Warn);
        let lossy = found(Reach::Up, largest, PROBES as u64 - 2);
        assert!(lossy.verdict == Verdict::Warn && lossy.advice.starts_with("2 of 100"), "{lossy:?}");
        assert_eq!(found(Reach::Up, largest, 0).verdict, Verdict::Warn);
        assert_eq!(found(Reach::Connecting { since: rmap::units::Time(0) }, 0, 0).verdict, Verdict::Fail);
    }

    #[test]
    fn the_host_is_judged_by_what_it_allows() {
        let verdicts = |facts: Facts| facts.checks().iter().map(|check| check.verdict).collect::<Vec<_>>();
        let good = Facts { rmem_max: Some(SOCKET_BUFFER), wmem_max: None, synchronized: Some(true) };
        assert_eq!(verdicts(good), [Verdict::Ok; 3]);
        let small = Facts { rmem_max: Some(212_992), wmem_max: Some(212_992), synchronized: Some(false) };
        assert_eq!(verdicts(small), [Verdict::Warn; 3]);
    }
}
