//! The process that serves: the guest by its rings, the transmitter by its questions, the daemon by its control socket. It may be
//! killed at any time; another one takes over what it left.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_sys::socket::Listener;

use crate::keeper::Start;
use crate::link::server::Transmitters;
use crate::outbox::Outbox;
use crate::{control, guest, sandbox};

/// How often it is looked whether everything has been delivered, after the guest's end.
const LINGER_INTERVAL: Duration = Duration::from_millis(200);
/// How often it is looked whether files are too old.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(1);

/// What every worker gets.
#[derive(Debug)]
pub struct Work {
    /// Number of the keeper's process, with which this one ends.
    pub keeper: u32,
    pub space_bytes: u64,
    /// How long a write waits for room.
    pub wait: Duration,
    /// How long files that were not delivered stay after the guest's end.
    pub linger: Duration,
    /// For how long files stay after they were sealed.
    pub ttl: Option<Duration>,
    pub control: Listener,
    pub null: File,
}

impl Work {
    /// The whole life of a worker. Gives its exit status.
    pub fn run(&self, start: Start) -> i32 {
        match self.serve(start) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("pagoda-outbox: {error:#}");
                1
            }
        }
    }

    fn serve(&self, start: Start) -> Result<()> {
        sandbox::end_with_keeper(self.keeper)?;
        sandbox::allow_few_calls()?;
        let line = start.left.line.try_clone().context("take the keeper's socket")?;
        let outbox = Outbox::take_over(start.left, self.space_bytes, self.wait).context("take over what there is")?;
        let outbox = Arc::new(outbox);
        guest::hold(&outbox, &start.table);
        control::serve(&outbox, self.control.try_clone().context("take the control socket")?)?;
        outbox.space().set_default_ttl(self.ttl);
        expire(&outbox)?;
        let transmitters = Transmitters::serve(&outbox, line)?;
        let mut gone = start.vmm_gone;
        match start.vmm {
            Some(vmm) => guest::serve(&outbox, start.table, vmm)?,
            None => outbox.abandon(),
        }
        // Whoever reads what QEMU says waits for the end of it, and that is now.
        rustix::stdio::dup2_stderr(&self.null).context("let go of the standard error")?;
        transmitters.vmm_gone();
        gone = gone.min(self.linger);
        linger(&outbox, self.linger - gone);
        Ok(())
    }
}

/// Removes files that are too old from time to time, in a thread of its own.
pub fn expire(outbox: &Arc<Outbox>) -> Result<()> {
    let outbox = Arc::clone(outbox);
    let expire = move || {
        loop {
            std::thread::sleep(EXPIRE_INTERVAL);
            outbox.expire();
        }
    };
    std::thread::Builder::new().name("expiry".into()).spawn(expire).context("start the thread for old files")?;
    Ok(())
}

/// What was published is still delivered.
fn linger(outbox: &Outbox, most: Duration) {
    let deadline = Instant::now().checked_add(most);
    while !outbox.is_delivered() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        outbox.wait_change(LINGER_INTERVAL);
    }
}
