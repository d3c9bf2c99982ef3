//! What the command line says to `pagoda pool`.

use clap::{Args, Subcommand};
use pagoda_cli::options::{Dir, PoolDir, Serve, Try};

use crate::cli::Pace;

#[derive(Debug, Subcommand)]
pub enum Pool {
    Try(Try),
    Serve(Serve),
    /// List the servers and what they have free
    ///
    /// The servers are those that etcd knows, and those in the file `servers` of the pool's directory, a line for each:
    /// its number, address, public key, and zone (servers in different zones do not fail together). `pagoda pool serve`
    /// prints its line. Ends with status 3 while etcd does not answer: nothing can be placed anew or taken over then.
    Ls {
        #[command(flatten)]
        pool_dir: PoolDir,
    },
    Top(Top),
    Drain(Drain),
    /// Keys of this machine and of those that may use its memory
    #[command(subcommand)]
    Key(Key),
}

/// Watch the servers live
///
/// SIZE is what a server lends, USED what of it disks have, FREE what they may still get; DISKS have pages there, CLNTS
/// are sessions of clients. RD/s and WR/s are MiB that clients read and write there, RTT is the round trip from here in
/// microseconds. STATE is up, silent, or draining. PRESSURE is what the server asks of its clients: none, yellow (no
/// new slabs), orange (to move what they have there), red (to drop what has another copy).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda pool top
  pagoda pool top --json                           one sample
  pagoda pool top --batch 60 --json                one JSON object a sample")]
pub struct Top {
    #[command(flatten)]
    pub pool_dir: PoolDir,
    #[command(flatten)]
    pub pace: Pace,
}

/// Have everything moved from a server to others, and end it
///
/// What TERM does at the server's own machine, but without an end to its patience: it ends when it has nothing left.
/// This machine's key must be one that the server's operator has added with `pagoda pool key add --admin`. Disks move
/// their pages while they are exported, as far as other servers have room.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda pool drain 3
  pagoda pool drain 3 --cancel

Exit status:
  0  nothing is left there, and the server ends
  1  something is: nothing moved in time, or the server does not do it for this machine
  4  there is no server of that number")]
pub struct Drain {
    #[command(flatten)]
    pub pool_dir: PoolDir,
    /// Number of the server, as `pagoda pool ls` shows it
    #[arg(value_name = "SERVER")]
    pub server: u32,
    /// Stop waiting when nothing has moved for so long; the server goes on
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
    /// Let the server go on lending after all
    #[arg(long)]
    pub cancel: bool,
}

#[derive(Debug, Subcommand)]
pub enum Key {
    /// Make this machine's key and the pool's, where they are missing
    ///
    /// All machines of a pool have the same pool key: copy the file `pool.key` from the first machine into the
    /// directory of each other one before this command is run there.
    Init {
        #[command(flatten)]
        dir: Dir,
    },
    /// Let a machine use the memory that is lent here
    ///
    /// A server that runs takes it up within a second.
    Add {
        #[command(flatten)]
        dir: Dir,
        /// Its public key, as `pagoda pool key ls` shows it there
        #[arg(value_name = "PUBLIC-KEY")]
        key: String,
        /// Its name, for people
        #[arg(long, default_value = "-")]
        name: String,
        /// Let it also drain the server here, which ends it (`pagoda pool drain`); for a key that was added before, too
        #[arg(long)]
        admin: bool,
    },
    /// Let a machine use the memory that is lent here no more
    ///
    /// A server that runs ends the machine's sessions within a second. What the machine's disks and VMs have here is lost to it,
    /// and takes room until the server ends: move them first (`pagoda pool drain`), unless the machine is in wrong hands.
    Rm {
        #[command(flatten)]
        dir: Dir,
        /// Its public key, or its name if no other has it, as `pagoda pool key ls` shows them
        #[arg(value_name = "PUBLIC-KEY|NAME")]
        key: String,
    },
    /// Show the public keys: this machine's, and those that may use its memory
    Ls {
        #[command(flatten)]
        dir: Dir,
    },
}
