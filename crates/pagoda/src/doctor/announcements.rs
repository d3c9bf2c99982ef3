//! Whether announcements of a pool's servers are heard on this machine.

use pagoda_api::in_full;
use std::time::{Duration, Instant};

use anyhow::Result;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect;
use pagoda_pool::news::{self, Ears, stamp_ms};
use rmap::announce::{ANNOUNCE_EVERY, Ignored};
use rmap::client::ServerInfo;
use rmap::units::ServerId;

use super::checks::{Check, Verdict};

const NAME: &str = "announcements";
/// One that may just have been missed, the next, and some to spare.
const LISTEN_FOR: Duration = ANNOUNCE_EVERY.saturating_mul(3);

/// `None` where no server announces itself.
///
/// # Errors
/// Keys are missing.
pub fn check(pool: &PoolConfig, servers: &[ServerInfo]) -> Result<Option<Check>> {
    let mut silent: Vec<ServerId> =
        servers.iter().filter(|server| server.announcer.is_some()).map(|server| server.id).collect();
    let ears = match news::listen_for(pool, servers)? {
        None => return Ok(None),
        Some(Err(error)) => {
            let advice = "`announcements_on` in pool.toml is the address of the network card that servers are behind";
            return Ok(Some(Check::new(Verdict::Warn, NAME, in_full(error.as_ref()), advice)));
        }
        Some(Ok(ears)) => ears,
    };
    let all = silent.len();
    let is_late = listen(ears, &mut silent);
    Ok(Some(judge(pool, all, &silent, is_late)))
}

/// Strikes those that are heard. Whether words came that were signed at another time than this clock's.
fn listen(ears: Ears, silent: &mut Vec<ServerId>) -> bool {
    let Ears { listener, mut listening } = ears;
    let (until, mut is_late) = (Instant::now() + LISTEN_FOR, false);
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|_| !silent.is_empty()) {
        let heard = listener.wait(left).and_then(|()| {
            listener.receive(|datagram| match listening.take(stamp_ms(), datagram) {
                Ok(said) => silent.retain(|id| *id != said.server),
                Err(Ignored::Late) => is_late = true,
                Err(_) => {}
            })
        });
        if heard.is_err() {
            break;
        }
    }
    is_late
}

fn judge(pool: &PoolConfig, all: usize, silent: &[ServerId], is_late: bool) -> Check {
    let at = pool.announcements.at;
    if silent.is_empty() {
        return Check::ok(NAME, format!("heard at {at}, of {all} servers"));
    }
    let found = format!("not heard at {at}: servers {}", connect::list(silent));
    let advice = if is_late {
        "some came with another time: set the clocks of all machines (chrony, systemd-timesyncd)"
    } else {
        "a server that moves is not found: does it run with --announce; is multicast let through to this machine (a switch that \
         snoops IGMP needs a querier); is `announcements_on` in pool.toml the address of the card that servers are behind?"
    };
    Check::new(Verdict::Warn, NAME, found, advice)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn silence_has_two_reasons() {
        let pool = PoolConfig::by_file(Path::new("/nowhere"), |_| {}).unwrap();
        assert_eq!(judge(&pool, 2, &[], true), Check::ok(NAME, "heard at 239.255.82.77:7069, of 2 servers"));
        for (is_late, advice) in [(true, "clocks"), (false, "querier")] {
            let check = judge(&pool, 2, &[ServerId(7)], is_late);
            assert!(check.verdict == Verdict::Warn && check.found.ends_with("servers 7"), "{check:?}");
            assert!(check.advice.contains(advice), "{check:?}");
        }
    }
}
