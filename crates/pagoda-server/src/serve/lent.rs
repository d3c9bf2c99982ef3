//! What is lent: locked memory, or room of a disk.

use std::path::Path;

use anyhow::{Result, anyhow};
use pagoda_cli::units::format_size;
use rmap::medium::Medium;
use rmap_io::host::{self, HostError};
use rmap_io::medium::{FileMedium, MediumError};

/// Memory that is lent stays in DRAM, or is not lent. `size` in bytes.
///
/// # Errors
/// The machine has less available, or it may not be locked.
pub fn lock_memory(size: u64) -> Result<()> {
    host::lock_memory(size).map_err(|error| match error {
        HostError::TooLittle { needed, available, .. } => anyhow!(
            "--size {}: this machine has {} available, and needs {} of that itself; give less",
            format_size(size),
            format_size(available),
            format_size(needed - size)
        ),
        other => other.into(),
    })
}

/// Room of a disk that is there before it is promised.
///
/// # Errors
/// The file system has less, or no file can be made there.
pub fn take_disk(dir: &Path, bytes: u64) -> Result<Box<dyn Medium>> {
    match FileMedium::create(dir, bytes) {
        Ok(medium) => {
            if let Err(error) = host::serve_io() {
                eprintln!(
                    "pagoda: the kernel does not count this as serving I/O ({error}): no host should swap to what depends on \
                     it; run as root with all capabilities for that"
                );
            }
            Ok(Box::new(medium))
        }
        Err(MediumError::TooLittle { dir, wanted, available }) => Err(anyhow!(
            "--size {}: the file system of {} has {} available; give less",
            format_size(wanted),
            dir.display(),
            format_size(available)
        )),
        Err(other) => Err(other.into()),
    }
}
