//! Disks that two VMs can have: those that are only read, and those on which each has an overlay of its own.
//!
//! QEMU's own account of what is writable is in the snapshot, and the daemon goes by that. Here the words are looked at, so that
//! nobody opens a file for writing that another VM has.

use super::super::error::ArgError;
use super::super::words::{Opt, Props, is_on};
use super::target::{Target, shown, unknown};

/// Drivers of nodes without any file.
const WITHOUT_FILE: [&str; 2] = ["null-aio", "null-co"];
/// The format of disks that snapshots have, and of overlays.
const FORMAT: &str = "qcow2";
/// What stands between the name of a disk and that of a clone in the name of the clone's overlay.
const INFIX: &str = ".pagoda-clone-";

/// A disk that a clone writes to, as its command line names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// The disk of the VM that it is a clone of.
    pub disk: String,
    /// The clone's own file, which is made on the snapshot's layer.
    pub file: String,
}

impl Overlay {
    fn of(disk: &str, clone: &str) -> Overlay {
        Overlay { disk: disk.to_owned(), file: format!("{disk}{INFIX}{clone}") }
    }
}

/// The `-drive` of a clone, or its `-hda` to `-hdd`, if it has to differ from its source's.
pub fn changed(option: &Opt<'_>, target: Target<'_>, overlays: &mut Vec<Overlay>) -> Result<Option<String>, ArgError> {
    if option.name != "drive" {
        let overlay = overlay_of(option.value, &shown(option), target)?;
        overlays.push(overlay.clone());
        return Ok(Some(overlay.file));
    }
    let mut props = Props::parse(option.name, option.value, "file")?;
    let on = |key: &str| props.get(key).is_some_and(|value| is_on(&value));
    // A drive without a file is one without a medium.
    let is_without_file = props.keys().iter().all(|key| *key != "file" && !key.starts_with("file."));
    if on("readonly") || on("read-only") || props.get("media").as_deref() == Some("cdrom") || is_without_file {
        return Ok(None);
    }
    let is_plain = props.keys().iter().all(|key| *key != "driver" && !key.starts_with("file."));
    let format = props.get("format").unwrap_or_else(|| FORMAT.to_owned());
    let file = props.get("file").filter(|_| is_plain && format == FORMAT && !on("snapshot"));
    let file = file.ok_or_else(|| writable(&shown(option)))?;
    let overlay = overlay_of(&file, &shown(option), target)?;
    props.set_text("file", &overlay.file);
    // Nobody guesses what a file is that the guest writes to.
    props.set_text("format", FORMAT);
    overlays.push(overlay);
    Ok(Some(props.render()))
}

fn overlay_of(file: &str, shown: &str, target: Target<'_>) -> Result<Overlay, ArgError> {
    // What is before a colon may be a protocol.
    if !target.has_disks || file.contains(':') {
        return Err(writable(shown));
    }
    Ok(Overlay::of(file, target.name))
}

/// Refuses a `-blockdev` that a clone could write to.
pub fn check_node(option: &Opt<'_>) -> Result<(), ArgError> {
    let props = Props::parse(option.name, option.value, "driver")?;
    let on = |key: &str| props.get(key).is_some_and(|value| is_on(&value));
    let is_without_file = props.get("driver").is_some_and(|driver| WITHOUT_FILE.contains(&driver.as_str()));
    // libvirt lets the file below a format be opened as that needs it.
    if on("read-only") || on("auto-read-only") || is_without_file {
        return Ok(());
    }
    Err(writable(&shown(option)))
}

/// Words that belong to no option are disks.
pub fn change_images(
    out: &mut [String],
    options: &[Opt<'_>],
    target: Target<'_>,
    overlays: &mut Vec<Overlay>,
) -> Result<(), ArgError> {
    let mut is_image = vec![true; out.len()];
    for option in options {
        is_image[option.at] = false;
        if !option.is_alone {
            is_image[option.at - 1] = false;
        }
    }
    for (word, _) in out.iter_mut().zip(is_image).filter(|(_, is_image)| *is_image) {
        let overlay = overlay_of(word, word, target)?;
        word.clone_from(&overlay.file);
        overlays.push(overlay);
    }
    Ok(())
}

fn writable(what: &str) -> ArgError {
    let ArgError { advice, .. } = unknown(what);
    ArgError::new(
        format!("{what} is a disk that the guest may write to, and no qcow2 file that the snapshot has"),
        format!(
            "clone a snapshot that was taken with --disks; or with readonly=on all clones can read it; or {advice}"
        ),
    )
}
