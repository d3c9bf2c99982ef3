//! The streams of a move: one for control messages, some for pages, and one for each disk that is copied ([`disk`]). Each is a stream of its
//! own between the two hosts, whose first record says which of these it is. `docs/protocol/link.md` has all first bytes.
//!
//! Frames (`pagoda_move::wire`) are one after the other in records. A frame's header is checked before there is room for its
//! payload. A control stream has a thread that sends, so that nobody who decides about a VM waits for a network. It sends an empty
//! record when it has sent nothing else for a while; a control stream on which nothing came for longer has ended.

pub mod disk;
mod unpack;

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Queued, RecvTimeoutError, Sender as Queue, channel};
use std::thread;
use std::time::Duration;

use pagoda_link::hosts::Host;
use pagoda_link::{Cutter, Keypair, Link, LinkError, RECORD_MAX, Receiver, Sender};
use pagoda_move::wire::limits::TEXT_MAX;
use pagoda_move::wire::{Codec, Control, ControlHeader, Data, DataHeader, HEADER_SIZE, Malformed, RunKind};
use thiserror::Error;

pub use self::disk::DiskOf;
use self::unpack::Unpacker;

/// Data streams of a connection that this host begins.
pub const STREAMS: u16 = 2;
/// The first byte of a control stream. Those of `hosts/look.rs` are before it.
const MOVE_CONTROL: u8 = 5;
/// The first byte of a data stream.
const MOVE_DATA: u8 = 6;
/// The first byte of a disk's stream.
const MOVE_DISK: u8 = 7;
/// Between two looks at a data stream that brings nothing: its other end may wait for as long as it likes.
const IDLE: Duration = Duration::from_secs(3600);

/// When a control stream says that it is there, and after how long it is not.
#[derive(Clone, Copy, Debug)]
struct Times {
    keep_alive: Duration,
    silence: Duration,
}

const TIMES: Times = Times { keep_alive: Duration::from_secs(2), silence: Duration::from_secs(10) };

/// A stream of a move has ended.
#[derive(Debug, Error)]
pub enum ChannelError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("the other host says something that is not of this protocol: {0}")]
    Malformed(#[from] Malformed),
    #[error("the stream has ended in the middle of a message")]
    CutShort,
}

/// The caller's end of a connection.
#[derive(Debug)]
pub struct Connection {
    pub control: (ControlSender, ControlReceiver),
    pub data: Vec<DataSender>,
}

/// Calls a host for a move of this VM, with so many data streams.
///
/// # Errors
/// It does not answer, is another one, or refuses.
pub fn connect(own: &Keypair, host: &Host, vm: &str, streams: u16) -> Result<Connection, LinkError> {
    let call = |first: u8, name: &str| {
        let mut link = Link::connect(own, &host.key, &host.address)?;
        link.sender.send(&[&[first], name.as_bytes()])?;
        Ok::<_, LinkError>(link)
    };
    let control = control(call(MOVE_CONTROL, vm)?, TIMES)?;
    let data = (0..streams).map(|_| call(MOVE_DATA, "").and_then(DataSender::new));
    Ok(Connection { control, data: data.collect::<Result<_, _>>()? })
}

/// Calls a host for a disk of an attempt that it has made room for.
///
/// # Errors
/// It does not answer, is another one, or refuses.
pub fn connect_disk(own: &Keypair, host: &Host, of: DiskOf) -> Result<Link, LinkError> {
    let mut link = Link::connect(own, &host.key, &host.address)?;
    link.sender.send(&[&[MOVE_DISK], &of.encode()])?;
    Ok(link)
}

/// One stream of a host that moves a VM here.
#[derive(Debug)]
pub enum Accepted {
    /// With the name of the VM, as the caller says it.
    Control(String, ControlSender, ControlReceiver),
    Data(DataReceiver),
    Disk(DiskOf, Link),
}

/// Whether a stream with this first record is one of a move.
pub fn is_of_move(first: &[u8]) -> bool {
    matches!(first, [MOVE_CONTROL | MOVE_DATA | MOVE_DISK, ..])
}

