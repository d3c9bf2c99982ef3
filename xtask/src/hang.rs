//! Ends programs that do not end by themselves. Before that, it prints what they and all that they have started are doing, thread
//! by thread.
//!
//! A test that waits for ever would otherwise take the whole time there is, and leave nothing to learn from.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use testkit::workspace::repository;

const LOOK_EVERY: Duration = Duration::from_millis(20);
/// For one program's stacks, in seconds: gdb reads symbols first.
const STACKS_LIMIT: &str = "60";
/// The most frames that are shown of a stack.
const FRAMES_MAX: u32 = 40;

/// Waits for `child`, at most so long. `None`: it has not ended; it was described on standard output, and killed with all that it
/// had started.
///
/// # Errors
/// It cannot be waited for.
pub fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let began = Instant::now();
    while began.elapsed() < limit {
        if let Some(status) = child.try_wait().context("wait for a program")? {
            return Ok(Some(status));
        }
        thread::sleep(LOOK_EVERY);
    }
    println!("not ended after {} s, killed:", limit.as_secs());
    family(child.id()).iter().for_each(|pid| println!("{}", describe(*pid)));
    // Stacks take a while: what has ended since may have left its number to somebody else's process.
    for pid in family(child.id()).iter().filter_map(|pid| Pid::from_raw(i32::try_from(*pid).ok()?)) {
        // One that has ended meanwhile needs none.
        kill_process(pid, Signal::KILL).ok();
    }
    child.wait().context("wait for a killed program")?;
    Ok(None)
}

/// A process and those it has started, and they have: parents first.
fn family(pid: u32) -> Vec<u32> {
    let mut family = vec![pid];
    let mut at = 0;
    while let Some(&pid) = family.get(at) {
        for thread in entries(&format!("/proc/{pid}/task")) {
            family.extend(numbers(&read(&format!("/proc/{pid}/task/{thread}/children"))));
        }
        at += 1;
    }
    family
}

/// Its command, what each thread waits for in the kernel, and the stacks of what was built here, if there is a gdb.
fn describe(pid: u32) -> String {
    let command = read(&format!("/proc/{pid}/cmdline")).replace('\0', " ");
    let mut text = format!("process {pid}: {command}\n");
    for thread in entries(&format!("/proc/{pid}/task")) {
        let about = |file: &str| read(&format!("/proc/{pid}/task/{thread}/{file}"));
        // proc_pid_stat(5): the state follows the name, which is in brackets and may have any in it.
        let stat = about("stat");
        let state = stat.rsplit_once(") ").map_or("?", |(_, fields)| fields.get(..1).unwrap_or("?"));
        let (name, place, call) = (about("comm"), about("wchan"), about("syscall"));
        let (name, call) = (name.trim(), call.split(' ').next().unwrap_or_default().trim());
        writeln!(text, "  thread {thread} {name}: {state}, in {place}, system call {call}").ok();
    }
    if fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| is_ours(&program)) {
        text += &stacks(pid);
    }
    text
}

fn is_ours(program: &Path) -> bool {
    program.starts_with(repository().join("target"))
}

fn stacks(pid: u32) -> String {
    let every = format!("thread apply all bt {FRAMES_MAX}");
    let mut gdb = Command::new("timeout");
    gdb.arg(STACKS_LIMIT).args(["gdb", "-nx", "-batch", "-p", &pid.to_string(), "-ex", &every]);
    let output = gdb.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    output.unwrap_or_default()
}

fn entries(directory: &str) -> Vec<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn numbers(text: &str) -> impl Iterator<Item = u32> + '_ {
    text.split_whitespace().filter_map(|word| word.parse().ok())
}

/// Empty when it is gone, as processes go.
fn read(path: &str) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_in_time_is_left_alone() {
        let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
        let status = wait(&mut child, Duration::from_secs(60)).unwrap().expect("it ends");
        assert_eq!(status.code(), Some(3));
    }

    #[test]
    fn what_does_not_end_is_described_and_killed_with_what_it_started() {
        let mut child = Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        let all = loop {
            let all = family(child.id());
            if all.len() == 2 && describe(all[1]).contains("sleep 1000") {
                break all;
            }
            thread::park_timeout(LOOK_EVERY);
        };
        assert!(describe(all[0]).contains("system call"), "{}", describe(all[0]));
        assert!(wait(&mut child, Duration::ZERO).unwrap().is_none());
        // Whoever becomes its parent collects it.
        let state = |pid: u32| read(&format!("/proc/{pid}/stat"));
        while !state(all[1]).is_empty() && !state(all[1]).contains(" Z ") {
            thread::park_timeout(LOOK_EVERY);
        }
    }
}
