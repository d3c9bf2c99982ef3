//! Format 2 of a VM's record.

use pagoda_api::types::{LAUNCH_BYTES_MAX, Launch, PolicySettings, Sampling};
use pagoda_image::checked_text::checksum;

use super::*;

/// Written by the first version that wrote format 2.
const ALL: &str = include_str!("golden/2-all.vm");
const LEAST: &str = include_str!("golden/2-least.vm");
const LAUNCH: &str = include_str!("golden/2-launch.vm");
const OPERATION: &str = include_str!("golden/2-operation.vm");
const READS: &str = include_str!("golden/2-reads.vm");

fn all() -> Record {
    let sampling = Some(Sampling { pages: 200, period_s: 10 });
    let policy = PolicySettings { sampling, ..PolicySettings::default() };
    let made = VmSpec { dram: Some(512 << 20), share_group: Some("tenant1".into()), ..VmSpec::default() };
    let spec = VmSpec {
        policy: PolicySettings { min: 128 << 20, shares: Some(2000), ..policy },
        reserve_swap: true,
        remote: Some(RemoteRequest { copies: 2 }),
        pinned: Some("vfio device".into()),
        balloon_target: Some(256 << 20),
        ..made
    };
    Record {
        pid: (42, 4711),
        paged_out: true,
        blocked: true,
        sharing: Some(SharingFiles { table: (1, 42), pool: (1, u64::MAX) }),
        remote: Some(Remote {
            space: 0x0011_2233_aabb_ccdd,
            copies: 2,
            key: [0xa7; REMOTE_KEY_SIZE],
            cluster: Some("lab".into()),
        }),
        compressed: Some(Compressed { room: 1 << 30, dir: "/run/a dir".into() }),
        ..Record::new("web1", Token([7; 16]), VmKind::Qemu, &[2 << 20, 1 << 30], spec)
    }
}

fn least() -> Record {
    Record::new("web1", Token([7; 16]), VmKind::Plain, &[1 << 30], VmSpec::default())
}

fn with_launch() -> Record {
    let words = ["-m", "1G", "-netdev", "tap,id=n,fd=9", "-name", "a \"b\" ü"].map(String::from).to_vec();
    let (program, cwd) = ("/usr/bin/qemu-system-x86_64".into(), "/root".into());
    let launch = Launch { program, words, cwd, uid: 1000, gid: 100, unstartable: vec!["-netdev fd=9".into()] };
    Record { launch: Some(launch), ..Record::new("web1", Token([7; 16]), VmKind::Qemu, &[1 << 30], VmSpec::default()) }
}

fn with_operation() -> Record {
    let image = ImageId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
    let operation = Operation { kind: OperationKind::Snapshot, image, resume: true };
    Record { kind: VmKind::Qemu, operation: Some(operation), image: Some(image), ..least() }
}

fn with_reads() -> Record {
    let image = ImageId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
    let operation = Operation { kind: OperationKind::Rollback, image: ImageId(8), resume: false };
    Record { kind: VmKind::Qemu, operation: Some(operation), reads: Some(image), ..least() }
}

/// A record whose JSON is this.
fn summed(json: &str) -> String {
    let text = format!("{FIRST_LINE}\n{json}\n");
    let sum = checksum(&text);
    text + &format!("sum {sum:016x}\n")
}

fn json(record: &Record) -> Value {
    serde_json::to_value(record).unwrap()
}

#[test]
fn what_was_written_is_read() {
    assert_eq!(Record::from_text(ALL), Ok(all()));
    assert_eq!(Record::from_text(LEAST), Ok(least()));
    assert_eq!(Record::from_text(LAUNCH), Ok(with_launch()));
    assert_eq!(Record::from_text(OPERATION), Ok(with_operation()));
    assert_eq!(Record::from_text(READS), Ok(with_reads()));
}

#[test]
fn a_program_that_is_no_qemu_has_no_image() {
    for record in [with_operation(), with_reads(), Record { operation: None, ..with_reads() }] {
        let error = Record::from_text(&Record { kind: VmKind::Plain, ..record }.to_text()).unwrap_err();
        assert!(error.to_string().contains("no QEMU"), "{error}");
    }
}

