//! The reply to who asks for a file.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, Version, header};
use axum::response::{IntoResponse, Response};
use pagoda_outbox::{Refusal, Selection, State};

use super::body::FileBody;
use super::connection::Connection;
use super::range::{Wanted, parse};
use super::site::{Site, not_found, unanswered};
use crate::link::answer::Found;

/// Where what is left of a file begins, if its beginning was delivered and given back.
const OLDEST: HeaderName = HeaderName::from_static("x-outbox-oldest");
const SNIFF: HeaderName = HeaderName::from_static("x-content-type-options");

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Whether a list of ETags has this one, or is `*`.
fn lists(list: &str, tag: &str) -> bool {
    list.split(',').map(str::trim).any(|one| one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag)
}

/// What the file is to be taken for, by its name's end. Never something that a browser would run for this site.
fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, end)| end) {
        Some("m3u8") => "application/vnd.apple.mpegurl",
        Some("ts") => "video/mp2t",
        Some("mp4" | "m4s") => "video/mp4",
        Some("mpd") => "application/dash+xml",
        Some("gz") => "application/gzip",
        Some("json") => "application/json",
        Some("txt" | "log") => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

pub fn file(site: &Arc<Site>, connection: &Arc<Connection>, request: &Request, found: &Found) -> Response {
    if !found.is_published {
        return (StatusCode::NOT_FOUND, "the file is sent when its writer has closed it\n").into_response();
    }
    let headers = request.headers();
    // A file that can still change has no tag: two replies of it need not be the same.
    let is_sealed = found.state == State::Sealed && found.is_complete;
    let tag = is_sealed.then(|| format!("\"{:x}-{:x}-{:x}\"", site.life, found.ino.0, found.size));
    if let Some(refused) = conditions(headers, tag.as_deref()) {
        return refused;
    }
    let mut wanted = parse(text(headers, &header::RANGE));
    if let Some(condition) = text(headers, &header::IF_RANGE)
        && tag.as_deref() != Some(condition)
    {
        wanted = Wanted::All;
    }
    if !found.is_complete && matches!(wanted, Wanted::Last(_)) {
        // Nobody knows yet where that begins.
        wanted = Wanted::All;
    }
    let Some(range) = wanted.of(found.size) else {
        let size = if found.is_complete { found.size.to_string() } else { "*".into() };
        let range = [(header::CONTENT_RANGE, format!("bytes */{size}"))];
        return (StatusCode::RANGE_NOT_SATISFIABLE, range, "there is nothing of that range\n").into_response();
    };
    let mut reply = Response::builder()
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::CONTENT_TYPE, content_type(request.uri().path()))
        .header(SNIFF, "nosniff");
    if let Some(tag) = tag {
        reply = reply.header(header::ETAG, tag);
    }
    let is_part = wanted != Wanted::All;
    if is_part {
        let size = if found.is_complete { found.size.to_string() } else { "*".into() };
        let range = format!("bytes {}-{}/{size}", range.start, range.end - 1);
        reply = reply.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
    }
    let has_length = is_part || found.is_complete;
    if !has_length && request.version() == Version::HTTP_10 {
        // Without chunks, a reply that is cut short looks like a whole one.
        return (StatusCode::HTTP_VERSION_NOT_SUPPORTED, "the file grows: ask by HTTP/1.1\n").into_response();
    }
    if has_length {
        reply = reply.header(header::CONTENT_LENGTH, range.end - range.start);
    }
    let body = if request.method() == Method::HEAD {
        if found.freed > range.start {
            return refusal(Refusal::Gone { oldest: found.freed }, is_part);
        }
        Body::empty()
    } else {
        match body(site, connection, found, range, has_length) {
            Ok(Ok(body)) => body,
            Ok(Err(refused)) => return refusal(refused, is_part),
            Err(_) => return unanswered(),
        }
    };
    reply.body(body).unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

fn body(
    site: &Arc<Site>,
    connection: &Arc<Connection>,
    found: &Found,
    range: Range<u64>,
    has_length: bool,
) -> io::Result<Result<Body, Refusal>> {
    let end = has_length.then_some(range.end);
    let attached = site.files.attach(found.ino, Selection { start: range.start, end })?;
    Ok(attached.map(|reader| Body::new(FileBody::new(site, connection, reader, range.start, end))))
}

/// `If-Match` and `If-None-Match` (RFC 9110, 13.2.2).
fn conditions(headers: &HeaderMap, tag: Option<&str>) -> Option<Response> {
    if let Some(list) = text(headers, &header::IF_MATCH)
        && !tag.is_some_and(|tag| lists(list, tag))
        && list.trim() != "*"
    {
        return Some((StatusCode::PRECONDITION_FAILED, "the file is another one\n").into_response());
    }
    let tag = tag?;
    let list = text(headers, &header::IF_NONE_MATCH)?;
    lists(list, tag).then(|| (StatusCode::NOT_MODIFIED, [(header::ETAG, tag.to_owned())]).into_response())
}

fn refusal(refused: Refusal, is_part: bool) -> Response {
    let words = format!("{refused}\n");
    match refused {
        Refusal::Gone { oldest } => {
            let status = if is_part { StatusCode::RANGE_NOT_SATISFIABLE } else { StatusCode::GONE };
            (status, [(OLDEST, oldest.to_string())], words).into_response()
        }
        Refusal::TooManyReaders => (StatusCode::SERVICE_UNAVAILABLE, words).into_response(),
        _ => not_found(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags() {
        assert!(lists("\"a\", W/\"b\"", "\"b\""));
        assert!(lists("*", "\"b\""));
        assert!(!lists("\"bb\"", "\"b\""));
        let headers = |name: HeaderName, value: &str| HeaderMap::from_iter([(name, value.parse().unwrap())]);
        let status = |headers, tag| conditions(&headers, tag).map(|reply| reply.status().as_u16());
        assert_eq!(status(headers(header::IF_NONE_MATCH, "\"a\""), Some("\"a\"")), Some(304));
        assert_eq!(status(headers(header::IF_NONE_MATCH, "\"a\""), Some("\"b\"")), None);
        assert_eq!(status(headers(header::IF_NONE_MATCH, "*"), None), None, "a file that grows has always changed");
        assert_eq!(status(headers(header::IF_MATCH, "\"a\""), Some("\"b\"")), Some(412));
        assert_eq!(status(headers(header::IF_MATCH, "\"a\""), None), Some(412));
        assert_eq!(status(headers(header::IF_MATCH, "*"), None), None);
        assert_eq!(content_type("/vm/seg1.ts"), "video/mp2t");
        assert_eq!(content_type("/vm/page.html"), "application/octet-stream");
    }
}
