//! Which folios guest RAM may consist of: what the daemon allows, as far as this kernel can be trusted with it.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ram;

/// Since this kernel khugepaged leaves a file alone that is registered for missing pages somewhere ("mm/khugepaged: skip shmem
/// with userfaultfd"). An older one may fill the holes of RAM with zeros, in the place of pages that are paged out.
const KHUGEPAGED_SPARES_HOLES: (u32, u32) = (6, 4);

/// The daemon allowed large folios when it first welcomed this VM.
static ALLOWED: AtomicBool = AtomicBool::new(false);

/// The daemon allows large folios.
pub fn allow() {
    ALLOWED.store(true, Ordering::Relaxed);
    advise(true);
}

/// Whether the guest's faults may fill holes with large folios. They never may where the daemon did not allow it.
pub fn advise(large: bool) {
    if is_allowed() {
        let advice = if large { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        ram::for_each_mapping(|addr, len| ram::advise(addr, len, advice));
    }
}

/// Huge pages of this range may be mapped as such, where the daemon allowed them.
pub fn advise_range(addr: usize, len: usize) {
    if is_allowed() {
        ram::advise(addr, len, libc::MADV_HUGEPAGE);
    }
}

/// RAM has just been mapped: on a kernel whose khugepaged fills holes it is kept out of its reach.
pub fn mapped(addr: usize, len: usize) {
    if must_be_small() {
        ram::advise(addr, len, libc::MADV_NOHUGEPAGE);
    }
}

/// Whether RAM may have no large folio at all, whoever asks for one: the VMM, the daemon or khugepaged.
pub fn must_be_small() -> bool {
    static SMALL: OnceLock<bool> = OnceLock::new();
    // A kernel that does not say what it is counts as old.
    *SMALL.get_or_init(|| running_kernel().is_none_or(|kernel| kernel < KHUGEPAGED_SPARES_HOLES))
}

fn is_allowed() -> bool {
    ALLOWED.load(Ordering::Relaxed) && !must_be_small()
}

fn running_kernel() -> Option<(u32, u32)> {
    // SAFETY: all-zero bytes are a valid utsname, whose fields are arrays of integers.
    let mut name: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: uname(2) writes to the structure it is given.
    let failed: c_int = unsafe { libc::uname(&raw mut name) };
    if failed != 0 {
        return None;
    }
    let release: Vec<u8> = name.release.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    version(std::str::from_utf8(&release).ok()?)
}

/// The first two numbers of a release such as `6.1.0-28-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        for (release, expected) in [
            ("6.1.0-28-amd64", Some((6, 1))),
            ("6.12.9+bpo-cloud-amd64", Some((6, 12))),
            ("7.0", Some((7, 0))),
            ("6", None),
            ("next-20260101", None),
            ("", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
        assert!((6, 1) < KHUGEPAGED_SPARES_HOLES && (6, 12) > KHUGEPAGED_SPARES_HOLES);
        assert!(running_kernel().is_some());
    }
}
