//! Looks at a program before it is started: does it exist, and will it load the shim?

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::Access;
use rustix::io::Errno;

/// Set-user-ID and set-group-ID of a mode.
const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;

/// Enough of a file for its ELF header and program headers, which linkers put first.
const HEAD_BYTES: u64 = 4096;

/// Finds `program` as `execvp` would and checks that it can run under the shim.
pub fn find(program: &str) -> Result<PathBuf> {
    let path = locate(program, std::env::var_os("PATH").unwrap_or_default().as_ref())?;
    let stat = path.metadata().with_context(|| format!("look at {}", path.display()))?;
    let euid = rustix::process::geteuid().as_raw();
    let egid = rustix::process::getegid().as_raw();
    if (stat.mode() & S_ISUID != 0 && stat.uid() != euid) || (stat.mode() & S_ISGID != 0 && stat.gid() != egid) {
        bail!(
            "{} changes its user or group when it starts (set-user-ID), and such programs load no \
             shim: run it as that user",
            path.display()
        );
    }
    if euid != 0 && has_capabilities(&path)? {
        bail!(
            "{} has file capabilities, and the dynamic linker loads no shim into such programs: run a copy without them, \
             and give them as ambient capabilities (systemd: AmbientCapabilities=)",
            path.display()
        );
    }
    let mut head = Vec::new();
    File::open(&path)
        .and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head))
        .with_context(|| format!("read {}", path.display()))?;
    if is_static(&head) {
        bail!("{} is statically linked and loads no shim: use a dynamically linked build of it", path.display());
    }
    Ok(path)
}

/// Whether a program gains capabilities when it starts (capabilities(7)).
fn has_capabilities(path: &Path) -> Result<bool> {
    let mut value = [0_u8; 64];
    match rustix::fs::getxattr(path, "security.capability", &mut value) {
        Ok(_) | Err(Errno::RANGE) => Ok(true),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("read the capabilities of {}", path.display())),
    }
}

/// `program` with a slash is a path; else the first executable of that name in `search_path`.
fn locate(program: &str, search_path: &std::ffi::OsStr) -> Result<PathBuf> {
    if program.contains('/') {
        let path = PathBuf::from(program);
        if !path.exists() {
            bail!("{program} does not exist");
        }
        if !is_executable(&path) {
            bail!("{program} is not an executable file: chmod +x it, or name another");
        }
        return Ok(path);
    }
    std::env::split_paths(search_path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(program))
        .find(|path| is_executable(path))
        .with_context(|| format!("{program} is not in PATH: install it, or give its full path"))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok()
}

/// An ELF program without an interpreter: the kernel starts it without a dynamic linker, so
/// nothing reads LD_PRELOAD. Layout: elf(5).
fn is_static(head: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    // 64-bit, little-endian; of others we cannot tell.
    if head.get(..6) != Some(b"\x7fELF\x02\x01") {
        return false;
    }
    let headers = (|| {
        let start = usize::try_from(u64_at(32)?).ok()?;
        let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
        (0..count).map(|index| u32_at(start.checked_add(index * size)?)).collect::<Option<Vec<u32>>>()
    })();
    // Headers elsewhere in the file: let the dynamic linker find out.
    headers.is_some_and(|types| !types.contains(&PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF header with program headers of these types.
    fn elf(types: &[u32]) -> Vec<u8> {
        let mut head = vec![0; 64];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        head[32] = 64;
        head[54] = 56;
        head[56] = u8::try_from(types.len()).unwrap();
        for kind in types {
            head.extend_from_slice(&kind.to_le_bytes());
            head.extend_from_slice(&[0; 52]);
        }
        head
    }

    #[test]
    fn static_programs() {
        assert!(is_static(&elf(&[1, 1])));
        assert!(!is_static(&elf(&[6, 3, 1])));
        assert!(!is_static(&elf(&[1, 1])[..70]), "cut short: cannot tell");
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(b""));
    }

    #[test]
    fn finding() {
        assert_eq!(locate("sh", "relative:/bin".as_ref()).unwrap(), PathBuf::from("/bin/sh"));
        let said = |program: &str| locate(program, "/bin".as_ref()).unwrap_err().to_string();
        assert!(said("no-such-program").contains("not in PATH"));
        assert!(said("/no/such").contains("does not exist"));
        assert!(said("/etc/passwd").contains("not an executable"));
        assert!(said("/bin/").contains("not an executable"));
        assert!(find("sh").is_ok());
    }
}
