//! What is looked for before a VM begins to move, and what its destination is told of it. Nothing is changed.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, MoveSplit, UNKNOWN_LAUNCH, VmInfo, VmSpec};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_image::Qemu;
use pagoda_link::Keypair;
use pagoda_link::hosts::{Host, Hosts};
use pagoda_move::rounds::{Mode, OnTimeout};
use pagoda_move::units::{AttemptId, ConnectionNo, Generation, RegisterId};
use pagoda_move::wire::PROTOCOL_VERSION;
use pagoda_move::wire::limits::{REGIONS_MAX, VM_PAGES_MAX};
use pagoda_move::wire::offer::{Capabilities, Hello, RegionFacts, Room};
use pagoda_pager::handle::Handle;
use pagoda_pager::tier::remote::RemoteNumbers;
use rmap::client::Reach;
use rmap::units::{PAGE_SIZE, SLAB_PAGES};

use super::request::Request;
use super::shown;
use super::split::to_pool;
use crate::disks::{CopiedDisk, find_copied};
use crate::moves::capabilities::ours;
use crate::moves::specification::Specification;
use crate::qmp::state::{self, RunState};
use crate::record::{OperationKind, Record};
use crate::registry::Registry;
use crate::registry::operation::Ready;
use crate::remote::handover;
use crate::snapshots::disks;

/// A VM that can move, as far as this host can tell.
#[derive(Debug)]
pub struct Checked {
    pub ready: Ready,
    pub host: Host,
    pub own: Keypair,
    pub offer: Offer,
    pub runs: bool,
}

/// What the destination is told of it.
#[derive(Clone, Debug)]
pub struct Offer {
    vm: String,
    qemu: Qemu,
    memory: Vec<u64>,
    pub room: Room,
    /// What the destination has to be able to do.
    required: Capabilities,
    /// Those of the arbiter that this host asks, if it may decide about this VM.
    pub register: Option<RegisterId>,
    pub specification: String,
    /// What does not fit into its DRAM there goes into its remote tier.
    pub is_split: bool,
    /// Its disks, if they are copied.
    pub disks: Vec<CopiedDisk>,
}

