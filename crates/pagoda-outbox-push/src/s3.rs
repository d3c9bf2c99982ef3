//! Files to S3: a small one by one PUT, any other by an upload in parts, also while it grows.
//!
//! The server's ETag for a part is its word that it has the part for good: from then on the part's memory is needed no more. An
//! attempt that failed leaves the upload as it is, and the next one goes on behind the parts that the server has. Each part and each
//! object goes with its MD5 (Content-MD5), which the server compares.

mod api;

use hyper::body::Bytes;
use md5::{Digest, Md5};

use self::api::Refused;
use crate::body::PushBody;
use crate::failure::{Cause, Failure, Trouble};
use crate::parts::{Upload, part_bytes};
use crate::pump::{PIECE_BYTES, Way, pump};
use crate::source::{Source, take};

pub use self::api::Api;

/// A sealed file of at most so many bytes is put at once.
const SINGLE_BYTES_MAX: u64 = 16 << 20;

/// A stretch of a file whose bytes do not change any more.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    start: u64,
    bytes: u64,
    md5: [u8; 16],
    /// The file ends with it.
    is_last: bool,
}

/// A file's way into a bucket.
#[derive(Debug)]
pub struct S3 {
    api: Api,
    /// No part has more bytes: they have to be in memory all together.
    part_bytes_max: u64,
    upload: Option<Upload>,
    /// What an earlier process knew was looked at.
    is_recalled: bool,
    /// The server has refused something of the upload, so it may not know it any more.
    is_doubtful: bool,
    /// The server was asked to complete the upload, and may have done so.
    may_be_complete: bool,
}

impl S3 {
    pub fn new(api: Api, part_bytes_max: u64) -> S3 {
        S3 { api, part_bytes_max, upload: None, is_recalled: false, is_doubtful: false, may_be_complete: false }
    }

    /// Sends what the server does not have yet. The bytes that it has then.
    pub async fn attempt<S: Source>(&mut self, source: &mut S, way: Way<'_>) -> Result<u64, Trouble> {
        self.recall(source, way).await?;
        if std::mem::take(&mut self.is_doubtful) && self.has_vanished().await {
            return self.settle_vanished(source).await;
        }
        let done = self.go_on(source, way).await;
        self.is_doubtful = self.upload.is_some() && matches!(done, Err(Trouble::Again(Failure::Refused { .. })));
        done
    }

    async fn go_on<S: Source>(&mut self, source: &mut S, way: Way<'_>) -> Result<u64, Trouble> {
        loop {
            let start = self.upload.as_ref().map_or(0, Upload::end);
            way.note_sent(start);
            let stretch = measure(source, start, self.wanted(source)?).await?;
            if self.upload.is_none() {
                if stretch.is_last {
                    return self.put(source, stretch, way).await;
                }
                self.create(source).await?;
            }
            if stretch.bytes > 0 {
                self.put_part(source, stretch, way).await?;
            }
            if stretch.is_last {
                return self.complete(source).await;
            }
        }
    }

    /// How many bytes the next request should have.
    fn wanted<S: Source>(&self, source: &S) -> Result<u64, Cause> {
        match &self.upload {
            Some(upload) => {
                // Behind the last possible part there may still be nothing.
                let number = upload.next_number(self.part_bytes_max);
                let is_at_end = source.length() == Some(upload.end());
                if is_at_end { Ok(0) } else { number.map(|number| part_bytes(number, self.part_bytes_max)) }
            }
            None => {
                let small = source.length().filter(|length| *length <= SINGLE_BYTES_MAX);
                Ok(small.unwrap_or_else(|| part_bytes(1, self.part_bytes_max)))
            }
        }
    }

    async fn put<S: Source>(&mut self, source: &mut S, stretch: Stretch, way: Way<'_>) -> Result<u64, Trouble> {
        let Stretch { start, bytes, md5, .. } = stretch;
        let (feed, body) = PushBody::fed(Some(bytes));
        self.api.put(md5, body, pump(source, start, Some(bytes), feed, way)).await?;
        source.acknowledge(bytes);
        way.note_acknowledged(bytes);
        Ok(bytes)
    }

    async fn create<S: Source>(&mut self, source: &mut S) -> Result<(), Trouble> {
        let id = self.api.create().await?;
        source.remember(Some(&id));
        self.upload = Some(Upload::new(id));
        Ok(())
    }

    async fn put_part<S: Source>(&mut self, source: &mut S, stretch: Stretch, way: Way<'_>) -> Result<(), Trouble> {
        let Some(upload) = &mut self.upload else { return Ok(()) };
        let Stretch { start, bytes, md5, .. } = stretch;
        let number = upload.next_number(self.part_bytes_max)?;
        let (feed, body) = PushBody::fed(Some(bytes));
        let feed = pump(source, start, Some(start + bytes), feed, way);
        match self.api.put_part(upload.id(), number, md5, body, feed).await {
            Ok(etag) => upload.add(etag, bytes),
            Err(Refused::NoSuchUpload) => return Err(self.lose(source)),
            Err(Refused::Other(trouble)) => return Err(trouble),
        }
        let end = upload.end();
        source.acknowledge(end);
        way.note_acknowledged(end);
        Ok(())
    }

