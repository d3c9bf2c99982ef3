//! The commands that show or change what the daemon knows: `ls`, `vm`, `host`.

mod crashed;
mod remote;

use std::fmt::Write;

use anyhow::Result;
use pagoda_api::{BalloonInfo, Client, CrashedVm, ErrorCode, Explain, HostInfo, VmInfo, VmPatch, VmState};

use self::remote::remote_lines;
use crate::cli::{BalloonTarget, Host, Vm, VmSet};
use crate::exit::UsageError;
use crate::output::{Format, Side, Table, lines_text, print_json, print_text};
use crate::units::format_size;
use crate::{drain, hosts, moves, mrc, policy, snapshot};

pub fn ls(client: &Client, format: Format) -> Result<()> {
    let list = client.vms()?;
    if format == Format::Json {
        return Ok(print_json(&list)?);
    }
    Ok(print_text(&(vm_table(&list.vms, &list.crashed).render() + &crashed::advice(&list.crashed)))?)
}

fn vm_table(vms: &[VmInfo], crashed: &[CrashedVm]) -> Table {
    let mut table = Table::new(&[
        ("NAME", Side::Left),
        ("STATE", Side::Left),
        ("MEMSZ", Side::Right),
        ("DRAM", Side::Right),
        ("MIN", Side::Right),
        ("TGT", Side::Right),
        ("GRANT", Side::Right),
        ("SWCUR", Side::Right),
        ("ZERO", Side::Right),
        ("MCTLSZ", Side::Right),
        ("MCTLTGT", Side::Right),
        ("PID", Side::Right),
        ("ACCEL", Side::Left),
    ]);
    for vm in vms {
        let [ballooned, balloon_target] = balloon_cells(vm);
        table.row(vec![
            vm.name.clone(),
            state_words(vm),
            format_size(vm.memory_bytes),
            format_size(vm.dram_limit_bytes),
            format_size(vm.policy.min_bytes),
            vm.policy.target_bytes.map_or("-".into(), format_size),
            format_size(vm.resident_bytes),
            format_size(vm.swapped_bytes),
            format_size(vm.zero_bytes),
            ballooned,
            balloon_target,
            vm.pid.map_or("-".into(), |pid| pid.to_string()),
            vm.accelerator.clone().unwrap_or("-".into()),
        ]);
    }
    crashed.iter().for_each(|vm| table.row(crashed::row(vm)));
    table
}

/// The state, whether the VM is pinned, and whether it is short of memory.
pub fn state_words(vm: &VmInfo) -> String {
    let mut words = vm.state.word().to_owned();
    if vm.pinned.is_some() {
        words += ",pinned";
    }
    if matches!(vm.policy.status.as_str(), "squeezed" | "blocked") {
        words = format!("{words},{}", vm.policy.status);
    }
    if vm.moving.is_some() {
        words += ",moving";
    }
    words
}

pub fn vm(client: &Client, command: &Vm, format: Format) -> Result<()> {
    match command {
        Vm::Show { name } => show_vm(client, name, format),
        Vm::Set(options) => print_vm(&set(client, options)?, format),
        Vm::Cont { name } => print_vm(&client.cont(name)?, format),
        Vm::Explain { name } => print_explain(&client.explain(name)?, format),
        Vm::Mrc { name } => {
            let curve = client.mrc(name)?;
            match format {
                Format::Json => print_json(&curve)?,
                Format::Text => print_text(&mrc::plot(name, &curve))?,
            }
            Ok(())
        }
        Vm::Rm { name } => Ok(client.delete(name)?),
        Vm::Forget { name } => Ok(client.forget_crashed(name)?),
        Vm::Autosnapshot(options) => {
            let change = options.change().map_err(UsageError)?;
            let patch = VmPatch { autosnapshot: Some(change), ..VmPatch::default() };
            print_vm(&client.patch(&options.name, &patch)?, format)
        }
        Vm::Snapshot(options) => snapshot::take(client, options, format),
        Vm::Restore(options) => snapshot::restore(client, options),
        Vm::Rollback(options) => snapshot::roll_back(client, options),
        Vm::Clone(options) => crate::run::clone::run(client, options, format),
        Vm::Move(options) => moves::move_vm(client, options, format),
        Vm::StartArrived => crate::run::moved::start(),
    }
}

