//! What is agreed on before the first request: which export, and what both sides can do.

use crate::wire::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, EXPORT_FLAGS, GREETING_MAGIC, NAME_MAX, OPTION_HEADER_SIZE, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, READ_ONLY_FLAGS, REQUEST_MAX, Reader, export_flag, handshake_flag, info, option, option_reply,
};
use rmap::units::PAGE_SIZE;

/// Longest content of an option: a name, a query of the same length, and the lists around them.
pub const OPTION_MAX: usize = 2 * NAME_MAX + 1024;
const CLIENT_FLAGS_SIZE: usize = 4;
/// Zeros after the answer to EXPORT_NAME, unless the client does without.
const EXPORT_NAME_PADDING: usize = 124;

/// What a client and we agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    pub structured: bool,
    /// BLOCK_STATUS may be asked.
    pub base_allocation: bool,
}

/// The disk as it is offered.
#[derive(Clone, Debug)]
pub struct Offer {
    pub name: String,
    /// The length of the disk in bytes.
    pub size: u64,
    pub read_only: bool,
}

impl Offer {
    fn flags(&self, agreed: Agreed) -> u16 {
        let flags = if self.read_only { READ_ONLY_FLAGS } else { EXPORT_FLAGS };
        // Only an answer with structure could come in fragments, and the protocol has the flag clear where there is none.
        if agreed.structured { flags | export_flag::SEND_DF } else { flags }
    }

    /// The empty name is the default export, and there is one.
    fn has(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// What comes after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed than there are.
    Starved,
    /// So many bytes were used; there may be more to do.
    Used(usize),
    /// So many bytes were used; requests follow.
    Agreed(usize, Agreed),
    /// The connection is over, once what was written is sent.
    Over,
}

/// The state of a negotiation.
#[derive(Debug, Default)]
pub struct Negotiation {
    greeted: bool,
    no_zeroes: bool,
    agreed: Agreed,
}

/// What the server says first.
pub fn greet(out: &mut Vec<u8>) {
    out.extend_from_slice(GREETING_MAGIC);
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes());
}

impl Negotiation {
    /// Handles the next whole part of `input`, and appends what is to be answered to `out`.
    pub fn advance(&mut self, offer: &Offer, input: &[u8], out: &mut Vec<u8>) -> Progress {
        if !self.greeted {
            return self.client_flags(input);
        }
        let mut reader = Reader(input);
        let Some(magic) = reader.u64() else { return Progress::Starved };
        let (Some(number), Some(length)) = (reader.u32(), reader.u32()) else { return Progress::Starved };
        if magic != OPTION_MAGIC || length as usize > OPTION_MAX {
            return Progress::Over;
        }
        let Some(content) = reader.bytes(length as usize) else { return Progress::Starved };
        let used = OPTION_HEADER_SIZE + content.len();
        let mut answer = Answer { option: number, out };
        match number {
            option::EXPORT_NAME if offer.has(content) => {
                export_name(offer, self.agreed, answer.out, self.no_zeroes);
                return Progress::Agreed(used, self.agreed);
            }
            option::EXPORT_NAME => return Progress::Over,
            option::ABORT => {
                answer.with(option_reply::ACK, &[]);
                return Progress::Over;
            }
            option::LIST if content.is_empty() => answer.list(offer),
            option::STRUCTURED_REPLY if content.is_empty() => {
                self.agreed.structured = true;
                answer.with(option_reply::ACK, &[]);
            }
            option::LIST | option::STRUCTURED_REPLY => answer.with(option_reply::ERR_INVALID, &[]),
            option::INFO | option::GO => {
                let done = answer.info(offer, self.agreed, content);
                if done && number == option::GO {
                    return Progress::Agreed(used, self.agreed);
                }
            }
            option::LIST_META_CONTEXT => {
                answer.meta_context(offer, content, self.agreed.structured);
            }
            option::SET_META_CONTEXT => {
                self.agreed.base_allocation = answer.meta_context(offer, content, self.agreed.structured);
            }
            _ => answer.with(option_reply::ERR_UNSUP, &[]),
        }
        Progress::Used(used)
    }

