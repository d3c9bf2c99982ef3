//! The daemon's side: figures, jobs, and another size for the space.
//!
//! The daemon made a listening socket in a directory of its own, and gives it to this process before that leaves the host; so
//! whichever daemon there is later finds it by its path, and nobody else can connect. Packets are those of
//! [`pagoda_abi::attach`]. One connection at a time: a daemon that has died is gone from its connection, and the next one's
//! waits. If nobody asks, nothing changes; guest and clients notice nothing of it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pagoda_abi::Token;
use pagoda_abi::attach::{Packet, Text};
use pagoda_sys::socket::{Connection, Listener, Received};

use crate::outbox::Outbox;

/// How long the daemon may take to give the socket.
const GIVEN_MAX: Duration = Duration::from_secs(10);
/// A connection on which nothing was asked for so long is closed, for there may be another. The daemon asks every second.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// So much memory is given back before it is looked whether the daemon asks.
const GIVE_BACK_BYTES: u64 = 64 << 20;
/// After an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A space below this could hold no page, and is no size that the daemon gives.
const SPACE_BYTES_MIN: u64 = pagoda_outbox::limits::PAGE_BYTES;

/// Says to the daemon that this process is the outbox that has the token in this variable, and gets the socket to listen on.
///
/// # Errors
/// No token; the daemon does not answer, or refuses.
pub fn fetch(attach: &Path, token: &str) -> Result<Listener> {
    let text = std::env::var(token).with_context(|| format!("read {token}"))?;
    let token = Token::from_hex(&text).with_context(|| format!("{token} is no token"))?;
    let daemon = Connection::connect(attach).context("connect to the daemon")?;
    daemon.set_patience(Some(GIVEN_MAX)).context("connect to the daemon")?;
    daemon.send(&Packet::Outbox { token }, &[]).context("ask the daemon for the control socket")?;
    match daemon.recv().context("hear what the daemon answers")? {
        Received::Message { packet: Packet::Welcome { .. }, mut fds } if fds.len() == 1 => {
            fds.pop().and_then(Listener::from_fd).context("the daemon gave something else than a socket to listen on")
        }
        Received::Message { packet: Packet::Refused { text }, .. } => bail!("the daemon refuses: {}", text.as_str()),
        Received::Message { .. } => bail!("the daemon answers something else: is it of the same version?"),
        Received::Nothing => bail!("the daemon did not answer within {} s", GIVEN_MAX.as_secs()),
        Received::Closed => bail!("the daemon closed the connection: see its log"),
    }
}

/// Answers until the process ends, in a thread of its own.
pub fn serve(outbox: &Arc<Outbox>, listener: Listener) -> Result<()> {
    let outbox = Arc::clone(outbox);
    let serve = move || {
        loop {
            match listener.accept() {
                Ok(daemon) => converse(&outbox, &daemon),
                // A descriptor may be free in a while.
                Err(_) => std::thread::sleep(ACCEPT_PAUSE),
            }
        }
    };
    std::thread::Builder::new().name("control".into()).spawn(serve).context("start the control thread")?;
    Ok(())
}

/// Answers until the daemon is gone, or says what it does not say.
fn converse(outbox: &Outbox, daemon: &Connection) {
    if daemon.set_patience(Some(SILENCE_MAX)).is_err() {
        return;
    }
    while let Ok(Received::Message { packet, .. }) = daemon.recv() {
        if daemon.send(&answer(outbox, &packet), &[]).is_err() {
            return;
        }
        // Behind the answer and between questions, for all of it may take longer than the daemon waits.
        while !daemon.is_readable() && outbox.give_back_excess(GIVE_BACK_BYTES) {}
    }
}

fn answer(outbox: &Outbox, packet: &Packet) -> Packet {
    match *packet {
        Packet::Look { seq } => Packet::Figures { seq, figures: outbox.figures() },
        Packet::SetSpace { seq, bytes } if bytes >= SPACE_BYTES_MIN => {
            outbox.resize(bytes);
            Packet::Figures { seq, figures: outbox.figures() }
        }
        Packet::Jobs { seq, after } => {
            let (counts, jobs) = outbox.jobs(after);
            Packet::JobsEnded { seq, counts, jobs }
        }
        Packet::SetSpace { .. } => Packet::Refused { text: Text::new("a space has at least a page") },
        _ => Packet::Refused { text: Text::new("this is asked on another connection") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(daemon: &Connection, packet: Packet) -> Packet {
        daemon.send(&packet, &[]).unwrap();
        match daemon.recv().unwrap() {
            Received::Message { packet, .. } => packet,
            other => panic!("{other:?}"),
        }
    }

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("pagoda-outbox-{}-{name}", std::process::id()))
    }

    #[test]
    fn the_daemon_looks_and_gives_another_size() {
        let outbox = Arc::new(Outbox::new(1 << 20, Duration::ZERO));
        let path = path("looks");
        serve(&outbox, Listener::bind(&path).unwrap()).unwrap();
        let daemon = Connection::connect_at_once(&path).unwrap();
        daemon.set_nonblocking(false).unwrap();
        let Packet::Figures { seq: 7, figures } = asked(&daemon, Packet::Look { seq: 7 }) else { panic!() };
        assert_eq!((figures.space, figures.used, figures.files), (1 << 20, 0, 0));
        let Packet::Figures { seq: 8, figures } = asked(&daemon, Packet::SetSpace { seq: 8, bytes: 2 << 20 }) else {
            panic!()
        };
        assert_eq!(figures.space, 2 << 20);
        for bad in
            [Packet::SetSpace { seq: 9, bytes: 0 }, Packet::Clock { seq: 9 }, Packet::Figures { seq: 9, figures }]
        {
            assert!(matches!(asked(&daemon, bad), Packet::Refused { .. }), "{bad:?}");
        }
        assert_eq!(outbox.figures().space, 2 << 20);
        let Packet::JobsEnded { seq: 10, counts, jobs } = asked(&daemon, Packet::Jobs { seq: 10, after: u64::MAX })
        else {
            panic!()
        };
        assert_eq!((counts.oldest, counts.last, jobs.as_slice().len()), (1, 0, 0));
        // The next daemon, whose connection waits until this one is gone.
        let next = Connection::connect(&path).unwrap();
        next.send(&Packet::Look { seq: 1 }, &[]).unwrap();
        assert!(!next.is_readable());
        drop(daemon);
        assert!(matches!(next.recv().unwrap(), Received::Message { packet: Packet::Figures { seq: 1, .. }, .. }));
        std::fs::remove_file(&path).unwrap();
    }
}
