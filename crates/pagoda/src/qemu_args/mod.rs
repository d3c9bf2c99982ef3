//! Rewrites a QEMU command line so that guest RAM is files of ours. Pure: no file is looked at.
//!
//! What changes: each back end of guest RAM becomes a `memory-backend-file` on a path that only
//! the shim can open (one is added when the command line has none), a private monitor is added, and a
//! balloon reports free pages and gives way before its guest kills a program. All else stays word for
//! word. What cannot work under a pager is refused with what to do instead, before anything is created.

mod arrived;
mod backend;
mod cloned;
mod console;
mod descriptors;
mod devices;
mod error;
mod generation;
mod memory;
mod objects;
mod refusals;
mod restored;
#[cfg(test)]
mod tests;
mod words;

use pagoda_api::attach::ram_path;

pub use self::arrived::arrived;
use self::backend::Backend;
pub use self::cloned::{Cloned, Net, Overlay, Target, cloned};
pub use self::descriptors::inherited as inherited_descriptors;
pub use self::devices::OUTBOX_CHARDEV;
pub use self::error::ArgError;
pub use self::generation::{has_generation_id, with_generation_id};
pub use self::restored::restored;
use self::words::{Opt, Props};
use crate::units;

/// Id of the monitor.
const MONITOR_ID: &str = "pagoda-qmp";

/// `-fw_cfg name=opt/org.pagoda/dram,string=1G` gives a DRAM cap where only QEMU's options
/// can be written, as in libvirt's `<sysinfo type='fwcfg'>`.
const FW_CFG_DRAM: &str = "opt/org.pagoda/dram";

/// A command line that can be rewritten.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    words: Vec<Word>,
    backends: Vec<Backend>,
    device_files: Vec<String>,
    /// Why the VM can never be paged, if so.
    pub pinned: Option<String>,
    /// The guest's name, as `-name` says it.
    pub name: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
enum Word {
    Text(String),
    /// The value of an `-object` for the back end of this index.
    Backend(usize),
    /// The value of the private monitor's `-chardev`.
    Monitor,
    /// Left out in the end; keeps its place until then, so that indices stay true.
    Removed,
}

impl Plan {
    /// Bytes of each RAM region, in the order of their files.
    pub fn memory(&self) -> Vec<u64> {
        self.backends.iter().map(|backend| backend.size_bytes).collect()
    }

    /// Files the command line wanted as RAM, which ours replace.
    pub fn replaced_files(&self) -> impl Iterator<Item = &str> {
        self.backends.iter().filter_map(|backend| backend.mem_path.as_deref())
    }

    /// Files of the user's that stay the memory of a device.
    pub fn device_files(&self) -> impl Iterator<Item = &str> {
        self.device_files.iter().map(String::as_str)
    }

    /// The words to start QEMU with, given the inherited descriptor of its monitor.
    pub fn argv(&self, monitor: i32) -> Vec<String> {
        let word = |word: &Word| match word {
            Word::Text(text) => Some(text.clone()),
            Word::Backend(index) => Some(self.backends[*index].render(&ram_path(*index))),
            Word::Monitor => Some(format!("socket,id={MONITOR_ID},fd={monitor},server=on,wait=off")),
            Word::Removed => None,
        };
        self.words.iter().filter_map(word).collect()
    }
}

/// Whether `program` is QEMU by its name.
pub fn is_qemu(program: &str) -> bool {
    let name = program.rsplit('/').next().unwrap_or(program);
    name.starts_with("qemu-system-") || matches!(name, "qemu-kvm" | "kvm")
}

/// Whether this command line asks QEMU about itself (help, version, libvirt's probe by `-machine
/// none`) and starts no guest.
pub fn is_probe(words: &[String]) -> bool {
    let asks_for_help = |value: &str| value.split(',').any(|part| matches!(part, "help" | "?"));
    let Ok(options) = words::scan(words) else {
        return false;
    };
    options.iter().any(|option| match option.name {
        "h" | "help" | "version" | "audio-help" => true,
        "machine" | "M" => asks_for_help(option.value) || machine_type(option.value).as_deref() == Some("none"),
        // Values of these are text of the user's.
        "append" | "name" | "fw_cfg" | "smbios" | "kernel" | "initrd" => false,
        _ => asks_for_help(option.value),
    })
}

/// The machine type; the last one counts.
fn machine(options: &[Opt<'_>]) -> Result<Option<String>, ArgError> {
    let mut machine = None;
    for option in options.iter().filter(|option| matches!(option.name, "machine" | "M")) {
        machine = Props::parse("machine", option.value, "type")?.get("type").or(machine);
    }
    Ok(machine)
}

/// The id of the RAM of a machine type of x86 (`MachineClass::default_ram_id`), if it is known without asking QEMU.
pub fn known_ram_id(program: &str, machine: Option<&str>) -> Option<&'static str> {
    let program = program.rsplit('/').next().unwrap_or(program);
    if !matches!(program, "qemu-system-x86_64" | "qemu-system-i386" | "qemu-kvm" | "kvm") {
        return None;
    }
    let machine = machine.unwrap_or("pc");
    let is_pc = matches!(machine, "pc" | "q35" | "isapc")
        || machine.starts_with("pc-i440fx-")
        || machine.starts_with("pc-q35-");
    match machine {
        _ if is_pc => Some("pc.ram"),
        "microvm" => Some("microvm.ram"),
        _ => None,
    }
}

