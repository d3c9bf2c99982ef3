//! What the host's kernel is set to, and whether its userfaultfd does what Pagoda relies on.

mod cgroup;
mod selftest;

use std::fs;
use std::io;
use std::path::Path;

pub use cgroup::{CgroupLimit, memory_limit};
pub use selftest::{Report, SelfTestError, selftest};

const HUGE_DIR: &str = "/sys/kernel/mm/transparent_hugepage";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";
/// Shim-mapped runs of shared pages cost two mappings each; the default is 65530 for a whole process.
pub const MAX_MAP_COUNT_WANTED: u64 = 1 << 20;

/// When the kernel's internal shmem (memfds) takes folios of one size: `shmem_enabled` of that size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmemHuge {
    /// The kernel takes such folios wherever it can.
    Always,
    /// As the file `transparent_hugepage/shmem_enabled` says.
    Inherit,
    /// When wholly inside the file's size, or advised.
    WithinSize,
    /// Where `MADV_HUGEPAGE` asks for it: what Pagoda wants.
    Advise,
    /// The kernel never takes such folios.
    Never,
}

impl ShmemHuge {
    const ALL: [(ShmemHuge, &'static str); 5] = [
        (ShmemHuge::Always, "always"),
        (ShmemHuge::Inherit, "inherit"),
        (ShmemHuge::WithinSize, "within_size"),
        (ShmemHuge::Advise, "advise"),
        (ShmemHuge::Never, "never"),
    ];

    /// The word the kernel uses.
    pub fn word(self) -> &'static str {
        Self::ALL.iter().find(|(setting, _)| *setting == self).map_or("never", |(_, word)| word)
    }

    /// The word in brackets is the one in force.
    fn parse(text: &str) -> Option<ShmemHuge> {
        let chosen = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))?;
        Self::ALL.iter().find(|(_, word)| *word == chosen).map(|(setting, _)| *setting)
    }
}

/// Folio sizes Pagoda cares about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolioSize {
    /// One chunk: what the daemon fills holes with.
    Chunk,
    /// 2 MiB: what an unarmed VM runs on.
    Huge,
}

impl FolioSize {
    const fn file(self) -> &'static str {
        match self {
            FolioSize::Chunk => "hugepages-1024kB/shmem_enabled",
            FolioSize::Huge => "hugepages-2048kB/shmem_enabled",
        }
    }

    /// The setting of this size; `None` on a kernel without it (sizes of their own came with 6.11).
    pub fn setting(self) -> Option<ShmemHuge> {
        read_setting(Path::new(HUGE_DIR), self)
    }

    /// Sets this size. Concerns every memfd and shared anonymous mapping of the host that asks with `MADV_HUGEPAGE`.
    ///
    /// # Errors
    /// `PermissionDenied` unless root; `NotFound` on a kernel without it.
    pub fn set(self, setting: ShmemHuge) -> io::Result<()> {
        fs::write(Path::new(HUGE_DIR).join(self.file()), setting.word())
    }

    /// Whether advised memfd mappings get folios of this size.
    pub fn on_advice(self) -> bool {
        match self.setting() {
            Some(ShmemHuge::Always | ShmemHuge::WithinSize | ShmemHuge::Advise) => true,
            Some(ShmemHuge::Inherit) => {
                fs::read_to_string(Path::new(HUGE_DIR).join("shmem_enabled")).is_ok_and(|text| {
                    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|on| text.contains(on))
                })
            }
            Some(ShmemHuge::Never) | None => false,
        }
    }
}

fn read_setting(dir: &Path, size: FolioSize) -> Option<ShmemHuge> {
    ShmemHuge::parse(&fs::read_to_string(dir.join(size.file())).ok()?)
}

/// Mappings one process may have.
///
/// # Errors
/// The error of reading the sysctl.
pub fn max_map_count() -> io::Result<u64> {
    let text = fs::read_to_string(MAX_MAP_COUNT)?;
    text.trim().parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "vm.max_map_count is not a number"))
}

/// Raises `vm.max_map_count` to [`MAX_MAP_COUNT_WANTED`] and returns what it is now. Never lowers it.
///
/// # Errors
/// `PermissionDenied` unless root.
pub fn raise_max_map_count() -> io::Result<u64> {
    let now = max_map_count()?;
    if now < MAX_MAP_COUNT_WANTED {
        fs::write(MAX_MAP_COUNT, MAX_MAP_COUNT_WANTED.to_string())?;
    }
    max_map_count()
}

/// Whether a directory is on a file system in memory.
///
/// # Errors
/// The error of statfs(2).
pub fn is_in_memory(dir: &Path) -> io::Result<bool> {
    Ok(rustix::fs::statfs(dir)?.f_type as u64 == crate::ram::TMPFS_MAGIC)
}

/// Whether the host swaps: its kernel may then take pages of a VM's RAM that Pagoda counts as resident.
///
/// # Errors
/// The error of reading /proc/swaps.
pub fn swap_is_on() -> io::Result<bool> {
    // The first line is a heading.
    Ok(fs::read_to_string("/proc/swaps")?.lines().count() > 1)
}

/// The name of this life of the host: another one after each start of it.
///
/// # Errors
/// Of reading /proc.
pub fn boot_id() -> io::Result<String> {
    fs::read_to_string(BOOT_ID).map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets_counts() {
        let check = |text, expected| assert_eq!(ShmemHuge::parse(text), expected, "{text}");
        check("always inherit within_size advise [never]\n", Some(ShmemHuge::Never));
        check("always [inherit] within_size advise never", Some(ShmemHuge::Inherit));
        check("[within_size] x", Some(ShmemHuge::WithinSize));
        check("always never", None);
        check("[deny]", None);
    }

    #[test]
    fn limits_and_swap_of_this_host_are_read() {
        assert_eq!(boot_id().unwrap().len(), 36);
        assert!(max_map_count().unwrap() > 0);
        swap_is_on().unwrap();
    }

    #[test]
    fn this_kernel_passes_the_self_test() {
        let report = selftest().unwrap();
        assert_ne!(report.permission, crate::uffd::Permission::None { advice: String::new() });
    }
}
