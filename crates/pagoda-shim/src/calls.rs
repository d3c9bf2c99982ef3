//! Questions that the VMM's threads ask the daemon, one at a time, on a connection of their own.
//!
//! Only one so far: the guest gave pages back (balloon, free page reporting). When the daemon is away the answer is
//! "do nothing", which is safe: the guest promised nothing about the content of such pages, and the old one stays. A daemon
//! that is connected but does not answer holds the asking thread, as it would hold one that faults.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use pagoda_abi::attach::Packet;

use crate::config::Config;
use crate::link::{self, Broken};

struct Line {
    link: Option<c_int>,
    seq: u64,
}

static LINE: Mutex<Line> = Mutex::new(Line { link: None, seq: 0 });

/// Tells the daemon that these pages of a region are free, and waits until it has made them zero. Nothing happens if
/// there is no daemon.
pub fn discard(config: &Config, region: usize, offset: u64, len: u64) {
    let mut line = LINE.lock().unwrap_or_else(PoisonError::into_inner);
    line.seq += 1;
    let question = Packet::Discard { seq: line.seq, region: region as u32, offset, len };
    // The connection may be one to a daemon that is gone: then a second attempt meets its successor.
    for _ in 0..2 {
        let asked = line.connected(config).and_then(|link| ask(link, &question));
        match asked {
            Ok(()) => return,
            Err(_) => line.hang_up(),
        }
    }
}

fn ask(link: c_int, question: &Packet) -> Result<(), Broken> {
    link::send(link, question, &[])?;
    match (link::receive_plain(link)?, question) {
        (Packet::Discarded { seq: answered }, Packet::Discard { seq, .. }) if answered == *seq => Ok(()),
        _ => Err(Broken::Gone),
    }
}

impl Line {
    fn connected(&mut self, config: &Config) -> Result<c_int, Broken> {
        if let Some(link) = self.link {
            return Ok(link);
        }
        let link = link::connect(&config.address)?;
        self.link = Some(link);
        link::send(link, &Packet::Calls { token: config.token }, &[])?;
        match link::receive_plain(link)? {
            Packet::Welcome { .. } => Ok(link),
            _ => Err(Broken::Gone),
        }
    }

    fn hang_up(&mut self) {
        if let Some(link) = self.link.take() {
            link::close(link);
        }
    }
}
