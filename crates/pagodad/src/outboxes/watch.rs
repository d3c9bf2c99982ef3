//! A thread for each outbox whose process has come: asks it for its figures, and sees its end.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagoda_api::in_full;
use pagoda_sys::process;
use rustix::event::{PollFd, PollFlags};

use super::Outbox;
use crate::qmp::poll::poll;
use crate::registry::{Registry, has_ended};

/// How often figures are asked for.
const LOOK: Duration = Duration::from_secs(1);

/// Watches an outbox until it is forgotten. What it says is in [`Outbox::info`].
///
/// # Errors
/// There is no thread for it: nothing would be known of it, and its end not seen.
pub fn start(registry: &Arc<Registry>, outbox: &Arc<Outbox>) -> io::Result<()> {
    let (watching, watched) = (Arc::clone(registry), Arc::clone(outbox));
    thread::Builder::new().name("outbox".into()).spawn(move || watch(&watching, &watched)).map(drop)
}

fn watch(registry: &Registry, outbox: &Outbox) {
    let mut was_silent = false;
    while let Some((pid, start)) = outbox.process() {
        let pidfd = process::pidfd_open(pid).ok();
        if has_ended(&outbox.vm, pid, start) {
            registry.outbox_ended(outbox);
            break;
        }
        let before = outbox.charged();
        outbox.set_lingering(!registry.has_vm(outbox.vm_token));
        let looked = outbox.change().look();
        if looked.is_ok() {
            hear(registry, outbox);
        }
        if outbox.charged() != before {
            registry.count_outboxes();
            registry.governor.doorbell.ring();
        }
        match &looked {
            Err(error) if !was_silent => {
                tracing::warn!(vm = %outbox.vm, "its outbox: {}", in_full(error.as_ref()));
            }
            Ok(()) if was_silent => tracing::info!(vm = %outbox.vm, "its outbox answers again"),
            _ => {}
        }
        was_silent = looked.is_err();
        if pause(pidfd.as_ref()) && !has_ended(&outbox.vm, pid, start) {
            // Of a process whose end nobody can tell the descriptor is ready all the time.
            thread::sleep(LOOK);
        }
    }
    // Said for as long as its VM runs.
    while registry.has_vm(outbox.vm_token) {
        thread::sleep(LOOK);
    }
    registry.outboxes.forget(outbox);
}

/// Takes in what has become of its guest's jobs.
fn hear(registry: &Registry, outbox: &Outbox) {
    let heard = outbox.change().hear(registry.outboxes.now_ms());
    match heard {
        Ok(Some(heard)) => registry.outboxes.heard(outbox, &heard),
        Ok(None) => {}
        Err(error) => tracing::debug!(vm = %outbox.vm, "jobs of its outbox: {}", in_full(error.as_ref())),
    }
}

/// Until figures are due, or its process ends. Whether that ended.
fn pause(pidfd: Option<&OwnedFd>) -> bool {
    let Some(pidfd) = pidfd else {
        thread::sleep(LOOK);
        return false;
    };
    poll(&mut [PollFd::new(&pidfd.as_fd(), PollFlags::IN)], LOOK).is_ok_and(|ready| ready > 0)
}
