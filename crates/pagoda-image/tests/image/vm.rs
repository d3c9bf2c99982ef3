//! A VM of 512 pages with an image: the naive reference, and the steps of a daemon and an engine.

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::chance::Chance;
use pagoda_core::fault::Pages;
use pagoda_core::units::{Bytes, CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_image::{
    ChunkContent, DiskFile, Image, ImageError, ImageId, Manifest, Part, Qemu, Stage, State, Store, Taken, Writer,
};

pub const ID: ImageId = ImageId(0x1b);
pub const BOOT: &str = "0f4dcb4a-2e0c-4b62-a50f-0b6a0a2f5c11";
pub const NEXT_BOOT: &str = "11111111-2e0c-4b62-a50f-0b6a0a2f5c11";
pub const CHUNKS: u32 = 2;
pub const PAGES: u64 = CHUNKS as u64 * CHUNK_PAGES;
pub const STATE: &[u8] = b"QEVM: the state of some device";
const PAGE: usize = PAGE_SIZE as usize;

/// What each page holds: a number that stands for its content, 0 for zeros.
pub type Memory = Vec<u32>;

/// The content that a number stands for.
pub fn content_of(tag: u32) -> [u8; PAGE] {
    let mut content = [0; PAGE];
    let (words, _) = content.as_chunks_mut::<4>();
    words.iter_mut().for_each(|word| *word = tag.to_le_bytes());
    content
}

pub fn new_memory(chance: &mut Chance) -> Memory {
    (0..PAGES).map(|_| if chance.per_mille(700) { 0 } else { chance.draw() as u32 }).collect()
}

pub fn manifest(state: State) -> Manifest {
    Manifest {
        id: ID,
        vm: "web1".into(),
        name: "one".into(),
        taken_unix_ms: 1_795_881_600_000,
        boot_id: BOOT.into(),
        stage: Stage::Begun,
        why: None,
        regions: vec![PAGES * PAGE_SIZE],
        spec: pagoda_api::types::VmSpec::default(),
        launch: pagoda_api::types::Launch {
            program: "qemu-system-x86_64".into(),
            words: ["-m", "2M"].map(String::from).to_vec(),
            cwd: "/".into(),
            uid: 1000,
            gid: 1000,
            unstartable: Vec::new(),
        },
        qemu: Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into(), cpu: None },
        state,
        pause_us: None,
        running: true,
        disks: vec![DiskFile {
            node: "disk0".into(),
            file: "/a".into(),
            dev: 1,
            ino: 2,
            born_ns: None,
            size: 3,
            mtime_ns: 4,
            layer: None,
        }],
        parent: None,
        inherited_pages: None,
        automatic: false,
        imported: None,
    }
}

/// Up to the moment in which the image exists.
pub fn begin(store: &Store) -> Result<Writer, ImageError> {
    let (part, prepared) = store.create(ID, Bytes(PAGES * PAGE_SIZE).pages_floor())?;
    begin_part(part)?;
    prepared.commit()
}

pub fn begin_part(part: Part) -> Result<(), ImageError> {
    let state = part.write_state(STATE)?;
    part.begin(manifest(state)).map(drop)
}

/// The image takes over a run of pages.
pub fn preserve(writer: &mut Writer, memory: &Memory, first: u64, len: u64) -> Taken {
    let chunk = PageIdx(first).chunk();
    let len = len.min(chunk.last_page().0 + 1 - first);
    let pages = Pages { chunk, run: Run { start: PageIdx(first).index_in_chunk(), len: len as u16 } };
    let tags = &memory[first as usize..(first + len) as usize];
    if tags.iter().all(|tag| *tag == 0) {
        return writer.preserve_zeros(pages);
    }
    let content: Vec<u8> = tags.iter().flat_map(|tag| content_of(*tag)).collect();
    writer.preserve(pages, &content)
}

