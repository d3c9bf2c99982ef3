use super::*;

fn snapshot() -> Snapshot {
    Snapshot {
        id: "00".into(),
        vm: "web1".into(),
        name: "one".into(),
        taken_unix_ms: 1,
        stage: SnapshotStage::Begun,
        why: None,
        damage: None,
        memory_bytes: 1000,
        missing_bytes: None,
        own_bytes: 5,
        shared_bytes: 0,
        parent: None,
        state_bytes: 3,
        pause_us: None,
        running: true,
        qemu: SnapshotQemu::default(),
        uid: 0,
        gid: 0,
        disks: Vec::new(),
        automatic: false,
        readers: Vec::new(),
        prefetch_bytes: None,
        template_bytes: 0,
        imported: None,
    }
}

#[test]
fn an_older_qemu_does_not_load_a_state() {
    let of = |version: &str| SnapshotQemu { version: version.into(), machine: "pc-q35-10.0".into() };
    for (needed, found) in [("10.0.2", "10.0.2"), ("10.0.2", "10.0.10"), ("7.2.22", "10.0.0")] {
        assert_eq!(of(needed).check_loaded_by(found), Ok(()), "{needed} by {found}");
    }
    for (needed, found) in [("10.0.2", "10.0.1"), ("10.0.2", "7.2.22"), ("10.0.10", "10.0.9")] {
        let why = of(needed).check_loaded_by(found).unwrap_err();
        assert_eq!(why, format!("this QEMU is {found}, and its state needs {needed} or a newer one"));
    }
    for (needed, found) in [("10.0.2", "10.0"), ("10.0.2", ""), ("10.0.2", "10.0.2.1"), ("ten", "10.0.2")] {
        assert!(of(needed).check_loaded_by(found).unwrap_err().contains("cannot be compared"), "{needed} by {found}");
    }
}

#[test]
fn a_snapshot_is_named_by_its_vm_and_its_name() {
    let name: SnapshotName = "web 1/before upgrade".parse().unwrap();
    assert_eq!(name, SnapshotName::new("web 1", "before upgrade"));
    assert_eq!(name.to_string().parse(), Ok(name));
    let refused = |text: &str, expected: &str| {
        let said = text.parse::<SnapshotName>().unwrap_err();
        assert!(said.contains(expected), "{text}: {said}");
    };
    refused("one", "write VM/NAME");
    refused("web1/", "the name of a snapshot cannot be empty");
    refused("/one", "the name of a VM cannot be empty");
    refused("web1/a/b", "the name of a snapshot has letters");
    refused("web1/..", "the name of a snapshot has no `.`");
    refused("../one", "the name of a VM has no `.`");
}

#[test]
fn requests_need_no_more_than_what_is_asked_for() {
    let read: CreateSnapshot = serde_json::from_str("{}").unwrap();
    assert_eq!(read, CreateSnapshot::default());
    assert!(read.check().is_ok());
    let named = CreateSnapshot { name: Some("a/b".into()), ..read };
    assert!(named.check().unwrap_err().contains("has '/'"));

    let read: RestoreRequest = serde_json::from_str(r#"{"from":{"vm":"web1","name":"one"},"newer":1}"#).unwrap();
    assert_eq!((read.vm_name(), read.force, read.replace, read.dram), ("web1", false, false, None));
    assert!(read.check().is_ok());
    let other = RestoreRequest { as_name: Some("web2".into()), ..read.clone() };
    assert_eq!(other.vm_name(), "web2");
    let text = serde_json::to_string(&read).unwrap();
    assert_eq!(text, r#"{"from":{"vm":"web1","name":"one"},"force":false,"replace":false}"#);
    assert!(RestoreRequest { as_name: Some(String::new()), ..read }.check().is_err());
}

#[test]
fn a_snapshot_goes_there_and_back() {
    let whole = Snapshot {
        stage: SnapshotStage::Lost,
        why: Some("disk full".into()),
        damage: Some("map, offset 8: x".into()),
        missing_bytes: Some(7),
        pause_us: Some(9),
        disks: vec![SnapshotDisk {
            node: "d".into(),
            file: "/d".into(),
            size_bytes: 4,
            layer: Some("l".into()),
            layer_bytes: Some(2),
        }],
        readers: vec!["web2".into()],
        ..snapshot()
    };
    for snapshot in [snapshot(), whole] {
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot, "{text}");
    }
    let newer = serde_json::to_string(&snapshot()).unwrap().replace("\"begun\"", "\"sealed\"");
    assert_eq!(serde_json::from_str::<Snapshot>(&newer).unwrap().stage, SnapshotStage::Unknown);
}

#[test]
fn how_far_it_is() {
    let check = |stage, missing_bytes, expected: Option<u64>| {
        assert_eq!(Snapshot { stage, missing_bytes, ..snapshot() }.filled_percent(), expected);
    };
    check(SnapshotStage::Begun, None, None);
    check(SnapshotStage::Begun, Some(1000), Some(0));
    check(SnapshotStage::Begun, Some(255), Some(74));
    check(SnapshotStage::Begun, Some(0), Some(99));
    check(SnapshotStage::Begun, Some(5000), Some(0));
    check(SnapshotStage::Filled, Some(0), None);
    assert_eq!([SnapshotStage::Begun, SnapshotStage::Filled].map(SnapshotStage::word), ["volatile"; 2]);
}

#[test]
fn words_of_a_command_line_stay_out_of_logs() {
    let launch = SnapshotLaunch {
        launch: Launch { program: "/q".into(), words: vec!["password=x".into()], ..Launch::default() },
        memory: vec![256 << 20],
        spec: VmSpec::default(),
        qemu: SnapshotQemu::default(),
        shim: Some("/shim.so".into()),
        program_version: None,
    };
    let text = serde_json::to_string(&launch).unwrap();
    assert_eq!(serde_json::from_str::<SnapshotLaunch>(&text).unwrap(), launch);
    assert!(text.contains("password") && !format!("{launch:?}").contains("password"));
}
