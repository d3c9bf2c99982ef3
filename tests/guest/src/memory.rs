//! The memory under test: pages with a pattern, and the version that each must carry.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagoda_guest::pattern::{Pattern, UNWRITTEN};
use pagoda_guest::{PAGE_SIZE, PAGES_PER_MIB, WORDS_PER_PAGE};

use crate::boot;
use crate::report::Report;

/// The share of the available memory that is used when no size is given, in percent; the rest is for the kernel,
/// disk buffers and tools.
const SHARE_DEFAULT_PERCENT: u64 = 70;

/// Left to the kernel whatever size is asked for: less and the guest's own OOM killer ends the test.
const KERNEL_RESERVE_MIB: u64 = 24;

/// The kernel gives back what booting took, the initramfs above all, when init runs already.
const BOOTING_MAX: Duration = Duration::from_secs(10);

/// MiB that are available, after a while if they are not yet as many as are needed. The guest's own swap, if it has any, is as good for
/// what was asked for by number.
fn wait_for_room(needed_mib: u64) -> Result<u64> {
    let began = Instant::now();
    loop {
        let available_mib = (boot::meminfo_kib("MemAvailable")? + boot::meminfo_kib("SwapFree")?) / 1024;
        if available_mib >= needed_mib || began.elapsed() > BOOTING_MAX {
            return Ok(available_mib);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[derive(Debug)]
pub struct Memory {
    words: Vec<u64>,
    /// The first word on a page boundary.
    aligned_start: usize,
    versions: Vec<u32>,
    pattern: Pattern,
}

impl Memory {
    /// `mib` of pages never written, or a share of what is available.
    pub fn allocate(mib: Option<usize>, pattern: Pattern) -> Result<Self> {
        let available_mib = boot::meminfo_kib("MemAvailable")? / 1024;
        let mib = mib.unwrap_or((available_mib * SHARE_DEFAULT_PERCENT / 100) as usize);
        ensure!(mib > 0, "the memory to test is 0 MiB: set pagoda.mib");
        let available_mib = wait_for_room(mib as u64 + KERNEL_RESERVE_MIB)?;
        ensure!(
            mib as u64 + KERNEL_RESERVE_MIB <= available_mib,
            "{mib} MiB do not fit: {available_mib} MiB are available and {KERNEL_RESERVE_MIB} MiB are kept for the \
             kernel; give the VM more memory or set a smaller pagoda.mib"
        );
        let pages = mib * PAGES_PER_MIB;
        // Zeroed by the kernel on first touch, not here.
        let words = vec![0; (pages + 1) * WORDS_PER_PAGE];
        let aligned_start = words.as_ptr().align_offset(PAGE_SIZE);
        Ok(Self { words, aligned_start, versions: vec![UNWRITTEN; pages], pattern })
    }

    pub fn pages(&self) -> usize {
        self.versions.len()
    }

    pub fn mib(&self) -> usize {
        self.pages() / PAGES_PER_MIB
    }

    /// About equal parts that cover all pages, one for each thread.
    pub fn parts(&mut self, count: usize) -> Vec<Part<'_>> {
        let pages_per_part = self.pages().div_ceil(count);
        let pages = self.pages();
        let words = &mut self.words[self.aligned_start..][..pages * WORDS_PER_PAGE];
        words
            .chunks_mut(pages_per_part * WORDS_PER_PAGE)
            .zip(self.versions.chunks_mut(pages_per_part))
            .enumerate()
            .map(|(index, (words, versions))| Part {
                first_page: index * pages_per_part,
                words,
                versions,
                pattern: self.pattern,
            })
            .collect()
    }
}

/// A range of pages that one thread owns for a while. Page numbers are relative to it.
#[derive(Debug)]
pub struct Part<'a> {
    first_page: usize,
    words: &'a mut [u64],
    versions: &'a mut [u32],
    pattern: Pattern,
}

impl Part<'_> {
    pub fn pages(&self) -> usize {
        self.versions.len()
    }

    /// Reads a page and checks a sample of its words, one of them chosen by `salt`.
    pub fn check(&mut self, page: usize, salt: u64, report: &Report) {
        self.check_by(page, report, |content, words| content.check_sample(words, salt));
    }

    pub fn check_all_words(&mut self, page: usize, report: &Report) {
        self.check_by(page, report, |content, words| content.check_all(words));
    }

    /// Gives a page its next version.
    pub fn write(&mut self, page: usize) {
        // Wrapping to UNWRITTEN would take the page for zeros.
        self.versions[page] = self.versions[page].checked_add(1).unwrap_or(UNWRITTEN + 1);
        self.rewrite(page);
    }

    fn rewrite(&mut self, page: usize) {
        let content = self.pattern.content(self.number(page), self.versions[page]);
        content.fill(self.page_mut(page));
    }

    fn check_by(
        &mut self,
        page: usize,
        report: &Report,
        check: impl Fn(pagoda_guest::pattern::PageContent, &[u64]) -> Option<pagoda_guest::pattern::Mismatch>,
    ) {
        let (number, version) = (self.number(page), self.versions[page]);
        if let Some(mismatch) = check(self.pattern.content(number, version), self.page_mut(page)) {
            report.bad_page("memory", number, version, &self.pattern, mismatch);
            // Set right, so that one loss counts once and not at every later look.
            self.rewrite(page);
        }
    }

    fn number(&self, page: usize) -> u64 {
        (self.first_page + page) as u64
    }

    fn page_mut(&mut self, page: usize) -> &mut [u64] {
        &mut self.words[page * WORDS_PER_PAGE..][..WORDS_PER_PAGE]
    }
}
