//! Reporting lines and counting wrong pages.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use pagoda_guest::lines::PREFIX;
use pagoda_guest::pattern::{Mismatch, Pattern};

/// Wrong pages reported one by one; after that they are only counted, since a serial port is slow.
const BAD_PAGES_SHOWN: u64 = 16;

/// Where lines go; shared by all threads.
#[derive(Debug)]
pub struct Report {
    port: Mutex<Port>,
    bad_pages: AtomicU64,
}

#[derive(Debug)]
enum Port {
    Console,
    Serial(File),
}

impl Report {
    pub fn console() -> Self {
        Self { port: Mutex::new(Port::Console), bad_pages: AtomicU64::new(0) }
    }

    pub fn serial(port: File) -> Self {
        Self { port: Mutex::new(Port::Serial(port)), bad_pages: AtomicU64::new(0) }
    }

    /// One line in one write, so that lines of several threads do not mix. A port that refuses it cannot be told.
    pub fn line(&self, text: fmt::Arguments<'_>) {
        let line = format!("{PREFIX}{text}\n");
        let mut port = self.port.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = match &mut *port {
            Port::Console => io::stdout().write_all(line.as_bytes()).and_then(|()| io::stdout().flush()),
            Port::Serial(file) => file.write_all(line.as_bytes()),
        };
    }

    /// Counts a wrong page, and shows it if it is among the first.
    pub fn bad_page(&self, place: &str, page: u64, version: u32, pattern: &Pattern, mismatch: Mismatch) {
        if self.bad_pages.fetch_add(1, Ordering::Relaxed) < BAD_PAGES_SHOWN {
            let Mismatch { word, expected, got } = mismatch;
            let kind = pattern.diagnose(page, version, mismatch);
            self.line(format_args!(
                "bad page={page} word={word} expected={expected:#018x} got={got:#018x} in={place} kind={kind}"
            ));
        }
    }

    /// A tool found wrong memory; it does not say how many pages.
    pub fn bad_memory_by_tool(&self) {
        self.add_bad_pages(1);
    }

    pub fn add_bad_pages(&self, count: u64) {
        self.bad_pages.fetch_add(count, Ordering::Relaxed);
    }

    pub fn bad_pages(&self) -> u64 {
        self.bad_pages.load(Ordering::Relaxed)
    }
}
