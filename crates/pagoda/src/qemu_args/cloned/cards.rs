//! Network cards and what they are connected to.

use super::super::error::ArgError;
use super::super::words::{Opt, Props};
use super::target::{Net, listens, shown, unknown};

/// Cards by the whole name, or the start of it.
const CARDS: [&str; 7] = ["e1000", "e1000e", "i82551", "ne2k_pci", "pcnet", "rtl8139", "vmxnet3"];
const VIRTIO_CARD: &str = "virtio-net-";

/// What of a user network is the clone's own.
pub const USER_KEYS: [&str; 17] = [
    "bootfile",
    "dhcpstart",
    "dns",
    "dnssearch",
    "domainname",
    "host",
    "hostname",
    "id",
    "ipv4",
    "ipv6",
    "ipv6-dns",
    "ipv6-host",
    "ipv6-prefix",
    "net",
    "restrict",
    "tftp",
    "type",
];

/// What of a tap is the clone's own, in its namespace. Scripts are the host's, and could do something to what the source has.
pub const TAP_KEYS: [&str; 9] =
    ["downscript", "id", "ifname", "queues", "script", "sndbuf", "type", "vhost", "vnet_hdr"];

pub fn is_card(driver: &str) -> bool {
    CARDS.contains(&driver) || driver.starts_with(VIRTIO_CARD)
}

/// The network cards of a command line, as a user would name them.
fn found(options: &[Opt<'_>]) -> Result<Vec<String>, ArgError> {
    let mut cards = Vec::new();
    let mut has_default = !options.iter().any(|option| option.name == "nodefaults");
    for option in options {
        match option.name {
            "netdev" => has_default = false,
            "nic" | "net" => {
                has_default = false;
                let kind = Props::parse(option.name, option.value, "type")?.get("type");
                if kind.as_deref() != Some("none") && (option.name == "nic" || kind.as_deref() == Some("nic")) {
                    cards.push(shown(option));
                }
            }
            "device" => {
                let driver = Props::parse(option.name, option.value, "driver")?.get("driver");
                if driver.is_some_and(|driver| is_card(&driver)) {
                    cards.push(shown(option));
                }
            }
            _ => {}
        }
    }
    if has_default {
        cards.push("the card that QEMU adds by itself (without -nic none)".to_owned());
    }
    Ok(cards)
}

/// That somebody has said what becomes of the cards: the state has their MAC addresses, whatever the words say.
pub fn check(options: &[Opt<'_>], net: Net) -> Result<(), ArgError> {
    match found(options)?.first() {
        Some(card) if net == Net::None => Err(ArgError::new(
            format!("{card}: all clones would have the MAC address of their source"),
            "clone with --net isolated, where each has a network of its own, or start the VM with -nic none",
        )),
        _ => Ok(()),
    }
}

/// Refuses a `-netdev`, `-net` or `-nic` that a clone cannot have.
pub fn check_network(option: &Opt<'_>, net: Net) -> Result<(), ArgError> {
    let props = Props::parse(option.name, option.value, "type")?;
    let kind = props.get("type").unwrap_or_default();
    // The properties of the card are in the same option.
    let of_card = |key: &str| option.name == "nic" && matches!(key, "model" | "mac" | "macaddr");
    match kind.as_str() {
        "none" | "nic" if option.name != "netdev" => Ok(()),
        "user" => {
            let is_known = |key: &&str| USER_KEYS.contains(key) || *key == "hostfwd" || of_card(key);
            match props.keys() {
                keys if !keys.iter().all(is_known) => Err(unknown(&shown(option))),
                keys if keys.contains(&"hostfwd") => listens(option, net).map(drop),
                _ => Ok(()),
            }
        }
        // The name of a tap is its namespace's.
        "tap" if net == Net::Isolated => {
            let is_known = props.keys().into_iter().all(|key| TAP_KEYS.contains(&key) || of_card(key));
            let has_scripts = ["script", "downscript"].iter().any(|key| props.get(key).as_deref() != Some("no"));
            match is_known {
                true if has_scripts => Err(ArgError::new(
                    format!("{} runs scripts of the host", shown(option)),
                    "write script=no,downscript=no, and connect the clones by --run",
                )),
                true => Ok(()),
                false => Err(unknown(&shown(option))),
            }
        }
        "tap" => Err(ArgError::new(
            format!("{} is an interface of the host that its source has", shown(option)),
            "clone with --net isolated, where each has interfaces of its own",
        )),
        _ => Err(unknown(&shown(option))),
    }
}
