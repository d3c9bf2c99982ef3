//! Records of format 1, which daemons wrote before format 2. They are only read.
//!
//! ```text
//! pagoda-vm 1
//! name web1
//! token 00112233445566778899aabbccddeeff
//! kind qemu                 or plain
//! regions 1073741824 1073741824
//! dram 536870912
//! reserve 0
//! pid 1234 5678
//! balloon 268435456 1       the lines from here on stand there only where they apply: target, and 1 while paged out to it
//! min 134217728
//! shares 2000
//! sampling 100 30           pages, seconds
//! blocked 1
//! group tenant1
//! sharing 1 42 1 43         device and inode of the VM's table, then of its group's pool
//! far 00112233aabbccdd 1 00..ff [POOL]
//!                           space, copies, key, and the pool in etcd
//! compressed 1073741824 DIR
//! pinned TEXT
//! sum 9f86d081884c7d65
//! ```

use pagoda_abi::Token;
use pagoda_api::types::{PolicySettings, REMOTE_COPIES_MAX, RemoteRequest, Sampling, VmKind, VmSpec};

use super::{BadRecord, REMOTE_KEY_SIZE, Record, Remote, SharingFiles, bad, from_hex};
use crate::compressed::Compressed;

pub(super) const FIRST_LINE: &str = "pagoda-vm 1";
/// Longest that was written, in bytes.
const LEN_MAX: usize = 4096;

/// Reads the lines between the first and the last; anything unknown or missing is refused. `len`: of the whole file.
pub(super) fn read(lines: &str, len: usize) -> Result<Record, BadRecord> {
    if len > LEN_MAX {
        return Err(bad("longer than a record can be"));
    }
    let mut lines = lines.lines().peekable();
    let mut field = |key: &str| {
        let line = lines.next().ok_or_else(|| bad(format!("{key} missing")))?;
        line.strip_prefix(key)
            .and_then(|line| line.strip_prefix(' '))
            .map(str::to_owned)
            .ok_or_else(|| bad(format!("{key} expected")))
    };
    let name = field("name")?;
    let token = Token::from_hex(&field("token")?).ok_or_else(|| bad("token"))?;
    let kind = match field("kind")?.as_str() {
        "qemu" => VmKind::Qemu,
        "plain" => VmKind::Plain,
        _ => return Err(bad("kind")),
    };
    let regions = field("regions")?.split(' ').map(number).collect::<Result<Vec<u64>, _>>()?;
    let dram = number(&field("dram")?)?;
    let reserve_swap = field("reserve")? == "1";
    let (pid, start) = pair("pid", &field("pid")?)?;
    let mut optional = |key: &str| {
        let rest = lines.peek()?.strip_prefix(key)?.strip_prefix(' ')?.to_owned();
        lines.next().map(|_| rest)
    };
    let balloon: Option<(u64, u64)> = optional("balloon").map(|text| pair("balloon", &text)).transpose()?;
    let min = optional("min").map_or(Ok(0), |text| number(&text))?;
    let shares = optional("shares").map(|text| number(&text)).transpose()?;
    let sampling = optional("sampling").map(|text| pair("sampling", &text)).transpose()?;
    let blocked = optional("blocked").is_some_and(|text| text == "1");
    let share_group = optional("group");
    let sharing = optional("sharing").map(|text| sharing_files(&text)).transpose()?;
    let remote = optional("far").map(|text| remote(&text).ok_or_else(|| bad("far"))).transpose()?;
    let compressed = optional("compressed").map(|text| {
        let (room, dir) = text.split_once(' ').ok_or_else(|| bad("compressed"))?;
        Ok(Compressed { room: number(room)?, dir: dir.to_owned() })
    });
    let compressed = compressed.transpose()?;
    let pinned = optional("pinned");
    if lines.next().is_some() {
        return Err(bad("more than a record has"));
    }
    let sampling = sampling.map(|(pages, period_s)| Sampling { pages, period_s });
    let policy = PolicySettings { sampling, ..PolicySettings::default() };
    let made = VmSpec { dram: Some(dram), reserve_swap, share_group, pinned, ..VmSpec::default() };
    let spec = VmSpec {
        policy: PolicySettings { min, shares, ..policy },
        remote: remote.as_ref().map(|remote| RemoteRequest { copies: remote.copies }),
        balloon_target: balloon.map(|(target, _)| target),
        ..made
    };
    let paged_out = balloon.is_some_and(|(_, paged_out)| paged_out == 1);
    let new = Record::new(&name, token, kind, &regions, spec);
    Ok(Record { pid: (pid, start), paged_out, blocked, sharing, remote, compressed, ..new })
}

