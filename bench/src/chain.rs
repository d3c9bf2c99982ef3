//! A chain of 16 snapshots behind a full one, with 64 MiB written before each: the room that it takes, and what reading the last of
//! them costs, against a single snapshot of the same content.
//!
//! Images alone, without a VM: made as an engine makes them, and read as a restored VM's tier reads them, past the page cache. What
//! is written lies in stretches of 2 MiB, or here and there in single pages, which is the worst there is: then consecutive pages
//! are in different images. Chain and single image are read in turns.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_api::types::{Launch, VmSpec};
use pagoda_core::bits::{PageSet, Run};
use pagoda_core::chance::Chance;
use pagoda_core::fault::Pages;
use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkIdx, PAGE_SIZE, PageCount, PageIdx};
use pagoda_image::{Image, ImageId, Manifest, Qemu, Stage, State, Store, Taken};
use pagoda_sys::swapfile::DirectBuffer;
use testkit::results::report::{Bar, Report};

use super::{Setup, svg};

const SNAPSHOTS: u64 = 16;
const WRITTEN: Bytes = Bytes::from_mib(64);
/// The VM's memory, and that of a quick run.
const MEMORY: [Bytes; 2] = [Bytes::from_mib(1024), Bytes::from_mib(256)];
/// Pages of a stretch.
const STRETCH: u64 = 512;
/// As many pages are read together by a restored VM's tier.
const JOB: u16 = 64;
/// Single pages that are read, in a random order.
const SINGLES: usize = 4000;
const PAGE: usize = PAGE_SIZE as usize;
/// The bars of the issue, as ratios of a chain to a single image.
const SPACE_MAX: f64 = 1.02;
const READ_MAX: f64 = 1.1;
/// How the writes of a VM lie.
const WAYS: [&str; 2] = ["in stretches", "here and there"];

/// What was measured of one way to write.
#[derive(Default)]
struct Measured {
    space: Vec<f64>,
    /// ms, of the chain and of a single image.
    whole: [Vec<f64>; 2],
    /// us a page: when the image has just been opened, and when all its chunks have been looked at.
    first: [Vec<f64>; 2],
    single: [Vec<f64>; 2],
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The disk's; an image does not hold what was written.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let memory = MEMORY[usize::from(setup.quick)];
    let mut measured = WAYS.map(|_| Measured::default());
    for round in 0..setup.rounds {
        for (way, measured) in measured.iter_mut().enumerate() {
            eprintln!("chain: round {}, {}", round + 1, WAYS[way]);
            let dir = setup.dir.join("chain");
            let _ = std::fs::remove_dir_all(&dir);
            measure(&dir, memory.pages_floor(), (way, round as u64), measured)?;
            std::fs::remove_dir_all(&dir).context("remove the images")?;
        }
    }
    let mut report = setup.report("chain");
    for (way, Measured { space, whole, first, single }) in WAYS.iter().zip(&measured) {
        let name = format!("{SNAPSHOTS} snapshots of {memory}, {WRITTEN} written before each {way}");
        report.single(&format!("{name}: room by what was written"), "x", space, Bar::AtMost(SPACE_MAX));
        let read = [
            ("all of the last one", "ms", whole),
            ("single pages of it", "us", single),
            ("the first ones", "us", first),
        ];
        for (what, unit, [chain, one]) in read {
            report.pair(
                &format!("{name}, {what} are read: one of the same content"),
                unit,
                chain,
                one,
                Bar::AtMost(READ_MAX),
            );
        }
    }
    Ok((report, plot(&measured)))
}

fn plot(measured: &[Measured; 2]) -> String {
    let group = |(way, measured): (&&str, &Measured)| {
        ((**way).to_owned(), measured.whole.iter().map(|side| svg::Bar::of(side)).collect())
    };
    svg::bar_chart(&svg::BarChart {
        title: "Reading all of a snapshot".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: ["last of 16", "a single one"].map(str::to_owned).to_vec(),
        groups: WAYS.iter().zip(measured).map(group).collect(),
    })
}

