//! A path that swallows what is larger than it was, with real sockets: three network namespaces in a row.

use std::process::Command;

use crate::pool::{Pool, text, tool};
use crate::qemu_io;

/// A client's namespace, a router's, and a server's; gone with this.
struct Path {
    client: String,
    router: String,
    server: String,
}

const SERVER: &str = "10.78.2.2";

impl Path {
    fn new() -> Path {
        let name = |end: &str| format!("pagoda-mtu-{end}-{}", std::process::id());
        let path = Path { client: name("client"), router: name("router"), server: name("server") };
        let Path { client, router, server } = &path;
        let ip = |words: &str| tool("ip", &words.split(' ').collect::<Vec<_>>());
        for name in [client, router, server] {
            ip(&format!("netns add {name}"));
            ip(&format!("-n {name} link set lo up"));
        }
        for (end, device, addr, of_router) in
            [(client, "left", "10.78.1.1", "10.78.1.2"), (server, "right", SERVER, "10.78.2.1")]
        {
            ip(&format!("-n {end} link add {device} type veth peer name {device} netns {router}"));
            for (name, addr) in [(end, addr), (router, of_router)] {
                ip(&format!("-n {name} addr add {addr}/24 dev {device}"));
                ip(&format!("-n {name} link set {device} up"));
            }
            ip(&format!("-n {end} route add default via {of_router}"));
        }
        tool("ip", &["netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        path
    }

    /// Of the link between router and server, as the router has it: what is longer is dropped in either direction.
    fn set_mtu(&self, mtu: u32) {
        tool("ip", &["-n", &self.router, "link", "set", "right", "mtu", &mtu.to_string()]);
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        for name in [&self.client, &self.router, &self.server] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

/// Sizes are tried from the smallest on, and what does not get through any more is not sent for ever.
#[test]
fn a_black_hole_is_found_out() {
    assert!(rustix::process::geteuid().is_root(), "network namespaces are root's: run the tests as root");
    let path = Path::new();
    let pool = Pool::start_with("mtu", 0, "");
    let under = |name: &str| ["ip", "netns", "exec", name].map(str::to_owned);
    let listen = format!("{SERVER}:7070");
    let serve = ["pool", "serve", "--size", "200M", "--listen", &listen, "--also-borrow", "--spin", "0"];
    let server = pool.start_under(&under(&path.server), &serve);
    std::fs::write(pool.file("servers"), server.ready["line"].as_str().unwrap()).unwrap();
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let words = ["disk", "export", "d", "--nbd", &pool.socket("d"), "--spin", "0", "--fail-after", "3000"];
    let export = pool.start_under(&under(&path.client), &words);
    let datagrams = || {
        let output = pool.command_under(&under(&path.client), &["doctor", "pool"]).output().unwrap();
        let said = text(&output.stdout);
        let (_, rest) = said.split_once("datagrams of ").unwrap_or_else(|| panic!("{said}"));
        rest.split(' ').next().unwrap().parse::<u32>().unwrap()
    };
    qemu_io(&export.uri(), &["write -P 1 0 1M", "read -P 1 0 1M"]);
    assert_eq!(datagrams(), 1472);
    path.set_mtu(1280);
    qemu_io(&export.uri(), &["read -P 1 0 1M", "write -P 2 0 1M", "read -P 2 0 1M"]);
    assert_eq!(datagrams(), 1200);
    path.set_mtu(1500);
    qemu_io(&export.uri(), &["read -P 2 0 1M"]);
    assert_eq!(export.stop(), Some(0));
    drop(server);
}
