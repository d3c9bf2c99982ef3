//! A broken invariant, on its way to the loop.

use std::fmt::{Display, Formatter, Result};

/// Why nothing of this VM may change any more. An owner that finds an invariant broken stops what it does and returns this;
/// the loop halts the VM ([`super::Engine`]).
#[derive(Debug, PartialEq, Eq)]
pub struct Broken(String);

impl From<&str> for Broken {
    fn from(why: &str) -> Broken {
        Broken(why.to_owned())
    }
}

impl From<String> for Broken {
    fn from(why: String) -> Broken {
        Broken(why)
    }
}

impl Display for Broken {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(&self.0)
    }
}
