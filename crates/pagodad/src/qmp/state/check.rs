//! Whether QEMU can give its state without RAM, as far as it knows itself. Nothing is changed.

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::in_full;
use pagoda_image::Qemu;
use pagoda_image::cpu::{Cpu, Word};
use serde_json::{Value, json};

use super::capability::{EVENTS, LATE_ACTIVATION, all_on};
use super::progress::{RunState, run_state};
use crate::qmp::{MigrationStatus, Monitor};

/// What QEMU's names of types end with.
const MACHINE_SUFFIX: &str = "-machine";

/// So many features that are missing are named.
const FEATURES_NAMED: usize = 8;

/// A look for one reason why the state cannot be had.
type Look = fn(&Monitor) -> Result<Option<String>>;

/// Whether the VM's state could be taken now.
///
/// # Errors
/// Why not, in words for its user.
pub fn check(monitor: &Monitor) -> Result<(), String> {
    match refusal(monitor) {
        Ok(None) => Ok(()),
        Ok(Some(why)) => Err(why),
        Err(error) => Err(format!("QEMU does not answer: {}", in_full(error.as_ref()))),
    }
}

/// Why not; `None`: it can.
fn refusal(monitor: &Monitor) -> Result<Option<String>> {
    let looks: [Look; 5] = [state_refusal, memory_refusal, migration_refusal, capabilities_refusal, parameters_refusal];
    looks.iter().find_map(|look| look(monitor).transpose()).transpose()
}

fn state_refusal(monitor: &Monitor) -> Result<Option<String>> {
    Ok(match run_state(monitor)? {
        RunState::Running | RunState::Paused => None,
        RunState::PostMigrate => {
            // QEMU refuses to migrate a guest that it has stopped for a migration, until it has run.
            Some(
                "it is paused, and QEMU does not save its state a second time before it has run: `pagoda vm cont` lets it run"
                    .to_owned(),
            )
        }
        other => Some(format!("QEMU says that it is {other}: it has to be running or paused")),
    })
}

fn memory_refusal(monitor: &Monitor) -> Result<Option<String>> {
    let answer = monitor.execute("query-memdev")?;
    let backends = answer.as_array().context("the list of memory back ends")?;
    let is_shared = |one: &Value| one.get("share").and_then(Value::as_bool) == Some(true);
    let all_shared = !backends.is_empty() && backends.iter().all(is_shared);
    Ok((!all_shared).then(|| {
        "QEMU was not told that its RAM is shared, as by an older `pagoda run`, and cannot leave it out: start the VM anew".to_owned()
    }))
}

fn migration_refusal(monitor: &Monitor) -> Result<Option<String>> {
    let answer = monitor.execute("query-migrate")?;
    let status = answer.get("status").and_then(Value::as_str).map_or(MigrationStatus::None, MigrationStatus::of);
    if status == MigrationStatus::UnderWay {
        return Ok(Some("a migration of it is under way".to_owned()));
    }
    let reasons = answer.get("blocked-reasons").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let reasons: Vec<&str> = reasons.iter().filter_map(Value::as_str).collect();
    Ok((!reasons.is_empty())
        .then(|| format!("QEMU cannot save the state of one of its devices: {}", reasons.join("; "))))
}

fn capabilities_refusal(monitor: &Monitor) -> Result<Option<String>> {
    let mut on = all_on(monitor)?;
    // QEMU before 10.0 aborts if it is to give disks away that it has not taken yet.
    if on.iter().any(|name| name == LATE_ACTIVATION) && run_state(monitor)? != RunState::Running {
        let why = "it has not run since it came from another host, and QEMU has not taken its disks yet: `pagoda vm cont` lets it run";
        return Ok(Some(why.to_owned()));
    }
    on.retain(|name| name != EVENTS && name != LATE_ACTIVATION);
    Ok((!on.is_empty()).then(|| format!("it is set up for another migration: switch off {}", on.join(", "))))
}

