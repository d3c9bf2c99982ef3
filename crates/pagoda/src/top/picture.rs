//! A frame of a live view as a picture: the cells of a terminal, drawn as SVG.

use std::fmt::Write;
use std::io;

use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};
use ratatui::{Frame, Terminal};

/// A cell of the terminal, in the picture's units.
const CELL_WIDTH: u32 = 8;
const CELL_HEIGHT: u32 = 17;
/// From the top of a line to the feet of its letters.
const BASELINE: u32 = 13;
const MARGIN: u32 = 12;
const PAPER: &str = "#16181d";
const INK: &str = "#d8dee9";
const DIM: &str = "#8b93a5";
const RED: &str = "#ff6b6b";

/// Draws `screen` into `columns` times `lines` cells.
///
/// # Errors
/// Those of drawing on a terminal; memory has none.
pub fn draw(columns: u16, lines: u16, screen: impl FnOnce(&mut Frame<'_>)) -> io::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).map_err(io::Error::other)?;
    terminal.draw(screen).map_err(io::Error::other)?;
    Ok(svg(terminal.backend().buffer()))
}

fn svg(buffer: &Buffer) -> String {
    let (columns, lines) = (u32::from(buffer.area.width), u32::from(buffer.area.height));
    let (width, height) = (columns * CELL_WIDTH + 2 * MARGIN, lines * CELL_HEIGHT + 2 * MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"monospace\" \
         font-size=\"13\">\n<rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"{PAPER}\"/>\n"
    );
    for (row, cells) in buffer.content.chunks(usize::from(buffer.area.width.max(1))).enumerate() {
        let top = MARGIN + row as u32 * CELL_HEIGHT;
        let mut column = 0;
        for run in cells.chunk_by(|a, b| look(a) == look(b)) {
            draw_run(&mut out, MARGIN + column * CELL_WIDTH, top, run);
            column += run.len() as u32;
        }
    }
    out.push_str("</svg>\n");
    out
}

fn look(cell: &Cell) -> (Color, Modifier) {
    (cell.fg, cell.modifier)
}

/// Cells beside each other that look alike.
fn draw_run(out: &mut String, left: u32, top: u32, run: &[Cell]) {
    let (colour, modifier) = look(&run[0]);
    let reversed = modifier.contains(Modifier::REVERSED);
    if reversed {
        let width = run.len() as u32 * CELL_WIDTH;
        let _ =
            writeln!(out, "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{CELL_HEIGHT}\" fill=\"{INK}\"/>");
    }
    // Blanks at the ends are no text: who draws the picture may leave them out, and would stretch the rest.
    let is_blank = |cell: &Cell| cell.symbol().trim().is_empty();
    let Some(first) = run.iter().position(|cell| !is_blank(cell)) else { return };
    let last = run.iter().rposition(|cell| !is_blank(cell)).unwrap_or(first);
    let text = escaped(&run[first..=last].iter().map(Cell::symbol).collect::<String>());
    let (x, y) = (left + first as u32 * CELL_WIDTH, top + BASELINE);
    let width = (last - first + 1) as u32 * CELL_WIDTH;
    let ink = match colour {
        _ if reversed => PAPER,
        Color::Red => RED,
        _ if modifier.contains(Modifier::DIM) => DIM,
        _ => INK,
    };
    let weight = if modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
    // `textLength` keeps columns below each other, whatever font the reader has.
    let _ = writeln!(
        out,
        "<text x=\"{x}\" y=\"{y}\" textLength=\"{width}\" xml:space=\"preserve\" fill=\"{ink}\"{weight}>{text}</text>"
    );
}

/// The characters of XML in a name are not markup.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use ratatui::style::Stylize;
    use ratatui::text::Line;
    use ratatui::widgets::Paragraph;

    use super::*;

    fn picture(line: Line<'static>) -> String {
        draw(20, 1, |frame| frame.render_widget(Paragraph::new(line), frame.area())).unwrap()
    }

    #[test]
    fn a_line_of_each_look() {
        for (line, expected) in [
            (Line::from("plain"), format!("fill=\"{INK}\">plain")),
            (Line::from("head").bold(), format!("fill=\"{INK}\" font-weight=\"bold\">head")),
            (Line::from("help").dim(), format!("fill=\"{DIM}\">help")),
            (Line::from("broken").red(), format!("fill=\"{RED}\">broken")),
            (Line::from("chosen").reversed(), format!("fill=\"{PAPER}\">chosen")),
        ] {
            let drawn = picture(line);
            assert!(drawn.contains(&expected), "{expected} in\n{drawn}");
        }
    }

    #[test]
    fn a_name_is_no_markup() {
        let drawn = picture(Line::from("<script>&"));
        assert!(drawn.contains("&lt;script&gt;&amp;") && !drawn.contains("<script>"), "{drawn}");
    }

    #[test]
    fn no_cells() {
        assert!(draw(0, 0, |_| {}).unwrap().ends_with("</svg>\n"));
    }
}
