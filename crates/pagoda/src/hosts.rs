//! `pagoda host ls|trust|untrust|ping`: other hosts.

use anyhow::Result;
use pagoda_api::{Client, HostArbiter, HostList, HostPing, OwnHost, TrustedHost};

use crate::cli::HostTrust;
use crate::output::{Format, Side, Table, lines_text, print_json, print_text};
use crate::units::format_size;

pub fn ls(client: &Client, format: Format) -> Result<()> {
    print_list(&client.hosts()?, format)
}

pub fn trust(client: &Client, options: &HostTrust, format: Format) -> Result<()> {
    let address = options.address.clone().unwrap_or_else(|| options.name.clone());
    let host = TrustedHost { name: options.name.clone(), key: options.key.clone(), address };
    let list = client.trust(&host)?;
    match format {
        Format::Json => Ok(print_json(&list)?),
        Format::Text => Ok(print_text(&format!(
            "{} is trusted. On {0}: pagoda host trust {} --key {}\n",
            host.name, list.own.name, list.own.key
        ))?),
    }
}

pub fn untrust(client: &Client, name: &str) -> Result<()> {
    Ok(client.untrust(name)?)
}

pub fn ping(client: &Client, name: &str, format: Format) -> Result<()> {
    let ping = client.ping(name)?;
    match format {
        Format::Json => Ok(print_json(&ping)?),
        Format::Text => Ok(print_text(&ping_text(&ping))?),
    }
}

fn print_list(list: &HostList, format: Format) -> Result<()> {
    if format == Format::Json {
        return Ok(print_json(list)?);
    }
    let own = &list.own;
    let listen = own.listen.as_deref().unwrap_or("nowhere: set `listen` in the section [hosts] of the configuration");
    print_text(&own_text(own, listen))?;
    if list.hosts.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[("TRUSTED", Side::Left), ("ADDRESS", Side::Left), ("KEY", Side::Left)]);
    for TrustedHost { name, key, address } in &list.hosts {
        table.row(vec![name.clone(), address.clone(), key.clone()]);
    }
    print_text("\n")?;
    Ok(table.print()?)
}

fn own_text(own: &OwnHost, listen: &str) -> String {
    let mut lines = vec![("host", own.name.clone()), ("key", own.key.clone()), ("listens", listen.to_owned())];
    let says = |HostArbiter { reachable, says }: &HostArbiter| match reachable {
        true => says.clone(),
        false => format!("not reached: {says}"),
    };
    lines.extend(own.arbiter.as_ref().map(|arbiter| ("arbiter", says(arbiter))));
    lines_text(&lines)
}

fn ping_text(ping: &HostPing) -> String {
    let look = &ping.look;
    lines_text(&[
        ("host", format!("{} at {}", ping.name, ping.address)),
        ("calls itself", look.hostname.clone()),
        ("pagodad", look.version.clone()),
        ("kernel", look.kernel.clone()),
        ("vms", look.vms.to_string()),
        (
            "dram free",
            format!("{} for VMs, of {}", format_size(look.memory_free_bytes), format_size(look.memory_total_bytes)),
        ),
        ("swap free", format!("{} for VMs", format_size(look.swap_free_bytes))),
        ("round trip", format!("{} us", ping.round_trip_us)),
        ("rate", format!("{:.2} Gbit/s, encrypted", ping.bytes_per_second as f64 * 8.0 / 1e9)),
    ])
}

#[cfg(test)]
mod tests {
    use pagoda_api::HostLook;

    use super::*;

    #[test]
    fn an_arbiter_is_shown_if_one_is_configured() {
        let own = OwnHost { name: "node-17".into(), key: "3f".into(), ..OwnHost::default() };
        assert!(!own_text(&own, "nowhere").contains("arbiter"));
        for (reachable, expected) in [(true, " etcd, registers 07\n"), (false, " not reached: etcd, registers 07\n")] {
            let arbiter = Some(HostArbiter { reachable, says: "etcd, registers 07".into() });
            let said = own_text(&OwnHost { arbiter, ..own.clone() }, "nowhere");
            assert!(said.ends_with(expected), "{said}");
        }
    }

    #[test]
    fn a_ping_in_words() {
        let look = HostLook {
            version: "0.1.0".into(),
            hostname: "node-17".into(),
            kernel: "6.18".into(),
            vms: 3,
            memory_free_bytes: 5 << 30,
            memory_total_bytes: 24 << 30,
            swap_free_bytes: 100 << 30,
        };
        let ping = HostPing {
            name: "host2".into(),
            address: "10.0.0.2:7075".into(),
            look,
            round_trip_us: 84,
            bytes_per_second: 117_000_000,
        };
        let expected = "\
host          host2 at 10.0.0.2:7075
calls itself  node-17
pagodad       0.1.0
kernel        6.18
vms           3
dram free     5G for VMs, of 24G
swap free     100G for VMs
round trip    84 us
rate          0.94 Gbit/s, encrypted
";
        let said = ping_text(&ping);
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&said), words(expected), "{said}");
    }
}
