//! A snapshot in one file (docs/snapshot-export.md). Checksums of header and records are made right first, or nothing behind them
//! would ever be reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagoda_image::export::{CHUNK_PAYLOAD_MAX, HEADER_SIZE, Piece, RECORD_HEADER_SIZE, Reader};
use xxhash_rust::xxh3::xxh3_64;

/// Of a header and of a record's header, from their beginning: what the checksum behind it is of.
const SUMMED: usize = HEADER_SIZE - 8;
const RECORD_SUMMED: usize = RECORD_HEADER_SIZE - 8;

fn seal(file: &mut [u8]) {
    let Some((header, mut rest)) = file.split_at_mut_checked(HEADER_SIZE) else { return };
    let sum = xxh3_64(&header[..SUMMED]);
    header[SUMMED..].copy_from_slice(&sum.to_le_bytes());
    while let Some((head, behind)) = rest.split_at_mut_checked(RECORD_HEADER_SIZE) {
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        let Some((payload, next)) = behind.split_at_mut_checked(len) else { return };
        let sum = xxh3_64(&[&head[..RECORD_SUMMED], payload].concat());
        head[RECORD_SUMMED..].copy_from_slice(&sum.to_le_bytes());
        rest = next;
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut file = bytes.to_vec();
    seal(&mut file);
    let Ok(mut reader) = Reader::open(&file[..]) else { return };
    loop {
        match reader.next_piece() {
            Ok(Piece::State(bytes)) => assert!(bytes.len() <= CHUNK_PAYLOAD_MAX),
            Ok(Piece::Chunk { pages, content, sums, .. }) => {
                assert_eq!(usize::from(pages.count()) * 4096, content.len());
                assert_eq!(usize::from(pages.count()), sums.len());
            }
            Ok(Piece::Zeros { count, .. }) => assert!(count.0 > 0),
            Ok(Piece::End(totals)) => {
                assert_eq!(totals.bytes, file.len() as u64);
                return;
            }
            Err(_) => return,
        }
        assert!(reader.offset().0 <= file.len() as u64);
    }
});
