//! The record of a VM: one small text file in the state directory, by which a restarted daemon knows a VM again.
//!
//! Written once when the VM is created and again when a setting changes, by rename, so it is whole or absent. Format:
//!
//! ```text
//! pagoda-vm 1
//! name web1
//! token 00112233445566778899aabbccddeeff
//! kind qemu
//! regions 1073741824 1073741824
//! dram 536870912
//! reserve 0
//! pid 1234 5678             process and its start time (proc(5) stat field 22); 0 0 before it attached
//! balloon 268435456 1       only if the guest has a balloon target: what it should keep, and 1 while the VM is paged out
//!                           to it instead
//! min 134217728             only if DRAM is guaranteed to it: bytes
//! shares 2000               only if it has other shares than the default
//! sampling 100 30           only if its working set is sampled otherwise: pages, seconds
//! blocked 1                 only while the memory policy has stopped it
//! group tenant1             only if it may share pages with the other VMs of that group
//! sharing 1 42 1 43         only if its equal pages are shared: device and inode of its table, then of its group's pool
//! far 00112233aabbccdd 1 00..ff
//!                           only if remote memory is its tier before swap: the pool's space, copies of each page (1 or 2), and
//!                           the 32 bytes of its pages' key, which makes this file a secret; then the name of the pool in etcd
//!                           that keeps it, unless this machine's registry file does
//! compressed 1073741824 DIR only if compressed memory is a tier of it: bytes that it may take, and the directory of its files
//! pinned TEXT               only if the VM may never be evicted
//! sum 9f86d081884c7d65      FNV-1a of all lines above
//! ```

use crate::{REGION_ALIGN, REGIONS_MAX, Token};

/// Longest record read back: a longer one is not ours.
pub const RECORD_MAX: usize = 4096;
const FIRST_LINE: &str = "pagoda-vm 1";

/// What kind of process the VM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// QEMU with a monitor of ours.
    Qemu,
    /// A plain process that maps our file.
    Plain,
}

/// A VM as the daemon remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Unique among the daemon's VMs.
    pub name: String,
    /// The VM's secret.
    pub token: Token,
    /// QEMU or a plain process.
    pub kind: Kind,
    /// Bytes of each region.
    pub regions: Vec<u64>,
    /// Hard cap on DRAM in bytes.
    pub dram: u64,
    /// Swap space is reserved up front.
    pub reserve: bool,
    /// Process id and start time; zeros before it attached.
    pub pid: (u32, u64),
    /// What the guest should keep, if it is to give memory up.
    pub balloon: Option<Balloon>,
    /// DRAM guaranteed to it, bytes.
    pub min: u64,
    /// Its weight; nothing: the default.
    pub shares: Option<u32>,
    /// Pages and seconds of a sampling period; nothing: the default.
    pub sampling: Option<(u32, u32)>,
    /// The memory policy has stopped it, and has to let it run again.
    pub blocked: bool,
    /// VMs that it may share pages with.
    pub group: Option<String>,
    /// What its VMM keeps for sharing. Without it shared pages would be taken for zeros.
    pub sharing: Option<SharingFiles>,
    /// Remote memory that is its tier before swap.
    pub far: Option<Far>,
    /// Compressed memory that is its first tier.
    pub compressed: Option<Compressed>,
    /// Why it may never be evicted.
    pub pinned: Option<String>,
}

/// A tier of compressed memory. Without it, pages that are there would be taken for zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Bytes of memory that it may take.
    pub room: u64,
    /// Where its files are.
    pub dir: String,
}

/// A space of a pool of servers that lend memory.
#[derive(Clone, PartialEq, Eq)]
pub struct Far {
    /// Its number in the pool.
    pub space: u64,
    /// Servers that have each page, at most [`FAR_COPIES_MAX`].
    pub copies: u8,
    /// What its pages are sealed with: no server has it.
    pub key: [u8; FAR_KEY_SIZE],
    /// The pool in etcd that keeps where its pages are; nothing: this machine's registry file.
    pub cluster: Option<String>,
}

/// Bytes of a far tier's key.
pub const FAR_KEY_SIZE: usize = 32;
/// Most servers that may have each page of a far tier.
pub const FAR_COPIES_MAX: u8 = 2;
/// Longest name of a pool in etcd.
const CLUSTER_MAX: usize = 64;

impl std::fmt::Debug for Far {
    /// The key is a secret: it stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Far({:016x}, {} copies, {:?})", self.space, self.copies, self.cluster)
    }
}

