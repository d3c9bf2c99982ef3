//! What the tests of several modules need: a userfaultfd on a guest's RAM, and folio settings that are put back.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::PAGE_SIZE;
pub use crate::guest::Guest;
use crate::host::{FolioSize, ShmemHuge};
use crate::ram::RamFile;
use crate::uffd::{self, Fault, Uffd};

/// A deadline for what happens at once on a working system.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const PAGE: u64 = PAGE_SIZE as u64;

pub fn ram(name: &str, len: u64) -> RamFile {
    RamFile::create(name, len, rustix::process::geteuid().as_raw()).unwrap()
}

/// A path of its own on a disk (hier(7): /var/tmp outlives a reboot, so it is none in memory).
pub fn disk_path(name: &str) -> PathBuf {
    let path = PathBuf::from(format!("/var/tmp/pagoda-sys-test-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// A userfaultfd of this process over all of `guest`.
pub fn armed(guest: Guest) -> Uffd {
    let uffd = Uffd::from_fd(uffd::create().unwrap()).unwrap();
    uffd.enable().unwrap();
    uffd.register(guest.at(0), guest.len()).unwrap();
    uffd
}

/// Waits for one fault.
pub fn next_fault(uffd: &Uffd) -> Fault {
    let mut faults = [Fault::default()];
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    while uffd.read(&mut faults).unwrap() == 0 {
        let mut polled = [PollFd::new(uffd, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(1), "no fault came");
    }
    faults[0]
}

/// The host's folio settings, changed for one test at a time and put back.
pub struct FolioSettings {
    before: [(FolioSize, Option<ShmemHuge>); 2],
    _alone: MutexGuard<'static, ()>,
}

static FOLIO_SETTINGS: Mutex<()> = Mutex::new(());

impl FolioSettings {
    /// Sets both sizes as far as this kernel and our rights allow; tests ask [`FolioSize::on_advice`] what they got.
    pub fn set(setting: ShmemHuge) -> FolioSettings {
        let alone = FOLIO_SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
        let before = [FolioSize::Chunk, FolioSize::Huge].map(|size| (size, size.setting()));
        for (size, _) in before {
            let _ = size.set(setting);
        }
        FolioSettings { before, _alone: alone }
    }
}

impl Drop for FolioSettings {
    fn drop(&mut self) {
        for (size, setting) in self.before {
            if let Some(setting) = setting {
                let _ = size.set(setting);
            }
        }
    }
}
