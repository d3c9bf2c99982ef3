//! What has to be true at every moment, and in the end.

use pagoda_core::units::PageIdx;
use pagoda_move::note::Note;

use crate::world::World;

impl World {
    /// The VM never runs at two hosts at a time.
    pub fn check_running(&mut self) {
        if self.hosts.iter().all(|host| host.is_running()) {
            self.note_violation("two VMs run".to_owned());
        }
    }

    pub fn check_page(&mut self, host: usize, page: PageIdx) {
        self.stats.checked += 1;
        let (found, expected) = (self.hosts[host].ram[page.0 as usize], self.truth[page.0 as usize]);
        if found != expected {
            self.note_violation(format!("page {} of {host} is {found:#x}, not {expected:#x}", page.0));
        }
    }

    /// Each page of the VM that runs is right where it is, and a page that it lacks is right at its source.
    pub fn check_memory(&mut self) {
        let Some(host) = (0..2).find(|host| self.hosts[*host].is_running()) else { return };
        for page in (0..self.truth.len() as u64).map(PageIdx) {
            let is_missing = self.hosts[host].missing.contains(page);
            self.check_page(if is_missing { 1 - host } else { host }, page);
        }
    }

    pub fn is_running(&self) -> bool {
        self.hosts.iter().any(|host| host.is_running())
    }

    /// The VM's QEMU is dead where it would have to run: no protocol brings it back.
    pub fn is_dead(&self) -> bool {
        let is_killed = |host: usize| self.hosts[host].was_killed && self.hosts[host].qemu.is_none();
        (0..2).any(|host| match self.hosts[host].note {
            Some(Note::Owned(_) | Note::Accepted(..)) => is_killed(host),
            // Given away, to a host that has no QEMU for it either.
            Some(Note::Given(..)) => is_killed(host) && self.hosts[1 - host].qemu.is_none(),
            _ => false,
        })
    }

    /// A grant is on its way, or its answer.
    pub fn is_between(&self, host: usize) -> bool {
        matches!(self.hosts[host].note, Some(Note::Given(..) | Note::Accepted(..) | Note::Refused(_)))
    }

    /// No host has anything under way.
    pub fn is_settled(&self) -> bool {
        self.hosts.iter().all(|host| {
            let is_idle =
                host.daemon.as_ref().is_some_and(|daemon| daemon.source.is_none() && daemon.destination.is_none());
            is_idle && host.writing.is_none() && matches!(host.note, None | Some(Note::Owned(_)))
        })
    }

    /// The user ends what goes on.
    pub fn cancel(&mut self) {
        for host in 0..2 {
            self.source_event(host, pagoda_move::owner::SourceEvent::Cancel);
        }
    }

    /// One owner, and nothing of the other host's part.
    pub fn check_rest(&mut self) {
        let notes = [self.hosts[0].note, self.hosts[1].note];
        let owner = match notes {
            [Some(Note::Owned(_)), None] => 0,
            [None, Some(Note::Owned(_))] => 1,
            _ => return self.note_violation(format!("notes are left: {notes:?}")),
        };
        let other = &self.hosts[1 - owner];
        if other.reserved || other.qemu.is_some() || !other.missing.is_empty() {
            self.note_violation(format!("something is left at {}", 1 - owner));
        }
        if !self.hosts[owner].is_running() && !self.hosts[owner].was_killed {
            self.note_violation(format!("{owner} owns the VM and does not run it"));
        }
        if self.hosts.iter().any(|host| host.writing.is_some()) {
            self.note_violation("a note is being written".to_owned());
        }
        self.check_memory();
    }
}
