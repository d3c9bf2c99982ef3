//! Disks in the memory of other machines, as users' tools see them: libnbd's, QEMU's and fio.

mod announce;
mod cluster;
mod cold;
mod discard;
mod drain;
mod follow;
mod mtu;
mod overflow_disk;
mod parity;
mod pool;
mod process;
mod reserve;
/// Other tests need more of it.
#[allow(dead_code)]
#[path = "../../../rmap-etcd/tests/etcd/rig.rs"]
mod rig;
mod share;
mod silence;
mod trial;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use pool::{Pool, text, tool};
use rig::until;

/// Bytes that repeat nowhere near, so that a page in the wrong place shows.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = Vec::with_capacity(bytes);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend_from_slice(&state.to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}

fn qemu_io(uri: &str, commands: &[&str]) -> String {
    let words: Vec<&str> = commands.iter().flat_map(|command| ["-c", command]).collect();
    let said = tool("qemu-io", &[&["-f", "raw", uri], &words[..]].concat());
    assert!(!said.contains("Pattern verification failed"), "{commands:?}: {said}");
    said
}

#[test]
fn tools_read_what_tools_wrote() {
    let pool = Pool::start("tools", 2);
    pool.run(&["disk", "create", "scratch", "--size", "128M"]);
    let export = pool.export("scratch", &[]);
    let uri = export.uri();
    let said = tool("nbdinfo", &[&uri]);
    for line in ["export-size: 134217728", "can_multi_conn: true", "can_fua: true", "can_trim: true", "can_df: true"] {
        assert!(said.contains(line), "{line} is not in {said}");
    }
    assert!(said.contains("base:allocation"), "{said}");
    assert!(tool("nbdinfo", &["--list", &uri]).contains("export=\"scratch\""));
    let (image, back) = (pool.file("image"), pool.file("back"));
    let mut content = noise(64 << 20);
    // Holes in it, so that trims and extents have something to do.
    content[8 << 20..16 << 20].fill(0);
    std::fs::write(&image, &content).unwrap();
    tool("truncate", &["--size", "128M", &image]);
    tool("nbdcopy", &["--connections", "4", &image, &uri]);
    tool("nbdcopy", &["--connections", "4", &uri, &back]);
    tool("cmp", &[&image, &back]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &image, &uri]);
    let map = tool("nbdinfo", &["--map", "--totals", &uri]);
    assert!(map.contains("hole,zero"), "{map}");
    // Parts of pages, zeros and trims, by another client.
    let mut commands = vec!["write -P 1 65M 64k", "write -P 2 68157940 1000", "read -P 2 68157940 1000"];
    commands.extend([
        "read -P 1 65M 500",
        "read -P 1 68158940 36",
        "write -z 66M 10000",
        "read -P 0 66M 10000",
        "discard 65M 4096",
    ]);
    commands.extend(["read -P 0 65M 4096", "write -P 3 -f 67M 512", "read -P 3 67M 512", "flush"]);
    qemu_io(&uri, &commands);
    let shown = pool.json(&["disk", "show", "scratch"]);
    assert_eq!(shown["used_bytes"], 128 << 20);
    assert_eq!((shown["exported"].clone(), shown["short_bytes"].clone()), (true.into(), 0.into()));
    pool.fails(&["disk", "rm", "scratch"], 1, "exported by another process");
    assert_eq!(export.stop(), Some(0));
    assert!(!std::path::Path::new(&pool.socket("scratch")).exists());
    // What was written is in the servers, not in the exporter.
    let export = pool.export("scratch", &[]);
    qemu_io(&export.uri(), &["read -P 3 67M 512", "read -P 0 65M 4096"]);
    tool("truncate", &["--size", "64M", &image]);
    tool("nbdcopy", &[&export.uri(), &back]);
    tool("cmp", &["--bytes", "67108864", &image, &back]);
    assert_eq!(export.stop(), Some(0));
    pool.run(&["disk", "rm", "scratch"]);
    assert_eq!(pool.json(&["disk", "ls"]), serde_json::json!([]));
    let free: Vec<u64> =
        pool.json(&["pool", "ls"]).as_array().unwrap().iter().map(|s| s["free_bytes"].as_u64().unwrap()).collect();
    assert_eq!(free, [3 * (64 << 20); 2], "all memory is given back");
}

