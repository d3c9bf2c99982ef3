//! `pagoda snapshot import`: makes a snapshot of an exported file.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_api::Client;

use super::show;
use crate::cli::Import;
use crate::output::{Format, Progress};
use crate::units::format_size;

const SAY_EVERY: Duration = Duration::from_millis(500);

pub fn run(client: &Client, options: &Import, format: Format) -> Result<()> {
    let input: Box<dyn Read> = if options.file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(&options.file).with_context(|| format!("open {}", options.file.display()))?)
    };
    let (name, now) = (options.file.display().to_string(), Instant::now());
    let mut input = Counted { input, name, done: 0, said: now, progress: Progress::default() };
    let snapshot = client.import_snapshot(options.name.as_ref(), &mut input)?;
    drop(input);
    show::one(&snapshot, format)?;
    if format == Format::Text {
        let name = snapshot.full_name();
        eprintln!("look at it with `pagoda snapshot show {name}`, then `pagoda snapshot accept {name}`");
    }
    Ok(())
}

/// Says how much was read.
struct Counted {
    input: Box<dyn Read>,
    name: String,
    done: u64,
    said: Instant,
    progress: Progress,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.input.read(buffer)?;
        self.done += len as u64;
        if self.said.elapsed() >= SAY_EVERY {
            self.said = Instant::now();
            self.progress.say(&format!("{}: {} read", self.name, format_size(self.done)));
        }
        Ok(len)
    }
}