/// Not more than what is read: a daemon of before would leave the VM alone.
#[test]
fn it_is_written_as_it_was() {
    assert_eq!(all().to_text(), ALL);
    assert_eq!(least().to_text(), LEAST);
    assert_eq!(with_launch().to_text(), LAUNCH);
    assert_eq!(with_operation().to_text(), OPERATION);
    assert_eq!(with_reads().to_text(), READS);
}

#[test]
fn record_reads_as_written() {
    let mut records = vec![all(), least(), with_launch(), with_operation(), with_reads()];
    records.push(Record { operation: None, ..with_operation() });
    records.push(Record { borrows: true, ..with_reads() });
    records.push(Record { has_source_tier: true, ..with_reads() });
    records.push(Record { lends: true, ..least() });
    let without = |change: fn(&mut Record)| {
        let mut record = all();
        change(&mut record);
        record
    };
    records.push(without(|record| record.sharing = None));
    records.push(without(|record| record.compressed = None));
    records.push(without(|record| (record.remote, record.spec.remote) = (None, None)));
    records.push(without(|record| record.remote.iter_mut().for_each(|remote| remote.cluster = None)));
    records.push(without(|record| (record.paged_out, record.spec.balloon_target) = (false, None)));
    records.push(without(|record| record.blocked = false));
    records.push(without(|record| {
        record.spec = VmSpec { remote: record.spec.remote, balloon_target: Some(0), ..VmSpec::default() }
    }));
    records.push(without(|record| record.name = "Büro-Server (alt)".into()));
    records.push(without(|record| record.spec.pinned = Some("two\nlines, \"quoted\" \u{1}\u{202e}".into())));
    records.push(without(|record| record.regions = vec![2 << 20; REGIONS_MAX]));
    for record in records {
        assert_eq!(Record::from_text(&record.to_text()), Ok(record));
    }
}

#[test]
fn every_altered_byte_is_noticed() {
    for i in 0..ALL.len() - 1 {
        for bit in [1, 0x20, 0x80] {
            let mut bytes = ALL.to_owned().into_bytes();
            bytes[i] ^= bit;
            if let Ok(altered) = String::from_utf8(bytes) {
                assert!(Record::from_text(&altered).is_err(), "byte {i}");
            }
        }
        assert!(Record::from_text(&ALL[..i]).is_err(), "cut at {i}");
    }
}

/// The sum is right, and what it sums is not: altered on purpose, or by a daemon with a mistake.
#[test]
fn what_no_daemon_writes_is_refused() {
    let check = |what: &str, change: &dyn Fn(&mut Value)| {
        let mut altered = json(&all());
        change(&mut altered);
        let text = summed(&altered.to_string());
        assert!(Record::from_text(&text).is_err(), "{what}");
    };
    assert_eq!(Record::from_text(&summed(&json(&all()).to_string())), Ok(all()), "only its form is another");

    for field in ["name", "token", "kind", "regions", "spec", "pid", "far"] {
        check(field, &|record| drop(record.as_object_mut().unwrap().remove(field)));
    }
    check("an unknown field", &|record| record["newer"] = 1.into());
    check("an unknown setting", &|record| record["spec"]["newer"] = "x".into());
    check("an unknown setting of the policy", &|record| record["spec"]["policy"]["newer"] = true.into());
    check("an unknown field of a tier", &|record| record["compressed"]["newer"] = 1.into());
    for name in ["", "a/b", "../web1", ".", "-x", " x", "a\nb", "a\0b", &"x".repeat(100)] {
        check(name, &|record| record["name"] = name.into());
    }
    for token in ["", "07", &"07".repeat(17), &"0G".repeat(16), &"0A".repeat(16), &"\u{e4}".repeat(16)] {
        check(token, &|record| record["token"] = token.into());
        check(token, &|record| record["far"]["key"] = token.into());
        check(token, &|record| record["far"]["space"] = token.into());
    }
    check("kind", &|record| record["kind"] = "Qemu".into());
    for regions in ["[]", "[0]", "[1]", "[4096]", "[-2097152]", "[2097152.0]", "[18446744073709551616]", "2097152"] {
        check(regions, &|record| record["regions"] = serde_json::from_str(regions).unwrap());
    }
    check("regions", &|record| record["regions"] = vec![2 << 20; REGIONS_MAX + 1].into());
    for pid in ["[]", "[1]", "[1,2,3]", "[-1,2]", "[4294967296,2]", "[1,18446744073709551616]", "[\"1\",2]", "[1.5,2]"]
    {
        check(pid, &|record| record["pid"] = serde_json::from_str(pid).unwrap());
    }
    check("shares", &|record| record["spec"]["policy"]["shares"] = (1_u64 << 32).into());
    check("dram", &|record| record["spec"]["dram"] = (-1).into());
    check("paged out to nothing", &|record| drop(record["spec"].as_object_mut().unwrap().remove("balloon_target")));
    check("copies", &|record| record["far"]["copies"] = 1.into());
    for copies in [0, 3, 256] {
        check("copies", &|record| {
            record["far"]["copies"] = copies.into();
            record["spec"]["far"]["copies"] = copies.into();
        });
    }
    check("no remote tier", &|record| record["spec"]["far"] = Value::Null);
    for pool in ["", "Lab", "a/b", &"x".repeat(CLUSTER_MAX + 1)] {
        check(pool, &|record| record["far"]["cluster"] = pool.into());
    }
}

