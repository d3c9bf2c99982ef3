//! The command line's shape and its help.

mod autosnapshot;
mod caps;
mod clone;
mod drain;
mod hosts;
mod moves;
mod on_crash;
mod outbox;
mod outboxes;
mod pace;
mod policy;
mod snapshot;
mod transfer;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand};
use clap_complete::Shell;
use pagoda_api::{VmPatch, VmSpec};
use pagoda_cli::options::{Global, PoolDir};

pub use self::autosnapshot::AutosnapshotOptions;
pub use self::caps::{BalloonTarget, DramLimit};
use self::caps::{balloon_target, dram};
pub use self::clone::{CloneNet, CloneOptions, CloneSource};
pub use self::drain::HostDrain;
pub use self::hosts::HostTrust;
pub use self::moves::{MoveVm, Moves, OneMove};
pub use self::on_crash::{CrashOptions, OnCrash};
pub use self::outbox::{OutboxOptions, SpaceChoice};
pub use self::outboxes::Outboxes;
pub use self::pace::Pace;
pub use self::policy::{Admit, HostSet, SamplingOptions, WhatIf};
pub use self::snapshot::{Removed, Restore, Rollback, Snapshots, TakeSnapshot};
pub use self::transfer::{Export, Import};
use crate::disk::Disk;
use crate::pool::Pool;
use crate::simulate::Simulate;
use crate::trace::Trace;
use crate::units::parse_size;

const EXAMPLES: &str = "\
Examples:
  pagoda doctor                    is this host ready?
  pagoda doctor pool               and the way to the servers of its pool?
  pagoda run --name web1 --dram 1G -- qemu-system-x86_64 -m 4G -accel kvm disk.qcow2
  pagoda top                       what happens now
  pagoda vm explain web1           why it has the memory it has
  pagoda vm set web1 --shares 2000 --min 2G
  pagoda admit --memory 8G --min 2G     would such a VM be kept?
  pagoda vm snapshot web1 --name before-upgrade --disks
  pagoda vm restore web1 --from before-upgrade
  pagoda vm autosnapshot web1 --every 10m --keep 6 --no-disks
  pagoda vm clone web1 --count 20 --name job-%02d
  pagoda outbox set enc1 --space 512M   its files may take that much now
  pagoda simulate FILE.toml        what the memory policy would do
  pagoda disk ls                   disks in the memory of other machines
  pagoda host ping host2           what another host has free, and the way to it
  pagoda vm move web1 --to host2   web1 runs there then

Exit status:
  0  done
  1  failed; the message says what to do
  2  the command line is wrong
  3  the daemon, another host, or the etcd of a cluster cannot be reached
  4  there is no VM, outbox, snapshot, disk, server or host of that name
  5  there is no room for the VM, its outbox or the snapshot; the message says what is missing
  6  a snapshot, its restore, cloning, removal, export or import, or a move was refused, and nothing was changed
  7  a snapshot or a move was begun and given up, and its VM runs where it was; or clones were begun, and all are gone; or the file
     of an import stopped coming
  8  a move is undecided; `pagoda moves` says more
`run` ends with the status of the program it starts.";

/// Software-defined memory for virtual machines.
///
/// A VM runs in a fraction of the DRAM it was promised: what it uses stays in DRAM, what it does
/// not use moves to its own swap file and comes back when it is touched. Guests and QEMU are unmodified.
#[derive(Debug, Parser)]
#[command(name = "pagoda", version, after_help = EXAMPLES)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Run(Run),
    /// List the VMs, and those that have crashed
    Ls,
    Top(Top),
    /// Look at one VM or change it
    #[command(subcommand)]
    Vm(Vm),
    Moves(Moves),
    /// Look at this host
    #[command(subcommand)]
    Host(Host),
    Doctor(Doctor),
    Admit(Admit),
    #[command(name = "whatif")]
    WhatIf(WhatIf),
    Simulate(Simulate),
    #[command(subcommand)]
    Trace(Trace),
    #[command(subcommand)]
    Snapshot(Snapshots),
    #[command(subcommand)]
    Outbox(Outboxes),
    /// Lend memory to other machines, and see who lends
    #[command(subcommand)]
    Pool(Pool),
    /// Disks in the memory of other machines
    #[command(subcommand)]
    Disk(Disk),
    /// Print completions for a shell
    ///
    /// For bash, for example: pagoda completion bash > /etc/bash_completion.d/pagoda
    Completion {
        shell: Shell,
    },
    /// Write the manual pages into a directory
    Man {
        dir: PathBuf,
    },
}

