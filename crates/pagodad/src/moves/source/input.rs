//! What the thread of a move hears of.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pagoda_link::LinkError;
use pagoda_move::owner::Registered;
use pagoda_move::units::ConnectionNo;
use pagoda_move::wire::Control;
use pagoda_pager::handle::Copied;

use super::pages::Gone;
use super::standing::Outcome;
use crate::moves::channel::Connection;
use crate::moves::outgoing::Order;

#[derive(Debug)]
pub enum Input {
    /// The destination was called, and is there.
    Connected(Connection),
    /// It is not; it is called again.
    Unreachable(LinkError),
    Received(ConnectionNo, Control, Permit),
    /// A stream of this connection has ended, and why.
    LinkDown(ConnectionNo, String),
    /// Pages that were asked for while this connection was there.
    Copied(ConnectionNo, Copied),
    /// The same, of pages that threads at the destination wait for.
    Demanded(ConnectionNo, Copied),
    /// Pages have gone into a stream.
    Sent {
        connection: ConnectionNo,
        gone: Gone,
    },
    /// All of its disks are there but what it writes, or why they cannot be copied.
    Disks(Result<(), String>),
    /// The VM stands still, or does not.
    Stopped(Outcome),
    Order(Order),
    /// What the arbiter has, or nothing if it was not reached.
    Arbiter(Option<Registered>),
}

/// That a message waits for the driver. Whoever reads the stream has no more than [`RECEIVED_MAX`] of them: a destination that says more
/// than the driver takes in is not read.
#[derive(Debug)]
pub struct Permit(Arc<AtomicUsize>);

/// Messages of a connection that wait for the driver.
const RECEIVED_MAX: usize = 1024;
/// The pause between two looks whether there are fewer.
const LOOK: Duration = Duration::from_millis(1);

/// Gives permits for a connection.
#[derive(Debug, Default)]
pub struct Permits(Arc<AtomicUsize>);

impl Permits {
    /// Waits until a permit is free.
    pub fn take(&self) -> Permit {
        while self.0.load(Ordering::Acquire) >= RECEIVED_MAX {
            thread::sleep(LOOK);
        }
        self.0.fetch_add(1, Ordering::AcqRel);
        Permit(Arc::clone(&self.0))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
