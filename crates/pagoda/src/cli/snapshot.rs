//! What the command line says about snapshots.

use std::str::FromStr;

use clap::{Args, Subcommand};
use pagoda_api::{SnapshotName, check_snapshot_name};

use super::caps::{DramLimit, dram};
use super::on_crash::CrashOptions;
use super::transfer::{Export, Import};

/// Digits of an image's id.
const ID_DIGITS: usize = 32;

/// Take a snapshot of a running VM
///
/// The snapshot is what the VM's memory and devices hold at one moment, and its disks if you say so. The VM stands still for milliseconds, and then
/// goes on while the snapshot is filled. Until that is over it is volatile: it is lost with the host, or with the VM and
/// the daemon together.
///
/// A VM that has writable disks needs one of two options. --disks takes their content too. They have to be qcow2 files. Each gets an
/// overlay, a new file beside it, which the VM writes to from then on; what it wrote before stays in a file of its own. Another
/// writable disk is refused and named. --no-disks takes the snapshot without the content of disks: restored beside disks that have
/// changed since, a guest would damage its file systems.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda vm snapshot web1                                  named by its time; of a VM without writable disks
  pagoda vm snapshot web1 --name before-upgrade --disks
  pagoda vm snapshot web1 --name nightly --disks --wait-durable    returns when it outlives the host
  pagoda vm snapshot web1 --name cache --no-disks          without what is on its disks

Exit status:
  6  refused: nothing was changed, the VM did not stop
  7  begun and given up: the VM runs as before, and there is no snapshot")]
pub struct TakeSnapshot {
    /// Name of the VM
    pub vm: String,
    /// Name of the snapshot [default: its time in UTC, such as 20261128-203042]
    #[arg(long, value_name = "NAME", value_parser = snapshot_name)]
    pub name: Option<String>,
    /// With what is on the VM's disks: each gets an overlay
    #[arg(long, conflicts_with = "no_disks")]
    pub disks: bool,
    /// Without what is on the VM's disks
    #[arg(long)]
    pub no_disks: bool,
    /// Return when the snapshot outlives the host, or is lost
    #[arg(long)]
    pub wait_durable: bool,
}

impl TakeSnapshot {
    /// What `--disks` or `--no-disks` says; `None`: neither was given.
    pub fn wants_disks(&self) -> Option<bool> {
        (self.disks || self.no_disks).then_some(self.disks)
    }
}

/// Start a VM from a snapshot
///
/// This command becomes the VM's QEMU, as `pagoda run` does: it has the same words as before, and this terminal. Run it as
/// the user whose QEMU it was. The guest goes on where it was when the snapshot was taken.
///
/// The snapshot has to be filled. Its disks are put back to what they were then. A disk that was written since is refused, unless
/// another snapshot has what it holds now: --force puts it back all the same, and keeps what it held in a file beside it, whose
/// name ends in .pagoda-before-ID.
///
/// Disks that the snapshot does not have (--no-disks) have to be as they were: a guest that finds other content there than it
/// remembers damages its file systems. Where that cannot happen, say --force.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda vm restore web1                          from its newest snapshot that can be restored
  pagoda vm restore web1 --from before-upgrade
  pagoda vm restore web2 --from web1/before-upgrade --dram 1G   under another name; not beside web1, on the same disks

Exit status:
  6  refused: nothing was changed
With all else it ends with the status of QEMU.")]
pub struct Restore {
    /// Name of the new VM, which no other VM may have
    pub name: String,
    /// The snapshot; without a VM, the one of that name [default: the VM's newest that can be restored]
    #[arg(long, value_name = "[VM/]SNAPSHOT")]
    pub from: Option<Source>,
    /// The most DRAM it may have, such as 2G, or all [default: as it was]
    #[arg(long, value_name = "SIZE|all", value_parser = dram)]
    pub dram: Option<DramLimit>,
    /// Also if its disks have been written since the snapshot
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub crash: CrashOptions,
}

/// Put a VM back to one of its snapshots
///
/// The VM that runs is ended, and what it did since is lost, also what it wrote to its disks since its last snapshot. Then this
/// command becomes its QEMU, as `pagoda vm restore` does. All that can be seen before is checked before the VM ends, also whether
/// there is room, which is not kept. If the new VM cannot be made after that, use `pagoda vm restore` when that is put right.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda vm rollback web1 --to before-upgrade

Exit status:
  1  failed: the message says whether the VM has ended
  6  refused: nothing was changed, the VM runs")]
pub struct Rollback {
    /// Name of the VM
    pub name: String,
    /// The snapshot; without a VM, the one of that name
    #[arg(long, value_name = "[VM/]SNAPSHOT")]
    pub to: Source,
    /// Also if disks whose content the snapshot does not have (--no-disks) have changed since
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub crash: CrashOptions,
}

/// Look at snapshots, verify, remove, export and import them
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  pagoda vm snapshot web1 --name before-upgrade --disks       takes one
  pagoda snapshot ls
  pagoda snapshot verify web1/before-upgrade                  is all of it as it was written?
  pagoda vm restore web1 --from before-upgrade                starts the VM from it
  pagoda snapshot rm web1/before-upgrade

Exit status of rm:
  5  snapshots that refer to it have to take over what they have there, and there is no room for that
  6  refused, and nothing was changed: a VM reads it, or what refers to it cannot take over, or is not known")]
