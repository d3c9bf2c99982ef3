//! A disk that keeps what was done to it, fails on request, and can be had as a crash would have left it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use pagoda_core::chance::Chance;
use pagoda_image::{Disk, LinuxDisk};

/// A file or a directory, whatever its name. The directory of images is 0.
type Node = u64;

#[derive(Clone, Debug)]
pub enum Op {
    MakeDir {
        dir: Node,
        name: String,
        made: Node,
    },
    MakeFile {
        dir: Node,
        name: String,
        made: Node,
    },
    Write {
        file: Node,
        bytes: Vec<u8>,
        offset: u64,
    },
    Rename {
        dir: Node,
        from: String,
        to: String,
    },
    Remove {
        dir: Node,
        name: String,
    },
    SyncFile {
        file: Node,
    },
    SyncDir {
        dir: Node,
    },
    /// The disk reported an error: what was written before may be lost, and no later sync says so.
    SyncFailed {
        file: Node,
    },
    /// The guest wrote a page.
    Guest {
        page: u64,
        tag: u32,
    },
    /// Something was said to be done.
    Said(Said),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    Begun,
    Filled,
    Durable,
    Removing,
    Removed,
}

/// What a wrong implementation would do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// The entry is written before its block.
    EntryFirst,
    /// Files are not synced.
    NoFileSync,
    /// Directories are not synced.
    NoDirSync,
}

/// Which calls to the disk fail, and how.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// The first call that fails, counted from 0.
    pub at: usize,
    /// How many calls fail from that one on.
    pub calls: usize,
    pub errno: i32,
    /// Writes of a part of what was asked for come before it.
    pub part: bool,
}

#[derive(Debug, Default)]
struct Inner {
    ops: Vec<Op>,
    nodes: BTreeMap<u64, Node>,
    calls: usize,
    failure: Option<Failure>,
    mistake: Option<Mistake>,
    /// A write of `pages` that waits for that of its entry.
    held: Option<(Node, File, Vec<u8>, u64)>,
    maps: BTreeSet<Node>,
    pages: BTreeSet<Node>,
}

/// The disk that the tests use: it passes calls on, keeps them, and fails those that it is told to fail.
#[derive(Clone, Debug)]
pub struct Recorder {
    inner: Arc<Mutex<Inner>>,
}

impl Recorder {
    pub fn new(root: &Path) -> Recorder {
        let mut inner = Inner::default();
        inner.nodes.insert(std::fs::metadata(root).unwrap().ino(), 0);
        Recorder { inner: Arc::new(Mutex::new(inner)) }
    }

    pub fn with_failure(self, failure: Failure) -> Recorder {
        self.inner.lock().unwrap().failure = Some(failure);
        self
    }

    pub fn with_mistake(self, mistake: Option<Mistake>) -> Recorder {
        self.inner.lock().unwrap().mistake = mistake;
        self
    }

    pub fn ops(&self) -> Vec<Op> {
        self.inner.lock().unwrap().ops.clone()
    }

    /// Calls up to now that may fail.
    pub fn calls(&self) -> usize {
        self.inner.lock().unwrap().calls
    }

    pub fn note(&self, op: Op) {
        self.inner.lock().unwrap().ops.push(op);
    }

    /// Whether this call fails; part of a write then precedes it.
    fn call(&self) -> Result<(), (io::Error, bool)> {
        let mut inner = self.inner.lock().unwrap();
        let call = inner.calls;
        inner.calls += 1;
        match inner.failure {
            Some(failure) if (failure.at..failure.at.saturating_add(failure.calls)).contains(&call) => {
                Err((io::Error::from_raw_os_error(failure.errno), failure.part))
            }
            _ => Ok(()),
        }
    }

    fn node(&self, fd: BorrowedFd<'_>) -> Node {
        let ino = rustix::fs::fstat(fd).unwrap().st_ino;
        self.inner.lock().unwrap().nodes[&ino]
    }

