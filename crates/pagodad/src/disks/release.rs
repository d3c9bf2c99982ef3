//! Removing the layer of a snapshot that is gone, if it is known that nobody needs it.
//!
//! A file is needed by whatever has it in its chain: disks of VMs, layers of other snapshots, and files beside it, such as what a restore
//! has kept aside. Also by whoever has it open. What cannot be looked at may need it, so the layer stays then.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::in_full;
use rustix::io::Errno;

use super::layer::NotedLayer;
use super::limits::BESIDE_MAX;
use super::qemu_img::QemuImg;
use super::stat::Stat;
use super::user::User;
use crate::record::FileId;

/// Files that somebody needs, with all that is behind them.
#[derive(Debug)]
pub struct Claim {
    /// For the user: `the VM web1`.
    pub who: String,
    pub user: User,
    pub files: Vec<PathBuf>,
}

/// Removes a layer. What its room was; `None`: it was gone already.
///
/// # Errors
/// Why it is kept.
pub fn release(layer: &NotedLayer, program: &str, claims: &[Claim]) -> Result<Option<u64>> {
    let user = layer.user;
    let looked = user.act(|| {
        let dir = layer.dir()?;
        let stat = dir.stat(&layer.name)?;
        let beside = stat.is_some().then(|| beside(&dir.path)).transpose()?;
        Ok(stat.zip(beside))
    })?;
    let Some((stat, beside)) = looked else { return Ok(None) };
    ensure!(
        layer.is_unchanged(&stat),
        "it is not known to be the file that the snapshot had, with the content of that time"
    );
    let mut search = Search { program, layer: stat.id, seen: BTreeSet::new() };
    claims.iter().try_for_each(|claim| search.check(claim))?;
    search.check(&Claim { who: "a file beside it".to_owned(), user, files: beside })?;
    check_closed(stat.id)?;
    user.act(|| {
        let dir = layer.dir()?;
        ensure!(dir.id(&layer.name)? == Some(stat.id), "it was replaced meanwhile");
        dir.remove(&layer.name)?;
        dir.sync()
    })?;
    // With another name the content stays.
    Ok(Some(if stat.links == 1 { stat.allocated_bytes } else { 0 }))
}

/// Looks for a file in chains. A file that was seen in one is not looked at again: all behind it was in that chain too.
struct Search<'a> {
    program: &'a str,
    layer: FileId,
    seen: BTreeSet<(u64, u64)>,
}

impl Search<'_> {
    fn check(&mut self, claim: &Claim) -> Result<()> {
        let img = QemuImg::new(self.program, claim.user)?;
        for file in &claim.files {
            let checked = claim.user.act(|| self.check_file(&img, file));
            checked.with_context(|| format!("{} may need it: {}", claim.who, file.display()))?;
        }
        Ok(())
    }

    /// The caller acts as the user.
    fn check_file(&mut self, img: &QemuImg, file: &Path) -> Result<()> {
        let stat = match Stat::of_path(file) {
            // What is not there needs nothing.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => return Ok(()),
            stat => stat.context("look at it")?,
        };
        if !stat.may_be_disk || stat.id == self.layer || self.has_seen(stat.id) {
            return Ok(());
        }
        let chain = img.chain(file)?;
        let mut ids = Vec::new();
        for below in &chain {
            let name = below.get("filename").and_then(|name| name.as_str()).context("a file without a name")?;
            ensure!(name.starts_with('/'), "it is on {name}, which cannot be looked at");
            let id = Stat::of_path(Path::new(name)).with_context(|| format!("look at {name} behind it"))?.id;
            ensure!(!may_be(id, self.layer), "the layer is behind it");
            ids.push(id);
        }
        // Not before all of the chain is known.
        self.seen.extend(ids.iter().map(|id| (id.dev, id.ino)));
        Ok(())
    }

    fn has_seen(&self, id: FileId) -> bool {
        self.seen.contains(&(id.dev, id.ino))
    }
}

