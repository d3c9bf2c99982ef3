//! Which code a result stands for: a hash over the sources of the crates that a bench measures and over the bench's own file.
//!
//! A commit says too little: most commits change nothing that a given bench measures, and a commit with `+` may be anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use aws_lc_rs::digest;
use serde::Deserialize;

use crate::workspace::{cargo_command, repository};

/// Hexadecimal digits of a hash.
const DIGITS: usize = 16;

/// Local crates by name: where each is, and which local crates it is built from.
#[derive(Debug)]
pub struct Crates(BTreeMap<String, Crate>);

#[derive(Debug)]
struct Crate {
    dir: PathBuf,
    needs: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    path: Option<PathBuf>,
    /// Absent for what the crate itself is built from.
    kind: Option<String>,
}

impl Crates {
    /// Asks cargo which packages the workspace has, and what each is built from.
    ///
    /// # Errors
    /// cargo does not say.
    pub fn look() -> Result<Crates> {
        let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
        let output = cargo_command().args(arguments).output().context("run cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let metadata: Metadata = serde_json::from_slice(&output.stdout).context("understand cargo metadata")?;
        let is_built_from =
            |dependency: &Dependency| dependency.path.is_some() && dependency.kind.as_deref() != Some("dev");
        let one = |package: Package| {
            let dir = package.manifest_path.parent().map(Path::to_owned).unwrap_or_default();
            let needs = package.dependencies.into_iter().filter(is_built_from).map(|needed| needed.name).collect();
            (package.name, Crate { dir, needs })
        };
        Ok(Crates(metadata.packages.into_iter().map(one).collect()))
    }

    /// The crates named and all that they are built from.
    fn closure(&self, names: &[&str]) -> Result<BTreeSet<&str>> {
        let mut found = BTreeSet::new();
        let mut open: Vec<&str> = names.to_vec();
        while let Some(name) = open.pop() {
            let (name, known) = self.0.get_key_value(name).with_context(|| format!("there is no crate {name}"))?;
            if found.insert(name.as_str()) {
                open.extend(known.needs.iter().map(String::as_str));
            }
        }
        Ok(found)
    }

    /// The hash over what `names` are built from and over `others`, files or directories below the repository. Tests are left
    /// out: they measure nothing.
    ///
    /// # Errors
    /// A crate that is not there; a file that cannot be read.
    pub fn hash(&self, names: &[&str], others: &[PathBuf]) -> Result<String> {
        let mut files = BTreeSet::new();
        for name in self.closure(names)? {
            let dir = &self.0[name].dir;
            list(&dir.join("src"), &mut files)?;
            files.insert(dir.join("Cargo.toml"));
        }
        for other in others {
            list(other, &mut files)?;
        }
        let mut context = digest::Context::new(&digest::SHA256);
        for file in files {
            let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            let name = file.strip_prefix(repository()).unwrap_or(&file);
            context.update(format!("{} {}\n", name.display(), bytes.len()).as_bytes());
            context.update(&bytes);
        }
        let hex: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(hex[..DIGITS].to_owned())
    }
}

fn is_test(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    name == "tests" || name.ends_with("_tests")
}

fn list(path: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    if is_test(path) {
        return Ok(());
    }
    if !path.is_dir() {
        files.insert(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("look into {}", path.display()))? {
        list(&entry?.path(), files)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_where_it_counts() {
        let dir = std::env::temp_dir().join(format!("xtask-code-{}", std::process::id()));
        let part = |name: &str, needs: &[&str]| {
            let src = dir.join(name).join("src");
            fs::create_dir_all(src.join("tests")).unwrap();
            fs::write(dir.join(name).join("Cargo.toml"), name).unwrap();
            fs::write(src.join("lib.rs"), "one").unwrap();
            let needs = needs.iter().map(|&needed| needed.to_owned()).collect();
            (name.to_owned(), Crate { dir: dir.join(name), needs })
        };
        let crates = Crates(BTreeMap::from([part("base", &[]), part("top", &["base"]), part("other", &[])]));
        let hash = || crates.hash(&["top"], &[]).unwrap();
        let mut last = hash();
        let mut changes = |file: &str, expected: bool| {
            fs::write(dir.join(file), "two").unwrap();
            let now = hash();
            assert_eq!(now != last, expected, "{file}");
            last = now;
        };
        changes("base/src/lib.rs", true);
        changes("top/Cargo.toml", true);
        changes("top/src/new.rs", true);
        changes("other/src/lib.rs", false);
        changes("base/src/tests/one.rs", false);
        changes("base/src/more_tests.rs", false);
        fs::remove_dir_all(&dir).unwrap();
        assert!(crates.hash(&["none"], &[]).is_err());
    }
}
