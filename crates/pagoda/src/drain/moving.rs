//! The moves of a drain, some at a time.
//!
//! The daemon moves each VM by itself; this begins the moves in the plan's order, follows them, and begins the next when one is over.
//! Ctrl-C has those that are under way given up and begins no more; those that are given away already go on, and are followed.

use anyhow::Result;
use pagoda_api::{Client, MoveReply, MoveRequest};

use super::text;
use super::types::{DrainPlan, Ended, Outcome, PlannedVm};
use crate::exit::GivenUp;
use crate::moves::follow::{Followed, Interrupt, LOOK_EVERY};
use crate::output::Progress;

/// A move that is under way.
struct Moving<'a> {
    vm: &'a str,
    host: &'a str,
    followed: Followed,
}

/// Moves all that have a place. How each has ended.
pub fn move_all(
    client: &Client,
    plan: &DrainPlan,
    request: &MoveRequest,
    at_once: usize,
    interrupt: &Interrupt,
) -> Vec<Ended> {
    let mut next = plan.vms.iter().filter_map(|vm| Some((vm, vm.host.as_deref()?)));
    let all = next.clone().count();
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
            && let Some((vm, host)) = next.next()
        {
            match begin(client, vm, host, request) {
                Ok(one) => moving.push(one),
                Err(end) => say(&mut progress, &mut ended, *end),
            }
        }
        if moving.is_empty() {
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

fn begin<'a>(
    client: &Client,
    vm: &'a PlannedVm,
    host: &'a str,
    request: &MoveRequest,
) -> Result<Moving<'a>, Box<Ended>> {
    match client.move_vm(&vm.vm, &MoveRequest { to: host.to_owned(), ..request.clone() }) {
        Ok(MoveReply::Begun(status)) => Ok(Moving { vm: &vm.vm, host, followed: Followed::new(status) }),
        Ok(MoveReply::Plan(_)) => {
            Err(stays(&vm.vm, host, "the daemon has only planned it once more".to_owned()).into())
        }
        // It may have begun.
        Err(error) if error.is_unreachable() => {
            Err(Ended { outcome: Outcome::Undecided, ..stays(&vm.vm, host, error.to_string()) }.into())
        }
        Err(error) => Err(stays(&vm.vm, host, error.to_string()).into()),
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