/// A VM, or what is known of one that has crashed.
fn show_vm(client: &Client, name: &str, format: Format) -> Result<()> {
    match client.vm(name) {
        Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => match client.crashed(name) {
            Ok(crashed) => crashed::print(&crashed, format),
            Err(_) => Err(error.into()),
        },
        vm => print_vm(&vm?, format),
    }
}

/// All changes or none: everything is checked first.
fn set(client: &Client, options: &VmSet) -> Result<VmInfo> {
    let vm = client.vm(&options.name)?;
    let patch = patch(&vm, options).map_err(UsageError)?;
    Ok(client.patch(&options.name, &patch)?)
}

/// # Errors
/// A sentence that says what is wrong and what would be right.
fn patch(vm: &VmInfo, options: &VmSet) -> Result<VmPatch, String> {
    let patch = VmPatch {
        dram: options.dram.map(|dram| dram.of(vm.memory_bytes)),
        balloon_target: options.balloon_target.map(|target| match target {
            BalloonTarget::Off => vm.memory_bytes,
            BalloonTarget::Bytes(bytes) => bytes,
        }),
        sampling: options.sampling.over(vm.policy.sampling),
        ..options.patch.clone()
    };
    patch.applied_to(&vm.settings(), vm.memory_bytes)?;
    Ok(patch)
}

/// MCTLSZ and MCTLTGT, esxtop's words for what a guest has given up to its balloon and what it should.
pub fn balloon_cells(vm: &VmInfo) -> [String; 2] {
    let cell = |bytes: Option<u64>| bytes.map_or("-".into(), format_size);
    let wanted = |balloon: &BalloonInfo| vm.memory_bytes.saturating_sub(balloon.target_bytes);
    [cell(vm.balloon.as_ref().map(|balloon| balloon.ballooned_bytes)), cell(vm.balloon.as_ref().map(wanted))]
}

fn print_vm(vm: &VmInfo, format: Format) -> Result<()> {
    match format {
        Format::Json => print_json(vm)?,
        Format::Text => print_text(&vm_text(vm))?,
    }
    Ok(())
}

fn vm_text(vm: &VmInfo) -> String {
    let mut text = String::new();
    let mut line = |term: &str, value: &str| {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{term:<14} {value}");
    };
    let yes_no = |value: bool| if value { "yes" } else { "no" };
    line("name", &vm.name);
    line("state", vm.state.word());
    if let VmState::Stalled { reason, since_s } = &vm.state {
        line("stalled", &format!("for {since_s} s: {reason}"));
        line("", &format!("put that right, then: pagoda vm cont {}", vm.name));
    }
    if let Some(waits) = &vm.waits {
        line("waits for", waits);
    }
    if let Some(reason) = &vm.pinned {
        line("pinned", reason);
    }
    line("memory", &format_size(vm.memory_bytes));
    line("dram limit", &format_size(vm.dram_limit_bytes));
    line("resident", &format_size(vm.resident_bytes));
    line("swapped", &format_size(vm.swapped_bytes));
    line("zero", &format_size(vm.zero_bytes));
    line("swap used", &format_size(vm.swap_used_bytes));
    if let Some(remote) = &vm.remote {
        let copies = if remote.copies == 1 { "1 copy" } else { "2 copies" };
        line("remote", &format!("{} in the pool, {copies}", format_size(remote.pool_bytes)));
        remote.pool.iter().flat_map(remote_lines).for_each(|(term, value)| line(term, &value));
    }
    for (term, value) in crate::snapshot::timetable_lines(vm) {
        line(term, &value);
    }
    for (term, value) in policy::vm_lines(&vm.policy) {
        line(term, &value);
    }
    if let Some(balloon) = &vm.balloon {
        line("balloon target", &format_size(balloon.target_bytes));
        line("ballooned", &format_size(balloon.ballooned_bytes));
        line("balloon", &format!("{} for {} s: {}", balloon.state, balloon.since_s, balloon.reason));
        if balloon.paged_out {
            line("", "paged out to its target instead");
        }
        if let Some(guest) = &balloon.guest {
            let (available, free) = (format_size(guest.available_bytes), format_size(guest.free_bytes));
            line("guest", &format!("{available} available, {free} free"));
        }
    }
    line("armed", yes_no(vm.armed));
    line("huge mappings", yes_no(vm.huge));
    line("pid", &vm.pid.map_or("-".into(), |pid| pid.to_string()));
    line("accelerator", vm.accelerator.as_deref().unwrap_or("-"));
    line("uffds", &vm.uffds.to_string());
    if !vm.latency.is_empty() {
        let mut table = Table::new(&[
            ("fault latency", Side::Left),
            ("count", Side::Right),
            ("p50 us", Side::Right),
            ("p99 us", Side::Right),
        ]);
        for (cause, latency) in &vm.latency {
            table.row(vec![
                cause.clone(),
                latency.count.to_string(),
                format!("{:.1}", latency.p50_us),
                format!("{:.1}", latency.p99_us),
            ]);
        }
        let _ = write!(text, "\n{}", table.render());
    }
    if !vm.counters.is_empty() {
        let mut table = Table::new(&[("counter", Side::Left), ("value", Side::Right)]);
        for (name, value) in &vm.counters {
            table.row(vec![name.clone(), value.to_string()]);
        }
        let _ = write!(text, "\n{}", table.render());
    }
    text
}

