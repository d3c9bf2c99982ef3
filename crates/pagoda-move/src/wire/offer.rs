//! What the source says of itself and of the VM before anything else, and why the destination refuses it.

use pagoda_core::units::Bytes;

use crate::units::{AttemptId, ConnectionNo, Generation, RegisterId};

/// Things that not every version of Pagoda can do: one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Runs of pages may be compressed with LZ4.
    pub const LZ4: Capabilities = Capabilities(1);
    /// The VM may run at the destination before all its pages are there.
    pub const POSTCOPY: Capabilities = Capabilities(1 << 1);
    /// An arbiter decides who owns the VM when the link does not.
    pub const ARBITER: Capabilities = Capabilities(1 << 2);
    /// A remote tier that etcd keeps is handed over, and its pages are not sent.
    pub const REMOTE_TIER: Capabilities = Capabilities(1 << 3);
    /// Disks are copied while the VM runs.
    pub const DISKS: Capabilities = Capabilities(1 << 4);
    /// Runs of pages may be compressed with zstd. Whoever has it has LZ4, too.
    pub const ZSTD: Capabilities = Capabilities(1 << 5);

    pub const fn has(self, other: Capabilities) -> bool {
        self.0 & other.0 == other.0
    }

    pub const fn with(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 | other.0)
    }

    pub const fn without(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 & !other.0)
    }

    pub const fn both(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 & other.0)
    }
}

/// A region of the VM's RAM, by the id that QEMU's migration stream knows it by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionFacts {
    pub id: String,
    pub size: Bytes,
}

/// The source's first message: who asks, and for which VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub attempt: AttemptId,
    pub connection: ConnectionNo,
    /// The generation at which the source owns the VM.
    pub generation: Generation,
    pub protocol_min: u16,
    pub protocol_max: u16,
    pub capabilities: Capabilities,
    /// What the source cannot do without.
    pub required: Capabilities,
    /// Seconds since 1970, by the source's clock.
    pub unix_s: u64,
    /// Those of its arbiter, if it has one and reaches it.
    pub register: Option<RegisterId>,
    pub software: String,
    pub vm: String,
    pub qemu: String,
    pub machine: String,
    /// What the guest's CPU has, as QEMU names it, parted by commas.
    pub cpu_features: String,
    pub regions: Vec<RegionFacts>,
}

/// The destination takes the VM, as far as can be known before memory is reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    pub attempt: AttemptId,
    pub protocol: u16,
    /// What both can do.
    pub capabilities: Capabilities,
    pub software: String,
}

/// What the destination's host lacks, or what is not as it has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum ReasonKind {
    Protocol = 1,
    Capability = 2,
    Qemu = 3,
    Machine = 4,
    CpuFeature = 5,
    RegionSize = 6,
    RegionId = 7,
    NameTaken = 8,
    Clock = 9,
    /// The destination's administrator does not allow it: a program, a user or a path.
    Forbidden = 10,
    /// An earlier move of this VM is not settled.
    Unsettled = 11,
}

impl ReasonKind {
    pub const ALL: [ReasonKind; 11] = [
        ReasonKind::Protocol,
        ReasonKind::Capability,
        ReasonKind::Qemu,
        ReasonKind::Machine,
        ReasonKind::CpuFeature,
        ReasonKind::RegionSize,
        ReasonKind::RegionId,
        ReasonKind::NameTaken,
        ReasonKind::Clock,
        ReasonKind::Forbidden,
        ReasonKind::Unsettled,
    ];
}

/// One reason not to take a VM, for the user who asked for the move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    pub kind: ReasonKind,
    pub what: String,
    pub remedy: String,
}

/// Memory for the VM at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    pub dram: Bytes,
    pub swap: Bytes,
    pub pool: Bytes,
}
