//! Pages as QEMU's migration streams have them (`ram_save_page`, `save_zero_page`).
//!
//! | bytes | what |
//! |---|---|
//! | 8 | offset in the block, with flags in its low 12 bits |
//! | 1 + n | length and id of the block, unless the flag `CONTINUE` is set |
//! | 1 or 4096 | the byte 0 for a page that is zero; else the page |

use pagoda_core::bits::PageSet;
use pagoda_core::units::PAGE_SIZE;

pub(super) const ZERO: u64 = 0x02;
pub(super) const MEM_SIZE: u64 = 0x04;
pub(super) const PAGE: u64 = 0x08;
pub(super) const EOS: u64 = 0x10;
pub(super) const CONTINUE: u64 = 0x20;
pub(super) const SECTION_PART: u8 = 0x02;
pub(super) const SECTION_FOOTER: u8 = 0x7e;

/// A block of QEMU's that is one of the VM's regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) id: String,
    pub(super) len: u64,
}

/// How the part with the pages begins.
pub(super) fn part_begin(section: u32) -> Vec<u8> {
    [&[SECTION_PART][..], &section.to_be_bytes()].concat()
}

/// How the part with the pages ends: with the flag `EOS` and the section's footer.
pub(super) fn part_end(section: u32) -> Vec<u8> {
    [&EOS.to_be_bytes()[..], &[SECTION_FOOTER], &section.to_be_bytes()].concat()
}

/// A chunk that begins at `at` in its block. `content` has the pages that are not zero, in order.
pub(super) fn chunk(target: &Target, at: u64, pages: PageSet, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(content.len() + 256 * 9 + target.id.len() + 1);
    let mut content = content.chunks_exact(PAGE_SIZE as usize);
    for index in 0..=u8::MAX {
        let page = if pages.contains(index) { content.next() } else { None };
        let kind = if page.is_some() { PAGE } else { ZERO };
        let again = if index == 0 { 0 } else { CONTINUE };
        bytes.extend_from_slice(&((at + u64::from(index) * PAGE_SIZE) | kind | again).to_be_bytes());
        if again == 0 {
            bytes.push(target.id.len() as u8);
            bytes.extend_from_slice(target.id.as_bytes());
        }
        bytes.extend_from_slice(page.unwrap_or(&[0]));
    }
    bytes
}
