//! Versions of QEMU programs that run or ran: who starts one again need not ask it first, which takes some 20 ms.
//!
//! A program is known by its file, and that by what changes when it is replaced. It is a hint, for a QEMU may say anything: two that
//! say different things of one file make it unknown, who would refuse something for it asks first, and a QEMU that is started is asked by
//! its monitor before it gets any state.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Programs that are remembered. Hosts have a few; with more, all are forgotten.
const PROGRAMS_MAX: usize = 64;

/// Device, inode, length, and when content and inode were changed.
type File = (u64, u64, u64, (i64, i64), (i64, i64));

/// What processes of one file have said.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    Version(String),
    Different,
}

/// What the programs of this host have said of their versions, by file.
#[derive(Debug, Default)]
pub struct Programs(Mutex<HashMap<File, Said>>);

impl Programs {
    fn lock(&self) -> MutexGuard<'_, HashMap<File, Said>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process has said its version.
    pub fn note(&self, pid: u32, version: &str) {
        let Some(file) = file(&PathBuf::from(format!("/proc/{pid}/exe"))) else { return };
        let mut known = self.lock();
        if known.len() >= PROGRAMS_MAX {
            known.clear();
        }
        let said = Said::Version(version.to_owned());
        known
            .entry(file)
            .and_modify(|before| {
                if *before != said {
                    *before = Said::Different
                }
            })
            .or_insert(said.clone());
    }

    /// The version of a program, if it is known.
    pub fn version_of(&self, program: &Path) -> Option<String> {
        let program = Some(program).filter(|program| program.is_absolute())?;
        match self.lock().get(&file(program)?)? {
            Said::Version(version) => Some(version.clone()),
            Said::Different => None,
        }
    }
}

fn file(path: &Path) -> Option<File> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let (written, changed) = ((found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec()));
    Some((found.dev(), found.ino(), found.len(), written, changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_known_until_it_is_replaced() {
        let programs = Programs::default();
        let dir = std::env::temp_dir().join(format!("pagodad-programs-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let program = dir.join("sleep");
        // By another process: a child of another test would inherit our descriptor, and nobody starts a file that is written to.
        let copied = std::process::Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap();
        assert!(copied.success());
        let mut child = std::process::Command::new(&program).arg("1000").spawn().unwrap();
        assert_eq!(programs.version_of(&program), None);
        programs.note(child.id(), "10.0.2");
        assert_eq!(programs.version_of(&program).as_deref(), Some("10.0.2"));
        programs.note(child.id(), "1.0.0");
        assert_eq!(programs.version_of(&program), None, "one of the two is not true");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(programs.version_of(Path::new("/bin/sleep")), None, "another file");
        std::fs::write(&program, b"another program").unwrap();
        assert_eq!(programs.version_of(&program), None, "it was replaced");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
