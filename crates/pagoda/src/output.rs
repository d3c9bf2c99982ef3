//! Tables and progress for people. What the servers print too comes from `pagoda-cli`.

use std::io::{self, IsTerminal, Write};

pub use pagoda_cli::output::{Format, print_json, print_json_line, print_text};
use unicode_width::UnicodeWidthStr;

/// Which side of its column a cell keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// Rows under headings, each column as wide as its widest cell.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(columns: &[(&'static str, Side)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    pub fn render(&self) -> String {
        let width = |index: usize| {
            let cells = self.rows.iter().map(|row| row[index].width());
            cells.chain([self.columns[index].0.len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let headings = self.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        let mut text = String::new();
        for row in std::iter::once(&headings).chain(&self.rows) {
            let cells = row.iter().zip(&self.columns).zip(&widths);
            let line: Vec<String> = cells
                .map(|((cell, (_, side)), &width)| {
                    // Not by `format!`, which counts characters: some take two columns.
                    let blanks = " ".repeat(width - cell.width());
                    match side {
                        Side::Left => format!("{cell}{blanks}"),
                        Side::Right => format!("{blanks}{cell}"),
                    }
                })
                .collect();
            text += line.join("  ").trim_end();
            text.push('\n');
        }
        text
    }

    pub fn print(&self) -> io::Result<()> {
        print_text(&self.render())
    }
}

/// How far something long is: one line of a terminal, which is gone when it is over. Elsewhere nothing is said.
#[derive(Debug, Default)]
pub struct Progress {
    is_shown: bool,
}

impl Progress {
    pub fn say(&mut self, text: &str) {
        let mut out = io::stderr();
        if out.is_terminal() {
            self.is_shown = true;
            // To the line's beginning; what is behind the text is erased.
            let _ = write!(out, "\r{text}\x1b[K").and_then(|()| out.flush());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown {
            let mut out = io::stderr();
            let _ = write!(out, "\r\x1b[K").and_then(|()| out.flush());
        }
    }
}

/// A term and its value a line.
pub fn lines_text(lines: &[(&str, String)]) -> String {
    lines.iter().map(|(term, value)| format!("{term:<14} {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("NAME", Side::Left), ("SIZE", Side::Right), ("X", Side::Left)]);
        table.row(vec!["web1".into(), "4G".into(), String::new()]);
        table.row(vec!["database".into(), "1023.9M".into(), "ü".into()]);
        let expected = "\
NAME         SIZE  X
web1           4G
database  1023.9M  ü
";
        assert_eq!(table.render(), expected);
    }
}
