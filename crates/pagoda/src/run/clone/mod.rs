//! `pagoda vm clone`: several VMs that begin with what one has.
//!
//! The order: names, words and the user are checked -> of a VM that runs a snapshot is taken, and waited for -> the daemon makes all
//! VMs or none -> each QEMU is started in the background ([`child`]) and waits for its state, which the daemon loads -> when every
//! guest runs, the clones are printed ([`fleet`]). If anything fails on the way, the VMs, logs and
//! overlays that were made are removed again.

pub mod child;
mod fleet;
mod log;
mod names;
mod overlays;
mod report;
mod source;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_api::{
    AdmitRequest, Client, CloneRequest, CreatedVm, NewClone, SnapshotLaunch, SnapshotName, VmInfo, in_full,
};

use self::child::Start;
use self::fleet::{Fleet, Member, Ran};
use self::log::Log;
use self::overlays::Overlays;
use self::report::DryRun;
use self::source::Source;
use super::on_crash::signals::Signals;
use super::{restore, version};
use crate::cli::{CloneNet, CloneOptions};
use crate::exit::{GivenUp, Refused, UsageError};
use crate::output::Format;
use crate::qemu_args::{self, Cloned, Net, Target};

/// What a guest that has no such device is not told.
const NO_GENERATION_ID: &str = "the VM has no vmgenid device, so its guest does not learn that it is a copy: random numbers, and \
                                keys that are made of them, may be the same in all clones (docs/clones.md)";

pub fn run(client: &Client, options: &CloneOptions, format: Format) -> Result<()> {
    let began = SystemTime::now();
    let names = names::expand(&options.name, options.first, options.count).map_err(UsageError)?;
    let home = std::env::current_dir().context("find the directory of this process")?;
    let client = client.anchored().context("find the directory of this process")?;
    let mut source = Source::find(&client, &options.source)?;
    let has_disks = source.has_disks(&client, options.disks)?;
    let plan = Plan::new(options, names, source.launch(), has_disks)
        .and_then(|plan| plan.check_names(&client).map(|()| plan))
        .map_err(|error| refused(&source, &error))?;
    let warnings = plan.warnings();
    if options.dry_run {
        let room = client.admit(&plan.room(source.launch()))?;
        return DryRun::new(source.to_string(), &plan.names, source.launch(), plan.dram, &room, &warnings)
            .print(format);
    }
    warnings.iter().for_each(|warning| eprintln!("pagoda: warning: {warning}"));
    let mut signals = Signals::handle()?;
    log::make_dir(&plan.log_dir).map_err(|error| refused(&source, &error))?;
    let from = source.snapshot(&client, options.disks, &mut signals)?;
    let is_right = check_version(&plan.program, source.launch()).map_err(|error| refused(&source, &error));
    let made = is_right.and_then(|()| plan.make(&client, &from, source.launch()));
    let started = made.and_then(|(members, overlays)| {
        let mut fleet = Fleet::new(&client, members);
        let ran = fleet.start(&mut signals).map_err(|error| given_up(&error))?;
        overlays.keep();
        Ok((fleet.keep(), ran))
    });
    let (members, ran) = started.inspect_err(|_| source.remove_taken(&client))?;
    if let Some(hook) = &options.run {
        let numbers = u64::from(options.first)..;
        for ((member, ran), number) in members.iter().zip(&ran).zip(numbers) {
            run_hook(hook, &home, &client, &from, member, *ran, number);
            signals.look();
            if signals.was_asked() {
                eprintln!("pagoda: warning: interrupted; the clones run, and the hook was not run for all of them");
                break;
            }
        }
    }
    report::print(&from, &members, &ran, began, format)
}

fn refused(source: &Source, error: &anyhow::Error) -> anyhow::Error {
    Refused(format!("{source} cannot be cloned here: {}", in_full(error.as_ref()))).into()
}

fn given_up(error: &anyhow::Error) -> anyhow::Error {
    GivenUp(format!("given up, and no clone is left: {}", in_full(error.as_ref()))).into()
}

/// Of the snapshot, whose version is known by now.
fn check_version(program: &Path, of: &SnapshotLaunch) -> Result<()> {
    version::check(program, of)?.end(of)
}

/// What is going to be made, as far as that can be seen before.
struct Plan {
    names: Vec<String>,
    /// What starts each of them.
    cloned: Vec<Cloned>,
    program: PathBuf,
    dram: Option<u64>,
    net: Net,
    log_dir: PathBuf,
}

