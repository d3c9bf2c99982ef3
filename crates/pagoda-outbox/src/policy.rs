//! What the guest asks for a file, by extended attributes `user.pagoda.…`.

use crate::codec::{Damaged, Decoder, Encoder};
use crate::limits::DELIVERIES_MAX;
use crate::refusal::Refusal;

/// When a file's bytes may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// While the file grows.
    #[default]
    Stream,
    /// When it has been closed: for programs that go back and write again.
    OnClose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    pub mode: Mode,
    /// How often each byte is to be delivered before its memory may be given back.
    pub deliveries: u8,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { mode: Mode::Stream, deliveries: 1 }
    }
}

/// Attributes whose names begin so are Pagoda's.
const OWN: &str = "user.pagoda.";

impl Policy {
    pub fn encode(self, record: &mut Encoder) {
        record.number(u64::from(self.mode == Mode::OnClose)).number(u64::from(self.deliveries));
    }

    pub fn decode(from: &mut Decoder<'_>) -> Result<Policy, Damaged> {
        let mode = if from.number_below(1)? == 1 { Mode::OnClose } else { Mode::Stream };
        let deliveries = from.number_below(u64::from(DELIVERIES_MAX))? as u8;
        if deliveries == 0 { Err(Damaged("a file that nobody gets")) } else { Ok(Policy { mode, deliveries }) }
    }

    /// With one attribute set. `None`: the attribute is not one that decides this.
    ///
    /// # Errors
    /// The value means nothing.
    pub fn with(self, name: &[u8], value: &[u8]) -> Result<Option<Policy>, Refusal> {
        let Some(own) = name.strip_prefix(OWN.as_bytes()) else { return Ok(None) };
        match own {
            b"mode" => match value {
                b"stream" => Ok(Some(Policy { mode: Mode::Stream, ..self })),
                b"on-close" => Ok(Some(Policy { mode: Mode::OnClose, ..self })),
                _ => Err(Refusal::BadPolicy),
            },
            b"readers" => {
                let text = std::str::from_utf8(value).map_err(|_| Refusal::BadPolicy)?;
                let deliveries = text.parse::<u8>().map_err(|_| Refusal::BadPolicy)?;
                if !(1..=DELIVERIES_MAX).contains(&deliveries) {
                    return Err(Refusal::BadPolicy);
                }
                Ok(Some(Policy { deliveries, ..self }))
            }
            _ => Ok(None),
        }
    }

    /// Without an attribute, which then has its default.
    pub fn without(self, name: &[u8]) -> Option<Policy> {
        let default = Policy::default();
        match name.strip_prefix(OWN.as_bytes())? {
            b"mode" => Some(Policy { mode: default.mode, ..self }),
            b"readers" => Some(Policy { deliveries: default.deliveries, ..self }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes() {
        let check = |name: &str, value: &str, expected: Result<Option<Policy>, Refusal>| {
            assert_eq!(Policy::default().with(name.as_bytes(), value.as_bytes()), expected, "{name}={value}");
        };
        let on_close = Policy { mode: Mode::OnClose, deliveries: 1 };
        check("user.pagoda.mode", "on-close", Ok(Some(on_close)));
        check("user.pagoda.mode", "later", Err(Refusal::BadPolicy));
        check("user.pagoda.readers", "3", Ok(Some(Policy { deliveries: 3, ..Policy::default() })));
        for bad in ["0", "17", "-1", "", "300", "3 "] {
            check("user.pagoda.readers", bad, Err(Refusal::BadPolicy));
        }
        check("user.pagoda.job", "7", Ok(None));
        check("user.mime_type", "x", Ok(None));
        assert_eq!(on_close.without(b"user.pagoda.mode"), Some(Policy::default()));
        assert_eq!(on_close.without(b"user.pagoda.job"), None);
    }
}
