//! `pagoda top`: samples the daemon, and shows rates. The loop of every live view is here, too.

mod model;
mod picture;
pub mod text;
pub mod view;

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_api::{Client, ClientError, HostPolicy};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde::Serialize;

use self::model::{Row, Sample, rows};
use self::view::View;
use crate::cli;
use crate::exit::UsageError;
use crate::output::{Format, print_json_line, print_text};

/// What a key asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    Quit,
    Move(isize),
}

/// What is watched live.
pub trait Screen {
    /// Takes a new sample, and shows it with the rates since the last one. What cannot be had is waited for.
    fn refresh(&mut self);
    fn draw(&self, frame: &mut Frame<'_>);
    /// Moves the selection by so many rows.
    fn select(&mut self, step: isize);
}

pub fn run(client: &Client, options: &cli::Top, format: Format) -> Result<()> {
    let sampler = Sampler { client, start: Instant::now() };
    let interval = Duration::from_secs_f64(options.pace.interval);
    if let Some(file) = &options.svg {
        return paint(&sampler, interval, file);
    }
    match options.pace.batch {
        Some(count) => batch(&sampler, count, interval, format),
        None if format == Format::Json => {
            Err(UsageError("--json needs --batch N: the live view is for people".into()).into())
        }
        None => {
            let before = sampler.sample()?;
            let mut view = View::default();
            view.update(before.host.clone(), rows(None, &before));
            watch(&mut Vms { sampler, view, before }, interval)
        }
    }
}

/// Shows a screen until the user quits.
pub fn watch(screen: &mut impl Screen, interval: Duration) -> Result<()> {
    if !std::io::stdout().is_terminal() {
        return Err(UsageError("standard output is not a terminal: add --batch N".into()).into());
    }
    let mut terminal = ratatui::try_init().context("set up the terminal")?;
    let result = live(&mut terminal, screen, interval);
    ratatui::restore();
    result
}

struct Sampler<'a> {
    client: &'a Client,
    start: Instant,
}

impl Sampler<'_> {
    fn sample(&self) -> Result<Sample, ClientError> {
        let (host, vms) = (self.client.host()?.policy, self.client.vms()?.vms);
        Ok(Sample { at: self.start.elapsed(), host, vms })
    }
}

/// What one sample of `--batch --json` prints.
#[derive(Serialize)]
struct BatchSample<'a> {
    at_s: f64,
    host: &'a HostPolicy,
    vms: &'a [Row],
}

/// Prints `count` samples; the first one after an interval, for rates need two.
fn batch(sampler: &Sampler<'_>, count: u32, interval: Duration, format: Format) -> Result<()> {
    let mut before = sampler.sample()?;
    for index in 0..count {
        std::thread::sleep(interval);
        let now = sampler.sample()?;
        let rows = rows(Some(&before), &now);
        match format {
            Format::Json => {
                print_json_line(&BatchSample { at_s: now.at.as_secs_f64(), host: &now.host, vms: &rows })?;
            }
            Format::Text => {
                let gap = if index == 0 { "" } else { "\n" };
                print_text(&format!("{gap}{}", text::render(&now.host, &rows)))?;
            }
        }
        before = now;
    }
    Ok(())
}

/// Cells of a picture: what a wide terminal has, and lines for the VMs below the 17 that are always there.
const PICTURE_COLUMNS: u16 = 132;
const PICTURE_LINES: u16 = 18;

/// Writes one sample, with the rates of an interval, as a picture.
fn paint(sampler: &Sampler<'_>, interval: Duration, file: &Path) -> Result<()> {
    let before = sampler.sample()?;
    std::thread::sleep(interval);
    let now = sampler.sample()?;
    let mut view = View::default();
    view.update(now.host.clone(), rows(Some(&before), &now));
    let lines = u16::try_from(view.rows.len()).unwrap_or(u16::MAX).saturating_add(PICTURE_LINES);
    let svg = picture::draw(PICTURE_COLUMNS, lines, |frame| view.draw(frame))?;
    if file == Path::new("-") {
        return Ok(print_text(&svg)?);
    }
    std::fs::write(file, svg).with_context(|| format!("write {}", file.display()))
}

/// All VMs. A daemon that goes away is waited for: its VMs wait, too.
struct Vms<'a> {
    sampler: Sampler<'a>,
    view: View,
    before: Sample,
}

impl Screen for Vms<'_> {
    fn refresh(&mut self) {
        match self.sampler.sample() {
            Ok(now) => {
                self.view.update(now.host.clone(), rows(Some(&self.before), &now));
                self.before = now;
            }
            Err(error) => self.view.trouble = Some(error.to_string()),
        }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        self.view.draw(frame);
    }

    fn select(&mut self, step: isize) {
        self.view.select(step);
    }
}

fn live(terminal: &mut ratatui::DefaultTerminal, screen: &mut impl Screen, interval: Duration) -> Result<()> {
    let mut next = Instant::now() + interval;
    loop {
        terminal.draw(|frame| screen.draw(frame)).context("draw")?;
        if event::poll(next.saturating_duration_since(Instant::now())).context("wait for a key")? {
            let pressed = event::read().context("read a key")?;
            match command(&pressed) {
                Some(Command::Quit) => return Ok(()),
                Some(Command::Move(step)) => screen.select(step),
                None => {}
            }
            continue;
        }
        next = Instant::now() + interval;
        screen.refresh();
    }
}

fn command(event: &Event) -> Option<Command> {
    let Event::Key(KeyEvent { code, modifiers, kind, .. }) = event else { return None };
    if *kind == KeyEventKind::Release {
        return None;
    }
    match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Some(Command::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Command::Quit),
        KeyCode::Down | KeyCode::Char('j') => Some(Command::Move(1)),
        KeyCode::Up | KeyCode::Char('k') => Some(Command::Move(-1)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let check = |code: KeyCode, modifiers: KeyModifiers, expected: Option<Command>| {
            assert_eq!(command(&Event::Key(KeyEvent::new(code, modifiers))), expected, "{code:?}");
        };
        check(KeyCode::Char('q'), KeyModifiers::NONE, Some(Command::Quit));
        check(KeyCode::Char('c'), KeyModifiers::CONTROL, Some(Command::Quit));
        check(KeyCode::Char('c'), KeyModifiers::NONE, None);
        check(KeyCode::Down, KeyModifiers::NONE, Some(Command::Move(1)));
        check(KeyCode::Char('k'), KeyModifiers::NONE, Some(Command::Move(-1)));
        assert_eq!(command(&Event::Resize(1, 1)), None);
    }
}
