//! The part of the command line of `pagoda` that this program serves.

use clap::{Parser, Subcommand};
use pagoda_cli::options::{Export, Global, Serve, Try};

/// Servers of a pool and exporters of its disks, as the command `pagoda` starts them.
#[derive(Debug, Parser)]
#[command(name = "pagoda-server", version)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Lend memory to other machines
    #[command(subcommand)]
    Pool(Pool),
    /// Disks in the memory of other machines
    #[command(subcommand)]
    Disk(Disk),
}

#[derive(Debug, Subcommand)]
pub enum Pool {
    Serve(Serve),
    Try(Try),
}

#[derive(Debug, Subcommand)]
pub enum Disk {
    Export(Export),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }
}
