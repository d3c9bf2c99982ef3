//! Arrivals against a naive mirror, and what their files leave to the next daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use pagoda_core::chance::Chance;
use pagoda_core::units::ChunkCount;

use super::*;

const CHUNKS: u32 = 3;
const PAGES: u64 = CHUNKS as u64 * 256;
const AT_ONCE: Duration = Duration::ZERO;

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        // On a disk, for direct I/O.
        let dir = PathBuf::from(format!("/var/tmp/pagoda-arrivals-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn files(&self) -> ArrivalFiles {
        ArrivalFiles::beside(&self.0.join("vm.1.swap"))
    }

    fn create(&self) -> Arc<Arrivals> {
        Arrivals::create(self.files(), ChunkCount(CHUNKS)).unwrap()
    }

    fn open(&self) -> Arc<Arrivals> {
        Arrivals::open(self.files(), ChunkCount(CHUNKS)).unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(first: u64, len: u16) -> Pages {
    let first = PageIdx(first);
    Pages { chunk: first.chunk(), run: pagoda_core::bits::Run { start: first.index_in_chunk(), len } }
}

fn filled(byte: u8, len: u16) -> Vec<u8> {
    vec![byte; usize::from(len) * PAGE_SIZE as usize]
}

fn read(arrivals: &Arrivals, page: u64) -> Result<Content, Errno> {
    let mut out = [1; PAGE_SIZE as usize];
    arrivals.read_now(PageIdx(page), &mut out, AT_ONCE).map(|()| out)
}

/// Pages of which the file has content.
fn pages_with_content(arrivals: &Arrivals) -> u64 {
    let mut bytes = 0;
    arrivals.content().data_extents(&mut |_, len| bytes += len).unwrap();
    bytes / PAGE_SIZE
}

fn map_of(pages: &BTreeSet<u64>) -> Vec<PageSet> {
    let mut map = vec![PageSet::EMPTY; CHUNKS as usize];
    pages.iter().map(|page| PageIdx(*page)).for_each(|page| map[page.chunk().as_usize()].set(page.index_in_chunk()));
    map
}

fn flat(pages: &[Pages]) -> Vec<u64> {
    pages.iter().flat_map(|pages| (pages.first().0..).take(usize::from(pages.run.len))).collect()
}

#[test]
fn the_files_have_the_name_of_the_vm_whatever_that_is() {
    let files = ArrivalFiles::beside(&PathBuf::from("/swap/web.1.swap"));
    assert_eq!(files.content, PathBuf::from("/swap/web.1.arrival"));
    assert_eq!(files.here, PathBuf::from("/swap/web.1.arrival-here"));
    assert_eq!(files.held, PathBuf::from("/swap/web.1.arrival-held"));
}

#[test]
fn what_no_source_sends_is_refused() {
    let dir = Dir::new("refused");
    let arrivals = dir.create();
    arrivals.begin(&[PageSet::FULL; CHUNKS as usize]).unwrap();
    let whole = |chunk, start, len| Pages { chunk: ChunkIdx(chunk), run: pagoda_core::bits::Run { start, len } };
    for pages in [whole(3, 0, 1), whole(u32::MAX, 0, 1), whole(0, 200, 57), whole(0, 0, 0), whole(0, 255, u16::MAX)] {
        let put = arrivals.put(pages, &filled(1, pages.run.len)).unwrap_err();
        assert_eq!(put.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(arrivals.put_zeros(pages).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
    for len in [0, 4095, 4096, 8191, 8193] {
        let put = arrivals.put(whole(1, 7, 2), &vec![1; len]).unwrap_err();
        assert_eq!(put.kind(), io::ErrorKind::InvalidInput);
    }
    assert_eq!(arrivals.missing_count().0, PAGES);
    assert!(arrivals.begin(&[PageSet::FULL; 2]).is_err(), "a VM of another size");
}

#[test]
fn nothing_is_taken_before_the_vm_begins_and_it_begins_once() {
    let dir = Dir::new("begins");
    let arrivals = dir.create();
    assert!(arrivals.put(run(3, 2), &filled(1, 2)).unwrap().is_empty() && arrivals.is_whole());
    let missing = map_of(&(0..10).collect());
    arrivals.begin(&missing).unwrap();
    // What failed behind it is tried again.
    arrivals.begin(&missing).unwrap();
    arrivals.put(run(3, 2), &filled(2, 2)).unwrap();
    assert!(arrivals.begin(&missing).is_err(), "a page would come twice");
    assert_eq!(read(&arrivals, 4), Ok([2; 4096]));
    assert_eq!(read(&arrivals, 5), Err(Errno::TIMEDOUT));
}

#[test]
fn content_of_a_page_that_is_not_here_is_none_for_the_next_daemon() {
    let dir = Dir::new("leftovers");
    let arrivals = dir.create();
    arrivals.begin(&map_of(&(0..20).collect())).unwrap();
    arrivals.put(run(0, 2), &filled(1, 2)).unwrap();
    // A daemon that is killed between the two writes.
    let mut buffer = pagoda_sys::swapfile::DirectBuffer::new(4096);
    buffer.fill(9);
    [5, 300].iter().for_each(|page| arrivals.content().write_pages(*page, &buffer).unwrap());
    drop(arrivals);
    let arrivals = dir.open();
    assert_eq!(arrivals.missing_count().0, 18);
    assert_eq!(read(&arrivals, 5), Err(Errno::TIMEDOUT));
    assert_eq!(arrivals.put_zeros(run(5, 1)).unwrap(), PageSet::single(5));
    assert_eq!((read(&arrivals, 5), read(&arrivals, 1)), (Ok([0; 4096]), Ok([1; 4096])));
    assert_eq!(pages_with_content(&arrivals), 2);
    drop(arrivals);
    std::fs::write(&dir.files().here, b"another file").unwrap();
    assert!(Arrivals::open(dir.files(), ChunkCount(CHUNKS)).is_err());
    assert!(Arrivals::open(dir.files(), ChunkCount(CHUNKS + 1)).is_err());
}

#[test]
fn space_is_given_back_and_the_files_go_with_the_last_page() {
    let dir = Dir::new("space");
    let arrivals = dir.create();
    arrivals.begin(&map_of(&(0..512).collect())).unwrap();
    arrivals.put(run(0, 256), &filled(1, 256)).unwrap();
    let wait_for = |is_so: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !is_so() {
            arrivals.clean();
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
    };
    arrivals.drop_pages(ChunkIdx(0), PageSet::range(16, 240)).unwrap();
    wait_for(&|| pages_with_content(&arrivals) == 16);
    assert_eq!(read(&arrivals, 15), Ok([1; 4096]));
    arrivals.drop_pages(ChunkIdx(0), PageSet::FULL).unwrap();
    wait_for(&|| pages_with_content(&arrivals) == 0);
    assert!(dir.files().exist(), "it lacks a chunk");
    arrivals.clear().unwrap();
    assert_eq!(flat(&arrivals.take_dropped()), (256..512).collect::<Vec<_>>());
    wait_for(&|| dir.files().paths().iter().all(|path| !path.exists()));
    assert!(arrivals.put(run(300, 1), &filled(1, 1)).unwrap().is_empty());
}

/// A page is either held or not, here or missing; who waits for it hears of it once.
#[derive(Default)]
struct Mirror {
    held: BTreeSet<u64>,
    here: BTreeMap<u64, u8>,
    waited: BTreeSet<u64>,
    asked: BTreeSet<u64>,
    dropped: BTreeSet<u64>,
    came: BTreeSet<u64>,
}

impl Mirror {
    fn missing(&self) -> BTreeSet<u64> {
        self.held.iter().filter(|page| !self.here.contains_key(page)).copied().collect()
    }

    fn check(&self, arrivals: &Arrivals) {
        let expected = map_of(&self.missing());
        let found = arrivals.missing();
        for (chunk, pages) in (0..).map(ChunkIdx).zip(expected) {
            let of = found.iter().find(|(other, _)| *other == chunk).map_or(PageSet::EMPTY, |(_, pages)| *pages);
            assert_eq!(of, pages, "{chunk:?}");
            assert_eq!(arrivals.missing_of(chunk), pages);
        }
        assert_eq!(arrivals.held_count(), self.held.len() as u64);
        assert_eq!(arrivals.is_whole(), self.missing().is_empty());
    }

    fn put(&mut self, pages: Pages, byte: u8, new: PageSet) {
        let missing = self.missing();
        let expected: Vec<u64> = flat(&[pages]).into_iter().filter(|page| missing.contains(page)).collect();
        let found: Vec<u64> = new.iter().map(|index| pages.chunk.page(index).0).collect();
        assert_eq!(found, expected);
        for page in expected {
            self.here.insert(page, byte);
            self.came.insert(page);
        }
    }
}

#[test]
fn arrivals_are_what_a_naive_mirror_says() {
    for seed in 0..10 {
        let mut chance = Chance::new(seed);
        let dir = Dir::new(&format!("mirror-{seed}"));
        let mut arrivals = dir.create();
        let held = (0..PAGES).filter(|_| chance.per_mille(600)).collect();
        let mut mirror = Mirror { held, ..Mirror::default() };
        arrivals.begin(&map_of(&mirror.held)).unwrap();
        let mut deliveries = VecDeque::new();
        for _ in 0..300 {
            let first = chance.below(PAGES);
            let len = (1 + chance.below(12)).min(256 - first % 256) as u16;
            let (pages, set) = (run(first, len), PageSet::range((first % 256) as u8, len));
            match chance.below(12) {
                0..4 => {
                    let byte = 1 + chance.below(255) as u8;
                    let new = arrivals.put(pages, &filled(byte, len)).unwrap();
                    mirror.put(pages, byte, new);
                }
                4 => {
                    let new = if chance.per_mille(500) {
                        arrivals.put_zeros(pages).unwrap()
                    } else {
                        arrivals.put(pages, &filled(0, len)).unwrap()
                    };
                    mirror.put(pages, 0, new);
                }
                5..7 => {
                    let missing = mirror.missing();
                    let wanted: BTreeSet<u64> =
                        flat(&[pages]).into_iter().filter(|page| missing.contains(page)).collect();
                    let found = arrivals.want(pages.chunk, set);
                    assert_eq!(found, map_of(&wanted)[pages.chunk.as_usize()]);
                    mirror.waited.extend(wanted);
                }
                7 => {
                    let missing = mirror.missing();
                    for page in flat(&[pages]) {
                        mirror.held.remove(&page);
                        mirror.waited.remove(&page);
                        mirror.asked.remove(&page);
                        if missing.contains(&page) {
                            mirror.dropped.insert(page);
                        }
                    }
                    arrivals.drop_pages(pages.chunk, set).unwrap();
                }
                8 => {
                    let demands: BTreeSet<u64> = flat(&arrivals.take_demands()).into_iter().collect();
                    let missing = mirror.missing();
                    mirror.waited.retain(|page| missing.contains(page));
                    mirror.asked.retain(|page| missing.contains(page));
                    assert_eq!(demands, &mirror.waited - &mirror.asked);
                    mirror.asked.extend(demands);
                }
                9 => {
                    arrivals.forget_demands();
                    mirror.asked.clear();
                }
                10 => {
                    let dropped: BTreeSet<u64> = flat(&arrivals.take_dropped()).into_iter().collect();
                    assert_eq!(dropped, std::mem::take(&mut mirror.dropped));
                    let came = arrivals.take_in(&mut deliveries);
                    let came: BTreeSet<u64> =
                        came.iter().flat_map(|(chunk, pages)| pages.iter().map(|index| chunk.page(index).0)).collect();
                    assert_eq!(came, std::mem::take(&mut mirror.came));
                    for Delivery { page, content } in deliveries.drain(..) {
                        let byte = mirror.here[&page.0];
                        assert!(content.iter().all(|found| *found == byte), "{page:?}");
                    }
                }
                _ if chance.per_mille(100) => {
                    drop(arrivals);
                    arrivals = dir.open();
                    let Mirror { held, here, .. } = std::mem::take(&mut mirror);
                    mirror = Mirror { held, here, ..Mirror::default() };
                    deliveries.clear();
                }
                _ => {
                    for (page, byte) in mirror.here.iter().filter(|(page, _)| mirror.held.contains(page)).take(20) {
                        assert_eq!(read(&arrivals, *page), Ok([*byte; 4096]), "page {page}");
                    }
                }
            }
            mirror.check(&arrivals);
        }
        for page in mirror.held.iter().filter(|page| mirror.here.contains_key(page)) {
            assert_eq!(read(&arrivals, *page), Ok([mirror.here[page]; 4096]), "page {page}");
        }
    }
}

/// Threads of two connections bring the same pages, and one copy counts.
#[test]
fn a_page_that_two_threads_bring_comes_once() {
    let dir = Dir::new("threads");
    let arrivals = dir.create();
    arrivals.begin(&[PageSet::FULL; CHUNKS as usize]).unwrap();
    let bring = |byte: u8| {
        let arrivals = Arc::clone(&arrivals);
        std::thread::spawn(move || {
            let mut chance = Chance::new(byte.into());
            let mut mine = BTreeSet::new();
            while !arrivals.is_whole() {
                let first = chance.below(PAGES);
                let len = (1 + chance.below(30)).min(256 - first % 256) as u16;
                let pages = run(first, len);
                let new = arrivals.put(pages, &filled(byte, len)).unwrap();
                mine.extend(new.iter().map(|index| pages.chunk.page(index).0));
            }
            mine
        })
    };
    let threads: Vec<_> = [1, 2, 3].map(bring).into();
    let mut all = BTreeMap::new();
    for (byte, thread) in (1..).zip(threads) {
        for page in thread.join().unwrap() {
            assert_eq!(all.insert(page, byte), None, "page {page} came twice");
        }
    }
    assert_eq!(all.len() as u64, PAGES);
    all.iter().for_each(|(page, byte)| assert_eq!(read(&arrivals, *page), Ok([*byte; 4096])));
}
