//! Compressed pages of another host become pages again.

use pagoda_move::map::PageRun;
use pagoda_move::wire::{Codec, Malformed};
use zstd::bulk::Decompressor;

/// Unpacks one run after the other into the same room: that of the longest one so far, at most a chunk.
#[derive(Default)]
pub struct Unpacker {
    pages: Vec<u8>,
    /// Since the first run that needs it.
    zstd: Option<Decompressor<'static>>,
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").field("room", &self.pages.capacity()).finish_non_exhaustive()
    }
}

impl Unpacker {
    /// The content of these pages, if the block is that and nothing else.
    ///
    /// # Errors
    /// It is not. Whatever it was unpacked to is gone.
    pub fn unpack(&mut self, run: PageRun, codec: Codec, block: &[u8]) -> Result<&[u8], Malformed> {
        let whole = run.count().bytes().as_usize();
        // Nothing of an earlier run is left for a block that refers to what it has not brought.
        self.pages.clear();
        self.pages.resize(whole, 0);
        let unpacked = match codec {
            // Both unpack into the room of the run and need no other, whatever the block says of its length.
            Codec::Zstd => self.unpack_zstd(block),
            _ => lz4_flex::block::decompress_into(block, &mut self.pages).ok(),
        };
        match unpacked {
            Some(len) if len == whole => Ok(&self.pages),
            Some(_) => Err(Malformed("compressed pages that are shorter than their run")),
            None => Err(Malformed("compressed pages that cannot be unpacked into their run")),
        }
    }

    fn unpack_zstd(&mut self, block: &[u8]) -> Option<usize> {
        let zstd = match &mut self.zstd {
            Some(zstd) => zstd,
            None => self.zstd.insert(Decompressor::new().ok()?),
        };
        zstd.decompress_to_buffer(block, &mut self.pages[..]).ok()
    }
}

#[cfg(test)]
mod tests {
    use pagoda_core::bits::Run;
    use pagoda_core::chance::Chance;
    use pagoda_core::units::{ChunkIdx, PAGE_SIZE};

    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    fn run(len: u16) -> PageRun {
        PageRun { chunk: ChunkIdx(7), run: Run { start: 0, len } }
    }

    const CODECS: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

    fn packed(codec: Codec, content: &[u8]) -> Vec<u8> {
        match codec {
            Codec::Zstd => zstd::bulk::compress(content, 1).unwrap(),
            _ => lz4_flex::block::compress(content),
        }
    }

    /// Words of a small vocabulary: they compress, in matches of all lengths and distances.
    fn text(chance: &mut Chance, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let word = [chance.within(0, 40) as u8; 3];
            bytes.extend_from_slice(&word[..chance.within(1, 3) as usize]);
            if chance.per_mille(20) {
                bytes.resize(bytes.len() + chance.within(1, 700) as usize, 9);
            }
        }
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn pages_come_back_as_they_were() {
        let (mut chance, mut unpacker) = (Chance::new(1), Unpacker::default());
        for (len, codec) in [1, 256, 3, 64, 2].into_iter().flat_map(|len| CODECS.map(|codec| (len, codec))) {
            let content = text(&mut chance, usize::from(len) * PAGE);
            let block = packed(codec, &content);
            assert!(block.len() < content.len() / 2, "{} of {}", block.len(), content.len());
            assert!(unpacker.unpack(run(len), codec, &block).unwrap() == content, "{len} pages, {codec:?}");
        }
    }

    #[test]
    fn a_block_of_another_length_than_its_run_is_refused() {
        let mut unpacker = Unpacker::default();
        let mut check = |pages: u16, bytes: usize, expected: &str| {
            for codec in CODECS {
                let error = unpacker.unpack(run(pages), codec, &packed(codec, &vec![5; bytes])).unwrap_err();
                assert!(error.to_string().contains(expected), "{codec:?}: {error}");
            }
        };
        check(4, 4 * PAGE - 1, "shorter");
        check(4, PAGE, "shorter");
        check(4, 4 * PAGE + 1, "cannot be unpacked");
        check(1, 256 * PAGE, "cannot be unpacked");
        // A bomb: 64 MiB in 256 KiB. There is room for a chunk.
        check(1, 64 << 20, "cannot be unpacked");
        check(256, 64 << 20, "cannot be unpacked");
        assert!(unpacker.pages.capacity() <= 256 * PAGE, "{}", unpacker.pages.capacity());
    }

