//! The bytes of one reply, as the connection takes them.

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use http_body::{Body, Frame};
use pagoda_outbox::{Ino, ReaderId};

use super::connection::Connection;
use super::pacing::{Pacer, Turn};
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
    /// What is sent next, when its turn has come.
    waiting: Option<Waiting>,
}

/// A piece that does not change any more and is not handed over yet.
#[derive(Debug)]
struct Waiting {
    memory: Arc<File>,
    offset: u64,
    length: u64,
    turn: Turn,
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
        FileBody { site, connection, reader, ino, given: start, promised_end, waiting: None }
    }
}

impl FileBody {
    fn next(&self, sending: Sending, context: &Context<'_>) -> io::Result<Given> {
        let turns = [&self.connection.pacer, &self.site.pacer].map(Pacer::turn_bytes);
        let most = turns.into_iter().fold(sending.piece_bytes(), u64::min);
        self.site.outbox.next(self.reader, self.ino, most, context.waker())
    }

    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(()) };
        waiting.turn.poll(context, waiting.length, [&self.connection.pacer, &self.site.pacer])
    }

    /// Hands over the piece whose turn has come.
    fn load(&mut self, sending: Sending) -> Result<Option<Frame<Bytes>>, BoxError> {
        let Some(Waiting { memory, offset, length, .. }) = self.waiting.take() else { return Ok(None) };
        let Piece { bytes, part } = Piece::load(&memory, offset, length, sending)?;
        self.given = offset + length;
        self.connection.hand_over(self.reader, offset..self.given, part);
        Ok(Some(Frame::data(bytes)))
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
        if this.waiting.is_none() {
            match this.next(sending, context) {
                Ok(Given::Bytes { memory, offset, length }) => {
                    this.waiting = Some(Waiting { memory, offset, length, turn: Turn::default() });
                }
                Ok(Given::Wait) => return Poll::Pending,
                // A file that was cut after its length had been promised ends the connection, not the reply.
                Ok(Given::End) if this.promised_end.is_some_and(|end| this.given < end) => {
                    return Poll::Ready(Some(Err("the file was cut short".into())));
                }
                Ok(Given::End) => return Poll::Ready(None),
                Ok(Given::Broken) => return Poll::Ready(Some(Err("the file's writer disappeared".into()))),
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
        ready!(this.poll_turn(context));
        Poll::Ready(this.load(sending).transpose())
    }
}