    fn client_flags(&mut self, input: &[u8]) -> Progress {
        let Some(flags) = Reader(input).u32() else { return Progress::Starved };
        let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        if flags & !known != 0 {
            return Progress::Over;
        }
        self.greeted = true;
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Progress::Used(CLIENT_FLAGS_SIZE)
    }
}

fn export_name(offer: &Offer, agreed: Agreed, out: &mut Vec<u8>, no_zeroes: bool) {
    out.extend_from_slice(&offer.size.to_be_bytes());
    out.extend_from_slice(&offer.flags(agreed).to_be_bytes());
    if !no_zeroes {
        out.extend_from_slice(&[0; EXPORT_NAME_PADDING]);
    }
}

/// Answers to one option.
struct Answer<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl Answer<'_> {
    fn with(&mut self, kind: u32, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&self.option.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&(length as u32).to_be_bytes());
        parts.iter().for_each(|part| self.out.extend_from_slice(part));
    }

    fn list(&mut self, offer: &Offer) {
        let name = offer.name.as_bytes();
        self.with(option_reply::SERVER, &[&(name.len() as u32).to_be_bytes(), name]);
        self.with(option_reply::ACK, &[]);
    }

    /// `true` if the export was found and described.
    fn info(&mut self, offer: &Offer, agreed: Agreed, content: &[u8]) -> bool {
        let mut reader = Reader(content);
        let name = reader.text();
        let count = reader.u16();
        let (Some(name), Some(count)) = (name, count) else {
            self.with(option_reply::ERR_INVALID, &[]);
            return false;
        };
        if reader.0.len() != usize::from(count) * 2 {
            self.with(option_reply::ERR_INVALID, &[]);
            return false;
        }
        if !offer.has(name) {
            self.with(option_reply::ERR_UNKNOWN, &[]);
            return false;
        }
        let wants_name = reader.0.chunks_exact(2).any(|kind| kind == info::NAME.to_be_bytes());
        let flags = offer.flags(agreed).to_be_bytes();
        let export: [&[u8]; 3] = [&info::EXPORT.to_be_bytes(), &offer.size.to_be_bytes(), &flags];
        self.with(option_reply::INFO, &export);
        let sizes: [&[u8]; 4] = [
            &info::BLOCK_SIZE.to_be_bytes(),
            &1_u32.to_be_bytes(),
            &(PAGE_SIZE as u32).to_be_bytes(),
            &REQUEST_MAX.to_be_bytes(),
        ];
        self.with(option_reply::INFO, &sizes);
        if wants_name {
            self.with(option_reply::INFO, &[&info::NAME.to_be_bytes(), offer.name.as_bytes()]);
        }
        self.with(option_reply::ACK, &[]);
        true
    }

    /// `true` if the one context that there is was asked for.
    fn meta_context(&mut self, offer: &Offer, content: &[u8], structured: bool) -> bool {
        let setting = self.option == option::SET_META_CONTEXT;
        let asked = match queries(content) {
            Some((name, asked)) if offer.has(name) => asked,
            Some(_) => {
                self.with(option_reply::ERR_UNKNOWN, &[]);
                return false;
            }
            None => {
                self.with(option_reply::ERR_INVALID, &[]);
                return false;
            }
        };
        if !structured {
            self.with(option_reply::ERR_INVALID, &[]);
            return false;
        }
        let found = asked.exact || (!setting && (asked.namespace || asked.none));
        if found {
            let id = if setting { BASE_ALLOCATION_ID } else { 0 };
            self.with(option_reply::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()]);
        }
        self.with(option_reply::ACK, &[]);
        found
    }
}

/// What a question about contexts names.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    exact: bool,
    /// All of the namespace.
    namespace: bool,
    /// No query: all that there are.
    none: bool,
}

/// The export's name and what is asked about it. `None` if the content is not whole.
fn queries(content: &[u8]) -> Option<(&[u8], Asked)> {
    let mut reader = Reader(content);
    let name = reader.text()?;
    let count = reader.u32()?;
    let mut asked = Asked { none: count == 0, ..Asked::default() };
    for _ in 0..count {
        let query = reader.text()?;
        asked.exact |= query == BASE_ALLOCATION.as_bytes();
        asked.namespace |= query == b"base:";
    }
    reader.0.is_empty().then_some((name, asked))
}

#[cfg(test)]
mod tests;
