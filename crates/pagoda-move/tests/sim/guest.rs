//! The VM: a guest that writes numbered values to its pages and to its disk, and checks what it reads.

use std::time::Duration;

use pagoda_core::units::PageIdx;

use crate::host::{GARBAGE, PAGES};
use crate::plan::MS;
use crate::world::{Event, World};

/// Direct I/Os of the guest at a time.
const IOS_MAX: usize = 6;

impl World {
    pub fn run(&mut self, host: usize) {
        let Some(qemu) = &mut self.hosts[host].qemu else {
            return self.tell(|| format!("{host} would run a QEMU that is dead"));
        };
        if !qemu.running {
            qemu.running = true;
            // What its kernel protects is the business of the next attempt.
            self.check_running();
            self.check_memory();
            self.guest_writes_disk(host);
            self.reach(crate::plan::Phase::FirstInstruction);
        }
    }

    /// A few instructions, if the VM runs.
    pub fn guest(&mut self) {
        let pause = MS * self.chance.within(2, 8) as u32;
        self.schedule_in(pause, Event::Guest);
        let Some(host) = (0..2).find(|host| self.hosts[*host].is_running()) else { return };
        self.guest_writes_disk(host);
        let writes = self.chance.below(self.plan.writes + 1);
        let mut left = pause;
        for _ in 0..writes {
            let page = self.page_of();
            let delay = self.write_delay(host, page);
            let Some(rest) = left.checked_sub(delay) else { break };
            left = rest;
            if delay > Duration::ZERO {
                self.stats.slowed += 1;
            }
            self.guest_writes(host, page);
        }
        for _ in 0..4 {
            let page = self.page_of();
            if self.touch(host, page) {
                self.check_page(host, page);
            }
        }
        self.guest_does_io(host);
        if self.chance.per_mille(50) {
            self.check_memory();
        }
    }

    /// Each disk write has the number after the one before. A VM that does not know of the last one is an old copy.
    fn guest_writes_disk(&mut self, host: usize) {
        let Some(qemu) = &mut self.hosts[host].qemu else { return };
        qemu.count += 1;
        self.count += 1;
        let (found, expected) = (qemu.count, self.count);
        if found != expected {
            self.note_violation(format!("{host} does disk write {found}, the next is {expected}: two VMs run"));
        }
    }

    /// What a write to this page waits: nothing, unless it is the first one since a look and writers are slowed.
    fn write_delay(&mut self, host: usize, page: PageIdx) -> Duration {
        let (now, is_first) = (self.now, self.hosts[host].protected.contains(page));
        let rounds = self.outgoing(host).and_then(|session| session.rounds.as_ref());
        rounds.map_or(Duration::ZERO, |rounds| if is_first { rounds.slowing(now).delay() } else { Duration::ZERO })
    }

    fn guest_writes(&mut self, host: usize, page: PageIdx) {
        if self.touch(host, page) {
            let value = if self.chance.per_mille(50) { 0 } else { self.chance.draw() % (GARBAGE - 1) };
            self.hosts[host].reach_for_write(page);
            self.hosts[host].ram[page.0 as usize] = value;
            self.truth[page.0 as usize] = value;
        }
    }

    fn guest_does_io(&mut self, host: usize) {
        if self.chance.per_mille(self.plan.direct_io) && self.hosts[host].ios.len() < IOS_MAX {
            let page = self.page_of();
            if self.touch(host, page) {
                self.hosts[host].reach_for_write(page);
                let began = self.hosts[host].epoch;
                self.hosts[host].ios.push((page, began));
            }
        }
        for index in (0..self.hosts[host].ios.len()).rev() {
            if self.chance.per_mille(300) {
                self.transfer(host, index);
            }
            if self.chance.per_mille(100) {
                self.hosts[host].ios.swap_remove(index);
            }
        }
    }

    /// The device writes into a page, whatever protects it.
    fn transfer(&mut self, host: usize, index: usize) {
        let (page, _) = self.hosts[host].ios[index];
        let value = self.chance.draw() % (GARBAGE - 1);
        self.hosts[host].ram[page.0 as usize] = value;
        self.truth[page.0 as usize] = value;
    }

    fn page_of(&mut self) -> PageIdx {
        PageIdx(self.chance.below(PAGES.0))
    }

    /// `stop`: the VM stands still, and its I/O has ended.
    pub fn stop_qemu(&mut self, host: usize) {
        if !self.hosts[host].is_running() {
            return;
        }
        // A stop that was asked for and given up since has no effect: `cont` came behind it.
        let is_wanted = self.hosts[host].daemon.is_none() || self.outgoing(host).is_some();
        if !is_wanted {
            return;
        }
        (0..self.hosts[host].ios.len()).for_each(|index| self.transfer(host, index));
        self.hosts[host].ios.clear();
        if let Some(qemu) = &mut self.hosts[host].qemu {
            qemu.running = false;
        }
        if self.hosts[host].daemon.is_some() {
            self.source_stopped(host);
        }
    }
}
