//! What the guest asks for a file, by extended attributes `user.pagoda.…`.

use crate::codec::{Damaged, Decoder, Encoder};
use crate::limits::DELIVERIES_MAX;
use crate::refusal::Refusal;

/// When a file's bytes may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The file may be sent while it grows.
    #[default]
    Stream,
    /// The file may be sent when it has been closed: this is for programs that go back and write again.
    OnClose,
}

/// For how long a file stays after it was sealed, delivered or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ttl {
    /// As the space has it.
    #[default]
    Default,
    Never,
    Seconds(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    pub mode: Mode,
    /// How often each byte is to be delivered before its memory may be given back.
    pub deliveries: u8,
    pub ttl: Ttl,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { mode: Mode::Stream, deliveries: 1, ttl: Ttl::Default }
    }
}

/// Attributes whose names begin so are Pagoda's.
const OWN: &str = "user.pagoda.";

impl Policy {
    pub fn encode(self, record: &mut Encoder) {
        let ttl = match self.ttl {
            Ttl::Default => 0,
            Ttl::Never => 1,
            Ttl::Seconds(seconds) => 2 + u64::from(seconds),
        };
        record.number(u64::from(self.mode == Mode::OnClose)).number(u64::from(self.deliveries)).number(ttl);
    }

    pub fn decode(from: &mut Decoder<'_>) -> Result<Policy, Damaged> {
        let mode = if from.number_below(1)? == 1 { Mode::OnClose } else { Mode::Stream };
        let deliveries = from.number_below(u64::from(DELIVERIES_MAX))? as u8;
        let ttl = match from.number_below(2 + u64::from(u32::MAX))? {
            0 => Ttl::Default,
            1 => Ttl::Never,
            seconds => Ttl::Seconds((seconds - 2) as u32),
        };
        if deliveries == 0 { Err(Damaged("a file that nobody gets")) } else { Ok(Policy { mode, deliveries, ttl }) }
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
                let deliveries = number(value)?;
                if !(1..=DELIVERIES_MAX).contains(&deliveries) {
                    return Err(Refusal::BadPolicy);
                }
                Ok(Some(Policy { deliveries, ..self }))
            }
            b"ttl" if value == b"never" => Ok(Some(Policy { ttl: Ttl::Never, ..self })),
            b"ttl" => match number(value)? {
                0 => Err(Refusal::BadPolicy),
                seconds => Ok(Some(Policy { ttl: Ttl::Seconds(seconds), ..self })),
            },
            _ => Ok(None),
        }
    }

    /// Without an attribute, which then has its default.
    pub fn without(self, name: &[u8]) -> Option<Policy> {
        let default = Policy::default();
        match name.strip_prefix(OWN.as_bytes())? {
            b"mode" => Some(Policy { mode: default.mode, ..self }),
            b"readers" => Some(Policy { deliveries: default.deliveries, ..self }),
            b"ttl" => Some(Policy { ttl: default.ttl, ..self }),
            _ => None,
        }
    }
}

/// Digits alone: `parse` would also take a sign.
fn number<T: std::str::FromStr>(value: &[u8]) -> Result<T, Refusal> {
    let digits = value.iter().all(u8::is_ascii_digit).then(|| std::str::from_utf8(value).ok()).flatten();
    digits.and_then(|digits| digits.parse().ok()).ok_or(Refusal::BadPolicy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes() {
        let check = |name: &str, value: &str, expected: Result<Option<Policy>, Refusal>| {
            assert_eq!(Policy::default().with(name.as_bytes(), value.as_bytes()), expected, "{name}={value}");
        };
        let on_close = Policy { mode: Mode::OnClose, ..Policy::default() };
        check("user.pagoda.mode", "on-close", Ok(Some(on_close)));
        check("user.pagoda.mode", "later", Err(Refusal::BadPolicy));
        check("user.pagoda.readers", "3", Ok(Some(Policy { deliveries: 3, ..Policy::default() })));
        for bad in ["0", "17", "-1", "", "300", "3 "] {
            check("user.pagoda.readers", bad, Err(Refusal::BadPolicy));
        }
        let ttl = |ttl| Ok(Some(Policy { ttl, ..Policy::default() }));
        check("user.pagoda.ttl", "90", ttl(Ttl::Seconds(90)));
        check("user.pagoda.ttl", "never", ttl(Ttl::Never));
        for bad in ["0", "", "-1", "+1", "1m", "4294967296", "Never"] {
            check("user.pagoda.ttl", bad, Err(Refusal::BadPolicy));
        }
        assert_eq!(ttl(Ttl::Never).unwrap().unwrap().without(b"user.pagoda.ttl"), Some(Policy::default()));
        check("user.pagoda.job", "7", Ok(None));
        check("user.mime_type", "x", Ok(None));
        assert_eq!(on_close.without(b"user.pagoda.mode"), Some(Policy::default()));
        assert_eq!(on_close.without(b"user.pagoda.job"), None);
    }
}
