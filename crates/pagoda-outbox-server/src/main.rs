//! `pagoda-outbox`: the process of one VM's outbox. `pagoda run --outbox` starts it.
//!
//! ```text
//! pagoda run -- listening socket as standard input --> keeper <-- vhost-user -- QEMU
//!                                                        | starts one after another of each
//!                                                        +-- worker: Space + a memfd for each file
//! pagodad ------ figures, another size: `control` -------|----> +
//!                                                        |      | `link`: questions, descriptors
//! clients -------------------- HTTP ---------------------+-- transmitter
//! ```
//!
//! It binds its sockets, says so in one line of JSON on standard output, and gives up everything that it does not need
//! ([`sandbox`]). Then it is the [`keeper`], which looks at nothing that a guest or a client says, and starts the [`worker`], which
//! serves the guest, and the [`transmitter`], which serves clients and has none of the guest's memory. When QEMU has gone they stay
//! until what was published has been delivered, for at most `--linger`.

mod backend;
mod chain;
mod control;
mod errno;
mod filesystem;
mod guest;
mod http;
mod inflight;
mod jobs;
mod journal;
mod keeper;
mod left;
mod link;
mod locked;
mod outbox;
mod sandbox;
#[cfg(test)]
mod tests;
mod transfer;
mod transmitter;
mod worker;

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::json;

use crate::http::Folios;
use crate::keeper::{Roles, Start};
use crate::link::Ends;
use crate::sandbox::Namespaces;
use crate::transmitter::Transmitter;
use crate::worker::Work;

/// The variable with the token that clients have to know. Not an option: those are seen by everyone.
const ENV_TOKEN: &str = "PAGODA_OUTBOX_TOKEN";
/// The variable with the token by which the daemon knows this process.
const ENV_CONTROL_TOKEN: &str = "PAGODA_OUTBOX_CONTROL_TOKEN";
const TOKEN_BYTES_MIN: usize = 16;

/// Serves the outbox of one VM. Started by `pagoda run --outbox`; standard input is the listening socket for QEMU.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// The VM's name, the first part of each path.
    #[arg(long)]
    name: String,
    /// The daemon's attach socket.
    #[arg(long)]
    attach_socket: PathBuf,
    /// Bytes of the space.
    #[arg(long)]
    space_bytes: u64,
    /// Address and port to which clients connect.
    #[arg(long)]
    listen: SocketAddr,
    /// Seconds that a write waits for room before it fails with ENOSPC.
    #[arg(long)]
    wait: u64,
    /// Seconds for which files that were not delivered stay after the guest's end.
    #[arg(long)]
    linger: u64,
    /// Seconds for which files stay after they were sealed.
    #[arg(long)]
    ttl: Option<u64>,
    /// Bytes a second that clients are sent, all together.
    #[arg(long)]
    rate: Option<NonZeroU64>,
    /// Bytes a second that each connection is sent.
    #[arg(long)]
    client_rate: Option<NonZeroU64>,
    /// Keep the host's namespaces, where a user may not have own ones; all else is given up as well.
    #[arg(long)]
    no_namespaces: bool,
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagoda-outbox: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A part that panicked would leave the rest waiting for it: the guest's mount, or clients.
fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

fn run(options: Options) -> Result<()> {
    end_on_panic();
    let token = std::env::var(ENV_TOKEN).with_context(|| format!("read {ENV_TOKEN}"))?;
    ensure!(token.len() >= TOKEN_BYTES_MIN, "{ENV_TOKEN} is shorter than {TOKEN_BYTES_MIN} characters");
    sandbox::raise_descriptors()?;
    let vmm = std::io::stdin().as_fd().try_clone_to_owned().context("take over the VMM's socket")?;
    let vmm = UnixListener::from(vmm);
    vmm.local_addr().context("standard input is to be a listening Unix socket")?;
    let clients = TcpListener::bind(options.listen).with_context(|| format!("listen on {}", options.listen))?;
    let address = clients.local_addr().context("find the port")?;
    let control = control::fetch(&options.attach_socket, ENV_CONTROL_TOKEN)?;
    let folios = Folios::of_host().context("read the settings of large folios")?;
    let null = File::options().write(true).open("/dev/null").context("open /dev/null")?;
    let random = File::open("/dev/urandom").context("open /dev/urandom")?;
    sandbox::leave_host(if options.no_namespaces { Namespaces::Hosts } else { Namespaces::Own })?;
    println!("{}", json!({ "listening": address }));
    sandbox::allow_keeping()?;

    let now = outbox::now();
    let life = now.seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::from(now.nanos));
    let quiet = null.try_clone().context("duplicate a descriptor")?;
    let work = Work {
        keeper: std::process::id(),
        space_bytes: options.space_bytes,
        wait: Duration::from_secs(options.wait),
        linger: Duration::from_secs(options.linger),
        ttl: options.ttl.map(Duration::from_secs),
        control,
        null: null.try_clone().context("duplicate a descriptor")?,
    };
    let transmitter = Transmitter {
        keeper: std::process::id(),
        name: options.name,
        token,
        life,
        rate: options.rate,
        client_rate: options.client_rate,
        folios,
        clients,
        null,
    };
    let mut children = Children { work, transmitter: Some(transmitter) };
    keeper::keep(vmm, &keeper::Host { random, quiet }, &mut children)
}

/// What the keeper's children are, with all that they need.
struct Children {
    work: Work,
    /// `None` in a worker: it has no part in what clients connect to.
    transmitter: Option<Transmitter>,
}

impl Roles for Children {
    fn work(&mut self, start: Start) -> i32 {
        self.transmitter = None;
        self.work.run(start)
    }

    fn transmit(&mut self, ends: Ends) -> i32 {
        match self.transmitter.take() {
            Some(transmitter) => transmitter.run(ends),
            None => 1,
        }
    }
}
