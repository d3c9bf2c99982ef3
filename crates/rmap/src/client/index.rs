//! Indices of the client's lists. Nothing is ever removed from such a list, so an index stays what it is for as long as the client
//! lives. Slabs of a space are indexed by their number, [`SlabNo`].

use crate::list::list_index;
pub use crate::list::{List, ListIndex};
use crate::units::SlabNo;

list_index! {
    /// A server in the client's list.
    PeerIndex
}
list_index! {
    /// A space in the client's list.
    SpaceIndex
}
list_index! {
    /// A group of slabs in its space; see `parity/layout.rs`.
    GroupIndex
}
list_index! {
    /// An operation in the client's fixed list of them.
    OpIndex
}
list_index! {
    /// A page on its way from one server to another, in the client's fixed list of them.
    CopyIndex
}
list_index! {
    /// A page that is put together from others of its group, in the client's fixed list of them.
    StripeIndex
}

impl ListIndex for SlabNo {
    /// # Panics
    /// Beyond `u32`, which no space reaches ([`super::SPACE_SLABS_MAX`]).
    fn from_usize(at: usize) -> SlabNo {
        SlabNo(u32::try_from(at).expect("fewer slabs than numbers for them"))
    }

    fn to_usize(self) -> usize {
        self.0 as usize
    }
}
