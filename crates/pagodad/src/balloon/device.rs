//! The balloon device as QMP shows it: its size, the guest's statistics, resets.

use pagoda_api::in_full;
use std::sync::Arc;

use anyhow::Result;
use pagoda_core::balloon::{Device, GuestStats, Sample};
use pagoda_core::units::Bytes;
use serde_json::{Value, json};

use crate::qmp::state::is_paused;
use crate::qmp::{Monitor, Refused};

/// How often the device asks its driver for statistics, in seconds: the least QEMU takes.
const STATS_INTERVAL_S: u64 = 1;
/// Where `-device` puts devices with an id and without one.
const CONTAINERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// Types of devices that have a balloon's properties, by bus: `virtio-balloon-pci` and its relatives, and
/// `virtio-balloon-ccw` and `virtio-balloon-device`.
const TYPE_PREFIX: &str = "child<virtio-balloon";
/// A statistic that the guest does not report (QEMU's docs/interop/virtio-balloon-stats.rst: -1).
const NOT_REPORTED: u64 = u64::MAX;

/// Where the device is, once found.
#[derive(Debug)]
struct Found {
    path: String,
    /// What the interval was before we set it.
    interval_before_s: u64,
}

/// The balloon device of one VM.
#[derive(Debug)]
pub struct BalloonDevice {
    monitor: Arc<Monitor>,
    found: Option<Found>,
    resets_before: u64,
}

impl BalloonDevice {
    pub fn new(monitor: Arc<Monitor>) -> BalloonDevice {
        let resets_before = monitor.events().resets;
        BalloonDevice { monitor, found: None, resets_before }
    }

    /// Everything as of now. What QEMU does not answer is left out.
    pub fn look(&mut self) -> Sample {
        let device = self.device();
        if device == Device::Absent {
            self.found = None;
        } else if self.found.is_none() && device != Device::Silent {
            self.found = self.find();
        }
        Sample {
            device,
            stats: self.stats(),
            paused: device != Device::Silent && is_paused(&self.monitor),
            resets: self.monitor.events().resets - self.resets_before,
        }
    }

    /// Asks the guest to keep this much memory.
    pub fn ask(&self, memory: Bytes) -> Result<()> {
        self.monitor.execute_with("balloon", json!({ "value": memory.0 })).map(drop)
    }

    /// Leaves the device as it was found.
    pub fn leave(&mut self) {
        if let Some(found) = self.found.take() {
            // A device that is gone needs nothing.
            let _ = self.set_interval(&found.path, found.interval_before_s);
        }
    }

    /// The device and its size.
    pub fn device(&self) -> Device {
        match self.monitor.execute("query-balloon") {
            Ok(answer) => match answer.get("actual").and_then(Value::as_u64) {
                Some(actual) => Device::Present { actual: Bytes(actual) },
                None => Device::Silent,
            },
            Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.class == "DeviceNotActive") => {
                Device::Absent
            }
            Err(error) => {
                tracing::debug!("balloon: {error}", error = in_full(error.as_ref()));
                Device::Silent
            }
        }
    }

    fn find(&self) -> Option<Found> {
        let path = CONTAINERS.iter().find_map(|container| {
            let children = self.monitor.execute_with("qom-list", json!({ "path": container })).ok()?;
            balloon_among(&children).map(|name| format!("{container}/{name}"))
        })?;
        let property = json!({ "path": path, "property": "guest-stats-polling-interval" });
        let before = self.monitor.execute_with("qom-get", property).ok()?.as_u64()?;
        self.set_interval(&path, STATS_INTERVAL_S).ok()?;
        Some(Found { path, interval_before_s: before })
    }

    fn set_interval(&self, path: &str, seconds: u64) -> Result<()> {
        let property = json!({ "path": path, "property": "guest-stats-polling-interval", "value": seconds });
        self.monitor.execute_with("qom-set", property).map(drop)
    }

    fn stats(&self) -> Option<GuestStats> {
        let path = &self.found.as_ref()?.path;
        let answer = self.monitor.execute_with("qom-get", json!({ "path": path, "property": "guest-stats" })).ok()?;
        parse_stats(&answer)
    }
}

/// The name of a balloon in the answer to `qom-list`.
fn balloon_among(children: &Value) -> Option<&str> {
    let is_balloon =
        |child: &&Value| child.get("type").and_then(Value::as_str).is_some_and(|kind| kind.starts_with(TYPE_PREFIX));
    children.as_array()?.iter().find(is_balloon)?.get("name")?.as_str()
}

/// `None` as long as the guest has reported nothing, or not what is needed.
fn parse_stats(answer: &Value) -> Option<GuestStats> {
    let updated_s = answer.get("last-update")?.as_u64().filter(|seconds| *seconds > 0)?;
    let stats = answer.get("stats")?;
    let stat = |name: &str| stats.get(name).and_then(Value::as_u64).filter(|value| *value != NOT_REPORTED);
    let free = stat("stat-free-memory")?;
    Some(GuestStats {
        updated_s,
        free: Bytes(free),
        available: Bytes(stat("stat-available-memory").unwrap_or(free)),
        major_faults: stat("stat-major-faults").unwrap_or(0),
        swap_in: Bytes(stat("stat-swap-in").unwrap_or(0)),
        swap_out: Bytes(stat("stat-swap-out").unwrap_or(0)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_by_their_type() {
        let check = |kinds: &[(&str, &str)], expected: Option<&str>| {
            let children = kinds.iter().map(|(name, kind)| json!({ "name": name, "type": kind })).collect();
            assert_eq!(balloon_among(&Value::Array(children)), expected);
        };
        check(&[("type", "string"), ("b0", "child<virtio-balloon-pci>")], Some("b0"));
        check(&[("balloon0", "child<virtio-balloon-pci-non-transitional>")], Some("balloon0"));
        check(&[("device[0]", "child<virtio-balloon-ccw>")], Some("device[0]"));
        check(&[("balloon", "child<virtio-net-pci>")], None);
        check(&[], None);
        assert_eq!(balloon_among(&json!({})), None);
    }

    #[test]
    fn statistics_of_guests_of_all_ages() {
        let answer = json!({ "last-update": 1_700_000_000_u64, "stats": {
            "stat-free-memory": 1000, "stat-available-memory": 3000, "stat-major-faults": 7, "stat-swap-in": 4096,
            "stat-swap-out": 8192,            "stat-disk-caches": 5, "stat-htlb-pgfail": NOT_REPORTED } });
        let all = GuestStats {
            updated_s: 1_700_000_000,
            free: Bytes(1000),
            available: Bytes(3000),
            major_faults: 7,
            swap_in: Bytes(4096),
            swap_out: Bytes(8192),
        };
        assert_eq!(parse_stats(&answer), Some(all));
        // Before Linux 4.6 there was no `available`.
        let answer = json!({ "last-update": 5, "stats": {
            "stat-free-memory": 1000, "stat-available-memory": NOT_REPORTED, "stat-swap-in": NOT_REPORTED } });
        let old = GuestStats {
            updated_s: 5,
            available: Bytes(1000),
            major_faults: 0,
            swap_in: Bytes(0),
            swap_out: Bytes(0),
            ..all
        };
        assert_eq!(parse_stats(&answer), Some(old));
        let nothing = json!({ "last-update": 0, "stats": { "stat-free-memory": NOT_REPORTED } });
        assert_eq!(parse_stats(&nothing), None);
        assert_eq!(parse_stats(&json!({ "stats": {} })), None);
        assert_eq!(parse_stats(&json!(7)), None);
    }
}
