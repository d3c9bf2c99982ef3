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
    let (mut total_ns, mut is_any) = (0.0, false);
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
            is_any = true;
        }
    }
    ensure!(is_any, "process {pid} has no thread {wanted:?}");
    Ok(total_ns / 1e9)
}

/// A process, its children and theirs, as they are now.
///
/// # Errors
/// It is gone.
pub fn tree_of(pid: u32) -> Result<Vec<u32>> {
    let mut tree = vec![pid];
    for child in children_of(pid)? {
        tree.extend(tree_of(child)?);
    }
    Ok(tree)
}

/// The processes that a process has started and that run.
fn children_of(pid: u32) -> Result<Vec<u32>> {
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
    use crate::wait;

    #[test]
    fn a_child_is_in_its_tree() {
        // The shell waits for its own child, which waits for its standard input.
        let mut child = Command::new("sh")
            .args(["-c", "cat; :"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("start a shell");
        let tree =
            wait::until("a grandchild", wait::HANG, || Ok(Some(tree_of(child.id())?).filter(|all| all.len() == 2)))
                .expect("sh starts cat");
        // A process that has just been made may have used nothing.
        let used: f64 = tree.iter().map(|pid| threads_cpu_s(*pid, "").expect("it runs")).sum();
        assert!(used > 0.0, "the shell has run");
        assert!(threads_cpu_s(child.id(), "no such thread").is_err());
        drop(child.stdin.take());
        child.wait().expect("the shell ends");
        assert!(tree_of(child.id()).is_err());
    }
}
