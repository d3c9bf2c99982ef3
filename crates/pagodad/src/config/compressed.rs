//! The section `[compressed]` of the configuration file: compressed memory as the first tier of new VMs. Without it they have none.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagoda_abi::record::Compressed;
use pagoda_core::units::Bytes;
use serde::Deserialize;

use super::policy::size;

/// Less is not worth a tier: a few hundred pages.
const ROOM_MIN: Bytes = Bytes(1 << 20);

/// Its keys.
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
    pub(super) fn resolve(self) -> Result<Compressed> {
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
