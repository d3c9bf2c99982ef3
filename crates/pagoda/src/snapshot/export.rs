//! `pagoda snapshot export`: writes a snapshot into one file, or to standard output.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{Client, ClientError, ExportReport, ExportRequest};

use super::file::NewFile;
use crate::cli::Export;
use crate::exit::UsageError;
use crate::output::{Format, Progress, print_json};
use crate::units::format_size;

/// How often it is said how far it is.
const SAY_EVERY: Duration = Duration::from_millis(500);

pub fn run(client: &Client, options: &Export, format: Format) -> Result<()> {
    let request = ExportRequest { format: options.format, compress: options.compress };
    request.check().map_err(UsageError)?;
    let is_stdout = options.file == Path::new("-");
    ensure!(
        !is_stdout || !io::stdout().is_terminal(),
        UsageError("the standard output is a terminal: name a file, or send it somewhere".to_owned())
    );
    // What it may be at most, for the time that is left.
    let memory = client.snapshot(&options.name)?.memory_bytes;
    let mut rate = Rate::new(options.name.to_string(), memory);
    let report = if is_stdout {
        let mut out = io::stdout().lock();
        let sent = client.export_snapshot(&options.name, &request, &mut |bytes| {
            rate.add(bytes.len());
            out.write_all(bytes)
        });
        sent.and_then(|report| out.flush().map(|()| report).map_err(ClientError::File))?
    } else {
        let mut file = NewFile::make(&options.file, options.force)?;
        let sent = client.export_snapshot(&options.name, &request, &mut |bytes| {
            rate.add(bytes.len());
            file.write(bytes)
        });
        let report = match sent {
            Err(ClientError::File(_)) => return Err(file.into_failure()),
            sent => sent?,
        };
        file.finish().with_context(|| format!("finish {}", options.file.display()))?;
        report
    };
    let took = rate.end();
    match format {
        // The file is there, so the report has no place of its own.
        _ if is_stdout => eprint!("{}", text(options, &report, took)),
        Format::Json => print_json(&report)?,
        Format::Text => crate::output::print_text(&text(options, &report, took))?,
    }
    Ok(())
}

fn text(options: &Export, report: &ExportReport, took: Duration) -> String {
    let ExportReport { bytes, content_bytes, zero_bytes } = *report;
    let (size, content, zero) = (format_size(bytes), format_size(content_bytes), format_size(zero_bytes));
    let (seconds, file) = (took.as_secs_f64(), options.file.display());
    format!("{}: {file} has {size} for {content} of memory; {zero} are zero; {seconds:.1} s\n", options.name)
}

/// How far it is, and how fast.
struct Rate {
    name: String,
    most: u64,
    done: u64,
    began: Instant,
    said: Instant,
    progress: Progress,
}

impl Rate {
    fn new(name: String, most: u64) -> Rate {
        let now = Instant::now();
        Rate { name, most, done: 0, began: now, said: now, progress: Progress::default() }
    }

    fn add(&mut self, bytes: usize) {
        self.done += bytes as u64;
        if self.said.elapsed() >= SAY_EVERY {
            self.said = Instant::now();
            self.progress.say(&rate_text(&self.name, self.done, self.most, self.began.elapsed()));
        }
    }

    fn end(self) -> Duration {
        self.began.elapsed()
    }
}

fn rate_text(name: &str, done: u64, most: u64, took: Duration) -> String {
    let per_second = done as f64 / took.as_secs_f64().max(0.001);
    let mut text = format!("{name}: {} written, {}/s", format_size(done), format_size(per_second as u64));
    if per_second >= 1.0 {
        let left = most.saturating_sub(done) as f64 / per_second;
        // Writing into a String cannot fail.
        let _ = write!(text, ", {left:.0} s left at most");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_it_is() {
        let said = rate_text("web1/one", 1 << 30, 4 << 30, Duration::from_secs(2));
        assert_eq!(said, "web1/one: 1G written, 512M/s, 6 s left at most");
        assert_eq!(rate_text("web1/one", 0, 4 << 30, Duration::ZERO), "web1/one: 0 written, 0/s");
    }
}