/// Looks for all that can be wrong.
///
/// # Errors
/// What is, and what to do about it.
pub fn check(registry: &Arc<Registry>, request: &Request) -> Result<Checked, ApiError> {
    let vm = &request.vm;
    let refuse =
        |why: String, hint: Option<&str>| ApiError::new(ErrorCode::Refused, format!("{vm} does not move: {why}"), hint);
    let asked = |error: anyhow::Error| refuse(in_full(error.as_ref()), None);
    let may_lack_pages = request.mode != Mode::Precopy || request.on_timeout == OnTimeout::Postcopy;
    if request.split.is_some() && may_lack_pages {
        let why = "only a VM that goes with all of its pages is split between its destination and a pool";
        return Err(refuse(why.to_owned(), Some("use --split with --mode precopy, without --on-timeout postcopy")));
    }
    let hosts = Hosts::in_dir(&registry.config.hosts.dir);
    let host = hosts.find(&request.to).map_err(asked)?.ok_or_else(|| {
        let hint = "`pagoda host ls` shows those that are, `pagoda host trust` adds one";
        ApiError::new(ErrorCode::NoSuchHost, format!("no host named {} is trusted", request.to), Some(hint))
    })?;
    let own = hosts.own().map_err(asked)?;
    let ready = registry.ready_for(vm, OperationKind::Move)?;
    let Ready { record, handle, qmp, .. } = &ready;
    let unstartable = |why: String| refuse(format!("nobody could start it there: {why}"), None);
    let launch = record.launch.clone().ok_or_else(|| unstartable(UNKNOWN_LAUNCH.to_owned()))?;
    if let Some(why) = launch.why_unstartable() {
        return Err(unstartable(why));
    }
    check_others(record, handle).map_err(|(why, hint)| refuse(why, hint))?;
    if let Some(split) = request.split {
        check_tier(record, split).map_err(|(why, hint)| refuse(why, Some(hint)))?;
    }
    // One that is not handed over is copied, and is not the VM's any more there.
    let remote = handover::handed_over(record).cloned();
    handover::check_owned(record).map_err(asked)?;
    if remote.is_some() && may_lack_pages {
        let why = "its remote tier is handed over to a VM with all its pages only";
        return Err(refuse(why.to_owned(), Some("use --mode precopy without --on-timeout postcopy")));
    }
    state::check(qmp).map_err(|why| refuse(why, None))?;
    if !record.disks.is_empty() {
        let why = "snapshots have given its disks layers, which get their names when it ends";
        return Err(refuse(why.to_owned(), Some("end it, and start it anew")));
    }
    let copied = match request.copy_disks {
        true => find_copied(qmp, record, &launch).map_err(asked)?,
        false => Vec::new(),
    };
    let writable = disks::writable(qmp, &launch.cwd, &record.disks).map_err(asked)?;
    if let Some(disk) = writable.first().filter(|_| !request.shared_disks && !request.copy_disks) {
        let hint = "--shared-disks says that both hosts have the same disks at the same paths, and --copy-disks has their files copied";
        return Err(refuse(format!("it has writable disks, such as {}", disk.file), Some(hint)));
    }
    let qemu = state::machine(qmp).map_err(asked)?;
    registry.programs.note(record.pid.0, &qemu.version);
    let runs = state::run_state(qmp).map_err(asked)? == RunState::Running;
    let (memory, total) = (record.regions.clone(), Bytes(record.memory()));
    if memory.len() > REGIONS_MAX || total.pages_floor() > VM_PAGES_MAX {
        return Err(refuse("it has more memory than a VM that moves can have".to_owned(), None));
    }
    let dram = request.dram.or(record.spec.dram);
    let spec = VmSpec { dram, remote: record.spec.remote.filter(|_| remote.is_some()), ..record.spec.clone() };
    let room = Room { dram: spec.dram.map_or(total, Bytes).min(total), swap: total, pool: Bytes::ZERO };
    let needed = |is_needed: bool, what| if is_needed { what } else { Capabilities::default() };
    let required = needed(may_lack_pages, Capabilities::POSTCOPY);
    let required = required.with(needed(remote.is_some(), Capabilities::REMOTE_TIER));
    let required = required.with(needed(!copied.is_empty(), Capabilities::DISKS));
    // Whoever owns a tier takes it over by its note alone.
    let register = registry.moves.arbiter.register().filter(|_| remote.is_none());
    let (machine, regions) = (qemu.clone(), memory.clone());
    let images = copied.iter().map(|disk| disk.image.clone()).collect();
    let specification =
        Specification { launch, spec, memory: regions, qemu: machine, running: runs, remote, disks: images };
    let specification = specification.to_text().map_err(asked)?;
    if let Some(split) = request.split {
        check_room(registry, &ready, split, room.dram).map_err(|(why, hint)| refuse(why, Some(hint)))?;
    }
    let is_split = request.split.is_some();
    let offer =
        Offer { vm: vm.clone(), qemu, memory, room, required, register, specification, is_split, disks: copied };
    Ok(Checked { ready, host, own, offer, runs })
}

/// Nobody else has a part in its memory.
fn check_others(record: &Record, handle: &Handle) -> Result<(), (String, Option<&'static str>)> {
    if let Some(reason) = handle.status().pinned.clone().or_else(|| record.spec.pinned.clone()) {
        return Err((format!("its memory is written by others, unseen: {reason}"), None));
    }
    match &record.spec.share_group {
        None => Ok(()),
        Some(group) => {
            let hint = "end it, and start it without --share-group, for a VM that is to move";
            Err((format!("it shares pages with the VMs of the group {group}"), Some(hint)))
        }
    }
}

