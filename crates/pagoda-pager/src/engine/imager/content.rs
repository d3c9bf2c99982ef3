//! Gets what pages hold into the image, from wherever it is.

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Pages, Source};
use pagoda_core::units::{ChunkIdx, PAGE_SIZE};
use pagoda_image::{Taken, Writer};
use pagoda_sys::ring::Ring;

use crate::engine::paging::{Paging, pieces, short_runs};

/// Pages on their way into the image at once: as many as one step of filling copies.
const ROOM_PAGES: u16 = 64;

/// Room for what pages hold on their way.
#[derive(Debug, Default)]
pub struct Room(Vec<u8>);

impl Room {
    /// Makes it, before it is needed.
    pub fn make(&mut self) {
        self.0.resize(usize::from(ROOM_PAGES) * PAGE_SIZE as usize, 0);
    }

    /// No image needs it any more.
    pub fn drop(&mut self) {
        *self = Room::default();
    }

    fn of(&mut self, pages: Pages) -> &mut [u8] {
        &mut self.0[..usize::from(pages.run.len) * PAGE_SIZE as usize]
    }
}

/// Has the image take over pages that are about to change, or that are to be copied.
///
/// # Errors
/// Why that could not be done: the image is to be given up, if the writer has not done so.
pub fn take_over(
    writer: &mut Writer,
    room: &mut Room,
    (pages, from): (Pages, Source),
    paging: &Paging,
    ring: &Ring,
) -> Result<(), String> {
    match from {
        Source::Zero => taken(writer.preserve_zeros(pages)),
        Source::Parent => taken(writer.inherit(pages)),
        Source::Buffer(op) => {
            let content = paging.brought(ring, op, pages).ok_or("what was read for it is in no buffer")?;
            taken(writer.preserve(pages, content))
        }
        Source::Ram | Source::Frame => pieces(pages.run, ROOM_PAGES).try_for_each(|run| {
            let pages = Pages { chunk: pages.chunk, run };
            let content = room.of(pages);
            match from {
                Source::Frame => paging.copy_frames(pages, content)?,
                _ => paging.copy_ram(pages, content)?,
            }
            taken(writer.preserve(pages, content))
        }),
    }
}

/// Has the image take over all that it lacks, when the VM has ended and nothing of it changes any more. It waits for the tiers.
///
/// # Errors
/// As [`take_over`].
pub fn take_over_all(writer: &mut Writer, room: &mut Room, paging: &mut Paging) -> Result<(), String> {
    if let Some(why) = paging.halted() {
        return Err(format!("the VM ended when it was {why}"));
    }
    let machine = paging.machine();
    if !machine.is_armed() || machine.frozen() != writer.missing() {
        return Err("it is not known which pages it lacks".to_owned());
    }
    for chunk in paging.space().chunks().iter() {
        take_over_chunk(writer, room, chunk, paging)?;
    }
    Ok(())
}

fn take_over_chunk(writer: &mut Writer, room: &mut Room, chunk: ChunkIdx, paging: &mut Paging) -> Result<(), String> {
    let found = paging.machine().chunk(chunk).clone();
    let inherited = writer.missing_of(chunk) & found.inherited;
    inherited.runs().try_for_each(|run| taken(writer.inherit(Pages { chunk, run })))?;
    let missing = writer.missing_of(chunk);
    let (ram, shared, blocks) = (missing & found.ram, missing & found.shared, missing & found.swapped());
    for run in short_runs(ram, ROOM_PAGES) {
        let pages = Pages { chunk, run };
        copy_memory(pages, found.clean, room.of(pages), paging)?;
        taken(writer.preserve(pages, room.of(pages)))?;
    }
    for run in short_runs(shared, ROOM_PAGES) {
        let pages = Pages { chunk, run };
        paging.copy_frames(pages, room.of(pages))?;
        taken(writer.preserve(pages, room.of(pages)))?;
    }
    for run in short_runs(blocks, ROOM_PAGES) {
        let pages = Pages { chunk, run };
        paging.copy_blocks(pages, room.of(pages))?;
        taken(writer.preserve(pages, room.of(pages)))?;
    }
    (missing - ram - shared - blocks).runs().try_for_each(|run| taken(writer.preserve_zeros(Pages { chunk, run })))
}

/// Copies pages that the machine has in memory. What faults bring to a VMM that is dying does not come there any more, and the
/// machine is not told. The block of a `clean` page has the same content.
fn copy_memory(pages: Pages, clean: PageSet, out: &mut [u8], paging: &mut Paging) -> Result<(), String> {
    let Err(why) = paging.copy_ram(pages, out) else { return Ok(()) };
    let page_size = PAGE_SIZE as usize;
    for (index, out) in (pages.run.start..=u8::MAX).zip(out.chunks_exact_mut(page_size)) {
        let page = Pages { chunk: pages.chunk, run: Run { start: index, len: 1 } };
        if paging.copy_ram(page, out).is_ok() {
            continue;
        }
        if !clean.contains(index) {
            return Err(why);
        }
        paging.copy_blocks(page, out)?;
    }
    Ok(())
}

/// A writer that takes nothing has given the image up, and knows why.
fn taken(taken: Taken) -> Result<(), String> {
    match taken {
        Taken::Yes => Ok(()),
        Taken::No => Err("its disk failed".to_owned()),
    }
}
