//! What a destination needs to make a VM and to start it: the JSON of the message `reserve`, on one line.
//!
//! It comes from another host. Its form is checked here; what of it this host allows is for the destination to decide.

use anyhow::{Result, ensure};
use pagoda_api::types::{Launch, VmSpec};
use pagoda_image::Qemu;
use pagoda_image::cpu::Cpu;
use pagoda_move::wire::limits::SPECIFICATION_MAX;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::disks::NewImage;
use crate::record::Remote;

/// What is said of a VM to the host that is to run it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Specification {
    pub launch: Launch,
    pub spec: VmSpec,
    /// Bytes of each region.
    pub memory: Vec<u64>,
    pub qemu: Qemu,
    /// The guest runs. If not, its user has paused it, and it stays so.
    pub running: bool,
    /// Its remote tier, which is handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<Remote>,
    /// Its disks, if they are copied. Streams of disks have their numbers in this list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<NewImage>,
}

impl Specification {
    /// As it is sent.
    ///
    /// # Errors
    /// It is too long.
    pub fn to_text(&self) -> Result<String> {
        // Control characters are in words only. JSON allows some of them there, the protocol none.
        let escape = |c: char| match c.is_control() {
            true => format!("\\u{:04x}", u32::from(c)),
            false => c.to_string(),
        };
        let text: String = serde_json::to_string(self)?.chars().map(escape).collect();
        let len = text.len();
        ensure!(len <= SPECIFICATION_MAX, "what starts it again has {len} bytes, and {SPECIFICATION_MAX} fit");
        Ok(text)
    }

    /// # Errors
    /// It is none, or has what this version does not know.
    pub fn parse(text: &str) -> Result<Specification> {
        let specification: Specification = serde_json::from_str(text)?;
        // A setting that is not known here would be lost without a word.
        let value: Value = serde_json::from_str(text)?;
        let again = serde_json::to_value(&specification)?;
        ensure!(again == value, "it has a setting that this version does not know");
        let is_sane = specification.qemu.cpu.as_ref().is_none_or(Cpu::is_sane);
        ensure!(is_sane, "what it says of its CPU makes no sense");
        Ok(specification)
    }
}

#[cfg(test)]
mod tests {
    use pagoda_core::chance::Chance;

    use super::*;

    fn specification() -> Specification {
        let words = vec!["-append".to_owned(), "a\nb\u{7f}\u{85}é".to_owned()];
        let launch = Launch { program: "/q".into(), words, cwd: "/".into(), uid: 1, gid: 2, unstartable: vec![] };
        let spec = VmSpec { dram: Some(1 << 30), ..VmSpec::default() };
        let qemu = Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into(), cpu: None };
        Specification { launch, spec, memory: vec![1 << 31], qemu, running: true, remote: None, disks: vec![] }
    }

    #[test]
    fn it_is_read_as_it_was_written_and_has_no_control_characters() {
        let text = specification().to_text().unwrap();
        assert!(!text.contains(char::is_control), "{text}");
        assert_eq!(Specification::parse(&text).unwrap(), specification());
        let remote = Remote { space: 7, copies: 2, key: [0xa7; 32], cluster: Some("lab".into()) };
        let with_tier = Specification { remote: Some(remote), ..specification() };
        assert_eq!(Specification::parse(&with_tier.to_text().unwrap()).unwrap(), with_tier);
        let disk = r#"{"file":"/a","format":"qcow2","bytes":512,"cluster":65536,"room":7}"#;
        let with_disk = Specification { disks: vec![serde_json::from_str(disk).unwrap()], ..specification() };
        assert_eq!(Specification::parse(&with_disk.to_text().unwrap()).unwrap(), with_disk);
        assert!(!text.contains("disks"), "an older host is told nothing that it does not know");
        assert!(!format!("{with_tier:?}").contains("167"), "the key of its pages is in no log");
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let text = specification().to_text().unwrap();
        for unknown in [r#"{"new":1,"#, r#"{"running":false,"#] {
            assert!(Specification::parse(&text.replacen('{', unknown, 1)).is_err(), "{unknown}");
        }
        let inner = text.replace(r#""dram":"#, r#""new":7,"dram":"#);
        assert_ne!(inner, text);
        assert!(Specification::parse(&inner).is_err());
        assert!(Specification::parse("[]").is_err());
    }

    /// What comes from another host: each text is refused, or says what it would be sent as again.
    #[test]
    fn any_text_is_refused_or_means_what_it_says() {
        let text = specification().to_text().unwrap();
        let mut chance = Chance::new(27);
        let mut taken = 0;
        for round in 0..20_000 {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..chance.within(1, 3) {
                let at = chance.below(bytes.len() as u64) as usize;
                match chance.below(3) {
                    0 => bytes[at] = b"0123456789abcxyz{}[]\",:-\\n "[chance.below(27) as usize],
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, b"0{}[]\",:e-9\\"[chance.below(12) as usize]),
                }
            }
            let Ok(text) = String::from_utf8(bytes) else { continue };
            if let Ok(read) = Specification::parse(&text) {
                let again = Specification::parse(&read.to_text().unwrap());
                assert_eq!(again.unwrap(), read, "round {round}: {text}");
                taken += 1;
            }
        }
        assert!(taken > 0, "the mutations are too coarse to reach what reads the fields");
    }

    #[test]
    fn one_that_is_too_long_is_not_sent() {
        let mut long = specification();
        long.launch.words = vec!["x".repeat(SPECIFICATION_MAX)];
        assert!(long.to_text().is_err());
    }
}
