//! A process that is going to map a VM's RAM beside its VMM introduces itself, before its VMM gives it any.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result, ensure};
use pagoda_abi::Token;
use pagoda_abi::attach::{LentFile, List, PREPARED_DEVICE, Packet};
use pagoda_pager::handle::Command;
use pagoda_pager::mapper::NewMapper;
use pagoda_sys::process;
use pagoda_sys::socket::{Connection, Listener, Peer, SharedMap};
use pagoda_sys::uffd;

use crate::mappers;
use crate::registry::{Registry, Vm};

/// Gives it what it needs to be a mapper, and the engine, if there is one, the news of it.
pub fn lend(connection: &Connection, registry: &Registry, token: Token, peer: Peer) -> Result<()> {
    let outbox = registry.outboxes.by_token(token).context("no process of a VM has this token")?;
    let pidfd = process::pidfd_open(peer.pid).context("watch the process")?;
    // The start time is read after the pidfd was opened, so it is this process's.
    let start = process::start_time(peer.pid).context("look at the process")?;
    mappers::make_dir(&registry.config.state_dir)?;
    let device = uffd::open_device().ok();
    let flags = if device.is_some() { PREPARED_DEVICE } else { 0 };
    let inode = registry.first_inode(outbox.vm_token).context("the VM's memory is not there")?;
    let socket = mappers::socket_path(&registry.config.state_dir, inode, peer.pid, start);
    ensure!(!socket.exists(), "this process has introduced itself before: start the VM again");
    // Without the registry's lock: it may wait for whoever has the path.
    let listener = Listener::bind(&socket).context("make its socket")?;
    let mut vms = registry.lock();
    let vm = vms.values_mut().find(|vm| vm.record.token == outbox.vm_token).context("its VM is gone")?;
    may_serve(vm, peer)?;
    let mut files = List::default();
    for (index, len) in vm.record.regions.iter().enumerate() {
        let inode = vm.ram.get(index).map(|ram| ram.inode()).or_else(|| vm.inodes.get(index).copied());
        let (dev, ino) = inode.context("the VM's memory is not there")?;
        files.push(LentFile { dev, ino, len: *len });
    }
    let shared = shared_of(vm)?;
    let slot = shared.add_mapper(peer.pid, start).context("too many processes map the memory of this VM")?;
    let mut fds: Vec<BorrowedFd<'_>> = vec![listener.as_fd(), shared.as_fd()];
    fds.extend(device.as_ref().map(AsFd::as_fd));
    if let Err(error) = connection.send(&Packet::Lent { flags, slot: slot as u32, files }, &fds) {
        // It has mapped nothing, for it was told of nothing.
        shared.remove_mapper(slot);
        let _ = std::fs::remove_file(&socket);
        return Err(error).context("give a process what it needs to map memory");
    }
    if let Some(handle) = &vm.handle {
        handle.send(Command::Mapper(NewMapper { slot, pid: peer.pid, pidfd, socket, has_maps: false }));
    }
    tracing::info!(vm = %vm.record.name, pid = peer.pid, "a process may map its memory");
    Ok(())
}

/// What the VMM keeps, or will keep: it is made when somebody needs it first.
pub fn shared_of(vm: &mut Vm) -> Result<SharedMap> {
    let kept = match (&vm.shared, &vm.to_be_shared) {
        (Some(shared), _) | (None, Some(shared)) => shared.as_fd().try_clone_to_owned(),
        (None, None) => {
            ensure!(vm.record.pid.0 == 0, "its VMM has not come back to this daemon yet");
            let made = SharedMap::create()?;
            vm.to_be_shared.insert(made).as_fd().try_clone_to_owned()
        }
    };
    Ok(SharedMap::from_fd(kept.context("share the VM's shared memory")?)?)
}

/// Whether a process of this user may be one of the VM's.
pub fn may_serve(vm: &Vm, peer: Peer) -> Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let is_starter = vm.started_by.is_some_and(|by| by.uid == peer.uid);
    ensure!(peer.uid == 0 || peer.uid == own || is_starter, "user {} may not serve {}", peer.uid, vm.record.name);
    Ok(())
}
