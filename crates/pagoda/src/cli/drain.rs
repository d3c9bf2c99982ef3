//! `pagoda host drain` on the command line.

use clap::Args;
use pagoda_api::{MoveMode, MoveOnTimeout};

use crate::units::{parse_millis, parse_rate, parse_seconds};

/// Moves at a time, unless it is said. Two use a link that one leaves idle while it prepares and stops its VM.
pub const AT_ONCE_DEFAULT: u8 = 2;
/// More only make each other slow: they have one link, and each VM stands still for longer.
pub const AT_ONCE_MAX: i64 = 16;

/// Move all VMs of this host to others
///
/// First each VM is asked for at each host, as `pagoda vm move --dry-run` does, and a plan is made: which VM goes where, by the DRAM and
/// swap that is reserved for it there. Those that fit nowhere come first. If there are any, nothing is moved, unless --what-fits says
/// so. Then the VMs move, the biggest first. One whose move fails stays here, and the others go on.
///
/// Meanwhile this host takes no new VMs; `pagoda host show` says so. Ctrl-C gives up the moves that are under way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda host drain --to host2,host3 --dry-run       who would go where, and who would fit nowhere?
  pagoda host drain --to host2,host3 --shared-disks
  pagoda host drain --to host2 --what-fits --at-once 1
  pagoda host drain --stop                           this host takes new VMs again, after a drain that was killed

Exit status:
  0  no VM is here any more
  1  a VM has crashed meanwhile
  3  one of the hosts does not answer: nothing was moved
  4  this host trusts none of that name
  6  refused: a VM fits nowhere, and nothing was moved
  7  VMs are here still: they do not fit, or their moves failed
  8  of some VM nobody knows here which host runs it; `pagoda moves` says more")]
pub struct HostDrain {
    /// Hosts that this one trusts
    #[arg(long, value_name = "HOST,...", value_delimiter = ',', required_unless_present = "stop")]
    pub to: Vec<String>,
    /// Move what has a place, also if some VMs have none
    #[arg(long)]
    pub what_fits: bool,
    /// Moves at a time, up to 16
    #[arg(long, value_name = "NUMBER", default_value_t = AT_ONCE_DEFAULT, value_parser = clap::value_parser!(u8).range(1..=AT_ONCE_MAX))]
    pub at_once: u8,
    /// Print the plan, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Take new VMs again, after a drain that was killed
    #[arg(long, exclusive = true)]
    pub stop: bool,
    /// How memory goes over
    #[arg(long, value_enum, default_value_t = MoveMode::Auto)]
    pub mode: MoveMode,
    /// The most that each move sends while its VM runs, in bits a second, such as 500M or 2G [default: what the link carries]
    #[arg(long, value_name = "BITS", value_parser = parse_rate)]
    pub bandwidth: Option<u64>,
    /// The longest that each VM may stand still, such as 30ms or 1s
    #[arg(long, value_name = "TIME", default_value = "30ms", value_parser = parse_millis)]
    pub downtime: u64,
    /// The longest that each move may take, such as 10m [default: as long as the guest writes faster than the link sends]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub max_time: Option<u64>,
    /// What happens to a move when that is over
    #[arg(long, value_enum, default_value_t = MoveOnTimeout::Abort, requires = "max_time")]
    pub on_timeout: MoveOnTimeout,
    /// The VMs' disks are the same ones on all of these hosts, at the same paths
    #[arg(long)]
    pub shared_disks: bool,
    /// Copy the files of the VMs' disks to the same paths there, while the VMs run
    #[arg(long, conflicts_with = "shared_disks")]
    pub copy_disks: bool,
}