fn print_explain(explain: &Explain, format: Format) -> Result<()> {
    if format == Format::Json {
        return Ok(print_json(explain)?);
    }
    let mut table = Table::new(&[("TERM", Side::Left), ("VALUE", Side::Right), ("REASON", Side::Left)]);
    for line in &explain.lines {
        table.row(vec![line.term.clone(), line.value.clone(), line.reason.clone()]);
    }
    Ok(table.print()?)
}

pub fn host(client: &Client, command: &Host, format: Format) -> Result<()> {
    let host = match command {
        Host::Show => client.host()?,
        Host::Set(options) => client.patch_host(&options.patch())?,
        Host::Ls => return hosts::ls(client, format),
        Host::Trust(options) => return hosts::trust(client, options, format),
        Host::Untrust { name } => return hosts::untrust(client, name),
        Host::Ping { name } => return hosts::ping(client, name, format),
        Host::Drain(options) => return drain::run(client, options, format),
    };
    if format == Format::Json {
        return Ok(print_json(&host)?);
    }
    let health = client.health()?;
    let mut text = host_text(&host);
    let _ = writeln!(text, "{:<14} {}", "health", if health.ok { "ok" } else { "not ok" });
    for problem in &health.problems {
        let _ = writeln!(text, "{:<14} {problem}", "");
    }
    Ok(print_text(&text)?)
}

fn vms_words(host: &HostInfo) -> String {
    let draining = if host.draining { ", draining: it takes no new ones (`pagoda host drain --stop`)" } else { "" };
    format!("{}{draining}", host.vms)
}

