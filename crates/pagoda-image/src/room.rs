//! Whether there is room for an image.

use pagoda_core::units::{Bytes, ChunkCount, PageCount};

use crate::map::map_bytes;

/// What the configuration leaves to images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomLimits {
    /// The most that all images of the host may take.
    pub max: Option<Bytes>,
    /// Part of the file system that stays free, in percent.
    pub keep_free_percent: u8,
}

/// What there is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Size of the file system.
    pub total: Bytes,
    /// What an unprivileged user could still write.
    pub free: Bytes,
    /// What all images take.
    pub taken: Bytes,
}

/// Why an image does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// The file system would be too full.
    #[error(
        "it may need {needed}, and {free} are free, of which {kept} stay so: remove snapshots, or put them elsewhere"
    )]
    Disk { needed: Bytes, free: Bytes, kept: Bytes },
    /// The configuration says so.
    #[error("it may need {needed}, and snapshots take {taken} of the {max} that they may: remove some")]
    Limit { needed: Bytes, taken: Bytes, max: Bytes },
}

/// The most that an image will take, of a VM of so many pages, of which `filled` are not zero.
pub fn needed(pages: PageCount, filled: PageCount, state: Bytes) -> Bytes {
    let chunks: ChunkCount = pages.chunks_ceil();
    let sizes = [filled.bytes(), Bytes(map_bytes(chunks)), state, Bytes(crate::limits::MANIFEST_MAX as u64 * 2)];
    sizes.into_iter().sum()
}

/// Whether an image fits.
///
/// # Errors
/// It does not, and why.
pub fn check_room(room: Room, limits: RoomLimits, needed: Bytes) -> Result<(), NoRoom> {
    let kept = Bytes(room.total.0 / 100 * u64::from(limits.keep_free_percent.min(100)));
    if needed > room.free.saturating_sub(kept) {
        return Err(NoRoom::Disk { needed, free: room.free, kept });
    }
    match limits.max {
        Some(max) if needed > max.saturating_sub(room.taken) => Err(NoRoom::Limit { needed, taken: room.taken, max }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_image_may_need_has_to_fit() {
        let gib = Bytes::from_gib;
        let room = Room { total: gib(100), free: gib(30), taken: gib(7) };
        let check = |needed: Bytes, max: Option<Bytes>| {
            check_room(room, RoomLimits { max, keep_free_percent: 10 }, needed).map_err(|error| error.to_string())
        };
        assert_eq!(check(gib(20), None), Ok(()));
        assert!(check(gib(20) + Bytes(1), None).unwrap_err().contains("10 GiB stay so"));
        assert_eq!(check(gib(1), Some(gib(8))), Ok(()));
        assert!(check(gib(2), Some(gib(8))).unwrap_err().contains("7 GiB of the 8 GiB"));
        let full = Room { free: gib(9), ..room };
        assert!(check_room(full, RoomLimits { max: None, keep_free_percent: 10 }, Bytes(1)).is_err());
    }

    #[test]
    fn an_image_needs_its_pages_its_map_and_its_state() {
        let needed = needed(PageCount(512), PageCount(100), Bytes::from_mib(3));
        assert_eq!(needed, Bytes(100 * 4096 + 512 * 8 + (3 << 20) + (128 << 10)));
    }
}
