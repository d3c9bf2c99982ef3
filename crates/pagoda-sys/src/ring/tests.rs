use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use super::*;
use crate::PAGE_SIZE;
use crate::process::Wake;
use crate::ram::LargeFolios;
use crate::swapfile::{Reserve, SwapFile};
use crate::testing::{PAGE, PATIENCE, disk_path, ram};

fn swap(name: &str, pages: u64) -> SwapFile {
    SwapFile::create(&disk_path(name), pages * PAGE, Reserve::No).unwrap()
}

/// Waits for `count` completions.
fn complete(ring: &mut Ring, count: usize) -> Vec<Completion> {
    let mut all = Vec::new();
    while all.len() < count {
        ring.submit_and_wait(1, Some(PATIENCE)).unwrap();
        let before = all.len();
        all.extend(ring.completions());
        assert!(all.len() > before, "no completion in time, have {all:?}");
    }
    all
}

/// Looks for completions, and never waits for one.
fn look_until_there(ring: &mut Ring) -> Vec<Completion> {
    let began = Instant::now();
    loop {
        ring.submit_and_wait(1, Some(Duration::ZERO)).unwrap();
        let found: Vec<Completion> = ring.completions().collect();
        if !found.is_empty() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "no completion in time");
    }
}

fn done(key: u64, bytes: u32) -> Completion {
    Completion { key, result: Ok(bytes), more: false }
}

