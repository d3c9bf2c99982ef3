//! Disk images with the pattern that a guest verifies.

use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pagoda_guest::DISK_SEED_DEFAULT;
use pagoda_guest::pattern::write_disk_pattern;

const MIB: u64 = 1 << 20;

/// The guest reads blocks of 1 MiB and needs two of them.
const SIZE_MIN: u64 = 2 * MIB;

#[derive(Debug, Clone, Args)]
pub struct DiskArgs {
    /// File to write the disk image to
    #[arg(long)]
    pub out: PathBuf,
    /// Size, with the suffix M or G; whole MiB
    #[arg(long, default_value = "256M", value_parser = parse_size)]
    pub size: u64,
    /// Seed of the pattern; the guest's pagoda.disk_seed
    #[arg(long, default_value_t = DISK_SEED_DEFAULT)]
    pub seed: u64,
}

pub fn write(args: &DiskArgs) -> Result<()> {
    let file = File::create(&args.out).with_context(|| format!("create {}", args.out.display()))?;
    write_disk_pattern(BufWriter::with_capacity(MIB as usize, file), args.size, args.seed)
        .with_context(|| format!("write {}", args.out.display()))
}

fn parse_size(text: &str) -> Result<u64> {
    let (digits, unit) = match text.strip_suffix(['M', 'm']) {
        Some(digits) => (digits, MIB),
        None => match text.strip_suffix(['G', 'g']) {
            Some(digits) => (digits, MIB << 10),
            None => bail!("{text:?} has no suffix: say 256M or 1G"),
        },
    };
    let count: u64 = digits.parse().with_context(|| format!("{digits:?} is not a whole number"))?;
    let bytes = count.checked_mul(unit).with_context(|| format!("{text} is too large"))?;
    ensure!(bytes >= SIZE_MIN, "a disk has at least {} MiB", SIZE_MIN / MIB);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_or_say_why_not() {
        assert_eq!(parse_size("256M").expect("valid"), 256 * MIB);
        assert_eq!(parse_size("1G").expect("valid"), 1024 * MIB);
        for (text, reason) in [("256", "suffix"), ("1M", "at least"), ("xM", "number"), ("99999999999999G", "large")] {
            let error = parse_size(text).expect_err(text);
            assert!(error.to_string().contains(reason), "{text}: {error}");
        }
    }
}