fn number<T: TryFrom<u64>>(text: &str) -> Result<T, BadRecord> {
    let number = text.parse::<u64>().map_err(|_| bad("not a number"))?;
    T::try_from(number).map_err(|_| bad("number too large"))
}

fn pair<A: TryFrom<u64>, B: TryFrom<u64>>(what: &str, text: &str) -> Result<(A, B), BadRecord> {
    let (a, b) = text.split_once(' ').ok_or_else(|| bad(what))?;
    Ok((number(a)?, number(b)?))
}

fn sharing_files(text: &str) -> Result<SharingFiles, BadRecord> {
    let numbers = text.split(' ').map(number).collect::<Result<Vec<u64>, _>>()?;
    let [table_dev, table_ino, pool_dev, pool_ino] = numbers[..] else { return Err(bad("sharing")) };
    Ok(SharingFiles { table: (table_dev, table_ino), pool: (pool_dev, pool_ino) })
}

/// `None` for anything that was never written.
fn remote(text: &str) -> Option<Remote> {
    let mut words = text.split(' ');
    let (space, copies, key) = (words.next()?, words.next()?, words.next()?);
    let cluster = words.next().map(str::to_owned);
    if words.next().is_some() {
        return None;
    }
    let copies = (1..=REMOTE_COPIES_MAX).find(|known| known.to_string() == copies)?;
    let remote =
        Remote { space: u64::from_be_bytes(from_hex(space)?), copies, key: from_hex::<REMOTE_KEY_SIZE>(key)?, cluster };
    remote.is_right().then_some(remote)
}

#[cfg(test)]
mod tests {
    use pagoda_image::checked_text::checksum;

    use super::super::CLUSTER_MAX;
    use super::*;

    /// With every line that a record can have.
    const ALL: &str = include_str!("golden/1-all.vm");
    /// With none of the optional lines.
    const LEAST: &str = include_str!("golden/1-least.vm");
    /// Of a VM with remote memory, as a daemon wrote it before etcd kept spaces, and then.
    const REMOTE: [&str; 2] = [include_str!("golden/1-far.vm"), include_str!("golden/1-far-etcd.vm")];

    fn summed(body: &str) -> String {
        format!("{body}sum {:016x}\n", checksum(body))
    }

    #[test]
    fn every_line_is_understood() {
        let record = Record::from_text(ALL).unwrap();
        let sampling = Some(Sampling { pages: 200, period_s: 10 });
        let policy = PolicySettings { sampling, ..PolicySettings::default() };
        let made = VmSpec { dram: Some(512 << 20), share_group: Some("tenant1".into()), ..VmSpec::default() };
        let spec = VmSpec {
            policy: PolicySettings { min: 128 << 20, shares: Some(2000), ..policy },
            reserve_swap: true,
            remote: Some(RemoteRequest { copies: 2 }),
            pinned: Some("vfio device".into()),
            balloon_target: Some(256 << 20),
            ..made
        };
        let new = Record::new("web1", Token([7; 16]), VmKind::Qemu, &[2 << 20, 1 << 30], spec);
        let remote = Remote { space: 0x0011_2233_aabb_ccdd, copies: 2, key: [0xa7; 32], cluster: Some("lab".into()) };
        let expected = Record {
            pid: (42, 4711),
            paged_out: true,
            blocked: true,
            sharing: Some(SharingFiles { table: (1, 42), pool: (1, u64::MAX) }),
            remote: Some(remote),
            compressed: Some(Compressed { room: 1 << 30, dir: "/run/a dir".into() }),
            ..new
        };
        assert_eq!(record, expected);

        let least = Record::from_text(LEAST).unwrap();
        let spec = VmSpec { dram: Some(512 << 20), ..VmSpec::default() };
        assert_eq!(least, Record::new("web1", Token([7; 16]), VmKind::Plain, &[1 << 30], spec));
    }

