//! Which of the VM's chunks map the template of its snapshot, and whether RAM is being moved in the place of one.
//!
//! Written by `borrow` alone, read by every hook that has to leave such memory alone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagoda_abi::CHUNK_SIZE;

use crate::config::{RamFile, config};

/// Chunks of a VM that can be borrowed: 4 TiB. What comes behind them is RAM as in any VM.
pub const CHUNKS_MAX: usize = 4 << 20;

/// Chunks whose place maps the template, a bit each. Static memory that is not used costs nothing.
static LENT: [AtomicU64; CHUNKS_MAX / 64] = [const { AtomicU64::new(0) }; CHUNKS_MAX / 64];
/// Whether any chunk maps the template.
static IS_GIVEN: AtomicBool = AtomicBool::new(false);
/// A move is being done.
static IS_MOVING: AtomicBool = AtomicBool::new(false);

/// The chunk's place maps the template from now on.
pub fn lend(chunk: u64) {
    LENT[chunk as usize / 64].fetch_or(1 << (chunk % 64), Ordering::SeqCst);
}

/// It maps RAM from now on.
pub fn end(chunk: u64) {
    LENT[chunk as usize / 64].fetch_and(!(1 << (chunk % 64)), Ordering::SeqCst);
}

/// All that is lent at first is.
pub fn set_given() {
    IS_GIVEN.store(true, Ordering::SeqCst);
}

/// This VM has a template: its memory may have pages that are in no file.
pub fn is_given() -> bool {
    IS_GIVEN.load(Ordering::Acquire)
}

/// Whether any of the VM's memory maps the template.
pub fn is_any_lent() -> bool {
    is_given() && LENT.iter().any(|word| word.load(Ordering::SeqCst) != 0)
}

/// Whether a part of this piece of a region does.
pub fn is_lent(region: usize, offset: usize, len: usize) -> bool {
    let Some(config) = config().filter(|_| is_given() && len > 0) else { return false };
    let first = first_chunk(config.ram(), region);
    let chunks = offset / CHUNK_SIZE..=(offset + len - 1) / CHUNK_SIZE;
    chunks.into_iter().any(|chunk| is_lent_chunk(first + chunk as u64))
}

/// Whether this chunk maps the template.
pub fn is_lent_chunk(chunk: u64) -> bool {
    let word = LENT.get(chunk as usize / 64).map_or(0, |word| word.load(Ordering::SeqCst));
    word >> (chunk % 64) & 1 == 1
}

/// The chunk at the beginning of a region.
pub fn first_chunk(ram: &[RamFile], region: usize) -> u64 {
    ram[..region].iter().map(|file| file.len / CHUNK_SIZE as u64).sum()
}

/// A move begins or is over.
pub fn set_moving(is_moving: bool) {
    IS_MOVING.store(is_moving, Ordering::SeqCst);
}

/// A move is being done: what is mapped where must not change.
pub fn is_moving() -> bool {
    IS_MOVING.load(Ordering::SeqCst)
}
