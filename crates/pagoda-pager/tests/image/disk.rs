//! A disk that fails, calls back or ends the engine at any of its calls, or does not answer those who read.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex};

use pagoda_image::{Disk, LinuxDisk};

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Go,
    /// It fails with this errno. Of a write the first half is done.
    Fail(i32),
    /// The engine ends here, as if it were killed. Of a write the first half is done.
    Die,
    /// It ends when the call is done.
    GoAndDie,
}

type Hook = Box<dyn FnMut(usize) -> Verdict + Send>;

/// What becomes of those who read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reads {
    #[default]
    Go,
    /// After so many reads, all wait until that changes.
    HangAfter(usize),
    /// Reads from this offset on wait until that changes.
    HangFrom(u64),
    Fail(i32),
}

#[derive(Default)]
struct Inner {
    calls: usize,
    hook: Option<Hook>,
}

/// An image's disk whose calls a test decides about.
#[derive(Clone, Default)]
pub struct TestDisk(Arc<Mutex<Inner>>, Arc<(Mutex<Reads>, Condvar)>);

impl fmt::Debug for TestDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TestDisk")
    }
}

impl TestDisk {
    /// From now on the hook is asked at each call that changes something, and hears its number.
    pub fn set_hook(&self, hook: impl FnMut(usize) -> Verdict + Send + 'static) {
        *self.0.lock().unwrap() = Inner { calls: 0, hook: Some(Box::new(hook)) };
    }

    /// From now on those who read, and those who wait to read, find this.
    pub fn set_reads(&self, reads: Reads) {
        *self.1.0.lock().unwrap() = reads;
        self.1.1.notify_all();
    }

    /// Takes the hook away, so that every call goes well again.
    pub fn heal(&self) {
        self.0.lock().unwrap().hook = None;
    }

    /// Calls since the hook was set.
    pub fn calls(&self) -> usize {
        self.0.lock().unwrap().calls
    }

    fn ask(&self) -> Verdict {
        let mut inner = self.0.lock().unwrap();
        let number = inner.calls;
        inner.calls += 1;
        // It may use the disk itself.
        let Some(mut hook) = inner.hook.take() else { return Verdict::Go };
        drop(inner);
        let verdict = hook(number);
        self.0.lock().unwrap().hook.get_or_insert(hook);
        verdict
    }

    fn call<T>(&self, go: impl FnOnce() -> io::Result<T>, half: impl FnOnce()) -> io::Result<T> {
        match self.ask() {
            Verdict::Go => go(),
            Verdict::Fail(errno) => {
                half();
                Err(io::Error::from_raw_os_error(errno))
            }
            Verdict::Die => {
                half();
                panic!("the daemon is killed here, as the test wants it");
            }
            Verdict::GoAndDie => {
                let _ = go();
                panic!("the daemon is killed here, as the test wants it");
            }
        }
    }
}

impl TestDisk {
    /// Returns when a read at this place is answered.
    fn answer_read(&self, offset: u64) -> io::Result<()> {
        let (reads, changed) = &*self.1;
        let hangs = |reads: &mut Reads| match *reads {
            Reads::HangAfter(left) => left == 0,
            Reads::HangFrom(from) => offset >= from,
            Reads::Go | Reads::Fail(_) => false,
        };
        let mut found = changed.wait_while(reads.lock().unwrap(), hangs).unwrap();
        if let Reads::HangAfter(left) = &mut *found {
            *left -= 1;
        }
        match *found {
            Reads::Fail(errno) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }
}

impl Disk for TestDisk {
    fn make_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        self.call(|| LinuxDisk.make_dir(dir, name), || ())
    }

    fn make_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<File> {
        self.call(|| LinuxDisk.make_file(dir, name), || ())
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        // Entries of 8 bytes are written whole or not at all.
        let half = &bytes[..bytes.len() / 16 * 8];
        self.call(|| LinuxDisk.write_at(file, bytes, offset), || LinuxDisk.write_at(file, half, offset).unwrap())
    }

    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.answer_read(offset)?;
        LinuxDisk.read_at(file, bytes, offset)
    }

    fn read_pieces_at(&self, file: &File, pieces: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        self.answer_read(offset)?;
        LinuxDisk.read_pieces_at(file, pieces, offset)
    }

    fn rename(&self, dir: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        self.call(|| LinuxDisk.rename(dir, from, to), || ())
    }

    fn remove_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        self.call(|| LinuxDisk.remove_file(dir, name), || ())
    }

    fn remove_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        self.call(|| LinuxDisk.remove_dir(dir, name), || ())
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        LinuxDisk.sync_file(file)
    }

    fn sync_dir(&self, dir: BorrowedFd<'_>) -> io::Result<()> {
        LinuxDisk.sync_dir(dir)
    }
}
