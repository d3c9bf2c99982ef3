//! Looks at the memory of the host, and tells the server when it is short.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use rmap::pressure::Gauge;
use rmap::server::Server;
use rmap::units::Time;
use rmap::wire::message::Pressure;
use rmap_io::host;

/// How often the host's memory is read.
const READ_EVERY: Duration = Duration::from_secs(1);

/// What the host's memory says, once a second.
#[derive(Debug)]
pub struct HostGauge {
    meminfo: PathBuf,
    stalls: PathBuf,
    gauge: Gauge,
    looked_at: Option<Time>,
    is_blind: bool,
}

impl HostGauge {
    /// `dir`: where the files are, if not where the kernel has them.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn new(dir: Option<&Path>) -> Result<HostGauge> {
        let (meminfo, stalls) = match dir {
            Some(dir) => (dir.join("meminfo"), dir.join("pressure")),
            None => (PathBuf::from("/proc/meminfo"), PathBuf::from("/proc/pressure/memory")),
        };
        host::sample_of(&meminfo, &stalls)?;
        Ok(HostGauge { meminfo, stalls, gauge: Gauge::default(), looked_at: None, is_blind: false })
    }

    /// Reads the host's memory when it is time, and tells the server and the operator what follows from it.
    pub fn follow(&mut self, server: &mut Server, now: Time) {
        if self.looked_at.is_some_and(|at| now.since(at) < READ_EVERY) {
            return;
        }
        self.looked_at = Some(now);
        let before = self.gauge.level();
        let result = host::sample_of(&self.meminfo, &self.stalls).map(|sample| self.gauge.apply(now, &sample));
        match &result {
            Ok(level) => {
                let level = *level;
                server.set_pressure(level);
                if level != before {
                    eprintln!("pagoda: {}", said_of(level));
                }
            }
            // The level stays as it was.
            Err(error) if !self.is_blind => eprintln!("pagoda: {error}: whether memory is short is not known"),
            Err(_) => {}
        }
        self.is_blind = result.is_err();
    }
}

fn said_of(level: Pressure) -> &'static str {
    match level {
        Pressure::None => "memory is not short any more",
        Pressure::Yellow => "memory is getting short (yellow): no new slabs are lent",
        Pressure::Orange => "memory is short (orange): clients are asked to move their pages away",
        Pressure::Red => "memory is very short (red): clients drop what they have at another server, too",
    }
}