/// The guest writes pages, each of which the image takes over first; and the image is filled meanwhile. Each write of the guest
/// is told to `written` before the next call of the writer.
pub fn run(writer: &mut Writer, memory: &mut Memory, chance: &mut Chance, written: &mut dyn FnMut(u64, u32)) {
    let mut steps = 0;
    while writer.missing() > 0 && writer.lost().is_none() {
        let first = chance.below(PAGES);
        // Some fills are large, so that it ends.
        let len = if chance.per_mille(300) { 256 } else { chance.within(1, 9) };
        let taken = preserve(writer, memory, first, len);
        if steps > 40 {
            for chunk in 0..CHUNKS {
                let _ = preserve(writer, memory, u64::from(chunk) * CHUNK_PAGES, CHUNK_PAGES);
            }
        }
        if chance.per_mille(500) {
            let tag = if chance.per_mille(200) { 0 } else { chance.draw() as u32 };
            // What is not preserved cannot have been written, unless the image is lost: then the VM goes on.
            assert!(
                taken == Taken::No
                    || !writer.missing_of(PageIdx(first).chunk()).contains(PageIdx(first).index_in_chunk())
            );
            memory[first as usize] = tag;
            written(first, tag);
        }
        steps += 1;
    }
}

/// Every page of the image against what it has to hold; pages that it lacks against the VM.
/// All blocks, some of them and each alone, into memory that is aligned and that is not.
fn check_blocks(image: &Image, chunk: ChunkIdx, blocks: PageSet, expected: &Memory) {
    let some: PageSet = blocks.iter().filter(|index| index % 7 < 4).collect();
    let mut room = vec![0; CHUNK_SIZE as usize + 2 * PAGE];
    let aligned = room.as_ptr().align_offset(PAGE);
    for pages in [blocks, some].into_iter().chain(blocks.iter().map(PageSet::single)) {
        for start in [aligned, aligned + 1] {
            let content = &mut room[start..start + usize::from(pages.count()) * PAGE];
            image.read_blocks(chunk, pages, content).expect("blocks");
            for (index, content) in pages.iter().zip(content.chunks_exact(PAGE)) {
                assert_eq!(content, content_of(expected[chunk.page(index).0 as usize]), "page {index} of {chunk:?}");
            }
        }
    }
    // Pages that have none are not zeros here.
    if let Some(index) = (PageSet::FULL - blocks).first_set() {
        let read = image.read_blocks(chunk, PageSet::single(index), &mut room[..PAGE]);
        assert!(matches!(read, Err(ImageError::Damaged(damage)) if damage.page == Some(chunk.page(index))));
    }
    let found = image.look_at(chunk).expect("its map");
    assert_eq!(PageSet::FULL - found.missing - found.zero, blocks);
}

pub fn check_pages(store: &Store, expected: &Memory, memory: Option<&Memory>) {
    let image = store.image(ID).expect("an image");
    image.check_state().expect("its state");
    let mut chunk_content = vec![0; CHUNK_SIZE as usize];
    let mut content = [0; PAGE];
    for chunk in (0..CHUNKS).map(ChunkIdx) {
        let ChunkContent { missing, zero } = image.read_chunk(chunk, &mut chunk_content).expect("a chunk");
        for index in 0..=u8::MAX {
            let page = chunk.page(index);
            let tag = expected[page.0 as usize];
            let found = image.read_page(page, &mut content).expect("a page");
            assert_eq!(content, chunk_content[usize::from(index) * PAGE..][..PAGE], "page {page}");
            if missing.contains(index) {
                assert_eq!(found, pagoda_image::Content::Missing);
                assert_eq!(memory.expect("it lacks no page")[page.0 as usize], tag, "the VM has page {page} for it");
            } else {
                assert_eq!(content, content_of(tag), "page {page}");
                assert_eq!(zero.contains(index), tag == 0, "page {page}");
            }
        }
        check_blocks(&image, chunk, PageSet::FULL - missing - zero, expected);
    }
}
