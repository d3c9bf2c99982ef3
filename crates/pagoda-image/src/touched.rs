//! The record of pages that a VM needed right after it was made of an image. The next VM of the image can have them before it
//! asks (REAP, ASPLOS 2021). The record is advice and no part of the image: whoever cannot use it does without.
//!
//! The file is in the image's directory. Its format is in `docs/snapshot-files.md`.

use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use pagoda_core::units::{PageCount, PageIdx};
use xxhash_rust::xxh3::xxh3_64;

use crate::disk::{Synced, replace};
use crate::files::read_small;
use crate::id::ImageId;
use crate::image::Image;
use crate::limits::TOUCHED_RUNS_MAX;

/// Its name in the image's directory.
pub(crate) const TOUCHED: &str = "touched";
/// The same before it is complete.
pub(crate) const NEW_TOUCHED: &str = "touched.new";
const MAGIC: &[u8; 16] = b"pagoda-touched-1";
/// Magic, the image's id and the number of runs.
const HEAD_BYTES: usize = 40;
const RUN_BYTES: usize = 8;
const SUM_BYTES: usize = 8;
const FILE_MAX: usize = HEAD_BYTES + TOUCHED_RUNS_MAX * RUN_BYTES + SUM_BYTES;

/// One record is written at a time: two VMs of one image may be done at the same moment.
static ALONE: Mutex<()> = Mutex::new(());

/// Pages in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchedRun {
    /// The first page of the run.
    pub first: PageIdx,
    /// How many, at least one.
    pub count: u32,
}

/// Pages of a VM in the order in which it needed them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    runs: Vec<TouchedRun>,
}

impl Touched {
    /// A record of these runs, in the order in which the VM needed them.
    pub fn new(runs: Vec<TouchedRun>) -> Touched {
        Touched { runs }
    }

    /// The runs in their order.
    pub fn runs(&self) -> &[TouchedRun] {
        &self.runs
    }

    /// Whether the VM has needed no page at all.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Pages of all runs.
    pub fn pages(&self) -> PageCount {
        PageCount(self.runs.iter().map(|run| u64::from(run.count)).sum())
    }

    /// These pages and those of `later` behind them, within `max` pages and what a file holds. If that is too many, the last of
    /// the first ones go: `later` says what such a VM needs by now.
    #[must_use]
    pub fn and(mut self, later: Touched, max: PageCount) -> Touched {
        let runs_max = TOUCHED_RUNS_MAX.saturating_sub(later.runs.len());
        let mut left = max.0.saturating_sub(later.pages().0);
        self.runs.truncate(runs_max);
        self.runs.retain(|run| {
            let fits = u64::from(run.count) <= left;
            left = if fits { left - u64::from(run.count) } else { 0 };
            fits
        });
        self.runs.extend(later.runs);
        self.runs.truncate(TOUCHED_RUNS_MAX);
        self
    }

