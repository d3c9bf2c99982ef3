//! Finds guest RAM: `-m`, the back end of `-machine memory-backend=`, those of `-numa node,memdev=`.

use super::backend::Backend;
use super::error::ArgError;
use super::objects;
use super::words::{Opt, Props};
use crate::units::{format_size, parse_qemu_size};

/// QEMU's default for x86 machines (`MachineClass::default_ram_size`).
const DEFAULT_BYTES: u64 = 128 << 20;

/// Guest RAM of one command line.
#[derive(Debug)]
pub struct Memory {
    /// Back ends of guest RAM and the index of the word that has each, in that order.
    pub backends: Vec<(usize, Backend)>,
    /// A back end of this size has to be added, for there is none.
    pub added_backend_bytes: Option<u64>,
    /// The command line has no `-m`; it has to be added with this size.
    pub added_option_bytes: Option<u64>,
    /// Files of the user's that are memory of devices.
    pub device_files: Vec<String>,
}

impl Memory {
    pub fn find(options: &[Opt<'_>], given_bytes: Option<u64>) -> Result<Self, ArgError> {
        let wanted = wanted_ids(options)?;
        let kept = objects::check(options, &wanted)?;
        let option_bytes = size_option(options, kept.module_bytes)?;
        if let (Some(option), Some(given)) = (option_bytes, given_bytes)
            && option != given
        {
            return Err(ArgError::new(
                format!("-m says {} and --memory says {}", format_size(option), format_size(given)),
                "let them agree, or leave --memory out",
            ));
        }
        let asked = option_bytes.or(given_bytes);
        if wanted.is_empty() {
            let bytes = asked.unwrap_or(DEFAULT_BYTES);
            check_granule("-m", bytes)?;
            return Ok(Self {
                backends: Vec::new(),
                added_backend_bytes: Some(bytes),
                added_option_bytes: option_bytes.is_none().then_some(bytes),
                device_files: kept.files,
            });
        }
        let mut backends = Vec::new();
        for option in options.iter().filter(|option| option.name == "object") {
            let props = Props::parse("object", option.value, "qom-type")?;
            if Backend::id_of(&props).is_some_and(|id| wanted.contains(&id)) {
                let backend = Backend::parse(props)?;
                check_granule(&format!("-object id={}", backend.id), backend.size_bytes)?;
                backends.push((option.at, backend));
            }
        }
        check_ids(&wanted, &backends)?;
        let total = backends.iter().fold(0_u64, |sum, (_, b)| sum.saturating_add(b.size_bytes));
        // QEMU itself takes -m from the one back end of the machine, but not from those of nodes.
        if let Some(asked) = asked.filter(|asked| *asked != total) {
            return Err(ArgError::new(
                format!(
                    "the memory back ends have {} together, but {} is {}",
                    format_size(total),
                    if option_bytes.is_some() { "-m" } else { "--memory" },
                    format_size(asked)
                ),
                "let the sizes agree",
            ));
        }
        Ok(Self {
            backends,
            added_backend_bytes: None,
            added_option_bytes: option_bytes.is_none().then_some(total),
            device_files: kept.files,
        })
    }
}

fn check_granule(what: &str, bytes: u64) -> Result<(), ArgError> {
    if bytes.is_multiple_of(pagoda_api::MEMORY_GRANULE_BYTES) {
        return Ok(());
    }
    Err(ArgError::new(
        format!("{what} gives {bytes} bytes, which is not a multiple of 2 MiB"),
        "round it up to an even number of MiB",
    ))
}

/// The size that `-m` gives. Several `-m` add up to one list of properties, of which the last
/// counts; a size of 0 is none. `module_bytes` is what NVDIMMs and the like have: they are there from the start, need slots
/// and room below `maxmem`, and are not guest RAM.
fn size_option(options: &[Opt<'_>], module_bytes: u64) -> Result<Option<u64>, ArgError> {
    let (mut size, mut max, mut slots) = (None, None, None);
    for option in options.iter().filter(|option| option.name == "m") {
        let props = Props::parse("m", option.value, "size")?;
        let read = |key: &str, unit: u64| match props.get(key) {
            None => Ok(None),
            Some(text) => match parse_qemu_size(&text, unit) {
                Some(value) => Ok(Some(value)),
                None => Err(ArgError::new(
                    format!("-m has {key}={text}, which is not a size"),
                    "write a number and a unit, such as -m 4G",
                )),
            },
        };
        size = read("size", 1 << 20)?.or(size);
        max = read("maxmem", 1)?.or(max);
        slots = read("slots", 1)?.or(slots);
    }
    let size = size.filter(|bytes| *bytes > 0);
    let all = size.unwrap_or(DEFAULT_BYTES).saturating_add(module_bytes);
    let has_room = max.is_some_and(|max| max > all);
    if module_bytes > 0 && has_room {
        return Err(ArgError::new(
            format!(
                "-m has maxmem for {} more, and memory added later would not be Pagoda's",
                format_size(max.unwrap_or(all) - all)
            ),
            format!("write maxmem={}, which is what the VM has from the start", crate::units::format_mib(all)),
        ));
    }
    if has_room || (module_bytes == 0 && slots.is_some_and(|slots| slots > 0)) {
        return Err(ArgError::new(
            "-m has slots or maxmem for memory hot-plug, and memory added later would not be Pagoda's",
            "give the VM all its memory from the start, with -m alone, and limit its DRAM with --dram; \
             what it does not use costs nothing",
        ));
    }
    Ok(size)
}

/// Ids of the back ends that are guest RAM.
fn wanted_ids(options: &[Opt<'_>]) -> Result<Vec<String>, ArgError> {
    let mut machine = None;
    let mut nodes = Vec::new();
    let mut empty_nodes = 0;
    for option in options {
        match option.name {
            "machine" | "M" => {
                let props = Props::parse(option.name, option.value, "type")?;
                machine = props.get("memory-backend").or(machine);
            }
            "numa" => {
                let props = Props::parse("numa", option.value, "type")?;
                if props.get("type").as_deref() != Some("node") {
                    continue;
                }
                match props.get("memdev") {
                    Some(id) if nodes.contains(&id) => {
                        return Err(ArgError::new(
                            format!("two NUMA nodes have memdev={id}"),
                            "give each node a back end of its own",
                        ));
                    }
                    Some(id) => nodes.push(id),
                    None => empty_nodes += 1,
                }
            }
            _ => {}
        }
    }
    if nodes.is_empty() && empty_nodes > 0 {
        return Err(ArgError::new(
            "no -numa node says which memory it has",
            "add -object memory-backend-ram,id=ram0,size=... and -numa node,memdev=ram0 for each",
        ));
    }
    match machine {
        Some(id) if nodes.is_empty() => Ok(vec![id]),
        Some(id) => Err(ArgError::new(
            format!("-machine memory-backend={id} and -numa node,memdev= exclude each other"),
            "keep one of them",
        )),
        None => Ok(nodes),
    }
}

fn check_ids(wanted: &[String], backends: &[(usize, Backend)]) -> Result<(), ArgError> {
    for id in wanted {
        match backends.iter().filter(|(_, backend)| backend.id == *id).count() {
            1 => {}
            0 => {
                return Err(ArgError::new(
                    format!("guest memory is to be {id:?}, but no -object memory-backend-* has that id"),
                    format!("add -object memory-backend-ram,id={id},size=..."),
                ));
            }
            _ => {
                return Err(ArgError::new(format!("two -object have the id {id:?}"), "give each an id of its own"));
            }
        }
    }
    Ok(())
}
