//! Devices that two VMs can have.

use super::super::error::ArgError;
use super::super::words::{Opt, Props};
use super::cards::is_card;
use super::target::{shown, unknown};

/// Known by the whole name.
const KNOWN: &[&str] = &[
    "VGA",
    "ahci",
    "bochs-display",
    "cirrus-vga",
    "i6300esb",
    "ib700",
    "ich9-ahci",
    "ide-cd",
    "ide-hd",
    "intel-iommu",
    "ioh3420",
    "isa-debug-exit",
    "isa-debugcon",
    "isa-parallel",
    "isa-serial",
    "isa-vga",
    "pc-dimm",
    "pci-bridge",
    "pci-serial",
    "pcie-pci-bridge",
    "pcie-root-port",
    "piix3-ide",
    "pvpanic",
    "pvpanic-pci",
    "pxb",
    "pxb-pcie",
    "qemu-xhci",
    "ramfb",
    "scsi-cd",
    "scsi-hd",
    "secondary-vga",
    "usb-ehci",
    "usb-hub",
    "usb-kbd",
    "usb-mouse",
    "usb-storage",
    "usb-tablet",
    "virtconsole",
    "virtserialport",
    "virtio-vga",
    "vmcoreinfo",
    "vmgenid",
    "x3130-upstream",
    "xio3130-downstream",
];

/// Known without the name of their bus: `virtio-blk-pci`, `virtio-blk-device`.
const VIRTIO: [&str; 9] = [
    "virtio-balloon",
    "virtio-blk",
    "virtio-gpu",
    "virtio-keyboard",
    "virtio-mouse",
    "virtio-rng",
    "virtio-scsi",
    "virtio-serial",
    "virtio-tablet",
];
const BUSES: [&str; 5] = ["", "-ccw", "-device", "-pci", "-pci-non-transitional"];

/// USB controllers of the chip sets: their names begin so, and nothing else's does.
const USB_CONTROLLERS: [&str; 3] = ["ich9-usb-", "piix3-usb-", "piix4-usb-"];

/// Why a device is one's alone, by the start of its name.
const SINGLE: [(&str, &str); 10] = [
    ("ccid", "a smart card is one machine's"),
    ("ivshmem", "it is memory that is shared with others"),
    ("nvdimm", "its memory is a file that both would write"),
    ("scsi-block", "it is a device of the host"),
    ("scsi-generic", "it is a device of the host"),
    ("tpm-", "a TPM is one machine's"),
    ("usb-host", "it is a device of the host"),
    ("vfio-", "it is a device of the host"),
    ("vhost-", "its address, or the process that serves it, is its source's"),
    ("virtio-9p", "its directory is written by both"),
];

/// The `-device` of a clone, if it has to differ from its source's.
pub fn changed(option: &Opt<'_>) -> Result<Option<String>, ArgError> {
    let mut props = Props::parse(option.name, option.value, "driver")?;
    let driver = props.get("driver").unwrap_or_default();
    if driver == "vmgenid" && props.get("guid").is_some_and(|guid| guid != "auto") {
        // Each start of a QEMU with it has another one, by which the guest knows that it is a copy.
        props.set_text("guid", "auto");
        return Ok(Some(props.render()));
    }
    if is_known(&driver) || is_card(&driver) {
        return Ok(None);
    }
    match SINGLE.iter().find(|(start, _)| driver.starts_with(start)) {
        Some((_, why)) => Err(ArgError::new(
            format!("{} cannot be in two VMs: {why}", shown(option)),
            "start the VM without it, take a snapshot of that and clone it",
        )),
        None => Err(unknown(&shown(option))),
    }
}

pub fn is_known(driver: &str) -> bool {
    let is_virtio = |of: &str| driver.strip_prefix(of).is_some_and(|bus| BUSES.contains(&bus));
    KNOWN.contains(&driver)
        || VIRTIO.iter().any(|of| is_virtio(of))
        || USB_CONTROLLERS.iter().any(|start| driver.starts_with(start))
}