    async fn complete<S: Source>(&mut self, source: &mut S) -> Result<u64, Trouble> {
        let Some(upload) = &self.upload else { return Err(Failure::UploadLost.into()) };
        let may_be_complete = std::mem::replace(&mut self.may_be_complete, true);
        match self.api.complete(upload).await {
            Ok(()) => self.finish(source),
            Err(Refused::NoSuchUpload) => {
                self.may_be_complete = may_be_complete;
                self.settle_vanished(source).await
            }
            Err(Refused::Other(trouble)) => Err(trouble),
        }
    }

    /// The server has the object.
    fn finish<S: Source>(&mut self, source: &mut S) -> Result<u64, Trouble> {
        let upload = self.upload.take().ok_or(Failure::UploadLost)?;
        source.remember(None);
        source.acknowledge(upload.end());
        Ok(upload.end())
    }

    /// Whether the server says that it does not know the upload. Some have other words for it when they are given a part.
    async fn has_vanished(&mut self) -> bool {
        let Some(upload) = &self.upload else { return false };
        let mut listed = Upload::new(upload.id().to_owned());
        // Any other failure is the attempt's to see.
        matches!(self.api.list(&mut listed).await, Err(Refused::NoSuchUpload))
    }

    /// The server does not know the upload: because it made the object of it and its answer was lost, or because the parts are lost.
    async fn settle_vanished<S: Source>(&mut self, source: &mut S) -> Result<u64, Trouble> {
        if let Some(upload) = &self.upload
            && self.may_be_complete
            && is_there(&mut self.api, upload).await?
        {
            return self.finish(source);
        }
        Err(self.lose(source))
    }

    /// The parts are lost. The next attempt begins at the start, if the bytes are still there.
    fn lose<S: Source>(&mut self, source: &mut S) -> Trouble {
        self.upload = None;
        self.may_be_complete = false;
        source.remember(None);
        Failure::UploadLost.into()
    }

    /// Goes on with the upload that an earlier process has begun.
    async fn recall<S: Source>(&mut self, source: &mut S, way: Way<'_>) -> Result<(), Trouble> {
        if self.is_recalled {
            return Ok(());
        }
        if let Some(id) = source.remembered() {
            // Kept for the case that it has to be aborted before the list is there.
            let mut upload = Upload::new(id);
            match self.api.list(&mut upload).await {
                // It is of another file, whatever led to that.
                Ok(()) if source.length().is_some_and(|length| length < upload.end()) => {
                    self.api.abort(upload.id()).await?;
                    source.remember(None);
                }
                Ok(()) => {
                    source.acknowledge(upload.end());
                    way.note_acknowledged(upload.end());
                    self.upload = Some(upload);
                }
                Err(Refused::NoSuchUpload) => source.remember(None),
                Err(Refused::Other(trouble)) => return Err(trouble),
            }
        }
        self.is_recalled = true;
        Ok(())
    }

    /// Removes what the server has of an upload that will not be completed. Nothing is left if it says so.
    pub async fn abort<S: Source>(&mut self, source: &mut S) -> Result<(), Failure> {
        let known = self.upload.as_ref().map(|upload| upload.id().to_owned());
        let Some(id) = known.or_else(|| source.remembered()) else { return Ok(()) };
        self.api.abort(&id).await?;
        self.upload = None;
        source.remember(None);
        Ok(())
    }

    /// What stays at the server if [`abort`](S3::abort) never succeeds.
    pub fn left<S: Source>(&self, source: &S) -> Option<String> {
        let known = self.upload.as_ref().map(|upload| upload.id().to_owned());
        let id = known.or_else(|| source.remembered())?;
        Some(format!("the upload {id} of {}", self.api.key()))
    }
}

/// Whether the object is what the parts of `upload` make.
async fn is_there(api: &mut Api, upload: &Upload) -> Result<bool, Failure> {
    let expected = upload.expected_etag();
    let Some(object) = api.look().await? else { return Ok(false) };
    let etag = object.etag.trim_matches('"');
    Ok(object.bytes == upload.end() && expected.is_some_and(|expected| expected.eq_ignore_ascii_case(etag)))
}

/// Reads up to `wanted` bytes from `start` on, for their MD5. They are read again when they are sent: to keep them would be memory
/// besides the file's own.
async fn measure<S: Source>(source: &mut S, start: u64, wanted: u64) -> Result<Stretch, Cause> {
    let mut md5 = Md5::new();
    let mut bytes = 0;
    let is_last = loop {
        let left = wanted - bytes;
        if left == 0 {
            break source.length() == Some(start + bytes);
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE_BYTES);
        let taken: Option<Bytes> = take(source, start + bytes, most).await?;
        let Some(taken) = taken else { break true };
        md5.update(&taken);
        bytes += taken.len() as u64;
    };
    Ok(Stretch { start, bytes, md5: md5.finalize().into(), is_last })
}
