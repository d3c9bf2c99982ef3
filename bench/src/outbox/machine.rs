//! A guest with one way to the client, and what that needs at the host. All guests have the same CPU, memory and network card.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_guest::lines::Line;
use testkit::cpu::{threads_cpu_s, tree_of};
use testkit::daemon::Daemon;

use super::client::{self, Digest, Received, Source};
use super::network::{CLIENT, GUEST, HOST, MASK_BITS, Network, TAP, port_of};
use super::peers::{NGINX, NGINX_PORT, Shared, nginx_lines};
use super::way::Way;
use crate::Setup;
use crate::balloon::guest::{Guest, QEMU, Shape, Start};

pub const VM: &str = "bench-outbox";
pub const MEMORY_MIB: u64 = 1024;
/// Less than a stream: it passes through.
pub const SPACE_MIB: u64 = 64;
const OUTBOX_PORT: u16 = 8080;
const SINK_PORT: u16 = 5001;
const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// The guest has both virtiofs under this name.
const TAG: &str = "outbox";
/// Where the guest's programs write.
pub const OUT: &str = "/out";
/// Debian's programs that are in the guest.
pub const PROGRAMS: [&str; 2] = [NGINX, "ffmpeg"];
/// nginx in the guest wants a user's name.
const USERS: &str = "echo root:x:0:0::/:/bin/sh > /etc/passwd; echo root:x:0: > /etc/group";
/// A VM that has ended is forgotten within that, or hangs.
const GONE_MAX: Duration = Duration::from_secs(60);

/// What delivers has cost.
#[derive(Debug, Clone, Copy)]
pub struct Delivery {
    /// From the command until the client has the last byte.
    pub seconds: f64,
    /// From the command until the client has the first byte.
    pub first_byte_s: f64,
    /// Of QEMU and all programs of the way, but for the client.
    pub cpu_s: f64,
    pub client_cpu_s: f64,
    pub bytes: u64,
}

/// What the guest does so that there is something to deliver.
#[derive(Debug, Clone, Copy)]
pub enum Product<'a> {
    /// The stream of so many MiB, while a line of the shell runs beside, if there is one.
    Stream { mib: u64, beside: &'a str },
    /// What a line of the shell writes into the file whose name it ends with.
    Output { line: &'a str },
}

impl Product<'_> {
    fn command(self, to: &str) -> String {
        match self {
            Self::Stream { mib, beside } => format!("publish {to} {mib} {beside}"),
            Self::Output { line } => format!("sh {line} {to}"),
        }
    }
}

/// A guest that runs. Ends with this value.
pub struct Machine<'a> {
    pub guest: Guest,
    way: Way,
    network: &'a Network,
    /// Whose CPU time counts.
    processes: Vec<u32>,
    sink: Option<TcpListener>,
    pub shared: Option<Shared>,
    // It stands after the guest, so that it is dropped after it.
    pub daemon: Option<Daemon>,
}

