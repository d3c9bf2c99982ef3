//! `pagoda simulate --replay`: the rounds of a daemon are made again, and their plans compared to the page.

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use pagoda_recording::{Comparison, compare};

use crate::output::Format;
use crate::output::{Side, Table, print_json, print_text};

pub(super) fn run(path: &Path, format: Format) -> Result<()> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("read {name}"))?;
    ensure!(file.metadata().with_context(|| format!("read {name}"))?.is_file(), "{name} is not a file");
    let found = compare(BufReader::new(file)).with_context(|| format!("replay {name}"))?;
    match format {
        Format::Json => print_json(&found)?,
        Format::Text => print_text(&text(&found))?,
    }
    if found.different_rounds > 0 {
        bail!("{} of {} rounds of {name} give another plan", found.different_rounds, found.rounds);
    }
    Ok(())
}

fn text(found: &Comparison) -> String {
    let Comparison { rounds, vm_plans, different_rounds, .. } = found;
    let seconds = found.covers_ms / 1000;
    let mut text =
        format!("{rounds} rounds in {seconds} s, {vm_plans} plans of VMs; {different_rounds} rounds differ\n");
    if found.is_cut_off {
        text += "the last line is not whole and was left out\n";
    }
    if found.differences.is_empty() {
        return text;
    }
    let mut table = Table::new(&[
        ("LINE", Side::Right),
        ("MS", Side::Right),
        ("VM", Side::Right),
        ("WHAT", Side::Left),
        ("RECORDED", Side::Right),
        ("REPLAYED", Side::Right),
    ]);
    for difference in &found.differences {
        table.row(vec![
            difference.line.to_string(),
            difference.now_ms.to_string(),
            difference.vm.map_or("-".into(), |vm| vm.to_string()),
            difference.what.clone(),
            difference.recorded.clone(),
            difference.replayed.clone(),
        ]);
    }
    let _ = write!(text, "\n{}", table.render());
    text
}

#[cfg(test)]
mod tests {
    use pagoda_recording::Difference;

    use super::*;

    #[test]
    fn differences_are_a_table() {
        let same = Comparison { rounds: 7, vm_plans: 14, covers_ms: 6000, ..Comparison::default() };
        assert_eq!(text(&same), "7 rounds in 6 s, 14 plans of VMs; 0 rounds differ\n");
        let difference = Difference {
            line: 3,
            now_ms: 1000,
            vm: Some(2),
            what: "orders.target".into(),
            recorded: "17".into(),
            replayed: "18".into(),
        };
        let other = Comparison { different_rounds: 1, is_cut_off: true, differences: vec![difference], ..same };
        let text = text(&other);
        assert!(
            text.contains("not whole") && text.contains("3  1000   2  orders.target        17        18"),
            "{text}"
        );
    }
}
