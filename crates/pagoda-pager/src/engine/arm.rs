//! Arming: the VM's memory is registered with its userfaultfds, and what is where is found out.
//!
//! The kernel gives a range to one userfaultfd only. QEMU has its own for post-copy migration and background snapshots, which
//! the shim refuses; a VM that was started with an older shim may hold one. Then the VM runs on unarmed, over its limit if
//! need be, and arming is tried again.

use std::time::{Duration, Instant};

use pagoda_core::fault::Event;
use pagoda_sys::Errno;

use super::busy::Busy;
use super::{Engine, EngineError, io};
use crate::recover;

/// Between two attempts while the memory is another userfaultfd's.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

impl Engine {
    /// Executes `Action::Arm`. While another has the memory the action is not answered, so the machine does nothing that
    /// needs it.
    pub(super) fn begin_to_arm(&mut self) {
        match self.arm() {
            Ok(()) => {
                if self.busy.take().is_some() {
                    tracing::info!(vm = %self.name, "its memory is free again, and it is paged");
                }
                // Now that it is known what is resident, page-out can begin.
                self.events.push_back(Event::Tick);
            }
            Err(EngineError::Register { errno: Errno::BUSY, registered }) => self.wait_until_free(registered),
            Err(error) => self.freeze(&format!("it could not be armed: {error}")),
        }
    }

    fn wait_until_free(&mut self, registered: usize) {
        // No others: until Linux 6.15 a userfaultfd could take a range from another.
        for shard in &self.space.shards()[..registered] {
            if let Err(errno) = shard.uffd.unregister(shard.addr, shard.len) {
                return self.freeze(&format!("it could not be armed, nor left as it was: {errno}"));
            }
        }
        self.shared.leave_punches();
        let since = self.busy.as_ref().map_or_else(Instant::now, |busy| busy.since);
        let busy = Busy { since, next: Instant::now() + BUSY_PAUSE };
        if self.busy.is_none() {
            tracing::warn!(vm = %self.name, "{}", busy.text());
        }
        self.busy = Some(busy);
    }

    /// Tries again to arm, when it is time.
    pub(super) fn arm_if_free(&mut self) {
        if self.busy.as_ref().is_some_and(|busy| Instant::now() >= busy.next) && self.frozen.is_none() {
            self.begin_to_arm();
        }
    }

    pub(super) fn arm(&mut self) -> Result<(), EngineError> {
        self.take_punches();
        if !std::mem::replace(&mut self.has_buffers, true) {
            self.ring.set_buffers(io::buffers()?)?;
        }
        for (registered, shard) in self.space.shards().iter().enumerate() {
            let result = shard.uffd.register(shard.addr, shard.len);
            result.map_err(|errno| EngineError::Register { errno, registered })?;
        }
        let found = recover::find(&self.space, &mut self.tiers)?;
        self.machine.armed(|chunk| found[chunk.as_usize()]);
        self.restart_sample();
        Ok(())
    }
}
