use super::*;
use crate::ring::{Buffers, Ring};
use crate::testing::disk_path;

const MIB: u64 = 1 << 20;
const PAGE: u64 = PAGE_SIZE as u64;

fn write(swap: &SwapFile, page: u64, pages: usize) {
    let content = vec![AlignedPage([7; PAGE_SIZE]); pages];
    for (i, page_content) in content.iter().enumerate() {
        rustix::io::pwrite(&swap.fd, &page_content.0, (page + i as u64) * PAGE).unwrap();
    }
}

impl Clone for AlignedPage {
    fn clone(&self) -> Self {
        AlignedPage(self.0)
    }
}

fn data(swap: &SwapFile) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    // Neighbours on the disk or not: only what is data counts here.
    let mut join = |offset, len| match all.last_mut() {
        Some((start, so_far)) if *start + *so_far == offset => *so_far += len,
        _ => all.push((offset, len)),
    };
    swap.data_extents(&mut join).unwrap();
    all
}

#[test]
fn a_new_file_is_private_sparse_and_locked() {
    let path = disk_path("new");
    let swap = SwapFile::create(&path, 64 * MIB, Reserve::No).unwrap();
    let stat = rustix::fs::fstat(&swap).unwrap();
    assert_eq!((stat.st_mode & 0o7777, stat.st_size as u64), (0o600, 64 * MIB));
    assert_eq!((swap.allocated().unwrap(), data(&swap)), (0, vec![]));
    let other =
        SwapFile { fd: open_file(&path, OFlags::empty()).unwrap(), path: path.clone(), len: MIB, reserve: Reserve::No };
    let refused = other.lock(Duration::from_millis(10)).unwrap_err();
    assert!(matches!(refused, SwapError::Locked { .. }), "{refused}");
    let existing = SwapFile::create(&path, MIB, Reserve::No).unwrap_err();
    assert!(
        matches!(&existing, SwapError::Os { source, .. } if source.kind() == io::ErrorKind::AlreadyExists),
        "{existing}"
    );
    drop(swap);
    other.lock(Duration::from_secs(10)).unwrap();
    drop(other);
    let short = SwapFile::open(&path, MIB, Reserve::No).unwrap_err();
    assert!(matches!(short, SwapError::Length { found, expected: MIB, .. } if found == 64 * MIB), "{short}");
    SwapFile::open(&path, 64 * MIB, Reserve::No).unwrap().remove().unwrap();
    assert!(!path.exists());
}

#[test]
fn extents_tell_data_from_holes_reserved_or_not() {
    for reserve in [Reserve::No, Reserve::Yes] {
        let path = disk_path(&format!("extents-{reserve:?}"));
        let swap = SwapFile::create(&path, 16 * MIB, reserve).unwrap();
        let reserved = if reserve == Reserve::Yes { 16 * MIB } else { 0 };
        assert!(swap.allocated().unwrap() >= reserved, "{reserve:?}");
        assert_eq!(data(&swap), vec![], "{reserve:?}");
        write(&swap, 3, 2);
        write(&swap, 4095, 1);
        assert_eq!(data(&swap), vec![(3 * PAGE, 2 * PAGE), (4095 * PAGE, PAGE)], "{reserve:?}");
        assert_eq!(swap.read_page(4).unwrap().bytes(), [7; PAGE_SIZE]);
        swap.punch(3 * PAGE, PAGE).unwrap();
        assert_eq!(swap.read_page(3).unwrap().bytes(), [0; PAGE_SIZE]);
        assert_eq!(data(&swap), vec![(4 * PAGE, PAGE), (4095 * PAGE, PAGE)], "{reserve:?}");
        swap.punch(0, 16 * MIB).unwrap();
        assert_eq!(data(&swap), vec![], "{reserve:?}");
        assert!(swap.allocated().unwrap() >= reserved, "{reserve:?}: the reservation stays");
        swap.remove().unwrap();
    }
}

#[test]
fn more_extents_than_one_batch_are_all_found() {
    let path = disk_path("batches");
    let swap = SwapFile::create(&path, 16 * MIB, Reserve::No).unwrap();
    let pages: Vec<u64> = (0..1300).map(|i| i * 3 + 1).collect();
    pages.iter().for_each(|page| write(&swap, *page, 1));
    let expected: Vec<_> = pages.iter().map(|page| (page * PAGE, PAGE)).collect();
    assert_eq!(data(&swap), expected);
    let mut by_seek = Vec::new();
    crate::ram::DataRuns::new(swap.as_fd(), swap.len()).for_each(|run| by_seek.push(run.unwrap()));
    assert_eq!(by_seek.iter().map(|run| (run.start, run.end - run.start)).collect::<Vec<_>>(), expected);
    swap.remove().unwrap();
}

#[test]
fn too_little_space_to_reserve_leaves_nothing_behind() {
    let path = disk_path("space");
    let len = (fs_free(path.parent().unwrap()).unwrap() + 64 * MIB).next_multiple_of(MIB);
    let refused = SwapFile::create(&path, len, Reserve::Yes).unwrap_err();
    assert!(matches!(refused, SwapError::NoSpace { needed, .. } if needed == len), "{refused}");
    assert!(!path.exists());
}

#[test]
fn a_file_system_in_memory_is_refused() {
    let path = PathBuf::from(format!("/dev/shm/pagoda-sys-test-{}", std::process::id()));
    let refused = SwapFile::create(&path, MIB, Reserve::No).unwrap_err();
    // Before Linux 6.6 tmpfs had no O_DIRECT.
    assert!(matches!(refused, SwapError::InMemory { .. } | SwapError::NoDirectIo { .. }), "{refused}");
    assert!(!path.exists());
}

#[test]
fn a_full_disk_is_an_error_of_the_write_alone() {
    let path = disk_path("limited");
    let swap = SwapFile::create(&path, MIB, Reserve::No).unwrap();
    let mut ring = Ring::new(4).unwrap();
    ring.set_buffers(Buffers::new(&[(1, PAGE_SIZE)]).unwrap()).unwrap();
    let full: OwnedFd = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into();
    let file = ring.add_file(full.as_fd()).unwrap();
    let id = ring.take_buffer(PAGE_SIZE).unwrap();
    ring.write(file, 0, crate::ring::BufferSlice { id, offset: 0, len: PAGE as u32 }, 1).unwrap();
    ring.submit_and_wait(1, None).unwrap();
    let results: Vec<_> = ring.completions().map(|completion| completion.result).collect();
    assert_eq!(results, [Err(Errno::NOSPC)]);
    swap.remove().unwrap();
}
