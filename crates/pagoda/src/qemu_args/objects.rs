//! Memory objects that are not guest RAM: only those are let through that are known to hold no memory that Pagoda would
//! have to manage.
//!
//! That is a file of the user's, shared, behind a device whose memory is that file: the kernel writes it back to the file and
//! reclaims it, as it does with any file. Everything else, also what no device uses (a DIMM can be plugged into it
//! later), would be memory of the VM that no limit holds.

use super::backend::Backend;
use super::error::ArgError;
use super::words::{Opt, Props, is_on};
use crate::units;

/// Devices whose memory is the file behind `memdev`, by the start of their names.
const FILE_DEVICES: [&str; 3] = ["nvdimm", "virtio-pmem", "ivshmem-plain"];

/// What a memory object of the user's stays.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Kept {
    /// Files that must be on a disk, in the order of the command line.
    pub files: Vec<String>,
    /// Bytes of them that count for `maxmem`.
    pub module_bytes: u64,
}

/// Looks at every `-object memory-backend-*` but those of guest RAM.
///
/// # Errors
/// One that is not known to be harmless, with its name.
pub fn check(options: &[Opt<'_>], guest_ram: &[String]) -> Result<Kept, ArgError> {
    let mut kept = Kept::default();
    for option in options.iter().filter(|option| option.name == "object") {
        let props = Props::parse("object", option.value, "qom-type")?;
        let kind = props.get("qom-type").unwrap_or_default();
        if !kind.starts_with("memory-backend-") {
            continue;
        }
        let Some(id) = Backend::id_of(&props) else {
            return Err(ArgError::new(format!("-object {kind} has no id"), "give it one"));
        };
        if guest_ram.contains(&id) {
            continue;
        }
        let device = device_of(options, &id)?;
        let is_file_device =
            device.as_deref().is_some_and(|device| FILE_DEVICES.iter().any(|known| device.starts_with(known)));
        let what = match &device {
            Some(device) => format!("-object {kind},id={id} is memory of -device {device}"),
            None => format!("-object {kind},id={id} is not the VM's RAM, and no device uses it"),
        };
        if !is_file_device {
            return Err(ArgError::new(
                format!("{what}, which would not be Pagoda's"),
                "give the VM all its memory by -m, -machine memory-backend= or -numa node,memdev=, and limit its DRAM \
                 with --dram",
            ));
        }
        // Private, what is written to it would be anonymous memory.
        let is_shared = props.get("share").is_some_and(|value| is_on(&value));
        let file = props.get("mem-path").filter(|_| kind == "memory-backend-file" && is_shared);
        let Some(file) = file else {
            return Err(ArgError::new(
                format!("{what} and not a shared file, so it would be memory that is not Pagoda's"),
                format!("write -object memory-backend-file,id={id},size=...,share=on,mem-path= and a file on a disk"),
            ));
        };
        kept.files.push(file);
        if device.is_some_and(|device| !device.starts_with("ivshmem")) {
            let size = props.get("size").and_then(|size| units::parse_qemu_size(&size, 1)).unwrap_or(0);
            kept.module_bytes = kept.module_bytes.saturating_add(size);
        }
    }
    Ok(kept)
}

/// The device that has this object as its memory.
fn device_of(options: &[Opt<'_>], id: &str) -> Result<Option<String>, ArgError> {
    for option in options.iter().filter(|option| option.name == "device") {
        let props = Props::parse("device", option.value, "driver")?;
        // memdev= of most, volatile-memdev=, persistent-memdev= and lsa= of CXL, hostmem= of older ones.
        let uses = props.keys().iter().any(|key| props.get(key).as_deref() == Some(id) && *key != "id");
        if uses {
            return Ok(props.get("driver"));
        }
    }
    Ok(None)
}
