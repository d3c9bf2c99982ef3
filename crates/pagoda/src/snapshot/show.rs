//! Snapshots as tables and as text.

use std::fmt::Write;

use anyhow::Result;
use pagoda_api::{HostSnapshots, RemovedSnapshot, Snapshot, SnapshotImport, SnapshotList, SnapshotStage, time};

use crate::output::{Format, Side, Table, lines_text, print_json, print_text};
use crate::units::format_size;

pub fn list(list: &SnapshotList, format: Format) -> Result<()> {
    if format == Format::Json {
        return Ok(print_json(list)?);
    }
    Ok(print_text(&list_text(list))?)
}

fn list_text(list: &SnapshotList) -> String {
    let mut table = Table::new(&[
        ("VM", Side::Left),
        ("NAME", Side::Left),
        ("TAKEN", Side::Left),
        ("STAGE", Side::Left),
        ("SIZE", Side::Right),
        ("SHARED", Side::Right),
        ("MEMSZ", Side::Right),
        ("PAUSE", Side::Right),
        ("TEMPLATE", Side::Right),
        ("READ BY", Side::Left),
    ]);
    for snapshot in &list.snapshots {
        table.row(vec![
            snapshot.vm.clone(),
            snapshot.name.clone(),
            time::rfc3339(snapshot.taken_unix_ms),
            stage_words(snapshot),
            format_size(snapshot.own_bytes),
            snapshot.parent.as_ref().map_or("-".into(), |_| format_size(snapshot.shared_bytes)),
            format_size(snapshot.memory_bytes),
            snapshot.pause_us.map_or("-".into(), format_us),
            if snapshot.template_bytes > 0 { format_size(snapshot.template_bytes) } else { "-".into() },
            readers_words(snapshot).unwrap_or_else(|| "-".into()),
        ]);
    }
    table.render() + &unreadable_text(list)
}

/// How far it is, in two words.
fn stage_words(snapshot: &Snapshot) -> String {
    match (&snapshot.damage, snapshot.filled_percent()) {
        (Some(_), _) => "DAMAGED".into(),
        (None, Some(percent)) => format!("{}, {percent} %", snapshot.stage.word()),
        (None, None) => snapshot.stage.word().into(),
    }
}

/// The VMs that read it.
fn readers_words(snapshot: &Snapshot) -> Option<String> {
    (!snapshot.readers.is_empty()).then(|| snapshot.readers.join(", "))
}

fn unreadable_text(list: &SnapshotList) -> String {
    let mut text = String::new();
    for image in &list.unreadable {
        // Writing into a String cannot fail.
        let _ = write!(
            text,
            "\nimage {} of {} cannot be read ({}); nobody can restore it, and `pagoda snapshot rm {0}` removes it\n",
            image.id,
            format_size(image.own_bytes),
            image.damage
        );
    }
    text
}

pub fn tree(list: &SnapshotList, format: Format) -> Result<()> {
    if format == Format::Json {
        return Ok(print_json(list)?);
    }
    Ok(print_text(&tree_text(list))?)
}

fn tree_text(list: &SnapshotList) -> String {
    let mut text = String::new();
    for of_vm in list.snapshots.chunk_by(|a, b| a.vm == b.vm) {
        let own: u64 = of_vm.iter().map(|snapshot| snapshot.own_bytes).sum();
        let _ = writeln!(text, "{}  {}", of_vm[0].vm, format_size(own));
        let width = of_vm.iter().map(|snapshot| snapshot.name.chars().count()).max().unwrap_or(0);
        for snapshot in of_vm {
            let (taken, stage) = (time::rfc3339(snapshot.taken_unix_ms), stage_words(snapshot));
            let readers = readers_words(snapshot).map_or_else(String::new, |vms| format!(", read by {vms}"));
            let size = format_size(snapshot.own_bytes) + &shared_words(snapshot, &list.snapshots);
            let _ = writeln!(text, "  {:<width$}  {taken}  {size}, {stage}{readers}", snapshot.name);
        }
    }
    text + &unreadable_text(list)
}

