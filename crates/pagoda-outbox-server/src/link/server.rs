//! The side of the process that serves: it answers one transmitter after another.
//!
//! What a transmitter says is hostile until checked: clients speak to it. It names readers that it was given itself, takes at most a piece at
//! a time, and has as many readers as the space allows. Who says something else is not answered any more: it ends by that, and the
//! keeper starts another one.
//!
//! What a transmitter can do wrong all the same: say that bytes were acknowledged which were not, and so have them given back; take
//! readers away from others; send clients other bytes than the guest's. It cannot change files ([`crate::outbox`]).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use anyhow::{Context, Result};
use pagoda_outbox::{Ino, ReaderId, Refusal, Selection, Space};
use rustix::net::SendFlags;

use super::answer::{Answer, Entry, Found};
use super::message::ENTRIES_MAX;
use super::request::{Path, Request};
use super::signs::Signs;
use super::{Ends, Receiver, Told, send};
use crate::keeper::line::Line;
use crate::outbox::{Given, Outbox};

/// The longest piece that is given at once.
const PIECE_BYTES_MAX: u64 = 1 << 20;

/// By which a transmitter hears what it has not asked for.
#[derive(Debug)]
struct Bell {
    socket: OwnedFd,
    signs: Signs,
}

impl Bell {
    fn ring(&self, told: Told) {
        // A transmitter that does not listen has been told already, or has gone: nobody waits for it.
        let _ = rustix::net::send(&self.socket, &[told.byte()], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.signs.count_change() {
            self.ring(Told::More);
        }
    }
}

/// What is said to the transmitter that there is, whichever that is.
#[derive(Debug, Default)]
pub struct Transmitters {
    bell: Mutex<Option<Arc<Bell>>>,
    is_vmm_gone: AtomicBool,
}

impl Transmitters {
    /// Answers each transmitter that the keeper starts, in a thread of its own.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(outbox: &Arc<Outbox>, line: Line) -> Result<Arc<Transmitters>> {
        let transmitters = Arc::new(Transmitters::default());
        let (outbox, served) = (Arc::clone(outbox), Arc::clone(&transmitters));
        let serve = move || {
            while let Ok(Some(ends)) = line.next_transmitter() {
                served.answer(&outbox, ends);
            }
        };
        std::thread::Builder::new()
            .name("transmitters".into())
            .spawn(serve)
            .context("start the transmitters' thread")?;
        Ok(transmitters)
    }

    /// QEMU has gone, and this process has let go of its standard error.
    pub fn vmm_gone(&self) {
        self.is_vmm_gone.store(true, Ordering::SeqCst);
        if let Some(bell) = self.bell().as_ref() {
            bell.ring(Told::VmmGone);
        }
    }

    fn bell(&self) -> std::sync::MutexGuard<'_, Option<Arc<Bell>>> {
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers one transmitter until it has gone.
    pub fn answer(&self, outbox: &Outbox, ends: Ends) {
        let signs = match Signs::map(ends.signs) {
            Ok(signs) => signs,
            Err(error) => return eprintln!("pagoda-outbox: map memory in common with the transmitter: {error}"),
        };
        let bell = Arc::new(Bell { socket: ends.bell, signs });
        *self.bell() = Some(Arc::clone(&bell));
        if self.is_vmm_gone.load(Ordering::SeqCst) {
            bell.ring(Told::VmmGone);
        }
        outbox.set_notice(Some(Waker::from(bell)));
        let mut answering = Answering { outbox, calls: ends.calls, readers: HashMap::new() };
        // One that has gone hears no answer.
        if let Err(error) = answering.run()
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            eprintln!("pagoda-outbox: the transmitter is not answered any more: {error}");
        }
        outbox.set_notice(None);
        *self.bell() = None;
        answering.detach_all();
    }
}

/// A reader of this transmitter.
#[derive(Debug)]
struct Reader {
    ino: Ino,
    acknowledged: u64,
    /// The transmitter has the file's memory.
    has_memory: bool,
}

#[derive(Debug)]
struct Answering<'a> {
    outbox: &'a Outbox,
    calls: OwnedFd,
    readers: HashMap<ReaderId, Reader>,
}

fn hostile() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it says what no transmitter says")
}

