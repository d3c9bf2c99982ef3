//! Records the rounds of the policy (`--policy-recording`), for `pagoda simulate --replay`.
//!
//! Called by the thread that makes rounds, which owns the file: opened before the first round, written after what a round wants
//! was carried out, without any lock. An optional part that fails alone: a recording with a gap could not be replayed, so it
//! ends at the first failure, which is logged and said in `health`. Rounds and paging go on, and guests see nothing.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pagoda_core::policy::round::{HostReport, VmReport};
use pagoda_core::policy::{HostSettings, Policy};
use pagoda_core::simulate::replay::{Made, Observer};
use pagoda_recording::{RECORDING_BYTES_MAX, Writer};

use crate::parts::Parts;

/// The recording, in health.
const PART: &str = "policy recording";
/// How each recording begins.
const BEGINS: &[u8] = b"{\"pagoda_policy_recording\":";

/// The recording of this daemon's rounds, if one is configured.
#[derive(Debug)]
pub struct Recording {
    path: Option<PathBuf>,
    file: Option<File>,
    writer: Option<Writer>,
    /// What is to be written.
    pending: String,
    bytes: u64,
    bytes_max: u64,
}

impl Recording {
    /// A recording in this file. `None`: nothing is recorded.
    pub fn new(path: Option<PathBuf>) -> Recording {
        let bytes_max = RECORDING_BYTES_MAX;
        Recording { path, file: None, writer: None, pending: String::new(), bytes: 0, bytes_max }
    }

    /// Opens the file. Before the first round.
    pub fn open(&mut self, parts: &Parts) {
        let Some(path) = self.path.take() else { return };
        match create(&path) {
            Ok(file) => self.file = Some(file),
            Err(error) => self.end(parts, &format!("make {}: {error}", path.display())),
        }
    }

    /// Writes what has come. A round that does not fit any more ends the recording.
    pub fn flush(&mut self, parts: &Parts) {
        let text = std::mem::take(&mut self.pending);
        let Some(file) = self.file.as_mut().filter(|_| !text.is_empty()) else { return };
        let bytes = self.bytes + text.len() as u64;
        if bytes > self.bytes_max {
            return self.end(parts, &format!("its file is full with {} bytes", self.bytes));
        }
        match file.write_all(text.as_bytes()) {
            Ok(()) => self.bytes = bytes,
            Err(error) => self.end(parts, &format!("write to its file: {error}")),
        }
    }

    fn end(&mut self, parts: &Parts, why: &str) {
        (self.file, self.writer) = (None, None);
        parts.failed(PART, &format!("{why}; it has ended, and the next daemon makes a new one"));
    }
}

impl Observer for Recording {
    fn begin(&mut self, host: &HostSettings, seed: u64) {
        if self.file.is_some() && self.writer.is_none() && self.bytes == 0 {
            let (writer, header) = Writer::begin(host, seed);
            (self.writer, self.pending) = (Some(writer), header);
        }
    }

    fn before(&mut self, policy: &Policy) {
        if let Some(writer) = &mut self.writer {
            writer.before(policy);
        }
    }

    fn after(&mut self, policy: &Policy, host: &HostReport, vms: &[VmReport], made: Made<'_>) {
        if let Some(writer) = &mut self.writer {
            self.pending.push_str(&writer.after(policy, host, vms, made));
        }
    }
}

/// A new file for its owner alone. A recording that is there is kept beside it; anything else is left as it is.
fn create(path: &Path) -> io::Result<File> {
    match File::open(path) {
        Ok(before) => {
            let mut head = Vec::new();
            before.take(BEGINS.len() as u64).read_to_end(&mut head)?;
            if head != BEGINS {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is there already, and is no recording"));
            }
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, old)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests;
