//! Looks at a VM all the time, for what must hold in every moment.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagoda_api::{Client, VmInfo};

use crate::daemon::Daemon;
use crate::guest::ram_bytes_of;

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The extremes that were seen of a VM.
#[derive(Debug, Default)]
pub struct Seen {
    pub samples: usize,
    /// Most that the daemon said was resident, in relation to the cap at that moment.
    pub resident_over_cap_bytes: i64,
    pub resident_bytes_max: u64,
    pub swapped_bytes_max: u64,
    /// Most that the kernel said was in the RAM files.
    pub ram_bytes_max: u64,
    /// Largest value of every counter, while one daemon served.
    pub counters: BTreeMap<String, u64>,
    pub last: Option<VmInfo>,
}

impl Seen {
    /// A counter at its largest; unknown names are 0.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// Checks that the VM was watched, and never had more than its cap.
    ///
    /// # Errors
    /// It had more.
    pub fn ensure_capped(&self) -> Result<()> {
        const SAMPLES_MIN: usize = 20;
        ensure!(self.samples >= SAMPLES_MIN, "only {} samples", self.samples);
        ensure!(
            self.resident_over_cap_bytes <= 0,
            "{} bytes more resident than the cap allows in one of {} samples",
            self.resident_over_cap_bytes,
            self.samples
        );
        Ok(())
    }

    /// Checks that pages really left and came back.
    ///
    /// # Errors
    /// Too few did.
    pub fn ensure_paged(&self, pages_min: u64) -> Result<()> {
        for name in [pagoda_api::counter::PAGES_OUT, pagoda_api::counter::PAGES_IN] {
            let pages = self.counter(name);
            ensure!(pages >= pages_min, "{name} is {pages}, expected at least {pages_min}: {:#?}", self.counters);
        }
        Ok(())
    }

    fn look(&mut self, info: VmInfo) {
        self.samples += 1;
        let over = info.resident_bytes.cast_signed() - info.dram_limit_bytes.cast_signed();
        self.resident_over_cap_bytes = if self.samples == 1 { over } else { self.resident_over_cap_bytes.max(over) };
        self.resident_bytes_max = self.resident_bytes_max.max(info.resident_bytes);
        self.swapped_bytes_max = self.swapped_bytes_max.max(info.swapped_bytes);
        for (name, value) in &info.counters {
            let most = self.counters.entry(name.clone()).or_default();
            *most = (*most).max(*value);
        }
        if let Some(pid) = info.pid {
            // It may end in this moment.
            self.ram_bytes_max = self.ram_bytes_max.max(ram_bytes_of(pid, &info.name).unwrap_or(0));
        }
        self.last = Some(info);
    }
}

/// A thread that looks.
#[derive(Debug)]
pub struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Seen>,
}

impl Watch {
    /// Looks at a VM from now until `stop`. While the daemon is away there is nothing to see.
    pub fn start(daemon: &Daemon, vm: &str) -> Self {
        let (stop, stopped) = channel();
        let (socket, vm): (PathBuf, String) = (daemon.socket(), vm.to_owned());
        let thread = std::thread::spawn(move || {
            let client = Client::new(socket);
            let mut seen = Seen::default();
            while stopped.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                if let Ok(info) = client.vm(&vm) {
                    seen.look(info);
                }
            }
            seen
        });
        Self { stop, thread }
    }

    /// Ends it and gives what it saw.
    ///
    /// # Errors
    /// The VM was never seen.
    pub fn stop(self) -> Result<Seen> {
        drop(self.stop);
        let seen = self.thread.join().ok().context("the watching thread panicked")?;
        ensure!(seen.last.is_some(), "the VM was never seen");
        Ok(seen)
    }
}
