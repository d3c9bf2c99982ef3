//! `pagoda doctor pool`: can this machine use the servers of its pool, and how fast do they answer?
//!
//! Everything but reaching the servers is judged from facts, without I/O, as in `checks`.

use pagoda_api::in_full;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_pool::config::{LinkMbit, PoolConfig, Transport};
use pagoda_pool::{connect, store};
use rmap::client::{Reach, ServerInfo, ServerView};
use rmap::wire::DATAGRAM_MIN_MAX;
use rmap::wire::message::Pressure;
use rmap_io::host::{self, OVERHEAD_BYTES};
use rmap_io::net::{Port, SOCKET_BUFFER, Wait};

use super::announcements;
use super::checks::{Check, Verdict};
use crate::exit;
use crate::pool::list::{medium, pressure};
use crate::units::format_size;
use pagoda_cli::options::PoolDir;
use pagoda_pool::slab::SLAB_CONTENT_BYTES;

/// A server that has not answered by then is shown as silent.
const PATIENCE: Duration = Duration::from_secs(3);
/// Questions to each server, one after another, whose answers are timed.
const PROBES: usize = 100;
/// With the first that had no answer by then a server's questions end: a late answer would count for the next one.
const PROBE_PATIENCE: Duration = Duration::from_secs(1);

/// What there is to judge about the host.
#[derive(Debug, Default)]
struct Facts {
    rmem_max: Option<u64>,
    wmem_max: Option<u64>,
    /// What timedatectl says of the clock.
    synchronized: Option<bool>,
    /// Datagrams that the kernel takes in one call, and hands over in one buffer.
    batches: Option<(usize, usize)>,
    /// Bytes that may be locked, if that is limited.
    lock_limit: Option<u64>,
    /// Of the fastest network card that says how fast it is, Mbit/s.
    fastest_mbit: Option<u64>,
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
        let port = Port::bind((Ipv4Addr::LOCALHOST, 0).into()).ok();
        let batches = port.and_then(|port| port.batches());
        let lock_limit = host::lock_limit();
        let (rmem_max, wmem_max) = (limit("rmem_max"), limit("wmem_max"));
        Facts { rmem_max, wmem_max, synchronized, batches, lock_limit, fastest_mbit: fastest_mbit() }
    }

    /// Of one page's datagrams in a call each.
    fn offloads(&self) -> Vec<Check> {
        const ADVICE: &str = "each datagram is a call of its own, and a page three of them: Linux 5.0 and later can join \
                              them; see that nothing filters setsockopt (containers, seccomp)";
        let (gso, gro) = self.batches.unwrap_or((1, 1));
        let judge = |name, found: &str, count: usize| match count {
            0 | 1 => Check::new(Verdict::Warn, name, format!("{found} one datagram"), ADVICE),
            _ => Check::ok(name, format!("{found} {count} datagrams")),
        };
        vec![
            judge("UDP GSO", "the kernel takes at a time", gso),
            judge("UDP GRO", "the kernel hands over at a time", gro),
        ]
    }

    /// `disk export` and `pool serve` keep all that they have in memory.
    fn locks(&self) -> Check {
        const NAME: &str = "locked memory";
        match self.lock_limit {
            None => Check::ok(NAME, "no limit"),
            Some(limit) if limit >= OVERHEAD_BYTES => Check::ok(NAME, format!("up to {}", format_size(limit))),
            Some(limit) => Check::new(
                Verdict::Warn,
                NAME,
                format!("up to {}", format_size(limit)),
                "servers refuse to lend, and exporters' memory can be swapped, so that no host may swap to their disks: raise \
                 it (systemd: LimitMEMLOCK=infinity; shell: ulimit -l unlimited), or give CAP_IPC_LOCK",
            ),
        }
    }

    fn buffers(&self) -> Vec<Check> {
        vec![
            buffers("receive buffers", "net.core.rmem_max", self.rmem_max),
            buffers("send buffers", "net.core.wmem_max", self.wmem_max),
        ]
    }

    /// Copies that are made anew are paced by what the network is said to carry.
    fn link(&self, link: LinkMbit) -> Check {
        const NAME: &str = "link";
        let used = format!("copies are paced for {} Mbit/s", link.mbit());
        match self.fastest_mbit {
            Some(fastest) if fastest < link.mbit() => {
                let advice = format!("they would leave nothing to demand: `link_mbit = {fastest}` in pool.toml");
                Check::new(Verdict::Warn, NAME, format!("{used}, the fastest card has {fastest}"), advice)
            }
            Some(fastest) => Check::ok(NAME, format!("{used}, the fastest card has {fastest}")),
            None => Check::ok(NAME, format!("{used}; no card says how fast it is")),
        }
    }

    fn clock(&self) -> Check {
        let found = match self.synchronized {
            Some(true) => return Check::ok("clock", "synchronised"),
            Some(false) => "not synchronised",
            None => "not known: timedatectl does not say",
        };
        let advice = "announcements of servers are believed within 60 s of this clock only, and etcd's certificates have \
                      dates: see that chrony or systemd-timesyncd runs";
        Check::new(Verdict::Warn, "clock", found, advice)
    }
}

