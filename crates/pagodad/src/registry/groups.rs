//! Share groups: who shares equal pages with whom.
//!
//! A VM that names no group is one of its own, whose pool ends with it. Groups with a name live as long as one of their
//! VMs. After a restart a group is made from the records of its VMs and waits for them ([`Group::settle`]).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_abi::Token;
use pagoda_api::types::ApiError;
use pagoda_core::fault::Sharing;
use pagoda_core::units::PAGE_SIZE;
use pagoda_pager::handle::Handle;
use pagoda_pager::share::frames::FRAMES_MAX;
use pagoda_pager::share::{Group, Member, table};
use pagoda_sys::ram::RamFile;

use super::{Registry, Vm, internal};
use crate::record::{Record, SharingFiles};

/// How long a new VM waits for the pool of its group, which the first VM of it that comes back brings: agents come again
/// within a second.
const POOL_WAIT: Duration = Duration::from_secs(5);
/// Stands for the VMs whose record cannot be read: it never comes back.
const UNKNOWN: Token = Token([0; 16]);

/// Frames of the pool: a VM alone cannot have more than pages, and frame 0 is not used.
fn frames_max(record: &Record) -> u32 {
    let pages = record.memory() / PAGE_SIZE + 1;
    if record.spec.share_group.is_some() { FRAMES_MAX } else { pages.min(u64::from(FRAMES_MAX)) as u32 }
}

impl Registry {
    /// The group of a new VM.
    pub(super) fn new_group(&self, record: &Record) -> Result<Arc<Group>, ApiError> {
        let make = |name: &str| {
            Group::create(name, frames_max(record))
                .map(Arc::new)
                .map_err(|e| internal("make the share group's pool", e))
        };
        let Some(name) = &record.spec.share_group else { return make(&record.name) };
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, group| group.strong_count() > 0);
        if let Some(group) = groups.get(name).and_then(Weak::upgrade) {
            return Ok(group);
        }
        let group = make(name)?;
        groups.insert(name.clone(), Arc::downgrade(&group));
        Ok(group)
    }

    /// The group of a VM that an earlier daemon served, and that may have shared pages.
    pub(super) fn old_group(&self, record: &Record) -> Option<Arc<Group>> {
        record.sharing?;
        let group = match &record.spec.share_group {
            None => Arc::new(Group::recovered(&record.name, frames_max(record))),
            Some(name) => {
                let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
                let known = groups.get(name).and_then(Weak::upgrade);
                let group = known.unwrap_or_else(|| Arc::new(Group::recovered(name, frames_max(record))));
                groups.insert(name.clone(), Arc::downgrade(&group));
                group
            }
        };
        group.expect(record.token);
        Some(group)
    }

    /// A record could not be read, so nobody knows to which group its VM belongs: no frame of any may ever be freed.
    pub(super) fn never_settle(&self) {
        for (name, group) in self.groups.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            if let Some(group) = group.upgrade() {
                tracing::error!(group = %name, "a record cannot be read: this group shares no more pages");
                group.expect(UNKNOWN);
            }
        }
    }

    /// Lets groups go on whose VMs are all accounted for.
    pub fn settle_groups(&self) {
        let groups: Vec<Arc<Group>> = self.lock().values().filter_map(|vm| vm.group.clone()).collect();
        groups.iter().filter(|group| group.can_settle()).for_each(|group| group.settle());
    }

    /// What a new VM's shim is to keep: table and pool, or nothing if it shares no pages.
    pub fn prepare_sharing(&self, name: &str) -> Result<Vec<OwnedFd>> {
        let start = Instant::now();
        loop {
            let mut vms = self.lock();
            let vm = vms.get_mut(name).context("the VM is gone")?;
            let Some(group) = vm.group.clone() else { return Ok(Vec::new()) };
            if let Some(frames) = group.frames() {
                let table = table::create(name, vm.record.memory())?;
                let kept = table::keepsakes(&table, frames)?;
                vm.table = Some(table);
                return Ok(kept.into());
            }
            drop(vms);
            ensure!(start.elapsed() < POOL_WAIT, "the share group {} waits for its other VMs: try again", group.name());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Checks what the shim kept against what it was given, or what the record says, and joins the VM's group. The second
    /// part is for the record.
    pub fn join_group(
        &self,
        record: &Record,
        kept: &[OwnedFd],
        is_new: bool,
        handle: &Arc<Handle>,
    ) -> Result<Option<(Member, SharingFiles)>> {
        let (group, made) = {
            let mut vms = self.lock();
            let vm = vms.get_mut(&record.name).context("the VM is gone")?;
            (vm.group.clone(), vm.table.take())
        };
        let (Some(group), [kept_table, kept_pool]) = (group, kept) else {
            // Its shared pages would be taken for zeros.
            ensure!(record.sharing.is_none(), "the table and the pool of its shared pages are missing");
            ensure!(kept.is_empty() || kept.len() == 2, "wrong number of descriptors");
            return Ok(None);
        };
        let bytes = record.memory();
        let (table, files) = match (made, record.sharing) {
            (Some(table), _) if is_new => {
                let pool = group.frames().context("the share group has no pool")?.inode();
                let files = SharingFiles { table: table.inode(), pool };
                ensure!(inode(kept_table)? == files.table, "the table of shared pages is not the one that was given");
                ensure!(inode(kept_pool)? == files.pool, "the pool of shared pages is not the one that was given");
                (table, files)
            }
            (_, Some(files)) if !is_new => {
                let table: RamFile = table::reopen(kept_table.as_fd(), bytes, files.table)?;
                group.adopt(kept_pool.as_fd(), files.pool)?;
                (table, files)
            }
            // Its first daemon died before it wrote what it had given: nothing is shared yet, and nothing will be.
            _ => return Ok(None),
        };
        let number = group.join(Arc::downgrade(handle));
        Ok(Some((Member::new(group, table, record.token, number, is_new)?, files)))
    }

    /// How far equal pages of this VM are looked for.
    pub fn sharing_of(&self, record: &Record, member: Option<&Member>) -> Sharing {
        match (member.filter(|_| self.config.page_sharing), &record.spec.share_group) {
            (None, _) => Sharing::Off,
            (Some(_), None) => Sharing::PageOut,
            (Some(_), Some(_)) => Sharing::Scan,
        }
    }
}

impl Vm {
    /// It ended while no engine served it.
    pub(super) fn leave_group(&self) {
        if let Some(group) = &self.group {
            group.account_for(self.record.token);
        }
    }
}

fn inode(fd: &OwnedFd) -> Result<(u64, u64)> {
    let stat = rustix::fs::fstat(fd).context("look at what the shim kept")?;
    Ok((stat.st_dev, stat.st_ino))
}