fn host_text(host: &HostInfo) -> String {
    let size_of = |part: u64, whole: u64| format!("{} of {}", format_size(part), format_size(whole));
    let mut lines = vec![
        ("host", host.hostname.clone()),
        ("pagodad", host.version.clone()),
        ("kernel", host.kernel.clone()),
        ("vms", vms_words(host)),
        ("memory free", size_of(host.memory_available_bytes, host.memory_total_bytes)),
        ("state dir", host.state_dir.display().to_string()),
        ("swap dir", host.swap_dir.display().to_string()),
        ("swap free", format_size(host.swap_free_bytes)),
        ("userfaultfd", host.uffd_permission.clone()),
        ("large folios", host.large_folios.clone()),
    ];
    if let Some(snapshots) = &host.snapshots {
        lines.push(("snapshots", snapshot::host_words(snapshots)));
    }
    lines.extend(policy::host_lines(&host.policy));
    lines_text(&lines)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A VM as a daemon would describe it.
    pub fn sample(name: &str) -> VmInfo {
        serde_json::from_str(&format!(
            r#"{{"name":"{name}","kind":"qemu","state":{{"kind":"running"}},"memory_bytes":4294967296,
            "dram_limit_bytes":1073741824,"resident_bytes":1073741824,"swapped_bytes":1610612736,
            "zero_bytes":1610612736,"swap_used_bytes":1610612736,"armed":true,"huge":false,"pid":42,
            "latency":{{"faults_minor":{{"count":7,"p50_us":3.04,"p99_us":12.5}}}},
            "counters":{{"faults_minor":7,"pages_in":9}}}}"#
        ))
        .unwrap()
    }

    /// The same with a balloon half way.
    pub fn ballooned(name: &str) -> VmInfo {
        let balloon = r#"{"target_bytes":2147483648,"asked_bytes":3221225472,"ballooned_bytes":1073741824,
            "state":"inflating","reason":"the guest is giving memory up","since_s":3,"paged_out":true,"resisted":0,
            "fallbacks":1,"guest":{"free_bytes":1048576,"available_bytes":2097152,"major_faults":0,"swap_in_bytes":0}}"#;
        VmInfo { balloon: Some(serde_json::from_str(balloon).unwrap()), ..sample(name) }
    }

    /// The same short of memory.
    pub fn squeezed(name: &str) -> VmInfo {
        let policy = r#"{"min_bytes":536870912,"shares":2000,"sampling":{"pages":200,"period_s":60},
            "overhead_bytes":67108864,"touched_bytes":2684354560,"active_bytes":2147483648,
            "target_bytes":1073741824,"limit_bytes":1073741824,"shared_bytes":268435456,"saved_bytes":134217728,
            "standing":"squeezed","standing_since_s":12}"#;
        VmInfo { policy: serde_json::from_str(policy).unwrap(), ..ballooned(name) }
    }

    #[test]
    fn changes_are_checked_together() {
        use crate::cli::{DramLimit, SamplingOptions};
        let check = |dram_mib: Option<u64>, min_mib: Option<u64>, sample_pages, expected: &str| {
            let options = VmSet {
                name: "web1".into(),
                dram: dram_mib.map(|mib| DramLimit::Bytes(mib << 20)),
                balloon_target: None,
                patch: VmPatch { min: min_mib.map(|mib| mib << 20), ..VmPatch::default() },
                sampling: SamplingOptions { sample_pages, sample_period: None },
            };
            let said = patch(&squeezed("web1"), &options).err().unwrap_or_default();
            assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{said}");
        };
        check(Some(2048), Some(2048), None, "");
        check(None, Some(1024), None, "");
        check(None, Some(1025), None, "lower --min or raise --dram");
        check(Some(256), None, None, "lower --min or raise --dram");
        check(Some(256), Some(256), None, "");
        check(None, None, Some(5000), "1 to 4096 pages");
        check(Some(5000), None, None, "more than the VM's memory");
    }

    #[test]
    fn the_list() {
        let mut pinned = sample("db");
        pinned.pinned = Some("-device vfio-pci".into());
        let expected = "\
NAME  STATE             MEMSZ  DRAM   MIN  TGT  GRANT  SWCUR  ZERO  MCTLSZ  MCTLTGT  PID  ACCEL
web1  running,squeezed     4G    1G  512M   1G     1G   1.5G  1.5G      1G       2G   42  -
db    running,pinned       4G    1G     0    -     1G   1.5G  1.5G       -        -   42  -
";
        assert_eq!(vm_table(&[squeezed("web1"), pinned], &[]).render(), expected);
    }

    #[test]
    fn one_vm() {
        let mut vm = sample("web1");
        let text = vm_text(&vm);
        for part in ["resident       1G\n", "faults_minor       7     3.0    12.5\n", "pages_in"] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        let text = vm_text(&ballooned("web1"));
        for part in
            ["balloon target 2G\n", "inflating for 3 s: the guest is", "paged out to its", "2M available, 1M free"]
        {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        let text = vm_text(&squeezed("web1"));
        for part in [
            "min            512M\n",
            "sampling       200 pages in 60 s\n",
            "target         1G\n",
            "shared         256M, which saves 128M\n",
            "status         squeezed for 12 s\n",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!vm_text(&vm).contains("remote  "));
        vm.remote = Some(pagoda_api::RemoteInfo { copies: 2, pool_bytes: 3 << 30, pool: None });
        assert!(vm_text(&vm).contains("remote         3G in the pool, 2 copies\n"));
        vm.waits = Some("9 pages of the pool".into());
        assert!(vm_text(&vm).contains("waits for      9 pages of the pool\n"));
        vm.state = VmState::Stalled { reason: "swap disk full".into(), since_s: 5 };
        let text = vm_text(&vm);
        assert!(text.contains("for 5 s: swap disk full\n") && text.contains("pagoda vm cont web1"));
    }
}
