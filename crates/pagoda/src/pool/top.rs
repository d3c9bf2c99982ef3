//! `pagoda pool top`: asks the servers how they are, and shows rates.

use pagoda_api::in_full;
use std::time::Duration;

use anyhow::Result;
use pagoda_pool::aside::Control;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use rmap::client::{Client, Reach, ServerInfo, ServerView};
use rmap::units::PAGE_SIZE;
use rmap::wire::report::Report;
use rmap_io::net::{UdpClient, Wait};
use serde::Serialize;

use super::list::{PATIENCE, medium, pressure};
use super::options::Top;
use crate::output::{Format, Side, print_json_line, print_text};
use crate::top::text::{Column, mib_per_s, render_table, size};
use crate::top::view::{draw_foot, draw_rows};
use crate::top::{Screen, watch};
use crate::units::format_size;
use pagoda_pool::slab::SLAB_CONTENT_BYTES;

/// Who is there answers at once; keys of the live view wait for it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// One server between two samples. A rate is `None` until there are two, and after the server was started anew.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    id: u32,
    address: String,
    zone: u32,
    /// How it stands: `up`, `silent` or `draining`.
    state: &'static str,
    /// Where it keeps pages: `memory` or `disk`; `None` if it is silent.
    medium: Option<&'static str>,
    pressure: Option<&'static str>,
    size_bytes: Option<u64>,
    used_bytes: Option<u64>,
    free_bytes: Option<u64>,
    disks: Option<u32>,
    clients: Option<u32>,
    read_bytes_per_s: Option<f64>,
    write_bytes_per_s: Option<f64>,
    round_trip_us: Option<f64>,
}

const COLUMNS: [Column<Row>; 14] = [
    Column { name: "SERVER", side: Side::Right, rank: 0, cell: |row| row.id.to_string() },
    Column { name: "ADDRESS", side: Side::Left, rank: 6, cell: |row| row.address.clone() },
    Column { name: "ZONE", side: Side::Right, rank: 8, cell: |row| row.zone.to_string() },
    Column { name: "STATE", side: Side::Left, rank: 0, cell: |row| row.state.to_owned() },
    Column { name: "MEDIUM", side: Side::Left, rank: 6, cell: |row| row.medium.unwrap_or("-").to_owned() },
    Column { name: "PRESSURE", side: Side::Left, rank: 5, cell: |row| row.pressure.unwrap_or("-").to_owned() },
    Column { name: "SIZE", side: Side::Right, rank: 3, cell: |row| size(row.size_bytes) },
    Column { name: "USED", side: Side::Right, rank: 0, cell: |row| size(row.used_bytes) },
    Column { name: "FREE", side: Side::Right, rank: 1, cell: |row| size(row.free_bytes) },
    Column { name: "DISKS", side: Side::Right, rank: 7, cell: |row| count(row.disks) },
    Column { name: "CLNTS", side: Side::Right, rank: 9, cell: |row| count(row.clients) },
    Column { name: "RD/s", side: Side::Right, rank: 2, cell: |row| mib_per_s(row.read_bytes_per_s) },
    Column { name: "WR/s", side: Side::Right, rank: 2, cell: |row| mib_per_s(row.write_bytes_per_s) },
    Column { name: "RTT", side: Side::Right, rank: 4, cell: |row| micros(row.round_trip_us) },
];

fn count(count: Option<u32>) -> String {
    count.map_or("-".into(), |count| count.to_string())
}

fn micros(us: Option<f64>) -> String {
    us.map_or("-".into(), |us| format!("{us:.0}"))
}

pub fn run(options: &Top, format: Format) -> Result<()> {
    let mut servers = Servers::meet(&options.pool_dir.read()?)?;
    let interval = Duration::from_secs_f64(options.pace.interval);
    match options.pace.batch.or((format == Format::Json).then_some(1)) {
        Some(samples) => batch(&mut servers, samples, interval, format),
        None => watch(&mut servers, interval),
    }
}

/// The servers, and what was seen of them last.
struct Servers {
    list: Vec<ServerInfo>,
    client: UdpClient<Control>,
    reports: Vec<Option<Report>>,
    rows: Vec<Row>,
    selected: usize,
    trouble: Option<String>,
}

impl Servers {
    fn meet(pool: &PoolConfig) -> Result<Servers> {
        let list = pool.servers()?;
        let mut client = connect::client(pool, &list, connect::no_control(), Wait::BLOCK, connect::UNHURRIED)?;
        connect::converse(&mut client, PATIENCE, |client| connect::all_up(client))?;
        let reports = vec![None; list.len()];
        let mut servers = Servers { list, client, reports, rows: Vec::new(), selected: 0, trouble: None };
        servers.sample()?;
        Ok(servers)
    }

    /// Asks all that answer, and waits for them.
    fn sample(&mut self) -> Result<()> {
        let said = |client: &Client| client.servers().all(|view| view.reach != Reach::Up || view.report.is_some());
        connect::insist(&mut self.client, ANSWERED_WITHIN, Client::ask_reports, said)?;
        let views: Vec<ServerView> = self.client.client.servers().collect();
        let seen = self.list.iter().zip(&views).zip(&self.reports);
        self.rows = seen.map(|((server, view), before)| row(server, view, before.as_ref())).collect();
        self.reports = views.into_iter().map(|view| view.report).collect();
        Ok(())
    }

    fn totals(&self) -> String {
        let sum = |value: fn(&Row) -> Option<u64>| format_size(self.rows.iter().filter_map(value).sum());
        format!(
            "{} servers  SIZE {}  USED {}  FREE {}",
            self.rows.len(),
            sum(|row| row.size_bytes),
            sum(|row| row.used_bytes),
            sum(|row| row.free_bytes)
        )
    }
}

