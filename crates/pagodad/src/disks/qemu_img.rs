//! `qemu-img`, run as the user whose QEMU it is: it reads files that may be hostile.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::child::{self, Wanted};
use super::limits::{MAP_PARTS_MAX, QEMU_IMG_MAX, QEMU_IMG_OUTPUT_MAX};
use super::map;
use super::user::User;

/// Where it is looked for before the directory of the VM's QEMU.
const DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/bin"];

/// The program `qemu-img`, and the user whom it runs as.
#[derive(Clone, Debug)]
pub struct QemuImg {
    program: PathBuf,
    user: User,
}

impl QemuImg {
    /// # Errors
    /// It is not installed.
    pub fn new(qemu: &str, user: User) -> Result<QemuImg> {
        let beside = Path::new(qemu).parent().filter(|dir| dir.is_absolute()).map(Path::to_owned);
        let directories = DIRECTORIES.iter().map(PathBuf::from).chain(beside);
        let program = directories.map(|dir| dir.join("qemu-img")).find(|program| program.is_file());
        let program = program.context(
            "there is no qemu-img, which makes overlays and says who has a disk open: install it (qemu-utils)",
        )?;
        Ok(QemuImg { program, user })
    }

    /// Makes an empty overlay of so many bytes. `backing` is its name in the same directory.
    pub fn create(&self, overlay: &Path, backing: &str, bytes: u64) -> Result<()> {
        let size = bytes.to_string();
        let words = ["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", backing, "--"].map(OsStr::new);
        let words: Vec<&OsStr> = words.into_iter().chain([overlay.as_os_str(), OsStr::new(&size)]).collect();
        self.run(overlay, &words, read_bounded).map(drop)
    }

    /// Makes an empty qcow2 image of so many bytes in a file that is there, and is empty.
    pub fn create_alone(&self, file: &Path, bytes: u64, cluster: u64) -> Result<()> {
        let (size, options) = (bytes.to_string(), format!("cluster_size={cluster}"));
        let words = ["create", "-q", "-f", "qcow2", "-o", &options, "--"].map(OsStr::new);
        let words: Vec<&OsStr> = words.into_iter().chain([file.as_os_str(), OsStr::new(&size)]).collect();
        self.run(file, &words, read_bounded).map(drop)
    }

    /// What a file and all behind it are, the file first. It may be in use.
    pub fn chain(&self, file: &Path) -> Result<Vec<Value>> {
        let words = ["info", "-U", "--backing-chain", "--output=json", "--"].map(OsStr::new);
        let words: Vec<&OsStr> = words.into_iter().chain([file.as_os_str()]).collect();
        let answer = self.run(file, &words, read_bounded)?;
        match serde_json::from_slice(&answer).context("read what qemu-img says")? {
            Value::Array(files) => Ok(files),
            _ => bail!("qemu-img says something else than a list"),
        }
    }

    /// That no process has a qcow2 file open to write to it.
    ///
    /// # Errors
    /// One has, or it cannot be found out.
    pub fn check_unused(&self, file: &Path) -> Result<()> {
        self.info(file).map(drop)
    }

    /// What an overlay calls the file behind it. Nobody has it open to write to it.
    ///
    /// # Errors
    /// It cannot be found out.
    pub fn backing(&self, overlay: &Path) -> Result<Option<String>> {
        let info: Value = serde_json::from_slice(&self.info(overlay)?).context("read what qemu-img says")?;
        Ok(info.get("backing-filename").and_then(Value::as_str).map(str::to_owned))
    }

    fn info(&self, file: &Path) -> Result<Vec<u8>> {
        let words = ["info", "-f", "qcow2", "--output=json", "--"].map(OsStr::new);
        let words: Vec<&OsStr> = words.into_iter().chain([file.as_os_str()]).collect();
        self.run(file, &words, read_bounded)
    }

    /// Whether an overlay has no content of its own: all that it shows is in the file behind it.
    ///
    /// # Errors
    /// It cannot be read; it has nothing in more than [`MAP_PARTS_MAX`] parts.
    pub fn is_empty(&self, overlay: &Path) -> Result<bool> {
        let path = overlay.to_str().with_context(|| format!("{} is no text", overlay.display()))?;
        // Without the files behind it, which may be in any number of parts.
        let alone = json!({ "driver": "qcow2", "backing": null, "file": { "driver": "file", "filename": path } });
        let alone = format!("json:{alone}");
        let words = ["map", "--output=json", "--", &alone].map(OsStr::new);
        let has_own = self.run(overlay, &words, |output| map::has_own(output, MAP_PARTS_MAX))?;
        Ok(!has_own)
    }

    fn run<T>(
        &self,
        file: &Path,
        words: &[&OsStr],
        read: impl FnOnce(&mut dyn Read) -> Result<Wanted<T>>,
    ) -> Result<T> {
        // A child of a thread that acts for the user would have root's real id.
        self.user.leave(|| {
            let mut command = Command::new(&self.program);
            command.args(words).env_clear().env("LC_ALL", "C").current_dir("/");
            if !self.user.is_own() {
                // Other groups are given up with that.
                command.uid(self.user.uid).gid(self.user.gid);
            }
            child::run(&mut command, file, QEMU_IMG_MAX, read)
        })
    }
}

fn read_bounded(output: &mut dyn Read) -> Result<Wanted<Vec<u8>>> {
    let mut all = Vec::new();
    output.take(QEMU_IMG_OUTPUT_MAX as u64 + 1).read_to_end(&mut all).context("read what qemu-img says")?;
    ensure!(all.len() <= QEMU_IMG_OUTPUT_MAX, "qemu-img says more than {QEMU_IMG_OUTPUT_MAX} bytes");
    Ok(Wanted::All(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A qcow2 file whose content is in so many parts, and an empty overlay on it.
    fn fragmented(dir: &Path, img: &QemuImg, parts: usize) -> (PathBuf, PathBuf) {
        let (raw, disk, top) = (dir.join("raw"), dir.join("disk.qcow2"), dir.join("top.qcow2"));
        let part: Vec<u8> = [[7; 512], [0; 512]].concat();
        std::fs::write(&raw, part.repeat(parts)).unwrap();
        let words = ["convert", "-S", "512", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=512"].map(OsStr::new);
        let words: Vec<&OsStr> = words.into_iter().chain([raw.as_os_str(), disk.as_os_str()]).collect();
        img.run(&raw, &words, read_bounded).unwrap();
        img.create(&top, "disk.qcow2", (parts * 1024) as u64).unwrap();
        (disk, top)
    }

    #[test]
    fn a_disk_in_very_many_parts_can_be_looked_at() {
        let user = User::own();
        let Ok(img) = QemuImg::new("qemu-system-x86_64", user) else {
            eprintln!("there is no qemu-img");
            return;
        };
        let dir = std::env::temp_dir().join(format!("pagodad-map-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (disk, top) = fragmented(&dir, &img, 50_000);
        assert!(!img.is_empty(&disk).unwrap());
        assert!(img.is_empty(&top).unwrap());
        std::fs::remove_file(&disk).unwrap();
        assert!(img.is_empty(&top).unwrap(), "what is behind it is not looked at");
        let why = img.is_empty(&disk).unwrap_err().to_string();
        assert!(why.contains("No such file"), "{why}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