impl Answering<'_> {
    /// # Errors
    /// The transmitter has said something else than it may, or hears no answer.
    fn run(&mut self) -> io::Result<()> {
        let mut receiver = Receiver::new();
        while let Some((packet, _)) = receiver.receive(&self.calls)? {
            match Request::of(&packet).ok_or_else(hostile)? {
                Request::Find(path) => self.say(&self.find(&path))?,
                Request::List { directory, after } => self.say(&self.list(directory, after))?,
                Request::Figures => self.say(&Answer::Figures(self.outbox.space().figures()))?,
                Request::Attach { ino, selection } => {
                    let answer = self.attach(ino, selection);
                    self.say(&answer)?;
                }
                Request::Next { reader, acknowledged, max } => {
                    self.acknowledge(&[(reader, acknowledged)])?;
                    self.next(reader, max)?;
                }
                Request::Acknowledge(positions) => self.acknowledge(&positions)?,
                Request::Detach { reader, acknowledged } => self.detach(reader, acknowledged)?,
            }
        }
        Ok(())
    }

    fn say(&self, answer: &Answer) -> io::Result<()> {
        send(&self.calls, &answer.packet(), None)
    }

    fn find(&self, path: &Path) -> Answer {
        let space = self.outbox.space();
        let found = space.resolve(path.names()).and_then(|ino| space.attributes(ino));
        found.map_or_else(Answer::Refused, |found| Answer::Found(Found::from(&found)))
    }

    fn list(&self, directory: Ino, after: Ino) -> Answer {
        match self.outbox.space().list(directory, after, ENTRIES_MAX) {
            Ok(listed) => {
                let is_last = listed.len() < ENTRIES_MAX;
                let entry = |(name, file)| Entry { name, found: Found::from(&file) };
                Answer::Entries { entries: listed.into_iter().map(entry).collect(), is_last }
            }
            Err(refused) => Answer::Refused(refused),
        }
    }

    fn attach(&mut self, ino: Ino, selection: Selection) -> Answer {
        match self.outbox.space().attach(ino, selection) {
            Ok(id) => {
                self.readers.insert(id, Reader { ino, acknowledged: selection.start, has_memory: false });
                Answer::Attached(id)
            }
            Err(refused) => Answer::Refused(refused),
        }
    }

    /// Gives a reader its next bytes. The send cursor is behind them before the transmitter hears of them.
    fn next(&mut self, id: ReaderId, max: u64) -> io::Result<()> {
        let reader = self.readers.get_mut(&id).ok_or_else(hostile)?;
        let mut memory: Option<Arc<File>> = None;
        let answer = match self.outbox.next(id, reader.ino, max.min(PIECE_BYTES_MAX)) {
            Ok(Given::Bytes { memory: file, offset, length, is_rest }) => {
                memory = (!reader.has_memory).then_some(file);
                reader.has_memory = true;
                Answer::Bytes { offset, length, is_rest }
            }
            Ok(Given::Wait) => Answer::Wait,
            Ok(Given::End) => Answer::End,
            Ok(Given::Broken) => Answer::Broken,
            Err(_) => Answer::Refused(Refusal::NotFound),
        };
        send(&self.calls, &answer.packet(), memory.as_ref().map(|file| file.as_fd()))
    }

    /// Readers have delivered everything below these positions.
    fn acknowledge(&mut self, positions: &[(ReaderId, u64)]) -> io::Result<()> {
        let mut further = Vec::new();
        for (id, position) in positions {
            let reader = self.readers.get_mut(id).ok_or_else(hostile)?;
            if *position > reader.acknowledged {
                reader.acknowledged = *position;
                further.push((*id, *position));
            }
        }
        if !further.is_empty() {
            self.outbox.deliver(|space| acknowledge(space, &further));
        }
        Ok(())
    }

    fn detach(&mut self, id: ReaderId, acknowledged: u64) -> io::Result<()> {
        self.readers.remove(&id).ok_or_else(hostile)?;
        self.outbox.deliver(|space| {
            acknowledge(space, &[(id, acknowledged)]);
            space.detach(id);
        });
        Ok(())
    }

    /// The transmitter has gone: what it had sent and was not acknowledged was not delivered. Pages that are in its sockets' queues
    /// stay there as they are.
    fn detach_all(&mut self) {
        let readers = std::mem::take(&mut self.readers);
        if !readers.is_empty() {
            self.outbox.deliver(|space| readers.keys().for_each(|id| space.detach(*id)));
        }
    }
}

fn acknowledge(space: &mut Space, positions: &[(ReaderId, u64)]) {
    for (id, position) in positions {
        // The space counts no more than it has given; a reader that it does not know has nothing to acknowledge.
        let _ = space.acknowledge(*id, *position);
    }
}
