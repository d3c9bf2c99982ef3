//! What travels over the control socket: one type per request and reply.
//!
//! Sizes are bytes and end in `_bytes`, except in [`CreateVm`], whose fields are named after the
//! options of `pagoda run`. Readers ignore fields they do not know and writers may leave out what
//! has a default, so that a command line and a daemon of neighbouring versions understand
//! each other; a change that breaks this raises [`API_VERSION`].

mod autosnapshot;
mod balloon;
mod clone;
mod crashed;
mod dram;
mod hosts;
mod kind;
mod latency;
mod launch;
mod moves;
mod name;
mod outbox;
mod outbox_size;
mod policy;
mod remote;
mod sampling;
mod snapshot;
mod spec;
mod terms;
mod tier;
mod transfer;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use autosnapshot::{
    AUTOSNAPSHOT_EVERY_S_MAX, AUTOSNAPSHOT_EVERY_S_MIN, AUTOSNAPSHOT_KEEP_MAX, AUTOSNAPSHOT_PREFIX, Autosnapshot,
    AutosnapshotChange, AutosnapshotInfo,
};
pub use balloon::{BalloonInfo, GuestMemory, check_balloon_target};
pub use clone::{CLONE_BODY_BYTES_MAX, CLONES_MAX, CloneRequest, CreatedClones, NewClone, check_clone_names};
pub use crashed::{Candidate, Crash, CrashedVm, Restorable};
pub use dram::{DRAM_BYTES_MIN, DRAM_FRACTION_MIN, MEMORY_GRANULE_BYTES, check_dram, dram_bytes_min};
pub use hosts::{HOST_NAME_MAX, HostArbiter, HostList, HostLook, HostPing, OwnHost, TrustedHost, check_host_name};
pub use kind::VmKind;
pub use latency::{Latency, RoundWait};
pub use launch::{LAUNCH_BYTES_MAX, Launch, UNKNOWN_LAUNCH};
pub use moves::{
    MOVE_DOWNTIME_MS_DEFAULT, MOVE_DOWNTIME_MS_MAX, MOVE_DOWNTIME_MS_MIN, MOVE_TIME_S_MAX, MoveArbiter, MoveDirection,
    MoveList, MoveMode, MoveOnTimeout, MoveOutcome, MovePhase, MovePlan, MoveRemote, MoveReply, MoveRequest, MoveRoom,
    MoveSplit, MoveStatus, RemoteFate,
};
pub use name::{VM_FILE_NAME_LEN_MAX, check_vm_name, vm_file_name};
pub use outbox::{OutboxFigures, OutboxInfo, OutboxList, OutboxState};
pub use outbox_size::{
    OUTBOX_SPACE_BYTES_MAX, OUTBOX_SPACE_BYTES_MIN, OutboxAuto, OutboxExplanation, OutboxJob, OutboxPatch,
    OutboxProfile, OutboxTerm, check_outbox_space,
};
pub use policy::{
    AdmitReply, AdmitRequest, HostPatch, HostPolicy, Mrc, MrcPoint, VmPolicy, WhatIfReply, WhatIfRequest,
};
pub use remote::{REMOTE_COPIES_MAX, RemoteInfo, RemoteLatency, RemotePool, RemoteRequest, RemoteServer};
pub use sampling::{CurveInfo, CurvePoint, CurveSwitch, SampleInfo, SampleRequest};
pub use snapshot::{
    CreateSnapshot, HostSnapshots, RemovedLayer, RemovedSnapshot, RestoreRequest, Snapshot, SnapshotDamage,
    SnapshotDiff, SnapshotDisk, SnapshotLaunch, SnapshotList, SnapshotName, SnapshotQemu, SnapshotStage,
    UnreadableImage, VERIFY_SILENCE_S_MAX, VerifyReport, check_snapshot_name,
};
pub use spec::{PolicySettings, VmPatch, VmSpec};
pub use terms::{
    SHARE_GROUP_LEN_MAX, SHARES_DEFAULT, SHARES_MAX, Sampling, check_min, check_sampling, check_share_group,
    check_shares,
};
pub use tier::TierInfo;
pub use transfer::{
    AcceptRequest, COMPRESS_DEFAULT, COMPRESS_MAX, EXPORT_DONE, EXPORT_FAILED, ExportFormat, ExportReport,
    ExportRequest, SnapshotImport,
};

/// The number in the path `/v1/...`.
pub const API_VERSION: u32 = 1;