/// The files of a directory whose format can have others behind it.
fn beside(dir: &Path) -> Result<Vec<PathBuf>> {
    /// QCOW2 and QCOW; QED.
    const WITH_BACKING: [&[u8; 4]; 2] = [b"QFI\xfb", b"QED\0"];
    let mut found = Vec::new();
    for (count, entry) in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?.enumerate() {
        ensure!(count < BESIDE_MAX, "{} has more than {BESIDE_MAX} files, any of which may need it", dir.display());
        let path = entry.with_context(|| format!("list {}", dir.display()))?.path();
        if Stat::of_path(&path).is_ok_and(|stat| !stat.is_file) {
            continue;
        }
        let mut start = [0; 4];
        let read = std::fs::File::open(&path).and_then(|mut file| file.read_exact(&mut start));
        match read {
            Ok(()) if WITH_BACKING.contains(&&start) => found.push(path),
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof) => {}
            Err(error) => bail!("{} may need it, and cannot be read: {error}", path.display()),
        }
    }
    Ok(found)
}

/// That no process has a file open.
///
/// # Errors
/// One has; one cannot be looked at.
fn check_closed(file: FileId) -> Result<()> {
    for entry in std::fs::read_dir("/proc").context("look at the processes")? {
        let name = entry.context("look at the processes")?.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else { continue };
        let dir = PathBuf::from(format!("/proc/{pid}/fd"));
        match has_open(&dir, file) {
            Ok(false) => {}
            Ok(true) => bail!("process {pid} has it open"),
            // It has ended.
            Err(error)
                if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
            Err(error) => bail!("nobody can tell whether process {pid} has it open: {error}"),
        }
    }
    Ok(())
}

