//! Files over the control socket: an export is the body of a reply, an import that of a request. Neither is ever whole in
//! memory. Whoever goes away in the middle ends both.

use std::convert::Infallible;
use std::io::{self, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use http_body::Frame;
use pagoda_api::{ApiError, EXPORT_DONE, EXPORT_FAILED, ErrorCode, Snapshot, SnapshotName};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::reply::{Refusal, Reply, ask};
use crate::registry::Registry;
use crate::snapshots::{self, Export};

/// Pieces of a file between the thread that makes or takes them and the connection.
const QUEUE: usize = 4;

/// A reply whose body is made by a thread of its own.
pub(super) fn reply_with(export: Export) -> Result<Response, Refusal> {
    let (sender, receiver) = channel(QUEUE);
    let started = std::thread::Builder::new().name("export".into()).spawn(move || send(&export, &sender));
    started.map_err(|error| Refusal(ApiError::new(ErrorCode::Internal, format!("start a thread: {error}"), None)))?;
    let fields = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream")),
        (header::TRAILER, HeaderValue::from_static("pagoda-export-done, pagoda-export-failed")),
    ];
    Ok((HeaderMap::from_iter(fields), Body::new(Frames(receiver))).into_response())
}

fn send(export: &Export, sender: &Sender<Frame<Bytes>>) {
    let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "it went away");
    let mut sink = |bytes: Vec<u8>| sender.blocking_send(Frame::data(bytes.into())).map_err(gone);
    let (name, value) = match export.run(&mut sink) {
        Ok(report) => (EXPORT_DONE, serde_json::to_string(&report)),
        Err(error) => {
            tracing::warn!("{}", error.message);
            (EXPORT_FAILED, serde_json::to_string(&error))
        }
    };
    // Without the field the client knows that the file is not whole.
    if let Ok(Ok(value)) = value.map(|json| HeaderValue::from_bytes(json.as_bytes())) {
        let fields = HeaderMap::from_iter([(HeaderName::from_static(name), value)]);
        let _ = sender.blocking_send(Frame::trailers(fields));
    }
}

/// A body that comes out of a channel.
struct Frames(Receiver<Frame<Bytes>>);

impl HttpBody for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|frame| frame.map(Ok))
    }
}

/// Makes a snapshot of the body of a request.
pub(super) async fn import(registry: Arc<Registry>, name: Option<SnapshotName>, body: Body) -> Reply<Snapshot> {
    let (sender, receiver) = channel(QUEUE);
    let work =
        ask(registry, move |registry| snapshots::import(&registry.images, name.as_ref(), Arriving::new(receiver)));
    // What is refused early takes no more of the body.
    let (reply, ()) = tokio::join!(work, forward(body, sender));
    reply
}

/// What comes of a body.
enum Piece {
    Bytes(Bytes),
    Failed(io::Error),
    /// The body is complete. Without this the client went away.
    End,
}

async fn forward(mut body: Body, sender: Sender<Piece>) {
    loop {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        let piece = match frame {
            None => Piece::End,
            Some(Err(error)) => Piece::Failed(io::Error::other(error)),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(bytes) => Piece::Bytes(bytes),
                // Fields behind the body: they say nothing here.
                Err(_) => continue,
            },
        };
        let is_last = !matches!(piece, Piece::Bytes(_));
        if sender.send(piece).await.is_err() || is_last {
            return;
        }
    }
}

/// Reads a body from the thread that works on it.
struct Arriving {
    receiver: Receiver<Piece>,
    rest: Bytes,
    is_over: bool,
}

impl Arriving {
    fn new(receiver: Receiver<Piece>) -> Arriving {
        Arriving { receiver, rest: Bytes::new(), is_over: false }
    }
}

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() && !self.is_over {
            match self.receiver.blocking_recv() {
                Some(Piece::Bytes(bytes)) => self.rest = bytes,
                Some(Piece::End) => self.is_over = true,
                Some(Piece::Failed(error)) => return Err(error),
                None => {
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "whoever sent the file went away"));
                }
            }
        }
        let len = self.rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&self.rest.split_to(len));
        Ok(len)
    }
}
