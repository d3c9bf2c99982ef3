//! The listening socket, and a client's stream that counts what is written to it.
//!
//! hyper writes bytes. Those that are a file's own memory are recognised by their address ([`Connection::in_place`]) and sent by
//! sendfile(2), without a copy.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use rustix::fs::sendfile;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use super::connection::{Connection, Connections, InPlace};

/// The client of a request.
#[derive(Debug, Clone)]
pub struct Peer(pub Arc<Connection>);

impl Connected<IncomingStream<'_, Bounded>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded>) -> Peer {
        Peer(Arc::clone(&stream.io().connection))
    }
}

/// Accepts as many clients as there may be.
#[derive(Debug)]
pub struct Bounded {
    listener: TcpListener,
    connections: Connections,
}

impl Bounded {
    pub fn new(listener: TcpListener, connections: Connections) -> Bounded {
        Bounded { listener, connections }
    }
}

impl Listener for Bounded {
    type Io = Counted;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Counted, SocketAddr) {
        loop {
            // axum's own: it waits when descriptors are short.
            let (stream, address) = Listener::accept(&mut self.listener).await;
            let _ = stream.set_nodelay(true);
            let connection = stream.as_fd().try_clone_to_owned().ok().and_then(|socket| self.connections.add(socket));
            if let Some(connection) = connection {
                return (Counted { stream, connection }, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[derive(Debug)]
pub struct Counted {
    stream: TcpStream,
    connection: Arc<Connection>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.connection.note_closed();
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Counted {
    /// Does `call`, which writes to the socket, when that can be done.
    fn poll_call(
        &self,
        context: &mut Context<'_>,
        mut call: impl FnMut(&TcpStream) -> rustix::io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            match self.stream.try_io(Interest::WRITABLE, || call(&self.stream).map_err(io::Error::from)) {
                // There was no room after all: tokio has noted it, and waits.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                done => return Poll::Ready(done),
            }
        }
    }

    /// From the file's own memory.
    fn poll_send(&self, context: &mut Context<'_>, piece: &InPlace) -> Poll<io::Result<usize>> {
        let send =
            |socket: &TcpStream| sendfile(socket, piece.part.file(), Some(&mut piece.offset.clone()), piece.length);
        let sent = ready!(self.poll_call(context, send))?;
        if sent == 0 {
            // The file ends before the piece does. What is below a send cursor stays, so this is a broken promise of ours.
            return Poll::Ready(Err(ErrorKind::UnexpectedEof.into()));
        }
        self.connection.note_sent(sent, piece.offset + sent as u64);
        Poll::Ready(Ok(sent))
    }

    /// What is before a piece goes into the same packet as its beginning.
    fn poll_write_before(&self, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
        let write = |socket: &TcpStream| sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags);
        let written = ready!(self.poll_call(context, write))?;
        self.connection.note_written(written);
        Poll::Ready(Ok(written))
    }
}

impl AsyncWrite for Counted {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    /// hyper has pieces of files in slices of their own, as they were handed over.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.connection.in_place(slices) {
            Some(piece) if slices[..piece.before].iter().all(|slice| slice.is_empty()) => {
                return self.poll_send(context, &piece);
            }
            Some(piece) => return self.poll_write_before(context, &slices[..piece.before]),
            None => {}
        }
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        if let Poll::Ready(Ok(written)) = polled {
            self.connection.note_written(written);
        }
        polled
    }

    /// So hyper does not copy pieces into its own buffer.
    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        if let Poll::Ready(Ok(())) = polled {
            self.connection.note_flushed();
        }
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
