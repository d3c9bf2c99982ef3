//! Reads the host's memory from /proc.

use std::fs;
use std::io;

use pagoda_core::policy::host::HostMemory;
use pagoda_core::units::Bytes;

/// The host's memory as of now.
///
/// # Errors
/// /proc/meminfo cannot be read or lacks a line. That is not to be taken for a host without memory.
pub fn read_memory() -> io::Result<HostMemory> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let pressure = fs::read_to_string("/proc/pressure/memory").ok();
    parse(&meminfo, pressure.as_deref()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo does not say how much memory there is")
    })
}

fn parse(meminfo: &str, pressure: Option<&str>) -> Option<HostMemory> {
    let kib = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(Bytes::from_kib)
    };
    Some(HostMemory {
        total: kib("MemTotal:")?,
        available: kib("MemAvailable:")?,
        stalled: pressure.and_then(stalled_per_mille),
    })
}

/// The line `full avg10=1.25 avg60=...` in thousandths (Documentation/accounting/psi.rst: per cent).
fn stalled_per_mille(text: &str) -> Option<u32> {
    let full = text.lines().find_map(|line| line.strip_prefix("full avg10="))?;
    let percent: f32 = full.split(' ').next()?.parse().ok()?;
    Some((percent.clamp(0.0, 100.0) * 10.0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_files_are_read() {
        let meminfo = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n";
        let pressure = "some avg10=9.00 avg60=0.00\nfull avg10=1.25 avg60=0.10 avg300=0.00 total=7\n";
        let read = parse(meminfo, Some(pressure)).unwrap();
        let expected = HostMemory { total: Bytes::from_kib(1000), available: Bytes::from_kib(500), stalled: Some(12) };
        assert_eq!(read, expected);
        assert_eq!(parse(meminfo, Some("full avg10=x")).unwrap().stalled, None);
        for unknown in ["", "MemTotal: 7 kB\n", "MemTotal: 7 kB\nMemAvailable: many\n"] {
            assert_eq!(parse(unknown, None), None, "{unknown:?} is not a host without memory");
        }
        assert!(read_memory().unwrap().total > Bytes::ZERO);
    }
}
