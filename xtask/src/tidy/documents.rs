//! Rules about documents: links lead somewhere, metrics are described.

use std::path::{Path, PathBuf};

use super::Source;

/// All documents, against the files below `root`.
pub fn check(root: &Path, sources: &[Source]) -> Vec<String> {
    let documents = sources.iter().filter(|source| source.path.ends_with(".md"));
    let mut complaints: Vec<String> = documents.flat_map(|source| check_links(root, source)).collect();
    if !root.join("LICENSE").exists() {
        complaints.push("LICENSE: missing".to_owned());
    }
    complaints.extend(check_metrics(sources));
    complaints
}

/// Every relative link of a document leads to a file.
fn check_links(root: &Path, source: &Source) -> Vec<String> {
    let dir = root.join(&source.path).parent().map_or_else(PathBuf::new, Path::to_owned);
    links(&source.text)
        .filter(|link| !link.contains("://") && !link.starts_with('#') && !link.starts_with("mailto:"))
        .filter(|link| {
            let file = link.split('#').next().unwrap_or(link);
            !dir.join(file).exists()
        })
        .map(|link| format!("{}: the link {link} leads nowhere", source.path))
        .collect()
}

fn links(text: &str) -> impl Iterator<Item = &str> {
    let after = text.split("](").skip(1);
    after.filter_map(|rest| rest.split_once(')')).map(|(link, _)| link.trim())
}

/// Every metric of the catalogue stands in the documentation.
fn check_metrics(sources: &[Source]) -> Vec<String> {
    let docs: Vec<&Source> = sources.iter().filter(|source| source.path.ends_with(".md")).collect();
    let names = sources
        .iter()
        .filter(|source| source.path.ends_with(".rs") && !source.path.starts_with("xtask/"))
        .flat_map(|source| metric_names(&source.text).map(move |name| (source, name)));
    let mut complaints: Vec<String> = names
        .filter(|(_, name)| !docs.iter().any(|doc| doc.text.contains(*name)))
        .map(|(source, name)| format!("{}: metric {name} is not in any document", source.path))
        .collect();
    complaints.sort();
    complaints.dedup();
    complaints
}

/// Names of metrics by their prefix and a unit or `_total` at the end, as string literals.
fn metric_names(text: &str) -> impl Iterator<Item = &str> {
    let literals = text.split('"').skip(1).step_by(2);
    literals.filter(|literal| {
        let form = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let unit = ["_total", "_bytes", "_seconds", "_ratio", "_pages"];
        literal.starts_with("pagoda_") && literal.chars().all(form) && unit.iter().any(|unit| literal.ends_with(unit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_metrics_are_found() {
        let found: Vec<_> = links("[a](b.md) and [c](d/e.md#f), (g)").collect();
        assert_eq!(found, ["b.md", "d/e.md#f"]);
        let text = r#"m("pagoda_faults_total", "pagoda_x", "pagoda_Y_bytes", "pagoda_swap_bytes")"#;
        let found: Vec<_> = metric_names(text).collect();
        assert_eq!(found, ["pagoda_faults_total", "pagoda_swap_bytes"]);
    }
}
