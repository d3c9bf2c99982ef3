//! What pages of real systems hold: the programs, libraries and modules of the image, and the kernel's symbols as text.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_guest::{PAGE_SIZE, WORDS_PER_PAGE};

use crate::report::Report;

/// Where the image has its files.
const DIRECTORIES: [&str; 5] = ["/bin", "/lib", "/lib64", "/usr", "/modules"];
const SYMBOLS: &str = "/proc/kallsyms";
/// Of the corpus, text has at most one part in so many.
const TEXT_ONE_IN: usize = 4;
/// A file starts on a page in the page cache, and so it does here. A page with fewer words that are not zero would be none.
const WORDS_MIN: usize = 16;

/// At most so many MiB. Pages of zeros are left out: memory has enough of them by itself.
pub fn load(mib: usize, report: &Report) -> Result<&'static [u64]> {
    let mut corpus = Vec::with_capacity(mib << 20 >> 3);
    let bytes = mib << 20;
    let text = File::open(SYMBOLS).with_context(|| format!("open {SYMBOLS}"))?;
    add(&mut corpus, text, bytes / TEXT_ONE_IN).with_context(|| format!("read {SYMBOLS}"))?;
    let mut files = vec![PathBuf::from("/init")];
    DIRECTORIES.iter().for_each(|directory| find(Path::new(directory), &mut files));
    for path in &files {
        let left = bytes.saturating_sub(size_of_val(&corpus[..]));
        let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        add(&mut corpus, file, left).with_context(|| format!("read {}", path.display()))?;
    }
    ensure!(!corpus.is_empty(), "the image has no files for a corpus");
    report.line(format_args!("corpus pages={} files={}", corpus.len() / WORDS_PER_PAGE, files.len()));
    Ok(corpus.leak())
}

/// Regular files below a directory, in the order of their names. One that there is not has none.
fn find(directory: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        match fs::symlink_metadata(&path) {
            Ok(about) if about.is_dir() => find(&path, files),
            Ok(about) if about.is_file() => files.push(path),
            _ => {}
        }
    }
}

/// Adds the whole pages of a file, up to so many bytes.
fn add(corpus: &mut Vec<u64>, file: File, bytes_max: usize) -> Result<()> {
    let mut file = file.take((bytes_max / PAGE_SIZE * PAGE_SIZE) as u64);
    let mut page = vec![0; PAGE_SIZE];
    while file.read_exact(&mut page).is_ok() {
        let words = page.chunks_exact(size_of::<u64>()).map(|word| {
            let mut bytes = [0; size_of::<u64>()];
            bytes.copy_from_slice(word);
            u64::from_le_bytes(bytes)
        });
        if words.clone().filter(|word| *word != 0).count() >= WORDS_MIN {
            corpus.extend(words);
        }
    }
    Ok(())
}
