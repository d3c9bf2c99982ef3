//! Compression of runs of pages, where it pays.

use pagoda_move::units::Rate;
use pagoda_move::wire::Codec;
use zstd::bulk::Compressor;
use zstd::zstd_safe::compress_bound;

use super::packing::{Packing, Sent};

/// Bytes by which it is seen that a run does not compress: pages of a run are alike, and these are a sixteenth of most runs.
const SAMPLE: usize = 16 << 10;
/// The fastest of the usual levels, as in QEMU's multifd.
const ZSTD_LEVEL: i32 = 1;

/// Compresses what one stream sends, if that pays.
pub struct Packer {
    /// None as long as the other host has not said that it unpacks.
    packing: Option<Packing>,
    zstd: Option<Compressor<'static>>,
    block: Vec<u8>,
}

impl Packer {
    /// A packer that compresses nothing before [`Packer::begin`].
    pub const fn off() -> Packer {
        Packer { packing: None, zstd: None, block: Vec::new() }
    }

    /// Compresses from now on. `cap`: what the stream may send, if that is limited. `has_zstd`: the other host unpacks zstd, too.
    pub fn begin(&mut self, cap: Option<Rate>, has_zstd: bool) {
        self.zstd = if has_zstd { Compressor::new(ZSTD_LEVEL).ok() } else { None };
        self.packing = Some(Packing::new(cap, self.zstd.is_some()));
    }

    /// The content as one block, and of which kind, if it is to be sent so: it is shorter then.
    pub fn pack(&mut self, content: &[u8]) -> Option<(Codec, &[u8])> {
        let codec = self.packing.as_ref()?.codec();
        if codec == Codec::Raw {
            return None;
        }
        let most = lz4_flex::block::get_maximum_output_size(content.len()).max(compress_bound(content.len()));
        if self.block.len() < most {
            self.block.resize(most, 0);
        }
        if content.len() >= 4 * SAMPLE {
            let at = (content.len() - SAMPLE) / 2;
            self.compress(codec, &content[at..at + SAMPLE])?;
        }
        let len = self.compress(codec, content)?;
        Some((codec, &self.block[..len]))
    }

    /// How long the block is. None if it is hardly shorter than the content, which is not worth the other host's time.
    fn compress(&mut self, codec: Codec, content: &[u8]) -> Option<usize> {
        let len = match (codec, &mut self.zstd) {
            (Codec::Zstd, Some(zstd)) => zstd.compress_to_buffer(content, &mut self.block[..]).ok()?,
            _ => lz4_flex::block::compress_into(content, &mut self.block).ok()?,
        };
        (len < content.len() - content.len() / 16).then_some(len)
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
