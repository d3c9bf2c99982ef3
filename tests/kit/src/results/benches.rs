//! The benches there are, and which code a result of each stands for.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use super::code::Crates;
use crate::workspace::repository;

/// The name of a bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Latency and CPU per fault, by cause
    Fault,
    /// RAM of 2x and 4x DRAM against the kernel's swap
    Overcommit,
    /// Adaptive page-in against each fixed choice
    Adaptive,
    /// From everything paged out to full speed
    Recover,
    /// Everything in DRAM against plain huge pages
    Resident,
    /// Page-out decisions from 1 GiB to 1 TiB
    Queues,
    /// kill -9 of the daemon under load
    Crash,
    /// Plans for 1,000 VMs, a simulated day, the ESX paper's experiments in the simulator
    Policy,
    /// Estimates of the working set against what is touched, and what they cost
    Sample,
    /// Miss-ratio curves by sampling against an exact replay, and what they predict of running VMs
    Mrc,
    /// Memory taken by the guest's own driver, against a smaller VM
    Balloon,
    /// A guest that swaps by itself while the host pages out
    Paging,
    /// One to six identical guests, and two of them beside the kernel's KSM (figure 4 of the ESX paper)
    Share,
    /// 256 MiB taken from one idle VM, by balloon, by page-out and by free page reporting
    Reclaim,
    /// Two VMs of equal shares, one idle, without a tax and with one (figure 7 of the ESX paper)
    Tax,
    /// Five guests on 60 % too little memory, booting at once (figure 8 of the ESX paper)
    Reallocate,
    /// Pages of another machine's memory against bare datagrams, memcached and nbdkit
    Rmap,
    /// A disk in another process's memory over NBD, against nbdkit's
    Nbd,
    /// kill -9 of one of three servers of a disk with two copies, while fio writes and verifies
    Failover,
    /// SIGTERM to a server with 1 GiB, under load
    Drain,
    /// A disk over a network that loses, changes and reorders datagrams
    Loss,
    /// A disk taken over from an owner that is paused and resumed
    Handover,
    /// A disk over a link of 1 Gbit/s against this machine's disk (table 1 and figure 5 of the MemX paper)
    Disk,
    /// A disk of the pool as a host, a host's guest and a client inside a guest have it, against disks (table 1 and figure 5
    /// of the MemX paper)
    Table1,
    /// Quicksort of twice the DRAM with the pool as far tier (table 2 of the MemX paper)
    Far,
    /// One to eight VMs on one pool (figure 7 of the MemX paper)
    Fleet,
    /// Wrong pages by every way of pinning guest memory, and a guest's disk behind the page cache against plain QEMU
    Pins,
    /// A VM over restarts of a daemon that cannot tell whether its process runs
    Restart,
    /// A VM over restarts of a daemon of which a part does not work that paging does not need
    Optional,
    /// VMs made with reserved swap while the memory policy makes rounds
    Create,
    /// Ways to RAM that nobody manages, and what passes between plain QEMU and Pagoda
    Ways,
    /// Snapshots of a guest that writes all the time: how long it stands still, against QEMU's state alone
    Snapshot,
    /// From a command to a guest that goes on where a snapshot was taken, against QEMU's loadvm and a sweep over the file
    Restore,
    /// Room and reading of a chain of 16 snapshots, against a single one
    Chain,
    /// QEMU killed, to the first reply of the restored guest, against booting it
    Again,
    /// Clones of a warm VM, and many of them, against QEMU alone with a private mapping of the same memory
    Clone,
    /// A snapshot becomes a file, against its disk, zstd alone and `virsh save`
    Export,
    /// A VM moves to another host over 1 Gbit/s, into all its memory and into half, against a bare stream and QEMU's own migration
    Migrate,
    /// What runs in a VM after it has moved into half of its memory, against QEMU's own migration with kernel swap (figures 7 and 8 of the
    /// VMemDirect paper)
    AfterMove,
    /// A VM that leaves by two ways, to its destination and into a pool, against its move as a whole
    Split,
    /// Files that a guest publishes by its outbox, against its own network, nginx in it, and virtiofsd with nginx beside it
    Outbox,
    /// Sizes of outboxes by SLO, in simulation and with guests, against fixed sizes and a PI controller
    OutboxControl,
    /// All benches, one after another
    All,
}

impl Name {
    /// The benches that it stands for.
    pub fn expand(self) -> Vec<Name> {
        match self {
            Self::All => Self::value_variants().iter().copied().filter(|n| *n != Self::All).collect(),
            one => vec![one],
        }
    }

    /// As it is written on the command line.
    pub fn text(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }

    /// The crates that it measures.
    fn measures(self) -> &'static [&'static str] {
        const HOST: &[&str] = &["pagodad", "pagoda", "pagoda-shim"];
        match self {
            Self::Queues => &["pagoda-core"],
            Self::Chain => &["pagoda-image"],
            Self::Rmap => &["rmap-io"],
            Self::Nbd | Self::Failover | Self::Drain | Self::Loss | Self::Handover | Self::Disk | Self::Table1 => {
                &["pagoda", "pagoda-server"]
            }
            Self::Far | Self::Fleet => &["pagodad", "pagoda", "pagoda-server", "pagoda-shim"],
            Self::Outbox | Self::OutboxControl => &["pagodad", "pagoda", "pagoda-outbox-server", "pagoda-shim"],
            Self::Ways => &["pagodad", "pagoda", "pagoda-shim", "vm-tests"],
            _ => HOST,
        }
    }

    /// The module of `bench/src` that measures it.
    fn module(self) -> String {
        match self {
            Self::Reclaim => Self::Balloon.text(),
            Self::Fleet => Self::Far.text(),
            Self::Optional => Self::Restart.text(),
            Self::AfterMove => "after_move".to_owned(),
            Self::OutboxControl => "outbox_control".to_owned(),
            one => one.text(),
        }
    }

    /// The hash of the code that a result of today stands for.
    ///
    /// # Errors
    /// The sources cannot be read.
    pub fn code(self, crates: &Crates) -> Result<String> {
        let here = repository().join("bench/src");
        let module = self.module();
        let own = [here.join(format!("{module}.rs")), here.join(module)];
        let own: Vec<PathBuf> = own.into_iter().filter(|path| path.exists()).collect();
        crates.hash(self.measures(), &own)
    }
}

/// The hash of the code that a result of the bench of this name would stand for today; `None` if there is no such bench.
///
/// # Errors
/// The sources cannot be read.
pub fn code_of(bench: &str, crates: &Crates) -> Result<Option<String>> {
    Name::from_str(bench, false).ok().map(|name| name.code(crates)).transpose()
}