/// Whether a process has a file open. `fds`: its descriptors.
fn has_open(fds: &Path, file: FileId) -> std::io::Result<bool> {
    for fd in std::fs::read_dir(fds)? {
        match Stat::of_open_elsewhere(&fd?.path()) {
            Ok(stat) if stat.is_file && may_be(stat.id, file) => return Ok(true),
            // It was closed meanwhile.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}

/// Whether both are one file, or may be: a file system that is mounted twice may have two numbers.
fn may_be(found: FileId, file: FileId) -> bool {
    let were_born = found.born_ns.zip(file.born_ns);
    found.ino == file.ino && were_born.is_none_or(|(found, file)| found == file)
}

/// Why a layer is kept, in one line.
pub fn why_kept(error: &anyhow::Error) -> String {
    in_full(error.as_ref())
}

#[cfg(test)]
mod tests {
    use pagoda_image::{DiskFile, Manifest};

    use super::*;
    use crate::images::tests::manifest;

    const QEMU: &str = "qemu-system-x86_64";

    /// A directory with a layer that a snapshot had.
    struct Bench {
        dir: PathBuf,
        img: QemuImg,
    }

    impl Bench {
        fn new(name: &str) -> Option<Bench> {
            let Ok(img) = QemuImg::new(QEMU, User::own()) else {
                eprintln!("there is no qemu-img");
                return None;
            };
            let dir = std::env::temp_dir().join(format!("pagodad-release-{}-{name}", std::process::id()));
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir).unwrap();
            let bench = Bench { dir, img };
            bench.make("base", None);
            bench.make("layer", Some("base"));
            Some(bench)
        }

        fn make(&self, name: &str, on: Option<&str>) -> PathBuf {
            let path = self.dir.join(name);
            // Of a file that there is first: `create` makes overlays alone.
            self.img.create(&path, on.unwrap_or("nothing"), 1 << 20).unwrap();
            if on.is_none() {
                let words = ["rebase", "-u", "-f", "qcow2", "-b", ""].map(std::ffi::OsStr::new);
                let words = words.into_iter().chain([path.as_os_str()]);
                assert!(std::process::Command::new("qemu-img").args(words).status().unwrap().success());
            }
            path
        }

        fn layer(&self) -> NotedLayer {
            let stat = Stat::of_path(&self.dir.join("layer")).unwrap();
            let FileId { dev, ino, born_ns } = stat.id;
            let file = self.dir.join("disk").display().to_string();
            let (node, layer, size, mtime_ns) = ("d".to_owned(), Some("layer".to_owned()), stat.bytes, stat.mtime_ns);
            let disks = vec![DiskFile { node, file, dev, ino, born_ns, size, mtime_ns, layer }];
            let mut manifest = Manifest { disks, ..manifest(1, "web1", "one") };
            let User { uid, gid } = User::own();
            (manifest.launch.uid, manifest.launch.gid) = (uid, gid);
            NotedLayer::of(&manifest).remove(0)
        }

        fn kept(&self, layer: &NotedLayer, claims: &[Claim], why: &str) {
            let error = why_kept(&release(layer, QEMU, claims).unwrap_err());
            assert!(error.contains(why), "{error}");
            assert!(self.dir.join("layer").exists(), "{why}");
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn a_layer_goes_that_nobody_needs() {
        if let Err(error) = check_closed(FileId::NONE) {
            eprintln!("not all processes can be looked at, so nothing is ever removed: {error}");
            return;
        }
        let Some(bench) = Bench::new("goes") else { return };
        let layer = bench.layer();
        let allocated = Stat::of_path(&bench.dir.join("layer")).unwrap().allocated_bytes;
        let other = Claim {
            who: "the VM web1".into(),
            user: User::own(),
            files: vec![bench.dir.join("base"), "/dev/null".into()],
        };
        assert_eq!(release(&layer, QEMU, &[other]).unwrap(), Some(allocated));
        assert!(!bench.dir.join("layer").exists() && bench.dir.join("base").exists());
        assert_eq!(release(&layer, QEMU, &[]).unwrap(), None, "it is gone");
    }

    #[test]
    fn a_layer_stays_that_somebody_may_need() {
        let Some(bench) = Bench::new("stays") else { return };
        let layer = bench.layer();
        let beside = bench.make("kept-aside", Some("layer"));
        bench.kept(&layer, &[], "a file beside it may need it");
        std::fs::remove_file(&beside).unwrap();
        // Elsewhere, and not directly.
        let away = bench.dir.join("away");
        std::fs::create_dir(&away).unwrap();
        bench.make("away/middle", Some("../layer"));
        bench.make("away/top", Some("middle"));
        let claim =
            |file: &str| [Claim { who: "the VM web1".into(), user: User::own(), files: vec![bench.dir.join(file)] }];
        bench.kept(&layer, &claim("away/top"), "the VM web1 may need it");
        // A chain that cannot be read.
        std::fs::remove_file(away.join("middle")).unwrap();
        bench.kept(&layer, &claim("away/top"), "No such file");
        std::fs::write(bench.dir.join("cut"), [&b"QFI\xfb\0\0\0\x03"[..], &[0xff; 500]].concat()).unwrap();
        bench.kept(&layer, &[], "a file beside it may need it");
        std::fs::remove_file(bench.dir.join("cut")).unwrap();
        // Opened, or nobody can tell.
        let open = std::fs::File::open(bench.dir.join("layer")).unwrap();
        let (own, id) = (Path::new("/proc/self/fd"), Stat::of_open(&open).unwrap().id);
        assert!(has_open(own, id).unwrap());
        bench.kept(&layer, &[], "has it open");
        drop(open);
        assert!(!has_open(own, id).unwrap());
        // Written, and another one.
        let file = std::fs::File::options().append(true).open(bench.dir.join("layer")).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        drop(file);
        bench.kept(&layer, &[], "is not known to be the file");
        std::fs::remove_file(bench.dir.join("layer")).unwrap();
        bench.make("layer", Some("base"));
        bench.kept(&layer, &[], "is not known to be the file");
    }
}
