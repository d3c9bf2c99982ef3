//! The name of a file at the server: its path in the outbox.
//!
//! Names come from the guest. They are checked here once more, so that none leads out of the place that the target names.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

/// Bytes of a key, from the documentation of S3 ("Naming Amazon S3 objects").
pub const S3_KEY_BYTES_MAX: usize = 1024;
/// What is left as it is: RFC 3986 calls these unreserved.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("the file has no name")]
    Empty,
    #[error("a part of the file's path is no name: empty, a dot, two dots, or with a slash or NUL in it")]
    BadSegment,
    #[error("the file's name is not UTF-8, or has control characters: S3 has no such keys")]
    NotForS3,
    #[error("the key would have {bytes} bytes, and S3 takes at most {S3_KEY_BYTES_MAX}")]
    TooLong { bytes: usize },
}

/// Names of directories and of the file, from the root of the outbox on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectName {
    segments: Vec<Vec<u8>>,
}

impl ObjectName {
    /// # Errors
    /// It is no path, or leads elsewhere.
    pub fn new<'a>(segments: impl IntoIterator<Item = &'a [u8]>) -> Result<ObjectName, NameError> {
        let segments: Vec<Vec<u8>> = segments.into_iter().map(<[u8]>::to_vec).collect();
        if segments.is_empty() {
            return Err(NameError::Empty);
        }
        let is_bad = |segment: &Vec<u8>| {
            matches!(segment.as_slice(), b"" | b"." | b"..") || segment.iter().any(|byte| matches!(byte, b'/' | 0))
        };
        if segments.iter().any(is_bad) {
            return Err(NameError::BadSegment);
        }
        Ok(ObjectName { segments })
    }

    /// The path as it stands in a URL.
    pub fn encoded(&self) -> String {
        let segments: Vec<String> =
            self.segments.iter().map(|segment| percent_encode(segment, RESERVED).to_string()).collect();
        segments.join("/")
    }

    /// The key in a bucket, below `prefix`, which ends with a slash unless it is empty.
    ///
    /// # Errors
    /// S3 has no such key.
    pub fn key(&self, prefix: &str) -> Result<String, NameError> {
        let segments: Option<Vec<&str>> =
            self.segments.iter().map(|segment| std::str::from_utf8(segment).ok()).collect();
        let path = segments.ok_or(NameError::NotForS3)?.join("/");
        if path.chars().any(char::is_control) {
            return Err(NameError::NotForS3);
        }
        let key = format!("{prefix}{path}");
        if key.len() > S3_KEY_BYTES_MAX {
            return Err(NameError::TooLong { bytes: key.len() });
        }
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(path: &str) -> Result<ObjectName, NameError> {
        ObjectName::new(path.split('/').map(str::as_bytes))
    }

    #[test]
    fn names_are_encoded_and_stay_below() {
        let found = name("a b/ü%?#.gz").unwrap();
        assert_eq!(found.encoded(), "a%20b/%C3%BC%25%3F%23.gz");
        assert_eq!(found.key("p/").unwrap(), "p/a b/ü%?#.gz");
        for path in ["", ".", "..", "a/..", "a//b", "/a", "a/", "a\0b"] {
            assert_eq!(name(path), Err(NameError::BadSegment), "{path:?}");
        }
        assert_eq!(ObjectName::new([]), Err(NameError::Empty));
        assert_eq!(ObjectName::new([&b"a/b"[..]]), Err(NameError::BadSegment));
    }

    #[test]
    fn keys_have_limits() {
        assert_eq!(ObjectName::new([&b"\xff"[..]]).unwrap().key(""), Err(NameError::NotForS3));
        assert_eq!(ObjectName::new([&b"a\nb"[..]]).unwrap().key(""), Err(NameError::NotForS3));
        let long = "x".repeat(S3_KEY_BYTES_MAX);
        assert_eq!(name(&long).unwrap().key("").unwrap(), long);
        assert_eq!(name(&long).unwrap().key("p/"), Err(NameError::TooLong { bytes: S3_KEY_BYTES_MAX + 2 }));
    }

    proptest! {
        #[test]
        fn what_is_encoded_has_no_meaning_to_a_server(segments in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..4)) {
            let Ok(name) = ObjectName::new(segments.iter().map(Vec::as_slice)) else { return Ok(()) };
            let encoded = name.encoded();
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%/".contains(&byte);
            prop_assert!(encoded.bytes().all(is_plain));
            prop_assert_eq!(encoded.split('/').count(), segments.len());
            let decoded: Vec<Vec<u8>> =
                encoded.split('/').map(|part| percent_encoding::percent_decode_str(part).collect()).collect();
            prop_assert_eq!(decoded, segments);
        }
    }
}
