use std::path::PathBuf;

use rmap::units::Generation;
use thiserror::Error;

/// Why the control plane could not do something. Nothing was changed unless it is said.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EtcdError {
    #[error("{text}: give etcd://HOST:PORT[,HOST:PORT...]/POOL, or etcds:// for TLS; {what}")]
    Address { text: String, what: &'static str },
    #[error("{path}: {what}")]
    Tls { path: PathBuf, what: String },
    /// A request of which nobody knows whether it was carried out.
    #[error("etcd at {endpoint} does not answer: {what}")]
    Unreachable { endpoint: String, what: String },
    /// etcd says that it cannot now. A change may have happened or not.
    #[error("etcd at {endpoint} cannot do it now: {message}")]
    Unavailable { endpoint: String, message: String },
    #[error("etcd at {endpoint} refuses: {message}")]
    Refused { endpoint: String, message: String },
    #[error("{endpoint} does not answer as etcd 3.4 or newer with its gateway does: {what}")]
    Nonsense { endpoint: String, what: String },
    #[error(
        "{endpoint} belongs to another cluster ({theirs:x}) than the one asked before ({ours:x}): check the endpoints"
    )]
    OtherCluster { endpoint: String, ours: u64, theirs: u64 },
    #[error(
        "etcd has gone back from revision {seen} to {now}: it was restored from a copy, and its maps may be older than \
         what servers have: leave what runs running, copy its disks elsewhere, and make them anew \
         (docs/pool-operations.md, etcd)"
    )]
    WentBack { seen: u64, now: u64 },
    #[error(
        "the value of {key} cannot be right: {what}; nothing that needs it is done until it is put right or removed"
    )]
    Garbage { key: String, what: String },
    #[error("{what}")]
    Invalid { what: String },
    #[error("there is no space {name} in this pool")]
    NoSuchSpace { name: String },
    #[error("a space {name} is there already: give another name")]
    NameTaken { name: String },
    #[error(
        "{host} took the space over at the same moment, as generation {generation}: try again if it is to be yours"
    )]
    Raced { host: String, generation: u32 },
    #[error("generation {generation} is not the owner of the space any more")]
    NotOwner { generation: u32 },
    #[error("the space has had {max} owners: make a new one", max = Generation::MAX.0)]
    GenerationsUsedUp,
    #[error("server {id} is at {addr} with another key: give this one another number, or wait until that one is gone")]
    NodeTaken { id: u32, addr: String },
    #[error(
        "{key}: the registers of moves are others than before: etcd was emptied, or its keys were removed; moves that were under way \
         have no arbiter any more"
    )]
    OtherRegisters { key: String },
    #[error("the lease {lease:x} is over")]
    LeaseLost { lease: u64 },
}

impl EtcdError {
    /// Whether the same request may succeed by itself a little later.
    pub fn is_transient(&self) -> bool {
        matches!(self, EtcdError::Unreachable { .. } | EtcdError::Unavailable { .. })
    }
}
