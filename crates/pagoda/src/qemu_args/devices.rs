//! Devices that matter to a pager: those that reach guest RAM behind its back, and the balloon.

use super::ArgError;
use super::words::{Opt, Props};

/// Block drivers that hand all of guest RAM to a device or another process.
const PINNING_BLOCK_DRIVERS: [&str; 4] =
    ["nvme", "virtio-blk-vfio-pci", "virtio-blk-vhost-vdpa", "virtio-blk-vhost-user"];

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
    Ok(if kind.contains("vhost-user") {
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

/// The value of a `-device virtio-balloon*` that reports free pages, if it says nothing of them:
/// pages the guest has freed are then dropped and not swapped.
pub fn report_free_pages(option: &Opt<'_>) -> Result<Option<String>, ArgError> {
    if option.name != "device" {
        return Ok(None);
    }
    let mut props = Props::parse("device", option.value, "driver")?;
    let is_balloon = props.get("driver").is_some_and(|kind| kind.starts_with("virtio-balloon"));
    if !is_balloon || props.get("free-page-reporting").is_some() {
        return Ok(None);
    }
    Ok(Some(match &mut props {
        // As it was, with a tail: QEMU's first notation has forms we need not know.
        Props::Keyval(_) => format!("{},free-page-reporting=on", option.value),
        Props::Json(_) => {
            props.set_bool("free-page-reporting", true);
            props.render()
        }
    }))
}