/// sysfs(5), `class/net/*/speed`: -1, or an error, where that is not known. What has no device, as tunnels and bridges, says
/// some number.
fn fastest_mbit() -> Option<u64> {
    let cards = std::fs::read_dir("/sys/class/net").ok()?.flatten().map(|entry| entry.path());
    let cards = cards.filter(|card| card.join("device").exists());
    cards.filter_map(|card| std::fs::read_to_string(card.join("speed")).ok()?.trim().parse().ok()).max()
}

fn buffers(name: &'static str, setting: &str, limit: Option<u64>) -> Check {
    match limit {
        Some(limit) if limit < SOCKET_BUFFER as u64 => Check::new(
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
    /// Of the answers until one did not come, in order of length.
    trips: Vec<Duration>,
}

impl Found {
    fn check(&self, transport: Transport) -> Check {
        const NAME: &str = "server";
        let server = format!("{} at {}", self.info.id.0, self.info.addr);
        if self.view.reach != Reach::Up {
            let way = match transport {
                Transport::Udp => "is UDP let through to that address?",
                Transport::Tcp => "was it started with --tcp, and is TCP let through to that address?",
            };
            let advice = format!(
                "does `pagoda pool serve` run there; {way} Has it the same pool.key, and does it admit this machine \
                 (`pagoda pool key add` there, with the key of `pagoda pool key ls` here)?"
            );
            return Check::new(Verdict::Fail, NAME, format!("{server} does not answer"), advice);
        }
        if self.trips.is_empty() {
            let found = format!("{server} is there, and says nothing");
            return Check::new(Verdict::Fail, NAME, found, "restart it; look at the load of both machines");
        }
        let found = format!(
            "{server} answers in {} us, p50 {}, p99 {}; datagrams of {} bytes; lends {} more of its {}; pressure {}",
            self.trip_us(0),
            self.trip_us(50),
            self.trip_us(99),
            self.view.datagram,
            format_size(u64::from(self.view.free_slabs) * SLAB_CONTENT_BYTES),
            medium(&self.view),
            pressure(self.view.pressure)
        );
        let advice = if self.trips.len() < PROBES {
            format!(
                "after {} answers one did not come within {PROBE_PATIENCE:?}: look at the network, and at the load of both \
                 machines",
                self.trips.len()
            )
        } else if self.view.datagram <= DATAGRAM_MIN_MAX {
            "only the smallest datagrams get through: the path's MTU is below 1450, or something on it drops what is \
             larger; a page takes four of them instead of three"
                .to_owned()
        } else if self.view.pressure != Pressure::None {
            "its host is short of memory: it lends nothing more, and may want its pages moved".to_owned()
        } else {
            return Check::ok(NAME, found);
        };
        Check::new(Verdict::Warn, NAME, found, advice)
    }

    /// By nearest rank; the least for 0.
    fn trip_us(&self, percent: usize) -> u128 {
        let rank = (self.trips.len() * percent).div_ceil(100).max(1);
        self.trips.get(rank - 1).map_or(0, Duration::as_micros)
    }
}

pub fn check_all(pool_dir: &PoolDir) -> Vec<Check> {
    let facts = Facts::gather();
    let mut checks = vec![facts.clock(), facts.locks()];
    if let Err(error) = pool(pool_dir, &facts, &mut checks) {
        let advice = "`pagoda pool key init` makes keys, and the file `servers` has the lines that `pagoda pool serve` \
                      prints: docs/disks.md";
        checks.push(Check::new(Verdict::Fail, "pool", in_full(error.as_ref()), advice));
    }
    checks
}

fn pool(pool_dir: &PoolDir, facts: &Facts, checks: &mut Vec<Check>) -> Result<()> {
    let pool = pool_dir.read()?;
    store::identity(&pool.dir)?;
    checks.push(Check::ok("keys", format!("in {}", pool.dir.display())));
    checks.push(facts.link(pool.link));
    if pool.transport == Transport::Udp {
        checks.extend(facts.offloads());
        checks.extend(facts.buffers());
    }
    let servers = match pool.servers() {
        Err(error) if exit::is_unreachable(&error) => {
            let advice = "nothing can be placed anew or taken over until it is back; servers of the file `servers` are \
                          tried all the same";
            checks.push(Check::new(Verdict::Fail, "etcd", in_full(error.as_ref()), advice));
            store::servers(&pool.dir)?
        }
        servers => {
            let servers = servers?;
            if pool.etcd.is_some() {
                checks.push(Check::ok("etcd", "answers"));
            }
            servers
        }
    };
    checks.extend(announcements::check(&pool, &servers)?);
    checks.extend(look(&pool, &servers)?.iter().map(|found| found.check(pool.transport)));
    Ok(())
}

fn look(pool: &PoolConfig, servers: &[ServerInfo]) -> Result<Vec<Found>> {
    let mut client = connect::client(pool, servers, connect::no_control(), Wait::BLOCK, connect::UNHURRIED)?;
    connect::converse(&mut client, PATIENCE, |client| connect::all_up(client))?;
    let mut trips: Vec<Vec<Duration>> = vec![Vec::with_capacity(PROBES); servers.len()];
    let mut asked: Vec<bool> = client.client.reach().map(|(_, reach)| reach == Reach::Up).collect();
    for probe in 1..=PROBES {
        client.client.ask_reports();
        let began = Instant::now();
        connect::converse(&mut client, PROBE_PATIENCE, |client| {
            for (at, view) in client.client.servers().enumerate() {
                if asked[at] && view.report.is_some() && trips[at].len() < probe {
                    trips[at].push(began.elapsed());
                }
            }
            asked.iter().zip(&trips).all(|(asked, trips)| !asked || trips.len() == probe)
        })
        .context("ask the servers")?;
        asked.iter_mut().zip(&trips).for_each(|(asked, trips)| *asked &= trips.len() == probe);
    }
    trips.iter_mut().for_each(|trips| trips.sort_unstable());
    let views = client.client.servers();
    let found = servers.iter().cloned().zip(views).zip(trips);
    Ok(found.map(|((info, view), trips)| Found { info, view, trips }).collect())
}

#[cfg(test)]
mod tests {
    use rmap::crypto::PublicKey;
    use rmap::units::ServerId;
    use rmap::wire::DATAGRAM_SIZES;

    use super::*;

    const LARGEST: usize = DATAGRAM_SIZES[DATAGRAM_SIZES.len() - 1];

    fn found(answers: usize) -> Found {
        let info = ServerInfo {
            id: ServerId(3),
            addr: "10.0.0.5:7070".parse().unwrap(),
            key: PublicKey([1; 32]),
            zone: 0,
            announcer: None,
        };
        let view = ServerView {
            id: info.id,
            reach: Reach::Up,
            round_trip: Duration::ZERO,
            free_slabs: 2,
            pressure: Pressure::None,
            overflow_disk: false,
            datagram: LARGEST,
            report: None,
            drain: None,
        };
        Found { info, view, trips: (1..=answers as u64).map(Duration::from_micros).collect() }
    }

    #[test]
    fn servers_are_judged_by_what_they_say() {
        let good = "3 at 10.0.0.5:7070 answers in 1 us, p50 50, p99 99; datagrams of 4192 bytes; lends 128M more of its memory; pressure none";
        assert_eq!(found(PROBES).check(Transport::Udp), Check::ok("server", good));
        assert_eq!([1, 2, 3].map(|answers| found(answers).trip_us(99)), [1, 2, 3]);
        let short = found(98).check(Transport::Udp);
        assert!(short.verdict == Verdict::Warn && short.advice.starts_with("after 98 answers"), "{short:?}");
        let mute = found(0).check(Transport::Udp);
        assert!(mute.verdict == Verdict::Fail && mute.found.ends_with("says nothing"), "{mute:?}");
    }

    #[test]
    fn each_complaint_says_what_to_look_at() {
        let with = |change: fn(&mut ServerView), transport| {
            let mut found = found(PROBES);
            change(&mut found.view);
            found.check(transport)
        };
        let silent = |view: &mut ServerView| view.reach = Reach::Connecting { since: rmap::units::Time(0) };
        let udp = with(silent, Transport::Udp);
        assert!(udp.verdict == Verdict::Fail && udp.advice.contains("is UDP let through"), "{udp:?}");
        assert!(with(silent, Transport::Tcp).advice.contains("--tcp"));
        let narrow = with(|view| view.datagram = DATAGRAM_MIN_MAX, Transport::Udp);
        assert!(narrow.verdict == Verdict::Warn && narrow.advice.contains("MTU"), "{narrow:?}");
        let pressed = with(|view| view.pressure = Pressure::Orange, Transport::Udp);
        assert!(pressed.verdict == Verdict::Warn && pressed.found.ends_with("pressure orange"), "{pressed:?}");
    }

    #[test]
    fn the_host_is_judged_by_what_it_allows() {
        let good = Facts {
            rmem_max: Some(SOCKET_BUFFER as u64),
            wmem_max: None,
            synchronized: Some(true),
            batches: Some((64, 64)),
            lock_limit: None,
            fastest_mbit: Some(10_000),
        };
        let bad = Facts {
            rmem_max: Some(212_992),
            wmem_max: Some(212_992),
            synchronized: Some(false),
            batches: Some((1, 1)),
            lock_limit: Some(8 << 20),
            fastest_mbit: Some(1000),
        };
        for (facts, verdict) in [(good, Verdict::Ok), (bad, Verdict::Warn)] {
            let all = [
                facts.buffers(),
                facts.offloads(),
                vec![facts.clock(), facts.locks(), facts.link(LinkMbit::default())],
            ]
            .concat();
            assert!(all.iter().all(|check| check.verdict == verdict), "{all:?}");
        }
        assert_eq!(Facts { lock_limit: Some(1 << 30), ..Facts::default() }.locks().verdict, Verdict::Ok);
        assert_eq!(Facts::default().clock().verdict, Verdict::Warn, "what is not known is not well");
    }
}
