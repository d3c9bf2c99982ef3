//! What the registry keeps of one VM. Reached under the registry's lock alone.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use pagoda_core::policy::VmId;
use pagoda_core::units::PageCount;
use pagoda_pager::handle::Handle;
use pagoda_pager::share::Group;
use pagoda_pager::tier::image::ImageTier;
use pagoda_pager::tier::source::Arrivals;
use pagoda_sys::ram::RamFile;
use pagoda_sys::socket::SharedMap;
use pagoda_sys::swapfile::SwapFile;

use super::process::{Starter, Taken};
use super::writing::WritingLock;
use crate::balloon;
use crate::images::readers::Reading;
use crate::images::templates::Place;
use crate::policy::governed::Governed;
use crate::policy::settings;
use crate::qmp::Monitor;
use crate::record::{Operation, Record};

/// One VM that the registry knows.
#[derive(Debug)]
pub struct Vm {
    /// What is on the disk, except for a pin or the end of an operation that could not be written. Only [`super::Registry::change`] changes it.
    pub record: Record,
    pub(super) writing: WritingLock,
    /// Its engine, once a VMM attached to this daemon.
    pub handle: Option<Arc<Handle>>,
    /// Made at creation, given to the VMM and the engine.
    pub ram: Vec<RamFile>,
    pub swap: Option<SwapFile>,
    /// The tier of the image that it was made of, until it is attached.
    pub image_tier: Option<ImageTier>,
    /// Where the template of that image is, of which it may borrow, until its guest runs.
    pub template: Option<Arc<Place>>,
    /// Nobody removes that image before the VM and its files are gone.
    pub reading: Option<Reading>,
    /// Pages that it gets, or has got, from the host that it has moved from, once attached. It outlives engines.
    pub arrivals: Option<Arc<Arrivals>>,
    /// What the VMM keeps for whichever daemon there is, once attached.
    pub shared: Option<SharedMap>,
    /// The same before it is attached, if somebody needed it by then.
    pub to_be_shared: Option<SharedMap>,
    /// Device and inode of each RAM file, once attached.
    pub inodes: Vec<(u64, u64)>,
    /// QEMU's monitor socket, until `pagoda run` fetches it.
    pub monitor: Option<OwnedFd>,
    pub created: Instant,
    /// The `pagoda run` that becomes its program.
    pub started_by: Option<Starter>,
    /// The process that has its RAM; it attaches next.
    pub taken: Option<Taken>,
    /// Why its agent was refused last: it waits until that is put right.
    pub refused: Option<String>,
    /// What the engine said when it stalled.
    pub stalled: Option<(String, Instant)>,
    pub accelerator: Option<String>,
    /// The monitor through which the daemon commands the VM's QEMU.
    pub qmp: Arc<Monitor>,
    /// QEMU was asked, and does not know how to leave RAM out of a migration: the shim's gate works.
    pub keeps_ram: bool,
    /// When its guest ran for the first time since it was made of a snapshot, by QEMU's clock.
    pub resumed_unix_us: Option<u64>,
    /// Nobody carries out the operation that the record tells of.
    pub(super) is_cut_off: bool,
    /// Since it first had a target.
    pub balloon: Option<balloon::Handle>,
    /// A thread writes down that it has one.
    pub(super) is_balloon_noted: Arc<AtomicBool>,
    /// With whom it shares equal pages; `None` for a VM whose shim cannot keep what that needs.
    pub group: Option<Arc<Group>>,
    /// Its table of shared pages, until it is attached.
    pub table: Option<RamFile>,
    /// What the memory policy remembers of it.
    pub governed: Governed,
}

impl Vm {
    /// A VM that no program is attached to, with nothing of its own yet but its record and a place in the policy.
    pub(super) fn new(record: Record, id: VmId, qmp: Monitor, group: Option<Arc<Group>>) -> Vm {
        Vm {
            record,
            writing: WritingLock::default(),
            handle: None,
            ram: Vec::new(),
            swap: None,
            image_tier: None,
            template: None,
            reading: None,
            arrivals: None,
            shared: None,
            to_be_shared: None,
            inodes: Vec::new(),
            monitor: None,
            created: Instant::now(),
            started_by: None,
            taken: None,
            refused: None,
            stalled: None,
            accelerator: None,
            qmp: Arc::new(qmp),
            keeps_ram: false,
            resumed_unix_us: None,
            is_cut_off: false,
            balloon: None,
            is_balloon_noted: Arc::default(),
            governed: Governed::new(id),
            group,
            table: None,
        }
    }

    /// What an earlier daemon was doing with it, and nobody does.
    pub fn operation_cut_off(&self) -> Option<Operation> {
        self.record.operation.filter(|_| self.is_cut_off)
    }

    /// The limit that its engine is to enforce: the least of its user's, what stands in for its balloon, and the policy's.
    pub fn limit(&self) -> PageCount {
        self.governed.round.engine_limit(&settings::caps_of(&self.record))
    }
}
