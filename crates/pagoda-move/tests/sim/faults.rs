//! What goes wrong, and how it ends.

use std::time::Duration;

use pagoda_move::owner::SourceEvent;

use crate::plan::{Fault, MS, Phase};
use crate::world::{Event, World};

/// A peer that is silent for so long counts as cut.
const SILENCE: Duration = Duration::from_secs(10);

impl World {
    /// A move has come to this phase.
    pub fn reach(&mut self, phase: Phase) {
        if self.is_healed {
            return;
        }
        while let Some(at) = self.plan.triggers.iter().position(|(when, _)| *when == phase) {
            let (_, fault) = self.plan.triggers.swap_remove(at);
            let (soon, span) = (self.any(MS * 4), fault.any_span(&mut self.chance));
            self.schedule_in(soon, Event::Fault(fault, span));
        }
    }

    pub fn begin_fault(&mut self, fault: Fault, span: Duration) {
        if self.is_healed {
            return;
        }
        self.stats.faults += 1;
        self.tell(|| format!("{fault:?} for {span:?}"));
        match fault {
            Fault::CutBoth => self.cut(&[0, 1]),
            Fault::CutFrom(host) => self.cut(&[host]),
            Fault::KillDaemon(host) => self.kill_daemon(host),
            Fault::PauseDaemon(host) => {
                let until = self.now + span;
                self.hosts[host].paused_until = self.hosts[host].paused_until.max(until);
                if span > SILENCE {
                    let connection = self.link.seen[1 - host];
                    self.schedule_in(SILENCE, Event::Notice { host: 1 - host, connection });
                    // It finds its own end of the connection closed.
                    let connection = self.link.seen[host];
                    self.schedule_in(span, Event::Notice { host, connection });
                }
            }
            Fault::KillQemu(host) => {
                if self.hosts[host].qemu.take().is_some() {
                    self.hosts[host].was_killed = true;
                    self.hosts[host].ios.clear();
                    let delay = self.any(MS * 20);
                    self.schedule_host(host, delay, |host, life| Event::QemuDied { host, life });
                }
            }
            Fault::DiskFails(host) => self.hosts[host].disk_fails = true,
            Fault::NoArbiter(host) => self.arbiter_gone[host] = true,
            Fault::NoArbiterForBoth => self.arbiter_gone = [true; 2],
            Fault::Cancel => (0..2).for_each(|host| self.source_event(host, SourceEvent::Cancel)),
        }
        self.schedule_in(span, Event::Heals(fault));
    }

    fn cut(&mut self, from: &[usize]) {
        for host in from {
            self.link.cut[*host] = true;
        }
        for host in 0..2 {
            let (silence, connection) = (MS * 20 + self.any(SILENCE), self.link.seen[host]);
            self.schedule_in(silence, Event::Notice { host, connection });
        }
    }

    pub fn end_fault(&mut self, fault: Fault) {
        match fault {
            Fault::CutBoth => self.link.cut = [false; 2],
            Fault::CutFrom(host) => self.link.cut[host] = false,
            Fault::KillDaemon(host) => self.restart(host),
            Fault::PauseDaemon(host) => self.resume(host),
            Fault::KillQemu(_) | Fault::Cancel => {}
            Fault::DiskFails(host) => self.hosts[host].disk_fails = false,
            Fault::NoArbiter(host) => self.arbiter_gone[host] = false,
            Fault::NoArbiterForBoth => self.arbiter_gone = [false; 2],
        }
        // What a cut held back arrives, in order.
        if !self.link.is_cut() {
            for frame in std::mem::take(&mut self.link.held) {
                self.schedule_in(Duration::ZERO, Event::Frame(frame));
            }
        }
        self.try_connect();
    }

    /// Everything that was wrong ends now.
    pub fn heal(&mut self) {
        self.is_healed = true;
        self.tell(|| "all heals".to_owned());
        self.link.cut = [false; 2];
        for host in 0..2 {
            self.hosts[host].disk_fails = false;
            self.hosts[host].paused_until = self.now;
            self.resume(host);
            self.restart(host);
        }
        self.arbiter_gone = [false; 2];
        self.end_fault(Fault::Cancel);
    }
}
