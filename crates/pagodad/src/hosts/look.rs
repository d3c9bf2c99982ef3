//! What a host says of itself to one that it trusts, and how fast the way between them is.
//!
//! | record of the caller | answer |
//! |---|---|
//! | `LOOK` | what the host has, as JSON |
//! | `ECHO`, and up to 64 bytes | the same record |
//! | `SINK`, and any bytes | none |
//! | `SUM` | how many bytes `SINK` brought since the last one (8, little-endian) |

use std::time::{Duration, Instant};

use pagoda_api::types::HostLook;
use pagoda_link::{Link, LinkError, RECORD_MAX};

/// The first byte of a record.
const LOOK: u8 = 1;
const ECHO: u8 = 2;
const SINK: u8 = 3;
const SUM: u8 = 4;
const ECHO_MAX: usize = 64;
/// Exchanges of which the median counts.
const ECHOES: usize = 11;
/// The way is tried for so long. On a slow one, what is in the sockets' buffers comes to it.
const TRY_FOR: Duration = Duration::from_millis(250);
/// Nor is more sent than this.
const TRY_BYTES_MAX: u64 = 1 << 30;
/// How long all of it may take, at either end. Each step has a bound of its own beside that.
const ALL_MAX: Duration = Duration::from_secs(20);
/// Records that one asks anything by, on one stream.
const QUESTIONS_MAX: usize = 32;
/// Bytes of a text that another host says.
const TEXT_MAX: usize = 64;

/// What another host has, and the way to it.
pub struct Found {
    pub look: HostLook,
    pub round_trip_us: u64,
    pub bytes_per_second: u64,
}

/// Asks the host at the other end.
pub fn ask(link: &mut Link) -> Result<Found, LinkError> {
    let began_all = Instant::now();
    link.sender.send(&[&[LOOK]])?;
    let look: HostLook = serde_json::from_slice(link.receiver.receive()?).map_err(|_| LinkError::NotUnderstood)?;
    let mut times = [Duration::ZERO; ECHOES];
    for time in &mut times {
        let began = Instant::now();
        link.sender.send(&[&[ECHO]])?;
        if link.receiver.receive()? != [ECHO] {
            return Err(LinkError::NotUnderstood);
        }
        if began_all.elapsed() > ALL_MAX {
            return Err(LinkError::Silent);
        }
        *time = began.elapsed();
    }
    times.sort_unstable();
    let content = vec![0; RECORD_MAX - 1];
    let began = Instant::now();
    let mut sent = 0;
    while began.elapsed() < TRY_FOR && sent + content.len() as u64 <= TRY_BYTES_MAX {
        link.sender.send(&[&[SINK], &content])?;
        sent += content.len() as u64;
    }
    link.sender.send(&[&[SUM]])?;
    if link.receiver.receive()? != sent.to_le_bytes() {
        return Err(LinkError::NotUnderstood);
    }
    let us = began.elapsed().as_micros().max(1);
    Ok(Found {
        look: HostLook {
            version: shown(&look.version),
            hostname: shown(&look.hostname),
            kernel: shown(&look.kernel),
            ..look
        },
        round_trip_us: times[ECHOES / 2].as_micros() as u64,
        bytes_per_second: (u128::from(sent) * 1_000_000 / us) as u64,
    })
}

/// A text of another host, for a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect()
}

/// Answers a host until it closes the stream, or has had enough of this one. Its first record has come.
pub fn answer(link: &mut Link, first: Vec<u8>, look: impl Fn() -> HostLook) -> Result<(), LinkError> {
    let (began, mut questions) = (Instant::now(), 0);
    let (mut record, mut sunk, mut sunk_in_all) = (first, 0_u64, 0_u64);
    loop {
        questions += usize::from(record.first() != Some(&SINK));
        if questions > QUESTIONS_MAX || sunk_in_all > TRY_BYTES_MAX || began.elapsed() > ALL_MAX {
            return Err(LinkError::Io(std::io::Error::other("it asks too much, and is let go")));
        }
        match record.split_first() {
            Some((&LOOK, [])) => {
                let text = serde_json::to_vec(&look()).map_err(|_| LinkError::NotUnderstood)?;
                link.sender.send(&[&text])?;
            }
            Some((&ECHO, content)) if content.len() <= ECHO_MAX => link.sender.send(&[&record])?,
            Some((&SINK, content)) => {
                sunk += content.len() as u64;
                sunk_in_all += content.len() as u64;
            }
            Some((&SUM, [])) => link.sender.send(&[&std::mem::take(&mut sunk).to_le_bytes()])?,
            _ => return Err(LinkError::NotUnderstood),
        }
        record.clear();
        match link.receiver.receive() {
            Ok(next) => record.extend_from_slice(next),
            Err(LinkError::Closed) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_host_says_is_shown_without_control_characters() {
        assert_eq!(shown("node-17"), "node-17");
        assert_eq!(shown("a\u{1b}[2Jb\n"), "a[2Jb");
        assert_eq!(shown(&"x".repeat(1000)).len(), TEXT_MAX);
    }
}
