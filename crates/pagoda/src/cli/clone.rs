//! `pagoda vm clone` on the command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use pagoda_api::{CLONES_MAX, SnapshotName, check_vm_name};

use super::caps::{DramLimit, dram};

/// Make VMs that begin with what another one has
///
/// A clone is a VM of its own. It begins with the memory and the devices of a snapshot, and reads memory that it has not changed from
/// that. Of a VM that runs a snapshot is taken first; it stays, because the clones read it.
///
/// All clones are made or none, and the command returns when every guest runs. Each QEMU is in the background, in a session of its
/// own; what it prints, also on a console that was a terminal, is in DIR/NAME.log.
///
/// Each QEMU has the words of the snapshot's QEMU. Sockets and files that it makes for others get the suffix .NAME. What two VMs cannot
/// have at a time is refused by name before anything is made: disks that the snapshot does not have, ports on which QEMU listens,
/// devices of the host. All guests remember the MAC address of the snapshot's guest, so a VM with a network card needs --net.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda vm clone web1 --count 20 --name job-%02d      job-01 to job-20, of a snapshot that is taken now
  pagoda vm clone web1/warm --name test --dram 128M    one clone of a snapshot
  pagoda vm clone db --name db-test --disks            with its disks, of which the clone has overlays
  pagoda vm clone web1/warm --count 3 --name t%d --net isolated     each in a network namespace of its own
  pagoda vm clone web1/warm --count 3 --name t%d --run 'echo $PAGODA_VM has process $PAGODA_QEMU_PID'
  pagoda vm clone web1 --count 100 --name w%d --dry-run

Exit status:
  5  there is no room for all of them, and none was made
  6  refused: nothing was changed
  7  one could not be started, or the command was interrupted: all were ended, and nothing of them is left")]
pub struct CloneOptions {
    /// A snapshot, or a VM that runs
    #[arg(value_name = "VM[/SNAPSHOT]")]
    pub source: CloneSource,
    /// How many clones to make
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=CLONES_MAX as i64))]
    pub count: u32,
    /// Names of the clones: %d stands for a number, %02d for one with at least two digits. A single clone needs none
    #[arg(long, value_name = "PATTERN")]
    pub name: String,
    /// The number of the first clone, in the place of %d
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub first: u32,
    /// The most DRAM that each may have, such as 128M, or all [default: as the snapshot's VM]
    #[arg(long, value_name = "SIZE|all", value_parser = dram)]
    pub dram: Option<DramLimit>,
    /// What becomes of network cards; a VM with any needs it
    #[arg(long, value_name = "HOW")]
    pub net: Option<CloneNet>,
    /// Of a VM that runs: take the snapshot with what is on its disks
    ///
    /// Each clone of a snapshot that has disks gets an overlay on each of them: of web1.qcow2 it is web1.qcow2.pagoda-clone-NAME. It
    /// stays when the clone has ended.
    #[arg(long)]
    pub disks: bool,
    /// A shell command that is run for each clone when all run, with PAGODA_VM, PAGODA_INDEX, PAGODA_SOURCE, PAGODA_SOCKET and
    /// PAGODA_QEMU_PID in its environment; if it fails, that is said, and the clone stays
    #[arg(long, value_name = "COMMAND")]
    pub run: Option<String>,
    /// Where what the QEMUs print goes [default: /var/log/pagoda for root, else ~/.local/state/pagoda]
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Say what would be made, and whether there is room, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// What becomes of network cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CloneNet {
    /// Each QEMU runs in a network namespace of its own, with the MAC addresses that the guest knows; needs root
    Isolated,
}

/// What clones begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloneSource {
    /// A VM that runs.
    Vm(String),
    Snapshot(SnapshotName),
}

impl FromStr for CloneSource {
    type Err = String;

    fn from_str(text: &str) -> Result<CloneSource, String> {
        if text.contains('/') {
            return text.parse().map(CloneSource::Snapshot);
        }
        check_vm_name(text).map(|()| CloneSource::Vm(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_vm_or_a_snapshot() {
        assert_eq!("web1".parse(), Ok(CloneSource::Vm("web1".into())));
        assert_eq!("web1/one".parse(), Ok(CloneSource::Snapshot(SnapshotName::new("web1", "one"))));
        for wrong in ["", "/one", "web1/", "a/b/c"] {
            assert!(wrong.parse::<CloneSource>().is_err(), "{wrong}");
        }
    }
}
