//! How fast a process reads a disk while a VM moves out of its swap: from what the kernel counts of it, again and again.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(2);
/// What it has read before and after that, in percent, is not counted: then it does something else beside.
const FROM_PERCENT: u64 = 10;
const TO_PERCENT: u64 = 90;

/// Looks at a process until it is ended.
pub struct Reads {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(Instant, u64)>>,
}

impl Reads {
    pub fn of(pid: u32) -> Reads {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                if let Some(bytes) = read_bytes(pid) {
                    seen.push((Instant::now(), bytes));
                }
                std::thread::sleep(LOOK);
            }
            seen
        });
        Reads { over, thread }
    }

    /// Bytes a second while it was reading; 0 if it has read nothing.
    pub fn end(self) -> f64 {
        self.over.store(true, Ordering::Relaxed);
        rate(&self.thread.join().unwrap_or_default()).unwrap_or(0.0)
    }
}

fn rate(seen: &[(Instant, u64)]) -> Option<f64> {
    let (first, last) = (seen.first()?.1, seen.last()?.1);
    let part = |percent: u64| first + (last - first) * percent / 100;
    let at = |bytes: u64| seen.iter().find(|(_, read)| *read > bytes);
    let (begin, end) = (at(part(FROM_PERCENT))?, at(part(TO_PERCENT))?);
    let seconds = end.0.duration_since(begin.0).as_secs_f64();
    (seconds > 0.0).then(|| (end.1 - begin.1) as f64 / seconds)
}

/// proc_pid_io(5): bytes that it had the disk read.
fn read_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_middle() {
        let start = Instant::now();
        let seen = |points: &[(u64, u64)]| -> Vec<(Instant, u64)> {
            points.iter().map(|(ms, bytes)| (start + Duration::from_millis(*ms), *bytes)).collect()
        };
        assert_eq!(rate(&[]), None);
        assert_eq!(rate(&seen(&[(0, 5), (10, 5)])), None);
        // 100 bytes each 10 ms, and a long time before and after.
        let mut points = vec![(0, 0), (5000, 0)];
        points.extend((0..=10).map(|step| (5000 + step * 10, step * 100)));
        points.push((9000, 1000));
        assert_eq!(rate(&seen(&points)), Some(10_000.0));
    }
}
