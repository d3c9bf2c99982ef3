//! Which machine the figures are from, and which commit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::workspace::repository;

/// The machine, as printed with every result.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the CPU.
    pub cpu: String,
    /// Number of CPUs that the bench may use.
    pub cores: usize,
    /// Memory of the machine in MiB.
    pub memory_mib: u64,
    /// Release of the kernel, as `uname -r` says it.
    pub kernel: String,
    /// File system of the swap directory.
    pub filesystem: String,
}

impl Machine {
    /// Looks at this machine; `disk_dir` is where swap files go.
    pub fn look(disk_dir: &Path) -> Self {
        let field = |path: &str, key: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
            line.split_once(':').map_or(String::new(), |(_, value)| value.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let kib: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        Self {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: kib / 1024,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            filesystem: filesystem_of(disk_dir),
        }
    }

    /// All of it on one line.
    pub fn line(&self) -> String {
        let Self { cpu, cores, memory_mib, kernel, filesystem } = self;
        format!("{cpu}, {cores} CPUs, {memory_mib} MiB, Linux {kernel}, {filesystem}")
    }
}

fn filesystem_of(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| PathBuf::from("/"));
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mounted = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ');
        let (_, point, kind) = (fields.next()?, fields.next()?, fields.next()?);
        dir.starts_with(point).then_some((point.len(), kind))
    });
    // The longest mount point holds the directory; of equals the last was mounted over the others.
    mounted.max_by_key(|(length, _)| *length).map_or("unknown", |(_, kind)| kind).to_owned()
}

/// Commit of the working tree; `+` when it has changes, `unknown` outside of git.
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(repository()).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown".to_owned();
    };
    // But for what benches write themselves.
    let changed = git(&["status", "--porcelain", "--", ".", ":!bench/results"]).is_none_or(|status| !status.is_empty());
    if changed { head + "+" } else { head }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_name_and_memory() {
        let machine = Machine::look(Path::new("/"));
        assert!(machine.cores > 0 && machine.memory_mib > 0);
        assert!(!machine.kernel.is_empty() && machine.filesystem != "unknown");
    }
}
