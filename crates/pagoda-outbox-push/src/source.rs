//! What is pushed: the bytes of one file, sealed or growing.

use std::future::Future;

use hyper::body::Bytes;

use crate::failure::Cause;

/// What there is at an offset of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// At least one byte. From now on these bytes do not change.
    Bytes(Bytes),
    /// The file ends here, and does not change any more.
    End,
    /// The file's writer disappeared: there will never be all of it.
    Broken,
    /// These bytes were given back; what there is begins at `oldest`.
    Gone { oldest: u64 },
}

/// The bytes of one file. All of them stay readable until they are acknowledged.
pub trait Source: Send {
    /// What there is from `offset` on, at most `most` bytes. Waits until there is something. It may be asked for the same bytes again,
    /// and may be dropped while it waits, which changes nothing.
    fn next(&mut self, offset: u64, most: usize) -> impl Future<Output = Next> + Send;

    /// How long the file is, if it does not change any more.
    fn length(&self) -> Option<u64>;

    /// The server has everything below for good: the memory is needed no more. May be told of the same bytes again.
    fn acknowledge(&mut self, up_to: u64);

    /// The S3 upload that the file's bytes are in; `None`: in none. It is said before anything of it is acknowledged. What is kept beyond
    /// the end of this process ([`remembered`](Source::remembered)) lets the next one go on.
    fn remember(&mut self, _upload: Option<&str>) {}

    /// What an earlier process has said to [`remember`](Source::remember).
    fn remembered(&self) -> Option<String> {
        None
    }
}

/// The bytes at `offset`; `None` at the end of the file.
pub async fn take<S: Source>(source: &mut S, offset: u64, most: usize) -> Result<Option<Bytes>, Cause> {
    match source.next(offset, most).await {
        Next::Bytes(bytes) => {
            // An empty piece would be asked for again without end.
            assert!(
                !bytes.is_empty() && bytes.len() <= most,
                "a source gives from 1 to {most} bytes, not {}",
                bytes.len()
            );
            Ok(Some(bytes))
        }
        Next::End => Ok(None),
        Next::Broken => Err(Cause::Broken),
        Next::Gone { oldest } => Err(Cause::GivenBack { oldest }),
    }
}
