//! The process that serves: the guest by its rings, clients by HTTP, the daemon by its control socket. It may be killed at any
//! time; another one takes over what it left.

use std::fs::File;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_sys::socket::Listener;

use crate::http::{Folios, Pacer, Rate, Site};
use crate::keeper::Start;
use crate::outbox::Outbox;
use crate::{control, guest, http, sandbox};

/// How often it is looked whether everything has been delivered, after the guest's end.
const LINGER_INTERVAL: Duration = Duration::from_millis(200);

/// What every worker gets.
#[derive(Debug)]
pub struct Work {
    /// The keeper's process.
    pub keeper: u32,
    pub name: String,
    pub token: String,
    pub life: u64,
    pub space_bytes: u64,
    /// How long a write waits for room.
    pub wait: Duration,
    /// How long files that were not delivered stay after the guest's end.
    pub linger: Duration,
    /// For how long files stay after they were sealed.
    pub ttl: Option<Duration>,
    /// Bytes a second, of all clients together and of each connection.
    pub rate: Rate,
    pub client_rate: Rate,
    pub folios: Arc<Folios>,
    pub clients: TcpListener,
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
        let runtime = http::runtime()?;
        sandbox::allow_few_calls()?;
        let outbox = Outbox::take_over(start.left, self.space_bytes, self.wait).context("take over what there is")?;
        let outbox = Arc::new(outbox);
        guest::hold(&outbox, &start.table);
        control::serve(&outbox, self.control.try_clone().context("take the control socket")?)?;
        outbox.space().set_default_ttl(self.ttl);
        let site = Site {
            name: self.name.clone(),
            token: self.token.clone(),
            life: self.life,
            outbox: Arc::clone(&outbox),
            folios: Arc::clone(&self.folios),
            pacer: Pacer::new(self.rate),
            client_rate: self.client_rate,
        };
        let clients = self.clients.try_clone().context("take the clients' socket")?;
        std::thread::Builder::new()
            .name("transmitter".into())
            .spawn(move || {
                if let Err(error) = http::serve(&runtime, Arc::new(site), clients) {
                    eprintln!("pagoda-outbox: {error:#}");
                    std::process::exit(1);
                }
            })
            .context("start the transmitter")?;
        let mut gone = start.vmm_gone;
        match start.vmm {
            Some(vmm) => guest::serve(&outbox, start.table, vmm)?,
            None => outbox.abandon(),
        }
        // Whoever reads what QEMU says waits for the end of it, and that is now.
        rustix::stdio::dup2_stderr(&self.null).context("let go of the standard error")?;
        gone = gone.min(self.linger);
        linger(&outbox, self.linger - gone);
        Ok(())
    }
}

/// What was published is still delivered.
fn linger(outbox: &Outbox, most: Duration) {
    let deadline = Instant::now().checked_add(most);
    while !outbox.is_delivered() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
        outbox.wait_change(LINGER_INTERVAL);
    }
}
