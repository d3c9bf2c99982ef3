//! One connection to a disk over NBD, without structured replies: requests out, answers in, in any order.

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rmap_nbd::wire::{
    GREETING_MAGIC, OPTION_HEADER_SIZE, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_SIZE, Reader, RequestHeader,
    SIMPLE_REPLY_MAGIC, command, handshake_flag, info, option, option_reply,
};

/// Longer than a pool takes to give anything up (30 s): an answer that takes longer does not come.
const PATIENCE: Duration = Duration::from_secs(60);
const GREETING_SIZE: usize = 18;
/// Several answers with a page each.
const INPUT: usize = 64 << 10;
const ANSWER_SIZE: usize = 16;
/// A server that says more about its export says something else.
const OPTION_ANSWER_MAX: u32 = 1 << 16;

#[derive(Debug)]
pub struct Connection {
    input: BufReader<UnixStream>,
    output: UnixStream,
    request: Vec<u8>,
    /// Of the disk, in bytes.
    pub size: u64,
}

/// The head of an answer. What was read follows, unless there is an error.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    pub cookie: u64,
    pub error: u32,
}

impl Connection {
    /// Connects to the one export of a server.
    ///
    /// # Errors
    /// Nobody listens there, or does not speak NBD.
    pub fn open(socket: &Path) -> Result<Connection> {
        let mut output = UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        set_timeouts(&output, PATIENCE)?;
        let mut input = BufReader::with_capacity(INPUT, output.try_clone().context("copy a socket")?);
        let mut greeting = [0; GREETING_SIZE];
        input.read_exact(&mut greeting).context("read the greeting")?;
        ensure!(greeting.starts_with(GREETING_MAGIC), "this is not NBD");
        let mut go = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes().to_vec();
        go.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        go.extend_from_slice(&option::GO.to_be_bytes());
        // The default export, and nothing in particular about it.
        go.extend_from_slice(&6_u32.to_be_bytes());
        go.extend_from_slice(&[0; 6]);
        output.write_all(&go).context("choose the export")?;
        let size = export_size(&mut input)?;
        Ok(Connection { input, output, request: Vec::with_capacity(INPUT), size })
    }

    /// How long the server is waited for.
    ///
    /// # Errors
    /// The system refuses.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        set_timeouts(&self.output, patience)
    }

    /// Asks for `length` bytes to be read, or for `content` to be written.
    ///
    /// # Errors
    /// The server has gone.
    pub fn ask(&mut self, cookie: u64, offset: u64, length: u32, content: Option<&[u8]>) -> Result<()> {
        let command = if content.is_some() { command::WRITE } else { command::READ };
        self.request.clear();
        RequestHeader { flags: 0, command, cookie, offset, length }.encode(&mut self.request);
        debug_assert_eq!(self.request.len(), REQUEST_SIZE);
        self.request.extend_from_slice(content.unwrap_or_default());
        self.output.write_all(&self.request).context("send a request")
    }

    /// Waits for the head of the next answer.
    ///
    /// # Errors
    /// The server has gone, or does not answer.
    pub fn answer(&mut self) -> Result<Answer> {
        let mut head = [0; ANSWER_SIZE];
        self.input.read_exact(&mut head).context("read an answer")?;
        let mut reader = Reader(&head);
        ensure!(reader.u32() == Some(SIMPLE_REPLY_MAGIC), "this is no answer");
        let (error, cookie) = (reader.u32().context("its error")?, reader.u64().context("its cookie")?);
        Ok(Answer { cookie, error })
    }

    /// Takes what was read.
    ///
    /// # Errors
    /// The server has gone.
    pub fn content(&mut self, into: &mut [u8]) -> Result<()> {
        self.input.read_exact(into).context("read a block")
    }
}

/// In both directions: a server that is paused takes nothing in, either.
fn set_timeouts(socket: &UnixStream, patience: Duration) -> Result<()> {
    socket.set_read_timeout(Some(patience)).context("set a timeout")?;
    socket.set_write_timeout(Some(patience)).context("set a timeout")
}

/// Reads the answers to the choice of an export.
fn export_size(input: &mut impl Read) -> Result<u64> {
    let mut size = None;
    loop {
        let mut head = [0; OPTION_HEADER_SIZE + 4];
        input.read_exact(&mut head).context("read about the export")?;
        let mut reader = Reader(&head);
        ensure!(reader.u64() == Some(OPTION_REPLY_MAGIC), "this is no answer to an option");
        let (_, kind, length) = (reader.u32(), reader.u32(), reader.u32().context("its length")?);
        ensure!(length <= OPTION_ANSWER_MAX, "an answer of {length} bytes");
        let mut content = vec![0; length as usize];
        input.read_exact(&mut content).context("read about the export")?;
        let mut reader = Reader(&content);
        match kind {
            Some(option_reply::INFO) if reader.u16() == Some(info::EXPORT) => size = reader.u64(),
            Some(option_reply::INFO) => {}
            Some(option_reply::ACK) => return size.context("the server does not say how large the disk is"),
            other => bail!("the server refuses its export: {other:?}"),
        }
    }
}
