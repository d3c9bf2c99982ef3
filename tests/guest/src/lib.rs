//! What a test guest and the host must agree on: the pattern that pages and disks carry, and the lines a guest
//! reports in. The guest itself is this crate's binary; `README.md` beside it is the reference for users.

pub mod jobs;
pub mod lines;
pub mod pattern;
pub mod rng;
pub mod stream;

pub const PAGE_SIZE: usize = 4096;
pub const WORDS_PER_PAGE: usize = PAGE_SIZE / size_of::<u64>();
pub const PAGES_PER_MIB: usize = (1 << 20) / PAGE_SIZE;

/// The seed of the pattern on test disks when neither side names another.
pub const DISK_SEED_DEFAULT: u64 = 1;

/// The version that every page of a test disk is written in.
pub const DISK_VERSION: u32 = 1;
