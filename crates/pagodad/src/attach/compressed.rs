//! Where a VM's compressed pages are.

use std::path::{Path, PathBuf};

use pagoda_abi::record::{Compressed, Record};
use pagoda_api::types::vm_file_name;
use pagoda_pager::tier::compressed::CompressedTier;

/// The files of a VM's compressed pages.
pub fn compressed_files(record: &Record) -> Option<[PathBuf; 2]> {
    let Compressed { dir, .. } = record.compressed.as_ref()?;
    Some(CompressedTier::files(Path::new(dir), &vm_file_name(&record.name)))
}