pub enum Snapshots {
    /// List the snapshots of all VMs
    ///
    /// STAGE: volatile is lost with the host, durable is not, lost cannot be restored. SIZE is what its files take, SHARED
    /// the memory that the snapshots before it have for it. TAKEN is in UTC. READ BY: VMs that were made of it and read their
    /// memory from its files. Images that cannot be read are named below the table.
    Ls,
    /// Show all that is known of a snapshot
    Show {
        #[arg(value_name = "VM/NAME")]
        name: SnapshotName,
    },
    /// Remove a snapshot
    ///
    /// What it takes on the disk is free again, unless a VM reads a snapshot that refers to it: then when that VM has ended. One that
    /// VMs read, which were made of it, is not removed before they have ended, or have all their memory in DRAM. A snapshot that
    /// refers to it first takes over what it has there, which takes time and room. The layers of its disks stay, because other files
    /// may be on top of them, and the command names them. An image that cannot be read is removed by its id, which
    /// `pagoda snapshot ls` shows, if no other one refers to it.
    Rm {
        #[arg(value_name = "VM/NAME|ID")]
        name: Removed,
    },
    /// Read all of a snapshot and compare it with its checksums
    ///
    /// It ends with status 1 if anything is damaged, and says what. Interrupt it at any time: the daemon then stops as well. It
    /// reads as fast as the disk allows, so VMs that swap to the same disk wait longer meanwhile.
    Verify {
        #[arg(value_name = "VM/NAME")]
        name: SnapshotName,
    },
    /// List the snapshots by VM
    Tree,
    /// Say how much of the memory differs between two snapshots of a VM
    ///
    /// Only their maps are read. Pages with the same place or the same checksum (32 bits) are taken for equal.
    Diff {
        #[arg(value_name = "VM/NAME")]
        first: SnapshotName,
        /// Another one of the same VM
        #[arg(value_name = "[VM/]NAME")]
        second: Source,
    },
    Export(Export),
    Import(Import),
    /// Accept what an imported snapshot starts
    ///
    /// A file names the program, the words and the user of its QEMU, and may come from anybody. Look at them first with `pagoda
    /// snapshot show`. What is accepted is printed. From then on it can be restored.
    Accept {
        #[arg(value_name = "VM/NAME")]
        name: SnapshotName,
    },
}

/// A snapshot of a VM that may go without saying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    vm: Option<String>,
    name: String,
}

impl Source {
    /// The snapshot, for a command about this VM.
    pub fn of(&self, vm: &str) -> SnapshotName {
        SnapshotName::new(self.vm.as_deref().unwrap_or(vm), &*self.name)
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Source, String> {
        if text.contains('/') {
            let SnapshotName { vm, name } = text.parse()?;
            return Ok(Source { vm: Some(vm), name });
        }
        Ok(Source { vm: None, name: snapshot_name(text)? })
    }
}

/// What is to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    Named(SnapshotName),
    Image(String),
}

impl FromStr for Removed {
    type Err = String;

    fn from_str(text: &str) -> Result<Removed, String> {
        let is_id = text.len() == ID_DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if is_id { Ok(Removed::Image(text.to_owned())) } else { text.parse().map(Removed::Named) }
    }
}

fn snapshot_name(text: &str) -> Result<String, String> {
    check_snapshot_name(text).map(|()| text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use clap::error::ErrorKind;

    use super::*;
    use crate::cli::{Cli, Command, Vm};

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command)
    }

    #[test]
    fn a_source_may_name_its_vm() {
        let of = |line: &str| match parse(line).unwrap() {
            Command::Vm(Vm::Restore(options)) => options.from.unwrap().of(&options.name).to_string(),
            Command::Vm(Vm::Rollback(options)) => options.to.of(&options.name).to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(of("pagoda vm restore web1 --from one"), "web1/one");
        assert_eq!(of("pagoda vm restore web2 --from web1/one --dram all --force"), "web1/one");
        assert_eq!(of("pagoda vm rollback web1 --to one"), "web1/one");
    }

    #[test]
    fn what_is_removed_is_a_snapshot_or_an_image() {
        let id = "0123456789abcdef0123456789abcdef";
        let removed = |what: &str| match parse(&format!("pagoda snapshot rm {what}")).unwrap() {
            Command::Snapshot(Snapshots::Rm { name }) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(removed(id), Removed::Image(id.to_owned()));
        assert_eq!(removed("web1/one"), Removed::Named(SnapshotName::new("web1", "one")));
    }

    #[test]
    fn mistakes_are_refused() {
        let check = |line: &str, expected: ErrorKind| {
            assert_eq!(parse(line).unwrap_err().kind(), expected, "{line}");
        };
        check("pagoda vm snapshot", ErrorKind::MissingRequiredArgument);
        check("pagoda vm snapshot web1 --name a/b", ErrorKind::ValueValidation);
        check("pagoda vm restore", ErrorKind::MissingRequiredArgument);
        check("pagoda vm restore web1 --on-crash restore=0", ErrorKind::ValueValidation);
        check("pagoda snapshot diff web1/a", ErrorKind::MissingRequiredArgument);
        check("pagoda vm restore web1 --from ..", ErrorKind::ValueValidation);
        check("pagoda vm restore web1 --from one --dram 2", ErrorKind::ValueValidation);
        check("pagoda vm rollback web1 --from one", ErrorKind::UnknownArgument);
        check("pagoda snapshot show one", ErrorKind::ValueValidation);
        check("pagoda snapshot rm 0123", ErrorKind::ValueValidation);
        check("pagoda snapshot frobnicate", ErrorKind::InvalidSubcommand);
    }
}
