//! What the command `pagoda` and the program of its servers, `pagoda-server`, have in common.
//!
//! The command shows the help and the manual pages of the servers and checks their options. Then it becomes
//! `pagoda-server`, which reads the same options again. So they are declared here, once. Both programs also print and end
//! alike: what a script reads of a server does not depend on which of the two wrote it.

pub mod exit;
pub mod options;
pub mod output;
pub mod units;
