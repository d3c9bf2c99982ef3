//! A server that has moved is found by what it says itself.

use std::net::UdpSocket;

use crate::pool::{Pool, text};
use crate::qemu_io;
use crate::rig::until;

/// Servers of the file `servers` are where that says, or where they announce themselves to be.
#[test]
fn a_server_that_has_moved_is_found() {
    let port = UdpSocket::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let address = format!("127.255.255.255:{port}");
    let mut pool = Pool::start_with("moves", 0, &format!("announcements = \"{address}\"\n"));
    let announce = format!("--announce={address}");
    (0..2).for_each(|_| pool.add_server_with(&[&announce]));
    pool.list_servers();
    let found = text(&pool.output(&["doctor", "pool"]).stdout);
    assert!(found.contains(&format!("heard at {address}, of 2 servers")), "{found}");
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    pool.kill_server(1);
    qemu_io(&export.uri(), &["write -P 2 0 1M"]);
    pool.restart_server(1, &[&announce]);
    until("the second copy is at the new place", || pool.json(&["disk", "show", "d"])["short_bytes"] == 0);
    assert!(pool.has_said("server 2 says that it is at 127.0.0.1:"));
    pool.kill_server(0);
    qemu_io(&export.uri(), &["read -P 2 0 1M"]);
    assert_eq!(export.stop(), Some(0));
    let found = text(&pool.output(&["doctor", "pool"]).stdout);
    assert!(found.contains(&format!("not heard at {address}: servers 1")), "{found}");
}

/// What cannot be announced is refused before any memory is taken.
#[test]
fn what_others_cannot_reach_is_not_announced() {
    let pool = Pool::start_with("unannounced", 0, "");
    let serve = |listen: &'static str| ["pool", "serve", "--size", "70M", "--announce", "--listen", listen];
    pool.fails(&serve("0.0.0.0:0"), 2, "the address that clients reach");
    pool.fails(&serve("[::1]:0"), 2, "IPv4 only");
}
