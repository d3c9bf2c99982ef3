//! The transmitter's side: files as it knows them.
//!
//! A question waits for its answer, as a lock would: the other side answers at once. What readers have acknowledged goes with their next
//! question, or from time to time ([`Files::say_acknowledged`]).
//!
//! Answers are checked, for the other side reads what a guest says: an answer to something else, or memory that is no file's, is an
//! error of the one who asked.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use pagoda_outbox::limits::NODES_MAX;
use pagoda_outbox::{Figures, Ino, ReaderId, Refusal, Selection};
use rustix::fs::FileType;
use tokio::time::sleep;

use super::answer::{Answer, Entry, Found};
use super::request::{Path, Request};
use super::signs::Signs;
use super::{Ends, Receiver, Told, send};

/// Acknowledged bytes of a reader that has sent all there is are said at once from here on, for a writer may wait for their room.
const SAID_AT_ONCE_BYTES: u64 = 256 << 10;
/// Readers that wait are woken no more often than that, or each write to one file would wake the readers of all.
const WAKE_INTERVAL: Duration = Duration::from_millis(2);
/// Bytes that are heard at once.
const TOLD_MAX: usize = 64;

/// What a reader may send.
#[derive(Debug, PartialEq, Eq)]
pub enum Given {
    Bytes {
        offset: u64,
        length: u64,
        /// There were no more then, and it is not the end.
        is_rest: bool,
    },
    Wait,
    End,
    Broken,
}

/// What is known of a reader.
#[derive(Debug, Clone, Copy)]
struct Reader {
    /// Everything below has arrived.
    acknowledged: u64,
    /// Of that, what the other side knows.
    said: u64,
    /// Changes that there had been when it got all there was.
    emptied: Option<u64>,
}

#[derive(Debug)]
pub struct Files {
    calls: Mutex<(OwnedFd, Receiver)>,
    bell: UnixStream,
    signs: Signs,
    readers: Mutex<HashMap<ReaderId, Reader>>,
    /// Bodies that wait for more.
    waiting: Mutex<Vec<Waker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unexpected() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the process that serves answers something else")
}

impl Files {
    /// # Errors
    /// These are no ends.
    pub fn new(ends: Ends) -> io::Result<Files> {
        let bell = UnixStream::from(ends.bell);
        bell.set_nonblocking(true)?;
        Ok(Files {
            calls: Mutex::new((ends.calls, Receiver::new())),
            bell,
            signs: Signs::map(ends.signs)?,
            readers: Mutex::default(),
            waiting: Mutex::default(),
        })
    }

    fn ask(&self, request: &Request) -> io::Result<(Answer, Option<OwnedFd>)> {
        let mut calls = lock(&self.calls);
        let (socket, receiver) = &mut *calls;
        send(socket, &request.packet(), None)?;
        let (packet, fd) = receiver.receive(socket)?.ok_or(ErrorKind::ConnectionReset)?;
        Ok((Answer::of(&packet).ok_or_else(unexpected)?, fd))
    }

    fn say(&self, request: &Request) {
        // If nobody is there, this process is about to end.
        let _ = send(&lock(&self.calls).0, &request.packet(), None);
    }

