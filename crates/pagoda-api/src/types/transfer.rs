//! Snapshots that leave this host as a file, and come from one.

use serde::{Deserialize, Serialize};

/// The field behind the content of an export that says how it ended well: an [`ExportReport`].
pub const EXPORT_DONE: &str = "pagoda-export-done";
/// The one that says why it did not: an [`ApiError`](super::ApiError).
pub const EXPORT_FAILED: &str = "pagoda-export-failed";
/// The level of compression without `--compress`: as fast as disks are.
pub const COMPRESS_DEFAULT: u8 = 1;
/// The highest level of compression is this one.
pub const COMPRESS_MAX: u8 = 19;

/// What an exported snapshot looks like.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum ExportFormat {
    /// A file for `pagoda snapshot import`: checked, compressed, with all that starts the VM again
    #[default]
    Pagoda,
    /// A migration stream for a QEMU without Pagoda: memory and devices, and nothing to check it by
    Qemu,
}

/// `POST /v1/snapshots/VM/NAME/export`. The reply's body is the file, in chunks; [`EXPORT_DONE`] or [`EXPORT_FAILED`] follows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    #[serde(default)]
    pub format: ExportFormat,
    /// Level of zstd, 0 for none. Without one it is [`COMPRESS_DEFAULT`]; a stream for QEMU has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compress: Option<u8>,
}

impl ExportRequest {
    /// # Errors
    /// A level that there is not, or that the format cannot have.
    pub fn check(&self) -> Result<(), String> {
        match (self.format, self.compress) {
            (ExportFormat::Qemu, Some(1..)) => {
                Err("a stream for QEMU is not compressed: pipe it through a compressor of your own".into())
            }
            (_, Some(level)) if level > COMPRESS_MAX => Err(format!("levels of compression are 0 to {COMPRESS_MAX}")),
            _ => Ok(()),
        }
    }
}

/// What an exported file has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportReport {
    /// Bytes of the file.
    pub bytes: u64,
    /// So many bytes of memory have content.
    pub content_bytes: u64,
    /// So many bytes of memory are zero.
    pub zero_bytes: u64,
}

/// Whether somebody of this host has accepted what an imported snapshot starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotImport {
    /// It is not started before.
    Waiting,
    Accepted,
    /// One of a newer daemon.
    #[serde(other)]
    Unknown,
}

/// `POST /v1/snapshots/VM/NAME/accept` allows that an imported snapshot is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcceptRequest {
    /// The image that was looked at: another one may have the name by now.
    pub id: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_fit_their_format() {
        let check = |format, compress, good| {
            assert_eq!(ExportRequest { format, compress }.check().is_ok(), good, "{format:?} {compress:?}");
        };
        check(ExportFormat::Pagoda, None, true);
        check(ExportFormat::Pagoda, Some(COMPRESS_MAX), true);
        check(ExportFormat::Pagoda, Some(COMPRESS_MAX + 1), false);
        check(ExportFormat::Qemu, None, true);
        check(ExportFormat::Qemu, Some(0), true);
        check(ExportFormat::Qemu, Some(1), false);
    }
}
