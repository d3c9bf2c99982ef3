//! The space's journal in two memory files that outlive this process: see [`pagoda_outbox::journal`].
//!
//! If it cannot be written, this process ends at once, before anybody hears of what is not in it. The next one goes on with what
//! is.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;

use pagoda_outbox::journal::batch;
use pagoda_outbox::{Restored, Space};

/// Beyond twice the length of a snapshot and this, a snapshot begins the other journal.
const GROWTH_BYTES: u64 = 1 << 20;
/// Longer than a journal of as many files as there may be gets.
const JOURNAL_BYTES_MAX: u64 = 512 << 20;

#[derive(Debug)]
pub struct Journal {
    files: [File; 2],
    current: usize,
    epoch: u64,
    end: u64,
    snapshot_bytes: u64,
}

impl Journal {
    /// The journal, and the space that it tells of; `None` if none has been written.
    ///
    /// # Errors
    /// It is not a space's.
    pub fn open(files: [File; 2]) -> io::Result<(Journal, Option<Space>)> {
        let (first, second) = (read(&files[0])?, read(&files[1])?);
        let mut journal = Journal { files, current: 0, epoch: 0, end: 0, snapshot_bytes: 0 };
        if first.is_empty() && second.is_empty() {
            return Ok((journal, None));
        }
        let Restored { space, epoch } = Space::restore([&first, &second]).map_err(io::Error::other)?;
        // The valid one is overwritten last.
        let valid = Space::restore([&first, &[]]).is_ok_and(|restored| restored.epoch == epoch);
        journal.current = usize::from(!valid);
        journal.epoch = epoch;
        Ok((journal, Some(space)))
    }

    /// Writes down what has changed.
    pub fn commit(&mut self, space: &mut Space) {
        let Some(changes) = space.take_changes() else { return };
        if self.epoch == 0 || self.end + changes.len() as u64 > 2 * self.snapshot_bytes + GROWTH_BYTES {
            return self.begin(space);
        }
        let bytes = batch(&changes);
        written(self.files[self.current].write_all_at(&bytes, self.end));
        self.end += bytes.len() as u64;
    }

    /// Begins the other journal with all that there is. This one is valid until that is whole.
    pub fn begin(&mut self, space: &mut Space) {
        let _ = space.take_changes();
        let bytes = batch(&space.snapshot(self.epoch + 1));
        let other = &self.files[1 - self.current];
        written(other.set_len(0));
        written(other.write_all_at(&bytes, 0));
        written(self.files[self.current].set_len(0));
        (self.current, self.epoch) = (1 - self.current, self.epoch + 1);
        self.end = bytes.len() as u64;
        self.snapshot_bytes = self.end;
    }
}

fn read(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(JOURNAL_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn written(result: io::Result<()>) {
    if let Err(error) = result {
        eprintln!("pagoda-outbox: write the journal: {error}");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use pagoda_outbox::{NewNode, ROOT};
    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn another_process_goes_on() {
        let files = [0, 1].map(|_| File::from(rustix::fs::memfd_create("journal", MemfdFlags::CLOEXEC).unwrap()));
        let open = || Journal::open(files.each_ref().map(|file| file.try_clone().unwrap())).unwrap();
        let (mut journal, none) = open();
        assert!(none.is_none());
        let mut space = Space::new(1 << 20);
        journal.begin(&mut space);
        let name = |index: usize| format!("a name that makes the journal grow {index:0200}");
        let keep = |space: &mut Space, journal: &mut Journal, index: usize| {
            space.create(ROOT, name(index).as_bytes(), NewNode::default()).unwrap();
            journal.commit(space);
            if index > 0 {
                space.unlink(ROOT, name(index - 1).as_bytes(), pagoda_outbox::Kind::File, Default::default()).unwrap();
                journal.commit(space);
            }
        };
        (0..6000).for_each(|index| keep(&mut space, &mut journal, index));
        assert!(journal.epoch > 1, "no other journal was begun");
        for index in 6000..6003 {
            let (mut next, restored) = open();
            space = restored.unwrap();
            assert!(space.lookup(ROOT, name(index - 1).as_bytes()).is_ok());
            assert_eq!(space.figures().nodes, 2);
            // Killed before it has begun a journal, too.
            if index > 6000 {
                next.begin(&mut space);
            } else {
                space = open().1.unwrap();
                next.begin(&mut space);
            }
            keep(&mut space, &mut next, index);
        }
    }
}
