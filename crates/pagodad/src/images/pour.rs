//! Pours an image into the swap file of a VM that is being made.
//!
//! After that each page that is not zero is an ordinary page in swap, at its own offset, and the VM does not need the image any
//! more. The VM's RAM is empty, so it may have as little DRAM as it likes.

use anyhow::{Context, Result, ensure};
use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_SIZE, PAGE_SIZE, PageCount};
use pagoda_image::Image;
use pagoda_sys::swapfile::{DirectBuffer, SwapFile};

/// Writes all pages of the image that are not zero; their number. Every page is compared with its checksum on the way.
///
/// # Errors
/// The image lacks a page or is damaged, with the place of it; the disk's. The swap file is not to be used then.
pub fn pour(image: &Image, swap: &SwapFile) -> Result<PageCount> {
    let pages = image.manifest().pages();
    ensure!(pages.bytes().0 == swap.len(), "the image has {pages} pages, and the VM {} bytes", swap.len());
    let mut content = DirectBuffer::new(CHUNK_SIZE as usize);
    let mut poured = 0;
    for chunk in image.chunks().iter() {
        let found = image.read_chunk(chunk, &mut content)?;
        ensure!(
            found.missing.is_empty(),
            "the image is not filled: it lacks {} pages of {chunk:?}",
            found.missing.count()
        );
        for run in (PageSet::FULL - found.zero).runs() {
            let start = usize::from(run.start) * PAGE_SIZE as usize;
            let bytes = &content[start..start + usize::from(run.len) * PAGE_SIZE as usize];
            let first = chunk.page(run.start);
            swap.write_pages(first.0, bytes)
                .with_context(|| format!("write page {first} to {}", swap.path().display()))?;
            poured += u64::from(run.len);
        }
    }
    Ok(PageCount(poured))
}

#[cfg(test)]
mod tests;
