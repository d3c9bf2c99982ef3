use pagoda_core::units::PageIdx;
use pagoda_image::{Content, ImageId, Stage};
use pagoda_sys::swapfile::Reserve;

use super::*;
use crate::images::tests::{Bench, make, manifest};

/// On a disk: `/tmp` may be memory.
fn swap_path(name: &str) -> std::path::PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name(format!("{name}-{}.swap", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn the_swap_file_has_what_the_image_has_and_holes_for_zeros() {
    let bench = Bench::new("pour");
    let store = bench.images.store().unwrap();
    for reserve in [Reserve::No, Reserve::Yes] {
        let id = 1 + u128::from(reserve == Reserve::Yes);
        make(store, manifest(id, "web1", &format!("s{id}")), Stage::Filled);
        let image = store.image(ImageId(id)).unwrap();
        let memory = image.manifest().pages();
        let swap = SwapFile::create(&swap_path("pour"), memory.bytes().0, reserve).unwrap();
        assert_eq!(pour(&image, &swap).unwrap(), PageCount(2));
        let mut runs = Vec::new();
        swap.data_extents(&mut |offset, len| runs.push((offset, len))).unwrap();
        assert_eq!(runs, [(0, PAGE_SIZE), (CHUNK_SIZE, PAGE_SIZE)]);
        let mut content = vec![0; PAGE_SIZE as usize];
        for page in (0..memory.0).map(PageIdx) {
            let found = image.read_page(page, &mut content).unwrap();
            assert_ne!(found, Content::Missing);
            assert_eq!(swap.read_page(page.0).unwrap().bytes(), content, "{page:?}");
        }
        swap.remove().unwrap();
    }
}

#[test]
fn an_image_that_lacks_pages_or_is_damaged_is_refused() {
    let bench = Bench::new("pour-refused");
    let store = bench.images.store().unwrap();
    make(store, manifest(1, "web1", "begun"), Stage::Begun);
    make(store, manifest(2, "web1", "filled"), Stage::Filled);
    let memory = manifest(1, "web1", "begun").pages().bytes().0;
    let swap = SwapFile::create(&swap_path("pour-refused"), memory, Reserve::No).unwrap();
    let why = pour(&store.image(ImageId(1)).unwrap(), &swap).unwrap_err().to_string();
    assert!(why.contains("not filled"), "{why}");
    let pages = bench.dir.join("images").join(ImageId(2).to_string()).join("pages");
    let mut bytes = std::fs::read(&pages).unwrap();
    bytes[PAGE_SIZE as usize + 7] ^= 1;
    std::fs::write(&pages, bytes).unwrap();
    let why = format!("{:#}", pour(&store.image(ImageId(2)).unwrap(), &swap).unwrap_err());
    assert!(why.contains("pages, page 256, offset 4096"), "{why}");
    swap.remove().unwrap();
    let other = SwapFile::create(&swap_path("pour-other"), 2 * memory, Reserve::No).unwrap();
    assert!(pour(&store.image(ImageId(1)).unwrap(), &other).is_err());
    other.remove().unwrap();
}
