//! `--outbox`: the process that serves a VM's outbox, started beside its QEMU.
//!
//! QEMU and that process are connected before either runs: a listening socket without a path, of which QEMU inherits the
//! one connection and the other process the listener. So there is no path that anybody else could connect to, and nothing
//! to remove later. The process ends by itself after QEMU has gone.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{Client, CreatedVm, OutboxPatch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;

use super::environment::{ENV_ATTACH, ENV_TOKEN as ENV_VM_TOKEN};
use crate::cli::OutboxOptions;
use crate::qemu_args::OUTBOX_CHARDEV;
use crate::server::find_beside_us;

const PROGRAM: &str = "pagoda-outbox";
const PACKAGE: &str = "pagoda-outbox-server";
const ENV_TOKEN: &str = "PAGODA_OUTBOX_TOKEN";
const ENV_CONTROL_TOKEN: &str = "PAGODA_OUTBOX_CONTROL_TOKEN";
/// Says to the shim that its process maps the RAM of another's VM.
const ENV_MAPPER_TOKEN: &str = "PAGODA_MAPPER_TOKEN";
/// Says to QEMU's shim on whose connections RAM is lent.
pub const ENV_LENDS_TO: &str = "PAGODA_LENDS_TO";
/// The guest mounts it by this name (`mount -t virtiofs outbox DIR`).
const TAG: &str = "outbox";
const TOKEN_BYTES: usize = 24;
const TOKEN_CHARACTERS_MIN: usize = 16;
const TOKEN_CHARACTERS_MAX: u64 = 4096;
/// How long the process may take to say where it listens.
const START_MAX: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// An outbox that can be started.
#[derive(Debug)]
pub struct Outbox {
    space_bytes: u64,
    options: OutboxOptions,
    token: String,
    listener: OwnedFd,
    /// Its address as the shim compares it.
    socket: String,
    vmm: UnixStream,
}

/// What the process says when it is ready.
#[derive(Debug, Deserialize)]
struct Started {
    listening: SocketAddr,
}

impl Outbox {
    /// # Errors
    /// The token cannot be read.
    pub fn new(space_bytes: u64, options: OutboxOptions) -> Result<Outbox> {
        let token = match &options.outbox_token {
            Some(file) => read_token(file).with_context(|| format!("read the token in {}", file.display()))?,
            None => hex(&random()?),
        };
        // A random name that nobody can guess before this process has connected to it, which it does at once.
        let name = format!("pagoda-outbox-{}", hex(&random()?));
        let socket = format!("@{name}");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
        let listener = UnixListener::bind_addr(&name).context("make the outbox's socket")?;
        let vmm = UnixStream::connect_addr(&name).context("connect to the outbox's socket")?;
        Ok(Outbox { space_bytes, options, token, listener: listener.into(), socket, vmm })
    }

    /// The socket to whose connections QEMU may give its RAM.
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// Bytes of its space.
    pub fn space_bytes(&self) -> u64 {
        self.space_bytes
    }

    /// Has its size follow an SLO, if it has one. Its process has come.
    ///
    /// # Errors
    /// The daemon refuses: the SLO is none, or the pool cannot keep it.
    pub fn follow_slo(&self, client: &Client, vm: &str) -> Result<()> {
        let Some(slo) = &self.options.outbox_slo else { return Ok(()) };
        let patch = OutboxPatch { auto: true, slo: Some(slo.clone()), ..OutboxPatch::default() };
        client.set_outbox(vm, &patch)?;
        Ok(())
    }

    /// The device in QEMU's words.
    pub fn qemu_words(&self) -> [String; 4] {
        let fd = self.vmm.as_raw_fd();
        [
            "-chardev".into(),
            format!("socket,id={OUTBOX_CHARDEV},fd={fd}"),
            "-device".into(),
            format!("vhost-user-fs-pci,chardev={OUTBOX_CHARDEV},tag={TAG},queue-size=1024"),
        ]
    }

