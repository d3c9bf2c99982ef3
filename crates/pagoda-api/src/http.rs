//! One HTTP/1.1 exchange over a byte stream, as much of it as the control API needs.
//!
//! The request asks for `Connection: close`; a reply ends by `Content-Length`, by its last
//! chunk or with the stream (RFC 9112, section 6.3). Nothing here waits longer than the
//! stream's own time-outs, and no reply can make the reader keep more than the caps below.

use std::io::{self, BufRead, BufReader, Read, Write};

/// Longest line of a reply's head. hyper's and nginx' default for all of the head is 8 KiB.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Most header fields in a reply; hyper's own limit.
const HEADERS_MAX: usize = 100;

/// Largest body: a list of a thousand VMs with all their counters is about 4 MiB.
pub const BODY_BYTES_MAX: usize = 16 << 20;

/// A response is a reply that was read as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub body: Vec<u8>,
}

/// What can be wrong with a reply.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("connection")]
    Io(#[from] io::Error),
    #[error("the connection ended in the middle of the reply")]
    Truncated,
    #[error("the reply is not HTTP/1.1: {what}")]
    Malformed { what: String },
    #[error("the reply is larger than {limit_bytes} bytes")]
    TooLarge { limit_bytes: usize },
    /// What is sent or received, on this side.
    #[error("the file")]
    File(#[source] io::Error),
}

/// How the end of a body is found.
#[derive(Debug, PartialEq, Eq)]
enum Framing {
    Length(usize),
    Chunked,
    UntilClose,
}

mod transfer;

pub use transfer::{Download, download, upload};

/// Sends one request and reads its reply. `path` is sent as it is.
///
/// # Errors
/// The stream's errors and time-outs, and replies that break the protocol or the caps.
pub fn exchange<S: Read + Write>(
    stream: &mut S,
    method: &str,
    path: &str,
    body: Option<&[u8]>,
) -> Result<Response, HttpError> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nHost: pagoda\r\nConnection: close\r\n");
    if let Some(body) = body {
        request += "Content-Type: application/json\r\n";
        request += &format!("Content-Length: {}\r\n", body.len());
    }
    request += "\r\n";
    let mut request = request.into_bytes();
    request.extend_from_slice(body.unwrap_or_default());
    // One write: the server never sees a head without its body. A server that refuses early may
    // close before it has read everything; its reply says why, so read that first.
    let written = stream.write_all(&request).and_then(|()| stream.flush());
    match (read_response(&mut BufReader::new(stream)), written) {
        (Err(_), Err(error)) => Err(error.into()),
        (response, _) => response,
    }
}

/// Reads one reply; interim replies (1xx) are skipped.
fn read_response(input: &mut impl BufRead) -> Result<Response, HttpError> {
    loop {
        let status = parse_status(&read_line(input)?)?;
        let framing = read_headers(input)?;
        if (100..200).contains(&status) {
            continue;
        }
        let body = match framing {
            _ if status == 204 || status == 304 => Vec::new(),
            Framing::Length(bytes) => read_exactly(input, bytes)?,
            Framing::Chunked => read_chunks(input)?,
            Framing::UntilClose => read_to_end(input)?,
        };
        return Ok(Response { status, body });
    }
}

fn malformed(what: impl Into<String>) -> HttpError {
    HttpError::Malformed { what: what.into() }
}

/// One line without its end, which is CRLF or, from lax servers, LF.
fn read_line(input: &mut impl BufRead) -> Result<String, HttpError> {
    let mut line = Vec::new();
    input.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        return Err(if line.len() + 1 >= LINE_BYTES_MAX {
            HttpError::TooLarge { limit_bytes: LINE_BYTES_MAX }
        } else {
            HttpError::Truncated
        });
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    String::from_utf8(line).map_err(|_| malformed("a header is not text"))
}

fn parse_status(line: &str) -> Result<u16, HttpError> {
    let mut words = line.splitn(3, ' ');
    let status = match (words.next(), words.next()) {
        (Some("HTTP/1.1" | "HTTP/1.0"), Some(status)) if status.len() == 3 => status.parse().ok(),
        _ => None,
    };
    status.ok_or_else(|| malformed(format!("first line {line:?}")))
}

fn read_headers(input: &mut impl BufRead) -> Result<Framing, HttpError> {
    let mut framing = Framing::UntilClose;
    for _ in 0..=HEADERS_MAX {
        let line = read_line(input)?;
        if line.is_empty() {
            return Ok(framing);
        }
        let Some((name, value)) = line.split_once(':') else {
            return Err(malformed(format!("header {line:?}")));
        };
        let value = value.trim();
        if name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(malformed(format!("transfer coding {value:?}")));
            }
            framing = Framing::Chunked;
        } else if name.eq_ignore_ascii_case("content-length") && framing != Framing::Chunked {
            let bytes = value.parse().map_err(|_| malformed(format!("length {value:?}")))?;
            if framing != Framing::UntilClose && framing != Framing::Length(bytes) {
                return Err(malformed("two lengths"));
            }
            framing = Framing::Length(bytes);
        }
    }
    Err(malformed(format!("more than {HEADERS_MAX} headers")))
}

