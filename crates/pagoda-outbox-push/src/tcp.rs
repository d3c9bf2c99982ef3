//! A connection for each file: its bytes, and then the connection's end. Nothing else is sent, so whatever reads a stream can receive.
//!
//! The end of the stream means the end of the file, and nothing else does: from its first moment on the connection is one that is
//! reset when it is closed (SO_LINGER of 0), also if this process is killed. Only a file that has ended is followed by an orderly end.
//! Then the receiver closes in turn, and this is taken as its word that it has read everything: a kernel resets the connection if
//! something was left, and has not acknowledged what came later. What the receiver's kernel has acknowledged before says less, as
//! nobody may have read it. So another attempt begins at the start, with another connection. A receiver whose close was lost sees a
//! file twice, and has no name to tell it by. One that closes its sending half before it has read to the end deceives us.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use pagoda_sys::tcp::unacknowledged;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::select;
use tokio::time::timeout;

use crate::address::Address;
use crate::dial::{Dial, connect};
use crate::failure::{Failure, Trouble};
use crate::pump::{STALL_MAX, Way};
use crate::source::{Source, take};

/// How long a receiver that has the whole file may take to close.
const CLOSE_MAX: Duration = Duration::from_secs(300);

/// A file's way to a receiver of plain connections.
#[derive(Debug)]
pub struct Tcp {
    dialer: Arc<dyn Dial>,
    address: Address,
}

impl Tcp {
    pub fn new(dialer: Arc<dyn Dial>, address: Address) -> Tcp {
        Tcp { dialer, address }
    }

    /// Sends all of `source`, also while it grows. The bytes that the receiver has then.
    pub async fn attempt<S: Source>(&mut self, source: &mut S, way: Way<'_>) -> Result<u64, Trouble> {
        // Nobody is connected to before there is something to say.
        take(source, 0, 1).await?;
        let mut stream = connect(&*self.dialer, &self.address).await?;
        stream.set_zero_linger().map_err(|error| lost(&error))?;
        way.note_sent(0);
        let sent = {
            // These halves do not end the stream when they go, unlike owned ones.
            let (mut reads, mut writes) = stream.split();
            let sent = select! {
                biased;
                sent = send(source, &mut writes, way) => sent?,
                error = closed(&mut reads) => return Err(not_taken("it closed the connection before its end", error)),
            };
            // The only way to an orderly end.
            writes.shutdown().await.map_err(|error| lost(&error))?;
            match timeout(CLOSE_MAX, closed(&mut reads)).await {
                Err(_) => return Err(Failure::Stalled { limit: CLOSE_MAX }.into()),
                Ok(Some(error)) => return Err(not_taken("the connection was reset", Some(error))),
                Ok(None) => sent,
            }
        };
        // Its close also acknowledges our end, unless it came before that.
        let left = unacknowledged(&stream).map_err(|error| Failure::Lost { what: error.to_string() })?;
        if left != 0 {
            return Err(not_taken("it closed the connection before its end", None));
        }
        source.acknowledge(sent);
        way.note_acknowledged(sent);
        Ok(sent)
    }
}

fn not_taken(what: &str, error: Option<std::io::Error>) -> Trouble {
    let why = error.map_or_else(String::new, |error| format!(" ({error})"));
    Failure::NotTaken { what: format!("{what}{why}") }.into()
}

fn lost(error: &std::io::Error) -> Failure {
    Failure::Lost { what: error.to_string() }
}

async fn send<S: Source>(source: &mut S, writes: &mut WriteHalf<'_>, way: Way<'_>) -> Result<u64, Trouble> {
    let mut at = 0;
    while let Some(bytes) = take(source, at, way.piece_bytes()).await? {
        way.wait_turn(bytes.len()).await;
        let written = timeout(STALL_MAX, writes.write_all(&bytes)).await;
        written.map_err(|_| Failure::Stalled { limit: STALL_MAX })?.map_err(|error| lost(&error))?;
        at += bytes.len() as u64;
        way.note_sent(at);
    }
    Ok(at)
}

/// Until the receiver closes. What it says before is read and means nothing. The error, if it was no orderly close.
async fn closed(reads: &mut ReadHalf<'_>) -> Option<std::io::Error> {
    let mut buffer = [0; 4096];
    loop {
        match reads.read(&mut buffer).await {
            Ok(0) => return None,
            Err(error) if error.kind() != ErrorKind::Interrupted => return Some(error),
            Ok(_) | Err(_) => {}
        }
    }
}
