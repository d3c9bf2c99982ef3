//! Settings of the host that `pagodad --tune-host` changes. They are saved before the first test changes them and put
//! back by the last, over all test processes. A run that was killed leaves the saved values for the next one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::programs;

const SETTINGS: [&str; 3] = [
    "/sys/kernel/mm/transparent_hugepage/hugepages-1024kB/shmem_enabled",
    "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled",
    "/proc/sys/vm/max_map_count",
];

#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    path: PathBuf,
    value: String,
}

/// While one lives, the settings may be changed.
#[derive(Debug)]
pub struct Tuned {
    users: File,
    dir: PathBuf,
}

impl Tuned {
    /// Saves the settings, unless another user has.
    ///
    /// # Errors
    /// They cannot be read or saved.
    pub fn begin() -> Result<Self> {
        let dir = programs::work_dir()?;
        let _gate = gate(&dir)?;
        let users = File::create(dir.join("tuned.users")).context("open the tuning lock")?;
        flock(&users, FlockOperation::LockShared).context("share the tuning lock")?;
        let saved = saved_path(&dir);
        if !saved.exists() {
            let values = SETTINGS.iter().map(Path::new).filter(|path| path.exists()).map(|path| {
                let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
                Ok(Saved { path: path.to_owned(), value: chosen(&text).to_owned() })
            });
            let values = values.collect::<Result<Vec<_>>>()?;
            let part = saved.with_extension("part");
            fs::write(&part, serde_json::to_vec(&values)?).context("save the host's settings")?;
            fs::rename(&part, &saved).context("save the host's settings")?;
        }
        Ok(Self { users, dir })
    }
}

impl Drop for Tuned {
    fn drop(&mut self) {
        let Ok(_gate) = gate(&self.dir) else { return };
        // Ours becomes exclusive only when nobody else has a share. A conversion gives up the share first, which is
        // as good: ours ends here.
        if flock(&self.users, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        let saved = saved_path(&self.dir);
        let values: Vec<Saved> =
            fs::read(&saved).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        for Saved { path, value } in values {
            if let Err(error) = fs::write(&path, &value) {
                eprintln!("put back {}: {error}", path.display());
            }
        }
        let _ = fs::remove_file(saved);
    }
}

fn gate(dir: &Path) -> Result<File> {
    let gate = File::create(dir.join("tuned.gate")).context("open the tuning gate")?;
    flock(&gate, FlockOperation::LockExclusive).context("wait for the tuning gate")?;
    Ok(gate)
}

fn saved_path(dir: &Path) -> PathBuf {
    dir.join("tuned.json")
}

/// The value in force: the one in brackets where a setting lists its choices.
fn chosen(text: &str) -> &str {
    let bracketed = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    bracketed.map_or(text.trim(), |(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_value_of_a_setting() {
        for (text, value) in [("always [madvise] never\n", "madvise"), ("3\n", "3"), ("", "")] {
            assert_eq!(chosen(text), value);
        }
    }
}
