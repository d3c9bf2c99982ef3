//! What the command line says about snapshots as files.

use std::path::PathBuf;

use clap::Args;
use pagoda_api::{COMPRESS_MAX, ExportFormat, SnapshotName};

/// Write a snapshot into a file, for another host or for a plain QEMU
///
/// The file has the memory and the devices of the snapshot, also what others have for it, and stands alone. It has no content of
/// disks. It has guest memory in it and is not encrypted: with the FILE `-` it goes to the standard output, and from there through a program such as age. The VM may run
/// meanwhile. The snapshot cannot be removed before this has ended.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda snapshot export web1/before-upgrade web1.pagoda
  pagoda snapshot export web1/before-upgrade - | age -p > web1.pagoda.age
  pagoda snapshot export web1/before-upgrade web1.qemu --format qemu
    qemu-system-x86_64 ... -incoming file:web1.qemu             QEMU 8.2 and newer
    qemu-system-x86_64 ... -incoming 'exec:cat web1.qemu'       any; with the options of before, without Pagoda's

Exit status:
  6  refused: the file is there already, or the snapshot cannot be exported. Nothing was changed")]
pub struct Export {
    #[arg(value_name = "VM/NAME")]
    pub name: SnapshotName,
    /// The file, which appears when it is whole; `-` for the standard output
    pub file: PathBuf,
    /// What it looks like
    #[arg(long, value_enum, default_value_t = ExportFormat::Pagoda)]
    pub format: ExportFormat,
    /// Level of zstd, 1 to 19, or none [default: 1]
    #[arg(long, value_name = "none|LEVEL", value_parser = level)]
    pub compress: Option<u8>,
    /// Replace a file of this name
    #[arg(long)]
    pub force: bool,
}

/// Make a snapshot of a file that `pagoda snapshot export` wrote
///
/// All of the file is checked before there is a snapshot: one that is damaged, cut or not what it says leaves nothing. The
/// snapshot is durable then. It names a program that would be started here, so it cannot be restored before somebody has looked at
/// that (`pagoda snapshot show`) and accepted it (`pagoda snapshot accept`).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda snapshot import web1.pagoda
  pagoda snapshot import web1.pagoda --name test/first
  age -d web1.pagoda.age | pagoda snapshot import -

Exit status:
  5  there is no room for it
  6  refused: the file is not right, or the name is taken. Nothing was changed
  7  the file stopped coming. Nothing was changed")]
pub struct Import {
    /// The file; `-` for the standard input
    pub file: PathBuf,
    /// What the snapshot is called here [default: as in the file]
    #[arg(long, value_name = "VM/NAME")]
    pub name: Option<SnapshotName>,
}

fn level(text: &str) -> Result<u8, String> {
    let number = text.parse().ok().filter(|level| (1..=COMPRESS_MAX).contains(level));
    let level = if text == "none" { Some(0) } else { number };
    level.ok_or_else(|| format!("{text:?} is no level: write none, or 1 to {COMPRESS_MAX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        let check = |text: &str, expected: Option<u8>| assert_eq!(level(text).ok(), expected, "{text}");
        check("none", Some(0));
        check("1", Some(1));
        check("19", Some(19));
        check("0", None);
        check("20", None);
        check("fast", None);
    }
}
