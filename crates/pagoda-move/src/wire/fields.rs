//! Little-endian fields, one after the other.

use thiserror::Error;

/// Input that no version of the protocol produces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// Takes fields from the front of a payload.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    pub fn bytes(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed(what))?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, Malformed> {
        Ok(self.array::<1>(what)?[0])
    }

    pub fn u16(&mut self, what: &'static str) -> Result<u16, Malformed> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, Malformed> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, Malformed> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub fn u128(&mut self, what: &'static str) -> Result<u128, Malformed> {
        self.array(what).map(u128::from_le_bytes)
    }

    /// A text after its length in two bytes.
    pub fn text(&mut self, max: usize, what: &'static str) -> Result<String, Malformed> {
        let len = usize::from(self.u16(what)?);
        if len > max {
            return Err(Malformed(what));
        }
        let text = str::from_utf8(self.bytes(len, what)?).map_err(|_| Malformed(what))?;
        // It is shown to a user: no line of it may look like one of ours.
        if text.chars().any(char::is_control) { Err(Malformed(what)) } else { Ok(text.to_owned()) }
    }

    /// Entries after their number in two bytes. Room is made for at most `max`, which has been compared before.
    pub fn list<T>(
        &mut self,
        max: usize,
        what: &'static str,
        mut entry: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = usize::from(self.u16(what)?);
        if count > max {
            return Err(Malformed(what));
        }
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(entry(self)?);
        }
        Ok(list)
    }

    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes after the end of a message")) }
    }
}

/// Appends fields to the end of a payload.
#[derive(Debug)]
pub(super) struct Writer<'a>(pub &'a mut Vec<u8>);

impl Writer<'_> {
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u128(&mut self, value: u128) {
        self.bytes(&value.to_le_bytes());
    }

    /// The text on one line, cut at a letter's end if it is longer than `max`.
    pub fn text(&mut self, text: &str, max: usize) {
        let text = text.replace(char::is_control, " ");
        let text = &text[..text.floor_char_boundary(max)];
        self.u16(text.len() as u16);
        self.bytes(text.as_bytes());
    }

    pub fn list<T>(&mut self, list: &[T], max: usize, mut entry: impl FnMut(&mut Writer<'_>, &T)) {
        assert!(list.len() <= max, "{} entries, {max} fit", list.len());
        self.u16(list.len() as u16);
        list.iter().for_each(|item| entry(self, item));
    }
}
