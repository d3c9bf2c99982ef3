//! Requests as a guest may make them that means no good. Nothing here may panic, and memory stays within the budget.

use std::ffi::CString;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use proptest::prelude::*;
use virtiofsd::filesystem::DirectoryIterator;
use virtiofsd::oslib::{ReadvFlags, WritevFlags};

use super::*;

const SPACE: u64 = 1 << 20;

struct Zeros(usize);

impl ZeroCopyReader for Zeros {
    fn write_to_file_at(&mut self, f: &File, count: usize, off: u64, _: Option<WritevFlags>) -> io::Result<usize> {
        // As the library does it: what a request does not have is not written.
        let count = count.min(self.0);
        self.0 -= count;
        f.write_all_at(&vec![0; count], off).map(|()| count)
    }
}

struct Nowhere;

impl ZeroCopyWriter for Nowhere {
    fn read_from_file_at(&mut self, f: &File, count: usize, off: u64, _: Option<ReadvFlags>) -> io::Result<usize> {
        f.read_at(&mut vec![0; count], off)
    }
}

fn files(space: u64) -> GuestFiles {
    GuestFiles(Arc::new(Outbox::new(space, Duration::ZERO)))
}

fn context() -> Context {
    Context { uid: 0.into(), gid: 0.into(), pid: 1 }
}

