//! `pagoda run`: makes a VM, fetches its RAM and becomes its program.
//!
//! First everything that can be wrong is looked for, then the daemon makes the VM, then this
//! process turns into the program by `exec`, so signals, exit status and parent are the program's. If anything
//! fails in between, the VM is given up again. From `exec` on the program inherits the RAM files and
//! the monitor's socket, and the preloaded shim attaches.

pub mod program;

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use pagoda_api::attach::{Fetched, fetch};
use pagoda_api::{Client, CreateVm, CreatedVm, FarRequest, PolicySettings, Sampling, VmKind};
use rustix::io::FdFlags;

use crate::cli;
use crate::exit::UsageError;
use crate::qemu_args::{self, Plan};

/// Tells the shim which VM it is, where to attach and which descriptors are RAM.
const ENV_TOKEN: &str = "PAGODA_TOKEN";
const ENV_ATTACH: &str = "PAGODA_ATTACH";
const ENV_RAM_FDS: &str = "PAGODA_RAM_FDS";
/// Paths of the RAM files, for programs that map them by themselves.
const ENV_RAM: &str = "PAGODA_RAM";

/// What to run.
#[derive(Debug)]
pub struct Request {
    pub name: Option<String>,
    pub memory_bytes: Option<u64>,
    pub dram_bytes: Option<u64>,
    pub share_group: Option<String>,
    pub policy: PolicySettings,
    pub reserve_swap: bool,
    pub far: Option<FarRequest>,
    pub kind: VmKind,
    pub program: PathBuf,
    pub words: Vec<String>,
}

/// Never returns when all goes well.
pub fn run(client: &Client, options: cli::Run) -> Result<()> {
    let (name, words) = options.command.split_first().context("name a program to run")?;
    let kind = if options.plain { VmKind::Plain } else { VmKind::Qemu };
    if kind == VmKind::Qemu && !qemu_args::is_qemu(name) {
        return Err(UsageError(format!(
            "{name} is not a QEMU by its name: for another program add --plain and --memory; for a \
             QEMU of another name call it by a link named qemu-system-..."
        ))
        .into());
    }
    let dram_in_options = match kind {
        VmKind::Qemu => qemu_args::dram_of(words)?,
        VmKind::Plain => None,
    };
    start(
        client,
        Request {
            name: options.name,
            memory_bytes: options.memory,
            dram_bytes: options.dram.or(dram_in_options),
            share_group: options.share_group,
            policy: PolicySettings {
                min: options.claim.min.unwrap_or(0),
                shares: options.claim.shares,
                sampling: options.sampling.over(Sampling::default()),
            },
            reserve_swap: options.reserve_swap,
            far: options.far,
            kind,
            program: program::find(name)?,
            words: words.to_vec(),
        },
    )
}

/// Makes the VM and becomes its program.
pub fn start(client: &Client, request: Request) -> Result<()> {
    let plan = match request.kind {
        VmKind::Plain => None,
        VmKind::Qemu if qemu_args::is_probe(&request.words) => {
            return Err(UsageError("these options only ask QEMU about itself: run it without pagoda".into()).into());
        }
        VmKind::Qemu => Some(qemu_args::plan(&request.words, request.memory_bytes)?),
    };
    let vm = vm_of(&request, plan.as_ref())?;
    vm.check().map_err(UsageError)?;
    if let Some(plan) = &plan {
        refuse_hugetlbfs(plan)?;
    }
    if let (Some(reason), true) = (&vm.pinned, vm.dram.is_some_and(|dram| dram < vm.memory_bytes())) {
        eprintln!("pagoda: warning: all of {} stays in DRAM, whatever its limit: {reason}", vm.name);
    }

    let created = Unattached { client, vm: client.create(&vm)? };
    if !created.vm.shim.is_file() {
        bail!(
            "the daemon names {} as the shim, but there is no such file: install it, or start pagodad with \
             the right --shim",
            created.vm.shim.display()
        );
    }
    let fetched = fetch(&created.vm, &vm.memory)?;
    let error = command(&request, plan.as_ref(), &created.vm, &fetched)?.exec();
    Err(anyhow!(error).context(format!("start {}", request.program.display())))
}

