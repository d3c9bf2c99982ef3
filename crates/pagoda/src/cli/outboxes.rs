//! `pagoda outbox` on the command line.

use clap::{Args, Subcommand};
use pagoda_api::OutboxPatch;

use super::outbox::{SpaceChoice, choice, space};

/// Outboxes: memory of the host into which guests write files that the host sends
///
/// `pagoda run --outbox SIZE` starts a VM with one. The pool keeps its space beside the VM's memory until the outbox's process has
/// ended: that is later than the VM's end while files wait to be fetched.
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  pagoda run --name enc1 --outbox 256M -- qemu-system-x86_64 -m 4G ...
  pagoda outbox ls
  pagoda outbox set enc1 --space 512M
  pagoda outbox set enc1 --space auto --slo 'p90 4.6s'
  pagoda outbox explain enc1           why it has the size that it has
  pagoda --json outbox show enc1       also the last jobs of its guest")]
pub enum Outboxes {
    /// List all outboxes, also those whose VMs have ended and whose files wait
    ///
    /// STATE is starting, serving, lingering (its VM has ended, and files wait), silent (its process does not answer: it may serve all
    /// the same, and nothing is known of it) or ended (its process, while its VM runs: what was in it is gone). A draining one holds
    /// more than its space. SPACE is what its files may take, CHARGED what the pool keeps for it, USED what its files take, AVAIL
    /// what the guest can write without waiting, and SENT what clients' TCP has acknowledged.
    Ls,
    /// Show all that is known of a VM's outbox
    ///
    /// If no VM of this name runs, of the last that did, while its files wait to be fetched.
    Show {
        /// Name of the VM
        vm: String,
    },
    Set(OutboxSet),
    /// Show why a VM's outbox has the size that it has
    ///
    /// Of one whose size follows an SLO: what it was given and why, what the guest's jobs do, whether any size keeps the SLO, from which
    /// size to which memory helps, and what would help if none does.
    Explain {
        /// Name of the VM
        vm: String,
    },
}

/// Give the outbox of a running VM another space, or have its space follow an SLO
///
/// With --space auto the daemon chooses the size, once a period ([outbox] period_s, a minute), so that the guest's jobs keep the SLO; a
/// job is a file that the guest writes, from its creation to its close. What is left out stays. When the host is short, such outboxes
/// give memory down to their --min before VMs are paged out.
///
/// The guest's df shows it at once. More is refused if the pool does not have it free beside all that VMs were promised. With less
/// than the outbox holds nothing is lost: the guest writes no new bytes until clients have fetched enough, and the pool gets memory
/// back as the outbox lets go of it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda outbox set enc1 --space 512M
  pagoda outbox set enc1 --space auto --slo 'p90 4.6s' --min 16M --max 2G --weight 200
  pagoda outbox set enc1 --slo 'mean 800ms'
  pagoda outbox show enc1              how much of it is used, and whether it drains

Exit status:
  1  its process does not answer, or has ended; its space is to be what it was
  4  no such VM runs, or it has no outbox
  5  the pool has no room for it; nothing was changed")]
pub struct OutboxSet {
    /// Name of the VM
    pub vm: String,
    /// Its new size, such as 512M, at least 1M; or auto
    #[arg(long, value_name = "SIZE|auto", value_parser = choice)]
    pub space: Option<SpaceChoice>,
    #[command(flatten)]
    pub follow: OutboxFollow,
}

impl OutboxSet {
    /// The change as the daemon is asked for it.
    pub fn patch(&self) -> OutboxPatch {
        let patch = self.follow.patch();
        match self.space {
            Some(SpaceChoice::Size(bytes)) => OutboxPatch { space_bytes: Some(bytes), ..patch },
            Some(SpaceChoice::Auto) => OutboxPatch { auto: true, ..patch },
            None => patch,
        }
    }
}

/// What a size follows.
#[derive(Debug, Args)]
pub struct OutboxFollow {
    /// In nine windows of ten, this statistic of the jobs' times is to be within this time: 'p90 4.6s', 'mean 800ms'
    #[arg(long, value_name = "STATISTIC TIME")]
    pub slo: Option<String>,
    /// The least that it has [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = space)]
    pub min: Option<u64>,
    /// The most [default: what the pool has for outboxes]
    #[arg(long, value_name = "SIZE", value_parser = space)]
    pub max: Option<u64>,
    /// Its weight among outboxes when the pool is too small for all [default: 100]
    #[arg(long, value_name = "NUMBER")]
    pub weight: Option<u32>,
}

impl OutboxFollow {
    fn patch(&self) -> OutboxPatch {
        OutboxPatch {
            slo: self.slo.clone(),
            min_bytes: self.min,
            max_bytes: self.max,
            weight: self.weight,
            ..OutboxPatch::default()
        }
    }
}