    /// A number that no node had before: the file system gives inodes again.
    fn made(&self, fd: BorrowedFd<'_>) -> Node {
        let ino = rustix::fs::fstat(fd).unwrap().st_ino;
        let mut inner = self.inner.lock().unwrap();
        let node = inner.ops.len() as u64 + 1;
        inner.nodes.insert(ino, node);
        node
    }

    fn write(&self, node: Node, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        LinuxDisk.write_at(file, bytes, offset)?;
        self.note(Op::Write { file: node, bytes: bytes.to_vec(), offset });
        Ok(())
    }

    fn has_mistake(&self, mistake: Mistake) -> bool {
        self.inner.lock().unwrap().mistake == Some(mistake)
    }
}

impl Disk for Recorder {
    fn make_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        LinuxDisk.make_dir(dir, name)?;
        let flags = rustix::fs::OFlags::DIRECTORY;
        let made = self.made(rustix::fs::openat(dir, name, flags, rustix::fs::Mode::empty())?.as_fd());
        self.note(Op::MakeDir { dir: self.node(dir), name: name.into(), made });
        Ok(())
    }

    fn make_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<File> {
        self.call().map_err(|(error, _)| error)?;
        let file = LinuxDisk.make_file(dir, name)?;
        let made = self.made(file.as_fd());
        {
            let mut inner = self.inner.lock().unwrap();
            match name {
                "map" => drop(inner.maps.insert(made)),
                "pages" => drop(inner.pages.insert(made)),
                _ => {}
            }
        }
        self.note(Op::MakeFile { dir: self.node(dir), name: name.into(), made });
        Ok(file)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let node = self.node(file.as_fd());
        if let Err((error, part)) = self.call() {
            if part && bytes.len() > 8 {
                self.write(node, file, &bytes[..bytes.len() / 16 * 8], offset)?;
            }
            return Err(error);
        }
        let (is_pages, is_map) = {
            let inner = self.inner.lock().unwrap();
            (inner.pages.contains(&node), inner.maps.contains(&node))
        };
        if self.has_mistake(Mistake::EntryFirst) && is_pages {
            let held = (node, file.try_clone()?, bytes.to_vec(), offset);
            self.inner.lock().unwrap().held = Some(held);
            return Ok(());
        }
        self.write(node, file, bytes, offset)?;
        let held = if is_map { self.inner.lock().unwrap().held.take() } else { None };
        held.map_or(Ok(()), |(node, file, bytes, offset)| self.write(node, &file, &bytes, offset))
    }

    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        LinuxDisk.read_at(file, bytes, offset)
    }

    fn read_pieces_at(&self, file: &File, pieces: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        LinuxDisk.read_pieces_at(file, pieces, offset)
    }

    fn rename(&self, dir: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        LinuxDisk.rename(dir, from, to)?;
        self.note(Op::Rename { dir: self.node(dir), from: from.into(), to: to.into() });
        Ok(())
    }

    fn remove_file(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        LinuxDisk.remove_file(dir, name)?;
        self.note(Op::Remove { dir: self.node(dir), name: name.into() });
        Ok(())
    }

    fn remove_dir(&self, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        LinuxDisk.remove_dir(dir, name)?;
        self.note(Op::Remove { dir: self.node(dir), name: name.into() });
        Ok(())
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        if let Err((error, _)) = self.call() {
            self.note(Op::SyncFailed { file: self.node(file.as_fd()) });
            return Err(error);
        }
        if !self.has_mistake(Mistake::NoFileSync) {
            self.note(Op::SyncFile { file: self.node(file.as_fd()) });
        }
        Ok(())
    }

    fn sync_dir(&self, dir: BorrowedFd<'_>) -> io::Result<()> {
        self.call().map_err(|(error, _)| error)?;
        if !self.has_mistake(Mistake::NoDirSync) {
            self.note(Op::SyncDir { dir: self.node(dir) });
        }
        Ok(())
    }
}

/// A file system in memory: names of each directory, and bytes of each file.
#[derive(Debug, Default)]
struct Tree {
    dirs: BTreeMap<Node, BTreeMap<String, Node>>,
    files: BTreeMap<Node, Vec<u8>>,
}

