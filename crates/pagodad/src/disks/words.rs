//! What a VM's command line says of its disks, beyond what QEMU tells.
//!
//! Options are looked for in all words, also where they mean something else: what is refused too often is no harm.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pagoda_api::types::Launch;

use crate::record::FileId;

/// The parts of a word that can be an option's name or value: QEMU's own way to write them, and JSON.
fn pieces(word: &str) -> impl Iterator<Item = &str> {
    word.split([',', '=', '"', '{', '}']).map(str::trim).filter(|piece| !piece.is_empty())
}

/// The value of an option of a word, such as `native` of `aio=native` or of `"aio": "native"`. That of a node below it counts, as
/// in `file.aio=native`.
fn option<'a>(word: &'a str, name: &str) -> Option<&'a str> {
    let mut pieces = pieces(word).filter(|piece| *piece != ":");
    let is_it = |piece: &str| piece == name || piece.rsplit('.').next() == Some(name);
    pieces.find(|piece| is_it(piece))?;
    pieces.next()
}

/// An option that makes a disk one that a snapshot cannot have, and why.
pub fn refusal(launch: &Launch) -> Option<String> {
    let has = |name: &str| {
        let is_it = |piece: &str| piece == name || piece.starts_with(&format!("{name}."));
        launch.words.iter().any(|word| pieces(word).any(is_it))
    };
    if has("backing") {
        return Some(
            "its command line says which files are behind a disk, and QEMU would not look at the disk itself for that"
                .to_owned(),
        );
    }
    let is_shared =
        |word: &String| option(word, "share-rw").is_some_and(|value| !["off", "false", "no"].contains(&value));
    launch.words.iter().any(is_shared).then(|| "its command line lets others write to a disk (share-rw)".to_owned())
}

/// How QEMU is told to reach the file of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// `threads`, `native` or `io_uring`; QEMU's default if nothing is said.
    pub aio: Option<String>,
    /// `ignore` or `unmap`.
    pub discard: Option<String>,
}

/// What the word says that names this file. `cwd` is where relative paths begin.
pub fn ways(launch: &Launch, file: FileId) -> Ways {
    let Some(word) = launch.words.iter().find(|word| names(word, &launch.cwd, &|id| id == file)) else {
        return Ways::default();
    };
    let known = |value: &str, all: &[&str]| all.contains(&value).then(|| value.to_owned());
    let aio = option(word, "aio").and_then(|aio| known(aio, &["threads", "native", "io_uring"]));
    let discard = match option(word, "discard") {
        Some("unmap" | "on") => Some("unmap".to_owned()),
        _ => None,
    };
    Ways { aio, discard }
}

/// Whether a command line names one of these files.
pub fn name_any(launch: &Launch, is_it: &dyn Fn(FileId) -> bool) -> bool {
    launch.words.iter().any(|word| names(word, &launch.cwd, is_it))
}

fn names(word: &str, cwd: &str, is_it: &dyn Fn(FileId) -> bool) -> bool {
    // A comma in a path is doubled.
    let whole = word.replace(",,", "\u{1}");
    let paths = whole.split([',', '=', '"']).map(|piece| piece.replace('\u{1}', ","));
    let id = |path: String| {
        let path = path.strip_prefix("file:").unwrap_or(&path).to_owned();
        let stat = std::fs::metadata(Path::new(cwd).join(path)).ok().filter(|stat| stat.is_file())?;
        Some(FileId { dev: stat.dev(), ino: stat.ino() })
    };
    paths.filter(|path| !path.is_empty()).filter_map(id).any(is_it)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(words: &[&str], cwd: &str) -> Launch {
        Launch {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            cwd: cwd.to_owned(),
            ..Launch::default()
        }
    }

    #[test]
    fn options_of_a_disk_are_found() {
        let dir = std::env::temp_dir().join(format!("pagodad-words-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for name in ["a.qcow2", "b,c.qcow2"] {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let cwd = dir.to_str().unwrap();
        let id = |name: &str| {
            let stat = std::fs::metadata(dir.join(name)).unwrap();
            FileId { dev: stat.dev(), ino: stat.ino() }
        };
        let check = |word: &str, file: &str, expected: (Option<&str>, Option<&str>)| {
            let found = ways(&launch(&["-m", "1G", word], cwd), id(file));
            assert_eq!((found.aio.as_deref(), found.discard.as_deref()), expected, "{word}");
        };
        check("file=a.qcow2,if=virtio,cache=none,aio=native", "a.qcow2", (Some("native"), None));
        check("file=a.qcow2,discard=unmap,file.aio=io_uring", "a.qcow2", (Some("io_uring"), Some("unmap")));
        check("file=b,,c.qcow2,aio=native", "b,c.qcow2", (Some("native"), None));
        check("file=b,,c.qcow2,aio=native", "a.qcow2", (None, None));
        let json = r#"{"driver": "file", "filename": "a.qcow2", "aio": "native", "node-name": "n"}"#;
        check(json, "a.qcow2", (Some("native"), None));
        check(&format!("file={cwd}/a.qcow2,aio=weird,discard=on"), "a.qcow2", (None, Some("unmap")));
        assert!(name_any(&launch(&["-hda", "a.qcow2"], cwd), &|found| found == id("a.qcow2")));
        assert!(!name_any(&launch(&["-hda", "a.qcow2"], cwd), &|found| found == id("b,c.qcow2")));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn files_behind_a_disk_and_shared_disks_are_refused() {
        let check =
            |word: &str, is_refused: bool| assert_eq!(refusal(&launch(&[word], "/")).is_some(), is_refused, "{word}");
        check("driver=qcow2,file=f,backing=b", true);
        check("file=a,backing.file.filename=b", true);
        check(r#"{"driver":"qcow2","file":"f","backing":null}"#, true);
        check("file=/backing/a.qcow2,if=virtio", false);
        check("virtio-blk-pci,drive=d,share-rw=on", true);
        check("virtio-blk-pci,drive=d,share-rw=off", false);
    }
}
