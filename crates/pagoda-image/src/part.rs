//! The daemon's end of an image that does not exist yet, while its VM stands still.

use std::os::fd::AsFd;
use std::sync::Arc;

use pagoda_core::units::{Bytes, PageCount};
use xxhash_rust::xxh3::xxh3_64;

use crate::damage::{Damage, ImageError, ImageFile};
use crate::id::ImageId;
use crate::ledger::Ledger;
use crate::limits::STATE_BYTES_MAX;
use crate::manifest::{Manifest, State};

/// How the stream of QEMU's state begins.
pub(crate) const STATE_MAGIC: &[u8; 4] = b"QEVM";

/// A directory `ID.part`. The order: state -> manifest -> [`crate::Prepared::commit`], by the engine. Nothing of it is synced, so
/// that the VM waits for no disk.
#[derive(Debug)]
pub struct Part {
    ledger: Arc<Ledger>,
}

impl Part {
    pub(crate) fn new(ledger: Arc<Ledger>) -> Part {
        Part { ledger }
    }

    /// Pages of the VM.
    pub fn pages(&self) -> PageCount {
        self.ledger.chunks.pages()
    }

    /// The image that this one is to refer to.
    pub fn parent(&self) -> Option<ImageId> {
        self.ledger.parent
    }

    /// Writes QEMU's state, as it came; what the manifest has to say of it.
    ///
    /// # Errors
    /// It is none, or too long; the disk's.
    pub fn write_state(&self, bytes: &[u8]) -> Result<State, ImageError> {
        if !bytes.starts_with(STATE_MAGIC) {
            return Err(no_state(0).into());
        }
        if bytes.len() as u64 > STATE_BYTES_MAX.0 {
            let what = format!("it has {} bytes, and it may have {}", bytes.len(), STATE_BYTES_MAX.0);
            return Err(Damage::of_file(ImageFile::State, STATE_BYTES_MAX, what).into());
        }
        let failed = ImageError::io;
        let dir = self.ledger.dir.as_fd();
        let name = ImageFile::State.name();
        let file = self.ledger.disk.make_file(dir, name).map_err(failed(ImageFile::State, 0))?;
        self.ledger.disk.write_at(&file, bytes, 0).map_err(failed(ImageFile::State, 0))?;
        // Made anew just now, so nothing was there.
        let _ = self.ledger.state.set(file);
        Ok(State { bytes: bytes.len() as u64, xxh3: xxh3_64(bytes) })
    }

    /// Writes the manifest, of stage `begun`. The image exists after [`crate::Prepared::commit`].
    ///
    /// # Errors
    /// It is of another VM than this was made for, or could not be read back; the disk's.
    pub fn begin(self, manifest: Manifest) -> Result<Arc<Ledger>, ImageError> {
        let damaged = |what: String| Damage::of_file(ImageFile::Manifest, Bytes::ZERO, what);
        if manifest.pages() != self.pages() {
            return Err(damaged(format!("{} pages, and the map is of {}", manifest.pages(), self.pages())).into());
        }
        if manifest.parent != self.ledger.parent {
            return Err(damaged("another parent than its files are made for".to_owned()).into());
        }
        if self.ledger.state.get().is_none() {
            return Err(damaged("there is no state yet".to_owned()).into());
        }
        self.ledger.begin(manifest)?;
        Ok(self.ledger)
    }
}

pub(crate) fn no_state(offset: u64) -> Damage {
    Damage::of_file(ImageFile::State, Bytes(offset), "no state of QEMU: it does not begin with QEVM")
}
