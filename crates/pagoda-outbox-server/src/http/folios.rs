//! Whether the kernel may give files in memory larger units than pages: *large folios*.
//!
//! Bytes are sent from the file's own pages, and a client on this host may have them in its queue after it has acknowledged
//! them. To punch a page takes it out of the file and leaves it to the queue as it is. To punch a part of a large folio writes
//! zeros into it first (mm/truncate.c, truncate_inode_partial_folio), and the client would read those. So where there may be
//! large folios, bytes are copied before they are sent.
//!
//! The host's settings say it. Their files are opened while the host's directories are there, and read again from time to time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// A file may have large folios. Stays so, for they stay when the setting changes.
    may_be_large: AtomicBool,
}

impl Folios {
    /// Has to be called before the process leaves the host.
    pub fn of_host() -> Folios {
        Folios::open(Path::new(SETTINGS))
    }

    /// Where nothing says that they are small.
    pub fn unknown() -> Folios {
        Folios { settings: Vec::new(), may_be_large: AtomicBool::new(true) }
    }

    fn open(directory: &Path) -> Folios {
        let Some(settings) = settings(directory) else { return Folios::unknown() };
        let folios = Folios { settings, may_be_large: AtomicBool::new(false) };
        folios.look();
        folios
    }

    /// Reads the settings again.
    pub fn look(&self) {
        if !self.settings.iter().all(is_small) {
            self.may_be_large.store(true, Ordering::Relaxed);
        }
    }

    pub fn may_be_large(&self) -> bool {
        self.may_be_large.load(Ordering::Relaxed)
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
        assert!(Folios::open(&directory).may_be_large(), "nothing is known");
        let settings = directory.join("transparent_hugepage");
        std::fs::create_dir_all(&directory).unwrap();
        assert!(!Folios::open(&directory).may_be_large(), "a kernel without them");
        std::fs::create_dir_all(settings.join("hugepages-64kB")).unwrap();
        assert!(Folios::open(&directory).may_be_large(), "the setting is missing");
        let all = settings.join("shmem_enabled");
        let size = settings.join("hugepages-64kB/shmem_enabled");
        std::fs::write(&all, "always within_size advise [never] deny force\n").unwrap();
        assert!(!Folios::open(&directory).may_be_large());
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
            assert_eq!(Folios::open(&directory).may_be_large(), is_large, "{text}");
        }
        std::fs::remove_file(&size).unwrap();
        let folios = Folios::open(&directory);
        for (text, is_large) in [("[deny]", false), ("[always]", true), ("[never]", true)] {
            std::fs::write(&all, text).unwrap();
            folios.look();
            assert_eq!(folios.may_be_large(), is_large, "{text}: what was large once may still be there");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
