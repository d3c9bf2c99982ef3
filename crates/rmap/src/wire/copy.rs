//! Where a server is to copy a slab to.

use std::net::{Ipv6Addr, SocketAddr};

use super::fields::{Malformed, u16_at, u64_at};
use crate::crypto::{KEY_SIZE, PublicKey};
use crate::units::Version;

/// Bytes of an order.
pub const ORDER_SIZE: usize = 72;

/// Slower is no copy: a slab of 64 MiB would take more than a minute.
pub const RATE_MIN: u64 = 1_000_000;

/// How far a transfer is. The numbers are the protocol's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Running = 0,
    /// Everything that was here was sent, and answered.
    Sent = 1,
    /// The other server is silent or refuses.
    Failed = 2,
}

/// The other server, and how fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOrder {
    pub key: PublicKey,
    pub addr: SocketAddr,
    pub bytes_per_second: u64,
    /// Of the slab there: tells this order from earlier ones.
    pub grant: Version,
}

impl CopyOrder {
    pub fn encode(&self) -> [u8; ORDER_SIZE] {
        let mut bytes = [0; ORDER_SIZE];
        let ip = match self.addr.ip() {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            std::net::IpAddr::V6(ip) => ip,
        };
        bytes[..KEY_SIZE].copy_from_slice(&self.key.0);
        bytes[32..48].copy_from_slice(&ip.octets());
        bytes[48..50].copy_from_slice(&self.addr.port().to_le_bytes());
        bytes[56..64].copy_from_slice(&self.bytes_per_second.to_le_bytes());
        bytes[64..].copy_from_slice(&self.grant.bits().to_le_bytes());
        bytes
    }

    /// # Errors
    /// Another length, reserved bytes, an address that nothing can be sent to, or a rate below [`RATE_MIN`].
    pub fn decode(bytes: &[u8]) -> Result<CopyOrder, Malformed> {
        if bytes.len() != ORDER_SIZE || bytes[50..56].iter().any(|byte| *byte != 0) {
            return Err(Malformed("not an order to copy"));
        }
        let (mut key, mut ip) = ([0; KEY_SIZE], [0; 16]);
        key.copy_from_slice(&bytes[..KEY_SIZE]);
        ip.copy_from_slice(&bytes[32..48]);
        let addr = SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16_at(bytes, 48));
        let bytes_per_second = u64_at(bytes, 56);
        if addr.ip().is_unspecified() || addr.ip().is_multicast() || addr.port() == 0 {
            return Err(Malformed("an order to copy to nowhere"));
        }
        if bytes_per_second < RATE_MIN {
            return Err(Malformed("an order to copy more slowly than is of use"));
        }
        let grant = Version::from_bits(u64_at(bytes, 64));
        Ok(CopyOrder { key: PublicKey(key), addr, bytes_per_second, grant })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changing this is changing the protocol.
    #[test]
    fn golden() {
        let key = PublicKey([7; KEY_SIZE]);
        let order = CopyOrder {
            key,
            addr: "10.0.0.5:7070".parse().unwrap(),
            bytes_per_second: 0x0102_0304,
            grant: Version::from_bits(9),
        };
        let bytes = order.encode();
        assert_eq!(bytes[..32], [7; 32]);
        assert_eq!(bytes[32..48], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 5]);
        assert_eq!(bytes[48..], [0x9e, 0x1b, 0, 0, 0, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(CopyOrder::decode(&bytes), Ok(order));
        let six = CopyOrder { addr: "[fd00::5]:1".parse().unwrap(), ..order };
        assert_eq!(CopyOrder::decode(&six.encode()), Ok(six));
        for wrong in ["0.0.0.0:7070", "239.1.1.1:7070", "10.0.0.5:0"] {
            let order = CopyOrder { addr: wrong.parse().unwrap(), ..order };
            assert!(CopyOrder::decode(&order.encode()).is_err(), "{wrong}");
        }
        assert!(CopyOrder::decode(&CopyOrder { bytes_per_second: RATE_MIN - 1, ..order }.encode()).is_err());
        assert!(CopyOrder::decode(&bytes[1..]).is_err());
        for at in 50..56 {
            let mut bad = bytes;
            bad[at] = 1;
            assert!(CopyOrder::decode(&bad).is_err(), "byte {at}");
        }
    }
}
