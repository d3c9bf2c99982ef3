//! The bytes of one write of the guest's, handed out in parts.
//!
//! `virtiofsd` writes whole buffers of the request, whatever it is asked for, and fails when that was more. A guest's program may write
//! from any address, so buffers do not end where the space is full. So of a request of which only a part has room, all is taken into
//! memory of its own first, and the parts come from there. That is rare: when a writer waits for room, a whole request is freed if it can
//! be. It is beyond the space, and at most one request for each thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;
use virtiofsd::filesystem::ZeroCopyReader;

/// See the module.
pub struct Bytes<R> {
    reader: R,
    /// What the request says that it has and was not handed out.
    left: usize,
    staged: Option<Staged>,
}

struct Staged {
    file: File,
    at: u64,
    end: u64,
}

impl<R: ZeroCopyReader> Bytes<R> {
    pub fn new(reader: R, size: usize) -> Bytes<R> {
        Bytes { reader, left: size, staged: None }
    }

    /// Writes the next `count` bytes to an offset of a file, or as many as the request has.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn put(&mut self, file: &File, at: u64, count: usize) -> io::Result<usize> {
        if self.staged.is_none() {
            if count >= self.left {
                let written = self.reader.write_to_file_at(file, self.left, at, None)?;
                self.left -= written.min(self.left);
                return Ok(written);
            }
            let own = File::from(rustix::fs::memfd_create("pagoda-part", MemfdFlags::CLOEXEC)?);
            let end = self.reader.write_to_file_at(&own, self.left, 0, None)? as u64;
            self.staged = Some(Staged { file: own, at: 0, end });
        }
        let Some(staged) = &mut self.staged else { return Ok(0) };
        let mut bytes = vec![0; count.min((staged.end - staged.at) as usize)];
        staged.file.read_exact_at(&mut bytes, staged.at)?;
        file.write_all_at(&bytes, at)?;
        staged.at += bytes.len() as u64;
        Ok(bytes.len())
    }
}
