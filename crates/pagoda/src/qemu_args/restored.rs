//! The command line of a QEMU that waits for the state of a snapshot.

use super::error::ArgError;
use super::words::{Props, scan};

/// The user's own words for a QEMU that begins with a state which the daemon brings. What would bring another state is left
/// out, and `machine`, a type with its version, stands in the place of its alias: the alias may mean a newer one by now.
///
/// # Errors
/// Words that are no command line of QEMU's.
pub fn restored(words: &[String], machine: &str) -> Result<Vec<String>, ArgError> {
    let options = scan(words)?;
    let mut out: Vec<Option<String>> = words.iter().cloned().map(Some).collect();
    let mut has_type = false;
    for option in options.iter().rev() {
        match option.name {
            "incoming" | "loadvm" => (out[option.at - 1], out[option.at]) = (None, None),
            "S" => out[option.at] = None,
            "machine" | "M" => {
                let mut props = Props::parse("machine", option.value, "type")?;
                // Of several types the last one counts.
                if props.get("type").is_some_and(|kind| !has_type && kind != machine) {
                    props.retain(|key| key != "type");
                    props.set_text("type", machine);
                    out[option.at] = Some(props.render());
                }
                has_type |= props.get("type").is_some();
            }
            _ => {}
        }
    }
    let mut out: Vec<String> = out.into_iter().flatten().collect();
    if !has_type {
        out.extend(["-machine".to_owned(), format!("type={machine}")]);
    }
    out.extend(["-S", "-incoming", "defer"].map(str::to_owned));
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::plan;
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_state_comes_from_the_snapshot_alone() {
        let check = |line: &str, expected: &str| {
            let found = restored(&words(line), "pc-q35-10.0").unwrap().join(" ");
            assert_eq!(found, format!("{expected} -S -incoming defer"), "{line}");
        };
        check("-m 4G disk.img", "-m 4G disk.img -machine type=pc-q35-10.0");
        check("-M q35 -m 4G", "-M type=pc-q35-10.0 -m 4G");
        check("-machine q35,accel=kvm -S", "-machine accel=kvm,type=pc-q35-10.0");
        check("-machine pc-q35-10.0,usb=off -m 1G", "-machine pc-q35-10.0,usb=off -m 1G");
        check("-machine accel=kvm", "-machine accel=kvm -machine type=pc-q35-10.0");
        check("-machine pc -machine q35 -machine usb=off", "-machine pc -machine type=pc-q35-10.0 -machine usb=off");
        check("-incoming tcp:0:4444 -M q35", "-M type=pc-q35-10.0");
        check("--loadvm one -M q35 --incoming defer d.img", "-M type=pc-q35-10.0 d.img");
        let json = r#"{"type":"q35","usb":false}"#;
        check(&format!("-machine {json}"), r#"-machine {"type":"pc-q35-10.0","usb":false}"#);
        assert!(restored(&words("-m"), "pc").is_err());
    }

    #[test]
    fn it_can_be_run_under_pagoda_as_before() {
        let before = words("-name web1 -m 1G -machine q35 -incoming defer");
        let ram = |machine: Option<&str>| {
            assert_eq!(machine, Some("pc-q35-10.0"));
            Ok("pc.ram".to_owned())
        };
        let plan = plan(&restored(&before, "pc-q35-10.0").unwrap(), None, ram).unwrap();
        assert_eq!((plan.memory(), plan.name.as_deref()), (vec![1 << 30], Some("web1")));
        let line = plan.argv(7).join(" ");
        assert!(line.contains("-machine type=pc-q35-10.0,memory-backend=pc.ram -S -incoming defer "), "{line}");
    }
}
