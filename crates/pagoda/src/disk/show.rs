//! `pagoda disk ls` and `pagoda disk show`: what the map says of disks, and whether the servers in it answer.

use pagoda_api::in_full;
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::plane::Plane;
use pagoda_pool::{connect, record};
use rmap::client::{SlabStatus, slab_statuses};
use rmap::units::{ServerId, SlabNo, SlabSize};
use rmap_io::net::Wait;
use serde::Serialize;

use crate::exit;
use crate::output::{Format, Side, Table, print_json, print_text};
use crate::units::format_size;
use pagoda_pool::slab::SLAB_CONTENT_BYTES;

/// A server of a disk that has not answered by then is shown as silent.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// A disk for tables and programs.
#[derive(Debug, Serialize)]
pub struct Info {
    name: String,
    space: String,
    size_bytes: u64,
    copies: usize,
    /// One slab of parity stands for four, instead of second copies.
    parity: bool,
    exported: bool,
    /// Nobody writes to it any more, and many may read it.
    read_only: bool,
    /// Of its size, what servers keep room for while it can be written.
    reserve_bytes: u64,
    /// What is in the memory of servers, each copy counted once, with parity and what belongs to it.
    used_bytes: u64,
    /// Of that, what has fewer copies than it should, or is in a group that lacks a part.
    short_bytes: u64,
    /// What is gone with its servers.
    lost_bytes: u64,
    /// Which servers have its copies, by number.
    servers: Vec<Held>,
    /// How many owners it has had.
    generation: u32,
    /// Which pool of etcd keeps it, and the machine that was the last to own it.
    cluster: Option<String>,
    host: Option<String>,
}

/// What a server has of a disk. One that died has it until somebody gives its copies up.
#[derive(Debug, Serialize)]
struct Held {
    id: u32,
    bytes: u64,
    /// Whether it answers, where that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Up,
    Silent,
    /// It is in no list of servers, so nobody can ask it.
    Unknown,
}

impl Held {
    fn said(&self) -> String {
        let state = match self.state {
            None | Some(State::Up) => "",
            Some(State::Silent) => " (does not answer)",
            Some(State::Unknown) => " (not in the list of servers)",
        };
        format!("{} at {}{state}", format_size(self.bytes), self.id)
    }
}

impl Info {
    pub fn read(pool: &PoolConfig, name: &str) -> Result<Info> {
        let disk = record::read(&pool.dir, name)?;
        let seen = Plane::of(pool, name, disk.cluster.as_deref())?.look(disk.space()?)?;
        let size = SlabSize::default();
        let (slabs, parity) = slab_statuses(disk.pages(), disk.copies, size, &seen.today.map);
        let slab_bytes = |slab: SlabNo| {
            let begin = SLAB_CONTENT_BYTES * u64::from(slab.0);
            if begin < disk.size_bytes { SLAB_CONTENT_BYTES.min(disk.size_bytes - begin) } else { SLAB_CONTENT_BYTES }
        };
        let bytes = |of: &[SlabStatus]| {
            slabs.iter().filter(|(_, status)| of.contains(status)).map(|(slab, _)| slab_bytes(*slab)).sum()
        };
        let mut held: BTreeMap<u32, u64> = BTreeMap::new();
        for (slab, entry) in &seen.today.map {
            let bytes = slab_bytes(*slab);
            entry.replicas.iter().for_each(|replica| *held.entry(replica.server.0).or_default() += bytes);
        }
        Ok(Info {
            name: name.to_owned(),
            space: disk.space.clone(),
            size_bytes: disk.size_bytes,
            copies: disk.copies,
            parity,
            exported: !record::try_lock(&record::lock_file(&pool.dir, name)?)?,
            read_only: seen.today.sealed,
            reserve_bytes: if seen.today.sealed { 0 } else { disk.reserve_bytes },
            used_bytes: bytes(&[SlabStatus::Whole, SlabStatus::Short]),
            short_bytes: bytes(&[SlabStatus::Short]),
            lost_bytes: bytes(&[SlabStatus::Lost]),
            servers: held.into_iter().map(|(id, bytes)| Held { id, bytes, state: None }).collect(),
            generation: seen.today.generation.0,
            cluster: disk.cluster,
            host: seen.host,
        })
    }