fn machine_type(value: &str) -> Option<String> {
    Props::parse("machine", value, "type").ok()?.get("type")
}

/// The VM's name as `-name web1` or `-name guest=web1,...` has it.
pub fn guest_name(words: &[String]) -> Option<String> {
    let options = words::scan(words).ok()?;
    let option = options.iter().rev().find(|option| option.name == "name")?;
    Props::parse("name", option.value, "guest").ok()?.get("guest")
}

/// Plans the rewriting of `words` (without the program's name). `memory_bytes` is what the user
/// told Pagoda, if anything; QEMU's own options must agree. `ram_id` gives the id of a machine type's own RAM
/// (`None`: QEMU's default machine), so that a saved or migrated state has the block's name that plain QEMU gives it.
///
/// # Errors
/// What Pagoda cannot run, and what to write instead.
pub fn plan(
    words: &[String],
    memory_bytes: Option<u64>,
    ram_id: impl FnOnce(Option<&str>) -> Result<String, ArgError>,
) -> Result<Plan, ArgError> {
    let options = words::scan(words)?;
    for option in &options {
        refusals::check(option)?;
    }
    let memory = memory::Memory::find(&options, memory_bytes)?;

    let mut out: Vec<Word> = words.iter().cloned().map(Word::Text).collect();
    let mut backends = Vec::new();
    for (at, backend) in memory.backends {
        out[at] = Word::Backend(backends.len());
        backends.push(backend);
    }
    let mut pinned = None;
    for option in &options {
        if let Some(value) = devices::set_balloon_switches(option)? {
            out[option.at] = Word::Text(value);
        }
        pinned = pinned.or(devices::pin_reason(option)?);
    }
    for option in &options {
        if fw_cfg_dram(option)?.is_some() {
            // The guest has no use for it.
            out[option.at - 1] = Word::Removed;
            out[option.at] = Word::Removed;
        }
    }

    let mut add = |option: &str, value: Word| {
        out.push(Word::Text(option.into()));
        out.push(value);
    };
    if let Some(bytes) = memory.added_option_bytes {
        add("-m", Word::Text(units::format_mib(bytes)));
    }
    let mut added_id = None;
    if let Some(bytes) = memory.added_backend_bytes {
        let id = ram_id(machine(&options)?.as_deref())?;
        add("-object", Word::Backend(0));
        backends.push(Backend::new(&id, bytes));
        added_id = Some(id);
    }
    if let Some((option, value)) = console::kept_defaults(&options)? {
        add(option, Word::Text(value.into()));
    }
    add("-chardev", Word::Monitor);
    add("-mon", Word::Text(format!("chardev={MONITOR_ID},mode=control")));
    if let Some(id) = added_id {
        name_main_ram(&options, &id, &mut out);
    }

    Ok(Plan { words: out, backends, device_files: memory.device_files, pinned, name: guest_name(words) })
}

/// Adds `memory-backend=` to the user's `-machine`, or a `-machine` that says only this: QEMU
/// merges them, so the machine's type stays what it was.
fn name_main_ram(options: &[Opt<'_>], id: &str, out: &mut Vec<Word>) {
    let last = options.iter().rev().find(|option| matches!(option.name, "machine" | "M"));
    match last {
        Some(option) => {
            out[option.at] = Word::Text(format!("{},memory-backend={id}", option.value));
        }
        None => {
            out.push(Word::Text("-machine".into()));
            out.push(Word::Text(format!("memory-backend={id}")));
        }
    }
}

/// The DRAM cap that `words` carry themselves, see [`FW_CFG_DRAM`].
pub fn dram_of(words: &[String]) -> Result<Option<u64>, ArgError> {
    let mut dram = None;
    for option in words::scan(words)? {
        dram = fw_cfg_dram(&option)?.or(dram);
    }
    Ok(dram)
}

fn fw_cfg_dram(option: &Opt<'_>) -> Result<Option<u64>, ArgError> {
    if option.name != "fw_cfg" {
        return Ok(None);
    }
    let props = Props::parse("fw_cfg", option.value, "name")?;
    if props.get("name").as_deref() != Some(FW_CFG_DRAM) {
        return Ok(None);
    }
    let text = props.get("string").unwrap_or_default();
    units::parse_size(&text).map(Some).map_err(|problem| {
        ArgError::new(
            format!("-fw_cfg name={FW_CFG_DRAM}: {problem}"),
            format!("write -fw_cfg name={FW_CFG_DRAM},string=1G"),
        )
    })
}
