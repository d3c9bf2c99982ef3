//! The `Cargo.toml` files of the workspace's members.

use anyhow::{Context, Result};
use toml::{Table, Value};

use super::Source;

/// Who needs a dependency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needed {
    /// The crate itself, and so all that is built from it.
    Always,
    /// Only the tests of the crate.
    ByTests,
}

/// One member of the workspace.
#[derive(Debug)]
pub struct Manifest {
    pub name: String,
    /// With a slash at the end, relative to the root.
    pub directory: String,
    /// Names as the code uses them, dashes aside.
    pub dependencies: Vec<(String, Needed)>,
}

/// The members: every package below `crates/`, `tests/` and `xtask/`, less those that are workspaces of their own.
///
/// # Errors
/// A file is no TOML.
pub fn members(sources: &[Source]) -> Result<Vec<Manifest>> {
    let mut members = Vec::new();
    for source in sources {
        let Some(directory) = source.path.strip_suffix("Cargo.toml").filter(|directory| !directory.is_empty()) else {
            continue;
        };
        let table = parse(source)?;
        if table.contains_key("workspace") {
            continue;
        }
        let package = table.get("package").and_then(Value::as_table);
        let name = package.and_then(|package| package.get("name")).and_then(Value::as_str).unwrap_or(directory);
        let dependencies = dependencies(&table);
        members.push(Manifest { name: name.to_owned(), directory: directory.to_owned(), dependencies });
    }
    members.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(members)
}

/// The names in `[workspace.dependencies]`.
///
/// # Errors
/// The workspace's `Cargo.toml` is no TOML.
pub fn shared_dependencies(sources: &[Source]) -> Result<Vec<String>> {
    let Some(source) = sources.iter().find(|source| source.path == "Cargo.toml") else {
        return Ok(Vec::new());
    };
    let table = parse(source)?;
    let workspace = table.get("workspace").and_then(Value::as_table);
    Ok(workspace.into_iter().flat_map(|workspace| keys(workspace, "dependencies").map(str::to_owned)).collect())
}

/// What a package depends on, on whatever target, what builds it included.
fn dependencies(manifest: &Table) -> Vec<(String, Needed)> {
    const SECTIONS: [(&str, Needed); 3] = [
        ("dependencies", Needed::Always),
        ("build-dependencies", Needed::Always),
        ("dev-dependencies", Needed::ByTests),
    ];
    let targets = manifest.get("target").and_then(Value::as_table).into_iter().flatten();
    let tables = std::iter::once(manifest).chain(targets.filter_map(|(_, target)| target.as_table()));
    let of_table = |table| {
        SECTIONS
            .iter()
            .flat_map(move |(section, needed)| keys(table, section).map(move |name| (name.to_owned(), *needed)))
    };
    tables.flat_map(of_table).collect()
}

fn parse(source: &Source) -> Result<Table> {
    source.text.parse().with_context(|| format!("parse {}", source.path))
}

fn keys<'a>(table: &'a Table, section: &str) -> impl Iterator<Item = &'a str> {
    table.get(section).and_then(Value::as_table).into_iter().flatten().map(|(name, _)| name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_of_all_sections_are_read() {
        let text = "[package]\nname = \"a\"\n[dependencies]\nb = \"1\"\n[dev-dependencies]\nc = \"1\"\n\
                    [build-dependencies]\nd = \"1\"\n[target.'cfg(unix)'.dependencies]\ne = \"1\"\n";
        let source = Source { path: "crates/a/Cargo.toml".to_owned(), text: text.to_owned() };
        let expected = [("b", Needed::Always), ("d", Needed::Always), ("c", Needed::ByTests), ("e", Needed::Always)];
        let found = members(&[source]).unwrap().remove(0).dependencies;
        assert_eq!(found, expected.map(|(name, needed)| (name.to_owned(), needed)));
    }
}
