//! Devices that matter to a pager: those that reach guest RAM behind its back, and the balloon.

use super::error::ArgError;
use super::words::{Opt, Props};

/// Block drivers that hand all of guest RAM to a device or another process.
const PINNING_BLOCK_DRIVERS: [&str; 4] =
    ["nvme", "virtio-blk-vfio-pci", "virtio-blk-vhost-vdpa", "virtio-blk-vhost-user"];

/// The connection of Pagoda's own outbox. Its process is a mapper that the daemon knows, so the VM is paged all the same; QEMU refuses
/// another device with the same connection.
pub const OUTBOX_CHARDEV: &str = "pagoda-outbox";

/// Why a VM with this option may never have a page evicted.
pub fn pin_reason(option: &Opt<'_>) -> Result<Option<String>, ArgError> {
    let implied = match option.name {
        "device" | "blockdev" => "driver",
        "netdev" | "net" => "type",
        "object" => "qom-type",
        "drive" => "file",
        _ => return Ok(None),
    };
    let props = Props::parse(option.name, option.value, implied)?;
    let kind =
        if matches!(option.name, "blockdev" | "drive") { pinning_block_driver(&props) } else { props.get(implied) };
    let Some(kind) = kind else { return Ok(None) };
    let given = format!("-{} {kind}", option.name);
    Ok(if kind == "vhost-user-fs-pci" && props.get("chardev").as_deref() == Some(OUTBOX_CHARDEV) {
        None
    } else if kind.contains("vhost-user") {
        Some(format!("{given}: another process maps guest memory and would read evicted pages as zeros"))
    } else if kind.starts_with("vfio-") || kind.contains("vhost-vdpa") || matches!(option.name, "blockdev" | "drive") {
        Some(format!("{given}: the device writes to guest memory by DMA, which no page fault can stop"))
    } else {
        None
    })
}

/// The block driver among those of [`PINNING_BLOCK_DRIVERS`], however it is written.
fn pinning_block_driver(props: &Props) -> Option<String> {
    let nested = match props {
        Props::Json(map) => {
            map.get("file").and_then(|file| file.get("driver")).and_then(|driver| driver.as_str()).map(str::to_owned)
        }
        Props::Keyval(_) => None,
    };
    let by_url = props.get("file").filter(|file| file.starts_with("nvme://")).map(|_| "nvme".into());
    [props.get("driver"), props.get("file.driver"), nested, by_url]
        .into_iter()
        .flatten()
        .find(|driver| PINNING_BLOCK_DRIVERS.contains(&driver.as_str()))
}

/// What a balloon is switched to unless it says otherwise. Pages that the guest has freed are then dropped and not swapped;
/// and a guest that needs memory faster than the policy sees it takes that from its balloon before it kills a program.
const BALLOON_SWITCHES: [&str; 2] = ["free-page-reporting", "deflate-on-oom"];

/// The value of a `-device virtio-balloon*` with [`BALLOON_SWITCHES`], if it lacks any.
pub fn set_balloon_switches(option: &Opt<'_>) -> Result<Option<String>, ArgError> {
    if option.name != "device" {
        return Ok(None);
    }
    let mut props = Props::parse("device", option.value, "driver")?;
    let is_balloon = props.get("driver").is_some_and(|kind| kind.starts_with("virtio-balloon"));
    let missing: Vec<&str> = BALLOON_SWITCHES.into_iter().filter(|name| props.get(name).is_none()).collect();
    if !is_balloon || missing.is_empty() {
        return Ok(None);
    }
    Ok(Some(match &mut props {
        // As it was, with a tail: QEMU's first notation has forms we need not know.
        Props::Keyval(_) => missing.iter().fold(option.value.to_owned(), |value, name| format!("{value},{name}=on")),
        Props::Json(_) => {
            missing.iter().for_each(|name| props.set_bool(name, true));
            props.render()
        }
    }))
}