    /// The file or directory that a path names. `None`: there is none.
    pub fn find<'a>(&self, names: impl Iterator<Item = &'a [u8]>) -> io::Result<Option<Found>> {
        let Some(path) = Path::new(names) else { return Ok(None) };
        match self.ask(&Request::Find(path))?.0 {
            Answer::Found(found) => Ok(Some(found)),
            Answer::Refused(_) => Ok(None),
            _ => Err(unexpected()),
        }
    }

    /// The names in a directory, in the order in which files were made. `None`: there is no such directory.
    pub fn list(&self, directory: Ino) -> io::Result<Option<Vec<Entry>>> {
        let mut all: Vec<Entry> = Vec::new();
        loop {
            let after = all.last().map_or(Ino(0), |entry| entry.found.ino);
            match self.ask(&Request::List { directory, after })?.0 {
                Answer::Entries { entries, is_last } => {
                    let mut before = after;
                    for entry in &entries {
                        if entry.found.ino <= before {
                            return Err(unexpected());
                        }
                        before = entry.found.ino;
                    }
                    let is_empty = entries.is_empty();
                    all.extend(entries);
                    if is_last || is_empty || all.len() >= NODES_MAX {
                        return Ok(Some(all));
                    }
                }
                Answer::Refused(_) => return Ok(None),
                _ => return Err(unexpected()),
            }
        }
    }

    pub fn figures(&self) -> io::Result<Figures> {
        match self.ask(&Request::Figures)?.0 {
            Answer::Figures(figures) => Ok(figures),
            _ => Err(unexpected()),
        }
    }

    pub fn attach(&self, ino: Ino, selection: Selection) -> io::Result<Result<ReaderId, Refusal>> {
        match self.ask(&Request::Attach { ino, selection })?.0 {
            Answer::Attached(reader) => {
                let start = Reader { acknowledged: selection.start, said: selection.start, emptied: None };
                lock(&self.readers).insert(reader, start);
                Ok(Ok(reader))
            }
            Answer::Refused(refused) => Ok(Err(refused)),
            _ => Err(unexpected()),
        }
    }

    /// What a reader that has everything below `from` sends next. Its file's memory is put into `memory`, once. On [`Given::Wait`] `waker`
    /// is woken when that may have changed.
    pub fn next(
        &self,
        reader: ReaderId,
        from: u64,
        max: u64,
        memory: &mut Option<Arc<File>>,
        waker: &Waker,
    ) -> io::Result<Given> {
        loop {
            // Before the question, so that what changes since counts as a change.
            let changes = self.signs.changes();
            let is_empty = lock(&self.readers).get(&reader).is_some_and(|reader| reader.emptied == Some(changes));
            if !is_empty {
                let given = self.ask_next(reader, from, max, memory)?;
                if let (Given::Wait | Given::Bytes { is_rest: true, .. }, Some(reader)) =
                    (&given, lock(&self.readers).get_mut(&reader))
                {
                    reader.emptied = Some(changes);
                }
                if given != Given::Wait {
                    return Ok(given);
                }
            }
            if self.signs.want(changes) {
                let mut waiting = lock(&self.waiting);
                if !waiting.iter().any(|known| known.will_wake(waker)) {
                    waiting.push(waker.clone());
                }
                return Ok(Given::Wait);
            }
        }
    }

    fn ask_next(&self, id: ReaderId, from: u64, max: u64, memory: &mut Option<Arc<File>>) -> io::Result<Given> {
        let acknowledged = match lock(&self.readers).get_mut(&id) {
            Some(reader) => {
                reader.said = reader.acknowledged;
                reader.said
            }
            None => return Err(unexpected()),
        };
        let (answer, fd) = self.ask(&Request::Next { reader: id, acknowledged, max })?;
        if let Some(fd) = fd {
            let is_file = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) == FileType::RegularFile;
            if !is_file || memory.is_some() {
                return Err(unexpected());
            }
            *memory = Some(Arc::new(File::from(fd)));
        }
        match answer {
            Answer::Bytes { offset, length, is_rest }
                if offset == from && (1..=max).contains(&length) && memory.is_some() =>
            {
                Ok(Given::Bytes { offset, length, is_rest })
            }
            Answer::Wait => Ok(Given::Wait),
            Answer::End => Ok(Given::End),
            Answer::Broken => Ok(Given::Broken),
            Answer::Refused(_) => Err(ErrorKind::NotFound.into()),
            _ => Err(unexpected()),
        }
    }

    /// Everything of a reader below `position` has arrived.
    pub fn note_acknowledged(&self, reader: ReaderId, position: u64) {
        if let Some(reader) = lock(&self.readers).get_mut(&reader) {
            reader.acknowledged = reader.acknowledged.max(position);
        }
    }

    /// The reader asks for nothing for a moment.
    pub fn pause(&self, reader: ReaderId) {
        self.say_acknowledged_of(|id, unsaid| id == reader && unsaid >= SAID_AT_ONCE_BYTES);
    }

    /// Says what was acknowledged and not said.
    pub fn say_acknowledged(&self) {
        self.say_acknowledged_of(|_, _| true);
    }

    fn say_acknowledged_of(&self, is_wanted: impl Fn(ReaderId, u64) -> bool) {
        let mut positions = Vec::new();
        for (id, reader) in lock(&self.readers).iter_mut() {
            let unsaid = reader.acknowledged - reader.said;
            if unsaid > 0 && is_wanted(*id, unsaid) {
                reader.said = reader.acknowledged;
                positions.push((*id, reader.acknowledged));
            }
        }
        if !positions.is_empty() {
            self.say(&Request::Acknowledge(positions));
        }
    }

    /// The reader is gone; what it has not acknowledged was not delivered.
    pub fn detach(&self, reader: ReaderId) {
        let known = lock(&self.readers).remove(&reader);
        if let Some(Reader { acknowledged, .. }) = known {
            self.say(&Request::Detach { reader, acknowledged });
        }
    }

    /// Wakes bodies that wait when there may be more. Ends when the process that serves has gone.
    pub async fn listen(&self, vmm_gone: impl Fn()) -> io::Result<()> {
        let bell = tokio::net::UnixStream::from_std(self.bell.try_clone()?)?;
        let mut told = [0; TOLD_MAX];
        loop {
            bell.readable().await?;
            let count = match bell.try_read(&mut told) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => continue,
                heard => heard?,
            };
            if count == 0 {
                return Ok(());
            }
            for byte in &told[..count] {
                match Told::of(*byte) {
                    Some(Told::More) => {
                        lock(&self.waiting).drain(..).for_each(Waker::wake);
                        sleep(WAKE_INTERVAL).await;
                    }
                    Some(Told::VmmGone) => vmm_gone(),
                    None => return Err(unexpected()),
                }
            }
        }
    }
}