impl<'a> Machine<'a> {
    /// Boots a guest, and has all of its way ready.
    ///
    /// # Errors
    /// Something does not start.
    pub fn start(way: Way, setup: &Setup, network: &'a Network, start: &Start<'_>) -> Result<Machine<'a>> {
        let daemon = way.has_outbox().then(|| Daemon::start(&setup.dir)).transpose()?;
        let shared = (way == Way::Shared).then(|| Shared::start(&setup.dir, network, HOST)).transpose()?;
        let sink = (way == Way::Socket).then(|| {
            network.at_client(|| TcpListener::bind(port_of(CLIENT, SINK_PORT)).context("listen at the client"))
        });
        let mut words = network.host_words();
        if let Some(daemon) = &daemon {
            words.extend(outbox_words(daemon, way)?);
        }
        words.push(QEMU.to_owned());
        let mut more = network_words();
        more.extend(shared.iter().flat_map(|shared| shared.qemu_words(TAG, MEMORY_MIB)));
        let append = "no_timer_check";
        let shape = Shape { name: VM, memory_mib: MEMORY_MIB, append, more: &more, ..Shape::default() };
        let dir = daemon.as_ref().map_or(setup.dir.as_path(), Daemon::dir);
        let guest = Guest::boot_by(&words, dir, &shape, start)?;
        let mut roots = vec![guest.pid()];
        roots.extend(daemon.iter().map(Daemon::pid));
        roots.extend(shared.iter().flat_map(Shared::processes));
        let processes = roots.into_iter().map(tree_of).collect::<Result<Vec<_>>>()?.concat();
        let sink = sink.transpose()?;
        let mut machine = Machine { guest, way, network, processes, sink, shared, daemon };
        machine.prepare()?;
        Ok(machine)
    }

    fn prepare(&mut self) -> Result<()> {
        self.sh(&format!("ip addr add {GUEST}/{MASK_BITS} dev eth0 && ip link set eth0 up && mkdir {OUT}"))?;
        match self.way {
            Way::Outbox | Way::Paged => {
                // Its process is a child of what became QEMU.
                let pid = self.outbox_pid()?;
                ensure!(self.processes.contains(&pid), "the outbox's CPU time would not be counted");
                self.sh(&format!("mount -t virtiofs {TAG} {OUT}"))
            }
            Way::Shared => self.sh(&format!("mount -t virtiofs {TAG} {OUT}")),
            Way::Socket => Ok(()),
            Way::Staged => {
                self.sh(&format!("mount -t tmpfs -o size=80% stage {OUT} && mkdir -p /etc /tmp/nginx && {USERS}"))?;
                for line in nginx_lines(OUT, "/tmp/nginx", GUEST) {
                    self.sh(&format!("echo '{line}' >> /tmp/nginx.conf"))?;
                }
                self.sh(&format!("{NGINX} -e /tmp/nginx/errors -c /tmp/nginx.conf > /dev/null 2>&1 &"))?;
                let server = port_of(GUEST, NGINX_PORT);
                let network = self.network;
                testkit::wait::until("nginx in the guest", testkit::wait::HANG, || {
                    Ok(network.at_client(|| client::open(server)).ok())
                })
                .map(drop)
            }
        }
    }

    /// The process of its outbox.
    ///
    /// # Errors
    /// It has none.
    pub fn outbox_pid(&self) -> Result<u32> {
        let daemon = self.daemon.as_ref().context("a guest without an outbox")?;
        daemon.client().outbox(VM).context("look at the outbox")?.pid.context("the outbox has no process")
    }

    /// A line of the shell.
    ///
    /// # Errors
    /// It fails.
    pub fn sh(&mut self, line: &str) -> Result<()> {
        self.guest.command(&format!("sh {line}")).map(drop)
    }

    /// The same, and what it says first.
    ///
    /// # Errors
    /// It fails, or says nothing.
    pub fn ask(&mut self, line: &str) -> Result<String> {
        let lines = self.guest.command(&format!("sh {line}"))?;
        let said = lines.iter().filter_map(|line| Line::parse(line)).find(|line| line.kind == "output");
        Ok(said.with_context(|| format!("{line}: the guest says nothing"))?.text().to_owned())
    }

    /// Seconds that a line of the shell takes.
    ///
    /// # Errors
    /// It fails.
    pub fn time(&mut self, line: &str) -> Result<f64> {
        let start = Instant::now();
        self.sh(line)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// CPU time of each of the way's processes, without their children.
    fn cpu_s(&self) -> Result<Vec<f64>> {
        self.processes.iter().map(|pid| threads_cpu_s(*pid, "")).collect()
    }

    fn show(&self, what: &str, delivery: &Delivery, cpu_s: &[f64]) {
        let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
        let each: Vec<String> =
            self.processes.iter().zip(cpu_s).map(|(pid, seconds)| format!("{} {seconds:.3}", name(pid))).collect();
        let Delivery { seconds, first_byte_s, bytes, client_cpu_s, .. } = delivery;
        eprintln!(
            "outbox: {}: {what}: {} KiB in {seconds:.3} s, the first after {first_byte_s:.3}; CPU-seconds: {}; client {client_cpu_s:.3}",
            self.way.text(),
            bytes >> 10,
            each.join(", ")
        );
    }

    /// Where a file of the guest's is for clients.
    pub fn source(&self, name: &str) -> Source {
        let of = |server: SocketAddr, path: String, token| Source { server, path, token };
        match self.way {
            Way::Outbox | Way::Paged => of(port_of(HOST, OUTBOX_PORT), format!("/{VM}/{name}"), Some(TOKEN)),
            Way::Shared => of(port_of(HOST, NGINX_PORT), format!("/{name}"), None),
            Way::Staged | Way::Socket => of(port_of(GUEST, NGINX_PORT), format!("/{name}"), None),
        }
    }

    /// Has the guest make something, delivers it, and removes it. The lines that the guest has said of it come too. `meanwhile` runs
    /// when all is delivered and the file is still there.
    ///
    /// # Errors
    /// It does not arrive, or wrong bytes do.
    pub fn deliver(
        &mut self,
        product: Product<'_>,
        expected: &Digest,
        meanwhile: impl FnOnce(&mut Machine<'_>) -> Result<()>,
    ) -> Result<(Delivery, Vec<String>)> {
        let name = "file";
        let file = format!("{OUT}/{name}");
        let to = if self.way == Way::Socket { format!("tcp:{CLIENT}:{SINK_PORT}") } else { file.clone() };
        let command = product.command(&to);
        let (source, network) = (self.source(name), self.network);
        let cpu_before = self.cpu_s()?;
        let began = Instant::now();
        let (received, written) = match self.way {
            // A client that asked for a file of these before it is whole would be given a part of it as if that was all.
            Way::Staged | Way::Shared => {
                self.guest.begin(&command)?;
                let written = self.wait_written(product)?;
                (network.at_client(|| client::fetch(&source, expected))?, written)
            }
            Way::Outbox | Way::Paged => self.while_it_grows(&command, product, || client::fetch(&source, expected))?,
            Way::Socket => {
                let sink = self.sink.take().context("no client listens")?;
                let done = self.while_it_grows(&command, product, || client::take(&sink, expected));
                self.sink = Some(sink);
                done?
            }
        };
        let cpu_s: Vec<f64> = self.cpu_s()?.iter().zip(cpu_before).map(|(now, before)| now - before).collect();
        let lines = match product {
            Product::Stream { .. } => self.guest.end(&command)?.0,
            Product::Output { .. } => Vec::new(),
        };
        meanwhile(self)?;
        if self.way != Way::Socket {
            self.sh(&format!("rm {file}"))?;
        }
        let seconds = |until: Instant| until.saturating_duration_since(began).as_secs_f64();
        let Received { first, end, bytes, cpu_s: client_cpu_s } = received;
        let grew = !self.way.has_outbox() || matches!(product, Product::Output { .. }) || first < written;
        ensure!(grew, "the first byte came when the file was closed");
        let all = cpu_s.iter().sum();
        let delivery =
            Delivery { seconds: seconds(end), first_byte_s: seconds(first), cpu_s: all, client_cpu_s, bytes };
        self.show(&command, &delivery, &cpu_s);
        Ok((delivery, lines))
    }

    /// When the guest has closed what it wrote.
    fn wait_written(&mut self, product: Product<'_>) -> Result<Instant> {
        match product {
            Product::Stream { .. } => drop(self.guest.line("published")?),
            Product::Output { line } => {
                let (lines, bad_pages) = self.guest.end(line)?;
                ensure!(bad_pages == 0, "{line}: {lines:#?}");
            }
        }
        Ok(Instant::now())
    }

    fn while_it_grows(
        &mut self,
        command: &str,
        product: Product<'_>,
        receive: impl FnOnce() -> Result<Received> + Send,
    ) -> Result<(Received, Instant)> {
        let network = self.network;
        std::thread::scope(|scope| {
            let client = scope.spawn(|| network.at_client(receive));
            let written = self.guest.begin(command).and_then(|()| self.wait_written(product));
            let received = client.join().map_err(|_| anyhow!("the client has panicked"))?;
            Ok((received?, written?))
        })
    }

    /// Ends it, and waits until its name is free.
    ///
    /// # Errors
    /// It stays.
    pub fn end(self) -> Result<()> {
        let Machine { guest, daemon, .. } = self;
        drop(guest);
        daemon.map_or(Ok(()), |daemon| daemon.wait_gone(VM, GONE_MAX))
    }
}

/// The words of `pagoda run` up to QEMU's.
fn outbox_words(daemon: &Daemon, way: Way) -> Result<Vec<String>> {
    let token = daemon.dir().join("token");
    fs::write(&token, TOKEN).context("write the token")?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).context("keep the token")?;
    let (space, listen) = (format!("{SPACE_MIB}M"), port_of(HOST, OUTBOX_PORT).to_string());
    let mut words = daemon.cli_words()?;
    words.extend(["run", "--name", VM].map(str::to_owned));
    if way == Way::Paged {
        words.extend(["--dram".to_owned(), format!("{}M", MEMORY_MIB / 2)]);
    }
    words.extend(["--outbox", &space, "--outbox-listen", &listen].map(str::to_owned));
    words.extend(["--outbox-linger", "0", "--outbox-token", &token.display().to_string(), "--"].map(str::to_owned));
    Ok(words)
}

/// QEMU's words for the network card, with all that makes it fast: there is no vhost-net here.
fn network_words() -> Vec<String> {
    let offload = "mrg_rxbuf=on,csum=on,host_tso4=on,guest_tso4=on,guest_csum=on";
    let netdev = format!("tap,id=n0,ifname={TAP},script=no,downscript=no,vhost=off");
    ["-netdev", &netdev, "-device", &format!("virtio-net-pci,netdev=n0,romfile=,{offload}")].map(str::to_owned).into()
}
