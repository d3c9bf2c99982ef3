//! What is read back, and what is refused.

use pagoda_core::chance::Chance;

use super::*;

fn manifest() -> Manifest {
    Manifest {
        id: ImageId(0xab),
        vm: "web1".into(),
        name: "before-upgrade".into(),
        taken_unix_ms: 1_795_881_600_000,
        boot_id: "0f4dcb4a-2e0c-4b62-a50f-0b6a0a2f5c11".into(),
        stage: Stage::Begun,
        why: None,
        regions: vec![2 << 20, 4 << 20],
        spec: VmSpec { dram: Some(2 << 20), ..VmSpec::default() },
        launch: Launch {
            program: "qemu-system-x86_64".into(),
            words: vec!["-m".into(), "6M".into()],
            ..Launch::default()
        },
        qemu: Qemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into(), cpu: None },
        state: State { bytes: 4096, xxh3: 0x1234 },
        pause_us: None,
        running: true,
        disks: vec![DiskFile {
            node: "disk0".into(),
            file: "/a".into(),
            dev: 1,
            ino: 2,
            born_ns: Some(5),
            size: 3,
            mtime_ns: -4,
            layer: None,
        }],
        parent: None,
        inherited_pages: None,
        automatic: false,
        imported: None,
    }
}

/// A manifest whose JSON is this.
fn sealed(json: &Value) -> String {
    seal(FIRST_LINE, &serde_json::to_string(json).unwrap())
}

fn refused(change: impl FnOnce(&mut Value)) -> String {
    let mut json = serde_json::to_value(manifest()).unwrap();
    change(&mut json);
    Manifest::read(sealed(&json).as_bytes()).expect_err("it is refused").to_string()
}

#[test]
fn what_was_written_is_read() {
    let made = manifest();
    assert_eq!(Manifest::read(made.to_text().unwrap().as_bytes()), Ok(made.clone()));
    assert_eq!(made.pages(), PageCount(1536));
    let lost = Manifest { stage: Stage::Lost, why: Some("disk full".into()), pause_us: Some(7), ..made };
    assert_eq!(Manifest::read(lost.to_text().unwrap().as_bytes()), Ok(lost));
    let mut layered = manifest();
    layered.disks[0].layer = Some("a.pagoda-ab".into());
    assert_eq!(Manifest::read(layered.to_text().unwrap().as_bytes()), Ok(layered.clone()));
    // One of before says nothing of births.
    let mut json = serde_json::to_value(&layered).unwrap();
    json["disks"][0].as_object_mut().unwrap().remove("born_ns").unwrap();
    layered.disks[0].born_ns = None;
    assert_eq!(Manifest::read(sealed(&json).as_bytes()), Ok(layered));
}

#[test]
fn what_contradicts_itself_or_is_not_known_is_refused() {
    for (field, value) in [
        ("id", "xyz".into()),
        ("vm", "../etc".into()),
        ("name", "".into()),
        ("boot_id", "none".into()),
        ("stage", "sealed".into()),
        ("stage", "lost".into()),
        ("why", "no reason".into()),
        ("regions", serde_json::json!([])),
        ("regions", serde_json::json!([4096])),
        ("regions", serde_json::json!([0])),
        ("regions", serde_json::json!([1_u64 << 41])),
        ("regions", serde_json::json!([u64::MAX - (2 << 20) + 1, u64::MAX - (2 << 20) + 1])),
        ("regions", serde_json::json!(vec![2 << 20; 9])),
        ("state", serde_json::json!({ "bytes": 0, "xxh3": "0000000000001234" })),
        ("state", serde_json::json!({ "bytes": u64::MAX, "xxh3": "0000000000001234" })),
        ("state", serde_json::json!({ "bytes": 1, "xxh3": "1234" })),
        ("parent", "000000000000000000000000000000ab".into()),
        ("later", 1.into()),
    ] {
        refused(|json| drop(json.as_object_mut().unwrap().insert(field.into(), value)));
    }
    let inside = refused(|json| json["spec"]["later"] = 1.into());
    assert!(inside.contains("\"later\""), "{inside}");
    refused(|json| json["launch"]["later"] = 1.into());
    refused(|json| json["disks"][0]["later"] = 1.into());
    for layer in ["", "..", "../a", "a\0"] {
        refused(|json| json["disks"][0]["layer"] = layer.into());
    }
    refused(|json| drop(json.as_object_mut().unwrap().remove("launch")));
    let text = manifest().to_text().unwrap().replace(FIRST_LINE, "pagoda-image 2");
    assert!(Manifest::read(text.as_bytes()).is_err());
    let (_, json) = unseal(&text.replace("pagoda-image 2", FIRST_LINE))
        .map(|(first, json)| (first.to_owned(), json.to_owned()))
        .unwrap();
    let other = Manifest::read(seal("pagoda-image 2", json.trim_end()).as_bytes()).unwrap_err();
    assert!(other.what.contains("another version"), "{other}");
    let twice = json.replacen("\"vm\":", "\"vm\": \"a\", \"vm\":", 1);
    assert!(Manifest::read(seal(FIRST_LINE, twice.trim_end()).as_bytes()).is_err(), "a field that comes twice");
}