impl Plan {
    /// Looks for everything that can be wrong. This process is in the directory of the source's QEMU afterwards.
    fn new(options: &CloneOptions, names: Vec<String>, of: &SnapshotLaunch, has_disks: bool) -> Result<Plan> {
        let net = match options.net {
            None => Net::None,
            Some(CloneNet::Isolated) => Net::Isolated,
        };
        if net == Net::Isolated {
            ensure!(rustix::process::geteuid().is_root(), "--net isolated needs root");
            child::check_tools()?;
        }
        ensure!(of.launch.unstartable.is_empty(), "{}", of.launch.unstartable.join(", "));
        let log_dir = options.log_dir.clone().map_or_else(log::default_dir, Ok)?;
        let log_dir = std::path::absolute(log_dir).context("find the directory of the logs")?;
        let memory = of.memory.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let dram = options.dram.map(|dram| dram.of(memory));
        let program = restore::place(&of.launch)?;
        let of_name = |name: &String| {
            let cloned = qemu_args::cloned(&of.launch.words, Target { name, net, has_disks })?;
            let ready = restore::ready(program.clone(), name, cloned.words.clone(), dram, of)?;
            ensure!(!ready.has_device_files(), "its memory has a file that all clones would write");
            overlays::check_absent(&cloned.overlays)?;
            Ok(cloned)
        };
        let cloned = names.iter().map(of_name).collect::<Result<_>>()?;
        Ok(Plan { names, cloned, program, dram, net, log_dir })
    }

    /// The daemon looks once more, when it makes them.
    fn check_names(&self, client: &Client) -> Result<()> {
        let vms = client.vms()?.vms;
        let taken = |vm: &&VmInfo| self.names.contains(&vm.name);
        match vms.iter().find(taken) {
            None => Ok(()),
            Some(vm) => Err(anyhow!("a VM named {} exists: choose other names", vm.name)),
        }
    }

    fn warnings(&self) -> Vec<String> {
        let has = self.cloned.first().is_some_and(|cloned| qemu_args::has_generation_id(&cloned.words));
        (!has).then(|| NO_GENERATION_ID.to_owned()).into_iter().collect()
    }

    fn room(&self, of: &SnapshotLaunch) -> AdmitRequest {
        let memory_bytes = of.memory.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        AdmitRequest { memory_bytes, dram: self.dram.or(of.spec.dram), min: of.spec.policy.min }
    }

    /// Has the daemon make all VMs, and makes their files.
    fn make(&self, client: &Client, from: &SnapshotName, of: &SnapshotLaunch) -> Result<(Vec<Member>, Overlays)> {
        let disks = client.snapshot(from)?.disks;
        let new = |(name, cloned): (&String, &Cloned)| NewClone { name: name.clone(), words: cloned.words.clone() };
        let clones = self.names.iter().zip(&self.cloned).map(new).collect();
        let vms = client.clone_vms(&CloneRequest { from: from.clone(), clones, dram: self.dram })?.vms;
        let unstarted = Unstarted { client, vms };
        // The names are ours now, and so are their logs.
        let logs = self.names.iter().map(|name| Log::open(&self.log_dir, name)).collect::<Result<Vec<_>>>();
        let logs = logs.map_err(|error| Refused(format!("no clone was made: {}", in_full(error.as_ref()))))?;
        let overlays = Overlays::make(&self.program, &disks, self.cloned.iter().map(|cloned| &*cloned.overlays))
            .map_err(|error| Refused(format!("no clone was made: {}", in_full(error.as_ref()))))?;
        let starts = unstarted.vms.iter().zip(&self.cloned).map(|(vm, cloned)| self.start(client, vm, cloned, of));
        let starts = starts.collect::<Result<Vec<_>>>()?;
        let members = starts.into_iter().zip(logs).map(|(start, log)| Member::new(start, log)).collect();
        unstarted.keep();
        Ok((members, overlays))
    }

    fn start(&self, client: &Client, vm: &CreatedVm, cloned: &Cloned, of: &SnapshotLaunch) -> Result<Start> {
        let words = qemu_args::restored(&cloned.words, &of.qemu.machine)?;
        let socket = client.socket().to_owned();
        let is_isolated = self.net == Net::Isolated;
        Ok(Start { vm: vm.clone(), program: self.program.clone(), words, socket, is_isolated })
    }
}

/// VMs that are given up unless each has somebody who looks after it.
struct Unstarted<'a> {
    client: &'a Client,
    vms: Vec<CreatedVm>,
}

impl Unstarted<'_> {
    fn keep(mut self) {
        self.vms.clear();
    }
}

impl Drop for Unstarted<'_> {
    fn drop(&mut self) {
        for vm in &self.vms {
            if let Err(error) = self.client.delete(&vm.name) {
                eprintln!("pagoda: give up {}: {error}", vm.name);
            }
        }
    }
}

/// What it prints goes to standard error: standard output has the clones.
fn run_hook(hook: &str, dir: &Path, client: &Client, from: &SnapshotName, member: &Member, ran: Ran, number: u64) {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", hook]).current_dir(dir).stdin(Stdio::null()).stdout(std::io::stderr());
    command.env("PAGODA_VM", member.name()).env("PAGODA_INDEX", number.to_string());
    command.env("PAGODA_SOURCE", from.to_string()).env("PAGODA_SOCKET", client.socket());
    command.env("PAGODA_QEMU_PID", ran.pid.to_string());
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => eprintln!("pagoda: warning: the hook of {} ended with {status}", member.name()),
        Err(error) => eprintln!("pagoda: warning: start the hook of {}: {error}", member.name()),
    }
}
