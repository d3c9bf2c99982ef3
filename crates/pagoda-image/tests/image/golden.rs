//! An image that the first version wrote is read, and this version writes the same bytes.

use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use pagoda_image::{Stage, Store};

use crate::disk::temp_dir;
use crate::vm::{ID, Memory, PAGES, begin, check_pages, preserve};

const FILES: [(&str, &[u8]); 4] = [
    ("manifest", include_bytes!("golden/1/manifest")),
    ("state", include_bytes!("golden/1/state")),
    ("map", include_bytes!("golden/1/map")),
    ("pages", include_bytes!("golden/1/pages")),
];

fn memory() -> Memory {
    let mut memory = vec![0; PAGES as usize];
    for (page, tag) in [(0, 1), (3, 0x0403_0201), (4, 0x0403_0201), (511, u32::MAX)] {
        memory[page] = tag;
    }
    memory
}

fn read(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join(ID.to_string()).join(name)).unwrap()
}

#[test]
fn this_version_writes_what_the_first_one_wrote() {
    let dir = temp_dir("golden-write");
    let store = Store::open(&dir).unwrap();
    let mut writer = begin(&store).unwrap();
    // A write of the guest first, and then what is left.
    for (first, len) in [(511, 1), (2, 2), (0, 256), (256, 256)] {
        let _ = preserve(&mut writer, &memory(), first, len);
    }
    writer.ledger().note_pause(41_000).unwrap();
    writer.ledger().mark_filled().unwrap();
    for (name, golden) in FILES {
        assert!(read(&dir, name) == golden, "{name}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_the_first_version_wrote_is_read() {
    let dir = temp_dir("golden-read");
    let image = dir.join(ID.to_string());
    std::fs::create_dir(&image).unwrap();
    std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o700)).unwrap();
    for (name, golden) in FILES {
        let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(image.join(name)).unwrap();
        std::io::Write::write_all(&mut &file, golden).unwrap();
    }
    let store = Store::open(&dir).unwrap();
    check_pages(&store, &memory(), None);
    let report = store.verify(ID);
    assert_eq!((report.blocks, report.zeros, report.missing, report.damaged), (4, 508, 0, 0));
    let ledger = store.ledger(ID).unwrap();
    assert_eq!(ledger.manifest().unwrap().stage, Stage::Filled);
    ledger.make_durable().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}
