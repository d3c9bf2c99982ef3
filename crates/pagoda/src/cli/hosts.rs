//! The options of `pagoda host trust`.

use clap::Args;

/// Trust another host, which may ask this one what it has free
///
/// Trust goes one way: each of two hosts trusts the other by itself. The key comes from `pagoda host ls` on the other host. A host
/// of this name that is trusted already has the new key and address from now on.
#[derive(Debug, Args)]
#[command(after_help = "\
Example, on host1 and host2:
  host2# pagoda host ls                          shows host2's key
  host1# pagoda host trust host2 --key 3f5a...   and the other way round
  host1# pagoda host ping host2

The daemon listens for other hosts only if the section [hosts] of its configuration has `listen`.")]
pub struct HostTrust {
    /// What this host calls it
    pub name: String,
    /// Its public key: 64 hexadecimal digits
    #[arg(long, value_name = "KEY")]
    pub key: String,
    /// Where its daemon listens [default: its name, port 7075]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub address: Option<String>,
}
