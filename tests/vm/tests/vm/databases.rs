//! Databases in a guest that is put back to its snapshots: each of them has again what it had then, in memory and on its disk.
//!
//! redis keeps all of its data in memory, and a log of it on the disk. SQLite keeps its data on the disk and in the guest's page cache, and
//! another process writes to the same file all the time. Snapshots have the disk's content too.

use anyhow::{Context, Result, ensure};
use vm_tests::control::Control;
use vm_tests::{Folios, GuestOptions, Lab, MIB, Qemu};

use crate::snapshots::{command_of, wait_durable};
use crate::snapshots_disks::Disk;
use crate::snapshots_states::led::Led;

const MOUNT: &str = "mkfs.ext4 -q /dev/vda && mkdir -p /data && mount /dev/vda /data";
/// A reply to a write comes when it is on the disk.
const START_REDIS: &str = "redis-server --port 0 --unixsocket /tmp/redis --dir /data --save '' --appendonly yes \
     --appendfsync always --enable-debug-command yes > /tmp/redis.log 2>&1 & \
     until redis-cli -s /tmp/redis ping > /tmp/ping 2>&1 && grep -q PONG /tmp/ping; do sleep 0.2; done";
const MAKE_TABLES: &str =
    "create table facts(k integer primary key, v text); create table noise(k integer primary key, v blob)";
/// As long as there is a file that says so.
const MAKE_NOISE: &str = "touch /tmp/noise; ( (i=0; echo '.timeout 100000'; while [ -e /tmp/noise ]; do i=$((i+1)); \
     echo \"insert or replace into noise values($((i%500)), randomblob(700));\"; done) \
     | sqlite3 /data/facts.db) > /tmp/noise.log 2>&1 &";
/// How many keys redis has, and how many rows SQLite.
const ENTRIES: u32 = 8000;
/// So that no answer comes from the guest's page cache.
const FORGET: &str = "echo 3 > /proc/sys/vm/drop_caches";

fn redis(control: &mut Control, words: &str) -> Result<String> {
    Ok(control.sh(&format!("redis-cli -s /tmp/redis {words}"))?.trim().to_owned())
}

fn sqlite(control: &mut Control, statements: &str) -> Result<String> {
    Ok(control.sh(&format!("sqlite3 -cmd '.timeout 100000' /data/facts.db \"{statements}\""))?.trim().to_owned())
}

/// Gives every `step`th entry of both another content.
fn change(control: &mut Control, word: &str, step: u32) -> Result<()> {
    let each =
        "for i=1,tonumber(ARGV[2]),tonumber(ARGV[3]) do redis.call(\"set\",\"key\"..i,ARGV[1]..string.rep(i,40)) end";
    redis(control, &format!("eval '{each}' 0 {word} {ENTRIES} {step}"))?;
    let rows = format!("with recursive n(i) as (select 1 union all select i+{step} from n where i+{step}<={ENTRIES})");
    sqlite(control, &format!("{rows} insert or replace into facts select i, '{word}'||hex(randomblob(60)) from n"))?;
    Ok(())
}

/// What both databases have, as digests.
#[derive(Debug, PartialEq, Eq)]
struct Content {
    redis: String,
    sqlite: String,
}

/// That they are whole, and what they have.
fn content(control: &mut Control) -> Result<Content> {
    control.sh(FORGET)?;
    let keys = redis(control, "dbsize")?;
    ensure!(keys == ENTRIES.to_string(), "redis has {keys} keys");
    let redis = redis(control, "debug digest")?;
    ensure!(redis.len() == 40 && redis.bytes().all(|byte| byte.is_ascii_hexdigit()), "no digest: {redis}");
    let whole = sqlite(control, "pragma integrity_check")?;
    ensure!(whole == "ok", "SQLite: {whole}");
    let rows = sqlite(control, "select count(*) from facts")?;
    ensure!(rows == ENTRIES.to_string(), "SQLite has {rows} rows");
    let sqlite =
        control.sh("sqlite3 -cmd '.timeout 100000' /data/facts.db 'select * from facts order by k' | sha256sum")?;
    Ok(Content { redis, sqlite })
}

fn put_back(qemu: Qemu) -> Result<()> {
    Lab::run("databases that are put back", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let disk = Disk::make(lab)?;
        let options = GuestOptions::new("web1", "").databases().control().memory("-m 320M").dram("112M").qemu(qemu);
        let mut led = Led::start(lab, &daemon, &options.more(&disk.drive("native")))?;
        for line in [MOUNT, START_REDIS] {
            led.control.sh(line)?;
        }
        ensure!(sqlite(&mut led.control, "pragma journal_mode=wal")? == "wal");
        sqlite(&mut led.control, MAKE_TABLES)?;
        led.control.sh(MAKE_NOISE)?;

        let mut known: Vec<(&str, Content)> = Vec::new();
        for (name, step) in [("one", 1), ("two", 3), ("three", 7)] {
            // While the snapshot before it is filled.
            change(&mut led.control, name, step)?;
            let content = content(&mut led.control)?;
            println!("{name}: {content:?}");
            ensure!(known.iter().all(|(_, other)| *other != content), "nothing has changed");
            if let Some((last, _)) = known.last() {
                wait_durable(&daemon, "web1", last)?;
            }
            command_of(&daemon, &["vm", "snapshot", "web1", "--name", name, "--disks"])?;
            known.push((name, content));
        }
        wait_durable(&daemon, "web1", "three")?;
        led.wait_vm("some of it is in swap", |vm| vm.swapped_bytes > 8 * MIB)?;
        for index in [0, 2, 1] {
            let (name, expected) = &known[index];
            put_back_to(&mut led, name, expected)?;
        }
        from_the_disk_alone(&mut led, &known[1].1)?;
        led.power_off()?;
        disk.check_ended()
    })
}

fn put_back_to(led: &mut Led<'_>, name: &str, expected: &Content) -> Result<()> {
    change(&mut led.control, "later", 2)?;
    ensure!(content(&mut led.control)? != *expected, "nothing has changed since {name}");
    led.roll_back(name)?;
    let found = content(&mut led.control).with_context(|| format!("put back to {name}"))?;
    ensure!(found == *expected, "put back to {name}: {found:?} instead of {expected:?}");
    let noise = led.control.sh("cat /tmp/noise.log")?;
    ensure!(noise.is_empty(), "who writes meanwhile says: {noise}");
    Ok(())
}

/// redis begins anew with what it has written down, and all ends.
fn from_the_disk_alone(led: &mut Led<'_>, expected: &Content) -> Result<()> {
    redis(&mut led.control, "shutdown nosave || true")?;
    led.control.sh(FORGET)?;
    led.control.sh(START_REDIS)?;
    let found = content(&mut led.control)?;
    ensure!(found == *expected, "redis has begun anew: {found:?} instead of {expected:?}");
    redis(&mut led.control, "shutdown nosave || true")?;
    led.control.sh("rm /tmp/noise; until umount /data; do sleep 0.2; done 2> /tmp/umount.log").map(drop)
}

#[test]
fn redis_and_sqlite() -> Result<()> {
    put_back(Qemu::System)
}

#[test]
fn redis_and_sqlite_qemu_10() -> Result<()> {
    put_back(Qemu::Ten)
}
