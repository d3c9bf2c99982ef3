//! The process of a clone, until it is QEMU.
//!
//! It is this same program, started with [`ENV_CLONE`] in its environment: so the process that fetches the VM's monitor is the one
//! that becomes its QEMU, as the daemon wants it. It has a session of its own, and is in the directory of the snapshot's QEMU already.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use pagoda_api::{Client, CreatedVm, VmKind, VmSpec};
use serde::{Deserialize, Serialize};

use super::log::Log;
use crate::run::{ENV_CLONE, Ready, Request, program};

/// Starts a program in a network namespace of its own (unshare(1)).
const UNSHARE: &str = "unshare";
/// Switches its loopback on (ip(8)).
const IP: &str = "ip";

/// What the process of a clone is to start.
#[derive(Debug, Serialize, Deserialize)]
pub struct Start {
    pub vm: CreatedVm,
    pub program: PathBuf,
    pub words: Vec<String>,
    /// The daemon's control socket.
    pub socket: PathBuf,
    /// It has a network namespace of its own.
    pub is_isolated: bool,
}

impl Start {
    /// Starts the process that becomes this QEMU.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(&self, log: &Log) -> Result<Child> {
        let own = std::env::current_exe().context("find this program")?;
        let mut command = if self.is_isolated {
            let mut command = Command::new(UNSHARE);
            command.arg("--net").arg("--").arg(own);
            command
        } else {
            Command::new(own)
        };
        let json = serde_json::to_string(self).context("write down what is to be started")?;
        command.env(ENV_CLONE, json).stdin(Stdio::null()).stdout(log.end()?).stderr(log.end()?);
        command.spawn().with_context(|| format!("start the QEMU of {}", self.vm.name))
    }
}

/// What this process is to start, if it is one of a clone.
pub fn wanted() -> Option<Result<Start>> {
    let json = std::env::var_os(ENV_CLONE)?;
    let text = json.to_str().context("it is not UTF-8");
    Some(text.and_then(|text| Ok(serde_json::from_str(text)?)).with_context(|| format!("read {ENV_CLONE}")))
}

/// Becomes the QEMU. Never returns when all goes well.
pub fn become_qemu(start: Start) -> Result<()> {
    rustix::process::setsid().context("begin a session")?;
    let Start { vm, program, words, socket, is_isolated } = start;
    if is_isolated {
        switch_loopback_on()?;
    }
    let request = Request {
        name: Some(vm.name.clone()),
        memory_bytes: None,
        spec: VmSpec::default(),
        kind: VmKind::Qemu,
        program,
        words,
        outbox: None,
    };
    let client = Client::new(socket);
    Ready::new(request)?.start(&client, |_| Ok(vm))
}

/// Without it nobody can listen in a namespace that is new.
fn switch_loopback_on() -> Result<()> {
    let status = Command::new(IP).args(["link", "set", "dev", "lo", "up"]).status();
    let status = status.with_context(|| format!("start {IP}(8)"))?;
    ensure!(status.success(), "{IP} ended with {status}");
    Ok(())
}

/// That what a network namespace takes is installed.
///
/// # Errors
/// What is not.
pub fn check_tools() -> Result<()> {
    let check = |tool: &&str| program::find(tool).with_context(|| format!("--net isolated needs {tool}"));
    [UNSHARE, IP].iter().try_for_each(|tool| check(tool).map(drop))
}
