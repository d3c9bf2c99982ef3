//! The moves of a drain, some at a time.
//!
//! The daemon moves each VM by itself; this begins the moves in the plan's order, follows them, and begins the next when one is over.
//! Ctrl-C has those that are under way given up and begins no more; those that are given away already go on, and are followed.

use std::time::Instant;

use anyhow::Result;
use pagoda_api::{Client, ClientError, MoveReply, MoveRequest};

use super::text;
use super::types::{DrainPlan, Ended, Outcome, PlannedVm};
use crate::exit::GivenUp;
use crate::moves::follow::{AWAY_MAX, Followed, Interrupt, LOOK_EVERY};
use crate::output::Progress;

/// A move that is under way.
struct Moving<'a> {
    vm: &'a str,
    host: &'a str,
    followed: Followed,
}

/// A move that was not begun.
enum NotBegun {
    /// Nobody was asked. It can be tried again.
    DaemonIsAway(Box<Ended>),
    Over(Box<Ended>),
}

/// Moves all that have a place, and says when the daemon has been away. How each has ended.
pub fn move_all(
    client: &Client,
    plan: &DrainPlan,
    request: &MoveRequest,
    at_once: usize,
    daemon_is_back: &dyn Fn(),
    interrupt: &Interrupt,
) -> Vec<Ended> {
    let mut next = plan.vms.iter().filter_map(|vm| Some((vm, vm.host.as_deref()?))).peekable();
    let all = next.clone().count();
    let mut away_since: Option<Instant> = None;
    let (mut moving, mut ended): (Vec<Moving<'_>>, Vec<Ended>) = (Vec::new(), Vec::new());
    let (mut progress, mut is_cancelled) = (Progress::default(), false);
    loop {
        if interrupt.has_come() && !is_cancelled {
            is_cancelled = true;
            // The line of the progress goes first.
            progress = Progress::default();
            eprintln!("pagoda: no more moves begin, and those under way are given up; Ctrl-C again to leave");
            moving.iter().for_each(|one| one.followed.cancel(client));
        }
        while moving.len() < at_once
            && !is_cancelled
            && !interrupt.has_come()
            && let Some(&(vm, host)) = next.peek()
        {
            let begun = begin(client, vm, host, request);
            if matches!(begun, Err(NotBegun::DaemonIsAway(_))) {
                // It is started again, as a rule. If not, no other VM is waited for.
                if away_since.get_or_insert_with(Instant::now).elapsed() < AWAY_MAX {
                    break;
                }
            } else if away_since.take().is_some() {
                daemon_is_back();
            }
            next.next();
            match begun {
                Ok(one) => moving.push(one),
                Err(NotBegun::DaemonIsAway(end) | NotBegun::Over(end)) => say(&mut progress, &mut ended, *end),
            }
        }
        let is_over = next.peek().is_none() || is_cancelled || interrupt.has_come();
        if moving.is_empty() && is_over {
            break;
        }
        progress.say(&text::progress(moving.iter().map(|one| one.followed.now()), ended.len(), all));
        std::thread::sleep(LOOK_EVERY);
        let looked = std::mem::take(&mut moving).into_iter().map(|mut one| (one.followed.look(client), one));
        for (looked, one) in looked {
            match end_of(looked, &one) {
                Some(end) => say(&mut progress, &mut ended, end),
                None => moving.push(one),
            }
        }
    }
    ended.extend(next.map(|(vm, host)| stays(&vm.vm, host, "interrupted: it was not begun".to_owned())));
    ended
}

fn begin<'a>(client: &Client, vm: &'a PlannedVm, host: &'a str, request: &MoveRequest) -> Result<Moving<'a>, NotBegun> {
    match client.move_vm(&vm.vm, &MoveRequest { to: host.to_owned(), ..request.clone() }) {
        Ok(MoveReply::Begun(status)) => Ok(Moving { vm: &vm.vm, host, followed: Followed::new(status) }),
        Ok(MoveReply::Plan(_)) => {
            Err(NotBegun::Over(stays(&vm.vm, host, "the daemon has only planned it once more".to_owned()).into()))
        }
        // The request was not sent, so no move has begun.
        Err(error @ ClientError::NotRunning { .. }) => {
            Err(NotBegun::DaemonIsAway(stays(&vm.vm, host, error.to_string()).into()))
        }
        // It may have begun.
        Err(error) if error.is_unreachable() => {
            let undecided = Ended { outcome: Outcome::Undecided, ..stays(&vm.vm, host, error.to_string()) };
            Err(NotBegun::Over(undecided.into()))
        }
        Err(error) => Err(NotBegun::Over(stays(&vm.vm, host, error.to_string()).into())),
    }
}

/// How a move has ended, if it has.
fn end_of(looked: Result<bool>, one: &Moving<'_>) -> Option<Ended> {
    let status = one.followed.now();
    let (outcome, why) = match looked {
        Ok(false) => return None,
        Ok(true) => (Outcome::of(status.outcome), status.why.clone()),
        Err(error) if error.is::<GivenUp>() => (Outcome::Stayed, Some(format!("{error:#}"))),
        // Nobody can tell: the daemon is away, or the other host does not answer.
        Err(error) => (Outcome::Undecided, Some(format!("{error:#}"))),
    };
    let status = Some(status.clone());
    Some(Ended { vm: one.vm.to_owned(), host: one.host.to_owned(), outcome, why, status })
}

fn stays(vm: &str, host: &str, why: String) -> Ended {
    Ended { vm: vm.to_owned(), host: host.to_owned(), outcome: Outcome::Stayed, why: Some(why), status: None }
}

/// Each end is said when it is known: on the error output, for a report comes when all is over.
fn say(progress: &mut Progress, ended: &mut Vec<Ended>, end: Ended) {
    *progress = Progress::default();
    eprint!("{}", text::end(&end));
    ended.push(end);
}