/// For clients that cannot have a socket's path: on the loopback, and nowhere else.
#[test]
fn a_disk_is_exported_by_tcp_on_the_loopback() {
    let pool = Pool::start("nbd-tcp", 1);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.start_in_front(&["disk", "export", "d", "--tcp", "127.0.0.1:0", "--spin", "0"]);
    assert!(export.uri().starts_with("nbd://127.0.0.1:"), "{}", export.uri());
    assert!(export.locked_kib() > 0, "who swaps to it could not, if its own memory were swapped");
    let (image, back) = (pool.file("image"), pool.file("back"));
    std::fs::write(&image, noise(64 << 20)).unwrap();
    tool("nbdcopy", &["--connections", "4", &image, &export.uri()]);
    tool("nbdcopy", &["--connections", "4", &export.uri(), &back]);
    tool("cmp", &[&image, &back]);
    qemu_io(&export.uri(), &["write -P 1 1M 1M", "discard 2M 1M", "read -P 1 1M 1M", "read -P 0 2M 1M", "flush"]);
    assert_eq!(export.stop(), Some(0));
}

/// A machine whose `pool.toml` says so goes by TCP: to servers that allow it, and to no others.
#[test]
fn tcp_where_udp_is_not_allowed() {
    let mut pool = Pool::start_with("tcp", 1, "transport = \"tcp\"\n");
    pool.add_server_with(&["--tcp"]);
    pool.list_servers();
    let listed = pool.json(&["pool", "ls"]);
    assert_eq!([&listed[0]["state"], &listed[1]["state"]], ["silent", "up"]);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    let (image, back) = (pool.file("image"), pool.file("back"));
    std::fs::write(&image, noise(64 << 20)).unwrap();
    tool("nbdcopy", &[&image, &export.uri()]);
    tool("nbdcopy", &[&export.uri(), &back]);
    tool("cmp", &[&image, &back]);
    assert_eq!(export.stop(), Some(0));
    std::fs::write(pool.file("pool.toml"), "transport = \"sctp\"\n").unwrap();
    pool.fails(&["pool", "ls"], 1, "unknown variant");
}

