//! The bytes of one reply, as the connection takes them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Bytes;
use http_body::{Body, Frame};
use pagoda_outbox::{Ino, ReaderId};

use super::connection::Connection;
use crate::outbox::{Outbox, Piece};

/// Bytes that are taken out of a file at once. No more are on their way to the socket, so what is acknowledged is known in
/// steps of this size.
const PIECE_BYTES: u64 = 256 << 10;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A reader is attached as long as this or the connection has it: see [`Connection::finish`].
#[derive(Debug)]
pub struct FileBody {
    outbox: Arc<Outbox>,
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
        outbox: &Arc<Outbox>,
        connection: &Arc<Connection>,
        reader: ReaderId,
        ino: Ino,
        start: u64,
        promised_end: Option<u64>,
    ) -> FileBody {
        let (outbox, connection) = (Arc::clone(outbox), Arc::clone(connection));
        connection.begin();
        FileBody { outbox, connection, reader, ino, given: start, promised_end }
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
        match this.outbox.next(this.reader, this.ino, PIECE_BYTES, context.waker()) {
            Err(error) => Poll::Ready(Some(Err(error.into()))),
            Ok(Piece::Bytes { end, bytes }) => {
                this.given = end;
                this.connection.hand_over(this.reader, end);
                Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
            }
            Ok(Piece::Wait) => Poll::Pending,
            // A file that was cut after its length had been promised ends the connection, not the reply.
            Ok(Piece::End) if this.promised_end.is_some_and(|end| this.given < end) => {
                Poll::Ready(Some(Err("the file was cut short".into())))
            }
            Ok(Piece::End) => Poll::Ready(None),
            Ok(Piece::Broken) => Poll::Ready(Some(Err("the file's writer disappeared".into()))),
        }
    }
}
