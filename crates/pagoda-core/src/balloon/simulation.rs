//! Guests of several kinds under virtual time, from a seed: obedient, slow, fighting back, deaf, without a driver. They
//! reboot, are paused and change their minds, and the daemon is replaced. A failing seed is printed.

use super::*;
use crate::chance::Chance;

const MEMORY: Bytes = Bytes::from_mib(512);
/// The guest's own unit of time.
const STEP_MS: u64 = 20;
const SEEDS: u64 = 400;
/// Events come in this time, then all is quiet.
const RESTLESS_MS: u64 = 120_000;
/// Longer than the longest pause before a retry.
const QUIET_MS: u64 = 2 * RETRY_MAX_MS + 60_000;
const BOOT_MS: u64 = 4_000;

struct Rng(Chance);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.draw() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Obedient,
    Slow,
    /// Takes pages back whenever it wants memory for itself.
    Fighting,
    /// Its driver reports, and never inflates.
    Deaf,
    /// Inflates, and reports nothing.
    Mute,
    NoDriver,
    NoDevice,
}

const KINDS: [Kind; 7] =
    [Kind::Obedient, Kind::Slow, Kind::Fighting, Kind::Deaf, Kind::Mute, Kind::NoDriver, Kind::NoDevice];

struct Guest {
    kind: Kind,
    /// What programs and kernel use and cannot give.
    used: Bytes,
    /// What the driver holds, what it was asked to hold, and what the device says of it.
    ballooned: Bytes,
    wanted: Bytes,
    said: Bytes,
    up_at_ms: u64,
    stats: Option<GuestStats>,
    reported_at_ms: u64,
    resets: u64,
    paused: bool,
    /// Inflated into what its last report left it.
    overdrawn: bool,
    reserve_at_report: Bytes,
}

impl Guest {
    fn new(kind: Kind) -> Guest {
        Guest {
            kind,
            used: Bytes::from_mib(64),
            ballooned: Bytes::ZERO,
            wanted: Bytes::ZERO,
            said: Bytes::ZERO,
            up_at_ms: BOOT_MS,
            stats: None,
            reported_at_ms: 0,
            resets: 0,
            paused: false,
            overdrawn: false,
            reserve_at_report: Bytes::ZERO,
        }
    }

    fn available(&self) -> Bytes {
        MEMORY.saturating_sub(Bytes(self.used.0 + self.ballooned.0))
    }

    fn has_driver(&self, now_ms: u64) -> bool {
        now_ms >= self.up_at_ms && !matches!(self.kind, Kind::NoDriver | Kind::NoDevice)
    }

    fn reboot(&mut self, now_ms: u64) {
        self.ballooned = Bytes::ZERO;
        self.used = Bytes::from_mib(64);
        self.up_at_ms = now_ms + BOOT_MS;
        self.resets += 1;
    }

    fn run(&mut self, now_ms: u64) {
        if self.paused || !self.has_driver(now_ms) {
            return;
        }
        let speed = match self.kind {
            Kind::Slow => Bytes::from_kib(64),
            _ => Bytes::from_mib(4),
        };
        if self.ballooned > self.wanted {
            self.ballooned = self.ballooned.saturating_sub(speed).max(self.wanted);
        } else if self.kind != Kind::Deaf {
            let more = Bytes(self.wanted.0 - self.ballooned.0).min(speed).min(self.available());
            self.ballooned = Bytes(self.ballooned.0 + more.0);
            let below = reserve(MEMORY).saturating_sub(self.available());
            self.overdrawn |=
                more > Bytes::ZERO && self.reserve_at_report > Bytes::ZERO && below > self.reserve_at_report;
        }
        if self.kind == Kind::Fighting && self.available() < Bytes::from_mib(8) {
            self.ballooned = self.ballooned.saturating_sub(Bytes::from_mib(16));
        }
        // The driver writes the size when it has changed it.
        self.said = self.ballooned;
        if self.kind != Kind::Mute && now_ms >= self.reported_at_ms + 1000 {
            self.reported_at_ms = now_ms;
            let available = self.available();
            self.stats = Some(GuestStats {
                updated_s: 1 + now_ms / 1000,
                free: available,
                available,
                major_faults: 0,
                swap_in: Bytes::ZERO,
                swap_out: Bytes::ZERO,
            });
        }
    }

    fn sample(&self) -> Sample {
        let device = match self.kind {
            Kind::NoDevice => Device::Absent,
            _ => Device::Present { actual: MEMORY.saturating_sub(self.said) },
        };
        Sample { device, stats: self.stats, resets: self.resets, paused: self.paused }
    }
}

