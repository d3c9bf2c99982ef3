//! Why something is refused, in words.

/// Longest text in Refused, in bytes.
pub const REFUSED_TEXT_MAX: usize = 1024;

/// The text of a refusal, capped at [`REFUSED_TEXT_MAX`] bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text {
    bytes: [u8; REFUSED_TEXT_MAX],
    len: usize,
}

impl Text {
    /// Takes as much of `text` as fits, whole characters only.
    pub fn new(text: &str) -> Text {
        let mut len = text.len().min(REFUSED_TEXT_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        let mut bytes = [0; REFUSED_TEXT_MAX];
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        Text { bytes, len }
    }

    /// The text; empty when a peer sent something that is not UTF-8.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}
