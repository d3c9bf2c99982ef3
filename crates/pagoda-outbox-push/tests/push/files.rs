//! Contents, and a file of a directory as what is pushed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use hyper::body::Bytes;
use pagoda_outbox_push::{Next, Source};

/// Bytes that do not repeat, of a seed.
pub fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut content: Vec<u8> = std::iter::repeat_with(next).take(bytes.div_ceil(8)).flatten().collect();
    content.truncate(bytes);
    content
}

pub fn digest(bytes: &[u8]) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A sealed file of a directory. Nothing of it is given back, whatever is acknowledged.
#[derive(Debug)]
pub struct PlainFile {
    file: File,
    length: u64,
}

impl PlainFile {
    pub fn new(path: &Path, content: &[u8]) -> PlainFile {
        std::fs::write(path, content).unwrap();
        PlainFile { file: File::open(path).unwrap(), length: content.len() as u64 }
    }
}

impl Source for PlainFile {
    async fn next(&mut self, offset: u64, most: usize) -> Next {
        let left = usize::try_from(self.length.saturating_sub(offset)).unwrap();
        if left == 0 {
            return Next::End;
        }
        let mut bytes = vec![0; left.min(most)];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        Next::Bytes(Bytes::from(bytes))
    }

    fn length(&self) -> Option<u64> {
        Some(self.length)
    }

    fn acknowledge(&mut self, up_to: u64) {
        assert!(up_to <= self.length);
    }
}