impl Accepted {
    /// The stream that begins with this record.
    ///
    /// # Errors
    /// No move begins so; the kernel's.
    pub fn new(link: Link, first: &[u8]) -> Result<Accepted, LinkError> {
        Accepted::with(link, first, TIMES)
    }

    fn with(link: Link, first: &[u8], times: Times) -> Result<Accepted, LinkError> {
        match first {
            [MOVE_CONTROL, vm @ ..] if vm.len() <= TEXT_MAX => {
                let vm = String::from_utf8(vm.to_vec()).map_err(|_| LinkError::NotUnderstood)?;
                let (sender, receiver) = control(link, times)?;
                Ok(Accepted::Control(vm, sender, receiver))
            }
            [MOVE_DISK, of @ ..] => Ok(Accepted::Disk(DiskOf::decode(of).ok_or(LinkError::NotUnderstood)?, link)),
            [MOVE_DATA] => Ok(Accepted::Data(DataReceiver::new(link))),
            _ => Err(LinkError::NotUnderstood),
        }
    }
}

fn control(link: Link, times: Times) -> Result<(ControlSender, ControlReceiver), LinkError> {
    link.set_patience(times.silence)?;
    let cutter = Arc::new(link.cutter()?);
    let Link { sender, receiver, .. } = link;
    let (queue, queued) = channel();
    let cut = Arc::clone(&cutter);
    let write = move || write(sender, &queued, times.keep_alive, &cut);
    thread::Builder::new().name("move-control".into()).spawn(write).map_err(LinkError::Io)?;
    Ok((ControlSender { queue, cutter }, ControlReceiver(Frames::new(receiver, false))))
}

/// Sends what is queued until nobody can queue more, or until the stream has ended.
fn write(mut sender: Sender, queued: &Queued<Vec<u8>>, keep_alive: Duration, cutter: &Cutter) {
    loop {
        let sent = match queued.recv_timeout(keep_alive) {
            Ok(frame) => frame.chunks(RECORD_MAX).try_for_each(|record| sender.send(&[record])),
            Err(RecvTimeoutError::Timeout) => sender.send(&[]),
            Err(RecvTimeoutError::Disconnected) => {
                // It may have ended already.
                let _ = sender.close();
                return;
            }
        };
        if sent.is_err() {
            // Whoever receives hears of it.
            return cutter.cut();
        }
    }
}

/// Sends control messages, from any thread. When the last of its clones is dropped, what is queued is sent, and then the stream's
/// end.
#[derive(Clone, Debug)]
pub struct ControlSender {
    queue: Queue<Vec<u8>>,
    cutter: Arc<Cutter>,
}

impl ControlSender {
    /// Queues a message. That it was sent is not known before it is answered.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send(&self, message: &Control) -> Result<(), ChannelError> {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.queue.send(frame).map_err(|_| LinkError::Closed.into())
    }

    /// Ends the stream at both ends.
    pub fn cut(&self) {
        self.cutter.cut();
    }
}

/// The end of a control stream that receives messages.
#[derive(Debug)]
pub struct ControlReceiver(Frames);

impl ControlReceiver {
    /// The next message.
    ///
    /// # Errors
    /// The stream has ended, was silent for too long, or has brought what no version sends.
    pub fn receive(&mut self) -> Result<Control, ChannelError> {
        let header = |bytes| ControlHeader::decode(bytes).map(|header| (header, header.payload_len()));
        let (header, payload) = self.0.next(header)?.ok_or(LinkError::Closed)?;
        Ok(Control::decode(header, &self.0.bytes[payload])?)
    }
}

/// The end of a data stream that sends pages.
#[derive(Debug)]
pub struct DataSender {
    sender: Sender,
    /// What does not fill a record.
    bytes: Vec<u8>,
    cutter: Arc<Cutter>,
}

