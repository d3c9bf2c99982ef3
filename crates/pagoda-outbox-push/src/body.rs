//! The body of a request: all of it at once, or as a [`Feed`] gives it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tokio::sync::mpsc;

/// Pieces between the file and the connection. More would only be memory.
const PIECES_MAX: usize = 1;

#[derive(Debug)]
enum Piece {
    Bytes(Bytes),
    End,
}

/// What a connection sends.
#[derive(Debug)]
pub struct PushBody {
    whole: Option<Bytes>,
    fed: Option<mpsc::Receiver<Piece>>,
    /// Bytes to come, if that is known.
    left: Option<u64>,
}

/// Where a body comes from. If it goes before its end, the connection is broken off, so that the server sees no whole body.
#[derive(Debug)]
pub struct Feed {
    sender: mpsc::Sender<Piece>,
}

/// The connection does not take any more. It knows why.
#[derive(Debug)]
pub struct NotTaken;

impl PushBody {
    pub fn whole(bytes: impl Into<Bytes>) -> PushBody {
        let bytes = bytes.into();
        PushBody { left: Some(bytes.len() as u64), whole: Some(bytes), fed: None }
    }

    /// With as many bytes as `length` says; `None`: nobody knows.
    pub fn fed(length: Option<u64>) -> (Feed, PushBody) {
        let (sender, receiver) = mpsc::channel(PIECES_MAX);
        (Feed { sender }, PushBody { whole: None, fed: Some(receiver), left: length })
    }
}

impl Feed {
    pub async fn send(&self, bytes: Bytes) -> Result<(), NotTaken> {
        self.sender.send(Piece::Bytes(bytes)).await.map_err(|_| NotTaken)
    }

    /// That was all. Of a body whose length is known the connection need not hear it.
    pub async fn end(self) -> Result<(), NotTaken> {
        self.sender.send(Piece::End).await.map_err(|_| NotTaken)
    }
}

impl Body for PushBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.left == Some(0) {
            return Poll::Ready(None);
        }
        let piece = match &mut self.fed {
            None => Some(self.whole.take().map_or(Piece::End, Piece::Bytes)),
            Some(fed) => ready!(fed.poll_recv(context)),
        };
        let cut = |why: &str| Poll::Ready(Some(Err(io::Error::other(why.to_owned()))));
        match (piece, self.left) {
            (Some(Piece::Bytes(bytes)), None) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            (Some(Piece::Bytes(bytes)), Some(left)) => match left.checked_sub(bytes.len() as u64) {
                Some(rest) => {
                    self.left = Some(rest);
                    Poll::Ready(Some(Ok(Frame::data(bytes))))
                }
                None => cut("the file is longer than was said"),
            },
            (Some(Piece::End), None) => {
                self.left = Some(0);
                Poll::Ready(None)
            }
            (Some(Piece::End), Some(_)) => cut("the file is shorter than was said"),
            (None, _) => cut("the file was cut short"),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    async fn frame(body: &mut PushBody) -> Option<Result<Vec<u8>, String>> {
        let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        Some(frame.map(|frame| frame.into_data().unwrap().to_vec()).map_err(|error| error.to_string()))
    }

    fn bytes() -> Bytes {
        Bytes::from_static(b"abc")
    }

    #[tokio::test]
    async fn a_body_ends_only_where_it_should() {
        let whole = Some(Ok(b"abc".to_vec()));
        let cut = |why: &str| Some(Err(why.to_owned()));

        let mut body = PushBody::whole(bytes());
        assert_eq!(
            (body.size_hint().exact(), frame(&mut body).await, frame(&mut body).await),
            (Some(3), whole.clone(), None)
        );

        let (feed, mut body) = PushBody::fed(None);
        feed.send(bytes()).await.unwrap();
        assert_eq!((body.size_hint().exact(), frame(&mut body).await), (None, whole.clone()));
        feed.end().await.unwrap();
        assert_eq!((frame(&mut body).await, frame(&mut body).await), (None, None));

        let (feed, mut body) = PushBody::fed(None);
        feed.send(bytes()).await.unwrap();
        drop(feed);
        assert_eq!((frame(&mut body).await, frame(&mut body).await), (whole.clone(), cut("the file was cut short")));

        let (feed, mut body) = PushBody::fed(Some(3));
        feed.send(bytes()).await.unwrap();
        assert_eq!((frame(&mut body).await, body.is_end_stream(), frame(&mut body).await), (whole, true, None));

        let (feed, mut body) = PushBody::fed(Some(2));
        feed.send(bytes()).await.unwrap();
        assert_eq!(frame(&mut body).await, cut("the file is longer than was said"));

        let (feed, mut body) = PushBody::fed(Some(4));
        feed.end().await.unwrap();
        assert_eq!(frame(&mut body).await, cut("the file is shorter than was said"));
        drop(body);
    }

    #[tokio::test]
    async fn a_feed_sees_that_nobody_takes() {
        let (feed, body) = PushBody::fed(None);
        drop(body);
        assert!(feed.send(bytes()).await.is_err());
    }
}
