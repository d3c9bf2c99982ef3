//! CPU time of processes by the scheduler's own nanoseconds. `/proc/PID/stat` counts in hundredths of a second.
//!
//! What a thread had used that has ended meanwhile is not in it.

use std::fs;
use std::io;

use anyhow::{Context, Result, ensure};

/// CPU time of a process's threads of this name (all, if it is empty), in seconds.
///
/// # Errors
/// It is gone, or has no such thread.
pub fn threads_cpu_s(pid: u32, wanted: &str) -> Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let mut total_ns = 0.0;
    for task in fs::read_dir(&tasks).with_context(|| format!("read {tasks}"))? {
        let path = task?.path();
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if wanted.is_empty() || name.trim() == wanted {
            let text = match fs::read_to_string(path.join("schedstat")) {
                Err(error) if has_ended(&error) => continue,
                text => text.context("read a thread's time")?,
            };
            let ns = text.split(' ').next().and_then(|text| text.parse::<f64>().ok());
            total_ns += ns.context("understand a thread's time")?;
        }
    }
    ensure!(total_ns > 0.0, "process {pid} has no thread {wanted:?}");
    Ok(total_ns / 1e9)
}

/// CPU time of a process, its children and theirs, in seconds.
///
/// # Errors
/// It is gone.
pub fn tree_cpu_s(pid: u32) -> Result<f64> {
    let own = threads_cpu_s(pid, "")?;
    let children = children_of(pid)?;
    children.into_iter().try_fold(own, |sum, child| Ok(sum + tree_cpu_s(child)?))
}

/// The processes that a process has started and that run.
///
/// # Errors
/// It is gone.
pub fn children_of(pid: u32) -> Result<Vec<u32>> {
    let tasks = format!("/proc/{pid}/task");
    let mut children = Vec::new();
    for task in fs::read_dir(&tasks).with_context(|| format!("read {tasks}"))? {
        let text = match fs::read_to_string(task?.path().join("children")) {
            Err(error) if has_ended(&error) => continue,
            text => text.context("read a process's children")?,
        };
        children.extend(text.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(children)
}

/// A thread ends between two looks: its file is gone, or its reading finds no process.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_child_is_in_its_tree() {
        // The shell waits for its own child, which waits for its standard input.
        let mut child = Command::new("sh")
            .args(["-c", "cat; :"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("start a shell");
        let grandchild = crate::wait::until("a grandchild", crate::wait::HANG, || Ok(children_of(child.id())?.pop()))
            .expect("sh starts cat");
        assert!(children_of(std::process::id()).expect("ours").contains(&child.id()));
        let own = threads_cpu_s(child.id(), "").expect("the shell runs");
        assert!(tree_cpu_s(child.id()).expect("both run") > own, "{grandchild} has used nothing");
        drop(child.stdin.take());
        child.wait().expect("the shell ends");
        assert!(tree_cpu_s(child.id()).is_err());
    }
}
