//! What a VM's client of the pool knows, for people.

use pagoda_api::{FarPool, FarServer};

use crate::units::format_size;

/// A line each of what is short of copies, of how long faults wait, and of the servers.
pub fn far_lines(pool: &FarPool) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if pool.short_bytes > 0 {
        let (short, held) = (format_size(pool.short_bytes), format_size(pool.held_bytes));
        lines.push(("far short", format!("{short} of {held} with fewer copies than there should be")));
    }
    if let Some(latency) = pool.latency.iter().find(|latency| latency.op == "read" && latency.class == "demand") {
        let took = &latency.took;
        lines.push(("far reads", format!("half within {} us, 99% within {} us", took.p50_us, took.p99_us)));
    }
    let servers: Vec<String> = pool.servers.iter().map(server).collect();
    if !servers.is_empty() {
        lines.push(("far servers", servers.join(", ")));
    }
    lines
}

fn server(server: &FarServer) -> String {
    match server.up {
        true => format!("{} ({} us)", server.id, server.round_trip_us),
        false => format!("{} (silent)", server.id),
    }
}

#[cfg(test)]
mod tests {
    use pagoda_api::{FarLatency, Latency};

    use super::*;

    #[test]
    fn what_is_well_takes_no_line() {
        assert_eq!(far_lines(&FarPool::default()), []);
        let took = Latency { count: 1, p50_us: 128.0, p99_us: 4096.0 };
        let of = |op: &str| FarLatency { op: op.into(), class: "demand".into(), took };
        let server = |id, up| FarServer { id, up, round_trip_us: 45, ..FarServer::default() };
        let pool = FarPool {
            held_bytes: 1 << 30,
            short_bytes: 1 << 26,
            latency: vec![of("write"), of("read")],
            servers: vec![server(1, true), server(2, false)],
            ..FarPool::default()
        };
        let lines = far_lines(&pool);
        assert_eq!(
            lines.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>(),
            [
                "64M of 1G with fewer copies than there should be",
                "half within 128 us, 99% within 4096 us",
                "1 (45 us), 2 (silent)"
            ]
        );
    }
}