    /// Starts its process and says where clients find it. What becomes QEMU later inherits the connection to it.
    ///
    /// # Errors
    /// The daemon knows no outboxes; it cannot be started, or cannot listen; it has said why.
    pub fn start(&self, created: &CreatedVm) -> Result<()> {
        let vm = &created.name;
        let control = created.outbox_token.as_ref().context(
            "the daemon is older than this command and knows no outboxes: install both from one version, and restart pagodad",
        )?;
        let program = find_beside_us(PROGRAM, PACKAGE)?;
        let mut command = Command::new(&program);
        command
            .args(["--name", vm, "--space-bytes", &self.space_bytes.to_string()])
            .args([
                "--listen",
                &self.options.outbox_listen.to_string(),
                "--wait",
                &self.options.outbox_wait.to_string(),
            ])
            .arg("--attach-socket")
            .arg(&created.attach_socket)
            .args(["--linger", &self.options.outbox_linger.to_string()])
            .env(ENV_TOKEN, &self.token)
            .env(ENV_CONTROL_TOKEN, control)
            .env(ENV_MAPPER_TOKEN, control)
            .env(ENV_ATTACH, &created.attach_socket)
            .env("LD_PRELOAD", &created.shim)
            .env_remove(ENV_VM_TOKEN)
            .stdin(self.listener.try_clone().context("duplicate the outbox's socket")?)
            .stdout(Stdio::piped())
            // Ctrl-C ends QEMU; what was published is delivered all the same.
            .process_group(0);
        let rates = [("--rate", self.options.outbox_rate), ("--client-rate", self.options.outbox_client_rate)];
        for (option, rate) in rates {
            command.args(rate.iter().flat_map(|rate| [option.to_owned(), rate.to_string()]));
        }
        command.args(self.options.outbox_ttl.iter().flat_map(|ttl| ["--ttl".to_owned(), ttl.to_string()]));
        if self.options.outbox_no_namespaces {
            command.arg("--no-namespaces");
        }
        let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let output = child.stdout.take().context("the output of the outbox's process")?;
        let ready = poll(&mut [PollFd::new(&output.as_fd(), PollFlags::IN)], Some(&START_MAX));
        let mut line = String::new();
        if ready.context("wait for the outbox's process")? > 0 {
            BufReader::new(output).read_line(&mut line).context("read what the outbox's process says")?;
        }
        let Ok(started) = serde_json::from_str::<Started>(&line) else {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the outbox's process did not start: what it says is above");
        };
        rustix::io::fcntl_setfd(&self.vmm, rustix::io::FdFlags::empty()).context("pass a descriptor on")?;
        eprintln!(
            "pagoda: outbox of {vm}: http://{}/{vm}/ (in the guest: mount -t virtiofs {TAG} DIR)",
            started.listening
        );
        if self.options.outbox_token.is_none() {
            eprintln!("pagoda: its clients give the header Authorization: Bearer {}", self.token);
        }
        Ok(())
    }
}

fn random() -> Result<[u8; TOKEN_BYTES]> {
    let mut bytes = [0; TOKEN_BYTES];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).context("read /dev/urandom")?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One line. Whoever else can read the file could read the VM's files.
fn read_token(file: &Path) -> Result<String> {
    let open = File::open(file)?;
    ensure!(open.metadata()?.mode() & 0o077 == 0, "others may read it: chmod 600 it");
    let mut text = String::new();
    open.take(TOKEN_CHARACTERS_MAX).read_to_string(&mut text)?;
    let token = text.trim_end_matches(['\n', '\r']);
    ensure!(token.len() >= TOKEN_CHARACTERS_MIN, "it has fewer than {TOKEN_CHARACTERS_MIN} characters");
    // What a header can carry.
    ensure!(token.bytes().all(|byte| byte.is_ascii_graphic()), "it is not one line of letters, digits and signs");
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn tokens() {
        let file = std::env::temp_dir().join(format!("pagoda-outbox-token-{}", std::process::id()));
        let read = |text: &str, mode: u32| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            read_token(&file).map_err(|error| error.to_string())
        };
        assert_eq!(read("0123456789abcdef\n", 0o600), Ok("0123456789abcdef".into()));
        assert!(read("0123456789abcdef\n", 0o640).unwrap_err().contains("chmod 600"));
        assert!(read("short\n", 0o600).unwrap_err().contains("fewer than"));
        assert!(read("0123456789 abcdef\n", 0o600).unwrap_err().contains("one line"));
        assert!(read("0123456789abcdef\nmore", 0o600).unwrap_err().contains("one line"));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(hex(&[0, 255]), "00ff");
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