    fn encode(&self, id: ImageId) -> Vec<u8> {
        assert!(self.runs.len() <= TOUCHED_RUNS_MAX, "{} runs", self.runs.len());
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.runs.len() * RUN_BYTES + SUM_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(id.0.to_le_bytes());
        bytes.extend((self.runs.len() as u64).to_le_bytes());
        for run in &self.runs {
            // An image has less than 2^32 pages.
            bytes.extend((run.first.0 as u32).to_le_bytes());
            bytes.extend(run.count.to_le_bytes());
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// What a file says of the image `id`, whose VM has so many pages.
    fn decode(bytes: &[u8], id: ImageId, pages: PageCount) -> Result<Touched, String> {
        if bytes.len() < HEAD_BYTES + SUM_BYTES || bytes.len() > FILE_MAX {
            return Err(format!("{} bytes long: no record has that length", bytes.len()));
        }
        let (content, sum) = bytes.split_at(bytes.len() - SUM_BYTES);
        if !content.starts_with(MAGIC) {
            return Err("no record, or one of another version".to_owned());
        }
        if xxh3_64(content).to_le_bytes() != sum {
            return Err("it does not match its checksum".to_owned());
        }
        let (head, runs) = content.split_at(HEAD_BYTES);
        if head[16..32] != id.0.to_le_bytes() {
            return Err("it is of another image".to_owned());
        }
        let count = u64::from_le_bytes(head[32..40].try_into().expect("eight bytes"));
        if runs.len() as u64 != count.saturating_mul(RUN_BYTES as u64) {
            return Err(format!("it says {count} runs, and is not as long"));
        }
        let (runs, _) = runs.as_chunks::<RUN_BYTES>();
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let runs =
            runs.iter().map(|run| TouchedRun { first: PageIdx(number(&run[..4]).into()), count: number(&run[4..]) });
        let touched = Touched { runs: runs.collect() };
        let is_outside = |run: &&TouchedRun| run.count == 0 || run.first.0 + u64::from(run.count) > pages.0;
        if let Some(run) = touched.runs.iter().find(is_outside) {
            return Err(format!("{} pages from page {} on are none of the VM's", run.count, run.first));
        }
        // Some may be named twice, which does no harm; but not so often that it costs anything.
        if touched.pages() > pages {
            return Err(format!("{} pages: the VM has {pages}", touched.pages()));
        }
        Ok(touched)
    }
}

impl Image {
    /// The record of what a VM of this image needed first. `None`: there is none.
    ///
    /// # Errors
    /// It cannot be read or is damaged, in words: the image is whole without it.
    pub fn touched(&self) -> Result<Option<Touched>, String> {
        match read_small(self.dir().as_fd(), TOUCHED, FILE_MAX) {
            Ok(bytes) => Touched::decode(&bytes, self.manifest().id, self.manifest().pages()).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Writes the record; one that is there goes when the new one is complete. It is not synced, and outlives this process. It
    /// waits for the disk.
    ///
    /// # Errors
    /// The disk's. The record of before is there as it was.
    pub fn keep_touched(&self, touched: &Touched) -> std::io::Result<()> {
        let bytes = touched.encode(self.manifest().id);
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        replace(self.disk(), self.dir().as_fd(), (NEW_TOUCHED, TOUCHED), &bytes, Synced::No)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: ImageId = ImageId(0x77);
    const PAGES: PageCount = PageCount(1024);

    fn run(first: u64, count: u32) -> TouchedRun {
        TouchedRun { first: PageIdx(first), count }
    }

    fn some() -> Touched {
        Touched::new(vec![run(700, 3), run(0, 256), run(1023, 1)])
    }

    fn refused(bytes: &[u8], expected: &str) {
        let why = Touched::decode(bytes, ID, PAGES).unwrap_err();
        assert!(why.contains(expected), "{why}");
    }

    /// With a right checksum, as who means harm makes it.
    fn summed(mut bytes: Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        bytes.truncate(bytes.len() - SUM_BYTES);
        change(&mut bytes);
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for touched in [some(), Touched::default()] {
            assert_eq!(Touched::decode(&touched.encode(ID), ID, PAGES), Ok(touched));
        }
        assert_eq!(some().pages(), PageCount(260));
        let bytes = some().encode(ID);
        assert_eq!(bytes.len(), HEAD_BYTES + 3 * RUN_BYTES + SUM_BYTES);
        assert_eq!(bytes[HEAD_BYTES..HEAD_BYTES + 8], [0xbc, 2, 0, 0, 3, 0, 0, 0]);
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_noticed() {
        let bytes = some().encode(ID);
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                Touched::decode(&changed, ID, PAGES).unwrap_err();
            }
            Touched::decode(&bytes[..at], ID, PAGES).unwrap_err();
        }
        Touched::decode(&[bytes, vec![0]].concat(), ID, PAGES).unwrap_err();
    }

    #[test]
    fn what_nobody_writes_is_refused() {
        let bytes = || some().encode(ID);
        refused(&some().encode(ImageId(1)), "another image");
        refused(&summed(bytes(), |bytes| bytes[15] = b'2'), "another version");
        refused(&summed(bytes(), |bytes| bytes[32] = 4), "4 runs");
        refused(&summed(bytes(), |bytes| bytes[32..40].fill(0xff)), "runs, and is not as long");
        refused(&summed(bytes(), |bytes| bytes.push(0)), "3 runs");
        refused(&summed(bytes(), |bytes| bytes[HEAD_BYTES + 4..HEAD_BYTES + 8].fill(0)), "0 pages from page 700");
        refused(&summed(bytes(), |bytes| bytes[HEAD_BYTES..HEAD_BYTES + 8].fill(0xff)), "none of the VM's");
        refused(&Touched::new(vec![run(1023, 2)]).encode(ID), "none of the VM's");
        refused(&Touched::new(vec![run(0, 1024), run(0, 1)]).encode(ID), "the VM has 1024");
        refused(&vec![0; FILE_MAX + 1], "no record has that length");
    }

    #[test]
    fn a_union_keeps_what_was_needed_first_and_what_is_new() {
        let old = || Touched::new(vec![run(0, 10), run(20, 10), run(40, 5)]);
        let new = || Touched::new(vec![run(100, 5)]);
        let check = |max, expected: &[TouchedRun]| assert_eq!(old().and(new(), PageCount(max)).runs(), expected);
        check(30, &[run(0, 10), run(20, 10), run(40, 5), run(100, 5)]);
        check(29, &[run(0, 10), run(20, 10), run(100, 5)]);
        check(14, &[run(100, 5)]);
        let many = Touched::new((0..TOUCHED_RUNS_MAX as u64).map(|page| run(2 * page, 1)).collect());
        let union = many.clone().and(new(), PageCount(u64::MAX));
        assert_eq!((union.runs().len(), union.runs().last()), (TOUCHED_RUNS_MAX, Some(&run(100, 5))));
        assert_eq!(many.clone().and(many.clone(), PageCount(u64::MAX)), many);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_name_pages_of_the_vm(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200), is_headed in any::<bool>(),
        ) {
            if is_headed && bytes.len() >= HEAD_BYTES {
                let runs = ((bytes.len() - HEAD_BYTES) / RUN_BYTES) as u64;
                bytes.truncate(HEAD_BYTES + runs as usize * RUN_BYTES);
                bytes[..16].copy_from_slice(MAGIC);
                bytes[16..32].copy_from_slice(&ID.0.to_le_bytes());
                bytes[32..40].copy_from_slice(&runs.to_le_bytes());
                // Small numbers, so that some are right.
                bytes[HEAD_BYTES..].chunks_mut(4).for_each(|number| number[1..].fill(0));
                bytes.extend(xxh3_64(&bytes).to_le_bytes());
            }
            if let Ok(touched) = Touched::decode(&bytes, ID, PAGES) {
                prop_assert!(touched.pages() <= PAGES);
                prop_assert!(touched.runs().iter().all(|run| run.first.0 + u64::from(run.count) <= PAGES.0));
            }
        }
    }
}
