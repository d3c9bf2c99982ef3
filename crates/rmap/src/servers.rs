//! A static list of servers: a text file with a line for each.
//!
//! ```text
//! # number  address          public key                                                        zone
//! 1         10.0.0.5:7070    3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29  0
//! ```
//!
//! A server that announces itself has a fifth field: the public key that its announcements are signed with.

use std::net::SocketAddr;

use thiserror::Error;

use crate::announce::AnnounceKey;
use crate::client::{SERVERS_MAX, ServerInfo};
use crate::crypto::{KEY_SIZE, PublicKey};
use crate::units::ServerId;

/// What is wrong with a list, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}")]
pub struct ListError {
    pub line: usize,
    pub what: ListFault,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ListFault {
    #[error("give number, address, public key and zone, and the key of its announcements if it makes any")]
    Fields,
    #[error("{text} is not a number below 2^32")]
    Number { text: String },
    #[error("{text} is not an address with a port, as 10.0.0.5:7070 or [fd00::5]:7070")]
    Address { text: String },
    #[error("a public key, and that of announcements, is 64 hexadecimal digits")]
    Key,
    #[error("server {id} stands in line {first} already")]
    Twice { id: u32, first: usize },
    #[error("more than {SERVERS_MAX} servers")]
    TooMany,
}

/// Reads a list. Empty lines and what follows `#` do not count.
///
/// # Errors
/// The first line that is wrong.
pub fn parse(text: &str) -> Result<Vec<ServerInfo>, ListError> {
    let mut servers: Vec<(usize, ServerInfo)> = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.split_once('#').map_or(content, |(before, _)| before).trim();
        if content.is_empty() {
            continue;
        }
        let server = parse_line(content).map_err(|what| ListError { line, what })?;
        let fault = match servers.iter().find(|(_, other)| other.id == server.id) {
            Some((first, _)) => Some(ListFault::Twice { id: server.id.0, first: *first }),
            None => (servers.len() >= SERVERS_MAX).then_some(ListFault::TooMany),
        };
        if let Some(what) = fault {
            return Err(ListError { line, what });
        }
        servers.push((line, server));
    }
    Ok(servers.into_iter().map(|(_, server)| server).collect())
}

fn parse_line(content: &str) -> Result<ServerInfo, ListFault> {
    let fields: Vec<&str> = content.split_whitespace().collect();
    let (&[id, addr, key, zone], more) = fields.split_first_chunk().ok_or(ListFault::Fields)?;
    let announcer = match more {
        [] => None,
        [key] => Some(AnnounceKey(parse_key(key).ok_or(ListFault::Key)?.0)),
        _ => return Err(ListFault::Fields),
    };
    let number = |text: &str| text.parse().map_err(|_| ListFault::Number { text: text.to_owned() });
    let addr: SocketAddr = addr.parse().map_err(|_| ListFault::Address { text: addr.to_owned() })?;
    let key = parse_key(key).ok_or(ListFault::Key)?;
    Ok(ServerInfo { id: ServerId(number(id)?), addr, key, zone: number(zone)?, announcer })
}

/// The line of a server, without its end: what [`parse`] reads.
pub fn line(server: &ServerInfo) -> String {
    let ServerInfo { id, addr, key, zone, announcer } = server;
    let announcer = announcer.map_or(String::new(), |announcer| format!(" {announcer:?}"));
    format!("{} {addr} {key:?} {zone}{announcer}", id.0)
}

/// A public key from its hexadecimal digits.
pub fn parse_key(text: &str) -> Option<PublicKey> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    let mut key = [0; KEY_SIZE];
    if digits.len() != 2 * KEY_SIZE {
        return None;
    }
    key.iter_mut().zip(digits.chunks_exact(2)).for_each(|(byte, pair)| *byte = pair[0] << 4 | pair[1]);
    Some(PublicKey(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_or_refused_with_the_line() {
        let key = "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29";
        let good = format!("# pool\n\n1 10.0.0.5:7070 {key} 0\n2 [fd00::5]:7070 {key} 4 # second rack\n");
        let servers = parse(&good).unwrap();
        assert_eq!(servers.iter().map(|s| (s.id.0, s.zone)).collect::<Vec<_>>(), [(1, 0), (2, 4)]);
        assert_eq!(format!("{:?}", servers[0].key), key);
        let signed = format!("1 10.0.0.5:7070 {key} 0 {}", key.replace('3', "4"));
        assert_eq!((line(&parse(&signed).unwrap()[0]), servers[0].announcer), (signed, None));
        let text = |text: &str| text.to_owned();
        for (list, line, what) in [
            (format!("1 10.0.0.5:7070 {key}"), 1, ListFault::Fields),
            (format!("\n1 10.0.0.5 {key} 0"), 2, ListFault::Address { text: text("10.0.0.5") }),
            (format!("x 10.0.0.5:1 {key} 0"), 1, ListFault::Number { text: text("x") }),
            (format!("1 10.0.0.5:1 {} 0", &key[1..]), 1, ListFault::Key),
            (format!("1 10.0.0.5:1 {key} 0 {}", &key[1..]), 1, ListFault::Key),
            (format!("1 10.0.0.5:1 {key} 0 {key} 0"), 1, ListFault::Fields),
            (format!("1 10.0.0.5:1 {key} 0\n1 10.0.0.6:1 {key} 0"), 2, ListFault::Twice { id: 1, first: 1 }),
        ] {
            assert_eq!(parse(&list), Err(ListError { line, what }), "{list}");
        }
    }
}
