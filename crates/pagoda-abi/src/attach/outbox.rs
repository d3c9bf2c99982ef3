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
    /// The space has so many files and directories.
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

/// Jobs in one packet.
pub const JOBS_MAX: usize = 24;
/// Bytes of a label that a guest gave a job. A shorter one ends with zeros, a longer one is cut.
pub const LABEL_BYTES: usize = 32;

/// What the process of an outbox has counted since it began, and which jobs it can still tell of. Its own word, as the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxCounts {
    /// Milliseconds since the process began: by this clock jobs began and ended.
    pub now_ms: u64,
    /// The number of the oldest job that it still has, and of the last that ended. Numbers begin with 1.
    pub oldest: u64,
    pub last: u64,
    /// Bytes that the guest has written.
    pub written: u64,
    /// Bytes that clients' TCP has acknowledged.
    pub acknowledged: u64,
    /// Microseconds in which a client waited for bytes that were there, or a writer for room.
    pub sending_us: u64,
    /// Microseconds in which at least one write waited for room.
    pub blocked_us: u64,
    /// Microseconds in which clients waited for bytes that were there, summed over clients.
    pub reading_us: u64,
    /// So many jobs have begun.
    pub began: u64,
    /// Jobs that never ended: their file was removed, or the guest has gone.
    pub given_up: u64,
    /// Writes that got "no space".
    pub refused: u64,
}

impl OutboxCounts {
    pub(super) const WORDS: usize = 11;

    pub(super) fn to_words(self) -> [u64; Self::WORDS] {
        let OutboxCounts { now_ms, oldest, last, written, acknowledged, sending_us, .. } = self;
        let OutboxCounts { blocked_us, reading_us, began, given_up, refused, .. } = self;
        [now_ms, oldest, last, written, acknowledged, sending_us, blocked_us, reading_us, began, given_up, refused]
    }

    pub(super) const fn of_words(words: [u64; Self::WORDS]) -> OutboxCounts {
        let [now_ms, oldest, last, written, acknowledged, sending_us, blocked_us, reading_us, began, given_up, refused] =
            words;
        OutboxCounts {
            now_ms,
            oldest,
            last,
            written,
            acknowledged,
            sending_us,
            blocked_us,
            reading_us,
            began,
            given_up,
            refused,
        }
    }
}

/// A job that has ended: a file that the guest wrote and published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxJob {
    /// One more than the job that ended before.
    pub number: u64,
    /// The job began and ended at these times, by the clock of [`OutboxCounts::now_ms`].
    pub began_ms: u64,
    pub ended_ms: u64,
    /// Microseconds that its writes waited for room.
    pub blocked_us: u64,
    /// Bytes of its file.
    pub output: u64,
    /// Bytes that were not delivered yet when it began.
    pub backlog: u64,
    /// The attribute `user.pagoda.mode` of its file is `on-close`.
    pub is_on_close: bool,
    /// `user.pagoda.priority`; 0 if the guest says nothing.
    pub priority: u32,
    /// `user.pagoda.job` and `user.pagoda.destination`: any bytes, for a guest has set them.
    pub id: [u8; LABEL_BYTES],
    pub destination: [u8; LABEL_BYTES],
}

impl OutboxJob {
    const WORDS: usize = 6;

    pub(super) fn to_words(self) -> [u64; Self::WORDS] {
        let OutboxJob { number, began_ms, ended_ms, blocked_us, output, backlog, .. } = self;
        [number, began_ms, ended_ms, blocked_us, output, backlog]
    }

    pub(super) const fn new(
        words: [u64; Self::WORDS],
        is_on_close: bool,
        priority: u32,
        id: [u8; LABEL_BYTES],
        destination: [u8; LABEL_BYTES],
    ) -> OutboxJob {
        let [number, began_ms, ended_ms, blocked_us, output, backlog] = words;
        OutboxJob { number, began_ms, ended_ms, blocked_us, output, backlog, is_on_close, priority, id, destination }
    }
}
