//! Where the demo shows itself: a frame drawn over itself on a terminal, one line a second elsewhere.
//!
//! The cursor always rests below the frame, so that whatever ends the program leaves the terminal usable.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use rustix::termios::tcgetwinsize;

use super::model::Model;
use super::view::{self, ASCII, Glyphs, Row, Style, UNICODE};

/// Of a terminal that does not tell its size.
const SIZE_DEFAULT: (usize, usize) = (80, 24);
const LINE_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Live,
    Lines,
}

#[derive(Debug)]
pub struct Screen {
    kind: Kind,
    colour: bool,
    glyphs: Glyphs,
    /// Rows of the frame that is drawn, and the terminal's size then.
    drawn_rows: usize,
    size: (usize, usize),
    next_line_at: Duration,
}

impl Screen {
    pub fn new(plain: bool) -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let dumb = set("TERM").is_none_or(|term| term == "dumb");
        let live = !plain && io::stdout().is_terminal() && !dumb;
        // The first of these that is set counts (locale(7)).
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default().to_uppercase();
        let unicode = locale.contains("UTF-8") || locale.contains("UTF8");
        Self {
            kind: if live { Kind::Live } else { Kind::Lines },
            colour: live && set("NO_COLOR").is_none(),
            glyphs: if unicode { UNICODE } else { ASCII },
            drawn_rows: 0,
            size: size(),
            next_line_at: Duration::ZERO,
        }
    }

    pub fn is_live(&self) -> bool {
        self.kind == Kind::Live
    }

    /// Shows the model as of `now`. A terminal that is gone is not told so: the demo's end is what counts.
    pub fn show(&mut self, model: &Model, accelerator: &str, now: Duration) {
        match self.kind {
            Kind::Live => self.draw(&view::frame(model, accelerator, now, self.glyphs)),
            Kind::Lines if now >= self.next_line_at => {
                self.next_line_at = now + LINE_EVERY;
                write(&(view::line(model, now) + "\n"));
            }
            Kind::Lines => {}
        }
    }

    /// Prints rows that stay.
    pub fn print(&mut self, rows: &[Row]) {
        self.drawn_rows = 0;
        let text: String = rows.iter().map(|row| self.text(row, usize::MAX) + "\n").collect();
        write(&text);
    }

    fn draw(&mut self, rows: &[Row]) {
        let size = size();
        // What a change of size did to the lines on the screen is not known: begin anew.
        let mut text = if size == self.size { String::new() } else { "\x1b[H\x1b[2J".to_owned() };
        if size == self.size && self.drawn_rows > 0 {
            text += &format!("\x1b[{}A\r", self.drawn_rows);
        }
        self.size = size;
        let (columns, lines) = size;
        let shown = &rows[..rows.len().min(lines.saturating_sub(1))];
        for row in shown {
            text += &self.text(row, columns);
            text += "\x1b[K\n";
        }
        text += "\x1b[J";
        self.drawn_rows = shown.len();
        write(&text);
    }

    /// A row, cut to `columns`.
    fn text(&self, row: &Row, columns: usize) -> String {
        let mut left = columns;
        let mut text = String::new();
        for (style, piece) in &row.0 {
            let piece: String = piece.chars().take(left).collect();
            left -= piece.chars().count();
            match code(*style).filter(|_| self.colour && !piece.is_empty()) {
                Some(code) => text += &format!("\x1b[{code}m{piece}\x1b[0m"),
                None => text += &piece,
            }
        }
        text
    }
}

/// ECMA-48's graphic renditions; the terminal's own palette, so that dark and light ones both work.
fn code(style: Style) -> Option<&'static str> {
    match style {
        Style::Plain => None,
        Style::Bold => Some("1"),
        Style::Dim => Some("2"),
        Style::Good => Some("32"),
        Style::Bad => Some("1;31"),
        Style::Near => Some("36"),
        Style::Far => Some("33"),
    }
}

/// The columns and lines of the terminal, or the default where there is none.
fn size() -> (usize, usize) {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
        _ => SIZE_DEFAULT,
    }
}

fn write(text: &str) {
    let mut out = io::stdout().lock();
    // Nobody is left to be told.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