/// What it has in another one, and which that is.
fn shared_words(snapshot: &Snapshot, all: &[Snapshot]) -> String {
    let Some(parent) = &snapshot.parent else { return String::new() };
    let name = all.iter().find(|other| other.id == *parent).map_or(parent, |other| &other.name);
    format!(" and {} of {name}", format_size(snapshot.shared_bytes))
}

pub fn one(snapshot: &Snapshot, format: Format) -> Result<()> {
    match format {
        Format::Json => print_json(snapshot)?,
        Format::Text => print_text(&text(snapshot))?,
    }
    Ok(())
}

fn text(snapshot: &Snapshot) -> String {
    let mut lines = vec![
        ("snapshot", snapshot.full_name().to_string()),
        ("taken", time::rfc3339(snapshot.taken_unix_ms)),
        ("stage", stage_words(snapshot)),
        ("", meaning(snapshot)),
        ("pause", snapshot.pause_us.map_or("not known".into(), format_us)),
        ("size", format!("{} of {} of memory", format_size(snapshot.own_bytes), format_size(snapshot.memory_bytes))),
        ("devices", format_size(snapshot.state_bytes)),
        ("vm was", if snapshot.running { "running" } else { "paused by its user" }.into()),
        ("qemu", format!("{}, machine {}", snapshot.qemu.version, snapshot.qemu.machine)),
        ("user", format!("{}:{}", snapshot.uid, snapshot.gid)),
    ];
    if let Some(parent) = &snapshot.parent {
        let shared = format_size(snapshot.shared_bytes);
        lines.insert(6, ("shared", format!("{shared} that the image {parent} has, or those that it refers to")));
    }
    if let Some(bytes) = snapshot.prefetch_bytes {
        let said = format!("{} that a VM needed first, which the next one gets before it asks", format_size(bytes));
        lines.push(("prefetch", said));
    }
    if snapshot.template_bytes > 0 {
        let said = "which its clones read instead of copies of their own";
        lines.push(("template", format!("{} of DRAM, {said}", format_size(snapshot.template_bytes))));
    }
    if let Some(vms) = readers_words(snapshot) {
        lines.push(("read by", vms));
        lines.push(("", "their memory is in its files: it can be removed when they have ended".into()));
    }
    for disk in &snapshot.disks {
        let (file, size) = (&disk.file, format_size(disk.size_bytes));
        let content = match &disk.layer {
            Some(layer) => match disk.layer_bytes {
                Some(bytes) => format!("its content is in {layer} beside it, {}", format_size(bytes)),
                None => format!("its content is in {layer} beside it"),
            },
            None => "its content is not in the snapshot".to_owned(),
        };
        lines.push(("disk", format!("{}, {file}, {size}: {content}", disk.node)));
    }
    if let Some(imported) = snapshot.imported {
        let said = match imported {
            SnapshotImport::Accepted => "from a file; what it starts was accepted",
            SnapshotImport::Waiting | SnapshotImport::Unknown => "from a file; it is not started before it is accepted",
        };
        lines.push(("imported", said.into()));
    }
    if let Some(damage) = &snapshot.damage {
        lines.push(("damage", damage.clone()));
    }
    lines.push(("image", snapshot.id.clone()));
    lines_text(&lines)
}

/// What became of the layers of a snapshot that was removed.
pub fn removed(removed: &RemovedSnapshot) -> Result<()> {
    Ok(print_text(&removed_text(removed))?)
}

fn removed_text(removed: &RemovedSnapshot) -> String {
    removed.layers.iter().map(|layer| format!("kept {}: {}\n", layer.file, layer.kept)).collect()
}

/// What the stage means.
fn meaning(snapshot: &Snapshot) -> String {
    match snapshot.stage {
        SnapshotStage::Begun => {
            "its VM holds memory for it: it is lost with the host, or with the VM and the daemon together".into()
        }
        SnapshotStage::Filled => "it outlives its VM and the daemon, and is lost with the host".into(),
        SnapshotStage::Durable => "it outlives its VM, the daemon and a crash of the host".into(),
        SnapshotStage::Lost => {
            format!("it cannot be restored: {}", snapshot.why.as_deref().unwrap_or("nobody knows why"))
        }
        SnapshotStage::Unknown => "the daemon is newer than this command".into(),
    }
}