#[test]
fn the_place_is_named_and_no_value() {
    let secret = refused(|json| json["launch"]["words"] = "password=x".into());
    assert!(secret.starts_with("manifest, offset 0: JSON, line") && !secret.contains("password"), "{secret}");
    let long = Manifest::read(&vec![b'x'; MANIFEST_MAX + 1]).unwrap_err();
    assert_eq!((long.file, long.offset), (ImageFile::Manifest, Bytes(MANIFEST_MAX as u64)));
    let mut bytes = manifest().to_text().unwrap().into_bytes();
    bytes[17] = 0xff;
    assert_eq!(Manifest::read(&bytes).unwrap_err().offset, Bytes(17));
    let deep = format!("{FIRST_LINE}\n{}\n", "[".repeat(30_000));
    let sum = crate::checked_text::checksum(&deep);
    assert!(Manifest::read(format!("{deep}sum {sum:016x}\n").as_bytes()).is_err());
}

#[test]
fn a_manifest_that_could_not_be_read_back_is_not_written() {
    let long = Launch { words: vec!["x".repeat(MANIFEST_MAX)], ..Launch::default() };
    assert!(Manifest { launch: long, ..manifest() }.to_text().unwrap_err().contains("longer than"));
    assert!(Manifest { regions: vec![], ..manifest() }.to_text().is_err());
}

#[test]
fn a_reason_is_cut_at_a_letter() {
    assert_eq!(shortened("full"), "full");
    assert_eq!(shortened(&"ä".repeat(WHY_MAX)).len(), WHY_MAX);
    assert_eq!(shortened(&format!("x{}", "ä".repeat(WHY_MAX))).len(), WHY_MAX - 1);
}

#[test]
fn an_image_can_be_used_only_in_its_host_s_life_unless_it_is_durable() {
    let here = manifest().boot_id;
    let check = |stage: Stage, boot_id: &str, expected: Option<&str>| {
        let why = (stage == Stage::Lost).then(|| "disk full".to_owned());
        let found = Manifest { stage, why, ..manifest() }.check_usable(boot_id);
        assert_eq!(found.is_ok(), expected.is_none(), "{stage:?} {boot_id}");
        assert!(expected.is_none_or(|text| found.as_ref().unwrap_err().contains(text)), "{found:?}");
    };
    check(Stage::Durable, "another", None);
    check(Stage::Filled, &here, None);
    check(Stage::Filled, "another", Some("restarted"));
    check(Stage::Begun, &here, Some("not filled yet"));
    check(Stage::Begun, "another", Some("restarted"));
    check(Stage::Lost, &here, Some("disk full"));
}

/// Whatever is changed, cut out or put in is refused, or says the same as before.
#[test]
fn a_mutated_manifest_is_refused() {
    let made = manifest().to_text().unwrap().into_bytes();
    let seed = 27;
    let mut chance = Chance::new(seed);
    for round in 0..20_000 {
        let mut bytes = made.clone();
        for _ in 0..chance.within(1, 4) {
            let at = chance.below(bytes.len() as u64) as usize;
            match chance.below(4) {
                0 => bytes[at] ^= 1 << chance.below(8),
                1 => bytes[at] = chance.draw() as u8,
                2 => drop(bytes.drain(at..bytes.len().min(at + chance.within(1, 64) as usize))),
                _ => bytes.insert(at, b"0{}[]\",:e-9\n"[chance.below(12) as usize]),
            }
            if bytes.is_empty() {
                break;
            }
        }
        if let Ok(read) = Manifest::read(&bytes) {
            assert_eq!(read, manifest(), "seed {seed}, round {round}");
        }
    }
}

/// The same, with a checksum that is right: by somebody, not by a disk. What is taken can be written again.
#[test]
fn a_hostile_manifest_is_refused_or_can_be_written() {
    let text = manifest().to_text().unwrap();
    let (_, json) = unseal(&text).unwrap();
    let mut chance = Chance::new(28);
    let mut taken = 0;
    for round in 0..20_000 {
        let mut bytes = json.trim_end().as_bytes().to_vec();
        for _ in 0..chance.within(1, 3) {
            let at = chance.below(bytes.len() as u64) as usize;
            match chance.below(3) {
                0 => bytes[at] = b"0123456789abcxyz{}[]\",:-\\n "[chance.below(27) as usize],
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, b"0{}[]\",:e-9\\"[chance.below(12) as usize]),
            }
        }
        let Ok(json) = String::from_utf8(bytes) else { continue };
        if let Ok(read) = Manifest::read(seal(FIRST_LINE, &json).as_bytes()) {
            assert!(read.to_text().is_ok(), "round {round}: {json}");
            taken += 1;
        }
    }
    assert!(taken > 0, "the mutations are too coarse to reach what reads the fields");
}
