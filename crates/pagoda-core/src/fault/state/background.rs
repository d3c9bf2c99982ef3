//! Where the background work of a machine stands.

/// Positions and times of the background work.
#[derive(Debug, Default)]
pub struct Background {
    /// When the queues aged last.
    pub aged_ms: u64,
    /// When sampling and trimming ran last.
    pub kept_ms: u64,
    /// Pages that had come and gone by then.
    pub pages_moved: u64,
    /// The next chunk to trim.
    pub trim_cursor: u32,
    /// The next chunk to bring back.
    pub restore_cursor: u32,
    /// Chunks that are still to be zapped so that it is known which are hot.
    pub to_learn: u32,
    /// A whole-chunk read failed. Nobody waits for a restore, so it tries again no sooner than the next housekeeping.
    pub restore_paused: bool,
}

impl Background {
    /// A whole-chunk read has failed.
    pub fn pause_restore(&mut self) {
        self.restore_paused = true;
    }
}
