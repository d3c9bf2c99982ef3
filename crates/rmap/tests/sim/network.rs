//! The network of the simulation. It loses, doubles, delays, reorders and damages datagrams, cuts nodes off, and carries only so
//! much.

use std::collections::HashMap;

use crate::rng::Rng;

/// Longer than a server is waited for.
const STRAGGLING_US_MAX: usize = 60_000;

/// How bad it is. Chances are per thousand.
#[derive(Clone, Debug)]
pub struct Weather {
    pub loss: usize,
    pub duplication: usize,
    pub corruption: usize,
    /// Delay of every datagram, and how much more some have.
    pub delay_us: usize,
    pub jitter_us: usize,
    pub mtu: usize,
    /// Datagrams that come long after others that were sent later.
    pub stragglers: usize,
}

impl Weather {
    pub fn any(rng: &mut Rng) -> Weather {
        Weather {
            loss: *rng.pick(&[0, 0, 0, 10, 50, 200]),
            duplication: *rng.pick(&[0, 0, 20, 100]),
            corruption: *rng.pick(&[0, 0, 10]),
            delay_us: *rng.pick(&[10, 50, 500]),
            jitter_us: *rng.pick(&[0, 5, 200, 3000]),
            mtu: *rng.pick(&[1200, 1430, 1472, 8972]),
            stragglers: 0,
        }
    }

    pub fn calm() -> Weather {
        Weather { loss: 0, duplication: 0, corruption: 0, delay_us: 20, jitter_us: 0, mtu: 1472, stragglers: 0 }
    }
}

#[derive(Debug)]
pub struct Network {
    pub weather: Weather,
    /// Until when, in ns, nothing gets from the first node to the second.
    cuts: HashMap<(usize, usize), u64>,
    pub delivered: u64,
}

impl Network {
    pub fn new(weather: Weather) -> Network {
        Network { weather, cuts: HashMap::new(), delivered: 0 }
    }

    /// Nothing gets from one to the other, in this direction.
    pub fn cut(&mut self, from: usize, to: usize, until_ns: u64) {
        self.cuts.insert((from, to), until_ns);
    }

    pub fn heal(&mut self) {
        self.cuts.clear();
    }

    /// When this datagram arrives, and in which state: never, once or twice.
    pub fn carry(
        &mut self,
        now_ns: u64,
        from: usize,
        to: usize,
        datagram: &[u8],
        rng: &mut Rng,
    ) -> Vec<(u64, Vec<u8>)> {
        let weather = &self.weather;
        if self.cuts.get(&(from, to)).is_some_and(|until| now_ns < *until) || datagram.len() > weather.mtu {
            return Vec::new();
        }
        let copies = 1 + usize::from(rng.per_mille(weather.duplication));
        let mut arrivals = Vec::new();
        for _ in 0..copies {
            if rng.per_mille(weather.loss) {
                continue;
            }
            let late_us = if rng.per_mille(200) { rng.within(0, weather.jitter_us) } else { 0 };
            let straggles = weather.stragglers > 0 && rng.per_mille(weather.stragglers);
            let late_us = if straggles { rng.within(1_000, STRAGGLING_US_MAX) } else { late_us };
            let mut bytes = datagram.to_vec();
            if rng.per_mille(weather.corruption) {
                let at = rng.below(bytes.len());
                bytes[at] ^= 1 << rng.below(8);
            }
            self.delivered += 1;
            arrivals.push((now_ns + 1000 * (weather.delay_us + late_us) as u64, bytes));
        }
        arrivals
    }
}