fn measure(dir: &Path, pages: PageCount, (way, seed): (usize, u64), measured: &mut Measured) -> Result<()> {
    let mut chance = Chance::new(seed);
    let mut memory: Vec<u64> = (0..pages.0).map(|_| chance.draw() | 1).collect();
    let store = open(&dir.join("all"))?;
    let mut own = Bytes::ZERO;
    for nth in 0..=SNAPSHOTS {
        let mut is_written = vec![nth == 0; memory.len()];
        let mut left = if nth == 0 { 0 } else { WRITTEN.pages_floor().0 };
        while left > 0 {
            let len = if way == 0 { STRETCH } else { 1 };
            let first = chance.below(pages.0 / len) * len;
            for page in first..first + len {
                if !std::mem::replace(&mut is_written[page as usize], true) {
                    memory[page as usize] = chance.draw() | 1;
                    left = left.saturating_sub(1);
                }
            }
        }
        let (id, parent) = (ImageId(u128::from(nth) + 1), nth.checked_sub(1).map(|_| ImageId(u128::from(nth))));
        take(&store, (id, parent), &memory, &is_written)?;
        if nth > 0 {
            own += store.own_bytes(id)?;
        }
    }
    measured.space.push(own.0 as f64 / (SNAPSHOTS * WRITTEN.0) as f64);
    let single = ImageId(1000);
    take(&store, (single, None), &memory, &vec![true; memory.len()])?;
    let images = [ImageId(u128::from(SNAPSHOTS) + 1), single];
    let order: Vec<PageIdx> = (0..SINGLES).map(|_| PageIdx(chance.below(pages.0))).collect();
    for turn in 0..2 {
        // Each is first once.
        for side in [turn, 1 - turn] {
            let image = store.image(images[side])?;
            measured.first[side].push(read_single(&image, &order, &memory)?);
            measured.whole[side].push(read_whole(&image, &memory)?);
            measured.single[side].push(read_single(&image, &order, &memory)?);
        }
    }
    Ok(())
}

fn open(dir: &PathBuf) -> Result<Store> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).context("make the directory of images")?;
    Ok(Store::open(dir)?)
}

/// Makes an image that holds this memory: what was written is copied, the rest is its parent's.
fn take(store: &Store, (id, parent): (ImageId, Option<ImageId>), memory: &[u64], is_written: &[bool]) -> Result<()> {
    let (part, prepared) = store.create_on(parent, id, PageCount(memory.len() as u64))?;
    let state = part.write_state(&b"QEVM: of no device"[..])?;
    part.begin(manifest(id, parent, state, memory.len() as u64))?;
    let mut writer = prepared.commit()?;
    for chunk in writer.ledger().pages().chunks_ceil().iter() {
        let first = chunk.first_page().0 as usize;
        let written: PageSet = (0..=u8::MAX).filter(|index| is_written[first + usize::from(*index)]).collect();
        for (pages, is_copied) in [(written, true), (PageSet::FULL - written, false)] {
            for run in pages.runs() {
                let pages = Pages { chunk, run };
                let taken = if is_copied {
                    writer.preserve(pages, &content_of(memory, chunk, run))
                } else {
                    writer.inherit(pages)
                };
                ensure!(taken == Taken::Yes, "the image is lost: {:?}", writer.lost());
            }
        }
    }
    let ledger = writer.ledger().clone();
    drop(writer);
    ledger.mark_filled()?;
    Ok(ledger.make_durable()?)
}

fn content_of(memory: &[u64], chunk: ChunkIdx, run: Run) -> Vec<u8> {
    let first = chunk.page(run.start).0 as usize;
    memory[first..first + usize::from(run.len)].iter().flat_map(|tag| page_of(*tag)).collect()
}

fn page_of(tag: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let (words, _) = page.as_chunks_mut::<8>();
    words.iter_mut().for_each(|word| *word = tag.to_le_bytes());
    page
}

fn manifest(id: ImageId, parent: Option<ImageId>, state: State, pages: u64) -> Manifest {
    Manifest {
        id,
        vm: "bench".into(),
        name: format!("n{}", id.0),
        taken_unix_ms: 0,
        boot_id: "01234567-89ab-cdef-0123-456789abcdef".into(),
        stage: Stage::Begun,
        why: None,
        regions: vec![pages * PAGE_SIZE],
        spec: VmSpec::default(),
        launch: Launch::default(),
        qemu: Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into(), cpu: None },
        state,
        pause_us: None,
        running: true,
        disks: Vec::new(),
        parent,
        inherited_pages: None,
        automatic: false,
        imported: None,
    }
}

/// Reads all of an image in order, and returns how long that took in ms.
fn read_whole(image: &Image, memory: &[u64]) -> Result<f64> {
    let mut buffer = DirectBuffer::new(usize::from(JOB) * PAGE);
    let began = Instant::now();
    let mut wrong = 0;
    for chunk in image.chunks().iter() {
        for start in (0..CHUNK_PAGES as u16).step_by(usize::from(JOB)) {
            image.read_blocks(chunk, PageSet::range(start as u8, JOB), &mut buffer)?;
            wrong += u64::from(buffer[..8] != memory[chunk.page(start as u8).0 as usize].to_le_bytes());
        }
    }
    ensure!(wrong == 0, "{wrong} wrong pages");
    Ok(began.elapsed().as_secs_f64() * 1e3)
}

/// Reads pages one by one, and returns the microseconds that a page took.
fn read_single(image: &Image, order: &[PageIdx], memory: &[u64]) -> Result<f64> {
    let mut buffer = DirectBuffer::new(PAGE);
    let began = Instant::now();
    for page in order {
        image.read_blocks(page.chunk(), PageSet::single(page.index_in_chunk()), &mut buffer)?;
        ensure!(buffer[..8] == memory[page.0 as usize].to_le_bytes(), "page {} is wrong", page.0);
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / order.len() as f64)
}
