//! `pagoda vm move` and `pagoda moves` on the command line.

use clap::{Args, Subcommand};
use pagoda_api::{MoveMode, MoveOnTimeout, MoveSplit};

use super::caps::{DramLimit, dram};
use crate::units::{parse_millis, parse_rate, parse_seconds};

/// Move a running VM to another host
///
/// The VM runs while its memory is sent. What its guest writes meanwhile is sent again, until what is left can be sent within the
/// downtime. Then the VM stands still, the rest is sent, and it runs on at the other host. The command returns when it does.
///
/// Ctrl-C gives the move up, and the VM runs on where it is, unless it has been given away by then. A second Ctrl-C ends the command
/// alone; the move goes on, and `pagoda moves` shows it.
///
/// Both hosts have to trust each other (`pagoda host trust`), and the other one has to accept VMs: the section [moves] of its
/// configuration says which programs, users and paths. The disks have to be at the same paths there: --shared-disks says that they
/// are the same ones, and --copy-disks has them copied to there.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda vm move web1 --to host2 --dry-run             would it fit, and how long would it take?
  pagoda vm move web1 --to host2 --shared-disks
  pagoda vm move web1 --to host2 --copy-disks          the files of its disks are copied too
  pagoda vm move web1 --to host2 --dram 512M           into less DRAM: the rest goes into swap there
  pagoda vm move web1 --to host2 --dram 512M --split pool:   the rest goes into its remote tier, not over the link
  pagoda vm move web1 --to host2 --bandwidth 2G        at most 2 Gbit/s while the VM runs
  pagoda vm move web1 --to host2 --max-time 10m        given up after ten minutes
  pagoda vm move web1 --to host2 --max-time 10m --on-timeout slow-guest

Exit status:
  4  there is no VM of that name, or this host trusts none of that name
  5  with --dry-run: there is no room for it
  6  refused: nothing was changed
  7  given up: the VM runs where it was
  8  undecided: the VM was given away, and the other host does not answer, or an operator has decided; `pagoda moves` says more")]
pub struct MoveVm {
    /// Name of the VM
    pub name: String,
    /// A host that this one trusts
    #[arg(long, value_name = "HOST")]
    pub to: String,
    /// The most DRAM that it may have there, such as 512M, or all [default: as much as here]
    #[arg(long, value_name = "SIZE|all", value_parser = dram)]
    pub dram: Option<DramLimit>,
    /// How its memory goes over
    #[arg(long, value_enum, default_value_t = MoveMode::Auto)]
    pub mode: MoveMode,
    /// What does not fit into its DRAM there goes into its remote tier instead of over the link, which sends the rest
    ///
    /// For VMs with a remote tier that etcd keeps (`--remote pool:`). The pool's servers take the cold part over links of their own, and
    /// the VM finds it there. pool:2 wants a tier that keeps two copies of each page.
    #[arg(long, value_name = "pool:[2]")]
    pub split: Option<MoveSplit>,
    /// The most that is sent while the VM runs, in bits a second, such as 500M or 2G [default: what the link carries]
    #[arg(long, value_name = "BITS", value_parser = parse_rate)]
    pub bandwidth: Option<u64>,
    /// The longest that the VM may stand still, such as 30ms or 1s
    #[arg(long, value_name = "TIME", default_value = "30ms", value_parser = parse_millis)]
    pub downtime: u64,
    /// The longest that the move may take, such as 10m [default: as long as the guest writes faster than the link sends]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub max_time: Option<u64>,
    /// What happens when that is over
    #[arg(long, value_enum, default_value_t = MoveOnTimeout::Abort, requires = "max_time")]
    pub on_timeout: MoveOnTimeout,
    /// The VM's disks are the same ones on both hosts, at the same paths
    ///
    /// Without it a VM with disks that it may write to is refused: the other host would have other content. Nothing checks that they are
    /// the same.
    #[arg(long)]
    pub shared_disks: bool,
    /// Copy the files of the VM's disks to the same paths there, while it runs
    ///
    /// For qcow2 and raw files of this host that have no others behind them. Nothing may be at these paths there, and they have to be
    /// below the `paths` in [moves] of that host. The files here stay, and nobody uses them when the VM has moved.
    #[arg(long, conflicts_with = "shared_disks")]
    pub copy_disks: bool,
    /// Say what would come of it, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Return as soon as it has begun; `pagoda moves` shows how far it is
    #[arg(long, conflicts_with = "dry_run")]
    pub detach: bool,
}

/// List the VMs that move to other hosts or come from them, and how the last moves have ended
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Moves {
    #[command(subcommand)]
    pub of: Option<OneMove>,
}

/// What can be done about a move.
#[derive(Debug, Subcommand)]
pub enum OneMove {
    /// Show all that is known of a move
    Show { vm: String },
    /// Give a move up: the VM runs on where it is
    ///
    /// After the VM was given away the other host is asked to refuse it. If it runs there already, the move has succeeded.
    Cancel { vm: String },
    /// Say that the other host is gone for good, so that this one may run the VM
    ///
    /// For a move that is undecided because the other host does not answer. If that host is not gone, the VM may run on both and
    /// destroy its disks: make sure of it first, for example by its power.
    Resolve { vm: String },
}