/// Regions (memory back ends, usually one for each NUMA node) of one VM.
pub const REGIONS_MAX: usize = pagoda_abi::REGIONS_MAX;

/// Default path of the control socket.
pub const SOCKET_DEFAULT: &str = "/run/pagoda/pagoda.sock";

/// Environment variable that names the control socket.
pub const SOCKET_ENV: &str = "PAGODA_SOCKET";

/// Default address of the metrics over TCP.
pub const METRICS_ADDR_DEFAULT: &str = "127.0.0.1:9464";

/// `POST /v1/vms` makes a VM, and has this body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateVm {
    pub name: String,
    /// Bytes of each region in order; multiples of [`MEMORY_GRANULE_BYTES`].
    pub memory: Vec<u64>,
    pub kind: VmKind,
    #[serde(flatten)]
    pub spec: VmSpec,
    /// What starts its QEMU again; nothing for another program, and from an older command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<Launch>,
    /// Bytes of the space of its outbox, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbox: Option<u64>,
}

impl CreateVm {
    /// Memory of all regions together.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Checks all that needs no knowledge of the host. The command line asks before it sends and
    /// the daemon before it acts, so both say the same.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn check(&self) -> Result<(), String> {
        check_vm_name(&self.name)?;
        if self.memory.is_empty() {
            return Err("a VM needs at least one memory region".into());
        }
        if self.memory.len() > REGIONS_MAX {
            return Err(format!("a VM has at most {REGIONS_MAX} memory regions, this one has {}", self.memory.len()));
        }
        for &bytes in &self.memory {
            if bytes == 0 || bytes % MEMORY_GRANULE_BYTES != 0 {
                return Err(format!(
                    "memory of {bytes} bytes is not a multiple of 2 MiB; give a size such as 4G or 512M"
                ));
            }
        }
        // Lengths of files are signed 64-bit numbers.
        let total = self.memory.iter().try_fold(0_u64, |sum, bytes| sum.checked_add(*bytes));
        let Some(total) = total.filter(|bytes| *bytes <= i64::MAX as u64) else {
            return Err("the memory regions are larger together than a file can be".into());
        };
        if let Some(space) = self.outbox {
            check_outbox_space(space)?;
            if self.kind == VmKind::Plain {
                return Err("only QEMU has the device of an outbox: a program that is no QEMU has none".into());
            }
        }
        self.spec.check(self.kind, total)
    }
}

/// The reply to [`CreateVm`] says how the VM's program attaches.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedVm {
    pub name: String,
    /// 128 bits in hex: who holds it may fetch the RAM files and attach.
    pub token: String,
    /// `SOCK_SEQPACKET` socket on which to fetch and attach.
    pub attach_socket: PathBuf,
    /// The library to preload.
    pub shim: PathBuf,
    /// 128 bits in hex, by which the daemon knows the process of the VM's outbox. Nothing: no outbox, or a daemon that knows none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbox_token: Option<String>,
}

impl std::fmt::Debug for CreatedVm {
    // The token is a secret and stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedVm")
            .field("name", &self.name)
            .field("attach_socket", &self.attach_socket)
            .field("shim", &self.shim)
            .finish_non_exhaustive()
    }
}

/// Where a VM is in its life. `pinned` is a field of its own, for a pinned VM runs too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum VmState {
    /// Made, but no program has attached yet.
    Created,
    /// Process `pid` has its RAM and has not handed it over: nobody pages it and no limit holds. A program that starts is
    /// here for milliseconds; one that stays there ends itself after 10 s.
    Unmanaged { pid: u32, since_s: u64 },
    /// A program has attached and runs.
    Running,
    /// The agent in the program is away; its faults wait.
    Waiting,
    /// Stopped by Pagoda because going on could lose data; see `pagoda vm cont`.
    Stalled { reason: String, since_s: u64 },
}

impl VmState {
    /// One word for tables.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Unmanaged { .. } => "UNMANAGED",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Stalled { .. } => "stalled",
        }
    }
}

