//! Extended attributes of one file or directory.

use std::collections::BTreeMap;

use crate::codec::{Damaged, Decoder, Encoder};
use crate::limits::{XATTR_BYTES_MAX, XATTR_NAME_BYTES_MAX, XATTRS_MAX};
use crate::refusal::Refusal;

/// Whether the attribute has to be there already (`XATTR_CREATE`, `XATTR_REPLACE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XattrWrite {
    Any,
    Create,
    Replace,
}

#[derive(Debug, Clone, Default)]
pub struct Xattrs {
    values: BTreeMap<Box<[u8]>, Box<[u8]>>,
}

impl Xattrs {
    pub fn get(&self, name: &[u8]) -> Result<&[u8], Refusal> {
        self.values.get(name).map(|value| &**value).ok_or(Refusal::NoXattr)
    }

    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(|name| &**name)
    }

    pub fn encode(&self, record: &mut Encoder) {
        record.number(self.values.len() as u64);
        for (name, value) in &self.values {
            record.bytes(name).bytes(value);
        }
    }

    pub fn decode(from: &mut Decoder<'_>) -> Result<Xattrs, Damaged> {
        let mut xattrs = Xattrs::default();
        for _ in 0..from.number_below(XATTRS_MAX as u64)? {
            let (name, value) = (from.bytes(XATTR_NAME_BYTES_MAX)?, from.bytes(XATTR_BYTES_MAX)?);
            xattrs.set(name, value, XattrWrite::Create).map_err(|_| Damaged("an attribute that cannot be"))?;
        }
        Ok(xattrs)
    }

    fn bytes_without(&self, name: &[u8]) -> usize {
        self.values.iter().filter(|(other, _)| &***other != name).map(|(name, value)| name.len() + value.len()).sum()
    }

    /// # Errors
    /// [`Xattrs::set`] would refuse.
    pub fn check(&self, name: &[u8], value: &[u8], how: XattrWrite) -> Result<(), Refusal> {
        if !name.starts_with(b"user.") || name.len() == b"user.".len() {
            return Err(Refusal::XattrNotKept);
        }
        let exists = self.values.contains_key(name);
        match how {
            XattrWrite::Create if exists => return Err(Refusal::XattrExists),
            XattrWrite::Replace if !exists => return Err(Refusal::NoXattr),
            _ => {}
        }
        let bytes = self.bytes_without(name) + name.len() + value.len();
        let count = self.values.len() + usize::from(!exists);
        if name.len() > XATTR_NAME_BYTES_MAX || bytes > XATTR_BYTES_MAX || count > XATTRS_MAX {
            return Err(Refusal::XattrTooLarge);
        }
        Ok(())
    }

    pub fn set(&mut self, name: &[u8], value: &[u8], how: XattrWrite) -> Result<(), Refusal> {
        self.check(name, value, how)?;
        self.values.insert(name.into(), value.into());
        Ok(())
    }

    pub fn remove(&mut self, name: &[u8]) -> Result<(), Refusal> {
        self.values.remove(name).map(|_| ()).ok_or(Refusal::NoXattr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        let mut xattrs = Xattrs::default();
        let mut set = |name: &str, bytes: usize, how| xattrs.set(name.as_bytes(), &vec![b'x'; bytes], how);
        assert_eq!(set("security.selinux", 1, XattrWrite::Any), Err(Refusal::XattrNotKept));
        assert_eq!(set("user.", 1, XattrWrite::Any), Err(Refusal::XattrNotKept));
        assert_eq!(set("user.a", 1, XattrWrite::Replace), Err(Refusal::NoXattr));
        assert_eq!(set("user.a", 4090, XattrWrite::Create), Ok(()));
        assert_eq!(set("user.a", 1, XattrWrite::Create), Err(Refusal::XattrExists));
        assert_eq!(set("user.b", 1, XattrWrite::Any), Err(Refusal::XattrTooLarge));
        assert_eq!(set("user.a", 4091, XattrWrite::Any), Err(Refusal::XattrTooLarge));
        assert_eq!(set("user.a", 0, XattrWrite::Replace), Ok(()));
        for index in 1..XATTRS_MAX {
            assert_eq!(set(&format!("user.{index}"), 1, XattrWrite::Any), Ok(()));
        }
        assert_eq!(set("user.z", 1, XattrWrite::Any), Err(Refusal::XattrTooLarge));
        assert_eq!(set(&format!("user.{}", "n".repeat(251)), 1, XattrWrite::Any), Err(Refusal::XattrTooLarge));
        xattrs.remove(b"user.a").unwrap();
        assert_eq!(xattrs.get(b"user.a"), Err(Refusal::NoXattr));
        assert_eq!(xattrs.names().count(), XATTRS_MAX - 1);
    }
}
