//! One `-object memory-backend-*` of guest RAM: what it asks for, and the same on a file of ours.

use super::error::ArgError;
use super::words::{Props, is_on};
use crate::units;

/// The kinds whose memory a RAM file of ours can replace.
const KINDS: [&str; 4] = ["memory-backend-ram", "memory-backend-memfd", "memory-backend-file", "memory-backend-shm"];

/// What names the RAM block in a saved or migrated state: `off`, the id; `on`, `/objects/` and the id.
const CANONICAL: &str = "x-use-canonical-path-for-ramblock-id";

/// Properties that mean the same on a file of ours.
const KEPT: [&str; 7] = ["qom-type", "id", "host-nodes", "policy", "dump", "merge", CANONICAL];

/// Properties that go: set by us, or without meaning once the memory is ours.
const DROPPED: [&str; 13] = [
    "size",
    "share",
    "mem-path",
    "align",
    "discard-data",
    "seal",
    "reserve",
    "prealloc-threads",
    "prealloc-context",
    "hugetlbsize",
    "prealloc",
    "hugetlb",
    "offset",
];

/// Properties that contradict being paged: name, why not.
const REFUSED: [(&str, &str); 5] = [
    ("prealloc", "it would touch all of the VM's memory at the start and push most of it to swap"),
    ("hugetlb", "pages of hugetlbfs cannot be evicted"),
    ("readonly", "guest RAM has to be writable"),
    ("rom", "guest RAM has to be writable"),
    ("pmem", "it makes promises of persistence that swap does not keep"),
];

/// A memory back end as the command line has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Backend {
    pub id: String,
    pub size_bytes: u64,
    /// The file it would have used.
    pub mem_path: Option<String>,
    props: Props,
}

impl Backend {
    /// The id of any `-object memory-backend-*`, which may or may not be guest RAM.
    pub fn id_of(props: &Props) -> Option<String> {
        let kind = props.get("qom-type")?;
        if kind.starts_with("memory-backend-") { props.get("id") } else { None }
    }

    /// Reads a back end that is guest RAM.
    pub fn parse(mut props: Props) -> Result<Self, ArgError> {
        let id = props.get("id").unwrap_or_default();
        let kind = props.get("qom-type").unwrap_or_default();
        let what = format!("-object {kind},id={id}");
        if !KINDS.contains(&kind.as_str()) {
            return Err(ArgError::new(format!("{what} cannot be guest RAM under Pagoda"), "use memory-backend-ram"));
        }
        for (key, why) in REFUSED {
            if props.get(key).is_some_and(|value| is_on(&value)) {
                return Err(ArgError::new(format!("{what} has {key}=on, but {why}"), format!("leave {key} out")));
            }
        }
        if props.get("offset").is_some_and(|value| units::parse_qemu_size(&value, 1) != Some(0)) {
            return Err(ArgError::new(
                format!("{what} starts at an offset of its file, but the file will be Pagoda's"),
                "leave offset out",
            ));
        }
        let known = |key: &str| {
            // Lists are written key.0=, key.1= in the first notation.
            let key = key.split('.').next().unwrap_or(key);
            KEPT.contains(&key) || DROPPED.contains(&key) || REFUSED.iter().any(|(k, _)| *k == key)
        };
        if let Some(key) = props.keys().into_iter().find(|key| !known(key)) {
            return Err(ArgError::new(
                format!("{what} has the property {key:?}, which Pagoda does not know"),
                "leave it out",
            ));
        }
        let size = props.get("size").unwrap_or_default();
        let size_bytes = units::parse_qemu_size(&size, 1).filter(|bytes| *bytes > 0);
        let Some(size_bytes) = size_bytes else {
            return Err(ArgError::new(
                format!("{what} has the size {size:?}"),
                "give size= a number and a unit, such as size=4G",
            ));
        };
        let mem_path = props.get("mem-path");
        // Machine types up to 4.0 have another name for the block of a file than for that of other kinds.
        let has_id_as_name = ["memory-backend-ram", "memory-backend-shm"].contains(&kind.as_str());
        if has_id_as_name && props.get(CANONICAL).is_none() {
            props.set_bool(CANONICAL, false);
        }
        props.retain(|key| KEPT.contains(&key.split('.').next().unwrap_or(key)));
        Ok(Self { id, size_bytes, mem_path, props })
    }

    /// Guest RAM that no `-object` asks for. As in QEMU's own, its block is called by the id.
    pub fn new(id: &str, size_bytes: u64) -> Self {
        let kind = ("qom-type".into(), "memory-backend-file".into());
        let props = Props::Keyval(vec![kind, ("id".into(), id.into()), (CANONICAL.into(), "off".into())]);
        Self { id: id.into(), size_bytes, mem_path: None, props }
    }

    /// The value of `-object` for the RAM file at `path`. Aligned to 2 MiB, because
    /// QEMU's own choice of 4 KiB would never get a huge mapping. QEMU is told that it is shared, whatever it was, so that it
    /// can save its state without RAM for a snapshot. That nobody else has it leave RAM out, the shim sees to (its `gate`).
    pub fn render(&self, path: &str) -> String {
        let mut props = self.props.clone();
        props.set_text("qom-type", "memory-backend-file");
        props.set_bytes("size", self.size_bytes);
        props.set_text("mem-path", path);
        props.set_bool("share", true);
        props.set_bytes("align", pagoda_api::MEMORY_GRANULE_BYTES);
        props.render()
    }
}
