//! The memory limit of this process's cgroup.

use std::io;
use std::path::{Path, PathBuf};

/// A limit that the kernel keeps by ending processes of the cgroup, or by holding them up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLimit {
    /// The file it is in.
    pub file: PathBuf,
    /// The processes of the cgroup may use so many bytes.
    pub bytes: u64,
}

/// Where systemd and Debian mount the hierarchies.
const V2: &str = "/sys/fs/cgroup";
const V1_MEMORY: &str = "/sys/fs/cgroup/memory";
/// From here on a limit of cgroup v1 means none: it writes the largest multiple of a page.
const V1_NONE: u64 = 1 << 62;

/// The tightest memory limit from this process's cgroup up to the root, if there is one.
///
/// # Errors
/// /proc/self/cgroup or a file that is there cannot be read.
pub fn memory_limit() -> io::Result<Option<CgroupLimit>> {
    let mut found = Vec::new();
    for (root, path, files) in hierarchies(&std::fs::read_to_string("/proc/self/cgroup")?) {
        for dir in Path::new(&path).ancestors() {
            for file in files {
                let file = Path::new(root).join(dir.strip_prefix("/").unwrap_or(dir)).join(file);
                match std::fs::read_to_string(&file) {
                    Ok(text) => found.extend(parse(&text).map(|bytes| CgroupLimit { file, bytes })),
                    // The root has none, and a container sees a part of the tree only.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }
    Ok(found.into_iter().min_by_key(|limit| limit.bytes))
}

/// Root, path and files of each hierarchy that limits memory, from the text of /proc/PID/cgroup.
fn hierarchies(text: &str) -> Vec<(&'static str, String, &'static [&'static str])> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.to_owned());
        match controllers {
            "" => Some((V2, path, &["memory.max", "memory.high"][..])),
            _ if controllers.split(',').any(|one| one == "memory") => {
                Some((V1_MEMORY, path, &["memory.limit_in_bytes"][..]))
            }
            _ => None,
        }
    };
    text.lines().filter_map(of_line).collect()
}

fn parse(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|bytes| *bytes < V1_NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_understood() {
        let v1 = "9:memory:/pagoda\n8:blkio:/\n1:name=systemd:/init.scope\n0::/\n";
        let found = hierarchies(v1);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0, found[0].1.as_str()), (V1_MEMORY, "/pagoda"));
        assert_eq!((found[1].0, found[1].1.as_str()), (V2, "/"));
        let v2 = hierarchies("0::/system.slice/pagodad.service:x\n");
        assert_eq!(v2[0].1, "/system.slice/pagodad.service:x");
        assert_eq!(hierarchies("12:cpu,cpuacct:/a\n"), []);
    }

    #[test]
    fn no_limit_is_none() {
        assert_eq!(parse("max\n"), None);
        assert_eq!(parse("9223372036854771712\n"), None);
        assert_eq!(parse("1073741824\n"), Some(1 << 30));
    }

    #[test]
    fn this_process_has_one_or_none() {
        memory_limit().unwrap();
    }
}
