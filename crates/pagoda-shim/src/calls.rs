//! Questions that the VMM's threads ask the daemon, one at a time, on a connection of their own.
//!
//! One is that the guest gave pages back (balloon, free page reporting), unless the VM is not armed: then the shim
//! punches by itself (`pagoda_abi::shared`). When the daemon is away the answer is "do nothing", which is safe: the guest promised
//! nothing about the content of such pages, and the old one stays. A daemon that is connected but does not answer holds the
//! asking thread, as it would hold one that faults. No question is left behind: when its connection is closed, the daemon is gone
//! or has given it up, so that no page is discarded after the guest uses it again.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use pagoda_abi::PAGE_SIZE;
use pagoda_abi::attach::{FLAG_LENT, ForeignReason, Packet};

use crate::config::Config;
use crate::link::{self, Broken};
use crate::{clock, real};

/// Pause before a daemon that is away is looked for again.
const DAEMON_AWAY_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// Most that is punched at a time without the daemon: some milliseconds.
const PIECE: u64 = 64 << 20;

struct Line {
    link: Option<c_int>,
    seq: u64,
}

static LINE: Mutex<Line> = Mutex::new(Line { link: None, seq: 0 });

/// These pages of a region are free: returns when they are zero. While the VM is armed the daemon makes them so, and
/// nothing happens if there is none.
pub fn discard(config: &Config, region: usize, offset: u64, len: u64) {
    let end = offset + len;
    let mut at = offset;
    while at < end {
        let piece = PIECE.min(end - at);
        if !punch_alone(config, region, at, piece) {
            return ask_to_discard(config, region, at, end - at);
        }
        at += piece;
    }
}

/// The daemon waits for a punch before it arms the VM.
fn punch_alone(config: &Config, region: usize, offset: u64, len: u64) -> bool {
    const MODE: c_int = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let punch = || {
        // SAFETY: fallocate(2) on our own fd; the guest promised nothing about the pages, and nobody has references to them.
        unsafe { real::fallocate(config.ram()[region].fd, MODE, offset as i64, len as i64) == 0 }
    };
    clock::shared().is_some_and(|shared| shared.punch_alone(len / PAGE_SIZE as u64, punch))
}

fn ask_to_discard(config: &Config, region: usize, offset: u64, len: u64) {
    let mut line = LINE.lock().unwrap_or_else(PoisonError::into_inner);
    // The daemon gives 32 bits of it back.
    line.seq = u64::from((line.seq as u32).wrapping_add(1));
    let question = Packet::Discard { seq: line.seq, region: region as u32, offset, len };
    // The connection may be one to a daemon that is gone: then a second attempt meets its successor.
    for _ in 0..2 {
        let asked = line.connected(config).and_then(|link| ask(link, &question));
        match asked {
            Ok(_) => return,
            Err(_) => line.hang_up(),
        }
    }
}

/// Tells the daemon that others are about to reach RAM, and waits until all of it is in the RAM files for good. Waits for
/// a daemon that is away, too.
pub fn wait_until_resident(config: &Config, reason: ForeignReason) {
    let mut line = LINE.lock().unwrap_or_else(PoisonError::into_inner);
    let question = Packet::Foreign { reason };
    while line.connected(config).and_then(|link| ask(link, &question)).is_err() {
        line.hang_up();
        std::thread::sleep(DAEMON_AWAY_PAUSE);
    }
}

/// Asks for leave to give RAM to a mapper. False: the daemon does not know it.
pub fn ask_to_lend(config: &Config) -> bool {
    let mut line = LINE.lock().unwrap_or_else(PoisonError::into_inner);
    let question = Packet::Foreign { reason: ForeignReason::RamFdLent };
    loop {
        match line.connected(config).and_then(|link| ask(link, &question)) {
            Ok(flags) => return flags & FLAG_LENT != 0,
            Err(_) => line.hang_up(),
        }
        std::thread::sleep(DAEMON_AWAY_PAUSE);
    }
}

/// The flags of the answer, if it has any.
fn ask(link: c_int, question: &Packet) -> Result<u32, Broken> {
    link::send(link, question, &[])?;
    match (link::receive_answer(link)?, question) {
        (Packet::Discarded { seq: answered }, Packet::Discard { seq, .. }) if answered == *seq => Ok(0),
        (Packet::Welcome { flags }, Packet::Foreign { .. }) => Ok(flags),
        _ => Err(Broken::Gone),
    }
}

impl Line {
    fn connected(&mut self, config: &Config) -> Result<c_int, Broken> {
        if let Some(link) = self.link {
            return Ok(link);
        }
        let link = link::connect(&config.name.address)?;
        self.link = Some(link);
        link::send(link, &Packet::Calls { token: config.name.token }, &[])?;
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
