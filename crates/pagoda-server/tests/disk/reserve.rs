//! Room that is kept for a disk, and the most that a disk may have.

use crate::pool::Pool;
use crate::rig::until;
use crate::{qemu_io, scrape};

const SLAB: usize = 64 << 20;

fn written(uri: &str, slab: usize) -> bool {
    let write = format!("write -P 5 {} 4k", slab * SLAB);
    std::process::Command::new("qemu-io").args(["-f", "raw", uri, "-c", &write]).output().unwrap().status.success()
}

/// Servers have three slabs each. What one disk was promised no other gets, and what cannot be promised makes no disk.
#[test]
fn what_is_reserved_is_there_when_it_is_needed() {
    let pool = Pool::start("reserve", 2);
    pool.fails(&["disk", "create", "d", "--size", "64M", "--reserve", "65M"], 2, "no more than its size");
    let shown = pool.json(&["disk", "create", "kept", "--size", "256M", "--reserve", "128M"]);
    assert_eq!((shown["reserve_bytes"].clone(), shown["used_bytes"].clone()), ((128 << 20).into(), 0.into()));
    pool.fails(&["disk", "create", "more", "--size", "256M", "--reserve", "100M"], 1, "can keep 64M");
    pool.fails(&["disk", "show", "more"], 4, "no disk more");
    pool.run(&["disk", "create", "other", "--size", "256M"]);
    {
        let other = pool.export("other", &[]);
        assert_eq!((0..4).map(|slab| written(&other.uri(), slab)).collect::<Vec<_>>(), [true, false, false, false]);
        let kept = pool.export("kept", &[]);
        qemu_io(&kept.uri(), &["write -P 1 0 1M", "write -P 2 64M 1M", "read -P 1 0 1M", "read -P 2 64M 1M"]);
        assert!(!written(&kept.uri(), 2), "it was promised two slabs");
        assert_eq!((kept.stop(), other.stop()), (Some(0), Some(0)));
    }
    // What a disk does not have any more may be promised to another.
    pool.run(&["disk", "rm", "kept"]);
    pool.run(&["disk", "create", "more", "--size", "256M", "--reserve", "100M"]);
    // Nothing is added to a sealed disk.
    pool.run(&["disk", "share", "more", "--read-only"]);
    assert_eq!(pool.json(&["disk", "show", "more"])["reserve_bytes"], 0);
    let other = pool.export("other", &[]);
    assert!((1..3).all(|slab| written(&other.uri(), slab)));
    assert_eq!(other.stop(), Some(0));
}

/// A server that starts again has forgotten what it promised, and promises it again as soon as the disk is exported.
#[test]
fn a_reservation_outlives_its_servers() {
    let mut pool = Pool::start("re-reserve", 2);
    pool.run(&["disk", "create", "kept", "--size", "128M", "--copies", "1", "--reserve", "128M"]);
    pool.run(&["disk", "create", "other", "--size", "384M", "--copies", "1"]);
    pool.kill_server(0);
    pool.kill_server(1);
    pool.add_server();
    pool.list_servers();
    let kept = pool.export("kept", &["--metrics", "127.0.0.1:0"]);
    until("it is reserved", || scrape(&kept.ready).contains("pagoda_disk_reserved_bytes{disk=\"kept\"} 134217728.0"));
    let other = pool.export("other", &[]);
    assert_eq!((0..3).map(|slab| written(&other.uri(), slab)).collect::<Vec<_>>(), [true, false, false]);
    assert!(written(&kept.uri(), 0) && written(&kept.uri(), 1));
}

#[test]
fn no_disk_has_more_than_a_server_allows() {
    let mut pool = Pool::start_with("quota", 0, "");
    pool.add_server_with(&["--quota", "70M"]);
    pool.list_servers();
    pool.fails(&["pool", "serve", "--size", "200M", "--listen", "127.0.0.1:0", "--quota", "1M"], 2, "at least 65M");
    pool.run(&["disk", "create", "d", "--size", "192M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    assert_eq!((0..3).map(|slab| written(&export.uri(), slab)).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(export.stop(), Some(0));
}
