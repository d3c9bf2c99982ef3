//! How much DRAM a VM may have.

/// Guest RAM comes in huge pages of this size, so that its mappings can be huge when nothing is
/// short of memory.
pub const MEMORY_GRANULE_BYTES: u64 = pagoda_abi::REGION_ALIGN;

/// The smallest DRAM cap: a few chunks per vCPU in flight, read-ahead and the page-out headroom
/// have to fit beside the guest kernel's own hot set.
pub const DRAM_BYTES_MIN: u64 = 64 << 20;

/// At least one part in this many of a VM's memory stays DRAM: below it a VM does little but page.
pub const DRAM_FRACTION_MIN: u64 = 64;

/// The smallest DRAM cap a VM of `memory_bytes` may have.
#[must_use]
pub fn dram_bytes_min(memory_bytes: u64) -> u64 {
    let share = (memory_bytes / DRAM_FRACTION_MIN).next_multiple_of(MEMORY_GRANULE_BYTES);
    share.max(DRAM_BYTES_MIN).min(memory_bytes)
}

/// Checks a DRAM cap against the size of the VM.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_dram(dram_bytes: u64, memory_bytes: u64) -> Result<(), String> {
    let mib = |bytes: u64| bytes >> 20;
    if dram_bytes > memory_bytes {
        return Err(format!(
            "dram of {} MiB is more than the VM's memory of {} MiB; leave --dram out to give it all",
            mib(dram_bytes),
            mib(memory_bytes)
        ));
    }
    let min = dram_bytes_min(memory_bytes);
    if dram_bytes < min {
        return Err(format!(
            "dram of {} MiB is too little for a VM of {} MiB; the least is {} MiB",
            mib(dram_bytes),
            mib(memory_bytes),
            mib(min)
        ));
    }
    Ok(())
}
