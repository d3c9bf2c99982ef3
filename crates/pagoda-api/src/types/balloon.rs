//! What the API says of a VM's balloon.

use serde::{Deserialize, Serialize};

use super::dram::dram_bytes_min;

/// Checks a balloon target, the memory that a guest should keep, against the size of the VM.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_balloon_target(target_bytes: u64, memory_bytes: u64) -> Result<(), String> {
    let mib = |bytes: u64| bytes >> 20;
    if target_bytes > memory_bytes {
        return Err(format!(
            "a balloon target of {} MiB is more than the VM's memory of {} MiB; `off` gives it all",
            mib(target_bytes),
            mib(memory_bytes)
        ));
    }
    // A guest that cannot be asked is paged out to its target, so what holds for a cap holds here.
    let min = dram_bytes_min(memory_bytes);
    if target_bytes < min {
        return Err(format!(
            "a balloon target of {} MiB is too little for a VM of {} MiB; the least is {} MiB",
            mib(target_bytes),
            mib(memory_bytes),
            mib(min)
        ));
    }
    Ok(())
}

/// How far a guest has given memory up to its balloon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonInfo {
    /// Memory the guest should keep; all of it when the balloon is off.
    pub target_bytes: u64,
    /// Memory the guest was asked to keep so far.
    #[serde(default)]
    pub asked_bytes: Option<u64>,
    /// Memory the guest has given up.
    pub ballooned_bytes: u64,
    /// `off`, `probing`, `inflating`, `deflating`, `reached`, `resisted` or `unavailable`.
    pub state: String,
    /// Why it is in that state.
    pub reason: String,
    pub since_s: u64,
    /// The VM is paged out to its target, for its guest cannot be asked.
    pub paged_out: bool,
    /// When a guest that resisted is tried again.
    #[serde(default)]
    pub retry_in_s: Option<u64>,
    /// Times the guest resisted.
    pub resisted: u64,
    /// Times paging out had to take the balloon's place.
    pub fallbacks: u64,
    /// What the guest's driver reported last, if it does.
    #[serde(default)]
    pub guest: Option<GuestMemory>,
}

/// A guest's memory by its own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestMemory {
    pub free_bytes: u64,
    pub available_bytes: u64,
    /// Major faults are counted since the guest booted.
    pub major_faults: u64,
    /// Read from the guest's own swap since it booted.
    pub swap_in_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn balloon_targets() {
        let check = |target_mib: u64, expected: &str| match check_balloon_target(target_mib * MIB, 512 * MIB) {
            Ok(()) => assert_eq!(expected, "", "{target_mib}"),
            Err(said) => assert!(!expected.is_empty() && said.contains(expected), "{said}"),
        };
        check(512, "");
        check(64, "");
        check(513, "`off` gives it all");
        check(63, "the least is 64 MiB");
    }
}
