//! Whether the kernel may give files in memory larger units than pages: *large folios*.
//!
//! Bytes are sent from the file's own pages, and a client on this host may have them in its queue after it has acknowledged
//! them. To punch a page takes it out of the file and leaves it to the queue as it is. To punch a part of a large folio writes
//! zeros into it first (mm/truncate.c, truncate_inode_partial_folio), and the client would read those. So where there may be
//! large folios, bytes are copied before they are sent.
//!
//! The host's settings say it. Their files are opened while the host's directories are there, and read again from time to time.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::MemfdFlags;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// Where the kernel has settings of its memory (Documentation/admin-guide/mm/transhuge.rst).
const SETTINGS: &str = "/sys/kernel/mm";
/// Values with which writes to a memfd take single pages. `advise` asks for a mapping that wants large ones, and none of ours
/// does; `inherit` is the value for all sizes.
const SMALL: [&[u8]; 4] = [b"[never]", b"[deny]", b"[advise]", b"[inherit]"];
/// Bytes that a setting may have.
const SETTING_BYTES_MAX: usize = 256;

#[derive(Debug)]
pub struct Folios {
    settings: Vec<File>,
    large: Large,
}

/// Whether a file may have large folios. Stays so, for they stay when the setting changes; and processes that are forked from now on
/// have it in common, for files outlive them.
#[derive(Debug)]
struct Large(MmapRegion<()>);

impl Large {
    fn new() -> io::Result<Large> {
        let memory = File::from(rustix::fs::memfd_create("pagoda-folios", MemfdFlags::CLOEXEC)?);
        memory.set_len(size_of::<u64>() as u64)?;
        MmapRegion::from_file(FileOffset::new(memory, 0), size_of::<u64>()).map(Large).map_err(io::Error::other)
    }

    fn word(&self) -> &AtomicU64 {
        self.0.get_atomic_ref(0).expect("a word of the memory")
    }

    fn note(&self) {
        self.word().store(1, Ordering::Relaxed);
    }
}

impl Folios {
    /// Has to be called before the process leaves the host.
    ///
    /// # Errors
    /// There is no memory for a word.
    pub fn of_host() -> io::Result<Folios> {
        Folios::open(Path::new(SETTINGS))
    }

    fn open(directory: &Path) -> io::Result<Folios> {
        let (settings, is_known) = settings(directory).map_or((Vec::new(), false), |settings| (settings, true));
        let folios = Folios { settings, large: Large::new()? };
        if !is_known {
            folios.large.note();
        }
        folios.look();
        Ok(folios)
    }

    /// Where nothing says that they are small.
    #[cfg(test)]
    pub fn unknown() -> Folios {
        Folios::open(Path::new("")).unwrap()
    }

    /// Reads the settings again.
    pub fn look(&self) {
        if !self.settings.iter().all(is_small) {
            self.large.note();
        }
    }

    /// What has to stay open.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        let memory = self.large.0.file_offset().map(|memory| memory.file().as_raw_fd());
        self.settings.iter().map(AsRawFd::as_raw_fd).chain(memory)
    }

    pub fn may_be_large(&self) -> bool {
        self.large.word().load(Ordering::Relaxed) != 0
    }
}

/// The files that decide. `None`: it is not known which.
fn settings(directory: &Path) -> Option<Vec<File>> {
    let entries = std::fs::read_dir(directory).ok()?;
    let names: Option<Vec<_>> = entries.map(|entry| Some(entry.ok()?.file_name())).collect();
    if !names?.iter().any(|name| name == "transparent_hugepage") {
        // A kernel that has none.
        return Some(Vec::new());
    }
    let directory = directory.join("transparent_hugepage");
    let mut files = vec![File::open(directory.join("shmem_enabled")).ok()?];
    for entry in std::fs::read_dir(&directory).ok()? {
        let size = entry.ok()?.path().join("shmem_enabled");
        // Kernels before 6.11 have no setting of a size, and some sizes have none.
        if size.exists() {
            files.push(File::open(size).ok()?);
        }
    }
    Some(files)
}

fn is_small(setting: &File) -> bool {
    let mut text = [0; SETTING_BYTES_MAX];
    let Ok(length) = setting.read_at(&mut text, 0) else { return false };
    let mut words = text[..length].split(u8::is_ascii_whitespace);
    words.find(|word| word.starts_with(b"[")).is_some_and(|chosen| SMALL.contains(&chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_known_to_be_small() {
        let directory = std::env::temp_dir().join(format!("pagoda-folios-{}", std::process::id()));
        assert!(Folios::open(&directory).unwrap().may_be_large(), "nothing is known");
        let settings = directory.join("transparent_hugepage");
        std::fs::create_dir_all(&directory).unwrap();
        assert!(!Folios::open(&directory).unwrap().may_be_large(), "a kernel without them");
        std::fs::create_dir_all(settings.join("hugepages-64kB")).unwrap();
        assert!(Folios::open(&directory).unwrap().may_be_large(), "the setting is missing");
        let all = settings.join("shmem_enabled");
        let size = settings.join("hugepages-64kB/shmem_enabled");
        std::fs::write(&all, "always within_size advise [never] deny force\n").unwrap();
        assert!(!Folios::open(&directory).unwrap().may_be_large());
        for (text, is_large) in [
            ("always inherit within_size advise [never]\n", false),
            ("always [inherit] within_size advise never\n", false),
            ("always inherit within_size [advise] never\n", false),
            ("always inherit [within_size] advise never\n", true),
            ("[always] inherit within_size advise never\n", true),
            ("always inherit within_size advise never [other]\n", true),
            ("", true),
        ] {
            std::fs::write(&size, text).unwrap();
            assert_eq!(Folios::open(&directory).unwrap().may_be_large(), is_large, "{text}");
        }
        std::fs::remove_file(&size).unwrap();
        let folios = Folios::open(&directory).unwrap();
        for (text, is_large) in [("[deny]", false), ("[always]", true), ("[never]", true)] {
            std::fs::write(&all, text).unwrap();
            folios.look();
            assert_eq!(folios.may_be_large(), is_large, "{text}: what was large once may still be there");
        }
        // As a process does that is forked from this one and sees it first.
        let folios = Folios::open(&directory).unwrap();
        let (settings, large) =
            (Vec::new(), Large(MmapRegion::from_file(folios.large.0.file_offset().unwrap().clone(), 8).unwrap()));
        Folios { settings, large }.large.note();
        assert!(folios.may_be_large());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