/// `GET /v1/vms/NAME`, and one element of `GET /v1/vms`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmInfo {
    pub name: String,
    pub kind: VmKind,
    pub state: VmState,
    /// Why nothing of it is evicted, if so.
    #[serde(default)]
    pub pinned: Option<String>,
    pub memory_bytes: u64,
    pub dram_limit_bytes: u64,
    pub resident_bytes: u64,
    /// Content that is only in swap.
    pub swapped_bytes: u64,
    /// Content that is nowhere, because it is all zero.
    pub zero_bytes: u64,
    /// Allocated on the swap disk, clean copies of resident pages included.
    pub swap_used_bytes: u64,
    /// Registered with userfaultfd; a VM under no pressure is not.
    pub armed: bool,
    /// Mapped by huge pages throughout.
    pub huge: bool,
    #[serde(default)]
    pub pid: Option<u32>,
    /// `kvm`, `tcg`, ... as QEMU says.
    #[serde(default)]
    pub accelerator: Option<String>,
    #[serde(default)]
    pub uffds: u32,
    /// Every metric of the catalogue by name, for VMs.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// By fault cause: the names of the counters, such as `faults_minor`.
    #[serde(default)]
    pub latency: BTreeMap<String, Latency>,
    /// Where its pages are that are not in DRAM: its tiers, in the order in which they are asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<TierInfo>,
    /// Of a VM whose tier before swap is remote memory.
    #[serde(default, rename = "far", alias = "remote", skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteInfo>,
    /// What it waits for, in words: a silent server, or what makes the daemon refuse it. It goes on by itself when that is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Of a VM that has or had a balloon target.
    #[serde(default)]
    pub balloon: Option<BalloonInfo>,
    /// How the memory policy sees it.
    #[serde(default)]
    pub policy: VmPolicy,
    /// What is set for it.
    #[serde(default)]
    pub spec: VmSpec,
    /// Of a VM with a timetable of snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autosnapshot: Option<AutosnapshotInfo>,
    /// It is made of a snapshot, and its QEMU does not have its state yet or was not let run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub loading: bool,
    /// When its guest ran for the first time since it was made of a snapshot: QEMU's own time, in microseconds since 1970. Only
    /// the daemon that let it run knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_unix_us: Option<u64>,
    /// Of a VM with an outbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbox: Option<OutboxInfo>,
    /// Its move that is under way, from this host or to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moving: Option<Box<MoveStatus>>,
}

impl VmInfo {
    /// What is set for the VM, also by a daemon that does not say all of it.
    #[must_use]
    pub fn settings(&self) -> VmSpec {
        let policy = PolicySettings { min: self.policy.min_bytes, ..self.spec.policy.clone() };
        VmSpec { dram: Some(self.dram_limit_bytes), policy, ..self.spec.clone() }
    }
}

/// The names among [`VmInfo::counters`] that clients compute with; the daemon's catalogue has them all.
pub mod counter {
    /// Every fault is counted under exactly one name that starts so.
    pub const FAULTS_PREFIX: &str = "faults_";
    /// Pages read from swap.
    pub const PAGES_IN: &str = "pages_in";
    /// Pages written to swap.
    pub const PAGES_OUT: &str = "pages_out";
    /// Bytes of a page in the counters of pages.
    pub const PAGE_BYTES: u64 = pagoda_abi::PAGE_SIZE as u64;
}

/// `GET /v1/vms` lists all VMs of the daemon.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmList {
    pub vms: Vec<VmInfo>,
    /// VMs that have crashed and were not started again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub crashed: Vec<CrashedVm>,
}

/// One row of an explanation: `value` is what `term` is now, `reason` says why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainLine {
    pub term: String,
    pub value: String,
    pub reason: String,
}

/// `GET /v1/vms/NAME/explain` says why a VM has the memory that it has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explain {
    pub lines: Vec<ExplainLine>,
}

/// `GET /v1/version` says which version the daemon has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The daemon's package version.
    pub version: String,
    /// [`API_VERSION`] of the daemon.
    pub api: u32,
}

/// `GET /v1/health` says whether the daemon and its host are well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub ok: bool,
    /// What is wrong and what to do, one sentence each; empty when `ok`.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// `GET /v1/host` describes the host, the daemon and the memory policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostInfo {
    pub version: String,
    pub hostname: String,
    /// The kernel has this release, as `uname -r` prints it.
    pub kernel: String,
    pub memory_total_bytes: u64,
    pub memory_available_bytes: u64,
    pub state_dir: PathBuf,
    pub swap_dir: PathBuf,
    pub swap_free_bytes: u64,
    /// The way this daemon may use userfaultfd.
    pub uffd_permission: String,
    /// The folios RAM is made of, in words.
    pub large_folios: String,
    pub vms: u32,
    /// Its VMs move to other hosts, and it takes no new ones.
    #[serde(default)]
    pub draining: bool,
    #[serde(default)]
    pub policy: HostPolicy,
    /// As they were counted last; nothing before that, and while they cannot be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<HostSnapshots>,
}

