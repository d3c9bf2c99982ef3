//! A small stream, and each way to be wrong.

use super::*;

fn text(text: &str) -> Vec<u8> {
    [&[text.len() as u8], text.as_bytes()].concat()
}

fn capabilities(names: &[&str]) -> Vec<u8> {
    let mut bytes = [&[SUBSECTION][..], &text("configuration/capabilities"), &1u32.to_be_bytes()].concat();
    bytes.extend((names.len() as u32).to_be_bytes());
    names.iter().for_each(|name| bytes.extend(text(name)));
    bytes
}

fn ram(flags: u64) -> Vec<u8> {
    let section = 2u32.to_be_bytes();
    let mut bytes = vec![SECTION_START];
    bytes.extend(section);
    bytes.extend(text("ram"));
    bytes.extend([0u32.to_be_bytes(), 4u32.to_be_bytes()].concat());
    bytes.extend(((2 << 20 | 8192) | MEM_SIZE).to_be_bytes());
    for (id, len) in [("pc.ram", 2 << 20), ("vga", 8192u64)] {
        bytes.extend(text(id));
        bytes.extend(len.to_be_bytes());
        bytes.extend(0xe000u64.to_be_bytes());
    }
    bytes.extend(EOS.to_be_bytes());
    bytes.push(SECTION_FOOTER);
    bytes.extend(section);
    bytes.extend([COMMAND, 0, 11, 0, 0]);
    bytes.push(SECTION_END);
    bytes.extend(section);
    bytes.extend(flags.to_be_bytes());
    bytes.extend(text("vga"));
    bytes.extend([7; 4096]);
    bytes.extend((4096 | ZERO | CONTINUE).to_be_bytes());
    bytes.push(0);
    bytes.extend(EOS.to_be_bytes());
    bytes.push(SECTION_FOOTER);
    bytes.extend(section);
    bytes
}

fn stream(subsections: &[Vec<u8>], ram: Vec<u8>) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &VERSION.to_be_bytes(), &[CONFIGURATION], &3u32.to_be_bytes(), b"q35"].concat();
    bytes.extend(subsections.concat());
    bytes.extend(ram);
    bytes.extend(b"devices");
    bytes
}

fn good() -> Vec<u8> {
    stream(&[capabilities(&[IGNORE_SHARED])], ram(PAGE))
}

#[test]
fn the_places_of_a_stream() {
    let bytes = good();
    let layout = scan(&mut &*bytes).unwrap();
    let block = |id: &str, len, was_sent| Block { id: id.into(), len, was_sent };
    assert_eq!(layout.blocks, [block("pc.ram", 2 << 20, false), block("vga", 8192, true)]);
    assert_eq!(layout.capabilities.start, 19 - 3);
    assert_eq!(bytes[layout.capabilities.end as usize], SECTION_START);
    assert_eq!(bytes[layout.ram.end as usize], COMMAND);
    // Without addresses it is 16 bytes shorter: two of them.
    let setup = layout.setup_without_addresses();
    assert_eq!(setup.len() as u64, layout.ram.end - layout.ram.blocks_at - 16);
    assert!(setup.ends_with(&[SECTION_FOOTER, 0, 0, 0, 2]));
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let check = |bytes: Vec<u8>, expected: &str| {
        let said = scan(&mut &*bytes).unwrap_err();
        assert!(said.contains(expected), "{said}");
    };
    check(stream(&[], ram(PAGE)), "no capabilities");
    check(stream(&[capabilities(&["mapped-ram"])], ram(PAGE)), "mapped-ram");
    check(stream(&[capabilities(&[IGNORE_SHARED, "x"])], ram(PAGE)), "2 capabilities");
    let other = [&[SUBSECTION][..], &text("configuration/x"), &1u32.to_be_bytes()].concat();
    check(stream(&[other], ram(PAGE)), "configuration/x");
    check(stream(&[capabilities(&[IGNORE_SHARED])], ram(0x40)), "0x40");
    check(stream(&[capabilities(&[IGNORE_SHARED])], ram(PAGE | CONTINUE)), "no memory block");
    let early = [&[0x04][..], &7u32.to_be_bytes(), &text("virtio-mem")].concat();
    check(stream(&[capabilities(&[IGNORE_SHARED])], early), "the section ram");
}

#[test]
fn a_cut_or_changed_stream_does_no_harm() {
    let bytes = good();
    let end = bytes.len() - b"devices".len();
    for len in 0..end {
        assert!(scan(&mut &bytes[..len]).is_err(), "{len}");
    }
    for at in 0..end {
        for bit in [1, 0x10, 0x80] {
            let mut changed = bytes.clone();
            changed[at] ^= bit;
            let _ = scan(&mut &*changed);
        }
    }
}