/// Of a pool: what answers, how fast, and what to look at where nothing does.
#[test]
fn the_doctor_knows_the_way_to_each_server() {
    let mut pool = Pool::start("doctor", 2);
    pool.kill_server(1);
    let output = pool.output(&["doctor", "pool", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let checks: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let servers: Vec<&serde_json::Value> =
        checks.as_array().unwrap().iter().filter(|check| check["name"] == "server").collect();
    assert_eq!(servers.len(), 2);
    // On a busy machine an answer may be late, which is a warning.
    assert_ne!(servers[0]["verdict"], "fail", "{}", servers[0]);
    assert!(servers[0]["found"].as_str().unwrap().contains("datagrams of 4192 bytes"), "{}", servers[0]);
    assert_eq!(servers[1]["verdict"], "fail");
    assert!(servers[1]["advice"].as_str().unwrap().contains("admit this machine"));
    // With another pool's key nobody answers; without one, nobody is asked.
    let stranger = Pool::start_with("doctor-stranger", 0, "");
    tool("cp", &["-p", &stranger.file("pool.key"), &pool.file("pool.key")]);
    let said = text(&pool.output(&["doctor", "pool"]).stdout);
    assert_eq!(said.matches("does not answer").count(), 2, "{said}");
    std::fs::write(pool.file("pool.toml"), "cluster = \"etcd://127.0.0.1:1\"\n").unwrap();
    let said = text(&pool.output(&["doctor", "pool"]).stdout);
    assert!(said.contains("FAIL: etcd") && said.matches("1 at 127.0.0.1").count() == 1, "{said}");
    std::fs::remove_file(pool.file("pool.key")).unwrap();
    let said = text(&pool.output(&["doctor", "pool"]).stdout);
    assert!(said.contains("FAIL: pool") && !said.contains("does not answer"), "{said}");
}

/// fio writes, a server is killed, fio verifies: nothing may be missing.
#[test]
fn a_killed_server_loses_nothing() {
    let mut pool = Pool::start("killed", 2);
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let export = pool.export("d", &[]);
    let uri = format!("--uri={}", export.uri());
    let fixed = ["--name=v", "--ioengine=nbd", &uri, "--rw=randwrite", "--bsrange=512-16k", "--size=64M"];
    // Passes of it until a server is killed in the middle of one, and one more after that.
    let verify =
        ["--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--loops=3", "--randseed=7", "--output-format=json"];
    let mut fio = Command::new("fio");
    // It leaves a file where it is.
    fio.args(fixed).args(verify).current_dir(&pool.dir).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut fio = fio.spawn().expect("fio; scripts/install-deps.sh test installs it");
    // In the middle: as soon as the disk has its first pages.
    while pool.json(&["disk", "show", "d"])["used_bytes"] == 0 {
        assert!(fio.try_wait().unwrap().is_none(), "fio ended before it wrote anything");
    }
    pool.kill_server(0);
    let output = fio.wait_with_output().unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
    assert_eq!(report["jobs"][0]["error"], 0, "{said}");
    assert!(report["jobs"][0]["read"]["total_ios"].as_u64().unwrap() > 0, "nothing was verified: {said}");
    let shown = pool.json(&["disk", "show", "d"]);
    assert_eq!((shown["lost_bytes"].clone(), shown["short_bytes"].clone()), (0.into(), (64 << 20).into()));
    assert_eq!(export.stop(), Some(0));
    // Of the last one the map does not know that it is gone, and nobody would notice any more.
    assert_eq!(shown["servers"], serde_json::json!([{ "id": 2, "bytes": 64 << 20, "state": "up" }]));
    pool.kill_server(1);
    let shown = pool.json(&["disk", "show", "d"]);
    assert_eq!((&shown["lost_bytes"], &shown["servers"][0]["state"]), (&0.into(), &"silent".into()));
    assert!(pool.run(&["disk", "show", "d"]).contains("64M at 2 (does not answer)"));
}

/// What a scraper gets.
fn scrape(ready: &serde_json::Value) -> String {
    let mut stream = TcpStream::connect(ready["metrics"].as_str().unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("application/openmetrics-text"), "{answer}");
    answer
}

#[test]
fn numbers_for_prometheus() {
    let mut pool = Pool::start_with("numbers", 1, "");
    pool.add_server_with(&["--metrics", "127.0.0.1:0"]);
    pool.list_servers();
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let export = pool.export("d", &["--metrics", &taken]);
    pool.fails(&["disk", "export", "d", "--take-over", "--nbd", &pool.socket("e"), "--metrics", &taken], 1, "in use");
    qemu_io(&export.uri(), &["write -P 1 0 4M", "read -P 1 0 1M"]);
    let shows = |ready: &serde_json::Value, lines: &[&str]| {
        let text = scrape(ready);
        lines.iter().all(|line| text.lines().any(|found| found.starts_with(line)))
    };
    let of_disk = [
        "pagoda_disk_writes_total{disk=\"d\"} 1024.0",
        "pagoda_disk_reads_total{disk=\"d\"} 256.0",
        "pagoda_disk_held_bytes{disk=\"d\"} 67108864.0",
        "pagoda_disk_short_bytes{disk=\"d\"} 0.0",
        "pagoda_disk_server_up{disk=\"d\",server=\"2\"} 1.0",
        "pagoda_disk_read_seconds_count{disk=\"d\",class=\"demand\"} 256",
    ];
    until("the exporter tells", || shows(&export.ready, &of_disk));
    let of_server =
        ["pagoda_pool_server_used_bytes{server=\"2\"} 67108864.0", "pagoda_pool_server_pressure{server=\"2\"} 0.0"];
    until("the server tells", || shows(pool.ready(1), &of_server));
    assert_eq!(export.stop(), Some(0));
}

#[test]
fn the_owner_before_is_cut_off() {
    let pool = Pool::start("takeover", 1);
    pool.run(&["disk", "create", "d", "--size", "4M", "--copies", "1"]);
    let mut first = pool.export("d", &[]);
    qemu_io(&first.uri(), &["write -P 1 0 1M"]);
    let socket = pool.socket("second");
    pool.fails(&["disk", "export", "d", "--nbd", &socket], 1, "--take-over");
    pool.fails(&["disk", "export", "d", "--nbd", &pool.socket("d"), "--take-over"], 1, "in use");
    let second = pool.export_at("d", &socket, &["--take-over"]);
    qemu_io(&second.uri(), &["read -P 1 0 1M", "write -P 2 0 1M"]);
    let late = Command::new("qemu-io").args(["-f", "raw", &first.uri(), "-c", "write -P 9 0 1M"]).output().unwrap();
    let said = text(&late.stdout) + &text(&late.stderr);
    assert!(!late.status.success() || said.contains("failed"), "a late write was acknowledged: {said}");
    assert_eq!(first.wait(), Some(1), "it says why it ends");
    qemu_io(&second.uri(), &["read -P 2 0 1M"]);
    assert_eq!(second.stop(), Some(0));
}

/// Nor does it say that it has made zero what it takes for zero and the next owner has written.
#[test]
fn the_owner_before_trims_no_hole() {
    let pool = Pool::start("takeover-trim", 1);
    pool.run(&["disk", "create", "d", "--size", "4M", "--copies", "1"]);
    let mut first = pool.export("d", &[]);
    qemu_io(&first.uri(), &["discard 0 1M", "read -P 0 0 1M"]);
    let second = pool.export_at("d", &pool.socket("second"), &["--take-over"]);
    qemu_io(&second.uri(), &["write -P 2 0 4096"]);
    let late = Command::new("qemu-io").args(["-f", "raw", &first.uri(), "-c", "discard 0 4096"]).output().unwrap();
    let said = text(&late.stdout) + &text(&late.stderr);
    assert!(!late.status.success() || said.contains("failed"), "a late discard was acknowledged: {said}");
    assert_eq!(first.wait(), Some(1), "it says why it ends");
    qemu_io(&second.uri(), &["read -P 2 0 4096", "discard 0 4096", "read -P 0 0 1M"]);
    assert_eq!(second.stop(), Some(0));
}

#[test]
fn a_full_pool_says_so_and_keeps_what_it_has() {
    let pool = Pool::start("full", 1);
    pool.run(&["disk", "create", "big", "--size", "1G", "--copies", "1"]);
    let export = pool.export("big", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 1M", "write -P 2 64M 1M", "write -P 3 128M 1M"]);
    let full = Command::new("qemu-io").args(["-f", "raw", &export.uri(), "-c", "write -P 4 512M 1M"]).output().unwrap();
    let said = text(&full.stdout) + &text(&full.stderr);
    assert!(said.contains("No space left"), "{said}");
    qemu_io(&export.uri(), &["read -P 1 0 1M", "read -P 2 64M 1M", "read -P 3 128M 1M", "read -P 0 512M 1M"]);
    assert_eq!(export.stop(), Some(0));
}

#[test]
fn mistakes_are_refused_before_anything_is_changed() {
    let pool = Pool::start("mistakes", 1);
    pool.fails(&["disk", "create", "d", "--size", "4097B", "--copies", "1"], 2, "multiple of 4096");
    pool.fails(&["disk", "create", "d", "--size", "4M"], 2, "--copies 1");
    pool.fails(&["disk", "create", "../d", "--size", "4M", "--copies", "1"], 2, "no name of a disk");
    pool.run(&["disk", "create", "d", "--size", "4M", "--copies", "1"]);
    pool.fails(&["disk", "create", "d", "--size", "8M", "--copies", "1"], 1, "already");
    assert_eq!(pool.json(&["disk", "show", "d"])["size_bytes"], 4 << 20);
    pool.fails(&["disk", "show", "e"], 4, "no disk e");
    pool.fails(&["disk", "export", "d", "--tcp", "0.0.0.0:0"], 1, "not on the loopback");
    pool.fails(&["disk", "export", "d"], 2, "--nbd");
    let taken = pool.file("servers");
    pool.fails(&["disk", "export", "d", "--nbd", &taken], 1, "not a socket");
    pool.fails(&["pool", "key", "add", "12"], 2, "not a public key");
    pool.fails(&["pool", "serve", "--size", "10M", "--listen", "127.0.0.1:0"], 2, "at least");
    pool.fails(&["pool", "serve", "--size", "90T", "--listen", "127.0.0.1:0"], 1, "available");
    pool.fails(&["pool", "serve", "--size", "90M", "--listen", "127.0.0.1:0", "--lanes", "17"], 2, "1..=16");
    // Another pool key: nobody answers, and the one who has the disk keeps it.
    std::fs::write(pool.file("pool.key"), "00".repeat(32)).unwrap();
    pool.fails(&["disk", "export", "d", "--nbd", &pool.socket("d")], 1, "no server answers");
    assert_eq!(pool.json(&["disk", "show", "d"])["generation"], 0);
    tool("chmod", &["644", &pool.file("node.key")]);
    pool.fails(&["disk", "export", "d", "--nbd", &pool.socket("d")], 1, "chmod 600");
}

#[test]
fn hostile_clients_cost_only_their_connection() {
    let pool = Pool::start("hostile", 1);
    pool.run(&["disk", "create", "d", "--size", "4M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    let socket = pool.socket("d");
    let connect = || {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        stream
    };
    let closed = |mut stream: UnixStream| {
        let mut rest = Vec::new();
        // What was sent last may be left unread there: the connection is reset then.
        let _ = stream.read_to_end(&mut rest);
    };
    let go = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
    // Half a header, and silence, while everything below goes on.
    let mut silent = connect();
    silent.write_all(b"\0\0\0\x03IHAV").unwrap();
    // Not NBD; an option without end; a bad request; a write too long.
    let mut stream = connect();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    closed(stream);
    let mut stream = connect();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x03\xff\xff\xff\xff").unwrap();
    closed(stream);
    for header in [[0_u8; 28], {
        let mut header = [0xff; 28];
        header[..8].copy_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1]);
        header
    }] {
        let mut stream = connect();
        stream.write_all(go).unwrap();
        stream.write_all(&header).unwrap();
        closed(stream);
    }
    // Gone in the middle of a write of two pages: the first may be new, the second is not.
    let mut stream = connect();
    stream.write_all(go).unwrap();
    let header = b"\x25\x60\x95\x13\0\0\0\x01\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\0\0\0\x20\0";
    stream.write_all(&[&header[..], &[7; 6000]].concat()).unwrap();
    drop(stream);
    qemu_io(&export.uri(), &["read -P 0 4096 4096", "write -P 5 0 8192", "read -P 5 0 8192"]);
    drop(silent);
    assert_eq!(export.stop(), Some(0));
}

#[test]
fn a_key_that_is_added_counts_at_once() {
    let pool = Pool::start("keys", 1);
    let other = pool.dir.join("other");
    std::fs::create_dir(&other).unwrap();
    for file in ["pool.key", "servers"] {
        tool("cp", &["-p", &pool.file(file), other.to_str().unwrap()]);
    }
    let there = |words: &[&str]| pool.run(&[words, &["--dir", other.to_str().unwrap(), "--json"]].concat());
    let key: serde_json::Value = serde_json::from_str(&there(&["pool", "key", "init"])).unwrap();
    let state = || {
        let rows: serde_json::Value = serde_json::from_str(&there(&["pool", "ls"])).unwrap();
        rows[0]["state"].as_str().unwrap().to_owned()
    };
    assert_eq!(state(), "silent");
    pool.run(&["pool", "key", "add", key["public_key"].as_str().unwrap(), "--name", "other"]);
    pool.fails(&["pool", "key", "add", key["public_key"].as_str().unwrap()], 1, "already, as other");
    // Each look waits three seconds for an answer.
    assert!((0..60).any(|_| state() == "up"), "the server does not take the key up");
    let names: Vec<String> = pool.run(&["pool", "key", "ls"]).lines().map(str::to_owned).collect();
    assert!(names.iter().any(|line| line.ends_with("other")), "{names:?}");
}