struct World {
    guest: Guest,
    balloon: Balloon,
    target: Bytes,
    paging: Option<Bytes>,
    rng: Rng,
    now_ms: u64,
    tick_at_ms: u64,
    /// Resets that the present daemon has not seen.
    resets_before: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng(Chance::new(seed));
        let kind = KINDS[rng.below(KINDS.len() as u64) as usize];
        World {
            guest: Guest::new(kind),
            balloon: Balloon::new(MEMORY, None),
            target: MEMORY,
            paging: None,
            rng,
            now_ms: 0,
            tick_at_ms: 0,
            resets_before: 0,
        }
    }

    fn set_target(&mut self, target: Bytes) {
        self.target = target;
        self.balloon.set_target(self.now_ms, target);
        self.tick_at_ms = self.now_ms;
    }

    fn disturb(&mut self) {
        match self.rng.below(7) {
            0 | 1 => {
                let target = Bytes::from_mib(64 + self.rng.below(449));
                self.set_target(target);
            }
            2 => self.guest.reboot(self.now_ms),
            3 => self.guest.paused = !self.guest.paused,
            4 => {
                // A program starts, or ends; it finds what is available.
                let used = Bytes::from_mib(32 + self.rng.below(400));
                self.guest.used = used.min(MEMORY.saturating_sub(self.guest.ballooned));
            }
            5 => {
                self.balloon = Balloon::new(MEMORY, self.paging);
                self.resets_before = self.guest.resets;
                let target = self.target;
                self.set_target(target);
            }
            _ => {}
        }
    }

    fn step(&mut self) {
        self.guest.run(self.now_ms);
        if self.now_ms >= self.tick_at_ms {
            let mut sample = self.guest.sample();
            sample.resets -= self.resets_before;
            for action in self.balloon.tick(self.now_ms, &sample) {
                match action {
                    Action::Ask(memory) => self.guest.wanted = MEMORY.saturating_sub(memory),
                    Action::PageOut(to) => self.paging = Some(to),
                    Action::EndPageOut => self.paging = None,
                }
            }
            self.tick_at_ms = self.now_ms + self.balloon.tick_ms();
        }
        self.now_ms += STEP_MS;
    }

    /// What must have come of it once all is quiet.
    fn check_end(&self) {
        let view = self.balloon.view();
        let (kind, guest) = (self.guest.kind, &self.guest);
        let wanted = self.target < MEMORY;
        let actual = MEMORY.saturating_sub(guest.ballooned);
        match kind {
            _ if !wanted => {
                assert!(self.balloon.is_off() && self.paging.is_none(), "{view:?}");
                assert!(guest.ballooned == Bytes::ZERO || !guest.has_driver(self.now_ms), "{view:?}");
            }
            Kind::NoDevice | Kind::NoDriver | Kind::Deaf => {
                assert_eq!(self.paging, Some(self.target), "{view:?}");
            }
            Kind::Mute => assert!(actual <= self.target || self.paging.is_some(), "{view:?}"),
            Kind::Obedient | Kind::Slow | Kind::Fighting => {
                assert_eq!(self.paging, None, "{view:?}");
                let slack = Bytes(STEP_MIN.0 + reserve(MEMORY).0);
                assert!(actual <= self.target || guest.available() <= slack, "{view:?}");
                assert!(actual == self.target || guest.available().0 >= reserve(MEMORY).0 / 2, "{view:?}");
            }
        }
    }
}

fn simulate(seed: u64) {
    let mut world = World::new(seed);
    while world.now_ms < RESTLESS_MS {
        if world.rng.one_in(250) {
            world.disturb();
        }
        world.step();
    }
    world.guest.paused = false;
    if world.target == MEMORY && world.rng.one_in(2) {
        world.set_target(Bytes::from_mib(200));
    }
    while world.now_ms < RESTLESS_MS + QUIET_MS {
        world.step();
    }
    world.check_end();
}

#[test]
fn guests_of_all_kinds() {
    for seed in 0..SEEDS {
        let outcome = std::panic::catch_unwind(|| simulate(seed));
        if let Err(panic) = outcome {
            eprintln!("seed {seed} ({:?}) failed", World::new(seed).guest.kind);
            std::panic::resume_unwind(panic);
        }
    }
}

/// From idle to a target half as large, by a guest that does as asked.
#[test]
fn an_obedient_guest_is_there_in_seconds() {
    let mut world = World { guest: Guest::new(Kind::Obedient), ..World::new(0) };
    while world.now_ms < BOOT_MS + 2000 {
        world.step();
    }
    world.set_target(Bytes::from_mib(256));
    let start_ms = world.now_ms;
    while world.balloon.view().phase != Phase::Reached {
        world.step();
        assert!(world.now_ms < start_ms + 5_000, "{:?}", world.balloon.view());
    }
}