/// Why a VM is not split, and what to do.
type Unsplit = (String, &'static str);

/// It has a remote tier that goes with it, and that keeps as many copies as are asked for.
fn check_tier(record: &Record, split: MoveSplit) -> Result<(), Unsplit> {
    let hint = "leave --split away, or start it with --remote pool: on a host whose pool is kept by etcd";
    let remote = match (handover::handed_over(record), &record.remote) {
        (Some(remote), _) => remote,
        (None, Some(_)) => return Err(("the map of its remote tier is a file of this host".to_owned(), hint)),
        (None, None) => return Err(("it has no remote tier that could take a part of it".to_owned(), hint)),
    };
    match split.copies.filter(|copies| *copies > remote.copies) {
        None => Ok(()),
        Some(copies) => {
            let why = format!("its remote tier keeps {} copy of each page, and {copies} are asked for", remote.copies);
            Err((why, "use --split pool:, or start it with --remote pool:copies=2"))
        }
    }
}

/// The servers of its tier have room for what does not fit into so much DRAM.
fn check_room(registry: &Registry, ready: &Ready, split: MoveSplit, dram: Bytes) -> Result<(), Unsplit> {
    let status = ready.handle.fresh_status();
    let hint = "try again when `pagoda vm show` says what its pool has";
    let (Some(numbers), Some(remote)) = (&status.remote, &ready.record.remote) else {
        return Err(("nobody knows what its remote tier has room for".to_owned(), hint));
    };
    let vm = registry.get(&ready.record.name).map_err(|error| (error.message, hint))?;
    if split.copies == Some(2) && numbers.whole < numbers.held {
        let short = numbers.held - numbers.whole;
        return Err((
            format!("{short} parts of its remote tier have one copy only just now"),
            "try again when they have two",
        ));
    }
    let (needed, room) = (to_pool(&vm, dram.0), room_of(numbers, remote.copies, &vm));
    if needed <= room {
        return Ok(());
    }
    let size = |bytes| shown::size(Bytes(bytes));
    let why =
        format!("{} of it would go into its remote tier, whose servers have room for {}", size(needed), size(room));
    Err((why, "give it more --dram, or the pool more servers, or leave --split away"))
}

/// What a tier can take beyond what it has, bytes. Its pages are in parts, each at as many servers as there are copies.
fn room_of(numbers: &RemoteNumbers, copies: u8, vm: &VmInfo) -> u64 {
    let up = numbers.servers.iter().filter(|server| server.reach == Reach::Up);
    let free: Vec<u64> = up.map(|server| u64::from(server.free_slabs)).collect();
    let (all, most) = (free.iter().sum::<u64>(), free.iter().max().copied().unwrap_or(0));
    let more = if copies > 1 { (all / 2).min(all - most) } else { all };
    let slabs = (numbers.held as u64).saturating_add(more);
    let has = vm.remote.as_ref().map_or(0, |remote| remote.pool_bytes);
    slabs.saturating_mul(SLAB_PAGES as u64 * PAGE_SIZE as u64).saturating_sub(has)
}

impl Offer {
    pub fn pages(&self) -> PageCount {
        Bytes(self.memory.iter().sum()).pages_floor()
    }

    /// The first message of the attempt.
    pub fn hello(&self, attempt: AttemptId, connection: ConnectionNo, own: Generation) -> Hello {
        let region = |(index, size): (usize, &u64)| RegionFacts { id: format!("ram{index}"), size: Bytes(*size) };
        Hello {
            attempt,
            connection,
            generation: own,
            protocol_min: PROTOCOL_VERSION,
            protocol_max: PROTOCOL_VERSION,
            capabilities: ours(self.register),
            required: self.required,
            unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            register: self.register,
            software: env!("CARGO_PKG_VERSION").to_owned(),
            vm: self.vm.clone(),
            qemu: self.qemu.version.clone(),
            machine: self.qemu.machine.clone(),
            // The specification has them, and the QEMU that is started there is compared with it.
            cpu_features: String::new(),
            regions: self.memory.iter().enumerate().map(region).collect(),
        }
    }
}
