//! `pagoda snapshot accept`, and what `pagoda snapshot show` says of a snapshot that came from a file.
//!
//! A file may come from anybody: its texts are printed so that they do nothing to a terminal, and each word stands alone.

use anyhow::{Result, ensure};
use pagoda_api::{Client, SnapshotImport, SnapshotLaunch, SnapshotName};

use super::show;
use crate::exit::Refused;
use crate::output::{Format, lines_text, print_text};
use crate::units::format_size;

/// One snapshot, and what it starts if it came from a file.
pub fn show(client: &Client, name: &SnapshotName, format: Format) -> Result<()> {
    let snapshot = client.snapshot(name)?;
    show::one(&snapshot, format)?;
    if format == Format::Text && snapshot.imported.is_some() {
        print_text(&text(&client.snapshot_program(name)?))?;
    }
    Ok(())
}

pub fn run(client: &Client, name: &SnapshotName, format: Format) -> Result<()> {
    let snapshot = client.snapshot(name)?;
    ensure!(snapshot.imported.is_some(), Refused(format!("{name} was taken on this host: there is nothing to accept")));
    // An image does not change, so this is what is accepted by its id.
    let program = client.snapshot_program(name)?;
    let accepted = client.accept_snapshot(name, &snapshot.id)?;
    if format == Format::Json {
        return show::one(&accepted, format);
    }
    ensure!(accepted.imported == Some(SnapshotImport::Accepted), "the daemon did not accept {name}");
    print_text(&format!("{}accepted: `pagoda vm restore NAME --from {name}` starts this\n", text(&program)))?;
    Ok(())
}

fn text(of: &SnapshotLaunch) -> String {
    let SnapshotLaunch { launch, spec, .. } = of;
    let mut lines = vec![
        ("starts", escaped(&launch.program)),
        ("in", escaped(&launch.cwd)),
        ("as user", format!("{}:{}", launch.uid, launch.gid)),
    ];
    lines.extend(launch.words.iter().map(|word| ("word", escaped(word))));
    if let Some(dram) = spec.dram {
        lines.push(("dram", format_size(dram)));
    }
    if spec.policy.min > 0 {
        lines.push(("min", format_size(spec.policy.min)));
    }
    if let Some(group) = &spec.share_group {
        lines.push(("share group", escaped(group)));
    }
    // All that its user had set, for what is not named above.
    let settings = serde_json::to_string(spec).unwrap_or_else(|error| error.to_string());
    // JSON itself has no control characters.
    lines.push(("settings", if settings.is_ascii() { settings } else { escaped(&settings) }));
    lines_text(&lines)
}

/// Without what would move a cursor or hide a word.
fn escaped(text: &str) -> String {
    let needs = |c: char| c.is_control() || c.is_whitespace() || c == '"' || c == '\\' || !c.is_ascii();
    if text.is_empty() || text.contains(needs) { format!("{text:?}") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use pagoda_api::{Launch, SnapshotQemu, VmSpec};

    use super::*;

    #[test]
    fn what_is_started_is_shown_word_by_word() {
        let words = ["-m", "2G", "-append", "a b", "\u{1b}[2J", "x\u{202e}y"].map(String::from).to_vec();
        let launch =
            Launch { program: "/usr/bin/q".into(), words, cwd: "/".into(), uid: 7, gid: 8, unstartable: vec![] };
        let spec = VmSpec { dram: Some(1 << 30), share_group: Some("g".into()), ..VmSpec::default() };
        let of = SnapshotLaunch {
            launch,
            memory: vec![1 << 31],
            spec,
            qemu: SnapshotQemu::default(),
            shim: None,
            program_version: None,
        };
        let expected = r#"starts         /usr/bin/q
in             /
as user        7:8
word           -m
word           2G
word           -append
word           "a b"
word           "\u{1b}[2J"
word           "x\u{202e}y"
dram           1G
share group    g
settings       {"dram":1073741824,"policy":{"min":0},"share_group":"g","reserve_swap":false}
"#;
        assert_eq!(text(&of), expected);
    }
}
