//! Clones: VMs of their own that begin with what a snapshot has.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::name::check_vm_name;
use super::snapshot::SnapshotName;
use super::{CreatedVm, LAUNCH_BYTES_MAX};

/// Clones of one request. Each has a process, a thread and some twenty descriptors.
pub const CLONES_MAX: usize = 128;

/// Longest body of a [`CloneRequest`]: the longest words for each, and what JSON escapes in them.
pub const CLONE_BODY_BYTES_MAX: usize = CLONES_MAX * 2 * LAUNCH_BYTES_MAX;

/// `POST /v1/clones`: makes a VM for each name, or none; the reply is [`CreatedClones`]. Their QEMUs are started by who asked, with
/// the words of each, `-S` and `-incoming defer`; the daemon loads the state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloneRequest {
    pub from: SnapshotName,
    pub clones: Vec<NewClone>,
    /// The most DRAM that each may have; without one, what the snapshot's VM might.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram: Option<u64>,
}

/// One of them. Its words may hold secrets, so `Debug` shows their number.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewClone {
    pub name: String,
    /// The arguments of its QEMU in the place of the snapshot's: what starts the clone again.
    pub words: Vec<String>,
}

impl fmt::Debug for NewClone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewClone").field("name", &self.name).field("words", &self.words.len()).finish()
    }
}

impl CloneRequest {
    /// # Errors
    /// A name cannot be one or is there twice; there are none, or too many.
    pub fn check(&self) -> Result<(), String> {
        self.from.check()?;
        check_clone_names(self.clones.iter().map(|clone| clone.name.as_str()))
    }
}

/// Checks the names of clones that are to be made together.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_clone_names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> Result<(), String> {
    if names.len() == 0 || names.len() > CLONES_MAX {
        return Err(format!("1 to {CLONES_MAX} clones are made at a time, and not {}", names.len()));
    }
    let mut seen = BTreeSet::new();
    for name in names {
        check_vm_name(name)?;
        if !seen.insert(name) {
            return Err(format!("two clones would have the name {name}"));
        }
    }
    Ok(())
}

/// Reply to [`CloneRequest`]: in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedClones {
    pub vms: Vec<CreatedVm>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_together() {
        let check = |names: &[&str], expected: &str| {
            let clones = names.iter().map(|name| NewClone { name: (*name).to_owned(), words: Vec::new() }).collect();
            let request = CloneRequest { from: SnapshotName::new("web1", "one"), clones, dram: None };
            let said = request.check().err().unwrap_or_default();
            assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{said}");
        };
        check(&["job-1", "job-2"], "");
        check(&["job-1", "job-2", "job-1"], "two clones would have the name job-1");
        check(&[], "1 to 128 clones");
        check(&["a/b"], "a/b");
        let many: Vec<String> = (0..=CLONES_MAX).map(|number| format!("job-{number}")).collect();
        check(&many.iter().map(String::as_str).collect::<Vec<_>>(), "and not 129");
    }

    #[test]
    fn words_stay_out_of_logs() {
        let clone = NewClone { name: "job-1".into(), words: vec!["secret".into()] };
        assert_eq!(format!("{clone:?}"), "NewClone { name: \"job-1\", words: 1 }");
    }
}
