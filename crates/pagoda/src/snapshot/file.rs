//! A file that appears under its name when it is whole.
//!
//! Until then it has no name, so nothing is left of it whatever ends this process. It is written past the page cache where that is
//! possible, by a thread of its own: what is received next does not wait for the disk.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_api::with_advice;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use crate::exit::Refused;

/// Bytes that are written at once: a multiple of all blocks of disks.
const PIECE: usize = 1 << 20;
/// What memory and files are aligned to for writes past the page cache.
const ALIGN: usize = 4096;
/// Pieces that are received and not written yet.
const QUEUE: usize = 4;

/// A file that is being written, and has no name yet.
pub struct NewFile {
    path: PathBuf,
    force: bool,
    piece: Piece,
    sender: SyncSender<Piece>,
    writer: JoinHandle<io::Result<File>>,
}

/// Memory whose content begins at a multiple of [`ALIGN`].
struct Piece {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Piece {
    fn new() -> Piece {
        let memory = vec![0; PIECE + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        Piece { memory, start, len: 0 }
    }

    fn content(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    /// Takes as many bytes as fit: how many.
    fn add(&mut self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(PIECE - self.len);
        let at = self.start + self.len;
        self.memory[at..at + len].copy_from_slice(&bytes[..len]);
        self.len += len;
        len
    }
}

impl NewFile {
    /// # Errors
    /// There is a file of this name, and it is not to be replaced; it cannot be made.
    pub fn make(path: &Path, force: bool) -> Result<NewFile> {
        let is_there = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        ensure!(force || !is_there, Refused(format!("{} is there already: --force replaces it", path.display())));
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let open = |more: OFlags| {
            let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC | more;
            rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)
        };
        // Not every file system writes past the page cache.
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()));
        let file = File::from(file.with_context(|| format!("make a file in {}", dir.display()))?);
        let (sender, receiver) = sync_channel(QUEUE);
        let writer = std::thread::Builder::new().name("file".into()).spawn(move || write_all(file, &receiver))?;
        Ok(NewFile { path: path.to_owned(), force, piece: Piece::new(), sender, writer })
    }

    /// # Errors
    /// A write before it failed: [`NewFile::into_failure`] says why.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let len = self.piece.add(bytes);
            bytes = &bytes[len..];
            if self.piece.len == PIECE {
                let full = std::mem::replace(&mut self.piece, Piece::new());
                self.sender.send(full).map_err(|_| io::Error::other("it cannot be written"))?;
            }
        }
        Ok(())
    }

    /// Why a write failed. There is no file.
    pub fn into_failure(self) -> anyhow::Error {
        let NewFile { path, sender, writer, .. } = self;
        drop(sender);
        let why = match writer.join() {
            Ok(Err(error)) => with_advice(error.to_string()),
            Ok(Ok(_)) | Err(_) => "nobody knows why".to_owned(),
        };
        anyhow!("{} cannot be written: {why}", path.display())
    }

    /// All of it outlives the host, and then it has its name.
    ///
    /// # Errors
    /// The disk's; somebody has made a file of this name meanwhile. There is no file then.
    pub fn finish(self) -> Result<()> {
        let NewFile { path, force, piece, sender, writer } = self;
        // If it takes no more, it has failed and says so itself.
        let _ = sender.send(piece);
        drop(sender);
        let file = writer.join().map_err(|_| io::Error::other("its thread has ended"))?.map_err(anyhow::Error::new)?;
        file.sync_all().context("write it to the disk")?;
        name(&file, &path, force)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir)?.sync_all().context("write its name to the disk")
    }
}

/// Writes what comes. The last piece may be of any length: it goes through the page cache.
fn write_all(mut file: File, pieces: &Receiver<Piece>) -> io::Result<File> {
    for piece in pieces {
        if !piece.len.is_multiple_of(ALIGN) {
            let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
            rustix::fs::fcntl_setfl(file.as_fd(), flags - OFlags::DIRECT)?;
        }
        file.write_all(piece.content())?;
    }
    Ok(file)
}

/// Gives a file without a name this one.
fn name(file: &File, path: &Path, force: bool) -> Result<()> {
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
    let link = |to: &Path| rustix::fs::linkat(CWD, own.as_str(), CWD, to, AtFlags::SYMLINK_FOLLOW);
    match link(path) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) if force => {
            let mut temporary = path.as_os_str().to_owned();
            temporary.push(format!(".{}.new", std::process::id()));
            let temporary = PathBuf::from(temporary);
            link(&temporary).context("name it")?;
            std::fs::rename(&temporary, path)
                .inspect_err(|_| drop(std::fs::remove_file(&temporary)))
                .context("replace it")
        }
        Err(rustix::io::Errno::EXIST) => {
            Err(Refused(format!("{} is there by now: --force replaces it", path.display())).into())
        }
        Err(error) => Err(error).context("name it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_when_it_is_whole() {
        let dir = std::env::temp_dir().join(format!("pagoda-new-file-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("one");
        let count = || std::fs::read_dir(&dir).unwrap().count();
        for len in [0, 1, ALIGN, PIECE, 2 * PIECE + 5] {
            let content: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
            let mut file = NewFile::make(&path, true).unwrap();
            content.chunks(100_003).for_each(|bytes| file.write(bytes).unwrap());
            file.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == content, "{len}");
            assert_eq!(count(), 1);
        }
        assert!(NewFile::make(&path, false).err().unwrap().to_string().contains("--force"));
        let mut other = NewFile::make(&dir.join("two"), false).unwrap();
        other.write(&[7; 3 * PIECE]).unwrap();
        drop(other);
        let late = NewFile::make(&dir.join("three"), false).unwrap();
        std::fs::write(dir.join("three"), "of another").unwrap();
        assert!(late.finish().unwrap_err().to_string().contains("by now"));
        assert_eq!((count(), std::fs::read(dir.join("three")).unwrap()), (2, b"of another".to_vec()));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