/// All snapshots of a host in a line.
pub fn host_words(all: &HostSnapshots) -> String {
    let HostSnapshots { begun, filled, durable, lost, damaged, .. } = *all;
    let counts = [(durable, "durable"), (begun + filled, "volatile"), (lost, "lost"), (damaged, "damaged")];
    let said: Vec<String> =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, word)| format!("{count} {word}")).collect();
    let said = if said.is_empty() { "none".to_owned() } else { said.join(", ") };
    format!("{said}; {} in {}", format_size(all.own_bytes), all.dir.display())
}

/// A short time, as people read it.
fn format_us(us: u64) -> String {
    match us {
        0..1000 => format!("{us} us"),
        1000..10_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use pagoda_api::{RemovedLayer, SnapshotDisk, SnapshotQemu, UnreadableImage};

    use super::*;

    fn snapshot(vm: &str, name: &str, stage: SnapshotStage) -> Snapshot {
        Snapshot {
            id: "0123456789abcdef0123456789abcdef".into(),
            vm: vm.into(),
            name: name.into(),
            taken_unix_ms: 1_795_881_600_000,
            stage,
            why: None,
            damage: None,
            memory_bytes: 4 << 30,
            missing_bytes: None,
            own_bytes: 3 << 29,
            shared_bytes: 0,
            parent: None,
            state_bytes: 3 << 20,
            pause_us: Some(12_345),
            running: true,
            qemu: SnapshotQemu { version: "10.0.2".into(), machine: "pc-q35-10.0".into() },
            uid: 1000,
            gid: 100,
            disks: Vec::new(),
            automatic: false,
            readers: Vec::new(),
            prefetch_bytes: None,
            template_bytes: 0,
            imported: None,
        }
    }

    fn some() -> SnapshotList {
        let filling =
            Snapshot { missing_bytes: Some(3 << 30), pause_us: None, ..snapshot("web1", "two", SnapshotStage::Begun) };
        let filling = Snapshot { parent: Some("0".repeat(32)), shared_bytes: 5 << 29, ..filling };
        let damaged =
            Snapshot { damage: Some("map, offset 8: x".into()), ..snapshot("web1", "three", SnapshotStage::Durable) };
        SnapshotList {
            snapshots: vec![
                Snapshot {
                    readers: vec!["db".into(), "test".into()],
                    template_bytes: 200 << 20,
                    ..snapshot("db", "before upgrade", SnapshotStage::Durable)
                },
                Snapshot { why: Some("disk full".into()), ..snapshot("web1", "one", SnapshotStage::Lost) },
                filling,
                damaged,
            ],
            unreadable: vec![UnreadableImage {
                id: "ab".into(),
                own_bytes: 1 << 20,
                damage: "manifest, offset 0: it is empty".into(),
            }],
        }
    }

    #[test]
    fn the_list() {
        let expected = "\
VM    NAME            TAKEN                 STAGE           SIZE  SHARED  MEMSZ    PAUSE  TEMPLATE  READ BY
db    before upgrade  2026-11-28T16:00:00Z  durable         1.5G       -     4G  12.3 ms      200M  db, test
web1  one             2026-11-28T16:00:00Z  lost            1.5G       -     4G  12.3 ms         -  -
web1  two             2026-11-28T16:00:00Z  volatile, 25 %  1.5G    2.5G     4G        -         -  -
web1  three           2026-11-28T16:00:00Z  DAMAGED         1.5G       -     4G  12.3 ms         -  -

image ab of 1M cannot be read (manifest, offset 0: it is empty); nobody can restore it, and `pagoda snapshot rm ab` removes it
";
        assert_eq!(list_text(&some()), expected);
        let header = "VM  NAME  TAKEN  STAGE  SIZE  SHARED  MEMSZ  PAUSE  TEMPLATE  READ BY\n";
        assert_eq!(list_text(&SnapshotList::default()), header);
    }

    #[test]
    fn the_tree() {
        let mut list = some();
        list.unreadable.clear();
        list.snapshots[1].id = "0".repeat(32);
        let expected = "\
db  1.5G
  before upgrade  2026-11-28T16:00:00Z  1.5G, durable, read by db, test
web1  4.5G
  one    2026-11-28T16:00:00Z  1.5G, lost
  two    2026-11-28T16:00:00Z  1.5G and 2.5G of one, volatile, 25 %
  three  2026-11-28T16:00:00Z  1.5G, DAMAGED
";
        assert_eq!(tree_text(&list), expected);
    }

    #[test]
    fn one_snapshot() {
        let disk = SnapshotDisk {
            node: "disk0".into(),
            file: "/a.img".into(),
            size_bytes: 8 << 30,
            layer: None,
            layer_bytes: None,
        };
        let snapshot = Snapshot { disks: vec![disk], ..snapshot("web1", "one", SnapshotStage::Filled) };
        let expected = "\
snapshot       web1/one
taken          2026-11-28T16:00:00Z
stage          volatile
               it outlives its VM and the daemon, and is lost with the host
pause          12.3 ms
size           1.5G of 4G of memory
devices        3M
vm was         running
qemu           10.0.2, machine pc-q35-10.0
user           1000:100
disk           disk0, /a.img, 8G: its content is not in the snapshot
image          0123456789abcdef0123456789abcdef
";
        assert_eq!(text(&snapshot), expected);
        let read = text(&Snapshot { readers: vec!["web1".into(), "web2".into()], ..snapshot.clone() });
        assert!(read.contains("read by        web1, web2\n               their memory is in its files"), "{read}");
        let lending = text(&Snapshot { template_bytes: 200 << 20, ..snapshot.clone() });
        assert!(lending.contains("template       200M of DRAM, which its clones read"), "{lending}");
        let recorded = text(&Snapshot { prefetch_bytes: Some(24 << 20), ..snapshot.clone() });
        assert!(recorded.contains("prefetch       24M that a VM needed first"), "{recorded}");
        let mut with_disk = snapshot.clone();
        with_disk.disks[0].layer = Some("a.img.pagoda-01".into());
        let said = text(&with_disk);
        assert!(said.contains("disk0, /a.img, 8G: its content is in a.img.pagoda-01 beside it\n"), "{said}");
        with_disk.disks[0].layer_bytes = Some(3 << 20);
        let said = text(&with_disk);
        assert!(said.contains("is in a.img.pagoda-01 beside it, 3M\n"), "{said}");
        let kept = RemovedLayer { file: "/l2".into(), kept: "the VM web1 may need it".into() };
        assert_eq!(removed_text(&RemovedSnapshot { layers: vec![kept] }), "kept /l2: the VM web1 may need it\n");
        let child = Snapshot { parent: Some("ab".into()), shared_bytes: 5 << 29, ..snapshot.clone() };
        let said = text(&child);
        assert!(said.contains("of memory\nshared         2.5G that the image ab has, or"), "{said}");
        let lost = Snapshot { stage: SnapshotStage::Lost, why: Some("disk full".into()), running: false, ..snapshot };
        let said = text(&lost);
        assert!(said.contains("it cannot be restored: disk full\n") && said.contains("paused by its user"), "{said}");
    }

    #[test]
    fn those_of_a_host() {
        let none = HostSnapshots { dir: "/i".into(), ..HostSnapshots::default() };
        assert_eq!(host_words(&none), "none; 0 in /i");
        let some = HostSnapshots { begun: 1, filled: 2, durable: 3, damaged: 1, own_bytes: 3 << 29, ..none };
        assert_eq!(host_words(&some), "3 durable, 3 volatile, 1 damaged; 1.5G in /i");
    }

    #[test]
    fn short_times() {
        let check = |us: u64, expected: &str| assert_eq!(format_us(us), expected);
        check(0, "0 us");
        check(999, "999 us");
        check(1000, "1.0 ms");
        check(123_456, "123.5 ms");
        check(12_000_000, "12.0 s");
    }
}
