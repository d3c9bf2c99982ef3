//! `pagoda outbox` on the command line.

use clap::{Args, Subcommand};

use super::outbox::space;

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
  pagoda --json outbox show enc1       also how long writes have waited for room")]
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
        /// The VM
        vm: String,
    },
    Set(OutboxSet),
}

/// Give the outbox of a running VM another space
///
/// The guest's df shows it at once. More is refused if the pool does not have it free beside all that VMs were promised. With less
/// than the outbox holds nothing is lost: the guest writes no new bytes until clients have fetched enough, and the pool gets memory
/// back as the outbox lets go of it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda outbox set enc1 --space 512M
  pagoda outbox show enc1              how much of it is used, and whether it drains

Exit status:
  1  its process does not answer, or has ended; its space is to be what it was
  4  no such VM runs, or it has no outbox
  5  the pool has no room for it; nothing was changed")]
pub struct OutboxSet {
    /// The VM
    pub vm: String,
    /// Its new size, such as 512M, at least 1M
    #[arg(long, value_name = "SIZE", value_parser = space)]
    pub space: u64,
}
