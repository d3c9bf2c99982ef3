//! What goes wrong, at every moment of a move: exactly one host runs the VM afterwards, with all of its memory and its disk.
//!
//! `docs/protocol/move-owner.md` has what each failure leads to. Each test drives its cases in one guest, from wherever it is.

use std::time::Duration;

use anyhow::Result;

use super::faults::End::{Destination, Source};
use super::faults::Ends::{Crashed, Moved, Somewhere, Stayed};
use super::faults::Fault::{Cut, Kill, Late, NoEtcd, Stop};
use super::faults::Heals::{After, Noticed, Over};
use super::faults::Messages::{All, Answers, Sent};
use super::faults::Moment::{Accepting, Copying, Loading, Noting, Preparing, Settling};
use super::faults::Scene;
use super::faults::Whose::{Daemon, Qemu};

/// Shorter than what makes anybody give up.
const SHORT: Duration = Duration::from_secs(4);
/// A stopped VM without grant runs again after 5 s.
const PAST_STOP: Duration = Duration::from_secs(7);
/// A peer is cut after 10 s of silence, and an attempt without grant is given up after 40 s.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn the_link_is_cut() -> Result<()> {
    Scene::run(
        "the link is cut",
        &[
            (Preparing, Cut(All, After(SHORT)), Somewhere),
            (Copying, Cut(All, After(SHORT)), Moved),
            (Copying, Cut(All, Noticed), Moved),
            (Copying, Cut(Sent, Noticed), Moved),
            (Copying, Cut(Answers, Noticed), Moved),
        ],
    )
}

#[test]
fn the_link_is_cut_at_the_grant() -> Result<()> {
    Scene::run(
        "the link is cut at the grant",
        &[
            // The grant does not arrive: none runs until the link is back.
            (Noting, Cut(All, Noticed), Moved),
            (Noting, Cut(Sent, Noticed), Moved),
            // Its answer does not arrive.
            (Noting, Cut(Answers, Noticed), Moved),
            (Accepting, Cut(All, Noticed), Moved),
            (Settling, Cut(All, After(SHORT)), Moved),
        ],
    )
}

#[test]
fn the_link_stays_cut() -> Result<()> {
    Scene::run("the link stays cut", &[(Copying, Cut(All, Over), Stayed)])
}

#[test]
fn the_answers_stay_cut() -> Result<()> {
    Scene::run("answers stay cut", &[(Loading, Cut(All, Over), Stayed), (Copying, Cut(Answers, Over), Stayed)])
}

#[test]
fn the_destinations_qemu_is_killed() -> Result<()> {
    Scene::run(
        "the destination's QEMU is killed",
        &[
            (Preparing, Kill(Destination, Qemu), Stayed),
            (Copying, Kill(Destination, Qemu), Stayed),
            (Loading, Kill(Destination, Qemu), Stayed),
            (Noting, Kill(Destination, Qemu), Stayed),
            (Accepting, Kill(Destination, Qemu), Stayed),
        ],
    )
}

#[test]
fn the_sources_qemu_is_killed() -> Result<()> {
    Scene::run(
        "the source's QEMU is killed",
        &[
            (Noting, Kill(Source, Qemu), Moved),
            (Accepting, Kill(Source, Qemu), Moved),
            (Copying, Kill(Source, Qemu), Crashed),
        ],
    )
}

/// The moments that no clock finds: `killed.rs` has the others.
#[test]
fn daemons_are_killed_at_the_grant() -> Result<()> {
    Scene::run(
        "daemons are killed at the grant",
        &[
            (Loading, Kill(Source, Daemon), Stayed),
            (Loading, Kill(Destination, Daemon), Stayed),
            (Noting, Kill(Source, Daemon), Somewhere),
            (Noting, Kill(Destination, Daemon), Stayed),
            (Accepting, Kill(Source, Daemon), Moved),
            (Accepting, Kill(Destination, Daemon), Somewhere),
            (Settling, Kill(Source, Daemon), Moved),
            (Settling, Kill(Destination, Daemon), Moved),
        ],
    )
}

#[test]
fn a_process_stands_still() -> Result<()> {
    Scene::run(
        "a process stands still",
        &[
            (Copying, Stop(Source, Qemu, PAST_STOP), Somewhere),
            (Loading, Late(PAST_STOP), Stayed),
            (Noting, Stop(Source, Qemu, SHORT), Moved),
            (Noting, Stop(Destination, Daemon, SHORT), Moved),
            (Accepting, Late(PAST_STOP), Moved),
            (Accepting, Stop(Source, Daemon, SHORT), Moved),
            (Accepting, Stop(Destination, Qemu, PAST_STOP), Somewhere),
            (Settling, Stop(Destination, Daemon, SHORT), Moved),
        ],
    )
}

#[test]
fn a_daemon_stands_still_for_long() -> Result<()> {
    Scene::run(
        "a daemon stands still for long",
        &[
            (Copying, Stop(Source, Daemon, SHORT), Moved),
            (Copying, Stop(Source, Daemon, LONG), Moved),
            (Copying, Stop(Destination, Daemon, LONG), Moved),
        ],
    )
}

/// Moves that their arbiter would decide about go on by the grant alone.
#[test]
fn etcd_is_gone() -> Result<()> {
    Scene::run_with_etcd(
        "etcd is gone",
        &[
            (Preparing, NoEtcd, Somewhere),
            (Copying, NoEtcd, Moved),
            (Loading, NoEtcd, Moved),
            (Noting, NoEtcd, Moved),
            (Accepting, NoEtcd, Moved),
            (Settling, NoEtcd, Moved),
        ],
    )
}