fn name(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

impl GuestFiles {
    fn made(&self, text: &str) -> io::Result<(u64, u64)> {
        let flags = libc::O_RDWR as u32;
        let (entry, handle, _) =
            self.create(context(), 1, &name(text), 0o644, false, flags, 0, Extensions::default())?;
        Ok((entry.inode, handle.expect("a file has a handle")))
    }

    fn put(&self, (inode, handle): (u64, u64), offset: u64, size: u32, there: usize) -> io::Result<usize> {
        self.write(context(), inode, handle, Zeros(there), size, offset, None, false, false, 0)
    }

    fn resized(&self, inode: u64, size: u64) -> io::Result<()> {
        let wanted = fuse::SetattrIn { size, ..fuse::SetattrIn::default() };
        self.setattr(context(), inode, wanted, None, SetattrValid::SIZE).map(drop)
    }

    fn check(&self) {
        let real: u64 = self.0.memory_files().iter().map(|file| file.metadata().unwrap().blocks() * 512).sum();
        let figures = self.space().figures();
        assert!(real <= figures.used && figures.used <= figures.budget, "{real} bytes are real: {figures:?}");
    }
}

#[test]
fn a_hundred_thousand_files() {
    let files = files(SPACE);
    let made: Vec<(u64, u64)> = (0..100_000).filter_map(|index| files.made(&index.to_string()).ok()).collect();
    assert_eq!(made.len(), NODES_MAX - 1);
    assert_eq!(errno(files.made("more")), Some(libc::ENOSPC));
    assert!(files.0.memory_files().is_empty(), "a file without bytes has no descriptor");
    files.unlink(context(), 1, &name("7")).unwrap();
    assert_eq!(errno(files.made("more")), Some(libc::ENOSPC), "it is still open");
    files.release(context(), made[7].0, 0, made[7].1, false, false, None).unwrap();
    files.made("more").unwrap();
    let handles =
        std::iter::repeat_with(|| files.open(context(), made[0].0, false, 0)).take_while(Result::is_ok).count();
    assert!(handles < pagoda_outbox::limits::HANDLES_MAX);
    files.init(FsOptions::empty()).unwrap();
    assert_eq!(files.space().figures().nodes, 1, "what was never closed goes with the guest");
}

#[test]
fn numbers_of_any_size() {
    let files = files(SPACE);
    let file = files.made("f").unwrap();
    for offset in [u64::MAX, i64::MAX as u64, i64::MAX as u64 + 1, 1 << 42, (1 << 42) - 1] {
        assert_eq!(errno(files.put(file, offset, 4096, 4096)), Some(libc::EFBIG), "{offset}");
        assert_eq!(files.read(context(), file.0, file.1, Nowhere, u32::MAX, offset, None, 0).unwrap(), 0);
        assert!(errno(files.fallocate(context(), file.0, file.1, u32::MAX, offset, offset)).is_some());
        assert!(errno(files.resized(file.0, offset)).is_none_or(|errno| errno == libc::EFBIG), "{offset}");
        files.resized(file.0, 0).unwrap();
    }
    assert_eq!(errno(files.put(file, 0, u32::MAX, 10)), Some(libc::EINVAL));
    assert_eq!(files.put(file, 0, 1 << 20, 10).unwrap(), 10, "a request that claims more than it has");
    for (inode, handle) in [(0, 0), (u64::MAX, u64::MAX), (file.0, file.1 + 1), (1, file.1)] {
        assert!(errno(files.put((inode, handle), 0, 1, 1)).is_some());
        assert!(errno(files.read(context(), inode, handle, Nowhere, 1, 0, None, 0)).is_some());
    }
    for bad in ["", ".", "..", "a/b", &"n".repeat(256)] {
        assert!(files.made(bad).is_err(), "{bad}");
        assert!(files.mkdir(context(), 1, &name(bad), 0, 0, Extensions::default()).is_err(), "{bad}");
    }
    assert_eq!(
        errno(files.setxattr(context(), file.0, c"user.a", &[0; 5000], 0, SetxattrFlags::empty())),
        Some(libc::ENOSPC)
    );
    assert!(files.setxattr(context(), file.0, c"trusted.a", b"", 0, SetxattrFlags::empty()).is_err());
    files.check();
}

#[test]
fn df_follows_a_resize_at_once() {
    let files = files(SPACE);
    let file = files.made("f").unwrap();
    assert_eq!(files.put(file, 0, 300_000, 300_000).unwrap(), 300_000);
    let df = || {
        let st = files.statfs(context(), 1).unwrap();
        (st.f_blocks * st.f_frsize, st.f_bavail * st.f_frsize)
    };
    let used = 300_000_u64.next_multiple_of(4096);
    for space in [SPACE, SPACE * 4, SPACE / 2] {
        files.0.resize(space);
        assert_eq!(df(), (space, space - used));
    }
    files.0.resize(4096);
    assert_eq!(df(), (4096, 0));
    assert_eq!(errno(files.put(file, 300_000, 10_000, 10_000)), None, "the page that is there already has room");
    assert_eq!(errno(files.put(file, 303_104, 10_000, 10_000)), Some(libc::ENOSPC));
}

/// A request of a program whose memory begins anywhere in a page, as the library writes it: whole buffers, and it fails when these were
/// more than it was asked for.
struct Buffers(std::collections::VecDeque<Vec<u8>>);

impl ZeroCopyReader for Buffers {
    fn write_to_file_at(
        &mut self,
        f: &File,
        mut count: usize,
        mut off: u64,
        _: Option<WritevFlags>,
    ) -> io::Result<usize> {
        let start = off;
        while count > 0 {
            let Some(buffer) = self.0.pop_front() else { break };
            f.write_all_at(&buffer, off)?;
            off += buffer.len() as u64;
            let more = || io::Error::other("Write operation wrote more than requested");
            count = count.checked_sub(buffer.len()).ok_or_else(more)?;
        }
        Ok((off - start) as usize)
    }
}

#[test]
fn a_part_of_a_request_has_room_wherever_the_guests_buffers_end() {
    let content: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
    for first in [16, 4080, 4096, 5000] {
        // 10 pages.
        let files = files(40_960);
        let file = files.made("f").unwrap();
        let (begin, rest) = content.split_at(first);
        let buffers = Buffers([begin].into_iter().chain(rest.chunks(4096)).map(<[u8]>::to_vec).collect());
        let (size, none) = (content.len() as u32, None);
        let written = files.write(context(), file.0, file.1, buffers, size, 0, none, false, false, 0).unwrap();
        assert_eq!((written, files.space().attributes(Ino(file.0)).unwrap().size), (40_960, 40_960));
        let mut there = vec![0; 100_000];
        let length = files.0.memory_files()[0].read_at(&mut there, 0).unwrap();
        assert!(length == 40_960 && there[..length] == content[..length], "{length} bytes with a buffer of {first}");
        files.check();
    }
}

/// What the daemon hears of files that a guest writes: from their creation to their close, or to the rename that publishes them.
#[test]
fn files_that_are_written_are_jobs() {
    let files = files(SPACE);
    let close = |(inode, handle): (u64, u64)| files.release(context(), inode, 0, handle, false, false, None).unwrap();
    let whole = files.made("whole").unwrap();
    files.setxattr(context(), whole.0, c"user.pagoda.job", b"one", 0, SetxattrFlags::empty()).unwrap();
    files.put(whole, 0, 5000, 5000).unwrap();
    close(whole);
    let part = files.made(".part").unwrap();
    files.put(part, 0, 300, 300).unwrap();
    close(part);
    let (counts, jobs) = files.0.jobs(0);
    assert_eq!((counts.began, counts.last, counts.written, jobs.as_slice().len()), (2, 1, 5300, 1));
    let job = jobs.as_slice()[0];
    assert_eq!((job.number, job.output, job.backlog, &job.id[..4]), (1, 5000, 0, &b"one\0"[..]));
    files.rename(context(), 1, c".part", 1, c"part", 0).unwrap();
    let (counts, jobs) = files.0.jobs(1);
    let job = jobs.as_slice()[0];
    assert_eq!((counts.last, job.number, job.output, job.backlog), (2, 2, 300, 8192));
    assert!(job.began_ms <= job.ended_ms && job.ended_ms <= counts.now_ms);
    // The one that is to be written again is another file.
    let empty = files.made("empty").unwrap();
    close(empty);
    let again = files.open(context(), empty.0, false, libc::O_WRONLY as u32).unwrap().0.unwrap();
    files.put((empty.0, again), 0, 1 << 20, 1 << 20).unwrap();
    assert_eq!(errno(files.put((empty.0, again), 1 << 20, 4096, 4096)), Some(libc::ENOSPC));
    files.unlink(context(), 1, c"empty").unwrap();
    close((empty.0, again));
    let (counts, jobs) = files.0.jobs(2);
    assert_eq!((counts.began, counts.given_up, jobs.as_slice().len()), (3, 1, 0));
    assert!(counts.refused > 0);
}

#[test]
fn listings_go_on_where_they_ended() {
    let files = files(SPACE);
    for index in 0..100 {
        files.made(&format!("file-{index}")).unwrap();
    }
    let (mut names, mut offset) = (Vec::new(), 0);
    loop {
        let mut listing = files.readdir(context(), 1, 0, 320, offset).unwrap();
        let before = names.len();
        while let Some(entry) = listing.next() {
            names.push(entry.name.to_str().unwrap().to_owned());
            offset = entry.offset;
        }
        if names.len() == before {
            break;
        }
        // What was listed may go meanwhile.
        let _ = files.unlink(context(), 1, &name("file-3"));
    }
    let expected = [".", ".."].map(str::to_owned).into_iter().chain((0..100).map(|index| format!("file-{index}")));
    assert_eq!(names, expected.collect::<Vec<_>>());
    assert!(files.readdir(context(), 1, 0, u32::MAX, u64::MAX).is_ok_and(|mut listing| listing.next().is_none()));
}

/// Numbers that a guest knows, and others.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0_u64..8, 2 => (0_u64..300).prop_map(|page| page * 4096), 1 => any::<u64>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_requests(requests in prop::collection::vec((0_u8..17, number(), number(), number(), any::<u32>()), 1..150)) {
        let files = files(SPACE);
        for (kind, a, b, c, bits) in requests {
            let (one, other) = (name(&format!("n{}", bits % 5)), name(&format!("n{}", bits / 5 % 5)));
            let size = bits % (2 << 20);
            match kind {
                0 => drop(files.create(context(), a, &one, bits, false, bits, 0, Extensions::default())),
                1 => drop(files.mkdir(context(), a, &one, bits, 0, Extensions::default())),
                2 => drop(files.open(context(), a, false, bits)),
                3 => drop(files.unlink(context(), a, &one)),
                4 => drop(files.rmdir(context(), a, &one)),
                5 => drop(files.rename(context(), a, &one, b, &other, bits % 3)),
                6..=9 => drop(files.put((a, b), c, size, size as usize / 2)),
                10 => drop(files.read(context(), a, b, Nowhere, size, c, None, 0)),
                11 => drop(files.resized(a, c)),
                12 => drop(files.release(context(), a, bits, b, false, false, None)),
                13 => drop(files.readdir(context(), a, b, size, c)),
                14 => drop(files.setxattr(context(), a, c"user.pagoda.mode", b"on-close", bits % 4, SetxattrFlags::empty())),
                15 => drop(files.fallocate(context(), a, b, bits, b, c)),
                _ if bits % 64 == 0 => drop(files.init(FsOptions::empty())),
                _ => drop(files.getattr(context(), a, Some(b))),
            }
            files.check();
        }
    }
}
