//! What the daemon keeps of moves: those from this host, those to it, and who owns their VMs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Result, bail};
use pagoda_api::in_full;
use pagoda_link::hosts::Hosts;
use pagoda_move::note::Note;
use pagoda_move::units::{AttemptId, HostKey};
use pagoda_move::wire::control::DecidedBy;

use super::arbiter::Arbiter;
use super::claims::Claims;
use super::copies::Copies;
use super::notes::Notes;
use super::outgoing::Outgoing;
use super::sessions::Sessions;
use super::streams::Streams;
use super::unclear::Unclear;

/// The state of all moves of this daemon.
#[derive(Debug)]
pub struct Moves {
    /// The moves of VMs to this host.
    pub sessions: Sessions,
    /// The moves of VMs from this host.
    pub outgoing: Outgoing,
    pub claims: Claims,
    pub arbiter: Arbiter,
    /// The streams that other hosts have begun.
    pub streams: Streams,
    /// VMs of which other hosts say what the notes here cannot tell.
    pub unclear: Unclear,
    /// Disks that this host has made for VMs that come.
    pub copies: Copies,
    /// VMs whose moves an earlier daemon left, and of which nobody has said yet what becomes of them.
    left: Mutex<BTreeSet<String>>,
    notes: Notes,
    hosts: Hosts,
    me: OnceLock<HostKey>,
}

impl Moves {
    pub fn new(state_dir: &Path, hosts_dir: &Path) -> Moves {
        Moves {
            sessions: Sessions::default(),
            outgoing: Outgoing::default(),
            claims: Claims::default(),
            arbiter: Arbiter::default(),
            streams: Streams::default(),
            unclear: Unclear::default(),
            copies: Copies::below(state_dir),
            left: Mutex::default(),
            notes: Notes::below(state_dir),
            hosts: Hosts::in_dir(hosts_dir),
            me: OnceLock::new(),
        }
    }

    /// The moves of these VMs were under way when the daemon before this one ended.
    pub fn set_left(&self, vms: &BTreeSet<String>) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).extend(vms.iter().cloned());
    }

    /// It is known what becomes of it: a move of this daemon's, or nothing more.
    pub fn settle_left(&self, vm: &str) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(vm);
    }

    pub fn left(&self) -> BTreeSet<String> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub const fn notes(&self) -> &Notes {
        &self.notes
    }

    /// The VM is another host's, or may be.
    pub fn is_given(&self, vm: &str) -> bool {
        matches!(self.notes.read(vm), Ok(Some(Note::Given(..))))
    }

    /// A VM that comes, and whose guest has not been let run so far, is this host's. Also if nobody can tell, but not as long as the
    /// arbiter may still name another one.
    pub fn has_accepted(&self, vm: &str) -> bool {
        matches!(self.notes.read(vm), Ok(Some(Note::Accepted(_, DecidedBy::Grant) | Note::Owned(_))) | Err(_))
    }

    /// A VM of this host's has ended. What another host has a word to say about is kept.
    pub fn forget(&self, vm: &str) {
        // Whoever has a claim decides itself.
        let Some(_claim) = self.claims.claim(vm) else { return };
        match self.notes.read(vm) {
            Ok(Some(Note::Owned(_))) => {
                if let Err(error) = self.notes.write(vm, None) {
                    tracing::warn!(vm, "forget who owned it: {}", in_full(error.as_ref()));
                }
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(vm, "{}", in_full(error.as_ref())),
        }
    }

    /// That nothing is left of an earlier VM of this name, which has ended: what other hosts say of that one must not be taken to be of the
    /// next. The caller has the name.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn check_forgotten(&self, vm: &str) -> Result<()> {
        self.forget(vm);
        match self.notes.read(vm)? {
            Some(Note::Owned(owned)) if owned.offered().is_some() => {
                bail!("the note of an earlier VM {vm} is there still")
            }
            _ => Ok(()),
        }
    }

    /// This host, as an arbiter knows it. Zeros as long as its key cannot be read: no other host can be reached then.
    pub fn me(&self) -> HostKey {
        if let Some(me) = self.me.get() {
            return *me;
        }
        match self.hosts.own() {
            Ok(own) => *self.me.get_or_init(|| HostKey(own.public().0)),
            Err(_) => HostKey([0; 32]),
        }
    }

    /// The attempt is one of this host's.
    pub fn has_outgoing(&self, attempt: AttemptId) -> bool {
        self.outgoing.has_attempt(attempt)
    }
}
