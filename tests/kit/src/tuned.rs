//! The one keeper of the host settings that tests and benches change: many processes, of several checkouts, at once.
//!
//! Who changes settings is a *user*: it holds a share of a lock of the machine as long as it lives. The first that
//! touches a setting writes down what it was, in a record that outlives every process; whoever comes later finds the
//! record and knows that what the setting is now is not what it was. The last user puts everything back and removes
//! the record. If all users were killed, the next one puts everything back before it begins. The record is in `/run`,
//! which a boot empties as it resets the settings themselves.
//!
//! Orders: record -> change; put back -> remove the record. A kill in between leaves a record of values that are in
//! force already, which is harmless. Everything but the life of a user happens under a second lock, the gate.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};

/// What `pagodad --tune-host` may change.
pub const TUNED_BY_DAEMON: [&str; 3] = [
    "/sys/kernel/mm/transparent_hugepage/hugepages-1024kB/shmem_enabled",
    "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled",
    "/proc/sys/vm/max_map_count",
];

/// For `open`: a link that somebody else put there is not followed.
const NO_FOLLOW: i32 = OFlags::NOFOLLOW.bits() as i32;
const DIR: &str = "/run/lock";
const GATE: &str = "pagoda-tuned.lock";
const USERS: &str = "pagoda-tuned.users";
const RECORD: &str = "pagoda-tuned.originals";

/// While one lives, the settings that it remembers may be changed.
#[derive(Debug)]
pub struct Tuned {
    users: File,
    dir: PathBuf,
}

impl Tuned {
    /// Becomes a user of the settings among `settings` that this machine has.
    ///
    /// # Errors
    /// The locks cannot be had (they are root's), or a setting cannot be read.
    pub fn begin<'a>(settings: impl IntoIterator<Item = &'a Path>) -> io::Result<Self> {
        // Debian's base has it; a container with an empty /run does not.
        fs::create_dir_all(DIR)?;
        Self::begin_in(Path::new(DIR), settings)
    }

    fn begin_in<'a>(dir: &Path, settings: impl IntoIterator<Item = &'a Path>) -> io::Result<Self> {
        let gate = gate(dir)?;
        let users = open(&dir.join(USERS))?;
        // Alone with a record: those who wrote it were killed.
        if flock(&users, FlockOperation::NonBlockingLockExclusive).is_ok() {
            put_back(dir)?;
        }
        // Nobody holds it exclusively but under the gate, so this does not wait.
        flock(&users, FlockOperation::LockShared)?;
        drop(gate);
        let tuned = Self { users, dir: dir.to_owned() };
        settings.into_iter().filter(|path| path.exists()).try_for_each(|path| tuned.remember(path))?;
        Ok(tuned)
    }

    /// Writes down what a setting is, unless a user has. Call before changing it.
    ///
    /// # Errors
    /// The setting cannot be read, or the record not be written.
    pub fn remember(&self, setting: &Path) -> io::Result<()> {
        let _gate = gate(&self.dir)?;
        let mut originals = read(&self.dir)?;
        if originals.iter().any(|(path, _)| path == setting) {
            return Ok(());
        }
        let text = fs::read_to_string(setting)?;
        originals.push((setting.to_owned(), chosen(&text).to_owned()));
        write(&self.dir, &originals)
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
        if let Err(error) = put_back(&self.dir) {
            eprintln!("put the host's settings back: {error}");
        }
    }
}