impl Tree {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::MakeDir { dir, name, made } => {
                self.dirs.entry(*made).or_default();
                self.dirs.entry(*dir).or_default().insert(name.clone(), *made);
            }
            Op::MakeFile { dir, name, made } => {
                self.files.entry(*made).or_default();
                self.dirs.entry(*dir).or_default().insert(name.clone(), *made);
            }
            Op::Write { file, bytes, offset } => {
                let content = self.files.entry(*file).or_default();
                let end = *offset as usize + bytes.len();
                content.resize(content.len().max(end), 0);
                content[*offset as usize..end].copy_from_slice(bytes);
            }
            Op::Rename { dir, from, to } => {
                let names = self.dirs.entry(*dir).or_default();
                if let Some(node) = names.remove(from) {
                    names.insert(to.clone(), node);
                }
            }
            Op::Remove { dir, name } => drop(self.dirs.entry(*dir).or_default().remove(name)),
            _ => {}
        }
    }

    fn write(&self, node: Node, path: &Path) {
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
        std::fs::create_dir_all(path).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).unwrap();
        for (name, node) in self.dirs.get(&node).into_iter().flatten() {
            let path = path.join(name);
            if self.dirs.contains_key(node) {
                self.write(*node, &path);
            } else {
                let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
                io::Write::write_all(&mut &file, self.files.get(node).map_or(&[], Vec::as_slice)).unwrap();
            }
        }
    }
}

/// Writes to `path` what a daemon leaves that is killed after these calls, the last of which is cut if it is a write.
pub fn after_daemon(ops: &[Op], cut: Option<usize>, path: &Path) {
    let mut tree = Tree::default();
    for (index, op) in ops.iter().enumerate() {
        match (op, cut) {
            (Op::Write { file, bytes, offset }, Some(len)) if index + 1 == ops.len() => {
                tree.apply(&Op::Write { file: *file, bytes: bytes[..len.min(bytes.len())].to_vec(), offset: *offset });
            }
            _ => tree.apply(op),
        }
    }
    tree.write(0, path);
}

/// Writes to `path` what a host leaves that stops after these calls: what was synced, and of everything else any part.
pub fn after_host(ops: &[Op], chance: &mut Chance, path: &Path) {
    // What is certain, from the end: a write if its file is synced later, a name if its directory is.
    let (mut files, mut dirs) = (BTreeSet::new(), BTreeSet::new());
    let mut certain = vec![false; ops.len()];
    for (index, op) in ops.iter().enumerate().rev() {
        match op {
            Op::SyncFile { file } => drop(files.insert(*file)),
            Op::SyncDir { dir } => drop(dirs.insert(*dir)),
            Op::SyncFailed { file } => drop(files.remove(file)),
            Op::Write { file, .. } => certain[index] = files.contains(file),
            Op::MakeDir { dir, .. } | Op::MakeFile { dir, .. } | Op::Rename { dir, .. } | Op::Remove { dir, .. } => {
                certain[index] = dirs.contains(dir);
            }
            Op::Guest { .. } | Op::Said(_) => {}
        }
    }
    // Most, few or about half of what is not certain.
    let odds = [50, 500, 950, 1000][chance.below(4) as usize];
    let mut tree = Tree::default();
    for (op, certain) in ops.iter().zip(certain) {
        if let (Op::Write { file, bytes, offset }, false) = (op, certain) {
            // A host that stops leaves any of the write's sectors of 512 bytes, and none in part.
            for (at, sector) in (*offset..).step_by(512).zip(bytes.chunks(512)) {
                if chance.per_mille(odds) {
                    tree.apply(&Op::Write { file: *file, bytes: sector.to_vec(), offset: at });
                }
            }
        } else if certain || chance.per_mille(odds) {
            tree.apply(op);
        }
    }
    tree.write(0, path);
}

/// A directory of a test, empty.
pub fn temp_dir(name: &str) -> PathBuf {
    let base = if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
    let dir = base.join(format!("pagoda-image-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700)).unwrap();
    dir
}
