//! Connections of clients: what has been written to each, and what of it has been acknowledged.
//!
//! A body hands over one piece and then waits until it has been written to the socket ([`Connection::is_flushed`]). hyper
//! flushes when nothing is left of it, and then the number of bytes written so far is the piece's *mark*. A piece that is
//! sent from the file's memory gets marks within it as well, for what is written of it is known exactly. When the kernel says
//! that as many bytes have been acknowledged (SIOCOUTQ), the space is told, with the reader's next question or within
//! [`LOOK_INTERVAL`]. So nothing is given back that a client may still need to have sent again.
//!
//! A connection that its server side has closed is kept until its last bytes are acknowledged, or for [`STALL_MAX`].

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use pagoda_outbox::ReaderId;
use pagoda_sys::part::FilePart;
use pagoda_sys::tcp::unacknowledged;
use rustix::net::Shutdown;

use super::pacing::{Pacer, Rate};
use crate::link::client::Files;

/// Connections at the same time; more are closed at once.
const CONNECTIONS_MAX: usize = 256;
/// A client that takes nothing of what is sent to it for so long is cut off: its bytes would stay in memory for ever.
const STALL_MAX: Duration = Duration::from_secs(60);
/// A client that asks for nothing for so long is cut off.
const IDLE_MAX: Duration = Duration::from_secs(120);
/// And so is one that has not shown the token by then: connections are few, and anybody can make one.
const STRANGER_MAX: Duration = Duration::from_secs(10);
/// Marks within a piece are at least so far from each other.
const MARK_BYTES: u64 = 128 << 10;
/// How often connections are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy)]
enum Mark {
    /// When so many bytes of the stream are acknowledged, the reader's are up to `position`.
    Delivered { stream: u64, reader: ReaderId, position: u64 },
    /// The reader has ended here.
    Detach { stream: u64, reader: ReaderId },
}

/// What was handed over and not flushed yet.
#[derive(Debug)]
struct Pending {
    reader: ReaderId,
    /// Where the piece ends in the file.
    end: u64,
    /// The latest mark of it.
    marked: u64,
    /// The file's memory that is sent, if it is no copy.
    part: Option<Arc<FilePart>>,
}

/// Bytes of a file's memory among those that hyper wants to be written.
#[derive(Debug)]
pub struct InPlace {
    /// How many slices are before them.
    pub before: usize,
    pub part: Arc<FilePart>,
    /// Where in the file.
    pub offset: u64,
    pub length: usize,
}

#[derive(Debug)]
struct Inner {
    /// A second descriptor of the socket. Kept until everything is acknowledged.
    socket: Option<OwnedFd>,
    written: u64,
    pending: Option<Pending>,
    marks: VecDeque<Mark>,
    /// The body that waits for a flush.
    waker: Option<Waker>,
    /// Bodies that are being sent.
    bodies: usize,
    is_closed: bool,
    /// It has asked for something with the token.
    is_known: bool,
    acknowledged: u64,
    moved: Instant,
}

impl Inner {
    /// Before the end of its reader, if that is waiting for a flush: a reader that is gone acknowledges nothing.
    fn add_delivered(&mut self, mark: Mark) {
        let unflushed = |mark: &Mark| matches!(mark, Mark::Detach { stream: u64::MAX, .. });
        let at = self.marks.iter().position(unflushed).unwrap_or(self.marks.len());
        self.marks.insert(at, mark);
    }

    /// Readers whose end waited for a flush end here.
    fn end_unflushed(&mut self, here: u64) {
        for mark in &mut self.marks {
            if let Mark::Detach { stream: end @ u64::MAX, .. } = mark {
                *end = here;
            }
        }
    }
}

#[derive(Debug)]
pub struct Connection {
    files: Arc<Files>,
    pub pacer: Pacer,
    inner: Mutex<Inner>,
}

