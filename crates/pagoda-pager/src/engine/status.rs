//! What the engine says of its VM.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pagoda_core::fault::{IoError, Stall};
use pagoda_core::stats::Metric;
use pagoda_sys::Errno;

use super::{Engine, arm};
use crate::handle::Status;

impl Engine {
    /// Lets others see how the VM is.
    pub(super) fn publish(&mut self) {
        self.published = Instant::now();
        let stall = self.machine.stall();
        let since = stall.map_or(0, |(_, ms)| self.started.elapsed().as_millis() as u64 - ms);
        let mut stats = self.machine.stats();
        stats.set(Metric::Messages, self.messages);
        // What the VMM says of itself: any number.
        let punched = self.shared.punched.load(Ordering::Relaxed);
        stats.set(Metric::PagesDiscarded, stats.get(Metric::PagesDiscarded).wrapping_add(punched));
        let (sample, curve) = (self.look_at_sample(), self.current_curve());
        self.count_sampling(&mut stats);
        self.share.add_to(&mut stats);
        self.tiers.add_to(&mut stats);
        let waits = self.look_at_waits().or_else(|| self.busy.as_ref().map(arm::Busy::text));
        let tiers = self.tiers.reports();
        self.inbox.publish(Status {
            stats,
            armed: self.machine.is_armed(),
            ram_bytes: self.space.allocated(),
            swap_bytes: tiers.last().map_or(0, |swap| swap.counts.disk_bytes),
            stalled: self.frozen.clone().or_else(|| stall.map(|(stall, _)| stall_text(stall, self.tiers.swap_path()))),
            stalled_for: Duration::from_millis(since),
            waits,
            remote: self.tiers.remote(),
            agent: self.agent.is_connected(),
            pinned: self.pinned.clone(),
            latency: self.latency.clone(),
            table_bytes: self.machine.table_bytes() + tiers.iter().map(|tier| tier.counts.memory_bytes).sum::<u64>(),
            sample,
            tiers,
            sample_period: self.sampling.period(),
            curve,
            generation: 0,
        });
    }
}

impl Engine {
    /// What the VM waits for, if pages of a tier do not come in time. That is no stall: nothing is lost, and it goes on by itself.
    fn look_at_waits(&mut self) -> Option<String> {
        let whom = self.tiers.waits();
        if whom.is_some() != std::mem::replace(&mut self.waits_for_tier, whom.is_some()) {
            match &whom {
                Some(whom) => tracing::warn!(vm = %self.name, "it waits for {whom}"),
                None => tracing::info!(vm = %self.name, "the pool brings its pages again"),
            }
        }
        whom
    }
}

/// What a stall means to the VM's owner.
pub(super) fn stall_text(stall: Stall, swap: &std::path::Path) -> String {
    if let Stall::Write(IoError::Failed(errno)) = stall
        && [Errno::HWPOISON, Errno::FAULT].map(Errno::raw_os_error).contains(&errno)
    {
        return "a page of its memory cannot be read: a memory error of this machine, or a read error of the host's own swap \
                (dmesg says which). Its other pages are well, and it goes on with `pagoda vm cont` until it needs that page: save \
                what it has and start it again"
            .to_owned();
    }
    let (what, error) = match stall {
        Stall::Write(error) => ("written to", error),
        Stall::Read(error) => ("read from", error),
    };
    let (cause, advice) = match error {
        IoError::Lost => {
            return "a page of it was in the pool alone and is lost with the server that had it: the VM cannot go on. End it \
                    and start it again, with copies=2 if servers may fail"
                .to_owned();
        }
        IoError::NoSpace => ("the file system is full, or a quota of it".to_owned(), "make room there"),
        IoError::Failed(errno) if errno == Errno::FBIG.raw_os_error() => (
            "pagodad may not make a file so long".to_owned(),
            "start pagodad again with LimitFSIZE=infinity in its unit",
        ),
        IoError::Failed(errno) => (std::io::Error::from_raw_os_error(errno).to_string(), "repair the disk"),
    };
    format!("swap could not be {what} ({}: {cause}); nothing is lost: {advice}, then `pagoda vm cont`", swap.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_what_to_do() {
        let text = stall_text(Stall::Write(IoError::NoSpace), std::path::Path::new("/swap/web1.swap"));
        let long = stall_text(Stall::Write(IoError::Failed(27)), std::path::Path::new("/swap/web1.swap"));
        assert!(long.contains("LimitFSIZE") && !long.contains("repair"), "{long}");
        assert!(text.contains("/swap/web1.swap") && text.contains("full") && text.contains("pagoda vm cont"), "{text}");
    }
}