fn parameters_refusal(monitor: &Monitor) -> Result<Option<String>> {
    let answer = monitor.execute("query-migrate-parameters")?;
    let text = |name| answer.get(name).and_then(Value::as_str);
    // QEMU before 8.2 has no modes.
    let mode = text("mode").unwrap_or("normal");
    if mode != "normal" {
        return Ok(Some(format!("it is set up for another migration: its mode is {mode}, not normal")));
    }
    let has_tls = text("tls-creds").is_some_and(|name| !name.is_empty());
    Ok(has_tls.then(|| "it is set up for another migration: clear its parameter tls-creds".to_owned()))
}

/// Which QEMU this is, and of which machine the state is.
///
/// # Errors
/// The monitor's; an answer that has none.
pub fn machine(monitor: &Monitor) -> Result<Qemu> {
    let answer = monitor.execute("query-version")?;
    let number = |name| answer.get("qemu")?.get(name)?.as_u64();
    let numbers = [number("major"), number("minor"), number("micro")];
    let [Some(major), Some(minor), Some(micro)] = numbers else { bail!("QEMU's version is {answer}") };
    let version = format!("{major}.{minor}.{micro}");
    let kind = monitor.execute_with("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = kind.as_str().context("the machine's type")?;
    let machine = kind.strip_suffix(MACHINE_SUFFIX).with_context(|| format!("{kind:?} is no machine's type"))?;
    Ok(Qemu { version, machine: machine.to_owned(), cpu: cpu(monitor)? })
}

/// What the guest sees of its first CPU. `None`: not known of this architecture.
fn cpu(monitor: &Monitor) -> Result<Option<Cpu>> {
    let cpus = monitor.execute("query-cpus-fast")?;
    let first = cpus.get(0).context("the machine has no CPU")?;
    if first.get("target").and_then(Value::as_str) != Some("x86_64") {
        return Ok(None);
    }
    let path = first.get("qom-path").and_then(Value::as_str).context("the CPU's path")?;
    let get = |property| monitor.execute_with("qom-get", json!({ "path": path, "property": property }));
    let vendor = get("vendor")?.as_str().context("the CPU's vendor")?.to_owned();
    let features = get("feature-words")?;
    let features = features.as_array().context("the CPU's features")?.iter().map(word).collect::<Option<Vec<_>>>();
    let features =
        features.context("a word of the CPU's features")?.into_iter().filter(|(_, bits)| *bits != 0).collect();
    let cpu = Cpu { vendor, features };
    ensure!(cpu.is_sane(), "what QEMU says of its CPU makes no sense");
    Ok(Some(cpu))
}

fn word(value: &Value) -> Option<(Word, u32)> {
    let number = |name| value.get(name)?.as_u64()?.try_into().ok();
    let subleaf = match value.get("cpuid-input-ecx") {
        None => None,
        Some(_) => Some(number("cpuid-input-ecx")?),
    };
    let register = value.get("cpuid-register")?.as_str()?;
    Some((Word::new(number("cpuid-input-eax")?, subleaf, register), number("features")?))
}

/// That a QEMU can go on with the state of this other one.
///
/// # Errors
/// What it lacks, and what to do about it.
pub fn check_same(needed: &Qemu, found: &Qemu) -> Result<()> {
    let (machine, other) = (&found.machine, &needed.machine);
    ensure!(machine == other, "this QEMU has the machine {machine}, and its state is of {other}");
    let Some(seen) = &needed.cpu else { return Ok(()) };
    let here = found.cpu.as_ref().context("this QEMU does not say what its CPU has")?;
    let missing = seen.missing_on(here);
    let (named, more) = (&missing[..missing.len().min(FEATURES_NAMED)], missing.len().saturating_sub(FEATURES_NAMED));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    ensure!(
        missing.is_empty(),
        "the CPU that this host's QEMU gives the guest lacks {}{more}, which the guest has seen: start the VM anew with a CPU model \
         that both hosts have (-cpu MODEL)",
        named.join(", "),
    );
    Ok(())
}