impl Connection {
    fn new(files: Arc<Files>, socket: OwnedFd, rate: Rate) -> Connection {
        let inner = Inner {
            socket: Some(socket),
            written: 0,
            pending: None,
            marks: VecDeque::new(),
            waker: None,
            bodies: 0,
            is_closed: false,
            is_known: false,
            acknowledged: 0,
            moved: Instant::now(),
        };
        Connection { files, pacer: Pacer::new(rate), inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin(&self) {
        self.inner().bodies += 1;
    }

    /// The reader has no more to send; it is detached when what it has sent is acknowledged.
    pub fn finish(&self, reader: ReaderId) {
        let mut inner = self.inner();
        inner.bodies -= 1;
        let stream = match &inner.pending {
            // What was not flushed will not be known to have arrived. If it is flushed all the same, that is noted before.
            Some(pending) if pending.reader == reader => u64::MAX,
            _ => inner.written,
        };
        inner.marks.push_back(Mark::Detach { stream, reader });
        drop(inner);
        self.look();
    }

    /// Whether everything that was handed over has been written to the socket; if not, `waker` is woken then.
    pub fn is_flushed(&self, waker: &Waker) -> bool {
        self.look();
        let mut inner = self.inner();
        if inner.pending.is_some() {
            inner.waker = Some(waker.clone());
        }
        inner.pending.is_none()
    }

    /// These bytes of the file are hyper's from now on.
    pub fn hand_over(&self, reader: ReaderId, piece: Range<u64>, part: Option<Arc<FilePart>>) {
        self.inner().pending = Some(Pending { reader, end: piece.end, marked: piece.start, part });
    }

    /// The first of these slices that is memory of the file whose piece was handed over.
    pub fn in_place(&self, slices: &[IoSlice<'_>]) -> Option<InPlace> {
        let inner = self.inner();
        let part = inner.pending.as_ref()?.part.as_ref()?;
        let known = |(at, slice): (usize, &IoSlice<'_>)| part.offset_of(slice).map(|offset| (at, offset, slice.len()));
        let mut filled = slices.iter().enumerate().filter(|(_, slice)| !slice.is_empty());
        let (before, offset, length) = filled.find_map(known)?;
        Some(InPlace { before, part: Arc::clone(part), offset, length })
    }

    pub fn note_written(&self, bytes: usize) {
        let mut inner = self.inner();
        inner.written += bytes as u64;
        inner.moved = Instant::now();
    }

    /// So many bytes were written, and they are those of the piece before `position` of its file.
    pub fn note_sent(&self, bytes: usize, position: u64) {
        self.note_written(bytes);
        let mut inner = self.inner();
        let stream = inner.written;
        let Some(pending) = &mut inner.pending else { return };
        if position >= pending.end || position - pending.marked < MARK_BYTES {
            return;
        }
        pending.marked = position;
        let reader = pending.reader;
        inner.add_delivered(Mark::Delivered { stream, reader, position });
    }

    /// Somebody who has the token asks for something.
    pub fn note_request(&self) {
        let mut inner = self.inner();
        (inner.moved, inner.is_known) = (Instant::now(), true);
    }

    /// hyper has nothing left to write.
    pub fn note_flushed(&self) {
        let mut inner = self.inner();
        let stream = inner.written;
        if let Some(Pending { reader, end, .. }) = inner.pending.take() {
            inner.add_delivered(Mark::Delivered { stream, reader, position: end });
            inner.end_unflushed(stream);
        }
        if let Some(waker) = inner.waker.take() {
            waker.wake();
        }
    }

    /// hyper has let go of the connection.
    pub fn note_closed(&self) {
        let mut inner = self.inner();
        inner.is_closed = true;
        inner.pending = None;
        let written = inner.written;
        inner.end_unflushed(written);
        if let Some(socket) = &inner.socket {
            // Not for reading: if the client says more, the kernel would throw away what is still on its way to it.
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        inner.moved = Instant::now();
        drop(inner);
        self.look();
    }

    /// Notes what has been acknowledged.
    fn look(&self) {
        let mut inner = self.inner();
        if inner.marks.is_empty() {
            return;
        }
        let is_gone =
            inner.is_closed && inner.socket.as_ref().is_none_or(|socket| rustix::net::getpeername(socket).is_err());
        // After that, so that the last acknowledgement before its end counts.
        let queued = inner.socket.as_ref().and_then(|socket| unacknowledged(socket).ok());
        let acknowledged = queued.map_or(0, |queued| inner.written.saturating_sub(queued));
        if acknowledged > inner.acknowledged {
            inner.acknowledged = acknowledged;
            inner.moved = Instant::now();
        }
        let mut done = Vec::new();
        while let Some(mark) = inner.marks.front() {
            let (Mark::Delivered { stream, .. } | Mark::Detach { stream, .. }) = *mark;
            if stream > inner.acknowledged {
                break;
            }
            done.extend(inner.marks.pop_front());
        }
        if is_gone {
            // The client has reset it: what is left will not arrive.
            done.extend(inner.marks.drain(..).filter(|mark| matches!(mark, Mark::Detach { .. })));
        }
        drop(inner);
        self.report(&done);
    }

    fn report(&self, marks: &[Mark]) {
        for mark in marks {
            match *mark {
                // A reader that is gone already has nothing to acknowledge.
                Mark::Delivered { reader, position, .. } => self.files.note_acknowledged(reader, position),
                Mark::Detach { reader, .. } => self.files.detach(reader),
            }
        }
    }

    /// Whether it is still of use. Cuts off who does not take what is sent, or does not ask.
    fn maintain(&self, now: Instant) -> bool {
        self.look();
        let mut inner = self.inner();
        let silent = now.saturating_duration_since(inner.moved);
        let is_owed = !inner.marks.is_empty() || inner.pending.is_some();
        if inner.is_closed {
            if is_owed && silent < STALL_MAX {
                return true;
            }
            let left = std::mem::take(&mut inner.marks);
            inner.socket = None;
            drop(inner);
            let detached: Vec<Mark> = left.into_iter().filter(|mark| matches!(mark, Mark::Detach { .. })).collect();
            self.report(&detached);
            return false;
        }
        // A body that has nothing to send waits for the guest, as long as that takes.
        let idle_max = if inner.is_known { IDLE_MAX } else { STRANGER_MAX };
        let is_idle = inner.bodies == 0 && silent >= idle_max;
        if ((is_owed && silent >= STALL_MAX) || is_idle)
            && let Some(socket) = &inner.socket
        {
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
        true
    }
}

/// All connections that there are, those that have ended and still send among them.
#[derive(Debug, Clone)]
pub struct Connections {
    files: Arc<Files>,
    /// What each connection may be sent.
    rate: Rate,
    list: Arc<Mutex<Vec<Arc<Connection>>>>,
}

impl Connections {
    pub fn new(files: Arc<Files>, rate: Rate) -> Connections {
        Connections { files, rate, list: Arc::default() }
    }

    /// `None`: there are too many.
    pub fn add(&self, socket: OwnedFd) -> Option<Arc<Connection>> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() >= CONNECTIONS_MAX {
            return None;
        }
        let connection = Arc::new(Connection::new(Arc::clone(&self.files), socket, self.rate));
        list.push(Arc::clone(&connection));
        Some(connection)
    }

    /// Looks at all of them from time to time, for ever.
    pub async fn watch(self) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let now = Instant::now();
            let list: Vec<Arc<Connection>> = self.list.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let over: Vec<Arc<Connection>> = list.into_iter().filter(|connection| !connection.maintain(now)).collect();
            self.files.say_acknowledged();
            if !over.is_empty() {
                let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
                list.retain(|connection| !over.iter().any(|over| Arc::ptr_eq(over, connection)));
            }
        }
    }
}
