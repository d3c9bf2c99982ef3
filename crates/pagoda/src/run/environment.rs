//! Names of variables by which processes of a VM learn who they are. The shim reads them (`crates/pagoda-shim/src/config.rs`).

/// The VM's secret, of its VMM.
pub const ENV_TOKEN: &str = "PAGODA_TOKEN";
/// Path of the daemon's attach socket.
pub const ENV_ATTACH: &str = "PAGODA_ATTACH";
