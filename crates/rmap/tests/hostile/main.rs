//! What peers with keys can say: a server and a client, each in a session, and bytes that decide what the other side sends.
//!
//! Anybody can send a stranger's datagrams, and `wire` tries any bytes on the decoders; what lies behind the handshake only a
//! key opens. Here the bytes of an input become messages that are sealed as they should be: with fields that fit, that nearly
//! fit, and that make no sense. Nothing may panic, and no page may come back with another content than somebody wrote.
//!
//! `RMAP_HOSTILE_INPUTS=1000000 cargo test --profile ci -p rmap --test hostile` runs more of them; `RMAP_HOSTILE_SEED=n` one.
//! Both [`server::run`] and [`client::run`] take any bytes, so a fuzzer that is guided by coverage can have them, too.

mod client;
mod input;
mod server;

use input::Noise;

/// Inputs by default for each side: some seconds of a core.
const INPUTS: u64 = 500;
/// Of one input: some hundred messages.
const LENGTH_MAX: u64 = 4_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn try_many(name: &'static str, run: fn(&[u8]) -> u64) {
    let seeds = match number("RMAP_HOSTILE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RMAP_HOSTILE_INPUTS").unwrap_or(INPUTS),
    };
    let mut useful = 0;
    for seed in seeds {
        let bytes = Noise::new(seed).bytes(LENGTH_MAX);
        let replay = Replay { name, seed };
        useful += run(&bytes);
        std::mem::forget(replay);
    }
    eprintln!("{name}: {useful} pages came back");
    assert!(useful > 0, "what is tried does not reach the pages");
}

/// Says how to run an input again, should it panic.
struct Replay {
    name: &'static str,
    seed: u64,
}

impl Drop for Replay {
    fn drop(&mut self) {
        eprintln!(
            "replay: RMAP_HOSTILE_SEED={} cargo test --profile ci -p rmap --test hostile {}",
            self.seed, self.name
        );
    }
}

#[test]
fn clients_with_keys_cannot_harm_a_server() {
    try_many("clients", server::run);
}

#[test]
fn servers_with_keys_cannot_harm_a_client() {
    try_many("servers", client::run);
}

/// What is tried would show a client that takes what it is given, and a server that returns other pages than it was given.
#[test]
fn mistakes_are_noticed() {
    let noticed = |run: &dyn Fn(&[u8]) -> u64| {
        let run =
            |seed| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&Noise::new(seed).bytes(LENGTH_MAX))));
        (0..INPUTS).any(|seed| run(seed).is_err())
    };
    assert!(noticed(&|bytes| client::run_with(bytes, Some(rmap::client::Fault::TrustsServers))));
    assert!(noticed(&|bytes| server::run_with(bytes, Some(rmap::server::Fault::FlipsBits))));
}
