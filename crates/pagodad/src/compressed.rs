//! Compressed memory as the first tier of VMs: the section `[compressed]` of the configuration file, without which new VMs have
//! none, what a VM's record remembers of it, and its files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_api::types::vm_file_name;
use pagoda_core::units::{Bytes, ChunkCount};
use pagoda_pager::tier::Tier;
use pagoda_pager::tier::compressed::CompressedTier;
use serde::{Deserialize, Serialize};

use crate::config::size;

/// Less is not worth a tier: a few hundred pages.
const ROOM_MIN: Bytes = Bytes(1 << 20);

/// The compressed tier of a VM, as its record has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compressed {
    /// Bytes of memory that it may take.
    pub room: u64,
    /// The directory that has its files.
    pub dir: String,
}

impl Compressed {
    /// The files of a VM's compressed pages.
    pub fn files(&self, vm: &str) -> [PathBuf; 2] {
        CompressedTier::files(Path::new(&self.dir), &vm_file_name(vm))
    }

    /// The tier of a VM of so many chunks.
    ///
    /// # Errors
    /// As [`CompressedTier::open`].
    pub fn open(&self, vm: &str, chunks: ChunkCount, taken_over: bool) -> Result<Box<dyn Tier>> {
        let files = self.files(vm);
        let tier = CompressedTier::open(&files, chunks, Bytes(self.room), taken_over);
        Ok(Box::new(tier.with_context(|| format!("open the compressed pages {}", files[0].display()))?))
    }
}

/// The keys of the section.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressedFile {
    dir: PathBuf,
    #[serde(deserialize_with = "size")]
    room: Bytes,
}

impl CompressedFile {
    /// What new VMs are given.
    ///
    /// # Errors
    /// The directory is not in memory, or there is hardly room.
    pub fn resolve(self) -> Result<Compressed> {
        let CompressedFile { dir, room } = self;
        let name = dir.display();
        ensure!(dir.is_absolute(), "[compressed] dir = {dir:?} has to be a full path");
        ensure!(room >= ROOM_MIN, "[compressed] room is less than {} MiB", ROOM_MIN.0 >> 20);
        let in_memory = pagoda_sys::host::is_in_memory(&dir)
            .with_context(|| format!("[compressed] dir {name}: make it with mkdir -m 700"))?;
        ensure!(in_memory, "[compressed] dir {name} is on a disk: it has to be on a tmpfs, such as /run or /dev/shm");
        let dir = dir.into_os_string().into_string().ok().filter(|dir| !dir.contains('\n'));
        Ok(Compressed { room: room.0, dir: dir.context("[compressed] dir is not a line of text")? })
    }
}
