//! What has to be true at every moment.

use std::collections::BTreeSet;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::Machine;
use pagoda_core::fault::table::Chunk;
use pagoda_core::stats::Metric;
use pagoda_core::units::ChunkIdx;

use crate::pager::Pager;
use crate::vmm::Vmm;
use crate::world::{CHUNK, Pte, World};

/// A daemon that started now would find every page's last content.
pub fn check_recoverable(world: &World, vmm: &Vmm) {
    for page in 0..world.pages() {
        if !vmm.is_given_back(page) {
            assert_eq!(world.recoverable(page), vmm.truth[page], "content of page {page}");
        }
    }
}

/// The machine's page table says what is in the files. Only where nothing is under way: there it knows.
pub fn check_table(pager: &Pager, world: &World, vmm: &Vmm) {
    if !pager.machine.is_armed() {
        return;
    }
    for chunk in (0..world.pages() / CHUNK).map(|index| ChunkIdx(index as u32)) {
        let entry = pager.machine.chunk(chunk);
        check_same(entry.same, chunk, world, vmm);
        check_borrowed(chunk, entry, world);
        if entry.busy() {
            continue;
        }
        let first = chunk.0 as usize * CHUNK;
        let data = |there: &dyn Fn(usize) -> bool| -> PageSet {
            (0..CHUNK).filter(|index| there(first + index)).map(|index| index as u8).collect()
        };
        let shared = data(&|page| world.entries[page].is_some());
        assert_eq!(entry.shared, shared, "{chunk:?}");
        let ram = data(&|page| world.ram[page].is_some());
        assert!(ram.contains_all(entry.ram), "{chunk:?}: in RAM are {ram:?}, said to be {:?}", entry.ram);
        // A punch in place leaves zeros behind; else the two agree.
        let left = (ram - entry.ram).iter().map(|index| first + usize::from(index));
        for page in left {
            let zero = world.ram[page].as_ref().is_some_and(|frame| frame.get() == 0);
            assert!(zero && pager.weather.direct && world.pte[page] == Pte::Absent, "page {page} is left in RAM");
        }
        // After a failed write the machine takes the blocks for outdated data, whether they are there or not.
        let swap = data(&|page| world.blocks.has(page));
        assert!(entry.swap.contains_all(swap), "{chunk:?}: in swap are {swap:?}, said to be {:?}", entry.swap);
        assert!(entry.stale().contains_all(entry.swap - swap), "{chunk:?}: not in swap are {:?}", entry.swap - swap);
        let frozen = data(&|page| world.is_frozen(page));
        // A mistake has to show in what an image holds.
        assert!(entry.frozen == frozen || pager.weather.mistake.is_some(), "{chunk:?}: frozen");
        for page in (entry.ram - entry.open).iter().map(|index| first + usize::from(index)) {
            assert!(world.pte[page] != Pte::Writable, "page {page} can be written, which the machine does not know");
        }
        for page in entry.clean.iter().map(|index| first + usize::from(index)) {
            let content = world.ram[page].as_ref().map(|frame| frame.get());
            assert_eq!(content, Some(world.swapped_content(page)), "the clean page {page} differs from swap");
        }
    }
}

/// What a borrowed chunk can be written unseen is charged for, and so is what it has of its own. What the template has is in
/// swap.
fn check_borrowed(chunk: ChunkIdx, entry: &Chunk, world: &World) {
    let first = chunk.0 as usize * CHUNK;
    // It has been moved, and the machine is yet to hear of it.
    assert!(entry.borrowed || !world.loan.has(first), "{chunk:?} is borrowed, which the machine does not know");
    for index in 0..CHUNK {
        let page = first + index;
        if !world.loan.has(page) {
            continue;
        }
        let is_private = entry.private.contains(index as u8);
        assert!(is_private || !world.loan.is_open(page), "page {page} can be written, which the machine does not know");
        assert!(
            is_private || !world.loan.is_written(page),
            "page {page} is the VM's own, which the machine does not know"
        );
        assert_eq!(world.loan.template[page], world.swapped_content(page), "page {page} in the template and in swap");
        assert!(entry.owning.is_some() || world.ram[page].is_none(), "page {page} is borrowed, and in the RAM file");
    }
}

/// What is known to be the same as in the newest image is, and nobody can write it unseen.
fn check_same(same: PageSet, chunk: ChunkIdx, world: &World, vmm: &Vmm) {
    let is_of_image = world.has_newest();
    assert!(same.is_empty() || is_of_image || world.moving.is_some(), "{chunk:?}: the same as nowhere");
    for page in same.iter().map(|index| chunk.0 as usize * CHUNK + usize::from(index)) {
        assert!(world.pte[page] != Pte::Writable, "page {page} can be written, and is taken for the same");
        let settled = || world.moving.as_ref().and_then(|moving| moving.settled(page));
        let known = if is_of_image { world.newest_truth(page) } else { settled() };
        if let Some(content) = known
            && !vmm.is_given_back(page)
        {
            assert_eq!(vmm.truth[page], content, "page {page} is taken for what the image or the other host has");
        }
    }
}

/// References are what the tables say, and frames without any are free.
pub fn check_frames(pager: &Pager, world: &World) {
    let mut refs = world.count_references();
    // In RAM still, so that no daemon that starts now would count them.
    pager.entered().into_iter().filter_map(|page| world.entries[page]).for_each(|frame| refs[frame] += 1);
    assert_eq!(pager.refs, refs);
    for (frame, refs) in pager.refs.iter().enumerate() {
        assert_eq!(world.frames[frame].is_some(), *refs > 0, "frame {frame} with {refs} references");
    }
}

/// DRAM does not grow past the cap while page-out can go on.
pub fn check_residency(pager: &mut Pager, world: &World) {
    let stats = pager.machine.stats();
    let left = leftovers(pager, world);
    // What a private page takes it takes when it is written, without another event.
    let private = stats.get(Metric::PrivatePages) as usize;
    let used = world.ram.iter().flatten().count() - left + pager.arriving(world) + private;
    let was_blocked = std::mem::take(&mut pager.was_pin_blocked);
    let relaxed = !world.registered || was_blocked || pager.machine.stall().is_some();
    let cap = if pager.pinned { world.pages() } else { stats.get(Metric::Limit) as usize };
    let before = pager.swap_bound(if relaxed { world.pages() } else { used.max(cap) });
    assert!(relaxed || used <= before.max(cap), "{used} pages in DRAM, {before} before, cap {cap}");
}

/// A watched page is not mapped, and nobody has reached it since its watch began: every use is counted. Gives the watched
/// pages.
pub fn check_watched(before: &BTreeSet<usize>, machine: &Machine, world: &mut World) -> BTreeSet<usize> {
    let watched: BTreeSet<usize> = machine.watched().iter().map(|page| page.0 as usize).collect();
    for page in &watched {
        assert_eq!(world.pte[*page], Pte::Absent, "the watched page {page} is mapped");
        assert!(!world.used[*page] || !before.contains(page), "a use of the watched page {page} went unseen");
        world.used[*page] = false;
    }
    watched
}

/// Pages of zeros that a punch in place left: nobody could have punched them.
fn leftovers(pager: &Pager, world: &World) -> usize {
    let unknown = |page: &usize| {
        let entry = pager.machine.chunk(ChunkIdx((page / CHUNK) as u32));
        let filling = world.intents.iter().any(|(_, pages)| pages.contains(page));
        world.ram[*page].is_some() && !entry.ram.contains((page % CHUNK) as u8) && !filling
    };
    (0..world.pages()).filter(unknown).count()
}
