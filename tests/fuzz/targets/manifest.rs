//! The manifest of an image, with a checksum that is right: refused, or read so that it can be written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagoda_image::Manifest;
use pagoda_image::checked_text::seal;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = str::from_utf8(bytes) else { return };
    if let Ok(manifest) = Manifest::read(seal("pagoda-image 1", json).as_bytes()) {
        let text = manifest.to_text().expect("what was read can be written");
        assert_eq!(Manifest::read(text.as_bytes()).expect("and be read again"), manifest);
    }
});