    #[test]
    fn what_is_no_block_is_refused() {
        let mut unpacker = Unpacker::default();
        // Something to find behind a reference to what was not brought.
        for codec in CODECS {
            unpacker.unpack(run(2), codec, &packed(codec, &[0xaa; 2 * PAGE])).unwrap();
        }
        let whole_page = |head: &[u8]| {
            let mut block = head.to_vec();
            // The rest of a page: lengths in steps of 255.
            block.extend([255; 16]);
            block
        };
        let blocks: [&[u8]; 8] = [
            &[],
            // Literals that are not there.
            &[0xf0, 255, 255, 255],
            &[0xf0, 255, 255, 255, 0],
            // A match before the beginning, at distance 0, and one whose distance is cut off.
            &whole_page(&[0x1f, 7, 2, 0]),
            &whole_page(&[0x1f, 7, 0, 0]),
            &[0x1f, 7, 1],
            // A length that never ends.
            &whole_page(&[0x1f, 7, 1, 0]),
            &[0x10, 7, 1, 0, 0x10],
        ];
        for block in blocks {
            let error = unpacker.unpack(run(1), Codec::Lz4, block).expect_err("a page of nothing");
            assert!(error.to_string().contains("compressed pages"), "{block:?}: {error}");
        }
        let frames: [&[u8]; 5] = [
            &[],
            // A frame to be skipped, and nothing else.
            &[0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 7, 7],
            // One that wants a window of 2 GiB, one without a block, and one that repeats a byte as often as there is no room for.
            &[0x28, 0xb5, 0x2f, 0xfd, 0, 0xa8, 1, 0, 0],
            &[0x28, 0xb5, 0x2f, 0xfd, 0x60, 0, 15],
            &[0x28, 0xb5, 0x2f, 0xfd, 0, 0x58, 0x03, 0x00, 0x10, 7],
        ];
        for frame in frames {
            let error = unpacker.unpack(run(1), Codec::Zstd, frame).expect_err("a page of nothing");
            assert!(error.to_string().contains("compressed pages"), "{frame:?}: {error}");
        }
    }

    /// Blocks in which bytes were changed, cut off, doubled and added: each is refused or gives as many bytes as its run has, and
    /// nothing panics, for the daemon would end.
    #[test]
    fn no_block_does_harm() {
        let mut unpacker = Unpacker::default();
        for seed in 1..=400 {
            let mut chance = Chance::new(seed);
            let codec = CODECS[chance.within(0, 1) as usize];
            let pages = [1_u16, 2, 5][chance.within(0, 2) as usize];
            let mut block = match chance.per_mille(150) {
                true => (0..chance.within(0, 300)).map(|_| chance.within(0, 255) as u8).collect(),
                false => packed(codec, &text(&mut chance, usize::from(pages) * PAGE)),
            };
            for _ in 0..chance.within(1, 6) {
                change(&mut block, &mut chance);
            }
            let length = chance.within(1, 5) as u16;
            if let Ok(content) = unpacker.unpack(run(length), codec, &block) {
                assert_eq!(content.len(), usize::from(length) * PAGE, "seed {seed}");
            }
        }
    }

    fn change(block: &mut Vec<u8>, chance: &mut Chance) {
        let Some(last) = (block.len() as u64).checked_sub(1) else { return block.push(0xff) };
        let at = chance.within(0, last) as usize;
        match chance.within(0, 5) {
            0 => block.truncate(at),
            1 => block[at] ^= 1 << chance.within(0, 7),
            2 => block[at] = 0xff,
            3 => block.extend_from_within(at..),
            4 => block.insert(at, chance.within(0, 255) as u8),
            _ => drop(block.remove(at)),
        }
    }
}