/// Start a program whose memory Pagoda manages
///
/// For QEMU, its own options say how much memory the VM has; they are rewritten so that the memory
/// is Pagoda's, and all else stays. Any other program needs --plain and --memory: it finds the
/// paths of its memory files in PAGODA_RAM, opens them by its libc and maps them shared, whole, once.
///
/// --memory is what the guest sees, --dram the most of it that is ever in DRAM, --min what always may be; in between
/// the memory policy decides, by shares and by what the VMs use.
///
/// Everything is checked first. If the program cannot be started, nothing is left behind.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A VM of 4 GiB in at most 1 GiB of DRAM:
    pagoda run --name web1 --dram 1G -- qemu-system-x86_64 -m 4G -accel kvm disk.qcow2
  Two NUMA nodes, the room on the swap disk made sure of:
    pagoda run --name db --dram 2G --reserve-swap -- qemu-system-x86_64 -m 8G \\
      -object memory-backend-ram,id=a,size=4G -object memory-backend-ram,id=b,size=4G \\
      -numa node,memdev=a -numa node,memdev=b -accel kvm disk.qcow2
  At least 2 GiB of DRAM whatever others do, twice the usual weight, pages shared with VMs of the same tenant:
    pagoda run --name db --min 2G --shares 2000 -- qemu-system-x86_64 -m 8G -accel kvm db.qcow2
  What does not fit into DRAM goes to the memory of other machines, and to the swap file when that is full:
    pagoda run --name db --dram 2G --remote pool: -- qemu-system-x86_64 -m 8G -accel kvm db.qcow2
  Restored from its newest snapshot when QEMU crashes:
    pagoda run --name web1 --on-crash restore -- qemu-system-x86_64 -m 4G -accel kvm disk.qcow2
  With an outbox of 256 MiB, whose files the host serves (guest: mount -t virtiofs outbox /mnt/out):
    pagoda run --name enc1 --outbox 256M --outbox-listen 127.0.0.1:8080 -- qemu-system-x86_64 -m 4G -accel kvm disk.qcow2
  A program of yours:
    pagoda run --plain --name cache --memory 2G --dram 512M -- ./my-cache")]
pub struct Run {
    /// Name of the VM [default: that of QEMU's -name]
    #[arg(long)]
    pub name: Option<String>,
    /// Memory of the VM, such as 4G [default: what QEMU's -m says]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    #[command(flatten)]
    pub spec: VmSpec,
    /// The program is not QEMU; it maps the files in PAGODA_RAM itself
    ///
    /// Its memory is not inherited over fork: a child that touches it dies by SIGSEGV. Start other programs by posix_spawn or exec.
    #[arg(long, requires = "memory", requires = "name")]
    pub plain: bool,
    /// Add no generation id
    ///
    /// QEMU for the machines pc and q35 gets the device vmgenid, if it has none. By its number, which differs in each restore and
    /// each clone, a guest learns that it is a copy, and makes its random numbers anew. A QEMU that takes the state over from
    /// this one has to have the device too.
    #[arg(long)]
    pub no_vmgenid: bool,
    #[command(flatten)]
    pub crash: CrashOptions,
    #[command(flatten)]
    pub outbox: OutboxOptions,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Watch the VMs live
///
/// The columns are esxtop's: MEMSZ is the memory of a VM, GRANT what of it is in DRAM, TCHD what it has touched and
/// still has, ACTV its working set, TGT what the memory policy allots to it; SHRD is content that it shares, SAVED
/// the DRAM saved by that; MCTLSZ is what the guest has given up to its balloon, MCTLTGT what it should give up;
/// SWCUR is what is only in swap, SWR/s and SWW/s are MiB read from and written to it. ZERO is what is nowhere
/// because it is all zero, FLT/s is page faults answered, and P50 and P99 are microseconds per fault of the slowest
/// cause since the VM started. If a VM has an outbox, OUTSZ is its space, OUTUSE what of it is used, TX/s MiB that clients have
/// acknowledged, BLOCK% the part of the last period in which a writer waited for room, and SLO whether its SLO can be kept.
///
/// Above stand the host's state (high, soft, hard, low, by free memory) and the sums over all VMs. A narrow terminal
/// shows the most important columns. Keys: up and down choose a VM whose faults are shown by cause, q quits.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda top
  pagoda top --batch 10 --interval 1 > web1.txt    ten samples, without a terminal
  pagoda top --batch 60 --json                     one JSON object a sample
  pagoda top --svg top.svg                         one sample as a picture, for a report")]
pub struct Top {
    #[command(flatten)]
    pub pace: Pace,
    /// Write one sample as a picture (SVG) into this file and end; "-" is standard output
    #[arg(long, value_name = "FILE", conflicts_with_all = ["batch", "json"])]
    pub svg: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Vm {
    /// Show all that is known of a VM, also of one that has crashed
    Show {
        name: String,
    },
    Set(VmSet),
    /// Draw how many of a VM's uses would miss with less DRAM, or more
    ///
    /// The curve stands on sampled pages and on pages that came back from swap. Marks show what the policy allots to
    /// the VM now, and its memory. For the numbers: pagoda vm mrc db --json
    Mrc {
        name: String,
    },
    /// Let a VM go on that Pagoda has stopped
    ///
    /// Pagoda stops a VM when its swap disk is full or fails, and loses nothing. `pagoda vm show`
    /// says why; put that right first.
    Cont {
        name: String,
    },
    /// Say why a VM has the memory it has
    Explain {
        name: String,
    },
    /// Give up a VM that no program has attached to
    Rm {
        name: String,
    },
    /// Forget that a VM has crashed
    ///
    /// `pagoda ls` lists it no more. Its snapshots stay, and it can be restored from them.
    Forget {
        name: String,
    },
    Snapshot(TakeSnapshot),
    Autosnapshot(AutosnapshotOptions),
    Restore(Restore),
    Rollback(Rollback),
    Clone(CloneOptions),
    Move(MoveVm),
    /// Become the QEMU of a VM that comes from another host, as pagodad says on standard input
    #[command(hide = true)]
    StartArrived,
}

/// Change a running VM
///
/// All is checked together before anything changes, and takes effect at once.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
#[command(group = ArgGroup::new("change").required(true).multiple(true)
    .args(["dram", "balloon_target", "sample_pages", "sample_period"]))]
