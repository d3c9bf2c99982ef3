//! What the process of an outbox says on its control connection.

/// What the process of an outbox says of it. A guest may have taken that process over: the reader checks what it relies on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxFigures {
    /// Bytes that it keeps to.
    pub space: u64,
    /// Bytes of pages that files have, or that are being given back.
    pub used: u64,
    /// Of these, what was delivered and goes when there is need.
    pub disposable: u64,
    /// Files and directories.
    pub files: u64,
    /// Clients that read now.
    pub readers: u64,
    /// Writes that wait for room now.
    pub waiting: u64,
    /// Bytes that the guest has written, since the process began; so the rest.
    pub written: u64,
    /// Bytes that clients' TCP has acknowledged.
    pub acknowledged: u64,
    /// Changes below a send cursor.
    pub refused: u64,
    /// Microseconds that writes have waited for room, summed over writes.
    pub blocked_us: u64,
}

impl OutboxFigures {
    pub(super) const WORDS: usize = 10;

    pub(super) fn to_words(self) -> [u64; Self::WORDS] {
        let OutboxFigures { space, used, disposable, files, readers, waiting, .. } = self;
        let OutboxFigures { written, acknowledged, refused, blocked_us, .. } = self;
        [space, used, disposable, files, readers, waiting, written, acknowledged, refused, blocked_us]
    }

    pub(super) const fn of_words(words: [u64; Self::WORDS]) -> OutboxFigures {
        let [space, used, disposable, files, readers, waiting, written, acknowledged, refused, blocked_us] = words;
        OutboxFigures { space, used, disposable, files, readers, waiting, written, acknowledged, refused, blocked_us }
    }
}
