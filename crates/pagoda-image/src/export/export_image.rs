//! Reads an image, compresses it, and gives the file's bytes in order.
//!
//! Several threads each read every n-th chunk, past the page cache, and compress it. The caller's thread puts what they
//! give in order and hands it on. So a slow receiver slows all down, and at most [`AHEAD`] chunks of each thread are in memory.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PAGE_SIZE};

use super::chunk::{Level, Packed, Packer};
use super::format::STATE_PIECE_MAX;
use super::pack::Assembly;
use super::reader::Totals;
use crate::damage::ImageError;
use crate::image::Image;

const PAGE: usize = PAGE_SIZE as usize;
/// Chunks that a thread has ready before the one that is waited for.
const AHEAD: usize = 2;
/// Threads at most. More only take CPUs from VMs.
const THREADS_MAX: usize = 8;
/// Threads for each CPU: one compresses while the other waits for the disk.
const THREADS_PER_CPU: usize = 2;

/// What an exported file has.
pub type Exported = Totals;

/// Why there is no whole file.
#[derive(Debug, thiserror::Error)]
pub enum ExportFailed {
    /// The image is damaged, lacks pages, or cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The receiver takes no more.
    #[error("the receiver of the file: {0}")]
    Receiver(io::Error),
    /// This host has no threads or no memory for it.
    #[error("begin to compress: {0}")]
    Begin(io::Error),
    /// The snapshot cannot be written in this form.
    #[error("{0}")]
    Unfit(String),
}

/// Gives all of the file to `sink`, piece by piece. Every page was compared with its checksum, and so was the state.
///
/// # Errors
/// See [`ExportFailed`]. What was given until then is no file: it lacks its end marker.
pub fn export(
    image: &Image,
    level: Level,
    sink: &mut dyn FnMut(Vec<u8>) -> io::Result<()>,
) -> Result<Exported, ExportFailed> {
    image.check_state()?;
    let manifest = image.manifest().clone().for_export();
    let (mut assembly, begin) = Assembly::begin(&manifest, count_blocks(image)?).map_err(ExportFailed::Unfit)?;
    sink(begin).map_err(ExportFailed::Receiver)?;
    let mut packer = Packer::new(level).map_err(ExportFailed::Begin)?;
    let state = image.manifest().state.bytes;
    let mut piece = vec![0; STATE_PIECE_MAX.min(state as usize)];
    for (index, offset) in (0..).zip((0..state).step_by(STATE_PIECE_MAX)) {
        let piece = &mut piece[..(state - offset).min(STATE_PIECE_MAX as u64) as usize];
        image.read_state(piece, offset)?;
        sink(assembly.state(packer.state(index, piece))).map_err(ExportFailed::Receiver)?;
    }
    drop(packer);
    let pack = |packer: &mut Packer, chunk, pages: PageSet, sums: &[u32], content: &[u8]| {
        (packer.chunk(chunk, pages, sums, content), u64::from(pages.count()))
    };
    let make = || Packer::new(level).map_err(ExportFailed::Begin);
    in_order(image, make, pack, &mut |packed: Option<(Packed, u64)>| match packed {
        Some((packed, blocks)) => sink(assembly.chunk(packed, blocks)).map_err(ExportFailed::Receiver),
        None => {
            assembly.zero_chunk();
            Ok(())
        }
    })?;
    let (end, sums) = assembly.end();
    sink(end).map_err(ExportFailed::Receiver)?;
    Ok(Exported { bytes: sums.bytes, blocks: sums.blocks, zeros: sums.zeros })
}

/// Pages with content, by the map.
fn count_blocks(image: &Image) -> Result<u64, ImageError> {
    image.chunks().iter().try_fold(0, |sum, chunk| {
        let found = image.look_at(chunk)?;
        Ok(sum + u64::from((PageSet::FULL - found.zero - found.missing).count()))
    })
}

/// Reads all chunks with several threads, makes something of each, and gives that to `take` in the order of the chunks: nothing
/// for a chunk that is all zero. `make` gives each thread what it works with.
pub(super) fn in_order<W: Send, T: Send>(
    image: &Image,
    make: impl Fn() -> Result<W, ExportFailed>,
    pack: impl Fn(&mut W, ChunkIdx, PageSet, &[u32], &[u8]) -> T + Sync,
    take: &mut dyn FnMut(Option<T>) -> Result<(), ExportFailed>,
) -> Result<(), ExportFailed> {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = (cpus * THREADS_PER_CPU).min(THREADS_MAX);
    let pack = &pack;
    std::thread::scope(|scope| {
        let mut results: Vec<Receiver<Result<Option<T>, ImageError>>> = Vec::new();
        for first in 0..threads {
            let (sender, receiver) = sync_channel(AHEAD);
            let own = make()?;
            let chunks = image.chunks().iter().skip(first).step_by(threads);
            let work = move || read_and_pack(image, chunks, own, pack, &sender);
            let started = std::thread::Builder::new().name("export".into()).spawn_scoped(scope, work);
            started.map_err(ExportFailed::Begin)?;
            results.push(receiver);
        }
        for chunk in image.chunks().iter() {
            // A thread that ended before it had given all would have panicked, and then this does too.
            let packed = results[chunk.as_usize() % threads].recv().expect("a chunk of the thread");
            take(packed?)?;
        }
        Ok(())
        // Dropping the receivers ends the threads.
    })
}

/// Until all is done, or nobody takes more.
fn read_and_pack<W, T>(
    image: &Image,
    chunks: impl Iterator<Item = ChunkIdx>,
    mut own: W,
    pack: &impl Fn(&mut W, ChunkIdx, PageSet, &[u32], &[u8]) -> T,
    sender: &SyncSender<Result<Option<T>, ImageError>>,
) {
    // Past the page cache only into memory that begins at a page.
    let mut room = vec![0; CHUNK_SIZE as usize + PAGE];
    let aligned = room.as_ptr().align_offset(PAGE);
    let content = &mut room[aligned..aligned + CHUNK_SIZE as usize];
    for chunk in chunks {
        let packed = image.sums_of(chunk).and_then(|(pages, sums)| {
            if pages.is_empty() {
                return Ok(None);
            }
            let content = &mut content[..usize::from(pages.count()) * PAGE];
            image.read_blocks(chunk, pages, content)?;
            Ok(Some(pack(&mut own, chunk, pages, &sums, content)))
        });
        let failed = packed.is_err();
        if sender.send(packed).is_err() || failed {
            return;
        }
    }
}