#[test]
fn pages_go_out_of_ram_and_come_back_into_ram_and_buffers() {
    let swap = swap("there-and-back", 8);
    let file = ram("ring", 8 * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let mut ring = Ring::new(8).unwrap();
    ring.set_buffers(Buffers::new(&[(2, 2 * PAGE_SIZE)]).unwrap()).unwrap();
    let disk = ring.add_file(swap.as_fd()).unwrap();
    for page in 0..4 {
        view.write_page(page, &[page as u8 + 1; PAGE_SIZE]);
    }
    ring.write(disk, 2 * PAGE, view.io_target(0, 4 * PAGE as u32), 77).unwrap();
    assert_eq!(complete(&mut ring, 1), [done(77, 4 * PAGE as u32)]);
    file.punch(0, 4 * PAGE).unwrap();
    // A read goes straight into the hole.
    ring.read(disk, 3 * PAGE, view.io_target(PAGE, PAGE as u32), 78).unwrap();
    assert_eq!(complete(&mut ring, 1), [done(78, PAGE as u32)]);
    assert_eq!((file.allocated(), file.next_data(0)), (Ok(PAGE), Ok(Some(PAGE))));
    let mut content = [0; PAGE_SIZE];
    view.read_page(1, &mut content);
    assert_eq!(content, [2; PAGE_SIZE]);
    // Through a buffer, its second half only.
    let id = ring.take_buffer(PAGE_SIZE).unwrap();
    let slice = BufferSlice { id, offset: PAGE as u32, len: PAGE as u32 };
    ring.read(disk, 4 * PAGE, slice, 79).unwrap();
    assert_eq!(complete(&mut ring, 1), [done(79, PAGE as u32)]);
    let bytes = ring.buffer(id).unwrap();
    assert!(bytes[..PAGE_SIZE].iter().all(|byte| *byte == 0) && bytes[PAGE_SIZE..].iter().all(|byte| *byte == 3));
    ring.buffer_mut(id).unwrap().fill(9);
    ring.write(disk, 0, slice, 80).unwrap();
    assert_eq!(complete(&mut ring, 1), [done(80, PAGE as u32)]);
    assert!(ring.give_buffer(id));
    ring.read(disk, 0, view.io_target(5 * PAGE, PAGE as u32), 81).unwrap();
    complete(&mut ring, 1);
    view.read_page(5, &mut content);
    assert_eq!(content, [9; PAGE_SIZE]);
    // The end of the file cuts a read short.
    ring.read(disk, 7 * PAGE, view.io_target(0, 2 * PAGE as u32), 82).unwrap();
    assert_eq!(complete(&mut ring, 1), [done(82, PAGE as u32)]);
    assert_eq!(ring.in_flight(), 0);
    swap.remove().unwrap();
}

#[test]
fn who_never_waits_hands_over_and_takes_in_all_the_same() {
    let swap = swap("no-wait", 1);
    let view = ram("no-wait", PAGE).map(LargeFolios::Never).unwrap();
    let wake = Wake::new().unwrap();
    let mut ring = Ring::new(4).unwrap();
    let disk = ring.add_file(swap.as_fd()).unwrap();
    ring.poll_multishot(wake.as_fd(), 7).unwrap();
    wake.wake();
    assert_eq!(look_until_there(&mut ring), [Completion { key: 7, result: Ok(libc::POLLIN as u32), more: true }]);
    wake.clear();
    ring.read(disk, 0, view.io_target(0, PAGE as u32), 8).unwrap();
    assert_eq!(look_until_there(&mut ring), [done(8, PAGE as u32)]);
    swap.remove().unwrap();
}

#[test]
fn a_full_ring_refuses_and_drops_nothing() {
    let swap = swap("full", 1);
    let file = ram("full", 64 * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let mut ring = Ring::new(4).unwrap();
    let disk = ring.add_file(swap.as_fd()).unwrap();
    let limit = ring.limit() as u64;
    assert!((8..64).contains(&limit), "{limit}");
    for key in 0..limit {
        ring.read(disk, 0, view.io_target(key * PAGE, PAGE as u32), key).unwrap();
    }
    let refused = ring.read(disk, 0, view.io_target(0, PAGE as u32), 99).unwrap_err();
    assert!(matches!(refused, RingError::Full { .. }), "{refused}");
    let mut keys: Vec<u64> = complete(&mut ring, limit as usize).iter().map(|completion| completion.key).collect();
    keys.sort_unstable();
    assert_eq!(keys, (0..limit).collect::<Vec<_>>());
    ring.read(disk, 0, view.io_target(0, PAGE as u32), 99).unwrap();
    assert_eq!(complete(&mut ring, 1), [done(99, PAGE as u32)]);
    swap.remove().unwrap();
}

#[test]
fn errors_come_as_results_and_strangers_are_refused() {
    let swap = swap("errors", 1);
    let view = ram("errors", PAGE).map(LargeFolios::Never).unwrap();
    let mut ring = Ring::new(4).unwrap();
    let read_only: OwnedFd = std::fs::File::open(swap.path()).unwrap().into();
    let disk = ring.add_file(read_only.as_fd()).unwrap();
    drop(read_only);
    ring.write(disk, 0, view.io_target(0, PAGE as u32), 5).unwrap();
    assert_eq!(complete(&mut ring, 1), [Completion { key: 5, result: Err(Errno::BADF), more: false }]);
    ring.remove_file(disk).unwrap();
    let refused =
        |result: Result<(), RingError>| assert!(matches!(result, Err(RingError::Stranger { .. })), "{result:?}");
    refused(ring.remove_file(disk));
    refused(ring.read(disk, 0, view.io_target(0, PAGE as u32), 6));
    let disk = ring.add_file(swap.as_fd()).unwrap();
    ring.set_buffers(Buffers::new(&[(1, PAGE_SIZE)]).unwrap()).unwrap();
    let id = ring.take_buffer(PAGE_SIZE).unwrap();
    assert_eq!((ring.take_buffer(PAGE_SIZE), ring.buffers_free(PAGE_SIZE)), (None, 0));
    for (offset, len) in [(0, 0), (0, 2 * PAGE as u32), (PAGE as u32, 1), (u32::MAX, u32::MAX)] {
        refused(ring.read(disk, 0, BufferSlice { id, offset, len }, 7));
    }
    assert!(ring.give_buffer(id));
    refused(ring.read(disk, 0, BufferSlice { id, offset: 0, len: PAGE as u32 }, 7));
    assert!(!ring.give_buffer(id) && ring.buffer(id).is_none());
    for sizes in [&[][..], &[(0, PAGE_SIZE)], &[(1, 100)], &[(1, 2 * PAGE_SIZE), (1, PAGE_SIZE)]] {
        assert!(Buffers::new(sizes).is_err(), "{sizes:?}");
    }
    swap.remove().unwrap();
}

#[test]
fn a_buffer_is_out_of_sight_while_io_runs_on_it() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut ring = Ring::new(4).unwrap();
    ring.set_buffers(Buffers::new(&[(1, PAGE_SIZE)]).unwrap()).unwrap();
    let pipe = ring.add_file(reader.as_fd()).unwrap();
    let id = ring.take_buffer(PAGE_SIZE).unwrap();
    ring.read(pipe, u64::MAX, BufferSlice { id, offset: 0, len: 4 }, 1).unwrap();
    ring.submit().unwrap();
    assert!(ring.buffer(id).is_none() && ring.buffer_mut(id).is_none() && !ring.give_buffer(id));
    rustix::io::write(&writer, b"done").unwrap();
    assert_eq!(complete(&mut ring, 1), [done(1, 4)]);
    assert_eq!(&ring.buffer(id).unwrap()[..4], b"done");
}

#[test]
fn the_smallest_buffer_that_fits_is_taken() {
    let mut ring = Ring::new(4).unwrap();
    ring.set_buffers(Buffers::new(&[(2, PAGE_SIZE), (1, 4 * PAGE_SIZE)]).unwrap()).unwrap();
    assert_eq!(
        (ring.buffers_free(PAGE_SIZE), ring.buffers_free(PAGE_SIZE + 1), ring.buffers_free(5 * PAGE_SIZE)),
        (3, 1, 0)
    );
    let ids: Vec<BufferId> = std::iter::from_fn(|| ring.take_buffer(1)).collect();
    let sizes: Vec<usize> = ids.iter().map(|id| ring.buffer(*id).unwrap().len()).collect();
    assert_eq!(sizes, [PAGE_SIZE, PAGE_SIZE, 4 * PAGE_SIZE]);
    for (id, value) in ids.iter().zip(1..) {
        ring.buffer_mut(*id).unwrap().fill(value);
    }
    for (id, value) in ids.iter().zip(1..) {
        assert!(ring.buffer(*id).unwrap().iter().all(|byte| *byte == value), "buffers do not overlap");
        assert!(ring.give_buffer(*id));
    }
    assert_eq!((ring.buffers_free(PAGE_SIZE), ring.buffers_free(PAGE_SIZE + 1)), (3, 1));
}

#[test]
fn a_poll_reports_each_event_until_it_is_cancelled() {
    let wake = Wake::new().unwrap();
    let mut ring = Ring::new(4).unwrap();
    ring.poll_multishot(wake.as_fd(), 11).unwrap();
    for _ in 0..3 {
        wake.wake();
        let event = complete(&mut ring, 1)[0];
        assert_eq!((event.key, event.more), (11, true));
        assert!(wake.clear());
    }
    assert_eq!(ring.submit_and_wait(1, Some(Duration::from_millis(1))).unwrap(), 0);
    ring.cancel_poll(11).unwrap();
    assert_eq!(complete(&mut ring, 1), [Completion { key: 11, result: Err(Errno::CANCELED), more: false }]);
    // The removal's own completion is nobody's; its slot comes back all the same.
    assert_eq!((ring.completions().count(), ring.in_flight()), (0, 0));
}

#[test]
fn dropping_ends_the_io_before_its_memory() {
    let swap = swap("drop", 256);
    let file = ram("drop", 256 * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let mut ring = Ring::new(8).unwrap();
    ring.set_buffers(Buffers::new(&[(1, PAGE_SIZE)]).unwrap()).unwrap();
    let disk = ring.add_file(swap.as_fd()).unwrap();
    let pipe = ring.add_file(reader.as_fd()).unwrap();
    view.populate(0..256).unwrap();
    ring.write(disk, 0, view.io_target(0, 256 * PAGE as u32), 1).unwrap();
    ring.submit().unwrap();
    // One that would never end by itself, and one that was not even handed over.
    let id = ring.take_buffer(PAGE_SIZE).unwrap();
    ring.read(pipe, u64::MAX, BufferSlice { id, offset: 0, len: 4 }, 2).unwrap();
    ring.submit().unwrap();
    ring.read(disk, 0, view.io_target(0, PAGE as u32), 3).unwrap();
    drop(view);
    assert!(crate::process::mappers(file.inode().0, file.inode().1).unwrap().contains(&std::process::id()));
    drop(ring);
    assert_eq!(crate::process::mappers(file.inode().0, file.inode().1).unwrap(), Vec::<u32>::new());
    swap.remove().unwrap();
}

#[test]
fn the_lock_of_a_swap_file_falls_with_the_last_user_of_its_description() {
    let swap = swap("held", 1);
    let path = swap.path().to_owned();
    let mut ring = Ring::new(4).unwrap();
    ring.add_file(swap.as_fd()).unwrap();
    drop(swap);
    let other = std::fs::File::open(&path).unwrap();
    let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    assert_eq!(rustix::fs::flock(&other, exclusive), Err(Errno::WOULDBLOCK));
    drop((other, ring));
    // The kernel takes a ring apart in the background: `open` waits for that.
    SwapFile::open(&path, PAGE, Reserve::No).unwrap().remove().unwrap();
}