#[command(after_help = "\
Examples:
  pagoda vm set web1 --dram 2G
  pagoda vm set web1 --balloon-target 3G     the guest gives up what it has beyond 3 GiB
  pagoda vm set db --shares 4000 --min 3G --dram all
  pagoda vm set db --sample-pages 200 --sample-period 10")]
pub struct VmSet {
    pub name: String,
    /// The most DRAM it may have, such as 2G, or all
    #[arg(long, value_name = "SIZE|all", value_parser = dram)]
    pub dram: Option<DramLimit>,
    /// Memory the guest should keep, such as 3G, or off to give it all back
    ///
    /// Its balloon driver takes the rest, as far as the guest can do without. A guest that has no driver, still
    /// boots or ignores the request is paged out to this size instead. `pagoda vm explain` says how it goes.
    #[arg(long, value_name = "SIZE|off", value_parser = balloon_target)]
    pub balloon_target: Option<BalloonTarget>,
    // The changes that need no more than the option's value.
    #[command(flatten)]
    pub patch: VmPatch,
    #[command(flatten)]
    pub sampling: SamplingOptions,
}

#[derive(Debug, Subcommand)]
pub enum Host {
    /// Show the host's memory, its policy, directories and settings as the daemon sees them
    Show,
    Set(HostSet),
    /// List this host's key and the hosts that it trusts
    Ls,
    Trust(HostTrust),
    /// Trust a host no more
    Untrust {
        name: String,
    },
    /// Ask a trusted host what it has free, and how fast the way to it is
    Ping {
        name: String,
    },
    Drain(HostDrain),
}

/// Check whether this host can run VMs under Pagoda, and say what to change
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Doctor {
    #[command(subcommand)]
    pub of: Option<DoctorOf>,
    /// Directory for swap files to check [default: the running daemon's, else /var/lib/pagoda/swap]
    #[arg(long, value_name = "DIR")]
    pub swap_dir: Option<PathBuf>,
    /// The QEMU program to check
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub qemu: String,
}

