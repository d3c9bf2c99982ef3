//! Who reads an image, and whether it may be removed: the one owner of both.
//!
//! A VM that is made of an image reads its pages from the image's files for as long as it lives. Whoever makes such a VM has a
//! [`Reading`] from before the image is opened, and the VM has it until its record and its files are gone. An image that is read
//! is not removed, and one that is being removed is not read: each begins under the same lock, and finds what began before.
//!
//! A daemon knows the readers of before by their records. While one of these cannot be read, nobody knows which image its VM
//! reads, and none is removed that a VM could read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagoda_image::ImageId;

/// The readers of every image, and the images that are being removed.
#[derive(Debug, Default)]
pub struct Readers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The names of the VMs that read each image. A name is there twice while a VM is put back to the image that it reads.
    readings: BTreeMap<ImageId, BTreeMap<u64, Reader>>,
    removals: BTreeSet<ImageId>,
    /// Records of VMs that could not be read.
    unknown: Vec<String>,
    /// The number that the next reading gets.
    next: u64,
}

/// Who reads an image.
#[derive(Debug)]
enum Reader {
    Vm(String),
    /// A client that gets it as a file.
    Export,
}

/// Somebody reads an image, or is about to. Dropped, it does no more.
#[derive(Debug)]
#[must_use = "the image may be removed when this is dropped"]
pub struct Reading {
    readers: Arc<Readers>,
    image: ImageId,
    number: u64,
}

/// An image is being removed, and nobody begins to read it. Dropped, it is removed, or is what it was.
#[derive(Debug)]
#[must_use = "the image may be read when this is dropped"]
pub struct Removal {
    readers: Arc<Readers>,
    image: ImageId,
}

/// Why an image is not removed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InUse {
    #[error("{}", read_by(.0))]
    Read(Vec<String>),
    #[error("it is being exported")]
    Exported,
    #[error("nobody knows who reads it: the record {} of a VM cannot be read", .0.join(", "))]
    Unknown(Vec<String>),
    #[error("it is being removed")]
    Removed,
}

fn read_by(vms: &[String]) -> String {
    let read = if vms.len() == 1 { "reads its" } else { "read their" };
    format!("{} {read} memory from it", vms.join(", "))
}

impl Readers {
    /// A VM of this name is going to read the image. `None`: it is being removed.
    pub fn begin(self: &Arc<Self>, image: ImageId, vm: &str) -> Option<Reading> {
        self.begin_as(image, Reader::Vm(vm.to_owned()))
    }

    /// A client is going to get the image as a file. `None`: it is being removed.
    pub fn begin_export(self: &Arc<Self>, image: ImageId) -> Option<Reading> {
        self.begin_as(image, Reader::Export)
    }

    fn begin_as(self: &Arc<Self>, image: ImageId, reader: Reader) -> Option<Reading> {
        let mut state = self.lock();
        if state.removals.contains(&image) {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.readings.entry(image).or_default().insert(number, reader);
        Some(Reading { readers: Arc::clone(self), image, number })
    }

    /// Nobody knows which images the VMs of these records read.
    pub fn set_unknown(&self, records: Vec<String>) {
        self.lock().unknown = records;
    }

    /// The VMs that read the image, by name.
    pub fn of(&self, image: ImageId) -> Vec<String> {
        self.lock().names(image)
    }

    /// The image is going to be removed. `may_be_read`: its files are such that a VM can have been made of it.
    ///
    /// # Errors
    /// Who reads it.
    pub fn begin_removal(self: &Arc<Self>, image: ImageId, may_be_read: bool) -> Result<Removal, InUse> {
        let mut state = self.lock();
        let vms = state.names(image);
        if !vms.is_empty() {
            return Err(InUse::Read(vms));
        }
        if state.readings.contains_key(&image) {
            return Err(InUse::Exported);
        }
        if may_be_read && !state.unknown.is_empty() {
            return Err(InUse::Unknown(state.unknown.clone()));
        }
        if !state.removals.insert(image) {
            return Err(InUse::Removed);
        }
        Ok(Removal { readers: Arc::clone(self), image })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn names(&self, image: ImageId) -> Vec<String> {
        let readers = self.readings.get(&image).into_iter().flat_map(BTreeMap::values);
        let names: BTreeSet<&String> = readers
            .filter_map(|reader| match reader {
                Reader::Vm(name) => Some(name),
                Reader::Export => None,
            })
            .collect();
        names.into_iter().cloned().collect()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut state = self.readers.lock();
        if let Some(readings) = state.readings.get_mut(&self.image) {
            readings.remove(&self.number);
            if readings.is_empty() {
                state.readings.remove(&self.image);
            }
        }
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.readers.lock().removals.remove(&self.image);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ImageId = ImageId(1);
    const B: ImageId = ImageId(2);

    #[test]
    fn what_is_read_is_not_removed_and_what_is_removed_is_not_read() {
        let readers = Arc::new(Readers::default());
        let [web1, again, web2] = ["web1", "web1", "web2"].map(|vm| readers.begin(A, vm).unwrap());
        assert_eq!(readers.of(A), ["web1", "web2"]);
        let why = readers.begin_removal(A, true).unwrap_err();
        assert_eq!(why.to_string(), "web1, web2 read their memory from it");
        drop(readers.begin_removal(B, true).unwrap());
        drop((web1, web2));
        let why = readers.begin_removal(A, false).unwrap_err();
        assert_eq!(why.to_string(), "web1 reads its memory from it", "the other of its two readings is there");
        drop(again);
        assert!(readers.of(A).is_empty());
        let removal = readers.begin_removal(A, true).unwrap();
        assert!(readers.begin(A, "web3").is_none() && readers.begin(B, "web3").is_some());
        assert_eq!(readers.begin_removal(A, true).unwrap_err(), InUse::Removed);
        drop(removal);
        assert!(readers.begin(A, "web3").is_some(), "it failed, and the image is what it was");
    }

    #[test]
    fn what_is_exported_is_not_removed() {
        let readers = Arc::new(Readers::default());
        let export = readers.begin_export(A).unwrap();
        assert!(readers.of(A).is_empty(), "it is no VM");
        assert_eq!(readers.begin_removal(A, true).unwrap_err(), InUse::Exported);
        drop(export);
        let removal = readers.begin_removal(A, true).unwrap();
        assert!(readers.begin_export(A).is_none());
        drop(removal);
    }

    #[test]
    fn nothing_that_a_vm_could_read_is_removed_while_a_record_is_unknown() {
        let readers = Arc::new(Readers::default());
        readers.set_unknown(vec!["/v/web1.vm".into()]);
        let why = readers.begin_removal(A, true).unwrap_err();
        assert_eq!(why.to_string(), "nobody knows who reads it: the record /v/web1.vm of a VM cannot be read");
        drop(readers.begin_removal(A, false).unwrap());
        assert!(readers.begin(A, "web2").is_some());
    }

    /// Whoever comes first wins, whatever the threads do.
    #[test]
    fn of_a_reader_and_a_removal_one_is_refused() {
        let readers = Arc::new(Readers::default());
        for _ in 0..200 {
            let theirs = Arc::clone(&readers);
            let reader = std::thread::spawn(move || theirs.begin(A, "web1"));
            let removal = readers.begin_removal(A, true).ok();
            let reading = reader.join().unwrap();
            assert!(removal.is_none() || reading.is_none());
            assert!(removal.is_some() || reading.is_some());
        }
    }
}
