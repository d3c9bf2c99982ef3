//! Remote memory as a VM's tier before its swap file.

use pagoda_abi::record::FAR_COPIES_MAX;
use serde::{Deserialize, Serialize};

/// Asks for a far tier in the pool that the daemon borrows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FarRequest {
    /// Servers that have each page: with one, its death stops the VM; with two, one of them may die.
    #[serde(default = "one")]
    pub copies: u8,
}

fn one() -> u8 {
    1
}

impl Default for FarRequest {
    fn default() -> Self {
        FarRequest { copies: one() }
    }
}

impl FarRequest {
    /// # Errors
    /// A sentence that says what would be right.
    pub fn check(self) -> Result<(), String> {
        if !(1..=FAR_COPIES_MAX).contains(&self.copies) {
            return Err(format!("{} copies of each page in remote memory: give 1 or {FAR_COPIES_MAX}", self.copies));
        }
        Ok(())
    }
}

/// What a VM has in remote memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FarInfo {
    pub copies: u8,
    /// Content that is in the pool, each page counted once.
    #[serde(default)]
    pub pool_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_copy_unless_two_are_asked_for() {
        let read = |text: &str| serde_json::from_str::<FarRequest>(text).ok();
        assert_eq!(read("{}"), Some(FarRequest::default()));
        assert_eq!(read(r#"{"copies":2}"#), Some(FarRequest { copies: 2 }));
        assert_eq!(read(r#"{"copies":-1}"#), None);
        assert_eq!(read(r#"{"copys":2}"#), None);
        let check = |copies: u8, good: bool| assert_eq!(FarRequest { copies }.check().is_ok(), good, "{copies}");
        check(0, false);
        check(1, true);
        check(2, true);
        check(3, false);
    }
}
