//! What the command line says to `pagoda disk`.

use clap::Subcommand;
use pagoda_cli::options::{Export, PoolDir};

use crate::units::parse_size;

#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Make a disk
    ///
    /// Nothing is stored for it until it is written to. With two copies, each page is in the memory of two servers,
    /// and one of them may die.
    ///
    /// In a cluster its name is taken for all machines. Another machine can export it that has the same pool.key and
    /// a copy of the disk's record, DIR/disks/NAME.toml.
    Create {
        #[command(flatten)]
        pool_dir: PoolDir,
        name: String,
        /// A multiple of 4096 bytes, such as 64G
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: u64,
        /// Servers that have each page
        #[arg(long, value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
        copies: u8,
        /// Of the size, what servers keep room for from now on, whatever others take
        ///
        /// What is not reserved is taken from what servers have left when it is first written to.
        #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
        reserve: u64,
    },
    /// List the disks of a pool
    Ls {
        #[command(flatten)]
        pool_dir: PoolDir,
    },
    /// Show all that is known of a disk, and whether its servers answer
    ///
    /// SHORT is what the map says: a server that has just died counts as having its copies until whoever exports the disk has
    /// noticed. So its servers are asked as well. Another one may go when nothing is short and all that are named answer.
    Show {
        #[command(flatten)]
        pool_dir: PoolDir,
        name: String,
    },
    /// Remove a disk and give its memory back
    Rm {
        #[command(flatten)]
        pool_dir: PoolDir,
        name: String,
        /// Forget it even where its servers do not answer: they keep its memory until they end
        #[arg(long)]
        force: bool,
    },
    /// Seal a disk, so that many can read it at a time
    ///
    /// Nobody writes to it any more, ever: to change it, copy it to a new one. From then on `disk export` offers it
    /// read-only, on any number of machines at a time (in a cluster, with a copy of its record), such as the image that
    /// VMs start from. Its copies are still made anew when servers go: whoever exports it sees to that.
    Share {
        #[command(flatten)]
        pool_dir: PoolDir,
        name: String,
        /// The only way in which a disk can be shared
        #[arg(long, required = true)]
        read_only: bool,
        /// Keep one copy of each part, and one of parity for four parts, at five servers: a server may go, for a quarter more
        /// memory instead of twice as much
        ///
        /// Also of a disk that is sealed already. Reading what was at a server that is gone takes longer, until it was made anew.
        #[arg(long)]
        parity: bool,
        /// Take the disk away from whoever exports it: what that one had not answered is not written
        #[arg(long)]
        take_over: bool,
    },
    Export(Export),
}
