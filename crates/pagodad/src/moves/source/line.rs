//! A connection to the destination, and the threads on it: one that reads control messages, one for each data stream that sends. And
//! how the destination is called again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use pagoda_api::in_full;
use pagoda_link::hosts::{Host, Hosts};
use pagoda_link::{Cutter, Keypair, LinkError, PublicKey};
use pagoda_move::map::PageRun;
use pagoda_move::units::{AttemptId, ConnectionNo, HostKey, Rate, RoundNo};
use pagoda_move::wire::data::stream_of;
use pagoda_move::wire::{Control, Data};
use pagoda_pager::handle::Copied;

use super::input::{Input, Permits};
use super::pages::{self, Item};
use crate::moves::channel::{self, Connection, ControlReceiver, ControlSender, DataSender, STREAMS};

/// Between two calls of a destination that does not answer.
const CALL_AGAIN: Duration = Duration::from_millis(500);

/// One connection to the destination: its control stream and its data streams.
#[derive(Debug)]
pub struct Line {
    pub no: ConnectionNo,
    control: ControlSender,
    streams: Vec<Sender<Item>>,
    cutters: Vec<Arc<Cutter>>,
}

impl Line {
    /// Opens the streams for this attempt, and has them served.
    ///
    /// # Errors
    /// A stream has ended already; no thread can be had.
    pub fn open(
        no: ConnectionNo,
        connection: Connection,
        attempt: AttemptId,
        round: RoundNo,
        inputs: &Sender<Input>,
    ) -> Result<Line> {
        let Connection { control: (control, receiver), data, .. } = connection;
        let mut line = Line { no, control, streams: Vec::new(), cutters: Vec::new() };
        for (stream, mut sender) in (0..).zip(data) {
            sender.send(&Data::Open { attempt, connection: no, stream, round })?;
            sender.flush()?;
            line.cutters.push(sender.cutter());
            line.streams.push(serve(no, sender, inputs.clone()).context("start a thread")?);
        }
        let inputs = inputs.clone();
        let read = move || read(no, receiver, &inputs);
        thread::Builder::new().name("move-read".into()).spawn(read).context("start a thread")?;
        Ok(line)
    }

    /// That it was not sent is heard of as the end of the connection.
    pub fn send(&self, message: &Control) {
        let _ = self.control.send(message);
    }

    /// Pages may be compressed from now on, for the destination unpacks them: with LZ4, and with zstd if it has said so. `cap`: what all
    /// streams may send together, if that is limited.
    pub fn let_compress(&self, cap: Option<Rate>, has_zstd: bool) {
        let cap = cap.map(|cap| Rate(cap.0 / self.streams.len().max(1) as u64));
        for stream in &self.streams {
            let _ = stream.send(Item::Compress { cap, has_zstd });
        }
    }

    /// Copies go behind everything else of their chunk.
    pub fn send_pages(&self, copied: Copied, is_fresh: bool) {
        let stream = stream_of(copied.pages.chunk, self.streams.len() as u16);
        let _ = self.streams[usize::from(stream)].send(Item::Pages { copied, is_fresh });
    }

    /// Pages of a tail, which may go by any stream. What a thread waits for has the last one for itself.
    pub fn send_tail(&self, copied: Copied, is_demanded: bool) {
        let (last, others) = self.streams.split_last().expect("a line has streams");
        let stream = others.get(stream_of(copied.pages.chunk, others.len().max(1) as u16) as usize);
        let stream = stream.filter(|_| !is_demanded).unwrap_or(last);
        let _ = stream.send(Item::Pages { copied, is_fresh: false });
    }

    /// The round ends behind all that was given to this line.
    pub fn end_round(&self, round: RoundNo) {
        for stream in &self.streams {
            let _ = stream.send(Item::RoundEnd(round));
        }
    }

    /// Ends all its streams, also for threads that wait for them.
    pub fn cut(&self) {
        self.control.cut();
        self.cutters.iter().for_each(|cutter| cutter.cut());
    }
}

fn serve(no: ConnectionNo, sender: DataSender, inputs: Sender<Input>) -> std::io::Result<Sender<Item>> {
    let (give, items) = channel();
    let run = move || {
        let report = |gone: pages::Gone| {
            let _ = inputs.send(Input::Sent { connection: no, gone });
        };
        if let Err(error) = pages::send_all(sender, &items, report) {
            let _ = inputs.send(Input::LinkDown(no, in_full(&error)));
        }
    };
    thread::Builder::new().name("move-data".into()).spawn(run)?;
    Ok(give)
}

fn read(no: ConnectionNo, mut receiver: ControlReceiver, inputs: &Sender<Input>) {
    let permits = Permits::default();
    loop {
        let input = match receiver.receive() {
            Ok(message) => Input::Received(no, message, permits.take()),
            Err(error) => Input::LinkDown(no, in_full(&error)),
        };
        let is_last = matches!(input, Input::LinkDown(..));
        if inputs.send(input).is_err() || is_last {
            return;
        }
    }
}

/// A run of pages, as the engine has it.
pub const fn pages_of(run: PageRun) -> pagoda_core::fault::Pages {
    pagoda_core::fault::Pages { chunk: run.chunk, run: run.run }
}

/// Who is called, by its key: its address may change meanwhile.
#[derive(Clone, Debug)]
pub struct Called {
    pub own: Keypair,
    pub hosts: Hosts,
    pub key: HostKey,
    pub vm: String,
}

impl Called {
    /// The host, if it is trusted still.
    ///
    /// # Errors
    /// Nobody can tell.
    pub fn host(&self) -> Result<Option<Host>> {
        Ok(self.hosts.all()?.into_iter().find(|host| host.key == PublicKey(self.key.0)))
    }

    /// # Errors
    /// It does not answer, or is not trusted any more.
    fn call(&self) -> Result<Connection, LinkError> {
        let other = |why: String| LinkError::Io(std::io::Error::other(why));
        let host = self.host().map_err(|error| other(in_full(error.as_ref())))?;
        let untrusted = || other(format!("the host with the key {:?} is not trusted any more", PublicKey(self.key.0)));
        channel::connect(&self.own, &host.ok_or_else(untrusted)?, &self.vm, STREAMS)
    }

    /// Calls until there is a connection, or until the move is over.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn begin(&self, inputs: Sender<Input>, is_over: Arc<AtomicBool>) -> std::io::Result<()> {
        let called = self.clone();
        let run = move || {
            while !is_over.load(Ordering::Relaxed) {
                let input = called.call().map_or_else(Input::Unreachable, Input::Connected);
                let is_there = matches!(input, Input::Connected(_));
                if inputs.send(input).is_err() || is_there {
                    return;
                }
                thread::sleep(CALL_AGAIN);
            }
        };
        thread::Builder::new().name("move-call".into()).spawn(run).map(drop)
    }
}
