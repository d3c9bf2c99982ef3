//! Reads all of an image and says what of it is damaged, and where.

use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkIdx, PAGE_SIZE};

use crate::damage::{Damage, ImageError};
use crate::image::{Content, Image};
use crate::limits::DAMAGES_MAX;

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pages whose content is as it was written.
    pub blocks: u64,
    /// Pages that are zero.
    pub zeros: u64,
    /// Pages that the VM still has.
    pub missing: u64,
    /// The first places of damage, in the order of the pages.
    pub damages: Vec<Damage>,
    /// All places of damage.
    pub damaged: u64,
}

impl Report {
    /// Whether no place of damage was found.
    pub fn is_clean(&self) -> bool {
        self.damaged == 0
    }

    /// Of an image that cannot even be opened.
    pub(crate) fn of(error: ImageError) -> Report {
        let mut report = Report::default();
        report.note(error);
        report
    }

    fn note(&mut self, error: ImageError) {
        self.damaged += 1;
        if self.damages.len() < DAMAGES_MAX {
            self.damages.push(error.into_damage());
        }
    }
}

/// Verifies all of an image, as long as `goes_on` says so, which is asked before each chunk.
pub(crate) fn verify(image: &Image, goes_on: &mut dyn FnMut(ChunkIdx) -> bool) -> Option<Report> {
    let mut report = Report::default();
    if let Err(error) = image.check_state() {
        report.note(error);
    }
    let mut content = vec![0; Bytes(CHUNK_SIZE).as_usize()];
    for chunk in image.chunks().iter() {
        if !goes_on(chunk) {
            return None;
        }
        match image.read_chunk(chunk, &mut content) {
            Ok(found) => {
                let (missing, zeros) = (u64::from(found.missing.count()), u64::from(found.zero.count()));
                report.missing += missing;
                report.zeros += zeros;
                report.blocks += pagoda_core::units::CHUNK_PAGES - missing - zeros;
            }
            Err(_) => verify_pages(image, chunk, &mut content[..PAGE_SIZE as usize], &mut report),
        }
    }
    Some(report)
}

/// Page by page, so that one that is damaged hides no other.
fn verify_pages(image: &Image, chunk: ChunkIdx, content: &mut [u8], report: &mut Report) {
    for index in 0..=u8::MAX {
        match image.read_page(chunk.page(index), content) {
            Ok(Content::Missing) => report.missing += 1,
            Ok(Content::Zero) => report.zeros += 1,
            Ok(Content::Block) => report.blocks += 1,
            Err(error) => report.note(error),
        }
    }
}
