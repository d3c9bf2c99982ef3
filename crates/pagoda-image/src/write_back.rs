//! How much of an image's content is in the page cache alone, while the image is filled.
//!
//! A sync takes as long as the disk needs for all that was not written yet. A process that is killed meanwhile lives on for that
//! long and keeps the locks of its files. The next daemon and its VMs wait for those. So content is synced in pieces while it
//! comes, and filling makes way if the disk falls behind. What a guest is about to change waits for nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use pagoda_core::units::Bytes;

/// As much is synced at once, at least.
const PIECE: Bytes = Bytes::from_mib(16);
/// If more than this is not synced, nothing is copied into the image that has time.
const BEHIND_MAX: Bytes = Bytes::from_mib(64);

/// Bytes of `pages`. One thread writes and one syncs.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    written: AtomicU64,
    synced: AtomicU64,
}

impl Progress {
    /// `pages` ends there by now.
    pub(crate) fn set_written(&self, end: Bytes) {
        self.written.store(end.0, Ordering::Release);
    }

    /// Syncs what was written, if it is a piece. Whether it was.
    pub(crate) fn sync_piece<E>(&self, sync: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        let (written, synced) = (self.written.load(Ordering::Acquire), self.synced.load(Ordering::Relaxed));
        if written.saturating_sub(synced) < PIECE.0 {
            return Ok(false);
        }
        sync()?;
        self.synced.store(written, Ordering::Release);
        Ok(true)
    }

    /// Whether the disk is so far behind that filling should wait.
    pub(crate) fn is_behind(&self) -> bool {
        let synced = self.synced.load(Ordering::Acquire);
        self.written.load(Ordering::Relaxed).saturating_sub(synced) > BEHIND_MAX.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_before_a_sync_is_synced_by_pieces() {
        let progress = Progress::default();
        progress.set_written(PIECE - Bytes(1));
        assert_eq!(progress.sync_piece(|| Err("too little")), Ok(false));
        progress.set_written(BEHIND_MAX + Bytes(1));
        assert!(progress.is_behind());
        assert_eq!(progress.sync_piece(|| Err("of the disk")), Err("of the disk"));
        assert!(progress.is_behind());
        // What comes during the sync is not synced by it.
        let sync = || {
            progress.set_written(BEHIND_MAX + PIECE + Bytes(1));
            Ok::<(), ()>(())
        };
        assert_eq!(progress.sync_piece(sync), Ok(true));
        assert!(!progress.is_behind());
        assert_eq!(progress.sync_piece(|| Ok::<(), ()>(())), Ok(true));
        assert_eq!(progress.sync_piece(|| Err(())), Ok(false));
    }
}
