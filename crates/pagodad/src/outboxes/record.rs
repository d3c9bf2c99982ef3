//! The record of an outbox: a [checked text](pagoda_image::checked_text) with the line `pagoda-outbox 1` and JSON.
//!
//! It has two secrets, so it is its owner's alone, and no error shows it. What is not whole, not known to this version or
//! contradicts itself is refused, and the file is left alone.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_abi::Token;
use pagoda_api::types::{OutboxAuto, check_outbox_space, check_vm_name};
use pagoda_image::checked_text::{seal, unseal};
use serde::{Deserialize, Serialize};

use super::settings;
use crate::record::store::write_whole;

/// The extension of an outbox's record.
pub const EXTENSION: &str = "outbox";
/// The extension of a record that is being written.
const PART: &str = "part";
const FIRST_LINE: &str = "pagoda-outbox 1";
/// A name has at most 255 bytes of a file's name, and all else is bounded.
const RECORD_BYTES_MAX: u64 = 4096;

/// Number of an outbox, which no other has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OutboxId(pub u64);

impl fmt::Display for OutboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub vm: String,
    /// The VM's secret: another VM may have its name later.
    pub vm_token: String,
    /// By which its process proves that it is the one.
    pub token: String,
    /// Bytes that it is to have.
    pub space: u64,
    /// Bytes that the pool keeps for it.
    pub charged: u64,
    /// Process id and its start time (proc(5) stat, field 22); zeros before it came.
    pub pid: (u32, u64),
    /// What its size follows, if it is not set by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<OutboxAuto>,
}

impl Record {
    fn from_text(text: &str) -> Result<Record> {
        let json = match unseal(text).map_err(|what| anyhow!(what))? {
            (FIRST_LINE, json) => json,
            _ => bail!("written by another version"),
        };
        // The error is not in serde's words, which quote the value.
        let record: Record = serde_json::from_str(json).map_err(|error| anyhow!("JSON, column {}", error.column()))?;
        check_vm_name(&record.vm).map_err(|what| anyhow!(what))?;
        check_outbox_space(record.space).map_err(|what| anyhow!(what))?;
        check_outbox_space(record.charged).map_err(|what| anyhow!(what))?;
        ensure!(record.space <= record.charged, "its charge is below its space");
        if let Some(auto) = &record.auto {
            settings::read(auto).map_err(|what| anyhow!(what))?;
        }
        for token in [&record.vm_token, &record.token] {
            ensure!(Token::from_hex(token).is_some(), "no token");
        }
        Ok(record)
    }

    /// Writes it whole or not at all.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = seal(FIRST_LINE, &serde_json::to_string(self).context("write it as JSON")?);
        ensure!(Record::from_text(&text)? == *self, "it would be read back as something else");
        write_whole(path, text.as_bytes()).with_context(|| path.display().to_string())
    }

    fn read(path: &Path) -> Result<Record> {
        let mut text = String::new();
        std::fs::File::open(path)?.take(RECORD_BYTES_MAX).read_to_string(&mut text)?;
        Record::from_text(&text)
    }
}

/// Where the record of an outbox is.
pub fn record_path(dir: &Path, id: OutboxId) -> PathBuf {
    dir.join(format!("{id}.{}", EXTENSION))
}

/// Every record, or why it cannot be used. What was not written to its end is removed.
pub fn list(dir: &Path) -> std::io::Result<Vec<(PathBuf, OutboxId, Result<Record>)>> {
    let mut records = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let has = |extension: &str| path.extension().is_some_and(|found| found == extension);
        if has(PART) {
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!("remove {}, which was not written to its end: {error}", path.display());
            }
        } else if has(EXTENSION) {
            let id = path.file_stem().and_then(|stem| u64::from_str_radix(stem.to_str()?, 16).ok()).map(OutboxId);
            let is_its_place = id.is_some_and(|id| record_path(dir, id) == path);
            let record =
                if is_its_place { Record::read(&path) } else { Err(anyhow!("it is not named as a record is")) };
            records.push((path, id.unwrap_or(OutboxId(0)), record));
        }
    }
    Ok(records)
}
