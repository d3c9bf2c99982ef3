//! What a process prints, line by line, and waiting for a line.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Lines shown when something went wrong.
const TAIL_LINES: usize = 40;

#[derive(Debug, Default)]
struct State {
    lines: Vec<String>,
    /// Streams that are still open.
    open: usize,
}

/// Lines of one or more streams.
#[derive(Debug, Clone, Default)]
pub struct Console {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Console {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Collects a stream's lines on a thread of its own, until it ends.
    pub fn collect(&self, stream: impl Read + Send + 'static, prefix: &'static str) {
        self.lock().open += 1;
        let console = self.clone();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut bytes = Vec::new();
            // A guest's firmware prints what is not UTF-8.
            while reader.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
                let line = format!("{prefix}{}", String::from_utf8_lossy(&bytes).trim_end());
                bytes.clear();
                console.lock().lines.push(line);
                console.shared.1.notify_all();
            }
            console.lock().open -= 1;
            console.shared.1.notify_all();
        });
    }

    /// Until everything was collected that the streams had: their program has ended. One that another program holds is not waited for long.
    pub fn wait_end(&self) {
        const HELD_MAX: Duration = Duration::from_secs(10);
        let state = self.lock();
        let wait = self.shared.1.wait_timeout_while(state, HELD_MAX, |state| state.open > 0);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// Its streams have ended, or a line of them is such.
    pub fn is_over(&self, is_such: impl Fn(&str) -> bool) -> bool {
        let state = self.lock();
        state.open == 0 || state.lines.iter().any(|line| is_such(line))
    }

    /// Number of lines so far; `wait` can begin there.
    pub fn mark(&self) -> usize {
        self.lock().lines.len()
    }

    /// The first line from `from` on in which `find` finds something, and the number of the line after it.
    ///
    /// # Errors
    /// The deadline is over, or the streams ended without such a line.
    pub fn wait<T>(
        &self,
        what: &str,
        from: usize,
        deadline: Instant,
        mut find: impl FnMut(&str) -> Option<T>,
    ) -> Result<(usize, T)> {
        let mut at = from;
        let mut state = self.lock();
        loop {
            while let Some(line) = state.lines.get(at) {
                at += 1;
                if let Some(found) = find(line) {
                    return Ok((at, found));
                }
            }
            if state.open == 0 {
                bail!("the output ended before {what}");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("deadline over, waiting for {what}");
            }
            let waited = self.shared.1.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All lines from `from` on.
    pub fn lines(&self, from: usize) -> Vec<String> {
        self.lock().lines.iter().skip(from).cloned().collect()
    }

    /// The last lines, for the message of a test that fails.
    pub fn tail(&self) -> String {
        let state = self.lock();
        let start = state.lines.len().saturating_sub(TAIL_LINES);
        state.lines[start..].join("\n")
    }
}
