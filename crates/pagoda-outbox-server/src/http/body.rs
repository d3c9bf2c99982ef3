//! The bytes of one reply, as the connection takes them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Bytes;
use http_body::{Body, Frame};
use pagoda_outbox::{Ino, ReaderId};

use super::connection::Connection;
use super::piece::{Piece, Sending};
use super::site::Site;
use crate::outbox::Given;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A reader is attached as long as this or the connection has it: see [`Connection::finish`].
#[derive(Debug)]
pub struct FileBody {
    site: Arc<Site>,
    connection: Arc<Connection>,
    reader: ReaderId,
    ino: Ino,
    /// Everything below has been handed over.
    given: u64,
    /// Where the reply ends, if its length was promised.
    promised_end: Option<u64>,
}

impl FileBody {
    pub fn new(
        site: &Arc<Site>,
        connection: &Arc<Connection>,
        reader: ReaderId,
        ino: Ino,
        start: u64,
        promised_end: Option<u64>,
    ) -> FileBody {
        let (site, connection) = (Arc::clone(site), Arc::clone(connection));
        connection.begin();
        FileBody { site, connection, reader, ino, given: start, promised_end }
    }
}

impl Drop for FileBody {
    fn drop(&mut self) {
        self.connection.finish(self.reader);
    }
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if !this.connection.is_flushed(context.waker()) {
            return Poll::Pending;
        }
        let sending = if this.site.folios.may_be_large() { Sending::Copied } else { Sending::InPlace };
        match this.site.outbox.next(this.reader, this.ino, sending.piece_bytes(), context.waker()) {
            Err(error) => Poll::Ready(Some(Err(error.into()))),
            Ok(Given::Bytes { memory, offset, length }) => match Piece::load(&memory, offset, length, sending) {
                Ok(Piece { bytes, part }) => {
                    this.given = offset + length;
                    this.connection.hand_over(this.reader, offset..this.given, part);
                    Poll::Ready(Some(Ok(Frame::data(bytes))))
                }
                Err(error) => Poll::Ready(Some(Err(error.into()))),
            },
            Ok(Given::Wait) => Poll::Pending,
            // A file that was cut after its length had been promised ends the connection, not the reply.
            Ok(Given::End) if this.promised_end.is_some_and(|end| this.given < end) => {
                Poll::Ready(Some(Err("the file was cut short".into())))
            }
            Ok(Given::End) => Poll::Ready(None),
            Ok(Given::Broken) => Poll::Ready(Some(Err("the file's writer disappeared".into()))),
        }
    }
}
