//! Several streams bring pages in rounds, QEMU touches some, and then every page is looked for: a naive map knows its content.

use std::process::Command;

use pagoda_sys::process::own_uid;
use pagoda_sys::swapfile::Reserve;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

const MIB: u64 = CHUNK_SIZE;
/// Bytes of each of the VM's regions.
const REGIONS: [u64; 2] = [8 * MIB, 4 * MIB];
const CHUNKS: usize = 12;
const PAGES: u64 = 256 * CHUNKS as u64;
const STREAMS: usize = 3;
const STEPS: u32 = 150;

/// What each page of a chunk holds; 0: zeros.
type Truth = [u64; 256];

/// xorshift64*, as good as needed to choose what comes next.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

/// The files of a VM, with the daemon's own descriptors of them.
struct Files {
    ram: Vec<RamFile>,
    swap: SwapFile,
}

impl Files {
    fn new(name: &str) -> Files {
        let path = format!("/var/tmp/pagoda-arriving-{}-{name}", std::process::id());
        let _ = std::fs::remove_file(&path);
        let swap = SwapFile::create(path.as_ref(), REGIONS.iter().sum(), Reserve::No).unwrap();
        Files { ram: REGIONS.map(|len| RamFile::create(name, len, own_uid()).unwrap()).into(), swap }
    }

    fn arriving(&self, dram: u64) -> Arriving {
        let ram = self.ram.iter().map(|ram| ram.duplicate().unwrap()).collect();
        Arriving::new(ram, self.swap.duplicate().unwrap(), PageCount(dram)).unwrap()
    }

    /// The RAM file of a page, and where the page is in it.
    fn of_page(&self, page: u64) -> (&RamFile, u64) {
        let at = page * PAGE_SIZE;
        if at < REGIONS[0] { (&self.ram[0], at) } else { (&self.ram[1], at - REGIONS[0]) }
    }

    fn read(&self, page: u64, place: &Located) -> Vec<u8> {
        let mut content = vec![0; PAGE_SIZE as usize];
        let index = (page % 256) as u8;
        if place.ram.contains(index) {
            let (ram, at) = self.of_page(page);
            assert_eq!(rustix::io::pread(ram, &mut content[..], at).unwrap(), content.len());
        } else if place.swap.contains(index) {
            content.copy_from_slice(self.swap.read_page(page).unwrap().bytes());
        }
        content
    }

    /// The pages that exist in the RAM files, and those that have a block.
    fn existing(&self) -> (Vec<u64>, Vec<u64>) {
        let pages = |from: u64, end: u64| from / PAGE_SIZE..end / PAGE_SIZE;
        let mut in_ram = Vec::new();
        for (ram, start) in self.ram.iter().zip([0, REGIONS[0]]) {
            for run in ram.data_runs().map(Result::unwrap) {
                in_ram.extend(pages(start + run.start, start + run.end));
            }
        }
        let mut in_swap = Vec::new();
        self.swap.data_extents(&mut |at, len| in_swap.extend(pages(at, at + len))).unwrap();
        (in_ram, in_swap)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        std::fs::remove_file(self.swap.path()).unwrap();
    }
}

fn page(value: u64) -> Vec<u8> {
    // A page that has something in its last byte alone is not zeros.
    let mut page = vec![0; PAGE_SIZE as usize];
    if !value.is_multiple_of(5) {
        page[..8].copy_from_slice(&value.to_le_bytes());
    } else if value != 0 {
        page[4088..].copy_from_slice(&value.to_be_bytes());
    }
    page
}

fn run(chunk: usize, start: u8, len: u16) -> Pages {
    Pages { chunk: ChunkIdx(chunk as u32), run: Run { start, len } }
}

/// One stream: the chunks of this number, modulo the number of streams.
fn stream(arriving: &Arriving, stream: usize, seed: u64) -> Vec<(usize, Truth)> {
    let mut chance = Chance(seed * 31 + stream as u64 + 1);
    let mut truth: Vec<(usize, Truth)> = (stream..CHUNKS).step_by(STREAMS).map(|chunk| (chunk, [0; 256])).collect();
    for _ in 0..STEPS {
        let nth = chance.below(truth.len() as u64) as usize;
        let (chunk, truth) = &mut truth[nth];
        let start = chance.below(256) as u8;
        let len = 1 + chance.below(256 - u64::from(start)) as u16;
        let held = &mut truth[usize::from(start)..][..usize::from(len)];
        if chance.below(4) == 0 {
            held.fill(0);
            arriving.zero(run(*chunk, start, len)).unwrap();
        } else {
            let zeros = 1 + chance.below(4);
            held.fill_with(|| chance.below(1 << 40) * u64::from(chance.below(4) < zeros));
            let content: Vec<u8> = held.iter().flat_map(|value| page(*value)).collect();
            arriving.store(run(*chunk, start, len), &content).unwrap();
        }
        assert!(arriving.counts().0.0 <= arriving.dram_max);
    }
    truth
}

