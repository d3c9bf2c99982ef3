//! `pagoda run`: makes a VM and becomes its program.
//!
//! First everything that can be wrong is looked for, then the daemon makes the VM, then this
//! process turns into the program by `exec`, so signals, exit status and parent are the program's. If anything
//! fails in between, the VM is given up again. From `exec` on the program inherits the monitor's socket. It does not
//! inherit RAM: that has a path which only the preloaded shim can open, so a program that lost the shim on the way ends.

pub mod clone;
mod environment;
mod launch;
mod machines;
pub mod moved;
pub mod on_crash;
mod outbox;
pub mod program;
mod restore;
mod shim;
mod version;

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow};
use pagoda_api::attach::{fetch, ram_path};
use pagoda_api::{Client, CreateVm, CreatedVm, VmKind, VmSpec};
use rustix::fs::SeekFrom;
use rustix::io::{Errno, FdFlags};

use self::environment::{ENV_ATTACH, ENV_TOKEN};
use self::on_crash::First;
use self::outbox::Outbox;
pub use self::restore::restore;
use crate::cli::{self, SpaceChoice};
use crate::exit::UsageError;
use crate::qemu_args::{self, Plan};

/// What a process of a clone is to start, as JSON. It has the VM's token in it.
const ENV_CLONE: &str = "PAGODA_CLONE";
/// Paths of the RAM files, for programs that map them by themselves.
const ENV_RAM: &str = "PAGODA_RAM";

/// The VM that is to be made, and the program that becomes it.
#[derive(Debug)]
pub struct Request {
    pub name: Option<String>,
    pub memory_bytes: Option<u64>,
    pub spec: VmSpec,
    pub kind: VmKind,
    pub program: PathBuf,
    pub words: Vec<String>,
    pub outbox: Option<Outbox>,
}

/// Never returns when all goes well.
pub fn run(client: &Client, options: cli::Run) -> Result<()> {
    let command = in_utf8(options.command)?;
    let (name, words) = command.split_first().context("name a program to run")?;
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
    let words = match kind {
        VmKind::Qemu if !options.no_vmgenid => qemu_args::with_generation_id(name, words.to_vec()),
        _ => words.to_vec(),
    };
    let outbox = match options.outbox.outbox {
        Some(_) if kind == VmKind::Plain => {
            return Err(UsageError("--outbox needs QEMU: it is a device of the guest".into()).into());
        }
        Some(_) if options.crash.on_crash.is_some() => {
            return Err(UsageError(
                "--outbox and --on-crash exclude each other: a VM with an outbox has no snapshots".into(),
            )
            .into());
        }
        Some(SpaceChoice::Auto) if options.outbox.outbox_slo.is_none() => {
            return Err(UsageError("--outbox auto needs --outbox-slo, such as --outbox-slo 'p90 4.6s'".into()).into());
        }
        Some(SpaceChoice::Size(_)) if options.outbox.outbox_slo.is_some() => {
            return Err(UsageError("--outbox-slo belongs to --outbox auto: a size is no SLO's".into()).into());
        }
        Some(space) => Some(Outbox::new(space.bytes(), options.outbox)?),
        None => None,
    };
    let request = Request {
        name: options.name,
        memory_bytes: options.memory,
        spec: VmSpec { dram: options.spec.dram.or(dram_in_options), ..options.spec },
        kind,
        program: program::find(name)?,
        words,
        outbox,
    };
    let ready = Ready::new(request)?;
    match on_crash::duty(options.crash.on_crash)? {
        Some(_) if kind == VmKind::Plain => {
            Err(UsageError("--on-crash restore needs QEMU: other programs have no snapshots".into()).into())
        }
        Some(on_crash) => on_crash::watch(client, on_crash, &ready.vm.name, None, First::Own),
        None => ready.start(client, |vm| Ok(client.create(vm)?)),
    }
}

/// A program and its arguments as text, for QEMU's are read and written anew.
pub fn in_utf8(words: Vec<OsString>) -> Result<Vec<String>> {
    let word = |(index, word): (usize, OsString)| {
        word.into_string().map_err(|word| {
            UsageError(format!(
                "argument {index} of the program is not UTF-8: {word:?}: rename the file that it names, or give a link to it"
            ))
        })
    };
    Ok(words.into_iter().enumerate().map(word).collect::<Result<_, _>>()?)
}

/// Makes the VM and becomes its program.
pub fn start(client: &Client, request: Request) -> Result<()> {
    Ready::new(request)?.start(client, |vm| Ok(client.create(vm)?))
}

/// A program that can be started, as far as that can be seen before its VM is made.
struct Ready {
    request: Request,
    plan: Option<Plan>,
    vm: CreateVm,
    /// Its standard input is nothing.
    is_in_background: bool,
}

impl Ready {
    /// Looks for everything that can be wrong.
    fn new(request: Request) -> Result<Ready> {
        let plan = match request.kind {
            VmKind::Plain => None,
            VmKind::Qemu if qemu_args::is_probe(&request.words) => {
                return Err(UsageError("these options only ask QEMU about itself: run it without pagoda".into()).into());
            }
            VmKind::Qemu => {
                let ram_id = |machine: Option<&str>| machines::ram_id(&request.program, machine);
                let device = request.outbox.iter().flat_map(Outbox::qemu_words);
                let words: Vec<String> = request.words.iter().cloned().chain(device).collect();
                Some(qemu_args::plan(&words, request.memory_bytes, ram_id)?)
            }
        };
        let vm = vm_of(&request, plan.as_ref())?;
        vm.check().map_err(UsageError)?;
        if let Some(plan) = &plan {
            refuse_hugetlbfs(plan)?;
            refuse_content(plan)?;
            refuse_device_memory_in_ram(plan)?;
        }
        shim::check_descriptors()?;
        Ok(Ready { request, plan, vm, is_in_background: false })
    }

