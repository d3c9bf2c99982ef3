//! Bodies without a limit: files that are sent and received piece by piece.

use std::io::{self, BufRead, BufReader, Read, Write};

use super::{
    Framing, HEADERS_MAX, HttpError, Response, malformed, parse_status, read_exactly, read_headers, read_line,
};

/// Bytes of a file that are sent or received at once.
const PIECE: usize = 256 << 10;

/// What came of a request for a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Download {
    /// All of it was handed on, and these fields came behind it.
    Done(Vec<(String, String)>),
    /// The daemon replied without a file, mostly with an error.
    Other(Response),
}

/// Sends one request, and hands the body of its reply to `sink`, which may refuse to take more. Fields may follow a body.
///
/// # Errors
/// The stream's errors and time-outs, replies that break the protocol, and those of `sink`.
pub fn download<S: Read + Write>(
    stream: &mut S,
    path: &str,
    body: &[u8],
    sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<Download, HttpError> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: pagoda\r\nConnection: close\r\nTE: trailers\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let request = [head.as_bytes(), body].concat();
    let written = stream.write_all(&request).and_then(|()| stream.flush());
    let mut input = BufReader::new(stream);
    let status = match read_line(&mut input).and_then(|line| parse_status(&line)) {
        Ok(status) => status,
        Err(error) => return Err(written.err().map_or(error, HttpError::Io)),
    };
    match read_headers(&mut input)? {
        Framing::Chunked if status < 300 => read_chunks_to(&mut input, sink).map(Download::Done),
        Framing::Length(bytes) => Ok(Download::Other(Response { status, body: read_exactly(&mut input, bytes)? })),
        _ => Err(malformed("a file without chunks")),
    }
}

fn read_chunks_to(
    input: &mut impl BufRead,
    sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<Vec<(String, String)>, HttpError> {
    let mut piece = vec![0; PIECE];
    loop {
        let line = read_line(input)?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let mut left = u64::from_str_radix(digits, 16).map_err(|_| malformed(format!("chunk size {digits:?}")))?;
        if left == 0 {
            return read_fields(input);
        }
        while left > 0 {
            let most = left.min(PIECE as u64) as usize;
            match input.read(&mut piece[..most]) {
                Ok(0) => return Err(HttpError::Truncated),
                Ok(len) => {
                    sink(&piece[..len]).map_err(HttpError::File)?;
                    left -= len as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !read_line(input)?.is_empty() {
            return Err(malformed("a chunk is longer than its size"));
        }
    }
}

/// The fields behind a body, their names in small letters.
fn read_fields(input: &mut impl BufRead) -> Result<Vec<(String, String)>, HttpError> {
    let mut fields = Vec::new();
    for _ in 0..=HEADERS_MAX {
        let line = read_line(input)?;
        if line.is_empty() {
            return Ok(fields);
        }
        let (name, value) = line.split_once(':').ok_or_else(|| malformed(format!("field {line:?}")))?;
        fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    Err(malformed(format!("more than {HEADERS_MAX} fields")))
}

/// Sends all that `input` has as the body of a request, and reads its reply. A server that has seen enough says so before the end.
///
/// # Errors
/// As [`super::exchange`], and those of `input`: the server then does not see the end of the body.
pub fn upload<S: Read + Write>(stream: &mut S, path: &str, input: &mut dyn Read) -> Result<Response, HttpError> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: pagoda\r\nConnection: close\r\nContent-Type: application/octet-stream\r\n\
         Transfer-Encoding: chunked\r\n\r\n"
    );
    let written = match stream.write_all(head.as_bytes()) {
        Ok(()) => send_chunks(stream, input)?,
        Err(error) => Err(error),
    };
    match (super::read_response(&mut BufReader::new(stream)), written) {
        (Err(_), Err(error)) => Err(error.into()),
        (response, _) => response,
    }
}

/// The stream's error is inside: a reply may be there all the same.
fn send_chunks(stream: &mut impl Write, input: &mut dyn Read) -> Result<io::Result<()>, HttpError> {
    let mut piece = vec![0; PIECE];
    loop {
        let len = match input.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(HttpError::File)?,
        };
        let sent = if len == 0 {
            stream.write_all(b"0\r\n\r\n")
        } else {
            let sent = stream.write_all(format!("{len:x}\r\n").as_bytes());
            sent.and_then(|()| stream.write_all(&piece[..len])).and_then(|()| stream.write_all(b"\r\n"))
        };
        if len == 0 || sent.is_err() {
            return Ok(sent.and_then(|()| stream.flush()));
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

    fn get(reply: &str) -> (Result<Download, HttpError>, Vec<u8>) {
        let (mut peer, mut file) = (Canned { reply: reply.as_bytes(), request: Vec::new() }, Vec::new());
        let mut sink = |bytes: &[u8]| {
            file.extend_from_slice(bytes);
            Ok(())
        };
        let got = download(&mut peer, "/x", b"{}", &mut sink);
        assert!(peer.request.ends_with(b"\r\n\r\n{}"));
        (got, file)
    }

    #[test]
    fn a_file_comes_with_the_fields_behind_it() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let (got, file) = get(&format!("{head}3\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-Done: {{}}\r\n\r\n"));
        assert_eq!(got.unwrap(), Download::Done(vec![("x-done".into(), "{}".into())]));
        assert_eq!(file, b"abc0123456789");
        let (got, _) = get("HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\n{}");
        assert_eq!(got.unwrap(), Download::Other(Response { status: 409, body: b"{}".to_vec() }));
        for cut in ["", "3\r\nab", "3\r\nabc\r\n", "3\r\nabc\r\n0\r\n", "3\r\nabcd\r\n", "zz\r\n"] {
            assert!(get(&format!("{head}{cut}")).0.is_err(), "{cut:?}");
        }
    }

    #[test]
    fn a_file_is_sent_in_chunks() {
        let reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
        let mut peer = Canned { reply, request: Vec::new() };
        let response = upload(&mut peer, "/x", &mut b"0123456789abcdef0".as_slice()).unwrap();
        assert_eq!((response.status, response.body), (200, b"{}".to_vec()));
        let text = String::from_utf8(peer.request).unwrap();
        assert!(text.ends_with("chunked\r\n\r\n11\r\n0123456789abcdef0\r\n0\r\n\r\n"), "{text}");
        let mut peer = Canned { reply, request: Vec::new() };
        let failing = io::Error::other("gone");
        struct Fails(Option<io::Error>);
        impl Read for Fails {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                self.0.take().map_or(Ok(0), Err)
            }
        }
        assert!(matches!(upload(&mut peer, "/x", &mut Fails(Some(failing))), Err(HttpError::File(_))));
        assert!(!peer.request.ends_with(b"0\r\n\r\n"), "the server must not take it for whole");
    }
}