/// A VM that is given up unless this process becomes its program, for `exec` runs no destructor.
struct Unattached<'a> {
    client: &'a Client,
    vm: CreatedVm,
}

impl Drop for Unattached<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.client.delete(&self.vm.name) {
            eprintln!("pagoda: give up {}: {error}", self.vm.name);
        }
    }
}

fn vm_of(request: &Request, plan: Option<&Plan>) -> Result<CreateVm> {
    let name = request
        .name
        .clone()
        .or_else(|| plan?.name.clone())
        .ok_or_else(|| UsageError("the VM has no name: give --name, or QEMU's -name".into()))?;
    let memory = match plan {
        Some(plan) => plan.memory(),
        None => vec![request.memory_bytes.ok_or_else(|| UsageError("give --memory".into()))?],
    };
    Ok(CreateVm {
        name,
        memory,
        dram: request.dram_bytes,
        kind: request.kind,
        reserve_swap: request.reserve_swap,
        far: request.far,
        pinned: plan.and_then(|plan| plan.pinned.clone()),
        share_group: request.share_group.clone(),
        policy: request.policy.clone(),
    })
}

/// Memory on hugetlbfs was asked for its pages, which Pagoda's files do not have.
fn refuse_hugetlbfs(plan: &Plan) -> Result<()> {
    /// `HUGETLBFS_MAGIC` of statfs(2).
    const HUGETLBFS: i64 = 0x9584_58f6;
    for file in plan.replaced_files() {
        // QEMU makes the file if it is not there; then its directory tells.
        let path = Path::new(file);
        let there = if path.exists() { path } else { path.parent().unwrap_or(path) };
        if rustix::fs::statfs(there).is_ok_and(|fs| fs.f_type == HUGETLBFS) {
            return Err(UsageError(format!(
                "mem-path={file} is on hugetlbfs, whose pages cannot be evicted: use \
                 -object memory-backend-ram; Pagoda maps it by transparent huge pages when it can"
            ))
            .into());
        }
    }
    Ok(())
}

/// The program with its descriptors and its environment.
fn command(request: &Request, plan: Option<&Plan>, vm: &CreatedVm, fetched: &Fetched) -> Result<Command> {
    let ram = fetched.ram.iter().map(|fd| inherit(fd.as_fd())).collect::<Result<Vec<i32>>>()?;
    let mut command = Command::new(&request.program);
    match plan {
        Some(plan) => {
            let monitor = fetched.monitor.as_ref().context("the daemon handed over no monitor socket")?;
            command.args(plan.argv(&ram, inherit(monitor.as_fd())?));
        }
        None => {
            let paths: Vec<String> = ram.iter().map(|fd| format!("/proc/self/fd/{fd}")).collect();
            command.args(&request.words).env(ENV_RAM, paths.join(","));
        }
    }
    let ram_fds: Vec<String> = ram.iter().map(i32::to_string).collect();
    command
        .env("LD_PRELOAD", preload(&vm.shim, std::env::var_os("LD_PRELOAD")))
        .env(ENV_TOKEN, &vm.token)
        .env(ENV_ATTACH, &vm.attach_socket)
        .env(ENV_RAM_FDS, ram_fds.join(","));
    Ok(command)
}

/// Lets the program have a descriptor, under the same number.
fn inherit(fd: BorrowedFd<'_>) -> Result<i32> {
    rustix::io::fcntl_setfd(fd, FdFlags::empty()).context("pass a descriptor on")?;
    Ok(fd.as_raw_fd())
}

/// The shim first: of two libraries with the same function, the first wins.
fn preload(shim: &Path, existing: Option<OsString>) -> OsString {
    let mut value = shim.as_os_str().to_owned();
    if let Some(existing) = existing.filter(|existing| !existing.is_empty()) {
        value.push(":");
        value.push(existing);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shim_comes_first() {
        let check = |existing: Option<&str>, expected: &str| {
            assert_eq!(preload(Path::new("/s.so"), existing.map(Into::into)), expected);
        };
        check(None, "/s.so");
        check(Some(""), "/s.so");
        check(Some("/a.so"), "/s.so:/a.so");
    }
}
