//! The live view: one frame from the model, and nothing else.

use pagoda_api::HostPolicy;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState};

use super::model::Row;
use super::text::{CAUSE_COLUMNS, Column, SPACING, cause_cells, columns, columns_within, host_line, totals_line};
use crate::output::Side;

/// Rows for the faults by cause: the heading, the columns' names and a dozen causes.
const CAUSES_HEIGHT: u16 = 14;

/// What the view shows.
#[derive(Debug, Default)]
pub struct View {
    pub host: HostPolicy,
    pub rows: Vec<Row>,
    pub selected: usize,
    /// Why the rows are old.
    pub trouble: Option<String>,
}

impl View {
    /// Moves the selection by `step`, stopping at the ends.
    pub fn select(&mut self, step: isize) {
        let last = self.rows.len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(step).min(last);
    }

    /// Takes a new sample; the selection stays on its VM when VMs come and go.
    pub fn update(&mut self, host: HostPolicy, rows: Vec<Row>) {
        self.host = host;
        let name = self.rows.get(self.selected).map(|row| row.name.clone());
        self.rows = rows;
        self.trouble = None;
        if let Some(at) = self.rows.iter().position(|row| Some(&row.name) == name.as_ref()) {
            self.selected = at;
        }
        self.select(0);
    }

    pub fn draw(&self, frame: &mut Frame<'_>) {
        let [head, vms, causes, foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Min(3),
            Constraint::Length(CAUSES_HEIGHT),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.summary()), head);
        draw_rows(frame, vms, columns(&self.rows), &self.rows, self.selected);
        self.draw_causes(frame, causes);
        draw_foot(frame, foot, self.trouble.as_deref(), "q quit   up/down choose   SWR SWW MiB/s   P50 P99 us");
    }

    fn summary(&self) -> Vec<Line<'static>> {
        vec![
            Line::from(format!("pagoda  {}", host_line(&self.host))).bold(),
            Line::from(format!("        {}", totals_line(&self.rows))),
        ]
    }

    fn draw_causes(&self, frame: &mut Frame<'_>, area: Rect) {
        let Some(row) = self.rows.get(self.selected) else { return };
        let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
        let status = row.status.as_ref().map_or(String::new(), |status| format!(", {status}"));
        let title = format!("faults of {}{status}, by cause", row.name);
        frame.render_widget(Paragraph::new(Line::from(title).bold()), head);
        let rows: Vec<Vec<String>> = row.causes.iter().map(cause_cells).collect();
        frame.render_widget(table(&CAUSE_COLUMNS, &rows), body);
    }
}

/// The columns that fit, one row highlighted.
pub fn draw_rows<R>(frame: &mut Frame<'_>, area: Rect, columns: &[Column<R>], rows: &[R], selected: usize) {
    let columns = columns_within(columns, usize::from(area.width), rows);
    let cells = |row: &R| columns.iter().map(|column| (column.cell)(row)).collect();
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let heads: Vec<(&str, Side)> = columns.iter().map(|column| (column.name, column.side)).collect();
    let table = table(&heads, &cells).row_highlight_style(Style::new().reversed());
    let mut state = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, area, &mut state);
}

/// What is wrong, or else what the keys and units are.
pub fn draw_foot(frame: &mut Frame<'_>, area: Rect, trouble: Option<&str>, help: &str) {
    let line =
        trouble.map_or_else(|| Line::from(help.to_owned()).dim(), |trouble| Line::from(trouble.to_owned()).red());
    frame.render_widget(Paragraph::new(line), area);
}

fn table(columns: &[(&'static str, Side)], rows: &[Vec<String>]) -> Table<'static> {
    let aligned = |index: usize, text: String| {
        let line = Line::from(text);
        Cell::from(match columns[index].1 {
            Side::Left => line.left_aligned(),
            Side::Right => line.right_aligned(),
        })
    };
    let widths: Vec<Constraint> = (0..columns.len())
        .map(|index| {
            let cells = rows.iter().map(|row| row[index].chars().count());
            let width = cells.chain([columns[index].0.len()]).max().unwrap_or(0);
            Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX))
        })
        .collect();
    let names = columns.iter().enumerate().map(|(at, (name, _))| aligned(at, (*name).to_owned()));
    let head = TableRow::new(names.collect::<Vec<_>>()).bold();
    let body = rows.iter().map(|row| TableRow::new(row.iter().enumerate().map(|(at, cell)| aligned(at, cell.clone()))));
    Table::new(body.collect::<Vec<_>>(), widths).header(head).column_spacing(SPACING as u16)
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::show::tests::sample as vm;
    use crate::top::model::{Sample, rows};

    fn view(names: &[&str]) -> View {
        let vms = names.iter().map(|name| vm(name)).collect();
        let mut view = View::default();
        view.update(HostPolicy::default(), rows(None, &Sample { vms, ..Sample::default() }));
        view
    }

    fn drawn(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_frame() {
        let text = drawn(&view(&["web1", "db"]), 100, 24);
        for part in ["2 VMs  MEMSZ 8G", "NAME  STATE", "web1  running", "faults of web1, by cause", "minor", "q quit"] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
        let mut troubled = view(&["web1"]);
        troubled.trouble = Some("no daemon".into());
        assert!(drawn(&troubled, 100, 24).contains("no daemon"));
        // Too small a terminal and no VMs at all are no reason to panic.
        drawn(&view(&["web1"]), 5, 2);
        drawn(&View::default(), 80, 24);
    }

    #[test]
    fn the_selection_follows_its_vm() {
        let mut view = view(&["a", "b", "c"]);
        view.select(1);
        view.update(HostPolicy::default(), super::tests::view(&["b", "c"]).rows);
        assert_eq!(view.selected, 0);
        view.select(5);
        assert_eq!(view.selected, 1);
        view.select(-9);
        assert_eq!(view.selected, 0);
        view.update(HostPolicy::default(), Vec::new());
        assert_eq!(view.selected, 0);
    }
}
