//! Rules of the repository that no compiler checks. One file per family of rules.

mod circles;
mod code;
mod code_map;
mod crates;
mod dependencies;
mod documents;
mod functions;
mod imports;
mod lines;
mod manifests;
mod pure;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use testkit::workspace::repository;

/// Directories that hold nothing of ours, wherever they are.
const SKIPPED: [&str; 3] = ["target", "out", ".git"];
/// What benches wrote, from the root.
const RESULTS: &str = "bench/results";
const TEXT_ENDINGS: [&str; 8] = ["rs", "md", "toml", "sh", "service", "yml", "json", "conf"];

#[derive(Debug)]
struct Source {
    /// Relative to the root, with forward slashes.
    path: String,
    text: String,
}

impl Source {
    /// Code of a crate that users run.
    fn is_product(&self) -> bool {
        self.product_src().is_some()
    }

    /// `crates/NAME/src/` of the product's crate that has this code.
    fn product_src(&self) -> Option<String> {
        let (name, inside) = self.path.strip_prefix("crates/")?.split_once('/')?;
        (inside.starts_with("src/") && inside.ends_with(".rs")).then(|| format!("crates/{name}/src/"))
    }

    /// A file that holds nothing but tests.
    fn is_test(&self) -> bool {
        self.path.contains("/tests/") || self.path.ends_with("tests.rs")
    }
}

/// Checks all rules; `Ok(true)` when none is broken.
///
/// # Errors
/// The repository cannot be read.
pub fn main() -> Result<bool> {
    let root = repository();
    let mut sources = Vec::new();
    collect(&root, &root, &mut sources)?;
    let mut complaints = Vec::new();
    complaints.extend(lines::check(&sources));
    complaints.extend(documents::check(&root, &sources));
    complaints.extend(functions::check(&sources));
    complaints.extend(circles::check(&sources));
    complaints.extend(crates::check(&sources)?);
    complaints.extend(dependencies::check(&sources)?);
    complaints.extend(pure::check(&sources)?);
    complaints.extend(code_map::check(&sources, &|path| root.join(path).exists()));
    complaints.extend(crate::figures::check()?);
    for complaint in &complaints {
        eprintln!("tidy: {complaint}");
    }
    println!("tidy: {} files, {} complaints", sources.len(), complaints.len());
    Ok(complaints.is_empty())
}

fn collect(root: &Path, dir: &Path, sources: &mut Vec<Source>) -> Result<()> {
    let entries = fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("list {}", dir.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if SKIPPED.contains(&name.as_str()) || path == root.join(RESULTS) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, sources)?;
            continue;
        }
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or("");
        if TEXT_ENDINGS.contains(&ending) || name == "Makefile" || name == "run" {
            let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let relative = path.strip_prefix(root).unwrap_or(&path);
            sources.push(Source { path: relative.to_string_lossy().into_owned(), text });
        }
    }
    Ok(())
}