#[test]
fn an_operation_is_known_whole_or_not_at_all() {
    let check = |what: &str, change: &dyn Fn(&mut Value)| {
        let mut altered = json(&with_operation());
        change(&mut altered);
        assert!(Record::from_text(&summed(&altered.to_string())).is_err(), "{what}");
    };
    check("another kind", &|record| record["operation"]["kind"] = "migration".into());
    check("no image's name", &|record| record["operation"]["image"] = "../etc".into());
    check("an unknown field", &|record| record["operation"]["newer"] = 1.into());
    for field in ["kind", "image", "resume"] {
        check(field, &|record| drop(record["operation"].as_object_mut().unwrap().remove(field)));
    }
    check("no image's name", &|record| record["image"] = 7.into());
    check("of a plain program", &|record| record["kind"] = "plain".into());
}

#[test]
fn text_around_the_json_and_fields_that_come_twice_are_refused() {
    let inner = json(&least()).to_string();
    assert_eq!(Record::from_text(&summed(&inner)), Ok(least()));
    let bad = |text: String| assert!(Record::from_text(&text).is_err(), "{text}");
    bad(summed(&inner.replacen('{', r#"{"name":"web2","#, 1)));
    bad(summed(&inner.replace(r#""spec":{"#, r#""spec":{"reserve_swap":true,"#)));
    bad(summed(&format!("{inner} {inner}")));
    bad(summed(&format!("{inner}\nx")));
    bad(summed(&format!("[{inner}]")));
    bad(summed(&format!("{}{inner}", "[".repeat(10_000))));
    bad(summed(""));
    bad(summed(&inner).replacen("pagoda-vm 2", "pagoda-vm 3", 1));
    let renamed = |first: &str| {
        let text = format!("{first}\n{inner}\n");
        let sum = checksum(&text);
        format!("{text}sum {sum:016x}\n")
    };
    assert_eq!(Record::from_text(&renamed(FIRST_LINE)), Ok(least()));
    for first in ["pagoda-vm 1", "pagoda-vm 3", "pagoda-vm 2 ", "pagoda-vm", ""] {
        bad(renamed(first));
    }
    bad(summed(&inner).replacen("sum ", "SUM ", 1));
    bad(summed(&inner).trim_end().to_owned() + "0\n");
    bad(summed(&inner) + &"\n".repeat(RECORD_MAX));
    bad(String::new());
}

/// Random bytes, and records with pieces cut out, doubled and mixed: nothing panics, and what is accepted is written back as
/// what it says.
#[test]
fn damaged_records_do_no_harm() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let inner = serde_json::to_string(&all()).unwrap();
    for _ in 0..20_000 {
        let mut bytes = inner.clone().into_bytes();
        for _ in 0..=random(3) {
            let (from, to) = (random(bytes.len()), random(bytes.len()));
            let (from, to) = (from.min(to), from.max(to));
            match random(4) {
                0 => bytes[from] = random(128) as u8,
                1 => drop(bytes.drain(from..to.min(from + 40))),
                2 => {
                    let piece = bytes[from..to.min(from + 40)].to_vec();
                    bytes.splice(to..to, piece);
                }
                _ => bytes[from] = b"{}[]:,\"0-.e"[random(11)],
            }
            if bytes.is_empty() {
                bytes.push(b'x');
            }
        }
        let Ok(json) = String::from_utf8(bytes) else { continue };
        if let Ok(record) = Record::from_text(&summed(&json)) {
            assert_eq!(Record::from_text(&record.to_text()), Ok(record), "{json}");
        }
    }
}

#[test]
fn neither_debug_nor_errors_show_a_secret() {
    let secret = "a7".repeat(4);
    assert!(!format!("{:?}", all()).contains(&secret));
    assert!(!format!("{:?}", all()).contains(&"07".repeat(4)));
    assert!(!format!("{:?}", with_launch()).contains("tap,"));
    for (field, other) in [("key", "space"), ("space", "copies")] {
        let mut moved = json(&all());
        moved["far"][other] = json(&all())["far"][field].clone();
        moved["far"]["space"] = json(&all())["far"]["key"].clone();
        let error = Record::from_text(&summed(&moved.to_string())).unwrap_err();
        assert!(!error.to_string().contains(&secret), "{error}");
    }
}

/// The largest record of format 1 fits, and so does every name and setting that a request can have.
#[test]
fn what_format_1_could_hold_fits() {
    let mut record = all();
    record.spec.pinned = Some("\u{1}".repeat(4096));
    let launch = Launch { words: vec!["x".repeat(LAUNCH_BYTES_MAX - 500)], ..with_launch().launch.unwrap() };
    record.launch = Some(launch.bounded());
    assert!(record.launch.as_ref().is_some_and(|launch| launch.words.len() == 1), "it fits");
    assert!(record.to_text().len() <= RECORD_MAX);
    assert_eq!(Record::from_text(&record.to_text()), Ok(record));
}

#[test]
fn moved_disks_are_read_back_and_checked() {
    let id = |ino| FileId { dev: 1, ino, born_ns: None };
    let top = |name: &str| TopFile { name: name.into(), node: "pagoda-1-0".into(), id: id(8), below: None };
    let (file, tops) = ("/d/a.qcow2".into(), vec![top("a.qcow2.pagoda-top-1")]);
    // As records of before are.
    let disk = MovedDisk { file, was: id(7), tops, boot_id: None };
    let record = Record { disks: vec![disk.clone()], ..with_launch() };
    assert_eq!(Record::from_text(&record.to_text()), Ok(record.clone()));
    let mut written = record.clone();
    written.disks[0].tops[0].below = Some(Below { id: id(7), mtime_ns: -1 });
    written.disks[0].was.born_ns = Some(1);
    written.disks[0].boot_id = Some("life".into());
    assert_eq!(Record::from_text(&written.to_text()), Ok(written));
    assert!(!with_launch().to_text().contains("disks"), "a daemon of before reads it");
    let refused = |disk: MovedDisk| {
        let text = Record { disks: vec![disk], ..with_launch() }.to_text();
        assert!(Record::from_text(&text).is_err(), "{text}");
    };
    refused(MovedDisk { file: "a.qcow2".into(), ..disk.clone() });
    refused(MovedDisk { tops: vec![], ..disk.clone() });
    refused(MovedDisk { boot_id: Some("x".repeat(65)), ..disk.clone() });
    refused(MovedDisk { tops: vec![top("../a")], ..disk.clone() });
    refused(MovedDisk { file: format!("/{}", "x".repeat(64 << 10)), ..disk });
    let of_nobody = Record { launch: None, ..record };
    assert!(Record::from_text(&of_nobody.to_text()).is_err(), "nobody knows whose they are");
}
