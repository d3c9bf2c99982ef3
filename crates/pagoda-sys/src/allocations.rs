//! An allocator for tests of what must not need memory: the system's, with a list of what a watched thread allocates.
//!
//! A test program has it by `#[global_allocator] static ALLOCATOR: Counting = Counting;`. An allocation is listed while
//! its thread is [`watching`], unless [`set_watching`] has switched that off for the whole program: a thread may have
//! to warm up first, and it is another thread that knows when it has. Only what Rust allocates is seen, not what C
//! libraries do.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

static WATCHING: AtomicBool = AtomicBool::new(true);
static FOUND: Mutex<Vec<Found>> = Mutex::new(Vec::new());

/// What a watched thread allocated, and where it was then.
#[derive(Clone, Debug)]
pub struct Found {
    pub bytes: usize,
    pub backtrace: String,
}

/// The system's allocator, watched.
#[derive(Debug)]
pub struct Counting;

/// Does something that is watched.
pub fn watching<T>(work: impl FnOnce() -> T) -> T {
    as_watched(true, work)
}

/// Does something within that, which is not.
pub fn unwatched<T>(work: impl FnOnce() -> T) -> T {
    as_watched(false, work)
}

fn as_watched<T>(watched: bool, work: impl FnOnce() -> T) -> T {
    let before = WATCHED.replace(watched);
    let result = work();
    WATCHED.set(before);
    result
}

/// Whether anything is watched at all.
pub fn set_watching(watching: bool) {
    WATCHING.store(watching, Ordering::SeqCst);
}

/// What was found since the last time.
pub fn take_found() -> Vec<Found> {
    unwatched(|| std::mem::take(&mut *FOUND.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn note(bytes: usize) {
    if WATCHED.get() && WATCHING.load(Ordering::SeqCst) {
        unwatched(|| {
            let found = Found { bytes, backtrace: Backtrace::force_capture().to_string() };
            FOUND.lock().unwrap_or_else(PoisonError::into_inner).push(found);
        });
    }
}

// SAFETY: every call goes to `System` as it is. Noting allocates, but not while it notes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
