//! What a `Cargo.toml` names is used: every dependency costs time to compile, and trust.

use anyhow::Result;

use super::Source;
use super::code::{Token, code_of, tokens, without_tests};
use super::manifests::{Manifest, Needed, members, shared_dependencies};

/// Dependencies that no code names.
///
/// # Errors
/// A `Cargo.toml` is no TOML.
pub fn check(sources: &[Source]) -> Result<Vec<String>> {
    let members = members(sources)?;
    let mut complaints: Vec<String> = members.iter().flat_map(|member| unused(member, sources)).collect();
    for name in shared_dependencies(sources)? {
        if !members.iter().flat_map(|member| &member.dependencies).any(|(used, _)| *used == name) {
            complaints.push(format!("Cargo.toml: no crate of the workspace uses {name}"));
        }
    }
    Ok(complaints)
}

fn unused(member: &Manifest, sources: &[Source]) -> Vec<String> {
    let own: Vec<&Source> = sources
        .iter()
        .filter(|source| source.path.starts_with(&member.directory) && source.path.ends_with(".rs"))
        .collect();
    let taken_in: Vec<String> = own.iter().flat_map(|source| paths(source)).collect();
    let of_member = || sources.iter().filter(|source| taken_in.contains(&source.path)).chain(own.iter().copied());
    let mut complaints = Vec::new();
    for (name, needed) in &member.dependencies {
        let word = name.replace('-', "_");
        let whole = || of_member().any(|source| names(&code_of(&source.text), &word));
        let product = || {
            // A package whose tests are its purpose has them in `tests/` of the workspace, not of its own.
            let is_test = |path: &str| path.strip_prefix(&member.directory).is_none_or(|path| path.contains("tests"));
            of_member().any(|source| !is_test(&source.path) && names(&without_tests(&code_of(&source.text)), &word))
        };
        let path = format!("{}Cargo.toml", member.directory);
        match needed {
            _ if !whole() => complaints.push(format!("{path}: no code uses {name}")),
            Needed::Always if !product() && member.name != "vm-tests" => {
                complaints.push(format!("{path}: only tests use {name}, it is one of the dev-dependencies"));
            }
            _ => {}
        }
    }
    complaints
}

/// Files that `source` takes in from elsewhere: `#[path = "…"] mod x;`.
fn paths(source: &Source) -> impl Iterator<Item = String> {
    let directory = source.path.rsplit_once('/').map_or("", |(directory, _)| directory);
    source.text.split("#[path = \"").skip(1).filter_map(move |rest| {
        let mut parts: Vec<&str> = directory.split('/').collect();
        for part in rest.split_once('"')?.0.split('/') {
            if part == ".." {
                parts.pop();
            } else {
                parts.push(part);
            }
        }
        Some(parts.join("/"))
    })
}

fn names(code: &str, word: &str) -> bool {
    tokens(code).any(|(_, token)| token == Token::Word(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_that_nothing_uses_are_found() {
        let manifest =
            "[package]\nname = \"a\"\n[dependencies]\nx-y.workspace = true\n[dev-dependencies]\nz.workspace = true\n";
        let workspace = "[workspace.dependencies]\nx-y = \"1\"\nz = \"1\"\n";
        for (workspace, code, expected) in [
            (workspace, "use x_y::B; #[cfg(test)] mod tests { use z::C; }", vec![]),
            (workspace, "fn f() { x_y::b(z) }", vec![]),
            (workspace, "use x_y::B; #[cfg(test)] #[path = \"../../b/tests/rig.rs\"] mod rig;", vec![]),
            (workspace, "// z\nuse x_y::B;", vec!["crates/a/Cargo.toml: no code uses z"]),
            (workspace, "use z::C; use x_y1::B; \"x_y\"", vec!["crates/a/Cargo.toml: no code uses x-y"]),
            (
                workspace,
                "use z::C; #[cfg(test)] mod tests { use x_y::B; }",
                vec!["crates/a/Cargo.toml: only tests use x-y, it is one of the dev-dependencies"],
            ),
            (
                "[workspace.dependencies]\nx-y = \"1\"\nw = \"1\"\n",
                "x_y z",
                vec!["Cargo.toml: no crate of the workspace uses w"],
            ),
        ] {
            let manifests = [("Cargo.toml", workspace), ("crates/a/Cargo.toml", manifest)];
            let files = [("crates/a/src/lib.rs", code), ("crates/b/tests/rig.rs", "use z::C;")];
            let sources = [manifests, files]
                .concat()
                .into_iter()
                .map(|(path, text)| Source { path: path.to_owned(), text: text.to_owned() });
            let sources: Vec<Source> = sources.collect();
            assert_eq!(check(&sources).unwrap(), expected, "{code}");
        }
    }
}
