//! PUT of a whole file. It is acknowledged as a whole, so all of it stays in memory until the server has answered.

use hyper::header::{HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use url::Url;

use crate::body::PushBody;
use crate::failure::{Failure, Trouble};
use crate::http::{Ask, Http};
use crate::pump::{PIECE_BYTES, Way, pump};
use crate::source::{Source, take};

/// A file that was cut off so often while it grew is sent again when it is sealed. Servers wait for a pausing body only so long
/// (nginx: 60 s), and each attempt sends all of it.
const CUTS_MAX: u32 = 2;

/// A file's way to a server by PUT. Its address may be a secret.
pub struct Put {
    http: Http,
    url: Url,
    headers: Vec<(HeaderName, HeaderValue)>,
    /// The server wants to know the length before it takes the first byte.
    wants_length: bool,
    /// Attempts that failed in the middle of a growing file.
    cuts: u32,
}

impl Put {
    pub fn new(http: Http, url: Url, headers: Vec<(HeaderName, HeaderValue)>) -> Put {
        Put { http, url, headers, wants_length: false, cuts: 0 }
    }

    /// Sends all of `source`, also while it grows. The bytes that the server has then.
    pub async fn attempt<S: Source>(&mut self, source: &mut S, way: Way<'_>) -> Result<u64, Trouble> {
        way.note_sent(0);
        let mut length = source.length();
        if length.is_none() && (self.wants_length || self.cuts >= CUTS_MAX) {
            length = Some(wait_length(source).await?);
        }
        // A server that is connected to waits only so long.
        if length.is_none() {
            take(source, 0, 1).await?;
            length = source.length();
        }
        let done = self.send(source, length, way).await;
        if length.is_none() && matches!(done, Err(Trouble::Again(_))) && way.progress.borrow().sent > 0 {
            self.cuts += 1;
        }
        done
    }

    async fn send<S: Source>(&mut self, source: &mut S, length: Option<u64>, way: Way<'_>) -> Result<u64, Trouble> {
        let (feed, body) = PushBody::fed(length);
        let feed = pump(source, 0, length, feed, way);
        let ask = Ask { method: Method::PUT, url: &self.url, headers: self.headers.clone() };
        let reply = self.http.exchange(ask, body, feed).await?;
        if !reply.is_done() {
            let wants_length = matches!(reply.status, StatusCode::LENGTH_REQUIRED | StatusCode::NOT_IMPLEMENTED);
            self.wants_length |= length.is_none() && wants_length;
            return Err(reply.refusal().into());
        }
        let length = reply.sent.ok_or(Failure::Early { status: reply.status.as_u16() })?;
        source.acknowledge(length);
        way.note_acknowledged(length);
        Ok(length)
    }
}

/// The length of a file, when it has one.
async fn wait_length<S: Source>(source: &mut S) -> Result<u64, Trouble> {
    let mut at = 0;
    loop {
        if let Some(length) = source.length() {
            return Ok(length);
        }
        match take(source, at, PIECE_BYTES).await? {
            Some(bytes) => at += bytes.len() as u64,
            None => return Ok(at),
        }
    }
}