    /// Asks the servers that have a part of it whether they are there: of one that has just died the map says nothing yet.
    fn ask(&mut self, pool: &PoolConfig) -> Result<()> {
        let mut servers = pool.servers()?;
        servers.retain(|server| self.servers.iter().any(|held| held.id == server.id.0));
        let mut up = Vec::new();
        if !servers.is_empty() {
            let mut client = connect::client(pool, &servers, connect::no_control(), Wait::BLOCK, connect::UNHURRIED)?;
            connect::converse(&mut client, ANSWERS_WITHIN, |client| connect::all_up(client))?;
            up = connect::up(&client);
        }
        for held in &mut self.servers {
            let is_known = servers.iter().any(|server| server.id.0 == held.id);
            held.state = Some(match (is_known, up.contains(&ServerId(held.id))) {
                (false, _) => State::Unknown,
                (true, true) => State::Up,
                (true, false) => State::Silent,
            });
        }
        Ok(())
    }
}

pub fn list(pool: &PoolConfig, format: Format) -> Result<()> {
    let names = record::names(&pool.dir)?;
    let mut disks = Vec::new();
    for name in &names {
        match Info::read(pool, name) {
            Ok(disk) => disks.push(disk),
            Err(error) if exit::is_unreachable(&error) => return Err(error),
            // What is wrong with one disk hides no other.
            Err(error) => eprintln!("pagoda: {name} is left out: {error}", error = in_full(error.as_ref())),
        }
    }
    print_list(&disks, format)?;
    let left_out = names.len() - disks.len();
    ensure!(left_out == 0, "not all disks could be looked at: {left_out} of {} are left out", names.len());
    Ok(())
}

fn print_list(disks: &[Info], format: Format) -> Result<()> {
    if format == Format::Json {
        return Ok(print_json(&disks)?);
    }
    let mut table = Table::new(&[
        ("NAME", Side::Left),
        ("SIZE", Side::Right),
        ("COPIES", Side::Right),
        ("USED", Side::Right),
        ("SHORT", Side::Right),
        ("LOST", Side::Right),
        ("EXPORTED", Side::Left),
        ("MODE", Side::Left),
    ]);
    for disk in disks {
        table.row(vec![
            disk.name.clone(),
            format_size(disk.size_bytes),
            copies(disk),
            format_size(disk.used_bytes),
            format_size(disk.short_bytes),
            format_size(disk.lost_bytes),
            if disk.exported { "yes" } else { "no" }.into(),
            mode(disk).into(),
        ]);
    }
    Ok(table.print()?)
}

/// What keeps it when a server goes.
fn copies(disk: &Info) -> String {
    if disk.parity { "parity".into() } else { disk.copies.to_string() }
}

fn mode(disk: &Info) -> &'static str {
    if disk.read_only { "read-only" } else { "read-write" }
}

pub fn run(pool: &PoolConfig, name: &str, format: Format) -> Result<()> {
    let mut disk = Info::read(pool, name)?;
    if let Err(error) = disk.ask(pool) {
        eprintln!("pagoda: whether its servers answer is not known: {error}", error = in_full(error.as_ref()));
    }
    if format == Format::Json {
        return Ok(print_json(&disk)?);
    }
    let exported = if disk.exported { "yes, on this machine" } else { "not on this machine" };
    let mode = if disk.read_only { "read-only, for any number of exports" } else { "read-write, for one export" };
    let kept_whole = match (disk.parity, disk.read_only) {
        (true, true) => "one, and parity for four parts",
        (true, false) => "2; one, and parity for four parts, of what is cold",
        _ => &disk.copies.to_string(),
    };
    let last = disk.host.map_or(String::new(), |host| format!(", the last on {host}"));
    let kept = disk.cluster.map_or("this machine".to_owned(), |pool| format!("etcd, pool {pool}"));
    let held: Vec<String> = disk.servers.iter().map(Held::said).collect();
    let held = if held.is_empty() { "no server".to_owned() } else { held.join(", ") };
    print_text(&format!(
        "name       {}\nsize       {}\nmode       {mode}\ncopies     {kept_whole}\nreserved   {}\nused       {}\nshort      {}   has fewer copies than it should\n\
         lost       {}   gone with its servers\nservers    {held}\nexported   {exported}\n\
         owners     {}   so far{last}\nkept by    {kept}\nspace      {}\n",
        disk.name,
        format_size(disk.size_bytes),
        format_size(disk.reserve_bytes),
        format_size(disk.used_bytes),
        format_size(disk.short_bytes),
        format_size(disk.lost_bytes),
        disk.generation,
        disk.space
    ))?;
    Ok(())
}
