//! Takes a virtio driver off its devices and puts it back (Documentation/driver-api/driver-model/binding.rst): a guest whose
//! balloon driver goes away.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

const BUS: &str = "/sys/bus/virtio";

/// Takes `driver` off all its devices.
pub fn unbind(driver: &str) -> Result<()> {
    let directory = directory(driver)?;
    let devices = names(&directory)?;
    ensure!(!devices.is_empty(), "{driver} drives no device");
    devices.iter().try_for_each(|device| {
        fs::write(directory.join("unbind"), device).with_context(|| format!("unbind {device} from {driver}"))
    })
}

/// Offers all devices without a driver to `driver`.
pub fn bind(driver: &str) -> Result<()> {
    let directory = directory(driver)?;
    let devices = PathBuf::from(BUS).join("devices");
    let mut free = names(&devices)?;
    free.retain(|device| !devices.join(device).join("driver").exists());
    // A device of another kind is refused.
    let bound = free.iter().filter(|device| fs::write(directory.join("bind"), device).is_ok()).count();
    ensure!(bound > 0, "{driver} took none of the {} devices without a driver", free.len());
    Ok(())
}

fn directory(driver: &str) -> Result<PathBuf> {
    let directory = PathBuf::from(BUS).join("drivers").join(driver);
    ensure!(directory.is_dir(), "there is no virtio driver {driver}");
    Ok(directory)
}

/// The devices in a directory of the bus: `virtio0` and so on.
fn names(directory: &PathBuf) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    let is_device = |name: &String| name.strip_prefix("virtio").is_some_and(|number| number.parse::<u32>().is_ok());
    Ok(names.filter(is_device).collect())
}