    /// Bytes of each region of the VM.
    fn memory(&self) -> &[u64] {
        &self.vm.memory
    }

    /// Whether files of the user's are the memory of a device.
    fn has_device_files(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.device_files().next().is_some())
    }

    /// Becomes the program of the VM, which `make` has the daemon make.
    fn start(self, client: &Client, make: impl FnOnce(&CreateVm) -> Result<CreatedVm>) -> Result<()> {
        let Ready { request, plan, vm, is_in_background } = self;
        if let (Some(reason), true) = (&vm.spec.pinned, vm.spec.dram.is_some_and(|dram| dram < vm.memory_bytes())) {
            eprintln!("pagoda: warning: all of {} stays in DRAM, whatever its limit: {reason}", vm.name);
        }
        let created = Unattached { client, vm: make(&vm)? };
        shim::check(&created.vm.shim, plan.is_some())?;
        let monitor = fetch(&created.vm)?;
        if let Some(outbox) = &request.outbox {
            outbox.start(&created.vm)?;
            outbox.follow_slo(client, &created.vm.name)?;
        }
        let mut command = command(&request, plan.as_ref(), &created.vm, vm.memory.len(), monitor.as_ref())?;
        if is_in_background {
            command.stdin(Stdio::null());
        }
        let error = command.exec();
        Err(anyhow!(error).context(format!("start {}", request.program.display())))
    }
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
    let pinned = plan.and_then(|plan| plan.pinned.clone());
    let spec = VmSpec { pinned, ..request.spec.clone() };
    let launch = plan.map(|_| launch::of(&request.program, &request.words, request.outbox.is_some()));
    let outbox = request.outbox.as_ref().map(Outbox::space_bytes);
    Ok(CreateVm { name, memory, kind: request.kind, spec, launch, outbox })
}

/// `HUGETLBFS_MAGIC` and `TMPFS_MAGIC` of statfs(2).
const HUGETLBFS: i64 = 0x9584_58f6;
const TMPFS: i64 = 0x0102_1994;

/// The type of the file system that a file of QEMU's is on. QEMU makes the file if it is not there; then its directory tells.
fn file_system(file: &str) -> rustix::io::Result<i64> {
    let path = Path::new(file);
    let there = if path.exists() { path } else { path.parent().unwrap_or(path) };
    rustix::fs::statfs(there).map(|fs| fs.f_type)
}

/// Memory of a device that is a file of the user's is the kernel's to write back and reclaim, if the file is on a disk.
fn refuse_device_memory_in_ram(plan: &Plan) -> Result<()> {
    for file in plan.device_files() {
        let kind = file_system(file).with_context(|| format!("look at the file system of mem-path={file}"))?;
        if [HUGETLBFS, TMPFS].contains(&kind) {
            return Err(UsageError(format!(
                "mem-path={file} is in memory, and would be memory of the VM that Pagoda does not manage: put it on a disk"
            ))
            .into());
        }
    }
    Ok(())
}

/// A file with something in it would be what the guest's RAM begins with, as a template or from a run before. Ours is empty.
fn refuse_content(plan: &Plan) -> Result<()> {
    for file in plan.replaced_files() {
        match std::fs::metadata(file) {
            Ok(found) if found.is_file() => {}
            // A directory, in which QEMU would make a file.
            Ok(_) => continue,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("look at mem-path={file}")),
        }
        let open = File::open(file).with_context(|| format!("look at mem-path={file}"))?;
        if rustix::fs::seek(&open, SeekFrom::Data(0)) != Err(Errno::NXIO) {
            return Err(UsageError(format!(
                "mem-path={file} is a file with content, which the guest's RAM would begin with (a template, or the RAM \
                 of an earlier run), but Pagoda's RAM begins empty: write -object memory-backend-ram instead, and bring \
                 the state in by -loadvm or -incoming"
            ))
            .into());
        }
    }
    Ok(())
}

/// Memory on hugetlbfs was asked for its pages, which Pagoda's files do not have.
fn refuse_hugetlbfs(plan: &Plan) -> Result<()> {
    for file in plan.replaced_files() {
        if file_system(file).is_ok_and(|kind| kind == HUGETLBFS) {
            return Err(UsageError(format!(
                "mem-path={file} is on hugetlbfs, whose pages cannot be evicted: use \
                 -object memory-backend-ram; Pagoda maps it by transparent huge pages when it can"
            ))
            .into());
        }
    }
    Ok(())
}

/// The program with its monitor and its environment.
fn command(
    request: &Request,
    plan: Option<&Plan>,
    vm: &CreatedVm,
    regions: usize,
    monitor: Option<&OwnedFd>,
) -> Result<Command> {
    let mut command = Command::new(&request.program);
    match plan {
        Some(plan) => {
            let monitor = monitor.context("the daemon handed over no monitor socket")?;
            command.args(plan.argv(inherit(monitor.as_fd())?));
        }
        None => {
            let paths: Vec<String> = (0..regions).map(ram_path).collect();
            command.args(&request.words).env(ENV_RAM, paths.join(","));
        }
    }
    command
        .env("LD_PRELOAD", preload(&vm.shim, std::env::var_os("LD_PRELOAD")))
        .env(ENV_TOKEN, &vm.token)
        .env(ENV_ATTACH, &vm.attach_socket)
        .env_remove(on_crash::ENV_PARENT)
        .env_remove(ENV_CLONE);
    if let Some(outbox) = &request.outbox {
        command.env(outbox::ENV_LENDS_TO, outbox.socket());
    }
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
