//! One line on standard error, without allocation: all the shim ever tells a person.

use std::fmt::{self, Write};

/// Longest line; the daemon's refusal text (1024 bytes) and its introduction fit.
const LINE_MAX: usize = 1200;

struct Line {
    bytes: [u8; LINE_MAX],
    len: usize,
}

impl Write for Line {
    /// Keeps what fits: a cut message is better than none.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The last byte is the newline's.
        let fits = text.len().min(LINE_MAX - 1 - self.len);
        self.bytes[self.len..self.len + fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.len += fits;
        Ok(())
    }
}

/// Writes `pagoda: <message>` to standard error; a failure to do so has nobody to be told to.
pub fn say(message: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; LINE_MAX], len: 0 };
    let _ = write!(line, "pagoda: {message}");
    line.bytes[line.len] = b'\n';
    // SAFETY: write(2) reads `len + 1` bytes from the pointer; they are initialised and inside `bytes`.
    unsafe { crate::real::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len + 1) };
}

/// Says why, and ends the process: a VM must not run unmanaged.
pub fn give_up(message: fmt::Arguments<'_>) -> ! {
    say(message);
    // SAFETY: _exit(2) has no conditions. Not exit(3): the caller is inside the VMM's own mmap, and atexit handlers
    // may want locks it holds.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_too_long_is_cut_and_leaves_room_for_its_end() {
        let mut line = Line { bytes: [0; LINE_MAX], len: 0 };
        for _ in 0..LINE_MAX {
            line.write_str("ab").unwrap();
        }
        assert_eq!(line.len, LINE_MAX - 1);
    }
}
