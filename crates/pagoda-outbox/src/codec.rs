//! Numbers and names as bytes, and back. What is read may be anything: it is damaged, and never more than was there.

/// The journal is not one that a space has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damaged(pub &'static str);

impl std::fmt::Display for Damaged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the outbox's journal is damaged: {}", self.0)
    }
}

impl std::error::Error for Damaged {}

/// Each byte of a number holds seven bits; the highest says that another one follows (LEB128).
const MORE: u8 = 0x80;
/// So many bits a number has.
const NUMBER_BITS: u32 = u64::BITS;

#[derive(Debug, Default)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    pub fn number(&mut self, mut number: u64) -> &mut Encoder {
        while number >= u64::from(MORE) {
            self.0.push(number as u8 | MORE);
            number >>= 7;
        }
        self.0.push(number as u8);
        self
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Encoder {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }
}

#[derive(Debug)]
pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> Result<u8, Damaged> {
        let (first, rest) = self.0.split_first().ok_or(Damaged("it ends too early"))?;
        self.0 = rest;
        Ok(*first)
    }

    pub fn number(&mut self) -> Result<u64, Damaged> {
        let mut number = 0;
        for shift in (0..NUMBER_BITS).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & !MORE);
            if bits << shift >> shift != bits {
                return Err(Damaged("a number is too large"));
            }
            number |= bits << shift;
            if byte & MORE == 0 {
                return Ok(number);
            }
        }
        Err(Damaged("a number is too long"))
    }

    /// A number that is at most `most`.
    pub fn number_below(&mut self, most: u64) -> Result<u64, Damaged> {
        let number = self.number()?;
        if number <= most { Ok(number) } else { Err(Damaged("a number is beyond its limit")) }
    }

    pub fn bytes(&mut self, most: usize) -> Result<&'a [u8], Damaged> {
        let length = self.number_below(most as u64)? as usize;
        if length > self.0.len() {
            return Err(Damaged("it ends too early"));
        }
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        for number in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut encoder = Encoder::default();
            encoder.number(number).bytes(b"name");
            let mut decoder = Decoder(&encoder.0);
            assert_eq!(decoder.number(), Ok(number));
            assert_eq!(decoder.bytes(4), Ok(&b"name"[..]));
            assert!(decoder.is_empty());
        }
    }

    #[test]
    fn nothing_is_taken_that_is_not_there() {
        assert!(Decoder(&[]).number().is_err());
        assert!(Decoder(&[0x80]).number().is_err());
        assert!(Decoder(&[0xff; 10]).number().is_err(), "more than 64 bits");
        assert!(Decoder(&[0x80; 11]).number().is_err());
        assert!(Decoder(&[5, 1, 2]).bytes(8).is_err());
        assert!(Decoder(&[5, 1, 2, 3, 4, 5]).bytes(4).is_err(), "beyond the limit");
    }
}
