//! A snapshot as a migration stream for a QEMU without Pagoda.
//!
//! A snapshot's state is such a stream already, but one of a QEMU that left the VM's memory out (capability `x-ignore-shared`).
//! Three things make it whole: the capability goes from the list at its beginning, the addresses that it adds to the list of
//! memory blocks go, and a part with all pages is put in right behind that list. All else is copied as it is.
//!
//! The format is that of QEMU's `migration/savevm.c` and `migration/ram.c`, whose numbers are big-endian. The state is read as
//! hostile input ([`scan`]): whatever is not known is refused by name, and nothing is guessed.

mod pages;
mod scan;

use std::io::{self, Read};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx};

use self::pages::Target;
use self::scan::{Layout, scan};
use super::export_image::in_order;
use super::{ExportFailed, Exported};
use crate::damage::ImageError;
use crate::image::Image;

/// Bytes of the state that are copied at once.
const PIECE: usize = 1 << 20;

/// What is known of a snapshot's state, and where the pages of each region belong.
#[derive(Debug)]
pub struct Stream {
    layout: Layout,
    /// The VM's regions in order.
    targets: Vec<Target>,
}

impl Stream {
    /// Looks through the state of an image.
    ///
    /// # Errors
    /// It is damaged, or has what is not known.
    pub fn of(image: &Image) -> Result<Stream, ExportFailed> {
        image.check_state()?;
        let len = image.manifest().state.bytes;
        let layout = scan(&mut State { image, offset: 0, len }).map_err(ExportFailed::Unfit)?;
        let targets = targets(&layout, &image.manifest().regions).map_err(ExportFailed::Unfit)?;
        Ok(Stream { layout, targets })
    }

    /// Where the pages of a chunk belong, and where there.
    fn target(&self, chunk: ChunkIdx) -> (&Target, u64) {
        let mut at = u64::from(chunk.0) * CHUNK_SIZE;
        for target in &self.targets {
            if at < target.len {
                return (target, at);
            }
            at -= target.len;
        }
        unreachable!("a chunk of the VM")
    }
}

/// The blocks that are the VM's memory: those of which the stream has no page.
fn targets(layout: &Layout, regions: &[u64]) -> Result<Vec<Target>, String> {
    let left_out: Vec<_> = layout.blocks.iter().filter(|block| !block.was_sent).collect();
    if left_out.len() != regions.len() {
        let names: Vec<&str> = left_out.iter().map(|block| &*block.id).collect();
        return Err(format!(
            "QEMU's state lacks {} memory blocks ({}), and the VM has {}",
            names.len(),
            names.join(", "),
            regions.len()
        ));
    }
    let of_len = |len: u64| {
        let mut found = left_out.iter().filter(|block| block.len == len);
        match (found.next(), found.next()) {
            (Some(block), None) => Ok(Target { id: block.id.clone(), len }),
            (Some(_), Some(_)) => Err(format!("two memory blocks of {len} bytes: which is which is not known")),
            (None, _) => Err(format!("no memory block in QEMU's state has {len} bytes")),
        }
    };
    regions.iter().map(|len| of_len(*len)).collect()
}

/// Gives all of the stream to `sink`, piece by piece. Every page was compared with its checksum.
///
/// # Errors
/// See [`ExportFailed`]. What was given until then is no stream.
pub fn export(
    image: &Image,
    stream: &Stream,
    sink: &mut dyn FnMut(Vec<u8>) -> io::Result<()>,
) -> Result<Exported, ExportFailed> {
    let Layout { capabilities, ram, .. } = &stream.layout;
    let (mut done, len) = (Exported::default(), image.manifest().state.bytes);
    let mut give = |bytes: Vec<u8>, done: &mut Exported| {
        done.bytes += bytes.len() as u64;
        sink(bytes).map_err(ExportFailed::Receiver)
    };
    for range in [0..capabilities.start, capabilities.end..ram.blocks_at] {
        give(read(image, range)?, &mut done)?;
    }
    give(stream.layout.setup_without_addresses(), &mut done)?;
    give(pages::part_begin(ram.id), &mut done)?;
    let pack = |(): &mut (), chunk: ChunkIdx, set: PageSet, _: &[u32], content: &[u8]| {
        let (target, at) = stream.target(chunk);
        (pages::chunk(target, at, set, content), u64::from(set.count()))
    };
    let mut next = ChunkIdx(0);
    in_order(image, || Ok(()), pack, &mut |packed| {
        let (bytes, blocks) = packed.unwrap_or_else(|| {
            let (target, at) = stream.target(next);
            (pages::chunk(target, at, PageSet::EMPTY, &[]), 0)
        });
        next.0 += 1;
        (done.blocks, done.zeros) = (done.blocks + blocks, done.zeros + CHUNK_PAGES - blocks);
        give(bytes, &mut done)
    })?;
    give(pages::part_end(ram.id), &mut done)?;
    let mut at = ram.end;
    while at < len {
        let next = len.min(at + PIECE as u64);
        give(read(image, at..next)?, &mut done)?;
        at = next;
    }
    Ok(done)
}

fn read(image: &Image, range: std::ops::Range<u64>) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    image.read_state(&mut bytes, range.start)?;
    Ok(bytes)
}

/// The state of an image, from its beginning.
struct State<'a> {
    image: &'a Image,
    offset: u64,
    len: u64,
}

impl Read for State<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = (self.len - self.offset).min(buffer.len() as u64) as usize;
        self.image.read_state(&mut buffer[..len], self.offset).map_err(io::Error::other)?;
        self.offset += len as u64;
        Ok(len)
    }
}