impl Screen for Servers {
    fn refresh(&mut self) {
        self.trouble = self.sample().err().map(|error| in_full(error.as_ref()));
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let layout = Layout::vertical([Constraint::Length(1), Constraint::Min(3), Constraint::Length(1)]);
        let [head, rows, foot] = layout.areas(frame.area());
        frame.render_widget(Paragraph::new(Line::from(self.totals()).bold()), head);
        draw_rows(frame, rows, &COLUMNS, &self.rows, self.selected);
        draw_foot(frame, foot, self.trouble.as_deref(), "q quit   up/down choose   RD WR MiB/s   RTT us");
    }

    fn select(&mut self, step: isize) {
        self.selected = self.selected.saturating_add_signed(step).min(self.rows.len().saturating_sub(1));
    }
}

/// Prints so many samples; the first one after an interval, for rates need two.
fn batch(servers: &mut Servers, samples: u32, interval: Duration, format: Format) -> Result<()> {
    for index in 0..samples {
        connect::converse(&mut servers.client, interval, |_| false)?;
        servers.sample()?;
        match format {
            Format::Json => print_json_line(&servers.rows)?,
            Format::Text => {
                let gap = if index == 0 { "" } else { "\n" };
                print_text(&format!("{gap}{}\n{}", servers.totals(), render_table(&COLUMNS, &servers.rows)))?;
            }
        }
    }
    Ok(())
}

fn row(server: &ServerInfo, view: &ServerView, before: Option<&Report>) -> Row {
    let report = view.report.filter(|_| view.reach == Reach::Up);
    let bytes = |slabs: u32| u64::from(slabs) * SLAB_CONTENT_BYTES;
    let rate = |value: fn(&Report) -> u64| {
        let (now, before) = (report?, before?);
        let pages = value(&now).checked_sub(value(before))?;
        let ms = now.uptime_ms.checked_sub(before.uptime_ms).filter(|ms| *ms > 0)?;
        Some(pages as f64 * PAGE_SIZE as f64 * 1000.0 / ms as f64)
    };
    Row {
        id: server.id.0,
        address: server.addr.to_string(),
        zone: server.zone,
        state: match report {
            None => "silent",
            Some(report) if report.draining => "draining",
            Some(_) => "up",
        },
        medium: report.map(|_| medium(view)),
        pressure: report.map(|_| pressure(view.pressure)),
        size_bytes: report.map(|report| bytes(report.slabs)),
        used_bytes: report.map(|report| bytes(report.held)),
        free_bytes: report.map(|_| bytes(view.free_slabs)),
        disks: report.map(|report| report.spaces),
        clients: report.map(|report| report.sessions),
        read_bytes_per_s: rate(|report| report.reads),
        write_bytes_per_s: rate(|report| report.writes),
        round_trip_us: report.map(|_| view.round_trip.as_secs_f64() * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use rmap::crypto::PublicKey;
    use rmap::units::ServerId;
    use rmap::wire::message::Pressure;

    use super::*;

    fn seen(report: Option<Report>, before: Option<&Report>) -> Row {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 7070));
        let server = ServerInfo { id: ServerId(3), addr, key: PublicKey([0; 32]), zone: 1, announcer: None };
        let view = ServerView {
            id: server.id,
            reach: Reach::Up,
            round_trip: Duration::from_micros(50),
            free_slabs: 3,
            pressure: Pressure::Orange,
            overflow_disk: false,
            datagram: 1472,
            report,
            drain: None,
        };
        row(&server, &view, before)
    }

    #[test]
    fn rates_come_from_two_reports_of_one_life() {
        let old = Report { slabs: 4, held: 1, reads: 100, writes: 10, uptime_ms: 1000, ..Report::default() };
        let new = Report { reads: 612, uptime_ms: 3000, draining: true, ..old };
        let row = seen(Some(new), Some(&old));
        assert_eq!((row.read_bytes_per_s, row.write_bytes_per_s), (Some(1_048_576.0), Some(0.0)));
        assert_eq!((row.state, row.pressure), ("draining", Some("orange")));
        assert_eq!(
            (row.size_bytes, row.used_bytes, row.free_bytes),
            (Some(256 << 20), Some(64 << 20), Some(192 << 20))
        );
        assert_eq!(seen(Some(new), None).read_bytes_per_s, None);
        assert_eq!(seen(Some(new), Some(&new)).read_bytes_per_s, None, "no time has passed");
        let restarted = Report { reads: 700, uptime_ms: 5, ..new };
        assert_eq!(seen(Some(restarted), Some(&new)).read_bytes_per_s, None);
        let silent = seen(None, Some(&old));
        assert_eq!((silent.state, silent.used_bytes), ("silent", None));
    }

    #[test]
    fn a_table() {
        let old = Report { slabs: 4, held: 1, uptime_ms: 1000, ..Report::default() };
        let new = Report { reads: 256, spaces: 1, sessions: 2, uptime_ms: 2000, ..old };
        let text = render_table(&COLUMNS, &[seen(Some(new), Some(&old)), seen(None, None)]);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = text.lines().map(words).collect();
        assert_eq!(lines[0], "SERVER ADDRESS ZONE STATE MEDIUM PRESSURE SIZE USED FREE DISKS CLNTS RD/s WR/s RTT");
        assert_eq!(lines[1], "3 127.0.0.1:7070 1 up memory orange 256M 64M 192M 1 2 1.0 0.0 50");
        assert_eq!(lines[2], "3 127.0.0.1:7070 1 silent - - - - - - - - - -");
    }
}