/// What else can be checked.
#[derive(Debug, Subcommand)]
pub enum DoctorOf {
    /// Check whether this machine reaches the servers of its pool, and how fast they answer
    Pool(PoolDir),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn mistakes_are_refused() {
        let check = |line: &str, expected: ErrorKind| {
            let error = Cli::try_parse_from(line.split_whitespace()).unwrap_err();
            assert_eq!(error.kind(), expected, "{line}");
        };
        check("pagoda run --name a", ErrorKind::MissingRequiredArgument);
        check("pagoda run --on-crash reboot -- qemu", ErrorKind::ValueValidation);
        check("pagoda vm autosnapshot a", ErrorKind::MissingRequiredArgument);
        check("pagoda vm autosnapshot a --every 10", ErrorKind::ValueValidation);
        check("pagoda vm autosnapshot a --off --keep 3", ErrorKind::ArgumentConflict);
        check("pagoda vm autosnapshot a --off --every 1h", ErrorKind::ArgumentConflict);
        check("pagoda run --plain --name a -- x", ErrorKind::MissingRequiredArgument);
        check("pagoda run --dram 1 -- qemu", ErrorKind::ValueValidation);
        check("pagoda run --outbox 1 -- qemu", ErrorKind::ValueValidation);
        check("pagoda run --outbox 1K -- qemu", ErrorKind::ValueValidation);
        check("pagoda run --outbox 1G --outbox-listen 8080 -- qemu", ErrorKind::ValueValidation);
        check("pagoda run --outbox-listen 127.0.0.1:8080 -- qemu", ErrorKind::MissingRequiredArgument);
        check("pagoda top --interval 0", ErrorKind::ValueValidation);
        check("pagoda top --batch 0", ErrorKind::ValueValidation);
        check("pagoda vm set a --dram some", ErrorKind::ValueValidation);
        check("pagoda vm set a --balloon-target all", ErrorKind::ValueValidation);
        check("pagoda vm set a", ErrorKind::MissingRequiredArgument);
        check("pagoda vm set a --shares 0", ErrorKind::ValueValidation);
        check("pagoda run --min 2 -- qemu", ErrorKind::ValueValidation);
        check("pagoda run --share-group a/b -- qemu", ErrorKind::ValueValidation);
        check("pagoda run --remote pool:copies=3 -- qemu", ErrorKind::ValueValidation);
        check("pagoda host set --idle-tax 101%", ErrorKind::ValueValidation);
        check("pagoda host set --thresholds 1,2,3,4", ErrorKind::ValueValidation);
        check("pagoda host set --json", ErrorKind::MissingRequiredArgument);
        check("pagoda admit --min 1G", ErrorKind::MissingRequiredArgument);
        check("pagoda whatif a", ErrorKind::MissingRequiredArgument);
        check("pagoda vm move a", ErrorKind::MissingRequiredArgument);
        check("pagoda vm move a --to b --mode sideways", ErrorKind::InvalidValue);
        check("pagoda vm move a --to b --bandwidth 2GiB", ErrorKind::ValueValidation);
        check("pagoda vm move a --to b --downtime 30", ErrorKind::ValueValidation);
        check("pagoda vm move a --to b --on-timeout abort", ErrorKind::MissingRequiredArgument);
        check("pagoda vm move a --to b --dry-run --detach", ErrorKind::ArgumentConflict);
        check("pagoda moves show", ErrorKind::MissingRequiredArgument);
        check("pagoda outbox set", ErrorKind::MissingRequiredArgument);
        check("pagoda outbox set a --space often", ErrorKind::ValueValidation);
        check("pagoda outbox set a --weight heavy", ErrorKind::ValueValidation);
        check("pagoda run --outbox-slo 1 -- qemu", ErrorKind::MissingRequiredArgument);
        check("pagoda outbox set a --space 1K", ErrorKind::ValueValidation);
        check("pagoda outbox show", ErrorKind::MissingRequiredArgument);
        check("pagoda trace record", ErrorKind::MissingRequiredArgument);
        check("pagoda frobnicate", ErrorKind::InvalidSubcommand);
        check("pagoda ls --frobnicate", ErrorKind::UnknownArgument);
    }

    #[test]
    fn old_names_of_options_still_work() {
        for (new, old) in [
            ("pagoda run --remote pool: -- qemu", "pagoda run --far pool: -- qemu"),
            (
                "pagoda pool serve --size 1G --listen 10.0.0.5 --workers 2",
                "pagoda pool serve --size 1G --listen 10.0.0.5 --lanes 2",
            ),
        ] {
            let read = |line: &str| format!("{:?}", Cli::try_parse_from(line.split_whitespace()).unwrap().command);
            assert_eq!(read(old), read(new));
        }
    }

    #[test]
    fn options_of_the_program_are_its_own() {
        let line = "pagoda run --dram 1G -- qemu --dram -m 4G --json";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!(run.command, ["qemu", "--dram", "-m", "4G", "--json"]);
        assert!(!cli.global.json);
    }
}
