//! Names of keys in etcd. Numbers in them are hexadecimal and of fixed width, so that etcd's order of keys is the order of the
//! numbers.

use rmap::units::{ServerId, SlabNo, SpaceId};

/// The layout's version is part of every key.
const LAYOUT: &str = "/rmap/1/";

/// The keys of one pool.
#[derive(Clone, Debug)]
pub struct Keys {
    root: String,
}

impl Keys {
    pub fn new(pool: &str) -> Keys {
        Keys { root: format!("{LAYOUT}{pool}/") }
    }

    pub fn nodes(&self) -> String {
        format!("{}nodes/", self.root)
    }

    pub fn node(&self, id: ServerId) -> String {
        format!("{}nodes/{:08x}", self.root, id.0)
    }

    pub fn names(&self) -> String {
        format!("{}names/", self.root)
    }

    pub fn name(&self, name: &str) -> String {
        format!("{}names/{name}", self.root)
    }

    /// Which registers those of moves are.
    pub fn registers(&self) -> String {
        format!("{}registers", self.root)
    }

    /// The register of an attempt to move a VM.
    pub fn register(&self, attempt: u64) -> String {
        format!("{}moves/{attempt:016x}", self.root)
    }

    /// All that is kept of a space.
    pub fn space(&self, space: SpaceId) -> String {
        format!("{}spaces/{:016x}/", self.root, space.0)
    }

    pub fn owner(&self, space: SpaceId) -> String {
        format!("{}owner", self.space(space))
    }

    pub fn map(&self, space: SpaceId) -> String {
        format!("{}map/", self.space(space))
    }

    pub fn slab(&self, space: SpaceId, slab: SlabNo) -> String {
        format!("{}{:08x}", self.map(space), slab.0)
    }
}

/// The slab that a key of a map stands for. `None` if it is not one that [`Keys::slab`] makes.
pub fn slab_of(map: &str, key: &str) -> Option<SlabNo> {
    let digits = key.strip_prefix(map)?;
    let slab = SlabNo(u32::from_str_radix(digits, 16).ok()?);
    (format!("{:08x}", slab.0) == digits).then_some(slab)
}

/// The end of the range of all keys that begin with `prefix`, which ends in a byte below 0xff.
pub fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_and_read() {
        let keys = Keys::new("lab");
        let (map, slab) = (keys.map(SpaceId(0xab)), keys.slab(SpaceId(0xab), SlabNo(0x1f)));
        assert_eq!(slab, "/rmap/1/lab/spaces/00000000000000ab/map/0000001f");
        assert_eq!(keys.register(0xab), "/rmap/1/lab/moves/00000000000000ab");
        assert_eq!(slab_of(&map, &slab), Some(SlabNo(0x1f)));
        for bad in ["", "1f", "0000001F", "+000001f", "0000001fx", "00000001f"] {
            assert_eq!(slab_of(&map, &format!("{map}{bad}")), None, "{bad}");
        }
        assert_eq!(end_of("a/"), b"a0");
    }
}
