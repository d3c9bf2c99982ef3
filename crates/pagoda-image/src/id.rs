//! The id of an image, which is also the name of its directory.

use std::fmt;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// 128 random bits: who makes an image draws them. As text, 32 lower-case hexadecimal digits, which its directory is named by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId(pub u128);

/// Digits of an image's name.
const DIGITS: usize = 32;

/// A text that names no image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of an image is 32 lower-case hexadecimal digits")]
pub struct NoId;

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageId({self})")
    }
}

impl FromStr for ImageId {
    type Err = NoId;

    fn from_str(text: &str) -> Result<ImageId, NoId> {
        let is_id = text.len() == DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !is_id {
            return Err(NoId);
        }
        u128::from_str_radix(text, 16).map(ImageId).map_err(|_| NoId)
    }
}

impl Serialize for ImageId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ImageId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ImageId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written_and_only_so() {
        let id = ImageId(0x00ab);
        assert_eq!(id.to_string(), "000000000000000000000000000000ab");
        assert_eq!(id.to_string().parse(), Ok(id));
        for text in ["", "ab", "../etc", "000000000000000000000000000000AB", "+00000000000000000000000000000ab"] {
            assert_eq!(text.parse::<ImageId>(), Err(NoId), "{text}");
        }
    }
}