impl Far {
    fn to_text(&self) -> String {
        let key: String = self.key.iter().map(|byte| format!("{byte:02x}")).collect();
        let cluster = self.cluster.as_ref().map_or(String::new(), |pool| format!(" {pool}"));
        format!("{:016x} {} {key}{cluster}", self.space, self.copies)
    }

    /// `None` for anything that [`Far::to_text`] does not write.
    fn from_text(text: &str) -> Option<Far> {
        let is_hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let mut words = text.split(' ');
        let (space, copies, digits) = (words.next()?, words.next()?, words.next()?);
        let cluster = words.next();
        if words.next().is_some()
            || !cluster.is_none_or(is_pool)
            || !is_hex(space, 16)
            || !is_hex(digits, 2 * FAR_KEY_SIZE)
        {
            return None;
        }
        let copies = (1..=FAR_COPIES_MAX).find(|known| known.to_string() == copies)?;
        let mut key = [0; FAR_KEY_SIZE];
        for (byte, at) in key.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
        }
        let cluster = cluster.map(str::to_owned);
        Some(Far { space: u64::from_str_radix(space, 16).ok()?, copies, key, cluster })
    }
}

/// Whether a pool in etcd can have this name.
fn is_pool(name: &str) -> bool {
    let allowed = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    (1..=CLUSTER_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

/// The files that hold a VM's shared pages, each by device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingFiles {
    /// The VM's table.
    pub table: (u64, u64),
    /// The pool of its group.
    pub pool: (u64, u64),
}

/// A balloon target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balloon {
    /// Bytes that the guest should keep.
    pub target: u64,
    /// Its driver does not answer, and the VM is paged out to the target instead.
    pub paged_out: bool,
}

/// Why a record was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub struct BadRecord(pub String);

impl std::fmt::Display for BadRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VM record is not usable: {}", self.0)
    }
}

impl std::error::Error for BadRecord {}

fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Record {
    /// The file's content.
    pub fn to_text(&self) -> String {
        let kind = match self.kind {
            Kind::Qemu => "qemu",
            Kind::Plain => "plain",
        };
        let regions: Vec<String> = self.regions.iter().map(u64::to_string).collect();
        let mut text = format!(
            "{FIRST_LINE}\nname {}\ntoken {}\nkind {kind}\nregions {}\ndram {}\nreserve {}\npid {} {}\n",
            self.name,
            self.token.to_hex(),
            regions.join(" "),
            self.dram,
            u8::from(self.reserve),
            self.pid.0,
            self.pid.1,
        );
        if let Some(balloon) = self.balloon {
            text += &format!("balloon {} {}\n", balloon.target, u8::from(balloon.paged_out));
        }
        if self.min > 0 {
            text += &format!("min {}\n", self.min);
        }
        if let Some(shares) = self.shares {
            text += &format!("shares {shares}\n");
        }
        if let Some((pages, seconds)) = self.sampling {
            text += &format!("sampling {pages} {seconds}\n");
        }
        if self.blocked {
            text += "blocked 1\n";
        }
        if let Some(group) = &self.group {
            text += &format!("group {group}\n");
        }
        if let Some(SharingFiles { table, pool }) = self.sharing {
            text += &format!("sharing {} {} {} {}\n", table.0, table.1, pool.0, pool.1);
        }
        if let Some(far) = &self.far {
            text += &format!("far {}\n", far.to_text());
        }
        if let Some(Compressed { room, dir }) = &self.compressed {
            text += &format!("compressed {room} {dir}\n");
        }
        if let Some(reason) = &self.pinned {
            text += &format!("pinned {}\n", reason.replace('\n', " "));
        }
        let sum = checksum(&text);
        text + &format!("sum {sum:016x}\n")
    }

    /// Reads a record; anything unknown, missing or altered is refused.
    pub fn from_text(text: &str) -> Result<Record, BadRecord> {
        let bad = |what: &str| BadRecord(what.to_owned());
        let (body, sum) = text.trim_end().rsplit_once('\n').ok_or_else(|| bad("too short"))?;
        let body = format!("{body}\n");
        let sum =
            sum.strip_prefix("sum ").and_then(|s| u64::from_str_radix(s, 16).ok()).ok_or_else(|| bad("no checksum"))?;
        if sum != checksum(&body) {
            return Err(bad("checksum does not match"));
        }
        let mut lines = body.lines().peekable();
        if lines.next() != Some(FIRST_LINE) {
            return Err(bad("written by another version"));
        }
        let mut field = |key: &str| {
            let line = lines.next().ok_or_else(|| bad(&format!("{key} missing")))?;
            line.strip_prefix(key)
                .and_then(|l| l.strip_prefix(' '))
                .map(str::to_owned)
                .ok_or_else(|| bad(&format!("{key} expected")))
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| bad("not a number"));
        let name = field("name")?;
        let token = Token::from_hex(&field("token")?).ok_or_else(|| bad("token"))?;
        let kind = match field("kind")?.as_str() {
            "qemu" => Kind::Qemu,
            "plain" => Kind::Plain,
            _ => return Err(bad("kind")),
        };
        let regions = field("regions")?.split(' ').map(number).collect::<Result<Vec<_>, _>>()?;
        if regions.is_empty()
            || regions.len() > REGIONS_MAX
            || regions.iter().any(|len| *len == 0 || len % REGION_ALIGN != 0)
        {
            return Err(bad("regions"));
        }
        let dram = number(&field("dram")?)?;
        let reserve = field("reserve")? == "1";
        let pid = field("pid")?;
        let (pid, start) = pid.split_once(' ').ok_or_else(|| bad("pid"))?;
        let pid = (u32::try_from(number(pid)?).map_err(|_| bad("pid"))?, number(start)?);
        let mut optional = |key: &str| {
            let rest = lines.peek()?.strip_prefix(key)?.strip_prefix(' ')?.to_owned();
            lines.next().map(|_| rest)
        };
        let balloon = optional("balloon").map(|text| {
            let (target, paged_out) = text.split_once(' ').ok_or_else(|| bad("balloon"))?;
            Ok(Balloon { target: number(target)?, paged_out: paged_out == "1" })
        });
        let balloon = balloon.transpose()?;
        let small = |text: &str| u32::try_from(number(text)?).map_err(|_| bad("number too large"));
        let min = optional("min").map_or(Ok(0), |text| number(&text))?;
        let shares = optional("shares").map(|text| small(&text)).transpose()?;
        let sampling = optional("sampling").map(|text| {
            let (pages, seconds) = text.split_once(' ').ok_or_else(|| bad("sampling"))?;
            Ok((small(pages)?, small(seconds)?))
        });
        let sampling = sampling.transpose()?;
        let blocked = optional("blocked").is_some_and(|text| text == "1");
        let group = optional("group");
        let sharing = optional("sharing").map(|text| {
            let numbers = text.split(' ').map(number).collect::<Result<Vec<_>, _>>()?;
            let [table_dev, table_ino, pool_dev, pool_ino] = numbers[..] else { return Err(bad("sharing")) };
            Ok(SharingFiles { table: (table_dev, table_ino), pool: (pool_dev, pool_ino) })
        });
        let sharing = sharing.transpose()?;
        let far = optional("far").map(|text| Far::from_text(&text).ok_or_else(|| bad("far")));
        let far = far.transpose()?;
        let compressed = optional("compressed").map(|text| {
            let (room, dir) = text.split_once(' ').ok_or_else(|| bad("compressed"))?;
            Ok(Compressed { room: number(room)?, dir: dir.to_owned() })
        });
        let compressed = compressed.transpose()?;
        let pinned = optional("pinned");
        if lines.next().is_some() {
            return Err(bad("more than a record has"));
        }
        Ok(Record {
            name,
            token,
            kind,
            regions,
            dram,
            reserve,
            pid,
            balloon,
            min,
            shares,
            sampling,
            blocked,
            group,
            sharing,
            far,
            compressed,
            pinned,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Record {
        Record {
            name: "web1".into(),
            token: Token([7; 16]),
            kind: Kind::Qemu,
            regions: vec![2 << 20, 1 << 30],
            dram: 512 << 20,
            reserve: true,
            pid: (42, 4711),
            balloon: Some(Balloon { target: 256 << 20, paged_out: true }),
            min: 128 << 20,
            shares: Some(2000),
            sampling: Some((200, 10)),
            blocked: true,
            group: Some("tenant1".into()),
            sharing: Some(SharingFiles { table: (1, 42), pool: (1, u64::MAX) }),
            far: Some(Far { space: 0x0011_2233_aabb_ccdd, copies: 2, key: [0xa7; FAR_KEY_SIZE], cluster: None }),
            compressed: Some(Compressed { room: 1 << 30, dir: "/run/a dir".into() }),
            pinned: Some("vfio device".into()),
        }
    }

    #[test]
    fn record_reads_as_written() {
        let with = sample();
        let without = Record { pinned: None, ..sample() };
        let neither = Record { pinned: None, balloon: None, ..sample() };
        let pinned_alone = Record { balloon: None, ..sample() };
        let plain = Record { min: 0, shares: None, sampling: None, blocked: false, group: None, ..neither.clone() };
        let unshared = Record { group: None, sharing: None, ..sample() };
        let shared_alone = Record { balloon: None, group: None, pinned: None, ..sample() };
        let near = Record { far: None, ..sample() };
        let far_alone = Record { far: sample().far, sharing: None, ..plain.clone() };
        let far_in_etcd = sample().far.map(|far| Far { cluster: Some("lab".into()), ..far });
        let clustered = Record { far: far_in_etcd, ..sample() };
        for record in [with, without, neither, pinned_alone, plain, unshared, shared_alone, near, far_alone, clustered]
        {
            assert_eq!(Record::from_text(&record.to_text()), Ok(record));
        }
    }

    #[test]
    fn far_tiers_are_as_they_are_written() {
        let key = "0f".repeat(FAR_KEY_SIZE);
        let text = format!("00112233aabbccdd 1 {key}");
        let far = Far { space: 0x0011_2233_aabb_ccdd, copies: 1, key: [0x0f; FAR_KEY_SIZE], cluster: None };
        assert_eq!((Far::from_text(&text), far.to_text()), (Some(far.clone()), text.clone()));
        for pool in ["default", "a-b_c.9", &"x".repeat(CLUSTER_MAX)] {
            let (text, far) = (format!("{text} {pool}"), Far { cluster: Some(pool.to_owned()), ..far.clone() });
            assert_eq!((Far::from_text(&text), far.to_text()), (Some(far), text));
        }
        assert!(!format!("{far:?}").contains("0f0f"), "the key stays out of logs");
        for bad in [
            String::new(),
            "00112233aabbccdd 1".into(),
            format!("00112233aabbccdd 0 {key}"),
            format!("00112233aabbccdd 3 {key}"),
            format!("00112233aabbccdd 01 {key}"),
            format!("00112233aabbccdd -1 {key}"),
            format!("112233aabbccdd 1 {key}"),
            format!("+0112233aabbccdd 1 {key}"),
            format!("00112233AABBCCDD 1 {key}"),
            format!("00112233aabbccdd 1 {key} "),
            format!("00112233aabbccdd 1 {key} Lab"),
            format!("00112233aabbccdd 1 {key} a/b"),
            format!("00112233aabbccdd 1 {key} {}", "x".repeat(CLUSTER_MAX + 1)),
            format!("00112233aabbccdd 1 {key} lab 1"),
            format!("00112233aabbccdd  1 {key}"),
            format!("00112233aabbccdd 1 {}", &key[1..]),
            format!("00112233aabbccdd 1 {key}0f"),
            format!("00112233aabbccdd 1 {}", "\u{e4}".repeat(FAR_KEY_SIZE)),
        ] {
            assert_eq!(Far::from_text(&bad), None, "{bad:?}");
        }
    }

    /// What daemons of before etcd kept far tiers wrote, and what is written for one that etcd keeps.
    #[test]
    fn records_of_far_tiers_are_as_they_were_written() {
        let key = "a7".repeat(FAR_KEY_SIZE);
        let head =
            format!("pagoda-vm 1\nname web1\ntoken {}\nkind qemu\nregions 2097152 1073741824\n", "07".repeat(16));
        let rest = format!("dram 536870912\nreserve 1\npid 42 4711\nfar 00112233aabbccdd 2 {key}");
        let near = Record { balloon: None, min: 0, shares: None, sampling: None, blocked: false, ..sample() };
        let record = Record { group: None, sharing: None, compressed: None, pinned: None, ..near };
        let far = record.far.clone().map(|far| Far { cluster: Some("lab".into()), ..far });
        for (record, tail) in
            [(record.clone(), "\nsum 52232690511b2962\n"), (Record { far, ..record }, " lab\nsum 3575cb3366c92633\n")]
        {
            let text = format!("{head}{rest}{tail}");
            assert_eq!((Record::from_text(&text), record.to_text()), (Ok(record), text));
        }
    }

    #[test]
    fn every_altered_byte_is_noticed() {
        let text = sample().to_text();
        for i in 0..text.len() - 1 {
            let mut bytes = text.clone().into_bytes();
            bytes[i] ^= 1;
            if let Ok(altered) = String::from_utf8(bytes) {
                assert!(Record::from_text(&altered).is_err(), "byte {i}");
            }
        }
        assert!(Record::from_text("").is_err());
    }
}
