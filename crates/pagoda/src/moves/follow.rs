//! Follows a move to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_api::{Client, ClientError, ErrorCode, MovePhase, MoveStatus};
use signal_hook::consts::SIGINT;

use super::text;
use crate::exit::{GivenUp, Undecided};
use crate::output::Progress;

/// The pause between two looks how far a move is.
pub const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long a daemon may be away. One that is restarted answers again within seconds.
pub const AWAY_MAX: Duration = Duration::from_secs(60);
/// How long the other host may leave a grant unanswered: as long as a link may be away before one (docs/protocol/move.md). The
/// daemon goes on asking.
const UNANSWERED_MAX: Duration = Duration::from_secs(40);
/// Of a command that is interrupted twice, as a shell counts it.
const INTERRUPTED: i32 = 128 + SIGINT;

/// Ctrl-C: once it is noted, and the second time this process ends.
#[derive(Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// # Errors
    /// The signal cannot be handled.
    pub fn handle() -> Result<Interrupt> {
        let noted = Arc::new(AtomicBool::new(false));
        // In this order: the first time nothing is noted yet.
        signal_hook::flag::register_conditional_shutdown(SIGINT, INTERRUPTED, Arc::clone(&noted))
            .and_then(|_| signal_hook::flag::register(SIGINT, Arc::clone(&noted)))
            .context("handle Ctrl-C")?;
        Ok(Interrupt(noted))
    }

    pub fn has_come(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a move has ended that was just begun.
///
/// # Errors
/// That is not known: the daemon went away, or the other host does not answer.
pub fn to_its_end(client: &Client, begun: MoveStatus, interrupt: &Interrupt) -> Result<MoveStatus> {
    let mut progress = Progress::default();
    let (mut followed, mut is_cancelled) = (Followed::new(begun), false);
    while !followed.now().is_over() {
        progress.say(&text::line(followed.now()));
        if interrupt.has_come() && !is_cancelled {
            is_cancelled = true;
            // The line of the progress goes first.
            progress = Progress::default();
            followed.cancel(client);
        }
        std::thread::sleep(LOOK_EVERY);
        followed.look(client)?;
    }
    Ok(followed.now)
}

/// A move of which somebody waits for the end.
#[derive(Debug)]
pub struct Followed {
    now: MoveStatus,
    /// Since when the daemon is away, and since when the other host does not answer a grant.
    away_since: Option<Instant>,
    granted_since: Option<Instant>,
}

impl Followed {
    /// A move that was just begun.
    pub const fn new(begun: MoveStatus) -> Followed {
        Followed { now: begun, away_since: None, granted_since: None }
    }

    /// What was known of it last.
    pub const fn now(&self) -> &MoveStatus {
        &self.now
    }

    /// Looks how far it is. Whether it is over. To be called some times a second.
    ///
    /// # Errors
    /// That cannot be told: the daemon went away, or the other host does not answer.
    pub fn look(&mut self, client: &Client) -> Result<bool> {
        match client.move_of(&self.now.vm) {
            Ok(status) => (self.now, self.away_since) = (status, None),
            Err(error) if error.is_unreachable() => {
                if self.away_since.get_or_insert_with(Instant::now).elapsed() > AWAY_MAX {
                    return Err(left_alone(&self.now, &error));
                }
            }
            Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => return Err(forgotten(client, &self.now)),
            Err(error) => return Err(error.into()),
        }
        if self.now.phase != MovePhase::Granted {
            self.granted_since = None;
        } else if self.granted_since.get_or_insert_with(Instant::now).elapsed() > UNANSWERED_MAX {
            return Err(unanswered(&self.now));
        }
        Ok(self.now.is_over())
    }

    /// Asks that it be given up, and says what comes of that.
    pub fn cancel(&self, client: &Client) {
        let (vm, host) = (&self.now.vm, &self.now.host);
        if self.now.phase == MovePhase::Postcopy {
            return eprintln!(
                "pagoda: {vm} runs on {host} already, and the rest of its memory follows; Ctrl-C again to leave"
            );
        }
        match client.cancel_move(vm) {
            Ok(_) if self.now.phase == MovePhase::Granted => {
                eprintln!("pagoda: {host} is asked to give {vm} back; Ctrl-C again to leave, and the move goes on");
            }
            Ok(_) => {
                eprintln!("pagoda: the move of {vm} is being given up; Ctrl-C again to leave, and the daemon goes on");
            }
            Err(error) => eprintln!("pagoda: the move of {vm} goes on: {error}"),
        }
    }
}

fn left_alone(now: &MoveStatus, error: &ClientError) -> anyhow::Error {
    let phase = now.phase.word();
    Undecided(format!(
        "nobody knows here how the move of {0} goes on, which was {phase} when the daemon went away: {error}\nwhen it is back: \
         pagoda moves show {0}",
        now.vm
    ))
    .into()
}

/// The daemon was started again in between, and has nothing of the move. Without a note that gives it away, the VM is this
/// host's.
fn forgotten(client: &Client, now: &MoveStatus) -> anyhow::Error {
    let (vm, host) = (&now.vm, &now.host);
    match client.vm(vm) {
        Ok(_) => GivenUp(format!("the daemon was started again, which ends a move: {vm} runs on here")).into(),
        Err(_) => Undecided(format!(
            "the daemon was started again and knows nothing of {vm} any more: look at `pagoda ls` on {host}"
        ))
        .into(),
    }
}

fn unanswered(now: &MoveStatus) -> anyhow::Error {
    let (vm, host) = (&now.vm, &now.host);
    Undecided(format!(
        "{vm} was given to {host}, which has not answered for {} s: it stands still here, and may run there. The daemon goes on \
         asking: pagoda moves show {vm}\nif {host} is gone for good, make sure of that, and then: pagoda moves resolve {vm}",
        UNANSWERED_MAX.as_secs()
    ))
    .into()
}
