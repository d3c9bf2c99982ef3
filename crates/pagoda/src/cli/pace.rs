//! How often a live view looks.

use clap::Args;

/// How often to look, and how many times.
#[derive(Debug, Args)]
pub struct Pace {
    /// Print this many samples as plain text and end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: Option<u32>,
    /// Seconds between two samples, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = interval)]
    pub interval: f64,
}

/// At most ten samples a second: each makes the daemon read every VM's counters.
fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if (0.1..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("give 0.1 to 3600 seconds".into()) }
}
