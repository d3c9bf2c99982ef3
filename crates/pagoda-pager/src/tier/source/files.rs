//! The files of a VM that has pages from its source.
//!
//! | file | holds |
//! |---|---|
//! | `NAME.arrival` | the content of pages that have come, each at its own offset; every other page is a hole |
//! | `NAME.arrival-here` | 16 bytes `pagoda-vm-here-1`, then 32 bytes a chunk: a bit for each page whose content has come |
//! | `NAME.arrival-held` | 16 bytes `pagoda-vm-held-1`, then 32 bytes a chunk: a bit for each page that the tier has |
//!
//! They are written through to the kernel, so they survive the daemon; the host's end is the VM's too. The last of them is made
//! last and removed first: while it is there, the others are.

use std::io;
use std::path::{Path, PathBuf};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_SIZE, ChunkCount};
use pagoda_sys::swapfile::{Reserve, SwapError, SwapFile};

use crate::tier::page_map::PageMap;

const MAGIC_HERE: &[u8; 16] = b"pagoda-vm-here-1";
const MAGIC_HELD: &[u8; 16] = b"pagoda-vm-held-1";

/// The paths of the three files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrivalFiles {
    pub content: PathBuf,
    pub here: PathBuf,
    pub held: PathBuf,
}

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ArrivalsError {
    /// The file of content cannot be used.
    #[error(transparent)]
    Content(#[from] SwapError),
    /// One of the two maps cannot be made or read.
    #[error("{}: {source}", path.display())]
    Map { path: PathBuf, source: io::Error },
    /// What an earlier daemon has left of pages that had not come.
    #[error("{}: make holes of pages that have not come: {source}", path.display())]
    Leftovers { path: PathBuf, source: pagoda_sys::Errno },
    /// The kernel gives no eventfd.
    #[error("make an eventfd: {0}")]
    Wake(io::Error),
}

/// The three files of a VM, open for reading and writing.
#[derive(Debug)]
pub struct Opened {
    pub content: SwapFile,
    pub here: PageMap,
    pub held: PageMap,
}

impl ArrivalFiles {
    /// Those of the VM that has this swap file, in the same directory.
    pub fn beside(swap: &Path) -> ArrivalFiles {
        let with = |extension| swap.with_extension(extension);
        ArrivalFiles { content: with("arrival"), here: with("arrival-here"), held: with("arrival-held") }
    }

    /// An earlier daemon has left them, so the VM may have pages there.
    pub fn exist(&self) -> bool {
        // What cannot be looked at may be there.
        self.held.try_exists().unwrap_or(true)
    }

    /// All of them, in the order in which they are removed.
    pub fn paths(&self) -> [&Path; 3] {
        [&self.held, &self.here, &self.content]
    }

    /// Removes them.
    ///
    /// # Errors
    /// The first that could not be removed. What is not there is no error.
    pub fn remove(&self) -> io::Result<()> {
        self.paths().into_iter().try_for_each(|path| match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
    }

    /// Makes them, for a VM of so many chunks. Nothing of what was there is left.
    pub(super) fn create(&self, chunks: ChunkCount) -> Result<Opened, ArrivalsError> {
        self.remove().map_err(|source| ArrivalsError::Map { path: self.held.clone(), source })?;
        let none = vec![PageSet::EMPTY; chunks.as_usize()];
        let content = SwapFile::create(&self.content, u64::from(chunks.0) * CHUNK_SIZE, Reserve::No)?;
        let here = PageMap::create(&self.here, MAGIC_HERE, none.clone()).map_err(of_map(&self.here))?;
        let held = PageMap::create(&self.held, MAGIC_HELD, none).map_err(of_map(&self.held))?;
        Ok(Opened { content, here, held })
    }

    /// Opens what an earlier daemon has left.
    pub(super) fn open(&self, chunks: ChunkCount) -> Result<Opened, ArrivalsError> {
        let held = PageMap::open(&self.held, MAGIC_HELD, chunks).map_err(of_map(&self.held))?;
        let here = PageMap::open(&self.here, MAGIC_HERE, chunks).map_err(of_map(&self.here))?;
        let content = SwapFile::open(&self.content, u64::from(chunks.0) * CHUNK_SIZE, Reserve::No)?;
        Ok(Opened { content, here, held })
    }
}

fn of_map(path: &Path) -> impl FnOnce(io::Error) -> ArrivalsError {
    move |source| ArrivalsError::Map { path: path.to_owned(), source }
}