impl DataSender {
    fn new(link: Link) -> Result<DataSender, LinkError> {
        let cutter = Arc::new(link.cutter()?);
        Ok(DataSender { sender: link.sender, bytes: Vec::new(), cutter })
    }

    /// Sends a message, or keeps the end of it until there is a whole record.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send(&mut self, data: &Data<'_>) -> Result<(), ChannelError> {
        data.encode(&mut self.bytes);
        let whole = self.bytes.len() / RECORD_MAX * RECORD_MAX;
        for record in self.bytes[..whole].chunks(RECORD_MAX) {
            self.sender.send(&[record])?;
        }
        self.bytes.drain(..whole);
        Ok(())
    }

    /// Sends what is left.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        if !self.bytes.is_empty() {
            self.sender.send(&[&self.bytes])?;
            self.bytes.clear();
        }
        Ok(())
    }

    /// What ends the stream while another thread sends.
    pub fn cutter(&self) -> Arc<Cutter> {
        Arc::clone(&self.cutter)
    }
}

/// Receives pages. It waits for them for as long as the stream is there.
#[derive(Debug)]
pub struct DataReceiver {
    frames: Frames,
    unpacker: Unpacker,
}

impl DataReceiver {
    fn new(link: Link) -> DataReceiver {
        DataReceiver { frames: Frames::new(link.receiver, true), unpacker: Unpacker::default() }
    }

    /// The next message, with pages as they are: what was compressed is unpacked. `None`: the stream has ended behind the last one.
    ///
    /// # Errors
    /// It has ended elsewhere, or has brought what no version sends.
    pub fn receive(&mut self) -> Result<Option<Data<'_>>, ChannelError> {
        let header = |bytes| DataHeader::decode(bytes).map(|header| (header, header.payload_len()));
        let Some((header, payload)) = self.frames.next(header)? else { return Ok(None) };
        match Data::decode(header, &self.frames.bytes[payload])? {
            Data::Run { pages, kind: RunKind::Content(codec @ (Codec::Lz4 | Codec::Zstd), block) } => {
                let kind = RunKind::Content(Codec::Raw, self.unpacker.unpack(pages, codec, block)?);
                Ok(Some(Data::Run { pages, kind }))
            }
            data => Ok(Some(data)),
        }
    }
}

/// Takes frames out of the records of a stream.
#[derive(Debug)]
struct Frames {
    receiver: Receiver,
    /// What has come and is not taken: behind `at`. A frame and a record at most.
    bytes: Vec<u8>,
    at: usize,
    /// The stream may bring nothing for as long as it likes.
    is_patient: bool,
}

impl Frames {
    fn new(receiver: Receiver, is_patient: bool) -> Frames {
        Frames { receiver, bytes: Vec::new(), at: 0, is_patient }
    }

    /// The next frame: its header, and where its payload stands in `bytes` until the next call. `None`: the stream has ended.
    fn next<H>(
        &mut self,
        decode: impl FnOnce([u8; HEADER_SIZE]) -> Result<(H, usize), Malformed>,
    ) -> Result<Option<(H, Range<usize>)>, ChannelError> {
        self.bytes.drain(..self.at);
        self.at = 0;
        if !self.fill(HEADER_SIZE)? {
            return Ok(None);
        }
        let header = *self.bytes.first_chunk().expect("as many bytes");
        let (header, len) = decode(header)?;
        // The header is there, so it is no end between two frames.
        self.fill(HEADER_SIZE + len)?;
        self.at = HEADER_SIZE + len;
        Ok(Some((header, HEADER_SIZE..self.at)))
    }

    /// Has so many bytes. `false`: the stream has ended before the first.
    fn fill(&mut self, count: usize) -> Result<bool, ChannelError> {
        while self.bytes.len() < count {
            while self.is_patient && !self.receiver.wait(IDLE)? {}
            match self.receiver.receive() {
                Ok(record) => self.bytes.extend_from_slice(record),
                Err(LinkError::Closed) if self.bytes.is_empty() => return Ok(false),
                Err(LinkError::Closed) => return Err(ChannelError::CutShort),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
