//! A listener that bounds what its peers can hold: connections at a time, and silence on each.
//!
//! Without the bound, anybody who may connect could take all of the daemon's file descriptors, and
//! then no VM could attach. Further peers wait in the kernel's backlog.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// Connections at a time: many times what a CLI, a `top` and a few scrapers need, and far from the usual limit of 1024
/// file descriptors.
const CONNECTIONS_MAX: usize = 64;

/// Longest silence on a connection of the control socket: more than the slowest request takes. A request that is worked on is
/// silence too, and so is a file that is exported to a program which waits for a passphrase. The client waits for an hour.
pub(super) const REQUEST_MAX: Duration = Duration::from_mins(61);
/// The same of who has not said anything yet, and of who reads metrics: about as long as the usual pause between two scrapes.
pub(super) const SCRAPE_PAUSE: Duration = Duration::from_secs(60);

/// Accepts as `L` does, with a bound on connections and on their silence.
#[derive(Debug)]
pub(super) struct Bounded<L> {
    listener: L,
    idle_max: Duration,
    permits: Arc<Semaphore>,
}

impl<L> Bounded<L> {
    pub(super) fn new(listener: L, idle_max: Duration) -> Self {
        Self { listener, idle_max, permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl<L: Listener> Listener for Bounded<L>
where
    L::Io: Unpin,
{
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            // Fails only for a closed semaphore, which this one never is.
            if let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await {
                let (stream, addr) = self.listener.accept().await;
                let (idle_max, idle) = (self.idle_max, Box::pin(sleep(SCRAPE_PAUSE)));
                return (Connection { stream, idle, idle_max, _permit: permit }, addr);
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// The stream of one peer, which fails after too long a silence.
#[derive(Debug)]
pub(super) struct Connection<S> {
    stream: S,
    idle: Pin<Box<Sleep>>,
    idle_max: Duration,
    _permit: OwnedSemaphorePermit,
}

impl<S> Connection<S> {
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        ready!(self.idle.as_mut().poll(cx));
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, "connection was idle for too long"))
    }

    fn stirred(&mut self) {
        let until = Instant::now() + self.idle_max;
        self.idle.as_mut().reset(until);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(result) => {
                self.stirred();
                Poll::Ready(result)
            }
            Poll::Pending => self.poll_idle(cx).map(Err),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, buf) {
            Poll::Ready(result) => {
                self.stirred();
                Poll::Ready(result)
            }
            Poll::Pending => self.poll_idle(cx).map(Err),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
