//! VMs that have crashed: they are listed behind those that there are, and it is said what can be done.

use anyhow::Result;
use pagoda_api::{CrashedVm, time};

use crate::output::{Format, lines_text, print_json, print_text};
use crate::units::format_size;

const STATE: &str = "crashed";

/// Shows what is known of a VM that has crashed.
pub fn print(vm: &CrashedVm, format: Format) -> Result<()> {
    match format {
        Format::Json => print_json(vm)?,
        Format::Text => print_text(&text(vm))?,
    }
    Ok(())
}

/// Its row in the list of VMs.
pub fn row(vm: &CrashedVm) -> Vec<String> {
    let mut row = vec![vm.name.clone(), STATE.to_owned(), format_size(vm.memory_bytes)];
    row.resize(13, "-".to_owned());
    row
}

/// A line for each below the list.
pub fn advice(vms: &[CrashedVm]) -> String {
    vms.iter().map(|vm| format!("\n{}: {}; {}\n", vm.name, what(vm), then(vm))).collect()
}

fn what(vm: &CrashedVm) -> String {
    format!("{}, seen {}", vm.crash.words(), time::rfc3339(vm.seen_unix_ms))
}

fn then(vm: &CrashedVm) -> String {
    let name = &vm.name;
    match &vm.snapshot {
        Some(newest) => {
            let taken = time::rfc3339(newest.taken_unix_ms);
            format!(
                "its newest snapshot is {}, taken {taken}: pagoda vm restore {name}, or pagoda vm forget {name}",
                newest.name
            )
        }
        None => {
            format!("none of its snapshots can be restored as they are: pagoda snapshot ls, or pagoda vm forget {name}")
        }
    }
}

fn text(vm: &CrashedVm) -> String {
    lines_text(&[
        ("name", vm.name.clone()),
        ("state", STATE.to_owned()),
        ("", what(vm)),
        ("", then(vm)),
        ("memory", format_size(vm.memory_bytes)),
        ("pid", format!("{}, which has ended", vm.pid)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crashed(snapshot: &str) -> CrashedVm {
        let text = format!(
            r#"{{"name":"web1","memory_bytes":1073741824,"pid":42,"seen_unix_ms":1795881600000,"crash":{{"kind":"killed"}}{snapshot}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn what_can_be_done_is_said() {
        let vm = crashed(r#","snapshot":{"name":"auto-1","taken_unix_ms":1795881000000}"#);
        assert_eq!(row(&vm)[..4], ["web1", "crashed", "1G", "-"]);
        let said = "its QEMU was killed, or it crashed, seen 2026-11-28T16:00:00Z";
        let then = "its newest snapshot is auto-1, taken 2026-11-28T15:50:00Z: pagoda vm restore web1, or pagoda vm forget web1";
        assert_eq!(advice(std::slice::from_ref(&vm)), format!("\nweb1: {said}; {then}\n"));
        let text = text(&vm);
        assert!(text.contains("state          crashed\n") && text.contains(then), "{text}");
        assert!(advice(&[crashed("")]).contains("none of its snapshots can be restored as they are"));
        assert_eq!(advice(&[]), "");
    }
}
