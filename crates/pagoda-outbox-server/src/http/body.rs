//! The bytes of one reply, as the connection takes them.

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use http_body::{Body, Frame};
use pagoda_outbox::ReaderId;
use tokio::time::{Sleep, sleep_until};

use super::connection::Connection;
use super::pacing::{Pacer, Turn};
use super::piece::{Piece, Sending};
use super::site::Site;
use crate::link::client::Given;

/// How long bytes of a file that grows gather before a reader that has sent all there was asks for more.
const GATHER_MAX: Duration = Duration::from_millis(2);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A reader is attached as long as this or the connection has it: see [`Connection::finish`].
#[derive(Debug)]
pub struct FileBody {
    site: Arc<Site>,
    connection: Arc<Connection>,
    reader: ReaderId,
    /// The file's, from its first bytes on.
    memory: Option<Arc<File>>,
    /// Everything below has been handed over.
    given: u64,
    /// Where the reply ends, if its length was promised.
    promised_end: Option<u64>,
    /// What is sent next, when its turn has come.
    waiting: Option<Waiting>,
    /// When the last piece was handed over, if it was all there was.
    emptied: Option<Instant>,
    /// Until then nobody looks for more.
    gathering: Option<Pin<Box<Sleep>>>,
}

/// A piece that does not change any more and is not handed over yet.
#[derive(Debug)]
struct Waiting {
    offset: u64,
    length: u64,
    /// There was no more than that.
    is_rest: bool,
    turn: Turn,
}

impl FileBody {
    pub fn new(
        site: &Arc<Site>,
        connection: &Arc<Connection>,
        reader: ReaderId,
        start: u64,
        promised_end: Option<u64>,
    ) -> FileBody {
        let (site, connection) = (Arc::clone(site), Arc::clone(connection));
        connection.begin();
        FileBody {
            site,
            connection,
            reader,
            memory: None,
            given: start,
            promised_end,
            waiting: None,
            emptied: None,
            gathering: None,
        }
    }
}

impl FileBody {
    /// What is sent next. A reader that has just sent all there was asks again a moment later: a question and a wake-up for each of the
    /// writer's next writes would cost both more than the bytes do.
    fn poll_next(&mut self, sending: Sending, context: &mut Context<'_>) -> Poll<io::Result<Given>> {
        if self.promised_end == Some(self.given) {
            return Poll::Ready(Ok(Given::End));
        }
        if let Some(emptied) = self.emptied.take_if(|emptied| emptied.elapsed() < GATHER_MAX) {
            self.gathering = Some(Box::pin(sleep_until((emptied + GATHER_MAX).into())));
            self.site.files.pause(self.reader);
        }
        if let Some(sleep) = &mut self.gathering {
            ready!(sleep.as_mut().poll(context));
            self.gathering = None;
        }
        let turns = [&self.connection.pacer, &self.site.pacer].map(Pacer::turn_bytes);
        let most = turns.into_iter().fold(sending.piece_bytes(), u64::min);
        let files = &self.site.files;
        Poll::Ready(files.next(self.reader, self.given, most, &mut self.memory, context.waker()))
    }

    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(()) };
        waiting.turn.poll(context, waiting.length, [&self.connection.pacer, &self.site.pacer])
    }

    /// Hands over the piece whose turn has come.
    fn load(&mut self, sending: Sending) -> Result<Option<Frame<Bytes>>, BoxError> {
        let (Some(Waiting { offset, length, is_rest, .. }), Some(memory)) = (self.waiting.take(), &self.memory) else {
            return Ok(None);
        };
        let Piece { bytes, part } = Piece::load(memory, offset, length, sending)?;
        self.given = offset + length;
        self.connection.hand_over(self.reader, offset..self.given, part);
        self.emptied = is_rest.then(Instant::now);
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
            match ready!(this.poll_next(sending, context)) {
                Ok(Given::Bytes { offset, length, is_rest }) => {
                    this.waiting = Some(Waiting { offset, length, is_rest, turn: Turn::default() });
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
