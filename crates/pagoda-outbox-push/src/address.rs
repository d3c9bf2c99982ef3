//! The other end of a connection.

use std::fmt;

/// A host and its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A name or an address, IPv6 without brackets.
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_as_they_are_written() {
        for (host, shown) in [("a.b", "a.b:80"), ("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80")] {
            assert_eq!(Address { host: host.to_owned(), port: 80 }.to_string(), shown);
        }
    }
}
