//! What QEMU writes of a VM in ways of its own, most of which is in swap: dumps, streams of several channels, files with RAM at fixed
//! places. `docs/qemu-options.md` has the table.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_guest::PAGE_SIZE;
use pagoda_guest::pattern::Pattern;
use serde_json::json;
use vm_tests::guest::Guest;
use vm_tests::qmp::Qmp;
use vm_tests::{Daemon, Folios, GuestOptions, Lab, MIB, Qemu, wait};

use crate::options::{By, WAYS, capability, goes_on, migrate_to, migrated, quit, start, was_paged};

const FILLED_MIB: u64 = 260;
const DRAM_MIB: u64 = 160;
/// The guest's own seed, unless it is told another.
const SEED: u64 = 1;
/// Of a page that was written once.
const WRITTEN_ONCE: u32 = 1;

/// A loadable segment of an ELF file: where it is in the file, and its bytes there.
fn segments(dump: &File) -> Result<Vec<(u64, u64)>> {
    const LOAD: u32 = 1;
    let bytes = |at: u64, len: usize| -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        dump.read_exact_at(&mut bytes, at).with_context(|| format!("read the dump at {at}"))?;
        Ok(bytes)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    // elf(5): e_phoff, e_phentsize, e_phnum; p_type, p_offset, p_filesz.
    let header = bytes(0, 64)?;
    ensure!(header.starts_with(b"\x7fELF\x02\x01"), "the dump is no 64-bit ELF file");
    let (table, size, count) = (number(&header[32..40]), number(&header[54..56]), number(&header[56..58]));
    let mut found = Vec::new();
    for index in 0..count {
        let entry = bytes(table + index * size, 56)?;
        if number(&entry[..4]) == u64::from(LOAD) {
            found.push((number(&entry[8..16]), number(&entry[32..40])));
        }
    }
    Ok(found)
}

/// Every page that the guest filled is in the dump, with each of its words.
fn ensure_all_pages_in(path: &Path) -> Result<()> {
    let dump = File::open(path).context("open the dump")?;
    let pattern = Pattern::new(SEED);
    let mut first_words = HashMap::new();
    let mut content = [0; PAGE_SIZE];
    for page in 0..FILLED_MIB * MIB / PAGE_SIZE as u64 {
        pattern.content(page, WRITTEN_ONCE).fill_bytes(&mut content);
        first_words.insert(content[..8].to_vec(), page);
    }
    for (from, len) in segments(&dump)? {
        for at in (from..from + len).step_by(PAGE_SIZE) {
            dump.read_exact_at(&mut content, at).with_context(|| format!("read the dump at {at}"))?;
            let Some(page) = first_words.get(&content[..8]).copied() else { continue };
            if pattern.content(page, WRITTEN_ONCE).check_bytes(&content).is_none() {
                first_words.remove(&content[..8]);
            }
        }
    }
    ensure!(first_words.is_empty(), "{} pages are missing in the dump", first_words.len());
    Ok(())
}

fn dumped(qemu: Qemu) -> Result<()> {
    Lab::run("dump", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("guest", "").qemu(qemu).control().dram(&format!("{DRAM_MIB}M"));
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        control.run(&format!("fill {FILLED_MIB}"))?;
        was_paged(&daemon, By::Pagoda, "guest")?;
        let before = daemon.vm("guest")?;
        let path = lab.dir().join("dump");
        let mut qmp = guest.qmp()?;
        let protocol = format!("file:{}", path.display());
        qmp.execute("dump-guest-memory", json!({ "paging": false, "protocol": protocol }))?;
        let after = daemon.vm("guest")?;
        ensure!(after.resident_bytes <= DRAM_MIB * MIB, "{after:#?}");
        ensure!(qmp.status()? == "running", "the guest does not run on");
        eprintln!("dump: counters before {:?}, after {:?}", before.counters, after.counters);
        ensure_all_pages_in(&path)?;
        control.run("verify")?;
        control.send("poweroff")?;
        goes_on(&daemon, By::Pagoda, &guest)
    })
}

#[test]
fn a_dump_has_all_pages() -> Result<()> {
    dumped(Qemu::System)
}

#[test]
fn a_dump_has_all_pages_qemu_10() -> Result<()> {
    dumped(Qemu::Ten)
}

fn with_capabilities(qmp: &mut Qmp, names: &[&str], parameters: &serde_json::Value) -> Result<()> {
    for name in names {
        qmp.execute("migrate-set-capabilities", capability(name))?;
    }
    qmp.execute("migrate-set-parameters", parameters.clone()).map(drop)
}

fn by_several_channels(qemu: Qemu) -> Result<()> {
    migrated("multifd", qemu, |qmp| with_capabilities(qmp, &["multifd"], &json!({ "multifd-channels": 4 })))
}

#[test]
fn several_channels_carry_all_pages() -> Result<()> {
    by_several_channels(Qemu::System)
}

#[test]
fn several_channels_carry_all_pages_qemu_10() -> Result<()> {
    by_several_channels(Qemu::Ten)
}

fn to_file(lab: &Lab, daemon: &Daemon, by: By, uri: &str, set: impl Fn(&mut Qmp) -> Result<()>) -> Result<()> {
    let guest = start(lab, daemon, by, Qemu::Ten, "source", "")?;
    let mut qmp = guest.qmp()?;
    set(&mut qmp)?;
    guest.wait_phase("random")?;
    was_paged(daemon, by, "source")?;
    migrate_to(&mut qmp, uri)?;
    quit(&guest, &mut qmp)?;
    if by == By::Pagoda {
        daemon.wait_gone("source")?;
    }
    Ok(())
}

fn from_file(lab: &Lab, daemon: &Daemon, by: By, uri: &str, set: impl Fn(&mut Qmp) -> Result<()>) -> Result<Rc<Guest>> {
    let guest = start(lab, daemon, by, Qemu::Ten, "target", "-incoming defer")?;
    let mut qmp = guest.qmp()?;
    set(&mut qmp)?;
    qmp.execute("migrate-incoming", json!({ "uri": uri }))?;
    wait::until("the target runs", wait::HANG, || Ok((qmp.status()? == "running").then_some(())))?;
    Ok(guest)
}

fn in_a_file(capabilities: &[&str], parameters: serde_json::Value) -> Result<()> {
    Lab::run("mapped-ram", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        for (number, (from, to)) in WAYS.into_iter().enumerate() {
            let what = || format!("from {from:?} to {to:?}");
            let uri = format!("file:{}", lab.dir().join(format!("state{number}")).display());
            let set = |qmp: &mut Qmp| with_capabilities(qmp, capabilities, &parameters);
            to_file(lab, &daemon, from, &uri, set).with_context(what)?;
            let guest = from_file(lab, &daemon, to, &uri, set).with_context(what)?;
            goes_on(&daemon, to, &guest).with_context(what)?;
        }
        Ok(())
    })
}

#[test]
fn a_file_with_mapped_ram_has_all_pages_qemu_10() -> Result<()> {
    in_a_file(&["mapped-ram"], json!({}))
}

#[test]
fn a_file_with_mapped_ram_of_several_channels_has_all_pages_qemu_10() -> Result<()> {
    in_a_file(&["mapped-ram", "multifd"], json!({}))
}

/// QEMU reads the file into RAM past the page cache.
#[test]
fn a_file_with_mapped_ram_by_direct_io_has_all_pages_qemu_10() -> Result<()> {
    in_a_file(&["mapped-ram", "multifd"], json!({ "direct-io": true }))
}
