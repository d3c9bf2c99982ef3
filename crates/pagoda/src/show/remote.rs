//! What a VM's client of the pool knows, for people.

use pagoda_api::{RemotePool, RemoteServer};

use crate::units::format_size;

/// A line each of what is short of copies, of how long faults wait, and of the servers.
pub fn remote_lines(pool: &RemotePool) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if pool.short_bytes > 0 {
        let (short, held) = (format_size(pool.short_bytes), format_size(pool.held_bytes));
        lines.push(("remote short", format!("{short} of {held} with fewer copies than there should be")));
    }
    if let Some(latency) = pool.latency.iter().find(|latency| latency.op == "read" && latency.class == "demand") {
        let took = &latency.took;
        lines.push(("remote reads", format!("half within {} us, 99% within {} us", took.p50_us, took.p99_us)));
    }
    let servers: Vec<String> = pool.servers.iter().map(server).collect();
    if !servers.is_empty() {
        lines.push(("remote servers", servers.join(", ")));
    }
    lines
}

fn server(server: &RemoteServer) -> String {
    match server.up {
        true => format!("{} ({} us)", server.id, server.round_trip_us),
        false => format!("{} (silent)", server.id),
    }
}

#[cfg(test)]
mod tests {
    use pagoda_api::{Latency, RemoteLatency};

    use super::*;

    #[test]
    fn what_is_well_takes_no_line() {
        assert_eq!(remote_lines(&RemotePool::default()), []);
        let took = Latency { count: 1, p50_us: 128.0, p99_us: 4096.0 };
        let of = |op: &str| RemoteLatency { op: op.into(), class: "demand".into(), took };
        let server = |id, up| RemoteServer { id, up, round_trip_us: 45, ..RemoteServer::default() };
        let pool = RemotePool {
            held_bytes: 1 << 30,
            short_bytes: 1 << 26,
            latency: vec![of("write"), of("read")],
            servers: vec![server(1, true), server(2, false)],
            ..RemotePool::default()
        };
        let lines = remote_lines(&pool);
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