fn check_size(bytes: usize) -> Result<(), HttpError> {
    if bytes > BODY_BYTES_MAX {
        return Err(HttpError::TooLarge { limit_bytes: BODY_BYTES_MAX });
    }
    Ok(())
}

fn read_exactly(input: &mut impl BufRead, bytes: usize) -> Result<Vec<u8>, HttpError> {
    check_size(bytes)?;
    // Grows with what arrives, not with what is announced.
    let mut body = Vec::new();
    input.by_ref().take(bytes as u64).read_to_end(&mut body)?;
    if body.len() < bytes {
        return Err(HttpError::Truncated);
    }
    Ok(body)
}

fn read_to_end(input: &mut impl BufRead) -> Result<Vec<u8>, HttpError> {
    let mut body = Vec::new();
    input.by_ref().take(BODY_BYTES_MAX as u64 + 1).read_to_end(&mut body)?;
    check_size(body.len())?;
    Ok(body)
}

fn read_chunks(input: &mut impl BufRead) -> Result<Vec<u8>, HttpError> {
    let mut body = Vec::new();
    loop {
        let line = read_line(input)?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let bytes = usize::from_str_radix(digits, 16).map_err(|_| malformed(format!("chunk size {digits:?}")))?;
        if bytes == 0 {
            // Trailers, and the empty line that ends them.
            read_headers(input)?;
            return Ok(body);
        }
        check_size(body.len().saturating_add(bytes))?;
        body.append(&mut read_exactly(input, bytes)?);
        if !read_line(input)?.is_empty() {
            return Err(malformed("a chunk is longer than its size"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that has already said everything it will say.
    struct Canned<'a> {
        reply: &'a [u8],
        request: Vec<u8>,
    }

    impl Read for Canned<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.reply.read(buffer)
        }
    }

    impl Write for Canned<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.request.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn reply(bytes: &[u8]) -> Result<Response, HttpError> {
        read_response(&mut &bytes[..])
    }

    #[test]
    fn replies() {
        let check = |text: &str, status: u16, body: &str| {
            let got = reply(text.as_bytes()).unwrap();
            assert_eq!((got.status, got.body.as_slice()), (status, body.as_bytes()), "{text:?}");
        };
        check("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 200, "{}");
        check("HTTP/1.1 200 OK\r\ncontent-length:2\r\n\r\n{}rest", 200, "{}");
        check("HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", 200, "{}");
        check("HTTP/1.0 404 Not Found\r\n\r\nuntil the end", 404, "until the end");
        check("HTTP/1.1 204 No Content\r\n\r\n", 204, "");
        check("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, "x");
        check(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: 1\r\n\r\n",
            200,
            "abc0123456789",
        );
    }

    #[test]
    fn bad_replies() {
        let check = |text: &str, expected: &str| {
            let said = reply(text.as_bytes()).unwrap_err().to_string();
            assert!(said.contains(expected), "{text:?}: {said}");
        };
        check("", "ended in the middle");
        check("HTTP/1.1 200 OK\r\n", "ended in the middle");
        check("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", "ended in the middle");
        check("SSH-2.0-OpenSSH\r\n", "not HTTP/1.1");
        check("HTTP/1.1 abc\r\n", "not HTTP/1.1");
        check("HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "header");
        check("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "length");
        check("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "two lengths");
        check("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "larger than");
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "coding");
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk size");
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", "larger than");
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than");
        check(&format!("HTTP/1.1 200 OK\r\nX: {}\r\n", "x".repeat(LINE_BYTES_MAX)), "larger than");
        check(&format!("HTTP/1.1 200 OK\r\n{}", "X: y\r\n".repeat(HEADERS_MAX + 1)), "more than 100");
        let endless = [b"HTTP/1.1 200 OK\r\n\r\n".as_slice(), &vec![0; BODY_BYTES_MAX + 1]].concat();
        assert!(matches!(reply(&endless), Err(HttpError::TooLarge { .. })));
    }

    #[test]
    fn the_request() {
        let mut peer = Canned { reply: b"HTTP/1.1 204 x\r\n\r\n", request: Vec::new() };
        exchange(&mut peer, "POST", "/v1/vms", Some(b"{}")).unwrap();
        let text = String::from_utf8(peer.request).unwrap();
        assert!(text.starts_with("POST /v1/vms HTTP/1.1\r\nHost: "), "{text}");
        assert!(text.ends_with("\r\nContent-Length: 2\r\n\r\n{}"), "{text}");
    }
}
