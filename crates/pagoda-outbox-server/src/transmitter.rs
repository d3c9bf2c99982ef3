//! The process that speaks to clients. It reads what they say, and has none of the guest's memory: it asks the [`worker`](crate::worker)
//! for files ([`crate::link`]), and gets a descriptor of each that it sends.
//!
//! It is a child of the keeper's and closes all that it was not given. It ends with the worker, since what it sends of a file stays only as
//! long as the worker knows of its readers. It may be killed at any time; another one takes its place, and clients ask again.

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use anyhow::{Context, Result};
use pagoda_sys::{mapper, process};

use crate::http::{Folios, Pacer, Rate, Site};
use crate::link::Ends;
use crate::link::client::Files;
use crate::{http, sandbox};

/// How the process is called, so that it is told from the worker.
const NAME: &std::ffi::CStr = c"outbox-transmit";

/// What every transmitter gets.
#[derive(Debug)]
pub struct Transmitter {
    /// Number of the keeper's process, with which this one ends.
    pub keeper: u32,
    pub name: String,
    pub token: String,
    pub life: u64,
    /// Bytes a second, of all clients together and of each connection.
    pub rate: Rate,
    pub client_rate: Rate,
    pub folios: Folios,
    pub clients: TcpListener,
    pub null: File,
}

impl Transmitter {
    /// The whole life of a transmitter, in a process that was forked for it.
    pub fn run(self, ends: Ends) -> ! {
        let mut kept: Vec<_> = ends.fds().iter().map(AsRawFd::as_raw_fd).collect();
        kept.extend([self.clients.as_raw_fd(), self.null.as_raw_fd()]);
        kept.extend(self.folios.fds());
        process::go_on_with(&kept, || match self.serve(ends) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("pagoda-outbox: transmitter: {error:#}");
                1
            }
        })
    }

    fn serve(self, ends: Ends) -> Result<()> {
        sandbox::end_with_keeper(self.keeper)?;
        rustix::thread::set_name(NAME).context("name the process")?;
        rustix::stdio::dup2_stdin(&self.null).context("let go of the standard input")?;
        mapper::leave();
        sandbox::limit_transmitter()?;
        let runtime = http::runtime(&self.clients)?;
        let files = Files::new(ends).context("map memory in common")?;
        sandbox::allow_transmitting()?;
        let site = Site {
            name: self.name,
            token: self.token,
            life: self.life,
            files: Arc::new(files),
            folios: self.folios,
            pacer: Pacer::new(self.rate),
            client_rate: self.client_rate,
        };
        let null = self.null;
        let vmm_gone = || {
            // If that fails, somebody waits for what QEMU says until this process ends.
            let _ = rustix::stdio::dup2_stderr(&null);
        };
        http::serve(&runtime, Arc::new(site), self.clients, vmm_gone)
    }
}
