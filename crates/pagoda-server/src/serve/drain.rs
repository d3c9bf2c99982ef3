//! The end of a server: what asks for it, and the wait for clients to move their pages away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_cli::options::Serve;
use rmap::crypto::PublicKey;
use rmap::server::Server;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::admissions::Admissions;

/// Who asked for a drain looks several times a second; an answer or two may get lost.
const SEEN_AFTER: Duration = Duration::from_secs(2);

/// Signals to end. The first asks clients to move their pages away; the second ends the process.
#[derive(Debug)]
pub struct Signals {
    asked: Arc<AtomicBool>,
    stop: AtomicBool,
}

impl Signals {
    /// Handles the signals, and the end of standard input if the options ask for it.
    ///
    /// # Errors
    /// A signal cannot be handled.
    pub fn obeyed(options: &Serve) -> Result<Signals> {
        let signals = Signals::new()?;
        if options.while_stdin {
            signals.obey_end_of_input();
        }
        Ok(signals)
    }

    fn new() -> Result<Signals> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order, so that the first signal finds the flag unset.
            signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&asked))
                .context("handle signals")?;
            signal_hook::flag::register(signal, Arc::clone(&asked)).context("handle signals")?;
        }
        Ok(Signals { asked, stop: AtomicBool::new(false) })
    }

    /// Whether the server is to end now.
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The end of standard input, or an error of it, asks like a signal.
    fn obey_end_of_input(&self) {
        let asked = Arc::clone(&self.asked);
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            asked.store(true, Ordering::Relaxed);
        });
    }
}

/// The wait for clients to move their pages away.
#[derive(Debug, Default)]
pub struct Drain {
    /// How long it waits for clients after a signal.
    patience: Duration,
    /// When a signal first asked it to end.
    since: Option<Instant>,
    asked_by: Option<PublicKey>,
    empty_since: Option<Instant>,
}

impl Drain {
    /// A server that waits so long for its clients after a signal.
    pub fn with_patience(patience: Duration) -> Drain {
        Drain { patience, ..Drain::default() }
    }

    /// Does what was asked for, and finds out whether the server is to end.
    pub fn follow(&mut self, server: &mut Server, admitted: &Admissions, signals: &Signals) {
        if signals.asked.load(Ordering::Relaxed) {
            self.obey(server, signals);
        } else {
            self.oblige(server, admitted, signals);
        }
    }

    /// After a signal: what has not moved in time is gone.
    fn obey(&mut self, server: &mut Server, signals: &Signals) {
        let since = *self.since.get_or_insert_with(|| {
            server.begin_drain();
            if !server.is_drained() {
                eprintln!("pagoda: waiting up to {:?} for clients to move their pages away", self.patience);
            }
            Instant::now()
        });
        if server.is_drained() || since.elapsed() >= self.patience {
            signals.stop.store(true, Ordering::Relaxed);
        }
    }

    /// At a client's request: it ends when it is empty, and the client has seen that.
    fn oblige(&mut self, server: &Server, admitted: &Admissions, signals: &Signals) {
        let asked_by = server.drain_asked_by();
        if self.asked_by != asked_by {
            match asked_by {
                Some(key) => eprintln!("pagoda: {} asks this server to move everything away", admitted.name_of(key)),
                None => eprintln!("pagoda: this server is not asked to move anything away any more"),
            }
            self.asked_by = asked_by;
        }
        if asked_by.is_none() || !server.is_drained() {
            self.empty_since = None;
        } else if self.empty_since.get_or_insert_with(Instant::now).elapsed() >= SEEN_AFTER {
            eprintln!("pagoda: everything has moved away");
            signals.stop.store(true, Ordering::Relaxed);
        }
    }
}