    #[test]
    fn remote_tiers_are_understood() {
        let [file, etcd] = REMOTE.map(|text| Record::from_text(text).unwrap().remote.unwrap());
        assert_eq!((file.cluster.as_deref(), etcd.cluster.as_deref()), (None, Some("lab")));
        assert_eq!(Remote { cluster: None, ..etcd }, file);
        assert_eq!((file.space, file.copies, file.key), (0x0011_2233_aabb_ccdd, 2, [0xa7; 32]));
    }

    #[test]
    fn it_is_written_anew_as_format_2() {
        for text in [ALL, LEAST, REMOTE[0], REMOTE[1]] {
            let record = Record::from_text(text).unwrap();
            let text = record.to_text();
            assert!(text.starts_with("pagoda-vm 2\n"), "{text}");
            assert_eq!(Record::from_text(&text), Ok(record));
        }
    }

    #[test]
    fn each_optional_line_may_be_missing() {
        let (body, _) = ALL.trim_end().rsplit_once('\n').unwrap();
        let lines: Vec<&str> = body.lines().collect();
        for missing in 0..lines.len() {
            let mut left = lines.clone();
            let gone = left.remove(missing);
            let text = summed(&(left.join("\n") + "\n"));
            assert_eq!(Record::from_text(&text).is_ok(), missing >= 8, "without {gone}");
        }
        // Twice, or out of order, it is more than a record has.
        for twice in 8..lines.len() {
            let mut more = lines.clone();
            more.insert(twice, lines[twice]);
            assert!(Record::from_text(&summed(&(more.join("\n") + "\n"))).is_err(), "{} twice", lines[twice]);
        }
    }

    #[test]
    fn remote_tiers_are_as_they_were_written() {
        let key = "0f".repeat(REMOTE_KEY_SIZE);
        let text = format!("00112233aabbccdd 1 {key}");
        let good = Remote { space: 0x0011_2233_aabb_ccdd, copies: 1, key: [0x0f; REMOTE_KEY_SIZE], cluster: None };
        assert_eq!(remote(&text), Some(good.clone()));
        for pool in ["default", "a-b_c.9", &"x".repeat(CLUSTER_MAX)] {
            assert_eq!(
                remote(&format!("{text} {pool}")),
                Some(Remote { cluster: Some(pool.to_owned()), ..good.clone() })
            );
        }
        assert!(!format!("{good:?}").contains("0f0f"), "the key stays out of logs");
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
            format!("00112233aabbccdd 1 {}", "\u{e4}".repeat(REMOTE_KEY_SIZE)),
        ] {
            assert_eq!(remote(&bad), None, "{bad:?}");
        }
    }

    #[test]
    fn every_altered_byte_is_noticed() {
        for i in 0..ALL.len() - 1 {
            let mut bytes = ALL.to_owned().into_bytes();
            bytes[i] ^= 1;
            if let Ok(altered) = String::from_utf8(bytes) {
                assert!(Record::from_text(&altered).is_err(), "byte {i}");
            }
        }
        let (body, _) = LEAST.trim_end().rsplit_once('\n').unwrap();
        let long = |len: usize| summed(&format!("{body}\npinned {}\n", "x".repeat(len - body.len() - 30)));
        assert_eq!((long(LEN_MAX).len(), long(LEN_MAX + 1).len()), (LEN_MAX, LEN_MAX + 1));
        assert!(Record::from_text(&long(LEN_MAX)).is_ok());
        assert!(Record::from_text(&long(LEN_MAX + 1)).is_err());
    }
}
