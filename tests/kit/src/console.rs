//! What a VM and the programs beside it print, line by line.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What a console had next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Line(String),
    /// Not before the deadline.
    Nothing,
    /// All streams have ended.
    Ended,
}

#[derive(Debug, Default)]
struct Lines {
    all: Vec<String>,
    unread: VecDeque<String>,
    open_streams: usize,
}

/// Lines of one or more streams, in the order in which they came.
#[derive(Debug, Clone, Default)]
pub struct Console {
    shared: Arc<(Mutex<Lines>, Condvar)>,
}

impl Console {
    /// Collects a stream's lines on a thread of its own, until it ends.
    pub fn collect(&self, stream: impl Read + Send + 'static) {
        self.lock().open_streams += 1;
        let console = self.clone();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut bytes = Vec::new();
            // Firmware prints what is not UTF-8.
            while reader.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
                let line = printable(&String::from_utf8_lossy(&bytes));
                bytes.clear();
                let mut lines = console.lock();
                lines.all.push(line.clone());
                lines.unread.push_back(line);
                console.shared.1.notify_all();
            }
            console.lock().open_streams -= 1;
            console.shared.1.notify_all();
        });
    }

    /// Takes the next line that nobody has taken, and waits for it until the deadline.
    pub fn next(&self, deadline: Instant) -> Output {
        let mut lines = self.lock();
        loop {
            if let Some(line) = lines.unread.pop_front() {
                return Output::Line(line);
            }
            if lines.open_streams == 0 {
                return Output::Ended;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Output::Nothing;
            }
            lines = self.shared.1.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All lines so far.
    pub fn text(&self) -> String {
        self.lock().all.join("\n")
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line without control characters and colours: firmware and logs would play with our terminal.
pub fn printable(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line.trim_end().chars();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' {
            // A sequence that begins with a bracket ends with a letter; others have one character.
            if rest.next() == Some('[') {
                let _ = rest.find(|c| c.is_ascii_alphabetic());
            }
        } else if !c.is_control() {
            text.push(c);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn control_characters_are_taken_out() {
        for (line, expected) in [
            ("plain é\r\n", "plain é"),
            ("\u{1b}[2J\u{1b}[1;31mred\u{1b}[0m\r\n", "red"),
            ("\u{1b}cab\u{7}\n", "ab"),
            ("cut \u{1b}[", "cut "),
        ] {
            assert_eq!(printable(line), expected, "{line:?}");
        }
    }

    #[test]
    fn a_console_gives_each_line_once_and_its_end() {
        let console = Console::default();
        console.collect(&b"a\r\nb\n"[..]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut lines = Vec::new();
        while let Output::Line(line) = console.next(deadline) {
            lines.push(line);
        }
        assert_eq!((lines.join(","), console.next(deadline)), ("a,b".to_owned(), Output::Ended));
        assert_eq!(console.text(), "a\nb");
    }
}
