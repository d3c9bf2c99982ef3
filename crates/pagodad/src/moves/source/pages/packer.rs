//! Compression of runs of pages, where it pays.

use lz4_flex::block::{compress_into, get_maximum_output_size};
use pagoda_move::units::Rate;

use super::packing::{Packing, Sent};

/// Bytes by which it is seen that a run does not compress: pages of a run are alike, and these are a sixteenth of most runs.
const SAMPLE: usize = 16 << 10;

/// See the module.
#[derive(Debug)]
pub struct Packer {
    /// None as long as the other host has not said that it unpacks.
    packing: Option<Packing>,
    block: Vec<u8>,
}

impl Packer {
    /// Compresses nothing.
    pub const fn off() -> Packer {
        Packer { packing: None, block: Vec::new() }
    }

    /// Compresses from now on. `cap`: what the stream may send, if that is limited.
    pub fn begin(&mut self, cap: Option<Rate>) {
        self.packing = Some(Packing::new(cap));
    }

    /// The content as one block, if it is to be sent so: it is shorter then.
    pub fn pack(&mut self, content: &[u8]) -> Option<&[u8]> {
        if !self.packing.as_ref()?.compresses() {
            return None;
        }
        let most = get_maximum_output_size(content.len());
        if self.block.len() < most {
            self.block.resize(most, 0);
        }
        if content.len() >= 4 * SAMPLE {
            let at = (content.len() - SAMPLE) / 2;
            compress(&content[at..at + SAMPLE], &mut self.block)?;
        }
        let len = compress(content, &mut self.block)?;
        Some(&self.block[..len])
    }

    /// What became of that content.
    pub fn note(&mut self, sent: Sent) {
        if let Some(packing) = &mut self.packing {
            packing.note(sent);
        }
    }

    /// Nothing comes for a while.
    pub fn note_gap(&mut self) {
        if let Some(packing) = &mut self.packing {
            packing.note_gap();
        }
    }
}

/// How long the block is. None if it is hardly shorter than the content, which is not worth the other host's time.
fn compress(content: &[u8], block: &mut [u8]) -> Option<usize> {
    let len = compress_into(content, block).ok()?;
    (len < content.len() - content.len() / 16).then_some(len)
}
