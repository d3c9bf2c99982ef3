//! Bytes of a file on their way into the body of a request.

use std::time::Duration;

use tokio::time::timeout;

use crate::body::Feed;
use crate::failure::{Cause, Failure, Trouble};
use crate::limit::{Limiter, turn_bytes, wait_turn};
use crate::source::{Source, take};
use crate::status::Progress;

/// The most that is taken of a file at once.
pub const PIECE_BYTES: usize = 256 << 10;
/// A server that takes nothing for so long is given up: the attempt fails.
pub const STALL_MAX: Duration = Duration::from_secs(60);

/// How a piece may be sent, and where it is noted.
#[derive(Debug, Clone, Copy)]
pub struct Way<'a> {
    pub limiters: &'a [Limiter],
    pub progress: &'a Progress,
}

impl Way<'_> {
    /// The most that should be sent at once.
    pub fn piece_bytes(&self) -> usize {
        usize::try_from(turn_bytes(self.limiters)).unwrap_or(usize::MAX).min(PIECE_BYTES)
    }

    pub async fn wait_turn(&self, bytes: usize) {
        wait_turn(self.limiters, bytes as u64).await;
    }

    pub fn note_sent(&self, sent: u64) {
        self.progress.send_modify(|status| status.sent = sent);
    }

    pub fn note_acknowledged(&self, acknowledged: u64) {
        self.progress.send_modify(|status| status.acknowledged = status.acknowledged.max(acknowledged));
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Fed {
    /// Everything up to `end` of the file, which was to be sent.
    All { end: u64 },
    /// The connection takes no more of it. It knows why.
    NotTaken,
}

/// Gives `feed` the bytes of `source` from `start` on: up to `end`, or as far as the file goes.
pub async fn pump<S: Source>(
    source: &mut S,
    start: u64,
    end: Option<u64>,
    feed: Feed,
    way: Way<'_>,
) -> Result<Fed, Trouble> {
    let mut at = start;
    while end.is_none_or(|end| at < end) {
        let left = end.map_or(u64::MAX, |end| end - at);
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(way.piece_bytes());
        let Some(bytes) = take(source, at, most).await? else {
            // A file that was said to go on.
            if end.is_some() {
                return Err(Cause::Broken.into());
            }
            break;
        };
        way.wait_turn(bytes.len()).await;
        at += bytes.len() as u64;
        match timeout(STALL_MAX, feed.send(bytes)).await {
            Err(_) => return Err(Failure::Stalled { limit: STALL_MAX }.into()),
            Ok(Err(_)) => return Ok(Fed::NotTaken),
            Ok(Ok(())) => way.note_sent(at),
        }
    }
    if end.is_some() {
        return Ok(Fed::All { end: at });
    }
    match timeout(STALL_MAX, feed.end()).await {
        Err(_) => Err(Failure::Stalled { limit: STALL_MAX }.into()),
        Ok(Err(_)) => Ok(Fed::NotTaken),
        Ok(Ok(())) => Ok(Fed::All { end: at }),
    }
}