/// Body of every reply with a status of 400 and above.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    pub code: ErrorCode,
    pub message: String,
    /// What the user can do about it.
    #[serde(default)]
    pub hint: Option<String>,
}

impl ApiError {
    /// With a hint of what the user can do about it, if that is anything.
    pub fn new(code: ErrorCode, message: impl Into<String>, hint: Option<&str>) -> ApiError {
        ApiError { code, message: message.into(), hint: hint.map(str::to_owned) }
    }
}

/// What went wrong, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400: the request makes no sense.
    BadRequest,
    /// 404: no VM of that name.
    NoSuchVm,
    /// 404: the VM has no outbox.
    NoSuchOutbox,
    /// 404: no snapshot of that name.
    NoSuchSnapshot,
    /// 404: no host of that name is trusted.
    NoSuchHost,
    /// 404: no such route.
    NoSuchRoute,
    /// 409: a VM of that name exists.
    NameTaken,
    /// 409: the VM is not in a state for this.
    WrongState,
    /// 409: a snapshot or a restore is not possible, and nothing was changed.
    Refused,
    /// 409: a snapshot or a restore was begun and given up. The VM runs where it was.
    GivenUp,
    /// 507: the swap directory, the directory of snapshots or the host's memory has no room.
    NoRoom,
    /// 502: another host does not answer, or refuses.
    Unreachable,
    /// 503: the host lacks a permission or a feature.
    Unsupported,
    /// 500: the daemon failed.
    Internal,
    /// A code of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// The HTTP status that goes with it.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::NoSuchVm | Self::NoSuchOutbox | Self::NoSuchSnapshot | Self::NoSuchHost | Self::NoSuchRoute => 404,
            Self::NameTaken | Self::WrongState | Self::Refused | Self::GivenUp => 409,
            Self::NoRoom => 507,
            Self::Unreachable => 502,
            Self::Unsupported => 503,
            Self::Internal | Self::Unknown => 500,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn request(memory: &[u64], dram: Option<u64>) -> CreateVm {
        CreateVm {
            name: "web1".into(),
            memory: memory.to_vec(),
            kind: VmKind::Qemu,
            spec: VmSpec { dram, ..VmSpec::default() },
            launch: None,
            outbox: None,
        }
    }

    #[test]
    fn names() {
        let check = |name: &str, good: bool| assert_eq!(check_vm_name(name).is_ok(), good, "{name}");
        check("web1", true);
        check("Web_1.example-2", true);
        check("1", true);
        check("", false);
        check(".", false);
        check("..", false);
        check("-x", false);
        check("a/b", false);
        check("web 1", true);
        check(" web1", false);
        check("web1 ", false);
        check("web1\u{a0}", false);
        check("Büro-Server (alt)", true);
        check("веб", true);
        check("web\n1", false);
        check("web\u{202e}1", false);
        check("web\u{200b}1", false);
        check("web%201", false);
        check("web\"1", false);
        check("web,1", false);
        check(&"a".repeat(VM_FILE_NAME_LEN_MAX), true);
        check(&"a".repeat(VM_FILE_NAME_LEN_MAX + 1), false);
        check(&"ä".repeat(VM_FILE_NAME_LEN_MAX / 6), true);
        check(&"ä".repeat(VM_FILE_NAME_LEN_MAX / 6 + 1), false);
    }

    #[test]
    fn file_names() {
        assert_eq!(vm_file_name("Web_1.example-2"), "Web_1.example-2");
        assert_eq!(vm_file_name("Büro 1"), "B%C3%BCro%201");
    }

    #[test]
    fn create_is_checked() {
        let check = |memory: &[u64], dram: Option<u64>, expected: &str| match request(memory, dram).check() {
            Ok(()) => assert_eq!(expected, "", "{memory:?} {dram:?}"),
            Err(said) => {
                assert!(!expected.is_empty() && said.contains(expected), "{said}");
            }
        };
        check(&[4096 * MIB], Some(1024 * MIB), "");
        check(&[4096 * MIB], None, "");
        check(&[2 * MIB, 4 * MIB], None, "");
        check(&[], None, "at least one");
        check(&[0], None, "multiple of 2 MiB");
        check(&[MIB], None, "multiple of 2 MiB");
        check(&[2 * MIB; REGIONS_MAX + 1], None, "memory regions");
        check(&[1 << 63], None, "than a file can be");
        check(&[1 << 63, 1 << 63], None, "than a file can be");
        check(&[512 * MIB], Some(513 * MIB), "more than the VM's memory");
        check(&[512 * MIB], Some(63 * MIB), "the least is 64 MiB");
        check(&[512 * MIB], Some(64 * MIB), "");
        check(&[65536 * MIB], Some(512 * MIB), "the least is 1024 MiB");
        check(&[32 * MIB], Some(32 * MIB), "");
        let with = CreateVm { outbox: Some(MIB), ..request(&[32 * MIB], None) };
        assert_eq!(with.check(), Ok(()));
        assert!(CreateVm { outbox: Some(MIB - 1), ..with.clone() }.check().unwrap_err().contains("at least 1M"));
        assert!(CreateVm { kind: VmKind::Plain, ..with }.check().unwrap_err().contains("only QEMU"));
    }

    #[test]
    fn names_on_the_wire() {
        let state = VmState::Stalled { reason: "swap disk full".into(), since_s: 7 };
        let json = serde_json::to_string(&state).unwrap();
        assert_eq!(json, r#"{"kind":"stalled","reason":"swap disk full","since_s":7}"#);
        assert_eq!(serde_json::from_str::<VmState>(&json).unwrap(), state);

        let json = serde_json::to_string(&VmState::Running).unwrap();
        assert_eq!(json, r#"{"kind":"running"}"#);

        let least = r#"{"name":"a","memory":[2097152],"kind":"plain"}"#;
        let create: CreateVm = serde_json::from_str(least).unwrap();
        assert_eq!((create.kind, &create.spec), (VmKind::Plain, &VmSpec::default()));

        let remote = r#"{"name":"a","memory":[2097152],"kind":"plain","far":{"copies":2}}"#;
        let create: CreateVm = serde_json::from_str(remote).unwrap();
        assert_eq!(create.spec.remote, Some(RemoteRequest { copies: 2 }));
        let text = serde_json::to_string(&create).unwrap();
        assert!(text.contains(r#""far":{"copies":2}"#), "{text}");
        let remote: CreateVm = serde_json::from_str(&remote.replace("\"far\"", "\"remote\"")).unwrap();
        assert_eq!(remote, create, "the field's new name");
        let near = serde_json::to_string(&CreateVm { spec: VmSpec::default(), ..create }).unwrap();
        assert!(!near.contains("far"), "{near}");

        let all = r#"{"name":"a","memory":[2097152],"dram":1,"kind":"qemu","reserve_swap":true,"far":{},"pinned":"p",
            "share_group":"g","policy":{"min":2,"shares":3,"sampling":{"pages":4,"period_s":5},"newer":1},"newer":{}}"#;
        let create: CreateVm = serde_json::from_str(all).unwrap();
        let sampling = Some(Sampling { pages: 4, period_s: 5 });
        let expected = VmSpec {
            dram: Some(1),
            policy: PolicySettings { min: 2, shares: Some(3), sampling },
            share_group: Some("g".into()),
            reserve_swap: true,
            remote: Some(RemoteRequest { copies: 1 }),
            pinned: Some("p".into()),
            ..VmSpec::default()
        };
        assert_eq!(create.spec, expected, "and what a newer command line sends is ignored");
        assert!(serde_json::from_str::<CreateVm>(&all.replace("\"dram\":1", "\"dram\":-1")).is_err());

        let newer = r#"{"code":"moon_phase","message":"m"}"#;
        let error: ApiError = serde_json::from_str(newer).unwrap();
        assert_eq!((error.code, error.hint), (ErrorCode::Unknown, None));

        assert!(serde_json::from_str::<VmPatch>(r#"{"drma":1}"#).is_err());
        let patch = VmPatch { balloon_target: Some(1), ..VmPatch::default() };
        assert_eq!(serde_json::to_string(&patch).unwrap(), r#"{"balloon_target":1}"#);
    }

    #[test]
    fn the_token_stays_out_of_logs() {
        let created = CreatedVm {
            name: "web1".into(),
            token: "c0ffee".into(),
            attach_socket: "/run/a".into(),
            shim: "/usr/lib/s.so".into(),
            outbox_token: Some("c0ffee".into()),
        };
        assert!(!format!("{created:?}").contains("c0ffee"));
    }
}
