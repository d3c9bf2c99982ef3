//! The generation id of a VM: a device by whose number a guest learns that it is a copy, and makes its random numbers anew.
//!
//! QEMU has it as `vmgenid`. It has to be there from the start, because devices are part of a snapshot; with `guid=auto` each QEMU
//! makes a number of its own, so that each restore and each clone has another one. Machines that are known to take it get it.

use super::machine;
use super::words::{Opt, Props, is_on, scan};

const DEVICE: &str = "vmgenid";
/// QEMUs for x86, by name.
const PROGRAMS: [&str; 4] = ["kvm", "qemu-kvm", "qemu-system-i386", "qemu-system-x86_64"];
/// Machine types without a version are the newest, and the first is QEMU's default.
const MACHINES: [&str; 2] = ["pc", "q35"];
/// Older ones have no `fw_cfg` with DMA, which the device needs (QEMU 2.5 began with it).
const VERSIONED: [&str; 2] = ["pc-i440fx-", "pc-q35-"];
const MAJOR_MIN: u32 = 3;

/// The words with the device, if this machine takes it and they do not say anything of it themselves.
pub fn with_generation_id(program: &str, words: Vec<String>) -> Vec<String> {
    let program = program.rsplit('/').next().unwrap_or(program);
    if !PROGRAMS.contains(&program) || has_generation_id(&words) || !is_taken(&words) {
        return words;
    }
    let device = ["-device".to_owned(), format!("{DEVICE},guid=auto")];
    words.into_iter().chain(device).collect()
}

/// Whether the guest can learn that it is a copy.
pub fn has_generation_id(words: &[String]) -> bool {
    let is_one = |option: &Opt<'_>| {
        let driver = Props::parse("device", option.value, "driver").ok().and_then(|props| props.get("driver"));
        option.name == "device" && driver.as_deref() == Some(DEVICE)
    };
    scan(words).is_ok_and(|options| options.iter().any(is_one))
}

/// Whether the machine takes it. Of words that cannot be read nobody knows; what is wrong with them is said elsewhere.
fn is_taken(words: &[String]) -> bool {
    let Ok(options) = scan(words) else { return false };
    let has_acpi = |option: &Opt<'_>| match option.name {
        "no-acpi" => false,
        "machine" | "M" => Props::parse("machine", option.value, "type")
            .is_ok_and(|props| props.get("acpi").is_none_or(|value| is_on(&value) || value == "auto")),
        _ => true,
    };
    let Ok(machine) = machine(&options) else { return false };
    options.iter().all(has_acpi) && is_known(machine.as_deref().unwrap_or(MACHINES[0]))
}

fn is_known(machine: &str) -> bool {
    let version = VERSIONED.iter().find_map(|prefix| machine.strip_prefix(prefix));
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    MACHINES.contains(&machine) || major.is_some_and(|major| major >= MAJOR_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_that_take_it_get_it() {
        let check = |program: &str, line: &str, expected: bool| {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            let found = with_generation_id(program, words.clone());
            let with: Vec<String> =
                words.iter().cloned().chain(["-device", "vmgenid,guid=auto"].map(str::to_owned)).collect();
            assert_eq!(found, if expected { with } else { words }, "{program} {line}");
        };
        let x86 = "/usr/bin/qemu-system-x86_64";
        for line in ["-m 1G", "-M q35", "-machine pc,accel=kvm", "-M pc-q35-7.2", "-M pc-i440fx-10.0", "-M q35,acpi=on"]
        {
            check(x86, line, true);
        }
        for line in [
            "-M microvm",
            "-M isapc",
            "-M pc-i440fx-2.4",
            "-M pc-q35-2.12",
            "-M pc-q35-",
            "-M q35,acpi=off",
            "-M q35 -no-acpi",
            "-device vmgenid",
            "-device {\"driver\":\"vmgenid\"}",
            "-M",
        ] {
            check(x86, line, false);
        }
        check("qemu-system-aarch64", "-M virt", false);
        check("qemu-kvm", "-append vmgenid", true);
    }
}