/// Writes every original value, then removes the record. A setting that refuses does not keep the others from it, but
/// it keeps the record, so that the next user tries again.
fn put_back(dir: &Path) -> io::Result<()> {
    let mut outcome = Ok(());
    for (path, value) in read(dir)? {
        match fs::write(&path, &value) {
            // A module that has gone took its settings along.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => outcome = Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
            Ok(()) => {}
        }
    }
    outcome?;
    match fs::remove_file(dir.join(RECORD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The record: a setting a line, its path, a tab, its value.
fn read(dir: &Path) -> io::Result<Vec<(PathBuf, String)>> {
    let path = dir.join(RECORD);
    let file = match OpenOptions::new().read(true).custom_flags(NO_FOLLOW).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    check_owner(&file, &path)?;
    let broken = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is broken: delete it", path.display()));
    let text = io::read_to_string(&file)?;
    text.lines()
        .map(|line| line.split_once('\t').map(|(path, value)| (path.into(), value.to_owned())).ok_or_else(broken))
        .collect()
}

/// Replaces the record as a whole.
fn write(dir: &Path, originals: &[(PathBuf, String)]) -> io::Result<()> {
    let part = dir.join(RECORD).with_extension("part");
    // Of a user that was killed while it wrote; or somebody else's, which must not be followed.
    match fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
    let text: String = originals.iter().map(|(path, value)| format!("{}\t{value}\n", path.display())).collect();
    io::Write::write_all(&mut &file, text.as_bytes())?;
    fs::rename(&part, dir.join(RECORD))
}

fn gate(dir: &Path) -> io::Result<File> {
    let gate = open(&dir.join(GATE))?;
    flock(&gate, FlockOperation::LockExclusive)?;
    Ok(gate)
}

/// A lock file. The directory is everybody's, so what is there may be a trap.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(NO_FOLLOW);
    let file = options.open(path)?;
    check_owner(&file, path)?;
    Ok(file)
}

fn check_owner(file: &File, path: &Path) -> io::Result<()> {
    if file.metadata()?.uid() == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let text = format!("{} is not ours: delete it, if nobody changes host settings now", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// The value in force of a setting's text: the one in brackets where it lists its choices.
#[must_use]
pub fn chosen(text: &str) -> &str {
    let bracketed = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    bracketed.map_or(text.trim(), |(value, _)| value)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use pagoda_sys::toy::process;

    /// Set in the process that a test starts to be killed.
    const VICTIM_ENV: &str = "PAGODA_TUNED_VICTIM";

    struct TestDir(PathBuf);

    impl TestDir {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("pagoda-tuned-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            for (setting, value) in [("thp", "always [madvise] never\n"), ("maps", "65530\n")] {
                fs::write(dir.join(setting), value).unwrap();
            }
            Self(dir)
        }

        fn begin(&self, settings: &[&str]) -> Tuned {
            let paths: Vec<PathBuf> = settings.iter().map(|name| self.0.join(name)).collect();
            Tuned::begin_in(&self.0, paths.iter().map(PathBuf::as_path)).unwrap()
        }

        fn set(&self, setting: &str, value: &str) {
            fs::write(self.0.join(setting), value).unwrap();
        }

        fn get(&self, setting: &str) -> String {
            fs::read_to_string(self.0.join(setting)).unwrap()
        }

        fn has_record(&self) -> bool {
            self.0.join(RECORD).exists()
        }
    }

    impl Drop for TestDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_last_user_puts_back_what_the_first_found() {
        let test_dir = TestDir::new("last");
        let first = test_dir.begin(&["thp", "no such setting"]);
        test_dir.set("thp", "always");
        // A run beside it finds tuned values, and does not take them for originals.
        let second = test_dir.begin(&["thp", "maps"]);
        test_dir.set("maps", "1000000");
        drop(first);
        assert_eq!((test_dir.get("thp"), test_dir.get("maps")), ("always".into(), "1000000".into()), "still in use");
        drop(second);
        assert_eq!((test_dir.get("thp"), test_dir.get("maps")), ("madvise".into(), "65530".into()));
        assert!(!test_dir.has_record());
    }

    #[test]
    fn a_killed_user_is_cleaned_up_after() {
        if let Some(dir) = std::env::var_os(VICTIM_ENV) {
            let dir = PathBuf::from(dir);
            let _tuned = Tuned::begin_in(&dir, [dir.join("thp").as_path()]).unwrap();
            fs::write(dir.join("thp"), "always").unwrap();
            process::kill(std::process::id()).unwrap();
            unreachable!("killed");
        }
        let test_dir = TestDir::new("killed");
        let killed = |test_dir: &TestDir| {
            let name = "tuned::tests::a_killed_user_is_cleaned_up_after";
            let mut victim = Command::new(std::env::current_exe().unwrap());
            let status = victim.args(["--exact", name]).env(VICTIM_ENV, &test_dir.0).status().unwrap();
            assert_eq!(status.signal(), Some(9));
            assert_eq!(test_dir.get("thp"), "always");
            assert!(test_dir.has_record());
        };
        // Alone: the next user puts it back before it begins.
        killed(&test_dir);
        let next = test_dir.begin(&["maps"]);
        assert_eq!(test_dir.get("thp"), "madvise");
        // Beside another: the other, as the last, does.
        killed(&test_dir);
        drop(next);
        assert_eq!(test_dir.get("thp"), "madvise");
        assert!(!test_dir.has_record());
    }

    #[test]
    fn what_is_not_ours_is_not_believed() {
        let test_dir = TestDir::new("trap");
        let target = test_dir.0.join("target");
        fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, test_dir.0.join(RECORD)).unwrap();
        assert!(Tuned::begin_in(&test_dir.0, []).is_err(), "a link is not followed");
        fs::remove_file(test_dir.0.join(RECORD)).unwrap();
        fs::write(test_dir.0.join(RECORD), "no tab in here\n").unwrap();
        let error = Tuned::begin_in(&test_dir.0, []).unwrap_err();
        assert!(error.to_string().contains("delete it"), "{error}");
    }

    #[test]
    fn the_chosen_value_of_a_setting() {
        for (text, value) in [("always [madvise] never\n", "madvise"), ("3\n", "3"), ("", "")] {
            assert_eq!(chosen(text), value);
        }
    }
}