fn check(seed: u64, dram: u64) {
    let files = Files::new(&format!("{seed}-{dram}"));
    let arriving = files.arriving(dram);
    let mut truth = [[0; 256]; CHUNKS];
    std::thread::scope(|scope| {
        let arriving = &arriving;
        let streams: Vec<_> = (0..STREAMS).map(|number| scope.spawn(move || stream(arriving, number, seed))).collect();
        for (chunk, held) in streams.into_iter().flat_map(|stream| stream.join().unwrap()) {
            truth[chunk] = held;
        }
    });
    let places: Vec<Places> = arriving.chunks.iter().map(|chunk| *chunk.lock().unwrap()).collect();
    // QEMU touches what it has no page of.
    let mut chance = Chance(seed + 99);
    for _ in 0..200 {
        let touched = chance.below(PAGES);
        if !places[touched as usize / 256].ram.contains((touched % 256) as u8) {
            let (ram, at) = files.of_page(touched);
            ram.write(at, &page(chance.below(2))).unwrap();
        }
    }
    let found = arriving.finish().unwrap();
    let (mut in_ram, mut in_swap) = (Vec::new(), Vec::new());
    for number in 0..PAGES {
        let (chunk, index) = (number as usize / 256, (number % 256) as u8);
        let (place, value) = (&found[chunk], truth[chunk][usize::from(index)]);
        assert_eq!(files.read(number, place), page(value), "page {number} of seed {seed}");
        assert_eq!(place.ram.contains(index) || place.swap.contains(index), value != 0, "zeros are nowhere");
        in_ram.extend(place.ram.contains(index).then_some(number));
        in_swap.extend(place.swap.contains(index).then_some(number));
    }
    assert_eq!(arriving.counts(), (PageCount(in_ram.len() as u64), PageCount(in_swap.len() as u64)));
    assert_eq!((dram > 0, dram < PAGES), (!in_ram.is_empty(), !in_swap.is_empty()), "both are tested");
    assert_eq!(files.existing(), (in_ram, in_swap));
    assert!(matches!(arriving.zero(run(0, 0, 1)), Err(ArriveError::Finished)));
}

#[test]
fn every_page_is_where_it_is_said_to_be() {
    for seed in 0..6 {
        for dram in [0, 700, PAGES] {
            check(seed, dram);
        }
    }
}

#[test]
fn what_a_peer_sends_is_checked() {
    let files = Files::new("hostile");
    let arriving = files.arriving(PAGES);
    let outside = |pages| assert!(matches!(arriving.zero(pages), Err(ArriveError::Outside { .. })), "{pages:?}");
    outside(run(CHUNKS, 0, 1));
    outside(run(u32::MAX as usize, 0, 1));
    outside(run(0, 0, 0));
    outside(run(0, 255, 2));
    outside(run(0, 1, u16::MAX));
    let short = arriving.store(run(0, 0, 2), &[1; 4096]);
    assert!(matches!(short, Err(ArriveError::Length { bytes: 4096, pages: 2 })));
    arriving.store(run(11, 255, 1), &[1; 4096]).unwrap();
    assert_eq!(arriving.counts(), (PageCount(1), PageCount(0)));
    let found = arriving.finish().unwrap();
    assert_eq!((found.len(), found[11].ram), (CHUNKS, PageSet::single(255)));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let files = Files::new("files");
    let refused = |ram: &[&RamFile], part: &str| {
        let ram = ram.iter().map(|ram| ram.duplicate().unwrap()).collect();
        let why = Arriving::new(ram, files.swap.duplicate().unwrap(), PageCount(1)).unwrap_err().to_string();
        assert!(why.contains(part), "{why}");
    };
    refused(&[&files.ram[0]], "8 MiB of RAM");
    refused(&[&files.ram[0], &RamFile::create("odd", MIB + PAGE_SIZE, own_uid()).unwrap()], "1052672 bytes");
    let mut buffer = DirectBuffer::new(PAGE_SIZE as usize);
    buffer.fill(1);
    files.swap.write_pages(5, &buffer).unwrap();
    refused(&[&files.ram[0], &files.ram[1]], "bytes already");
}

#[test]
fn a_page_that_somebody_takes_away_is_noticed() {
    let files = Files::new("changed");
    let arriving = files.arriving(PAGES);
    arriving.store(run(9, 3, 2), &[1; 8192]).unwrap();
    files.ram[1].punch(MIB + 3 * PAGE_SIZE, PAGE_SIZE).unwrap();
    let why = arriving.finish().unwrap_err().to_string();
    assert!(why.starts_with("RAM file 1 has 4096 bytes, and 8192 bytes"), "{why}");
}

#[test]
fn a_full_disk_says_what_to_do() {
    let files = Files::new("full");
    let why = of_swap(&files.swap, "write to", rustix::io::Errno::NOSPC).to_string();
    assert!(why.starts_with("/var/tmp/pagoda-arriving-") && why.contains("free some space"), "{why}");
}

/// A process of the tests that is one whose files may not be long.
const CHILD: &str = "PAGODA_TEST_SHORT_FILES";

#[test]
fn a_disk_that_fails_ends_it() {
    if std::env::var_os(CHILD).is_none() {
        // In a process of its own, for the limit counts for all its threads. Who ignores the signal gets the error.
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "arriving::tests::a_disk_that_fails_ends_it", "--nocapture"]).env(CHILD, "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let files = Files::new("fails");
    let arriving = files.arriving(0);
    arriving.store(run(0, 0, 1), &[1; 4096]).unwrap();
    setrlimit(Resource::Fsize, Rlimit { current: Some(MIB), ..getrlimit(Resource::Fsize) }).unwrap();
    arriving.store(run(0, 1, 1), &[1; 4096]).unwrap();
    let why = arriving.store(run(2, 0, 1), &[1; 4096]).unwrap_err().to_string();
    let expected = format!("write to {}: File too large", files.swap.path().display());
    assert!(why.starts_with(&expected), "{why}");
    assert!(matches!(arriving.store(run(0, 0, 1), &[1; 4096]), Err(ArriveError::Failed)));
    assert!(matches!(arriving.zero(run(0, 0, 1)), Err(ArriveError::Failed)));
    assert!(matches!(arriving.finish(), Err(ArriveError::Failed)));
}
